"""Limits by cgroup v2, and placement on a machine with two NUMA nodes."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaoslib.exceptions import ActivityFailed

from chaosgpu.actions import misplace_processes, slow_processes, throttle_io
from chaosgpu.rollbacks import revert, verify_restored

ROOT = Path("/sys/fs/cgroup")


def on_node(output):
    return next(iter(output["nodes"].values()))


@pytest.fixture
def group():
    made = ROOT / "work"
    made.mkdir()
    children = []

    def start(*argv, **options):
        child = subprocess.Popen(argv, **options)
        children.append(child)
        (made / "cgroup.procs").write_text(str(child.pid))
        return child

    yield made, start
    for child in children:
        child.kill()
        child.wait()
    for _ in range(100):
        try:
            made.rmdir()
            break
        except OSError:
            time.sleep(0.05)
    (ROOT / "cgroup.subtree_control").write_text("-io -cpu")


def dd_rate(made):
    line = f"echo $$ > {made}/cgroup.procs; exec dd if=/dev/zero of=/dev/vda bs=64k count=48 oflag=direct"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    return 48 * 65536 / float(re.search(r"copied, ([\d.]+) s", done.stderr).group(1))


@pytest.mark.parametrize("enabled", [True, False])
def test_dd_writes_at_the_rate_of_io_max(group, enabled):
    """Also where the io controller is off for the group: it is switched on for the fault, and off again."""
    made, start = group
    member = start("sleep", "600")
    (ROOT / "cgroup.subtree_control").write_text("+io" if enabled else "-io")
    before = (ROOT / "cgroup.subtree_control").read_text()
    throttle_io({"cgroup": "/work"}, "60s", device="/dev/vda", write_bytes_per_second="1MiB")
    assert "wbps=1048576" in (made / "io.max").read_text()
    assert abs(dd_rate(made) - 1024**2) < 0.1 * 1024**2
    told = revert()["reverted"][0]
    assert {verdict for verdict, _ in told["verdicts"].values()} == {"restored"}
    assert (ROOT / "cgroup.subtree_control").read_text() == before
    assert not enabled or (made / "io.max").read_text() == ""
    assert dd_rate(made) > 2 * 1024**2
    assert member.poll() is None


def test_a_cgroup_that_was_made_anew_is_not_touched(group):
    made, start = group
    (ROOT / "cgroup.subtree_control").write_text("+io")
    member = start("sleep", "600")
    throttle_io({"pid": member.pid}, "60s", device="/dev/vda", write_iops=50)
    member.kill()
    member.wait()
    time.sleep(0.2)
    made.rmdir()
    made.mkdir()
    device = Path("/sys/block/vda/dev").read_text().strip()
    (made / "io.max").write_text(f"{device} wiops=70")
    assert revert()["reverted"][0]["verdicts"]["0"][0] == "lost"
    assert "wiops=70" in (made / "io.max").read_text()


def test_a_limit_of_someone_else_is_refused(group):
    made, start = group
    (ROOT / "cgroup.subtree_control").write_text("+io")
    member = start("sleep", "600")
    (made / "io.max").write_text(f"{Path('/sys/block/vda/dev').read_text().strip()} rbps=1000000")
    with pytest.raises(ActivityFailed, match=r"has a limit for .* already"):
        throttle_io({"pid": member.pid}, "60s", device="/dev/vda", write_iops=50)


def cpu_share(pid, seconds):
    def used():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before, begun = used(), time.monotonic()
    time.sleep(seconds)
    return 100 * (used() - before) / (time.monotonic() - begun)


BUSY = (sys.executable, "-S", "-c", "while True: pass")


def test_a_whole_cgroup_is_capped_by_its_own_cpu_max(group):
    made, start = group
    (ROOT / "cgroup.subtree_control").write_text("+cpu")
    busy = start(*BUSY)
    slow_processes({"cgroup": "/work"}, 20, "60s")
    assert (made / "cpu.max").read_text() == "20000 100000\n"
    assert cpu_share(busy.pid, 3) < 30
    revert()
    assert (made / "cpu.max").read_text() == "max 100000\n"
    assert verify_restored()["left"] == []


def test_a_part_of_a_cgroup_is_capped_in_a_sibling(group):
    _, start = group
    busy, other = start(*BUSY), start("sleep", "600")
    slow_processes({"pid": busy.pid}, 20, "60s")
    assert "/chaosgpu-" in Path(f"/proc/{busy.pid}/cgroup").read_text()
    assert Path(f"/proc/{other.pid}/cgroup").read_text() == "0::/work\n"
    assert cpu_share(busy.pid, 3) < 30
    revert()
    assert Path(f"/proc/{busy.pid}/cgroup").read_text() == "0::/work\n"
    assert list(ROOT.glob("chaosgpu-*")) == []


@pytest.fixture
def pod():
    """A cgroup with two below it, one process in each, as a pod with two containers has them."""
    made = [ROOT / "pod", ROOT / "pod" / "one", ROOT / "pod" / "two"]
    for directory in made:
        directory.mkdir()
    started = []
    for directory in made[1:]:
        child = subprocess.Popen(BUSY)
        (directory / "cgroup.procs").write_text(str(child.pid))
        started.append(child)
    yield made[0], started
    for child in started:
        child.kill()
        child.wait()
    time.sleep(0.2)
    for directory in reversed(made):
        directory.rmdir()
    (ROOT / "cgroup.subtree_control").write_text("-cpu")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_whole_pod_is_capped_where_it_is(pod, enabled):
    """Nobody is moved: what watches the pod's own cgroups sees the same processes in them."""
    made, (one, two) = pod
    (ROOT / "cgroup.subtree_control").write_text("+cpu" if enabled else "-cpu")
    slow_processes({"cgroup": "/pod"}, 20, "60s", how="cgroup")
    assert (made / "cpu.max").read_text() == "20000 100000\n"
    assert Path(f"/proc/{one.pid}/cgroup").read_text() == "0::/pod/one\n"
    assert cpu_share(one.pid, 1.5) + cpu_share(two.pid, 1.5) < 35
    told = revert()["reverted"][0]
    assert {verdict for verdict, _ in told["verdicts"].values()} == {"restored"}
    assert ("cpu" in (ROOT / "cgroup.subtree_control").read_text().split()) is enabled
    assert not enabled or (made / "cpu.max").read_text() == "max 100000\n"


