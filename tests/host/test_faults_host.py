"""Pause, kill, slow and misplace on real processes, seen by ps, taskset and /proc."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaoslib.exceptions import ActivityFailed
from victims import state_of, until

from chaosgpu.actions import kill_processes, misplace_processes, pause_processes, slow_processes
from chaosgpu.faults.cgroups import hierarchy
from chaosgpu.rollbacks import revert, verify_restored


def on_node(output):
    return next(iter(output["nodes"].values()))


def ps(pid, column):
    return subprocess.run(["ps", "-o", f"{column}=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()


def cpu_share(pid, seconds=1.0):
    """Percent of one CPU, by the times that ps too reads."""

    def used():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before, begun = used(), time.monotonic()
    time.sleep(seconds)
    return 100 * (used() - before) / (time.monotonic() - begun)


def test_a_paused_process_stands_still_and_goes_on(busy, threaded):
    output = on_node(pause_processes({"pid": [busy.pid, threaded.pid]}, "30s"))
    assert ps(busy.pid, "stat").startswith("t")
    assert {state_of(int(tid)) for tid in os.listdir(f"/proc/{threaded.pid}/task")} == {"t"}
    assert cpu_share(busy.pid, 0.3) == 0
    assert output["state"] == "active"
    assert output["undo"] == f"chaos gpu revert {output['injection']}"
    assert output["supervisor"] in ("standby", "systemd", "cron", "kubelet")
    revert()
    assert ps(busy.pid, "stat").startswith("R")
    assert cpu_share(busy.pid, 0.3) > 10
    assert verify_restored() == {"verified": 1, "left": []}


def test_a_paused_process_can_be_killed_and_is_no_zombie(spawn):
    victim = spawn("sleep", "600")
    pause_processes({"pid": victim.pid}, "30s")
    victim.kill()
    assert victim.wait(timeout=5) == -9  # its real parent is told, since the tracer reaps


def test_signals_that_arrive_during_a_pause_are_delivered_after_it(spawn):
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('got it', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    victim = spawn(sys.executable, "-c", script, ready=True)
    pause_processes({"pid": victim.pid}, "30s")
    os.kill(victim.pid, 10)
    time.sleep(0.2)
    revert()
    assert victim.stdout.readline() == "got it\n"


def test_a_process_under_a_debugger_is_stopped_by_signal(spawn):
    """strace holds it already, so ptrace is refused and SIGSTOP is used, with a warning."""
    victim = spawn("sleep", "600")
    debugger = spawn("strace", "-o", "/dev/null", "-p", str(victim.pid))
    assert until(lambda: f"TracerPid:\t{debugger.pid}" in Path(f"/proc/{victim.pid}/status").read_text())
    output = on_node(pause_processes({"pid": victim.pid}, "30s"))
    assert any("SIGSTOP" in warning for warning in output["warnings"])
    assert state_of(victim.pid) in "tT"
    revert()
    assert until(lambda: state_of(victim.pid) == "S")


def test_a_stopped_process_is_refused(sleeper):
    os.kill(sleeper.pid, 19)
    assert until(lambda: state_of(sleeper.pid) == "T")
    with pytest.raises(ActivityFailed, match="is stopped already"):
        pause_processes({"pid": sleeper.pid}, "30s")


WAITS_FOR_ITS_CHILD = """
import hashlib, os, sys, threading
threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha512", b"x", b"y", 10**9), daemon=True).start()
print("ready", flush=True)
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
print("went on", flush=True)
threading.Event().wait()
"""


def test_a_thread_in_an_uninterruptible_wait_is_stopped_when_that_ends(spawn, tmp_path):
    """Its first thread waits in vfork(2) for a child that cannot open its input yet."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    victim = spawn(sys.executable, "-c", WAITS_FOR_ITS_CHILD, fifo, ready=True)
    assert until(lambda: state_of(victim.pid) == "D")
    output = on_node(pause_processes({"pid": victim.pid}, "30s"))
    assert output["proof"]["states"] == {str(victim.pid): "Dt"}
    assert cpu_share(victim.pid, 0.3) == 0
    with open(fifo, "w"):
        assert until(lambda: state_of(victim.pid) == "t")
        assert not select.select([victim.stdout], [], [], 0.2)[0]
        revert()
        assert select.select([victim.stdout], [], [], 5)[0]
    assert cpu_share(victim.pid, 0.3) > 10


def test_killed_and_not_back(sleeper):
    output = on_node(kill_processes({"pid": sleeper.pid}, "30s", watch_seconds=0.2))
    assert sleeper.wait(timeout=5) == -15
    assert output["proof"]["died"] == [sleeper.pid]
    assert output["proof"]["came_back"] == []
    assert output["state"] == "done"


