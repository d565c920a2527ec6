"""Whatever dies: the fault is undone, the record closed, the caller told. Real processes, killed for real."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from victims import end_keeper, state_of, until

from chaosgpu.changes.errors import Unreachable
from chaosgpu.node import bundle, client, ledger, places, standby
from chaosgpu.node.lock import lock_holder

NODE = [sys.executable, "-m", "chaosgpu.node.cli"]


def request(fault, arguments, seconds=30.0, **more):
    return {
        "op": "inject",
        "request": uuid.uuid4().hex,
        "run": "recovery",
        "fault": fault,
        "arguments": arguments,
        "duration_seconds": seconds,
        "allow": [],
        "owner": "peer",
        "outlive_run": False,
        "dry_run": False,
        **more,
    }


def pause(pid, seconds=30.0, **more):
    answer = client.call(request("host.pause_processes", {"target": {"pid": pid}}, seconds, **more))
    assert answer.get("state") == "active", answer
    return answer


def misplace(pid, seconds=30.0, **more):
    """A fault that does not end with its hand."""
    answer = client.call(request("numa.misplace_processes", {"target": {"pid": pid}, "cpus": [1]}, seconds, **more))
    assert answer.get("state") == "active", answer
    return answer


def recent(identity):
    return next(f for f in client.call({"op": "list", "recent": True})["faults"] if f["injection"] == identity)


def standby_of(keeper):
    """The standby that has joined this keeper."""
    found = []

    def joined():
        hello = client.call({"op": "hello"})
        found[:] = [hello["standby"]] if hello["pid"] == keeper and hello["standby"] else []
        return found

    assert until(joined)
    return found[0]


def misplaced(pid):
    return os.sched_getaffinity(pid) == {1}


# --- deaths


def test_a_killed_keeper_is_replaced_and_the_fault_keeps_its_deadline(sleeper):
    answer = misplace(sleeper.pid, 2.0)
    os.kill(standby.lock_holder(), signal.SIGKILL)
    assert until(lambda: standby.lock_holder() not in (0, None))
    assert recent(answer["injection"])["state"] == "active"
    assert misplaced(sleeper.pid)
    assert until(lambda: not misplaced(sleeper.pid), 4)
    assert until(lambda: recent(answer["injection"])["state"] == "closed")


def test_kills_100_ms_apart_change_nothing(sleeper):
    answer = misplace(sleeper.pid, 3.0)
    for _ in range(10):
        os.kill(standby.lock_holder(), signal.SIGKILL)
        time.sleep(0.1)
    assert until(lambda: not misplaced(sleeper.pid), 5)
    assert until(lambda: recent(answer["injection"])["state"] == "closed")


def test_a_killed_standby_is_replaced(sleeper):
    pause(sleeper.pid)
    keeper = standby.lock_holder()
    first = standby_of(keeper)
    os.kill(first, signal.SIGKILL)
    assert until(lambda: standby_of(keeper) != first)
    os.kill(keeper, signal.SIGKILL)
    assert until(lambda: standby.lock_holder() not in (0, keeper))
    assert until(lambda: state_of(sleeper.pid) == "S")


def test_keeper_and_standby_killed_together_leave_exactly_what_the_readme_says(sleeper, threaded):
    pause(sleeper.pid)
    answer = misplace(threaded.pid, 2.0)
    keeper = standby.lock_holder()
    guard = standby_of(keeper)
    os.kill(guard, signal.SIGSTOP)
    os.kill(keeper, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)
    assert until(lambda: state_of(sleeper.pid) == "S", 1)  # ends with its holder
    time.sleep(2.5)
    assert standby.lock_holder() == 0
    assert misplaced(threaded.pid)  # waits for a sweep, a command or a boot
    done = subprocess.run([*NODE, "sweep"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert until(lambda: not misplaced(threaded.pid), 2)
    assert recent(answer["injection"])["state"] == "closed"


def test_a_stopped_keeper_is_replaced_within_two_seconds(sleeper):
    pause(sleeper.pid, 60.0)
    keeper = standby.lock_holder()
    os.kill(keeper, signal.SIGSTOP)
    assert until(lambda: standby.lock_holder() not in (0, keeper), 4)
    assert until(lambda: state_of(sleeper.pid) == "S", 2)
    assert not Path(f"/proc/{keeper}").exists() or state_of(keeper) == "Z"


def test_a_killed_hand_ends_its_fault_and_the_record(sleeper):
    answer = pause(sleeper.pid)
    tracer = next(
        int(line.split()[1])
        for line in Path(f"/proc/{sleeper.pid}/status").read_text().splitlines()
        if line.startswith("TracerPid")
    )
    os.kill(tracer, signal.SIGKILL)
    assert until(lambda: state_of(sleeper.pid) == "S", 1)
    assert until(lambda: recent(answer["injection"])["state"] == "closed")
    assert recent(answer["injection"])["ended_early"]


def test_a_dead_helper_ends_the_fault_early(busy):
    answer = client.call(request("host.slow_processes", {"target": {"pid": busy.pid}, "percent": 20, "how": "duty"}))
    os.kill(answer["changed"][0]["observed"]["pid"], signal.SIGKILL)
    assert until(lambda: recent(answer["injection"])["state"] == "closed")
    assert "ended before its time" in recent(answer["injection"])["cause"]
    assert until(lambda: state_of(busy.pid) == "R")


OWNER = """
import json, sys, time
from chaosgpu.node import client
print(json.dumps(client.call(json.loads(sys.argv[1]))), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("outlives", [False, True])
def test_the_owner_is_killed(spawn, sleeper, outlives):
    asked = request("numa.misplace_processes", {"target": {"pid": sleeper.pid}, "cpus": [1]}, 3.0, outlive_run=outlives)
    owner = spawn(sys.executable, "-c", OWNER, json.dumps(asked), ready=True)
    assert misplaced(sleeper.pid)
    owner.kill()
    owner.wait()
    assert until(lambda: not misplaced(sleeper.pid), 1) is not outlives
    assert until(lambda: not misplaced(sleeper.pid), 5)


def test_the_owner_dies_while_the_keeper_is_dead(spawn, sleeper):
    asked = request("numa.misplace_processes", {"target": {"pid": sleeper.pid}, "cpus": [1]}, 60.0)
    owner = spawn(sys.executable, "-c", OWNER, json.dumps(asked), ready=True)
    guard = standby_of(standby.lock_holder())
    os.kill(guard, signal.SIGSTOP)
    os.kill(standby.lock_holder(), signal.SIGKILL)
    owner.kill()
    owner.wait()
    os.kill(guard, signal.SIGCONT)
    assert until(lambda: not misplaced(sleeper.pid), 3)


def test_sigterm_of_the_keeper_undoes_everything_first(sleeper, threaded):
    pause(sleeper.pid)
    misplace(threaded.pid)
    end_keeper()
    assert until(lambda: state_of(sleeper.pid) == "S")
    assert not misplaced(threaded.pid)
    assert not os.path.exists(places.socket_path())


def test_a_caller_that_hangs_up_before_the_answer_gets_no_fault(busy):
    with client.Client() as caller:
        asked = request("host.slow_processes", {"target": {"pid": busy.pid}, "percent": 20})
        caller.sock.sendall((json.dumps(asked) + "\n").encode())
        assert until(lambda: client.call({"op": "list"})["faults"] != [])
    assert until(lambda: client.call({"op": "list"})["faults"] == [])
    assert "/chaosgpu-" not in Path(f"/proc/{busy.pid}/cgroup").read_text()


# --- requests


def test_a_repeated_request_gets_the_answer_and_no_second_fault(sleeper):
    asked = request("host.pause_processes", {"target": {"pid": sleeper.pid}})
    first, second = client.call(asked), client.call(asked)
    assert first["injection"] == second["injection"]
    os.kill(standby.lock_holder(), signal.SIGKILL)
    assert until(lambda: standby.lock_holder() != 0)
    third = client.call(asked)
    assert third["injection"] == first["injection"]
    assert len(client.call({"op": "list", "recent": True})["faults"]) == 1


def test_two_callers_on_one_resource(sleeper):
    first = pause(sleeper.pid)
    second = client.call(request("host.pause_processes", {"target": {"pid": sleeper.pid}}))
    assert f"is held by injection {first['injection']}" in second["error"]["message"] or "stopped already" in str(
        second
    )


def test_another_run_is_refused_unless_it_says_so(sleeper, threaded):
    pause(sleeper.pid)
    asked = request("host.pause_processes", {"target": {"pid": threaded.pid}}, run="another")
    assert "run recovery has a fault open" in client.call(asked)["error"]["message"]
    assert client.call({**asked, "request": "again", "allow": ["concurrent"]})["state"] == "active"


def test_two_reverts_at_once_both_get_the_truth(sleeper):
    answer = pause(sleeper.pid)
    told = []

    def revert():
        told.append(client.call({"op": "revert", "ids": [answer["injection"]]})["reverted"])

    threads = [threading.Thread(target=revert) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(len(entries), entries[0]["state"]) for entries in told] == [(1, "closed"), (1, "closed")]


@pytest.mark.parametrize(
    "damage",
    [
        {"duration_seconds": float("nan")},
        {"duration_seconds": float("inf")},
        {"duration_seconds": -1},
        {"duration_seconds": "soon"},
        {"allow": "all"},
        {"arguments": []},
        {"fault": "host.nothing"},
        {"dry_run": None},
        {"run": 7},
        {"op": "conquer"},
    ],
)
def test_a_malformed_request_is_answered_and_touches_nothing(sleeper, damage):
    asked = {**request("host.pause_processes", {"target": {"pid": sleeper.pid}}), **damage}
    with client.Client() as caller:
        caller.sock.sendall((json.dumps(asked) + "\n").encode())
        answer = json.loads(caller.sock.makefile().readline())
    assert "error" in answer
    assert state_of(sleeper.pid) not in "tT"
    assert client.call({"op": "list"})["faults"] == []


def test_noise_on_the_socket_does_not_hurt(sleeper):
    pause(sleeper.pid)
    for noise in (b"\0\xff\n", b"{}\n", b"[1]\n", b'{"op":\n', b"x" * 100000):
        with client.Client() as caller:
            caller.sock.sendall(noise)
    assert len(client.call({"op": "list"})["faults"]) == 1


def test_an_other_user_is_not_heard(sleeper):
    pause(sleeper.pid)
    os.chmod(places.socket_path(), 0o666)
    os.chmod(places.run_dir(), 0o755)
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({places.socket_path()!r}); print(s.recv(10))"
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3", "-c", code], capture_output=True, text=True
    )
    assert done.stdout == "b''\n"
    os.chmod(places.run_dir(), 0o700)


