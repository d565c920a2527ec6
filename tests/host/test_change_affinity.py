"""Affinity masks of all threads, with what is born and what is moved meanwhile, as taskset and the kernel show them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from drive import by_hand, copied, undone_elsewhere
from victims import until

from chaosgpu.changes.affinity import ThreadAffinity
from chaosgpu.changes.base import ALREADY, LOST, RESTORED, SUPERSEDED, start_time_ticks
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.grip import Grip

ALL = sorted(os.sched_getaffinity(0))
LAST = [ALL[-1]]


@pytest.fixture
def grip():
    return Grip("test")


def tids(pid):
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def masks(pid):
    return {tid: sorted(os.sched_getaffinity(tid)) for tid in tids(pid)}


def now_ticks():
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def placing(child, wanted=LAST):
    old = masks(child.pid)
    surveyed = {str(tid): mask for tid, mask in old.items()}
    return ThreadAffinity(child.pid, start_time_ticks(child.pid), wanted, old[child.pid], now_ticks(), surveyed)


def test_each_thread_gets_its_own_mask_back(threaded, grip):
    own = tids(threaded.pid)[-1]
    os.sched_setaffinity(own, {ALL[0]})
    before = masks(threaded.pid)
    change = copied(placing(threaded))
    assert not change.holds(grip)
    observed = change.apply(grip)
    assert set(map(tuple, masks(threaded.pid).values())) == {tuple(LAST)}
    assert change.holds(grip)
    assert undone_elsewhere(change, observed).verdict == RESTORED
    assert masks(threaded.pid) == before
    assert not change.holds(grip)
    assert change.undo(observed, grip).verdict == ALREADY


def test_the_undo_needs_no_record_of_the_apply(threaded, grip):
    before = masks(threaded.pid)
    change = placing(threaded)
    change.apply(grip)
    assert undone_elsewhere(change, None).verdict == RESTORED
    assert masks(threaded.pid) == before


BREEDS = """
import subprocess, sys, threading, time
print("ready", flush=True)
for line in sys.stdin:
    thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
    thread.start()
    print(thread.native_id, subprocess.Popen(["sleep", "600"]).pid, flush=True)
"""


def test_threads_and_children_born_meanwhile_get_what_they_would_have_inherited(spawn, grip):
    victim = spawn(sys.executable, "-c", BREEDS, ready=True, stdin=True)
    victim.stdin.write("before\n")
    victim.stdin.flush()
    elder = int(victim.stdout.readline().split()[1])
    os.sched_setaffinity(elder, LAST)  # an older child with the same mask by its own choice
    time.sleep(0.02)
    change = placing(victim)
    observed = change.apply(grip)
    victim.stdin.write("meanwhile\n")
    victim.stdin.flush()
    thread, child = map(int, victim.stdout.readline().split())
    try:
        assert os.sched_getaffinity(thread) == os.sched_getaffinity(child) == set(LAST)
        assert change.undo(observed, grip).verdict == RESTORED
        assert os.sched_getaffinity(thread) == os.sched_getaffinity(child) == set(ALL)
        assert os.sched_getaffinity(elder) == set(LAST)
        assert not change.holds(grip)
    finally:
        for pid in (child, elder):
            os.kill(pid, 9)


def test_a_thread_that_someone_else_moved_is_left_and_named(threaded, grip):
    change = placing(threaded)
    observed = change.apply(grip)
    own = tids(threaded.pid)[-1]
    os.sched_setaffinity(own, {ALL[0]})
    verdict, detail = change.undo(observed, grip)
    assert verdict == SUPERSEDED
    assert str(own) in detail
    left = masks(threaded.pid)
    assert left.pop(own) == [ALL[0]]
    assert set(map(tuple, left.values())) == {tuple(ALL)}


def test_what_was_moved_after_the_survey_is_not_touched(threaded, grip):
    change = placing(threaded)
    os.sched_setaffinity(tids(threaded.pid)[-1], {ALL[0]})
    before = masks(threaded.pid)
    with pytest.raises(Moved, match="after its survey"):
        change.apply(grip)
    assert masks(threaded.pid) == before


def test_one_that_has_ended_is_lost_and_its_successor_is_not_touched(sleeper, grip):
    change = placing(sleeper)
    namesake = ThreadAffinity(change.pid, change.start + 1, LAST, ALL, change.since_ticks)
    with pytest.raises(Moved):
        namesake.apply(grip)
    observed = change.apply(grip)
    assert namesake.undo(observed, grip).verdict == LOST
    assert masks(sleeper.pid) == {sleeper.pid: LAST}
    sleeper.kill()
    sleeper.wait()
    assert undone_elsewhere(change, observed).verdict == LOST


def test_a_process_goes_home_though_its_first_thread_has_ended(spawn, grip):
    script = (
        "import ctypes, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    victim = spawn(sys.executable, "-c", script, ready=True, stdin=True)
    change = placing(victim)
    observed = change.apply(grip)
    victim.stdin.write("end\n")
    victim.stdin.flush()
    assert until(lambda: "State:\tZ" in Path(f"/proc/{victim.pid}/status").read_text())
    second = next(tid for tid in tids(victim.pid) if tid != victim.pid)
    assert os.sched_getaffinity(second) == set(LAST)
    assert change.undo(observed, grip).verdict == RESTORED
    assert os.sched_getaffinity(second) == set(ALL)


def test_threads_that_come_and_go_are_all_moved(spawn, grip):
    script = (
        "import threading\n"
        "def breed():\n"
        "    while True:\n"
        "        child = threading.Thread(target=lambda: None)\n"
        "        child.start()\n"
        "        child.join()\n"
        "for _ in range(3): threading.Thread(target=breed, daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "threading.Event().wait()\n"
    )
    victim = spawn(sys.executable, "-c", script, ready=True)
    surveyed = ThreadAffinity(victim.pid, start_time_ticks(victim.pid), LAST, ALL, now_ticks())
    observed = surveyed.apply(grip)
    for _ in range(20):
        assert shown(victim.pid) == {tuple(LAST)}
    assert surveyed.undo(observed, grip).verdict == RESTORED
    for _ in range(20):
        assert shown(victim.pid) == {tuple(ALL)}


def shown(pid):
    found = set()
    for tid in tids(pid):
        try:
            found.add(tuple(sorted(os.sched_getaffinity(tid))))
        except ProcessLookupError:
            pass
    return found


def test_cpus_that_the_kernel_refuses_are_told(sleeper, grip):
    change = placing(sleeper, wanted=[4000])
    with pytest.raises(ChangeFailed, match="cannot run on CPUs 4000"):
        change.apply(grip)
    assert masks(sleeper.pid) == {sleeper.pid: ALL}


def test_the_lines_for_an_operator(threaded, grip):
    change = placing(threaded)
    by_hand(change.describe().apply)
    assert change.holds(grip)
    by_hand(change.describe().undo)
    assert not change.holds(grip)
    assert shown(threaded.pid) == {tuple(ALL)}


def test_what_is_recorded_is_what_taskset_shows(threaded):
    out = subprocess.run(["taskset", "-acp", str(threaded.pid)], capture_output=True, text=True, check=True).stdout
    change = placing(threaded)
    assert len(out.splitlines()) == len(change.old) == 4
    assert json.loads(json.dumps(change.to_json()))["old"] == change.old