def test_killed_and_brought_back_by_its_supervisor(spawn):
    spawn("sh", "-c", "while true; do sleep 654; done")
    assert until(lambda: subprocess.run(["pgrep", "-f", "^sleep 654"], stdout=subprocess.DEVNULL).returncode == 0)
    output = on_node(kill_processes({"command": "^sleep 654$"}, "30s", watch_seconds=3))
    assert [entry["command"] for entry in output["proof"]["came_back"]] == ["sleep 654"]


def test_a_deaf_process_gets_sigkill_after_the_grace(spawn):
    deaf = spawn(sys.executable, "-c", "import signal, time; signal.signal(15, lambda *_: None); print(1, flush=True)\nwhile 1: time.sleep(1)", ready=True)  # fmt: skip  # noqa: E501
    with pytest.raises(ActivityFailed, match="no process died of SIGTERM"):
        kill_processes({"pid": deaf.pid}, "30s", watch_seconds=0.2)
    output = on_node(kill_processes({"pid": deaf.pid}, "30s", grace_seconds=0.3))
    assert deaf.wait(timeout=5) == -9
    assert output["changed"][0]["observed"]["killed"] == [deaf.pid]


def test_a_gpu_client_gets_sigkill_only_by_name(spawn):
    """SIGKILL of a process that holds a GPU can freeze the GPU (NVIDIA/dcgm-exporter#84)."""
    device = Path(f"/dev/nvidia-chaosgpu-test-{os.getpid()}")
    device.touch()
    try:
        client = spawn("sh", "-c", f"exec sleep 600 3< {device}")
        assert until(lambda: Path(f"/proc/{client.pid}/comm").read_text() == "sleep\n")  # with the file open by now
    finally:
        device.unlink()
    for arguments in ({"signal": "KILL"}, {"grace_seconds": 5}):
        with pytest.raises(ActivityFailed, match=r"holds /dev/nvidia.*allow: \['kill_gpu_client'\] permits it"):
            kill_processes({"pid": client.pid}, "30s", **arguments)
    assert client.poll() is None
    output = on_node(kill_processes({"pid": client.pid}, "30s", signal="KILL", allow=["kill_gpu_client"]))
    assert any("can freeze the GPU" in warning for warning in output["warnings"])
    assert client.wait(timeout=5) == -9


TWO_BUSY_THREADS = """
import hashlib, threading
for _ in range(2):  # without the interpreter's lock: they use two CPUs
    threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha512", b"x", b"y", 10**9)).start()
print("ready", flush=True)
"""


def test_threads_on_several_cpus_are_slowed_each_and_that_is_no_failure(spawn):
    """What a duty cycle leaves is a share of the time, however many CPUs are used in it."""
    victim = spawn(sys.executable, "-c", TWO_BUSY_THREADS, ready=True)
    proof = on_node(slow_processes({"pid": victim.pid}, 80, "30s", how="duty"))["proof"]
    assert proof["exercised"]
    assert 5 < proof["stopped_percent"] < 60


def test_a_victim_of_the_duty_cycle_is_nobody_elses(busy, sleeper):
    slow_processes({"pid": [busy.pid, sleeper.pid]}, 50, "30s", how="duty")
    for pid in (busy.pid, sleeper.pid):
        with pytest.raises(ActivityFailed, match=f"process:{pid}/"):
            kill_processes({"pid": pid}, "30s", signal="USR1")


@pytest.mark.parametrize("how", ["cgroup", "duty"])
def test_a_slowed_process_gets_the_share_it_was_left(busy, how):
    free = cpu_share(busy.pid)
    output = on_node(slow_processes({"pid": busy.pid}, 20, "30s", how=how))
    slowed = cpu_share(busy.pid, 2)
    assert slowed < 30 < free
    assert output["proof"]["exercised"]
    revert()
    assert cpu_share(busy.pid) > 1.5 * slowed
    assert verify_restored()["left"] == []


def test_an_idle_process_is_capped_and_said_to_be_idle(sleeper):
    proof = on_node(slow_processes({"pid": sleeper.pid}, 20, "30s", how="cgroup"))["proof"]
    assert proof["exercised"] is False