# --- the environment


def test_the_environment_may_be_deleted_in_mid_fault(tmp_path, sleeper):
    """The caller's package and Python environment vanish: the keeper runs from its own copy by the system's Python."""
    copy = tmp_path / "site"
    shutil.copytree(Path(bundle.__file__).parents[1], copy / "chaosgpu")
    code = OWNER.replace("time.sleep(600)", "sys.stdin.read()")
    asked = request("numa.misplace_processes", {"target": {"pid": sleeper.pid}, "cpus": [1]}, 3.0, outlive_run=True)
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(asked)], env=environment, check=True, stdin=subprocess.DEVNULL
    )
    assert misplaced(sleeper.pid)
    shutil.rmtree(copy)
    assert until(lambda: not misplaced(sleeper.pid), 6)


@pytest.fixture
def small_state(tmp_path, monkeypatch):
    """A state directory on a filesystem of 256 KiB."""
    point = tmp_path / "state"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "state", str(point)], check=True)
    monkeypatch.setenv("CHAOSGPU_STATE", str(point))
    yield point
    end_keeper()
    subprocess.run(["umount", "-l", str(point)], check=True)


def fill(point):
    fd = os.open(point / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError:
        os.close(fd)


def test_a_full_state_filesystem_refuses_the_fault(small_state, sleeper):
    client.call({"op": "hello"})
    fill(small_state)
    answer = client.call(request("host.pause_processes", {"target": {"pid": sleeper.pid}}))
    assert "cannot be written" in answer["error"]["message"]
    assert until(lambda: state_of(sleeper.pid) == "S")


def test_a_state_filesystem_that_fills_up_later_delays_no_undo(small_state, sleeper):
    answer = misplace(sleeper.pid, 2.0)
    fill(small_state)
    assert until(lambda: not misplaced(sleeper.pid), 4)
    assert until(lambda: recent(answer["injection"])["state"] == "closed")
    (record,) = [r for r in ledger.read_all(str(small_state)) if r.id == answer["injection"]]
    assert record.state == "closed"  # the room was there before it was needed


def test_a_ledger_in_another_directory_is_not_forgotten(tmp_path, monkeypatch, sleeper):
    monkeypatch.setenv("CHAOSGPU_STATE", str(tmp_path / "first"))
    misplace(sleeper.pid, 2.0)
    keeper = standby.lock_holder()
    guard = standby_of(keeper)
    os.kill(guard, signal.SIGSTOP)
    os.kill(keeper, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)
    monkeypatch.setenv("CHAOSGPU_STATE", str(tmp_path / "second"))
    client.call({"op": "hello"})
    assert until(lambda: not misplaced(sleeper.pid), 4)


# --- records


def stuck_record(text):
    """Put a record where a keeper that is not running will find it."""
    places.private_dir(places.run_dir())
    path = Path(places.run_dir(), "feedface00.record")
    path.write_bytes(text)
    return path


def planned(**more):
    return {
        "id": "feedface00",
        "request": "r",
        "run": "old",
        "owner": "peer",
        "owner_process": None,
        "outlive_run": True,
        "fault": "host.pause_processes",
        "arguments": {"target": {"pid": [1]}},
        "allow": [],
        "boot_id": places.boot_id(),
        "at": time.time(),
        "deadline_boottime": places.boottime() + 60,
        "deadline_wall": time.time() + 60,
        "duration_seconds": 60,
        "facts": {"processes": []},
        "warnings": [],
        "changes": [],
        "shell": [],
        "keys": [],
        "needs": [],
        "bounds": [],
        **more,
    }


def lines(*documents):
    return b"".join(ledger._line(document) for document in documents)


def test_a_damaged_first_line_is_stuck_and_loud():
    told = {"changed": [{"undo_by_hand": "echo first made, last undone"}, {"undo_by_hand": "echo last made"}]}
    text = lines({"line": "planned", "schema": 1, **planned()}, {"line": "active", "result": told})
    stuck_record(b"X" + text[1:])
    done = subprocess.run([*NODE, "list"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 3
    assert done.stdout.startswith("STUCK feedface00")
    assert "its first line is damaged" in done.stdout
    assert "abandon feedface00 --reason" in done.stdout
    record = subprocess.run([*NODE, "record", "feedface00"], capture_output=True, text=True, timeout=30)
    assert record.stdout.endswith("undo by hand, in this order:\n  echo last made\n  echo first made, last undone\n"), (
        record.stdout
    )
    abandoned = subprocess.run([*NODE, "abandon", "feedface00", "--reason", "seen to"], capture_output=True, timeout=30)
    assert abandoned.returncode == 0
    assert client.call({"op": "list"})["faults"] == []


def test_a_newer_schema_is_not_guessed_at():
    stuck_record(lines({"line": "planned", "schema": ledger.SCHEMA + 1, **planned()}))
    (told,) = client.call({"op": "list"})["faults"]
    assert told["state"] == "stuck"
    assert "a newer version wrote it" in told["stuck"][0]
    client.call({"op": "abandon", "id": "feedface00", "reason": "test"})


def test_a_change_of_an_unknown_kind_is_stuck_not_closed():
    stuck_record(lines({"line": "planned", "schema": 1, **planned(changes=[{"kind": "warp.core"}])}))
    assert until(lambda: client.call({"op": "list"})["faults"][0]["state"] == "stuck")
    assert "warp.core" in client.call({"op": "list"})["faults"][0]["stuck"][0]
    client.call({"op": "abandon", "id": "feedface00", "reason": "test"})


def test_a_record_of_another_boot_is_closed_as_lost():
    change = {"kind": "process.traced", "bound": "fd", "pid": 1, "start": 1}
    stuck_record(lines({"line": "planned", "schema": 1, **planned(boot_id="another", changes=[change])}))
    client.call({"op": "hello"})
    assert recent("feedface00")["verdicts"] == {"0": ["lost", "the machine was restarted"]}
    asked = ("request", "run", "fault", "arguments", "duration_seconds", "allow", "owner", "outlive_run")
    repeated = client.call({"op": "inject", "dry_run": False, **{name: planned()[name] for name in asked}})
    assert "undone before it was in place: the machine was restarted" in repeated["error"]["message"]


def test_the_lines_of_the_record_undo_by_hand(sleeper):
    answer = misplace(sleeper.pid)
    out = subprocess.run([*NODE, "record", answer["injection"]], capture_output=True, text=True, check=True).stdout
    by_hand = out.split("undo by hand, in this order:\n")[1]
    subprocess.run(["sh", "-ec", by_hand], check=True, capture_output=True)
    assert not misplaced(sleeper.pid)
    told = client.call({"op": "revert"})["reverted"][0]
    assert told["verdicts"]["0"][0] == "already"


def test_takeover_replaces_a_keeper_that_does_not_answer(sleeper):
    client.call({"op": "hello"})
    keeper = standby.lock_holder()
    standby_of(keeper)
    time.sleep(0.2)
    os.kill(keeper, signal.SIGSTOP)  # with nothing open nobody watches it
    with pytest.raises(Unreachable, match="takeover"):
        client.call({"op": "hello"})
    done = subprocess.run([*NODE, "takeover"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert f"killed keeper {keeper}" in done.stdout
    assert client.call({"op": "hello"})["pid"] != keeper


# --- undo under duress


def test_a_target_that_is_gone_is_lost(spawn):
    victim = spawn("sleep", "600")
    answer = misplace(victim.pid)
    victim.kill()
    victim.wait()
    told = client.call({"op": "revert"})["reverted"][0]
    assert told["verdicts"]["0"][0] == "lost"
    assert recent(answer["injection"])["ended_early"]


def test_a_namesake_with_the_same_pid_is_not_touched(spawn):
    """In a pid namespace of its own the next pid can be chosen (ns_last_pid), so the same pid comes again."""
    script = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(Path(bundle.__file__).parents[2])!r})
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_recovery import misplace
from chaosgpu.node import client
victim = subprocess.Popen(["sleep", "600"])
misplace(victim.pid)
victim.kill(); victim.wait()
time.sleep(0.05)
open("/proc/sys/kernel/ns_last_pid", "w").write(str(victim.pid - 1))
namesake = subprocess.Popen(["taskset", "1", "sleep", "600"])
assert namesake.pid == victim.pid
time.sleep(0.3)
os.sched_setaffinity(namesake.pid, [1])
told = client.call({{"op": "revert"}})["reverted"][0]
assert told["verdicts"]["0"][0] == "lost", told
assert os.sched_getaffinity(namesake.pid) == {{1}}
print("passed")
"""
    argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
    inside = 'mount -t tmpfs -o mode=755 run /run; "$@"; exit $?'
    done = subprocess.run(
        [*argv, inside, "sh", sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "passed\n", done.stderr


def test_no_process_can_be_started_for_the_undo(sleeper):
    """With fork failing the record stays open and stuck, and is undone once it works again."""
    group = Path("/sys/fs/cgroup/pids", f"chaosgpu-test-{os.getpid()}")
    if not group.parent.exists():
        pytest.fail("no pids controller")
    misplace(sleeper.pid, 60.0)
    group.mkdir()
    keeper = standby.lock_holder()
    (group / "cgroup.procs").write_text(str(keeper))
    (group / "pids.max").write_text("0")
    told = client.call({"op": "revert"})["reverted"][0]
    assert told["state"] == "stuck"
    assert "no process can be started" in told["stuck"][0]
    assert misplaced(sleeper.pid)
    (group / "pids.max").write_text("max")
    assert until(lambda: not misplaced(sleeper.pid), 10)
    assert until(lambda: client.call({"op": "list"})["faults"] == [])
    end_keeper()
    assert until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_two_hundred_records_are_kept_and_no_more(monkeypatch, sleeper):
    places.private_dir(places.run_dir())
    monkeypatch.setattr(ledger, "KEEP_CLOSED", 200)
    for number in range(205):
        record = ledger.Record.create(
            places.run_dir(), planned(id=f"{number:010x}", request=str(number), at=float(number))
        )
        record.append({"line": "closed", "at": 0, "verdicts": {}, "restored": {}, "ended_early": False})
    records = ledger.read_all(places.run_dir())
    assert [r.id for r in ledger.prune(records)] == [f"{n:010x}" for n in range(5)]
    assert len(list(Path(places.run_dir()).glob("*.record"))) == 200


def test_a_record_that_someone_deleted_hinders_no_undo(sleeper):
    answer = misplace(sleeper.pid, 60.0)
    Path(places.run_dir(), f"{answer['injection']}.record").unlink()
    told = client.call({"op": "revert"})["reverted"][0]
    assert told["state"] == "closed"
    assert not misplaced(sleeper.pid)


def test_the_line_by_hand_of_what_ends_with_its_hand_ends_it_and_nobody_else(sleeper):
    answer = pause(sleeper.pid)
    (changed,) = answer["changed"]
    assert state_of(sleeper.pid) == "t"
    subprocess.run(["sh", "-ec", changed["undo_by_hand"]], check=False)
    assert until(lambda: state_of(sleeper.pid) == "S")
    assert until(lambda: recent(answer["injection"])["state"] == "closed")
    again = subprocess.run(["sh", "-ec", changed["undo_by_hand"]], check=False)  # when it is over it harms nobody
    assert again.returncode == 0


def test_a_run_directory_that_became_read_only_is_one_line(sleeper):
    """And the fault in it goes on: the line says what to look at, and a writable one lets it be undone."""
    answer = misplace(sleeper.pid)
    keeper = client.call({"op": "hello"})["pid"]
    other = standby_of(keeper)
    os.kill(keeper, signal.SIGSTOP)  # neither replaces the other
    for pid in (other, keeper):
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: not lock_holder())
    read_only = ["mount", "-o", "remount,ro", "/run"]
    for command in (["revert", "--all"], ["takeover"], ["record", answer["injection"]]):
        assert until(lambda: subprocess.run(read_only, stderr=subprocess.DEVNULL, check=False).returncode == 0)
        try:
            done = subprocess.run([*NODE, *command], capture_output=True, text=True, check=False)
        finally:
            subprocess.run(["mount", "-o", "remount,rw", "/run"], check=True)
        assert done.returncode == 1, done
        assert "Traceback" not in done.stderr
        assert "Read-only file system" in done.stderr, done
        assert len(done.stderr.splitlines()) == 1


def test_who_is_not_root_is_told_that_roots_faults_are_not_looked_at(sleeper):
    pause(sleeper.pid)
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *NODE, "list"],
        env={**os.environ, "XDG_RUNTIME_DIR": "/tmp/nobody-has-this", "HOME": "/"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "root's (/run/chaosgpu) are not: use sudo" in done.stderr, done
