"""The whole node as an outsider sees it: what a fault may change, read before and after, and compared.

``ALLOWED`` is the written list of differences that are no leftovers, each with its reason.
"""

import json
import os
import re
import subprocess
import time
from pathlib import Path

WORKER = f"matrix-{os.getpid()}"
ALLOWED = (
    (
        r"/chaosgpu(/keeper|/standby)?(/(cgroup|cpu|io|cpuset)\.\w+)?$",
        "keeper's and standby's own cgroups stay while they are idle",
    ),
    (r"/process_api/", "of the machine that the tests run on"),
    (r"/chaosgpu-(lab|test)", "the lab and the tests of someone who works on the same machine"),
    (rf"^(?!.*/{WORKER}/).*/chaosgpu-[0-9a-f]{{10}}(/|$)", "faults of someone who works on the same machine"),
)
LIMIT_FILES = ("cpu.max", "cpu.cfs_quota_us", "io.max", "cpuset.cpus", "cgroup.subtree_control")
THROTTLES = "blkio.throttle."


def take(own_pids=()):
    """The node's state as {line name: value}; ``own_pids`` are processes whose threads are looked at."""
    lines = {}
    lines.update(_network())
    lines.update(_cgroups())
    lines.update(_mounts())
    lines.update(_sysctls())
    for pid in own_pids:
        lines.update(_process(pid))
    return lines


def difference(before, after):
    """Lines that differ and are not allowed to, as readable texts."""
    found = []
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name) and not any(re.search(pattern, name) for pattern, _ in ALLOWED):
            found.append(f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}")
    return found


def _json(*argv):
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 and done.stdout.strip() else []


def _network():
    lines = {}
    names = [""] + sorted(os.listdir("/run/netns") if os.path.isdir("/run/netns") else [])
    for name in names:
        where = ["-n", name] if name else []
        for entry in _json("tc", *where, "-j", "qdisc", "show"):
            lines[f"qdisc {name} {entry['dev']} {entry['handle']} {entry.get('parent', 'root')}"] = entry["kind"]
        for entry in _json("ip", *where, "-j", "link", "show"):
            flags = ",".join(sorted(set(entry["flags"]) - {"LOWER_UP", "NO-CARRIER"}))
            lines[f"link {name} {entry['ifname']}"] = f"{entry['mtu']} {flags}"
        for entry in _json("ip", *where, "-j", "addr", "show"):
            for address in entry["addr_info"]:
                lines[f"address {name} {entry['ifname']} {address['local']}"] = str(address["prefixlen"])
        for version in ("-4", "-6"):
            for entry in _json("ip", *where, version, "-j", "route", "show", "table", "all"):
                lines[f"route {name} {entry.get('dst')} {entry.get('dev')} {entry.get('table', 'main')}"] = "there"
        inside = ["ip", "netns", "exec", name] if name else []
        listed = subprocess.run([*inside, "nft", "list", "tables"], capture_output=True, text=True, check=False).stdout
        lines[f"nft {name}"] = listed
    return lines


UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers").exists()


def apart():
    """Put this process into cgroups of its own, so that workers beside it do not see each other's."""
    if UNIFIED:  # limits may only be set where no process is (no internal process constraint): a leaf for each
        Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+cpu +io")
        leaf()
        Path("/sys/fs/cgroup", WORKER, "cgroup.subtree_control").write_text("+cpu +io")
        return
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/blkio")):
        if Path(root, "cgroup.procs").exists():
            Path(root, WORKER).mkdir(exist_ok=True)
            Path(root, WORKER, "cgroup.procs").write_text(str(os.getpid()))


def leaf(pid=None):
    """Where everything is in one hierarchy: a cgroup of its own for a process, ours if none is named."""
    if UNIFIED:
        made = Path("/sys/fs/cgroup", WORKER, f"of-{pid or os.getpid()}")
        made.mkdir(parents=True)
        Path(made, "cgroup.procs").write_text(str(pid or os.getpid()))


def leave():
    """Take those cgroups away again."""
    tops = [*Path("/sys/fs/cgroup").glob(f"*/{WORKER}"), *Path("/sys/fs/cgroup").glob(WORKER)]
    for top in tops:
        for directory, _, _ in os.walk(top, topdown=False):
            _take_away(Path(directory), top.parent)


def _take_away(found, above):
    for pid in Path(found, "cgroup.procs").read_text().split():  # the keeper, which leaves by itself later
        try:
            Path(above, "cgroup.procs").write_text(pid)
        except ProcessLookupError:
            pass
    for _ in range(100):
        try:
            found.rmdir()
            return
        except OSError:  # somebody in it is just ending
            time.sleep(0.02)


def _cgroups():
    lines = {}
    for directory, folders, files in os.walk("/sys/fs/cgroup"):
        folders[:] = [name for name in folders if not name.startswith("matrix-") or name == WORKER]
        lines[f"cgroup {directory}"] = "there"
        for name in files:
            if name in LIMIT_FILES or (name.startswith(THROTTLES) and name.endswith("_device")):
                try:
                    lines[f"limit {directory}/{name}"] = Path(directory, name).read_text()
                except OSError:
                    pass
    return lines


def _mounts():
    lines = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        lines[f"mount {fields[4]} {fields[2]}"] = fields[5]
    for line in Path("/proc/mounts").read_text().splitlines():
        device, point = line.split()[:2]
        if device.startswith("/dev/loop"):
            try:
                lines[f"free blocks {point}"] = str(os.statvfs(point).f_bfree)
            except OSError:
                pass  # hidden below another mount
    return lines


def _sysctls():
    names = ("kernel/numa_balancing", "kernel/yama/ptrace_scope", "kernel/sched_rt_runtime_us")
    return {f"sysctl {name}": Path("/proc/sys", name).read_text() for name in names if Path("/proc/sys", name).exists()}


def _process(pid):
    lines = {}
    try:
        for tid in os.listdir(f"/proc/{pid}/task"):
            status = Path(f"/proc/{pid}/task/{tid}/status").read_text()
            wanted = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            state = wanted["State"][0]
            lines[f"thread {pid}/{tid}"] = " ".join(
                ("runs" if state in "RSD" else state, wanted["TracerPid"].strip(), wanted["Cpus_allowed_list"].strip())
            )
        lines[f"groups {pid}"] = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        lines[f"thread {pid}"] = "gone"
    return lines
