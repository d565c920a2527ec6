# What tests and linters need, made once in a cache outside the checkout. To be sourced, with $root set to the checkout.
#
# Sets $cache, and after `prepare` $venv311 (the oldest supported Python and toolkit) and $venv313 (the newest of both;
# empty, with the reason in $why_no_313, when it cannot be had). Safe to kill at any point, and to run twice at once.

cache=${CHAOSGPU_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/chaosgpu}
packages=(
  python3.11 python3.11-venv patchelf                                    # the Pythons
  qemu-system-x86 busybox-static kmod systemd                            # the guest
  iproute2 nftables iputils-ping ethtool rdma-core ibverbs-utils ibverbs-providers perftest
  e2fsprogs xfsprogs dmsetup util-linux fio numactl openssl procps strace
)

say() { printf '\n== %s\n' "$*"; }

install_packages() {
  local name missing=()
  for name in "${packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2> /dev/null)" = installed ] || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" != 0 ]; then
    echo "These packages are missing, and only root can install them: ${missing[*]}" >&2
    return 1
  fi
  say "installing ${missing[*]}"
  local install=(apt-get -qq -y -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 --no-install-recommends install)
  export DEBIAN_FRONTEND=noninteractive
  dpkg --configure -a # where an earlier run was killed
  "${install[@]}" "${missing[@]}" > /dev/null 2>&1 || { apt-get -qq update && "${install[@]}" "${missing[@]}"; }
}

# Print the path of Python VERSION: the system's, or else Debian SUITE's own, which is unpacked into the cache with its
# C library and never installed.
python_of() {
  local version=$1 suite=$2 home=$cache/python-$1 mirror work
  if [ -x "/usr/bin/python$version" ]; then echo "/usr/bin/python$version"; return; fi
  if [ ! -e "$home/ready" ]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Component: main' | grep -v security | head -1)
    work=$(mktemp -d "$cache/half.XXXXXX")
    mkdir -p "$work"/{lists,archives}/partial
    touch "$work/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" > "$work/sources.list"
    local apt=(
      apt-get -qq -y -o APT::Sandbox::User=root -o "Dir::State=$work" -o "Dir::State::status=$work/status"
      -o "Dir::Cache=$work" -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-
    )
    "${apt[@]}" update >&2 &&
      "${apt[@]}" --no-install-recommends --download-only install "python$version" >&2 || return 1
    rm -rf "$home"
    mkdir "$home"
    for archive in "$work"/archives/*.deb; do dpkg-deb -x "$archive" "$home" || return 1; done
    patchelf --set-interpreter "$home/usr/lib64/ld-linux-x86-64.so.2" --force-rpath \
      --set-rpath "$home/usr/lib/x86_64-linux-gnu" "$home/usr/bin/python$version" || return 1
    rm -rf "$work"
    touch "$home/ready"
  fi
  echo "$home/usr/bin/python$version"
}

# make_venv PYTHON REQUIREMENT...: print the path of an environment with this project's dependencies and entry points,
# named by a hash of what determines them. The project's code is not in there: it comes from the checkout, by PYTHONPATH.
make_venv() {
  local python=$1 key place copy
  key=$("$python" -c '
import hashlib, sys, tomllib
from pathlib import Path
root, *requirements = sys.argv[1:]
project = tomllib.loads(Path(root, "pyproject.toml").read_text())
said = [project[part] for part in ("build-system", "project", "dependency-groups")]
said += [requirements, Path(root, "chaosgpu/__init__.py").read_text()]
print(hashlib.sha256(repr(said).encode()).hexdigest()[:12])' "$root" "${@:2}") || return 1
  place=$cache/venv-$(basename "$python")-$key
  if [ ! -e "$place/ready" ]; then
    say "making $place" >&2
    rm -rf "$place"
    copy=$(mktemp -d "$cache/half.XXXXXX")
    mkdir "$copy/chaosgpu"
    cp "$root"/{pyproject.toml,README.md,LICENSE} "$copy"
    cp "$root/chaosgpu/__init__.py" "$copy/chaosgpu"
    "$python" -m venv --without-pip "$place" && "${pip[@]}" --python "$place/bin/python" install -qq --no-warn-script-location \
      --editable "$copy[report]" --group "$copy/pyproject.toml:dev" "${@:2}" || return 1
    rm -rf "$copy"
  fi
  touch "$place" "$place/ready"
  echo "$place"
}

prepare() {
  mkdir -p "$cache"
  exec 8> "$cache/lock"
  flock 8 # one at a time; the kernel frees it when we die
  rm -rf "$cache"/half.??????
  find "$cache" -maxdepth 1 -name 'venv-*' ! -newermt '2 days ago' -exec rm -rf {} +
  install_packages || return 1
  local oldest newest
  oldest=$(python_of 3.11 bookworm) || { echo "Python 3.11 could not be had: see above" >&2; return 1; }
  if [ ! -e "$cache/pip/ready" ]; then
    rm -rf "$cache/pip"
    "$oldest" -m venv "$cache/pip" && "$cache/pip/bin/python" -m pip install -qq --upgrade 'pip>=25.1' || return 1
    touch "$cache/pip/ready"
  fi
  pip=("$cache/pip/bin/python" -m pip --disable-pip-version-check)
  venv311=$(make_venv "$oldest" chaostoolkit==1.19.0 chaostoolkit-lib==1.44.0) || return 1
  venv313= why_no_313=
  if ! newest=$(python_of 3.13 trixie); then
    why_no_313="Python 3.13 could not be had from Debian: see above"
  elif ! venv313=$(make_venv "$newest"); then
    why_no_313="the dependencies could not be installed for Python 3.13: see above"
  fi
  exec 8>&-
}
