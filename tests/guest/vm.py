"""Run one command as root in a throw-away QEMU guest, under Debian's stock kernel and this machine's own userland.

The guest sees every file of this machine at the same path, read-only over 9p, with its own changes in memory. It has
two NUMA nodes (one CPU each), two virtio network cards, the disks below, cgroup v2 only, no udev, and no way out.

- vda: 512 MiB of scratch, fresh each boot; vdb, vdc, ...: the images in ``disks``, which outlive the guest
- nvme0n1 (serial CHAOS0), on a PCI bus of NUMA node 1: 512 MiB of scratch

The command gets our PATH, PYTHONPATH and pytest's variables. On the command line it runs in the current directory:
``python tests/guest/vm.py [--init systemd] [--share DIR] [--seconds N] -- COMMAND [ARGUMENT...]``.
"""

import argparse
import fcntl
import hashlib
import lzma
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TIMED_OUT = 124
DIED = 125
FROZE = 126
BEAT_SECONDS, FROZEN_SECONDS = 5, 90
CACHE = Path(os.environ.get("CHAOSGPU_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "chaosgpu"))
CONTROL = "/run/chaosgpu-guest"
PASSED_ON = ("PATH", "PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "COVERAGE_PROCESS_START")
MEMORY_MIB = 2048
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

KERNEL_OPTIONS = (
    "console=ttyS0 panic=-1 mitigations=off nokaslr tsc=reliable no_timer_check random.trust_cpu=1"
    " cgroup_no_v1=all psi=1 systemd.machine_id=c4a05000000000000000000000000001"
)

INITRD_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")

P9 = "trans=virtio,version=9p2000.L,msize=512000"

INIT = f"""#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
for m in $($b cat /mods/order); do $b insmod /mods/$m; done
$b mount -t 9p -o ro,{P9},cache=loose root /lower || $b poweroff -f
$b mount -t tmpfs -o size=50%,mode=755 rw /rw; $b mkdir /rw/up /rw/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/rw/up,workdir=/rw/work root /root
for d in proc sys dev run tmp lib/modules; do $b mkdir -p /root/$d; done
$b mount -t tmpfs -o mode=755 run /root/run; $b mkdir -p /root{CONTROL}
$b mount -t 9p -o ro,{P9},cache=loose mods /root/lib/modules
$b mount -t 9p -o {P9},cache=none control /root{CONTROL}
for d in proc sys dev; do $b mount --move /$d /root/$d; done
exec $b switch_root /root /bin/bash {CONTROL}/init
"""

# What PID 1 is for init="plain": bash, which reaps every orphan while it waits.
PLAIN = f"""
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
exec /bin/bash {CONTROL}/job
"""

# The machine's own units, generators and first-boot presets stay out: sysinit.target, which transient units pull in,
# is ours and empty. Without journald the output of services goes to the kernel's log. A userland that was a container's
# would have systemd behave as in one.
SYSTEMD = f"""
for d in /etc/systemd /lib/systemd/system-generators /lib/systemd/system/*.wants; do mount -t tmpfs none $d; done
rm -f /.dockerenv
mkdir -p /etc/systemd/system
cd /etc/systemd/system
printf '[Manager]\\nDefaultStandardOutput=kmsg\\nShowStatus=no\\n' > ../system.conf
printf '[Unit]\\nDefaultDependencies=no\\n' | tee sysinit.target basic.target shutdown.target > /dev/null
printf '[Unit]\\nDefaultDependencies=no\\nRequires=chaosgpu-job.service\\n' > default.target
printf '[Unit]\\nDefaultDependencies=no\\n[Service]\\nExecStart=/bin/bash {CONTROL}/job\\nOOMPolicy=continue\\n' \\
    > chaosgpu-job.service
cd /
exec /lib/systemd/systemd
"""

# A guest's heart is a file on the share. When it stops, the kernel tells the console what everyone waits for. Only
# what bash has built in is used, for nothing may come over 9p any more.
HEART = f"""
mkfifo -m 600 /run/never; exec 7<> /run/never; echo $SECONDS > /run/beat
while :; do read -t {BEAT_SECONDS} -u 7; echo $SECONDS > {CONTROL}/alive; echo $SECONDS > /run/beat; done &
while :; do
  read -t {BEAT_SECONDS} -u 7; read beat < /run/beat
  (( SECONDS - beat < {FROZEN_SECONDS // 2} )) || break
done && for ask in w l; do echo $ask > /proc/sysrq-trigger; done &
"""

JOB = f"""
export PATH={SYSTEM_PATH} HOME=/root TERM=dumb DM_DISABLE_UDEV=1
mkdir -p /dev/pts /dev/shm
mountpoint -q /dev/pts || mount -t devpts -o ptmxmode=666 devpts /dev/pts
mountpoint -q /dev/shm || mount -t tmpfs shm /dev/shm
mountpoint -q /sys/kernel/debug || mount -t debugfs debugfs /sys/kernel/debug
ln -sfT /proc/self/fd /dev/fd
ip link set lo up
hostname guest
modprobe -a virtio_blk virtio_net nvme
. {CONTROL}/mounts
{HEART}
setsid -w bash {CONTROL}/command > {CONTROL}/output 2>&1 < /dev/null 7>&-
echo $? > {CONTROL}/status
sync; echo b > /proc/sysrq-trigger; read -t 60
"""


@dataclass(frozen=True)
class Result:
    """What came of a boot: the command's exit status (124: time ran out, 125: died or lost power, 126: froze)."""

    exit_code: int
    output: str
    console: str

    def explain(self) -> str:
        """The ends of output and console, for a failed test to show."""
        lines = 200 if self.exit_code == FROZE else 25
        ends = ["\n".join(text.splitlines()[-lines:]) for text in (self.output, self.console)]
        return f"exit {self.exit_code}\n--- output\n{ends[0]}\n--- console\n{ends[1]}"


def boot(
    command: Sequence[str],
    share: Path,
    timeout_seconds: float,
    init: Literal["plain", "systemd"] = "plain",
    disks: Mapping[str, Path] | None = None,
    environment: Mapping[str, str] | None = None,
    cut_when: Callable[[], bool] | None = None,
    follow: bool = False,
) -> Result:
    """Boot a guest, run ``command`` in it, and wait for its end.

    ``share`` is a directory which the guest may write, at the same path. ``disks`` names images that outlive the guest,
    in order from vdb on; one that does not exist is made (64 MiB, sparse, empty). With ``init="systemd"`` PID 1 is the
    machine's systemd and the command is its only service. The power fails as soon as ``cut_when`` returns true: what
    the guest had not flushed to a disk by then is lost. With ``follow`` its output is also printed as it comes. The
    guest dies with the calling thread.
    """
    kernel = _kernel()
    share = share.resolve()
    shares = [share]
    told = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {"CHAOSGPU_GUEST": "1"}
    told |= environment or {}
    if "COVERAGE_PROCESS_START" in told:
        measured = Path(told["COVERAGE_PROCESS_START"]).resolve().parent
        if not measured.is_relative_to(share):
            shares.insert(0, measured)
    with tempfile.TemporaryDirectory(prefix="chaosgpu-guest-") as control:
        place = Path(control)
        (place / "init").write_text(PLAIN if init == "plain" else SYSTEMD)
        (place / "job").write_text(JOB)
        (place / "mounts").write_text(
            "".join(
                f'd={shlex.quote(str(path))}; mkdir -p "$d"; mount -t 9p -o {P9},cache=none share{number} "$d"\n'
                for number, path in enumerate(shares)
            )
            + "".join(f"export {name}={shlex.quote(value)}\n" for name, value in told.items())
            + f"cd {shlex.quote(str(share))}\n"
        )
        (place / "command").write_text("exec " + shlex.join(command) + "\n")
        for name in ("vda", "nvme0n1"):
            _sparse(place / name, 512)
        for number, (name, image) in enumerate((disks or {}).items()):
            if name != f"vd{'bcdefgh'[number]}":
                raise ValueError(f"disk {name}: the names are vdb, vdc, ... in this order")
            if not image.exists():
                _sparse(image, 64)
        shown = Follower(place / "output") if follow else None
        argv = _qemu(kernel, place, shares, disks or {})
        code = _power_on(argv, place, timeout_seconds, cut_when, shown)
        read = {name: _text(place / name) for name in ("status", "output", "console")}
        return Result(int(read["status"] or code), read["output"], read["console"])


class Follower:
    """Prints what is added to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.printed = 0

    def show(self) -> None:
        if self.path.exists() and self.path.stat().st_size > self.printed:
            with self.path.open("rb") as file:
                file.seek(self.printed)
                added = file.read()
            self.printed += len(added)
            sys.stdout.buffer.write(added)
            sys.stdout.flush()


def _power_on(
    argv: list[str], place: Path, seconds: float, cut_when: Callable[[], bool] | None, follower: Follower | None
) -> int:
    """Run QEMU to its end, of itself or ours; what to report where the guest's command left no status."""
    with (place / "console").open("wb") as log:
        guest = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    give_up = time.monotonic() + seconds
    beat, beaten_at = "", time.monotonic()
    try:
        while guest.poll() is None:
            if time.monotonic() > give_up:
                return TIMED_OUT
            if beat != (beat := _text(place / "alive")):
                beaten_at = time.monotonic()
            elif time.monotonic() > beaten_at + FROZEN_SECONDS:
                return FROZE
            if cut_when is not None and cut_when():
                return DIED
            if follower:
                follower.show()
            time.sleep(0.05)
        return DIED
    finally:
        guest.kill()
        guest.wait()
        if follower:
            follower.show()


def _qemu(kernel: Path, place: Path, shares: list[Path], disks: Mapping[str, Path]) -> list[str]:
    half = MEMORY_MIB // 2
    argv = ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-nodefaults", "-no-reboot", "-display", "none"]
    argv += ["-accel", "tcg,thread=multi,tb-size=512", "-machine", "q35", "-cpu", "max", "-serial", "stdio"]
    argv += ["-kernel", f"{kernel}/vmlinux", "-initrd", f"{kernel}/{_initrd(kernel)}", "-append", KERNEL_OPTIONS]
    argv += ["-smp", "2,sockets=2,cores=1,threads=1", "-m", str(MEMORY_MIB)]
    for node in (0, 1):
        argv += ["-object", f"memory-backend-ram,id=m{node},size={half}M"]
        argv += ["-numa", f"node,nodeid={node},cpus={node},memdev=m{node}"]
        argv += ["-netdev", f"hubport,id=n{node},hubid=1"]
        argv += ["-device", f"virtio-net-pci,netdev=n{node},mac=52:54:00:00:00:0{node + 1}"]
    argv += ["-numa", "dist,src=0,dst=1,val=21"]
    folders = {"root": "/,readonly=on", "mods": f"{kernel}/lib/modules,readonly=on", "control": str(place)}
    for tag, path in {**folders, **{f"share{number}": str(path) for number, path in enumerate(shares)}}.items():
        argv += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap"]
        argv += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    for name, image in {"vda": place / "vda", **disks}.items():
        argv += ["-drive", f"if=none,id={name},file={image},format=raw,cache=unsafe"]
        argv += ["-device", f"virtio-blk-pci,drive={name},serial={name}"]
    # The expander bridge comes last: later devices would land on it.
    argv += ["-device", "pxb-pcie,id=far,bus_nr=128,numa_node=1,bus=pcie.0"]
    argv += ["-device", "pcie-root-port,id=farport,bus=far,chassis=3,slot=3"]
    argv += ["-drive", f"if=none,id=nvme,file={place}/nvme0n1,format=raw,cache=unsafe"]
    return [*argv, "-device", "nvme,bus=farport,drive=nvme,serial=CHAOS0"]


def _kernel() -> Path:
    """The directory of Debian's stock kernel, taken out of its package once: vmlinux and lib/modules."""
    cache = CACHE.expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "kernel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = sorted(cache.glob("kernel-*"), key=lambda path: path.stat().st_mtime)
        if ready:
            return ready[-1]
        for half_made in cache.glob("unpacking-*"):
            shutil.rmtree(half_made)
        place = Path(tempfile.mkdtemp(prefix="unpacking-", dir=cache))
        depends = _output(["apt-cache", "depends", "linux-image-amd64"])
        (package, *_) = [line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line]
        version = package.removeprefix("linux-image-")
        _output(["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package], cwd=place)
        (archive,) = place.glob("*.deb")
        _output(["dpkg-deb", "-x", str(archive), str(place)])
        archive.unlink()
        _output(["depmod", "-b", str(place), version])
        # An uncompressed ELF kernel boots by PVH: no decompression in emulation. The offsets are in the kernel's
        # Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length.
        image = (place / f"boot/vmlinuz-{version}").read_bytes()
        offset, length = struct.unpack_from("<II", image, 0x248)
        start = ((image[0x1F1] or 4) + 1) * 512 + offset
        (place / "vmlinux").write_bytes(lzma.LZMADecompressor().decompress(image[start : start + length]))
        ready_place = cache / f"kernel-{version}"
        place.rename(ready_place)
        return ready_place


def _initrd(kernel: Path) -> str:
    """The name of the initramfs in the kernel's directory; made when INIT has changed."""
    name = f"initrd-{hashlib.sha256(INIT.encode()).hexdigest()[:12]}"
    if not (kernel / name).exists():
        with tempfile.TemporaryDirectory(prefix="initrd-", dir=kernel) as made:
            root = Path(made, "root")
            for directory in ("bin", "dev", "proc", "sys", "lower", "rw", "root", "mods"):
                (root / directory).mkdir(parents=True)
            shutil.copy(shutil.which("busybox") or "/bin/busybox", root / "bin/busybox")
            version = kernel.name.removeprefix("kernel-")
            order: list[str] = []
            for module in INITRD_MODULES:
                shown = _output(["modprobe", "-d", str(kernel), "-S", version, "--show-depends", module])
                for line in shown.splitlines():
                    path = line.removeprefix("insmod ").strip()
                    if line.startswith("insmod ") and Path(path).name not in order:
                        shutil.copy(path, root / "mods")
                        order.append(Path(path).name)
            (root / "mods/order").write_text("\n".join(order))
            (root / "init").write_text(INIT)
            (root / "init").chmod(0o755)
            _output(["sh", "-c", "find . | busybox cpio -o -H newc > ../initrd"], cwd=root)
            Path(made, "initrd").rename(kernel / name)
    return name


def _output(argv: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(argv)}: {done.stderr.strip()[-500:] or done.returncode}")
    return done.stdout


def _sparse(path: Path, mebibytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(mebibytes << 20)


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace") if path.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command in a QEMU guest.")
    parser.add_argument("--init", choices=["plain", "systemd"], default="plain")
    parser.add_argument("--share", type=Path, help="a directory the guest may write; else a new, empty one")
    parser.add_argument("--seconds", type=float, default=600, help="kill the guest after this long")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaosgpu-share-") as empty:
        command = ["env", f"--chdir={os.getcwd()}", *asked.command]
        for tries_left in (1, 0):
            result = boot(command, asked.share or Path(empty), asked.seconds, asked.init, follow=True)
            if result.exit_code in (TIMED_OUT, DIED, FROZE):
                sys.stderr.write(result.explain() + "\n")
            if result.exit_code != FROZE or not tries_left:
                break
            sys.stderr.write("The emulator stood still, not the command alone. The guest is booted once more.\n")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
