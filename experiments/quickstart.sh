#!/bin/sh
# A first experiment on one machine: no GPU, no cluster, nothing installed but what `clean` takes away again.
#
#   sudo experiments/quickstart.sh          environment, lab, experiment, report
#   sudo experiments/quickstart.sh clean    undo all of it
#
# Everything lies in ./.quickstart (or $CHAOSGPU_QUICKSTART). A run that was killed is completed by the next.
set -eu

project=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
home=${CHAOSGPU_QUICKSTART:-$project/.quickstart}
env=$home/env
journal=$home/journal.json
report=$home/report.html
lab=${CHAOSGPU_LAB:-/run/chaosgpu-lab}
export CHAOSGPU_CACHE="${CHAOSGPU_CACHE:-$home/cache}" XDG_STATE_HOME="$home/state" PYTHONPYCACHEPREFIX="$home/pycache"

say() { printf '%s\n' "$*"; }
fail() { printf 'quickstart: %s\n' "$*" >&2; exit 1; }
began=$(date +%s)
after() { printf '%3d s' $(($(date +%s) - began)); }

# A Python of 3.11 or later that can make environments: its name, or nothing.
find_python() {
    for python in python3 python3.14 python3.13 python3.12 python3.11; do
        "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$python"; return; }
    done
    return 0
}

apt_install() {
    say "$(after)  installing $* with apt-get (clean leaves it installed)"
    # A fresh image has no package lists.
    { apt-get -qq install -y --no-install-recommends "$@" || { apt-get -qq update && apt-get -qq install -y --no-install-recommends "$@"; }; } \
        >"$home/apt.log" 2>&1 </dev/null || return 1
}

make_environment() {
    # The project is installed in place, so only other requirements call for another environment.
    wanted=$(cksum <"$project/pyproject.toml")
    [ "$(cat "$env/made-for" 2>/dev/null)" != "$wanted" ] || return 0
    python=$(find_python)
    if [ -z "$python" ]; then
        command -v apt-get >/dev/null || fail "no Python 3.11 or later with venv was found: install one"
        export DEBIAN_FRONTEND=noninteractive
        apt_install python3-venv || fail "apt-get install python3-venv failed: see $home/apt.log"
        python=$(find_python)
        [ -n "$python" ] || { apt_install python3.11-venv || true; python=$(find_python); }
        [ -n "$python" ] || fail "this release has no Python 3.11: Debian 12, Ubuntu 22.04 and later have"
    fi
    say "$(after)  installing chaosgpu and the Chaos Toolkit into $env (a minute or two)"
    rm -rf "$env"
    "$python" -m venv "$env"
    "$env/bin/python" -m pip install -qq --disable-pip-version-check --no-input --editable "$project[report]" ||
        fail "pip could not install the project: is the package index within reach?"
    printf '%s\n' "$wanted" >"$env/made-for"
}

clean() {
    if [ -x "$env/bin/python" ] && [ -e "$env/made-for" ]; then
        "$env/bin/python" -m chaosgpu.lab down
    elif [ -d "$lab" ]; then
        # The environment is gone or half made; the lab's own code needs nothing but Python.
        python=$(find_python)
        PYTHONPATH=$project "${python:-python3}" -c 'from chaosgpu import lab; lab.down(lambda step: None)'
    fi
    rm -f "$env/made-for" # a clean that is killed from here on must not trust the environment again
    # By name, whatever CHAOSGPU_QUICKSTART points to.
    for made in env cache state pycache journal.json report.html chaostoolkit.log report.log apt.log lock .gitignore; do
        rm -rf "${home:?}/$made"
    done
    rmdir "$home" && say "removed $home"
}

[ "$(id -u)" = 0 ] || fail "not root: the lab mounts a volume and faults are real; run: sudo $0 $*"
mkdir -p "$home"
printf '*\n' >"$home/.gitignore"
# Whatever a killed run left at work (apt-get, pip, chaos) holds this lock too.
exec 9>"$home/lock"
flock -n 9 || { say "waiting for another quickstart to end"; flock 9; }

case ${1:-} in
    '') ;;
    clean) clean; exit ;;
    *) fail "'$1' is not known: give nothing, or clean" ;;
esac

make_environment
say "$(after)  bringing the lab up"
"$env/bin/python" -m chaosgpu.lab up
say "$(after)  running experiments/quickstart.json"
verdict=0
rm -f "$journal" "$report"
"$env/bin/chaos" --no-version-check --log-file "$home/chaostoolkit.log" run --rollback-strategy always \
    --journal-path "$journal" --var-file "$lab/variables.json" "$project/experiments/quickstart.json" || verdict=$?
[ -e "$journal" ] || fail "the experiment did not come to an end (chaos run: exit code $verdict): see $home/chaostoolkit.log"
say "$(after)  writing the report"
"$env/bin/chaos" --no-version-check --log-file "$home/chaostoolkit.log" report --export-format=html5 "$journal" "$report" \
    >"$home/report.log" 2>&1 || fail "the report was not written: see $home/report.log"
say
held=0
"$env/bin/python" - "$journal" <<'PYTHON' || held=$?
import json
import sys

journal = json.load(open(sys.argv[1], encoding="utf-8"))
activities = journal["run"] + journal["rollbacks"]
failed = []
for done in activities:
    # A probe of the method that says false is no failure to the toolkit: it is to the question that we ask.
    as_expected = done["status"] == "succeeded" and done["output"] is not False
    print(f"  {'ok ' if as_expected else 'BAD'} {done.get('duration', 0):5.1f} s  {done['activity']['name']}")
    if not as_expected:
        failed.append(done["activity"]["name"])
# Nor is a steady state that was not met before the method: the toolkit then calls the experiment completed.
steady = journal["steady_states"]
if not (steady.get("before") or {}).get("steady_state_met"):
    problem = "the job was not in its steady state to begin with, so no fault was injected"
elif failed:
    problem = "not as expected: " + ", ".join(failed)
elif journal["status"] != "completed" or not (steady.get("after") or {}).get("steady_state_met"):
    problem = f"the steady state did not come back (the experiment is {journal['status']})"
else:
    problem = ""
print(f"\nverdict: {problem or 'the job slowed under both faults and recovered from both'}")
sys.exit(bool(problem))
PYTHON
say "report:  $report"
say "undo:    $0 clean"
say "$(after)  done"
exit $((verdict || held))