def test_a_bystander_in_a_cgroup_below_is_not_slowed(pod):
    made, (one, bystander) = pod
    (made / "cgroup.procs").write_text(str(one.pid))
    slow_processes({"pid": one.pid}, 10, "60s", how="cgroup")
    assert "/chaosgpu-" in Path(f"/proc/{one.pid}/cgroup").read_text()
    assert Path(f"/proc/{bystander.pid}/cgroup").read_text() == "0::/pod/two\n"
    assert cpu_share(bystander.pid, 1.5) > 50
    revert()
    assert Path(f"/proc/{one.pid}/cgroup").read_text() == "0::/pod\n"


def test_a_limit_is_not_built_on_a_controller_that_another_fault_takes_away(pod):
    """The first switches the controller on for both; its end would end the second's limit too."""
    _, (one, two) = pod
    (ROOT / "cgroup.subtree_control").write_text("-cpu")
    for child in (one, two):
        (ROOT / "pod" / "cgroup.procs").write_text(str(child.pid))
    slow_processes({"pid": one.pid}, 20, "60s", how="cgroup")
    with pytest.raises(ActivityFailed, match=r"subtree_control:/sys/fs/cgroup/cpu"):
        slow_processes({"pid": two.pid}, 20, "60s", how="cgroup")
    revert()
    assert "cpu" not in (ROOT / "cgroup.subtree_control").read_text()


def test_a_controller_that_someone_else_uses_by_now_stays_on(pod):
    made, (one, _) = pod
    (ROOT / "cgroup.subtree_control").write_text("-cpu")
    (made / "cgroup.procs").write_text(str(one.pid))
    slow_processes({"pid": one.pid}, 20, "60s", how="cgroup")
    (made / "cpu.max").write_text("50000 100000")
    told = revert()["reverted"][0]
    assert [verdict for verdict, _ in told["verdicts"].values()].count("superseded") == 1
    assert (made / "cpu.max").read_text() == "50000 100000\n"
    assert Path(f"/proc/{one.pid}/cgroup").read_text() == "0::/pod\n"


def test_a_limit_that_would_not_hold_in_a_sibling_is_not_escaped(pod):
    made, (one, two) = pod
    (ROOT / "cgroup.subtree_control").write_text("+cpu")
    for child in (one, two):
        (made / "cgroup.procs").write_text(str(child.pid))
    (made / "cpu.max").write_text("5000 100000")
    with pytest.raises(ActivityFailed, match="its cpu.max would not hold for them meanwhile"):
        slow_processes({"pid": one.pid}, 50, "60s", how="cgroup")
    output = on_node(slow_processes({"pid": one.pid}, 50, "60s"))
    assert output["proof"]["how"] == "duty"
    assert any("a stop-and-go cycle is used" in warning for warning in output["warnings"])
    revert()
    assert (made / "cpu.max").read_text() == "5000 100000\n"


def test_remote_is_the_other_numa_node(group):
    _, start = group
    hold = "x = bytearray(64 << 20)\nprint('ready', flush=True)\nwhile True: pass"
    argv = ["numactl", "--cpunodebind=0", "--membind=0", sys.executable, "-S", "-c", hold]
    rank = start(*argv, stdout=subprocess.PIPE, text=True)
    rank.stdout.readline()
    before = os.sched_getaffinity(rank.pid)
    output = on_node(misplace_processes({"pid": rank.pid}, "60s", numa_node="remote"))
    far = Path("/sys/devices/system/node/node1/cpulist").read_text().strip()
    shown = subprocess.run(["taskset", "-cp", str(rank.pid)], capture_output=True, text=True, check=True).stdout
    assert shown.rstrip().endswith(f": {far}")
    assert output["proof"]["placements"][str(rank.pid)]["last_ran_on"] == [int(far)]
    with pytest.raises(ActivityFailed, match=r"process:|affinity:|already"):
        misplace_processes({"pid": rank.pid}, "60s", numa_node=1)
    revert()
    assert os.sched_getaffinity(rank.pid) == before
    rank.stdout.close()


def test_a_cpuset_is_respected(group):
    made, start = group
    (ROOT / "cgroup.subtree_control").write_text("+cpuset")
    member = start("sleep", "600")
    (made / "cpuset.cpus").write_text("0")
    with pytest.raises(ActivityFailed, match="by its cpuset"):
        misplace_processes({"pid": member.pid}, "60s", cpus=[1])
    (made / "below").mkdir()  # without the controller, so the cpuset of the one above rules
    (made / "below" / "cgroup.procs").write_text(str(member.pid))
    with pytest.raises(ActivityFailed, match="by its cpuset"):
        misplace_processes({"pid": member.pid}, "60s", cpus=[1])
    (made / "cgroup.procs").write_text(str(member.pid))
    (made / "below").rmdir()
    (ROOT / "cgroup.subtree_control").write_text("-cpuset")