def test_children_born_under_the_cap_go_home_too(spawn):
    parent = spawn("sh", "-c", "read x; sleep 600 & echo $!; wait", ready=False)
    before = Path(f"/proc/{parent.pid}/cgroup").read_text()
    with subprocess.Popen(
        ["sh", "-c", "read x; sleep 600 & echo $!; wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as family:
        slow_processes({"pid": family.pid}, 20, "30s", how="cgroup")
        family.stdin.write("go\n")
        family.stdin.flush()
        child = int(family.stdout.readline())
        assert "/chaosgpu-" in Path(f"/proc/{child}/cgroup").read_text()
        revert()
        assert Path(f"/proc/{child}/cgroup").read_text() == before
        os.kill(child, 9)
        family.kill()


def test_every_thread_is_misplaced_and_gets_its_own_mask_back(threaded):
    tids = [int(tid) for tid in os.listdir(f"/proc/{threaded.pid}/task")]
    os.sched_setaffinity(tids[-1], {0})
    shown = subprocess.run(["taskset", "-acp", str(threaded.pid)], capture_output=True, text=True, check=True).stdout
    misplace_processes({"pid": threaded.pid}, "30s", cpus=[1])
    assert {tuple(os.sched_getaffinity(tid)) for tid in tids} == {(1,)}
    revert()
    again = subprocess.run(["taskset", "-acp", str(threaded.pid)], capture_output=True, text=True, check=True).stdout
    assert again == shown


def test_a_thread_that_someone_else_moved_is_left_alone(threaded):
    misplace_processes({"pid": threaded.pid}, "30s", cpus=[1])
    tids = [int(tid) for tid in os.listdir(f"/proc/{threaded.pid}/task")]
    os.sched_setaffinity(tids[-1], {0})
    told = revert()["reverted"][0]
    assert told["verdicts"]["0"][0] == "superseded"
    assert told["ended_early"]
    assert os.sched_getaffinity(tids[-1]) == {0}
    assert os.sched_getaffinity(tids[0]) == {0, 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pid: misplace_processes({"pid": pid}, "30s", cpus=[4000]), "are not online"),
        (lambda pid: misplace_processes({"pid": pid}, "30s"), "one NUMA node"),
        (lambda pid: misplace_processes({"pid": pid}, "30s", numa_node=77), "numa_node 77 has no CPUs"),
        (lambda pid: misplace_processes({"pid": pid}, "30s", cpus=sorted(os.sched_getaffinity(0))), "already: give"),
        (lambda pid: pause_processes({"cgroup": "/"}, "30s"), "target.cgroup is '/'"),
        (lambda pid: pause_processes({"pid": 1}, "30s"), "it is pid 1"),
        (lambda pid: pause_processes({"pid": os.getpid()}, "30s"), "the caller's own"),
        (lambda pid: pause_processes({"command": "no such [p]rogram"}, "30s"), "no process was found for command"),
        (lambda pid: pause_processes({"pid": pid}, "2h"), "1 to 3600 seconds"),
        (lambda pid: pause_processes({"pid": pid}, "30s", allow=["everything"]), "allow is"),
        (lambda pid: pause_processes({"pid": pid}, "30s", nodes=["gpu-07"]), "nodes is"),
        (lambda pid: slow_processes({"pid": pid}, 200, "30s"), "percent is 200"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(sleeper, call, message):
    with pytest.raises(ActivityFailed, match=message) as refusal:
        call(sleeper.pid)
    assert "\n" not in str(refusal.value)
    assert state_of(sleeper.pid) not in "tT"


@pytest.fixture
def containers(spawn):
    """Two containers of one process each, as a runtime with the systemd driver lays them out."""
    root, started = Path(hierarchy("cpu").root), []
    for digit in "12":
        scope = root / f"docker-{f'feedfacecafe{os.getpid():08}{digit}':0<64}.scope"
        scope.mkdir()
        child = spawn("sleep", "600")
        (scope / "cgroup.procs").write_text(str(child.pid))
        started.append((scope, child))
    yield started
    for scope, child in started:
        child.kill()
        child.wait()
        assert until(lambda: not (scope / "cgroup.procs").read_text())  # noqa: B023
        scope.rmdir()


def test_a_container_is_found_by_the_start_of_its_id(containers):
    (_, first), (scope, second) = containers
    identity = scope.name[len("docker-") : -len(".scope")]
    with pytest.raises(ActivityFailed, match="2 containers begin with feedface .*: give more digits"):
        pause_processes({"container": "feedface"}, "30s")
    pause_processes({"container": identity[:21]}, "30s")
    assert (state_of(first.pid), state_of(second.pid)) == ("S", "t")


def test_a_dry_run_tells_the_plan_and_touches_nothing(sleeper):
    plan = on_node(pause_processes({"pid": sleeper.pid}, "30s", dry_run=True))
    assert plan["dry_run"] is True
    assert plan["changes"][0]["pid"] == sleeper.pid
    assert until(lambda: state_of(sleeper.pid) == "S")
