"""A helper's life is its effect: the duty cycle on real processes, and every way in which it can end."""

import os
import select
import sys
import time

import pytest
from drive import copied, held_elsewhere, undone_elsewhere
from victims import state_of, until

from chaosgpu.changes.base import ALREADY, FD, REMOVED, start_time_ticks
from chaosgpu.changes.errors import ChangeFailed
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.helper import HelperProcess
from chaosgpu.helpers.tracer import tracer_of


@pytest.fixture
def grip():
    held = Grip("test")
    yield held
    held.close()


def duty(*children, percent=20):
    processes = [[child.pid, start_time_ticks(child.pid)] for child in children]
    keys = [f"process:{pid}/{start}" for pid, start in processes]
    return HelperProcess("duty", keys, {"processes": processes, "percent": percent})


def stopped_share(pid, seconds=1.0):
    """Percent of the looks at a process that find it stopped."""
    looks = []
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        looks.append(state_of(pid) == "t")
        time.sleep(0.001)
    return 100 * sum(looks) / len(looks)


def test_processes_stand_still_for_most_of_the_time(busy, threaded, grip):
    change = copied(duty(busy, threaded, percent=25))
    assert change.bound == FD
    assert change.keys() == duty(busy, threaded).keys()
    assert not change.holds(grip)
    observed = change.apply(grip)
    assert change.holds(grip)
    assert 50 < stopped_share(busy.pid) < 95
    assert 50 < stopped_share(threaded.pid) < 95
    assert change.undo(observed, grip).verdict == REMOVED
    assert start_time_ticks(observed["pid"]) is None
    assert not change.holds(grip)
    assert until(lambda: state_of(busy.pid) == "R")
    assert stopped_share(busy.pid, 0.3) == 0
    assert change.undo(observed, grip).verdict == ALREADY
    assert undone_elsewhere(change, observed).verdict == ALREADY


def test_a_helper_that_is_killed_leaves_nothing_and_is_missed(busy, grip):
    change = duty(busy)
    observed = change.apply(grip)
    os.kill(observed["pid"], 9)
    assert until(lambda: state_of(busy.pid) == "R" and not tracer_of(busy.pid))
    assert not change.holds(grip)
    with pytest.raises(ChangeFailed, match="helper duty .* ended before its time"):
        grip.tend()
    assert change.undo(observed, grip).verdict == ALREADY


def test_a_helper_dies_with_the_hand(busy, spawn):
    holder = held_elsewhere(spawn, duty(busy, percent=1))
    helper = tracer_of(busy.pid)
    assert helper not in (0, holder.pid)
    holder.kill()
    holder.wait()
    assert until(lambda: not tracer_of(busy.pid) and state_of(busy.pid) == "R")
    assert until(lambda: start_time_ticks(helper) is None)


def test_a_helper_that_cannot_begin_says_why(sleeper, spawn, grip):
    debugger = spawn("strace", "-o", "/dev/null", "-p", str(sleeper.pid))
    assert until(lambda: tracer_of(sleeper.pid) == debugger.pid)
    with pytest.raises(ChangeFailed, match=f"process {debugger.pid} traces it already"):
        duty(sleeper).apply(grip)
    assert not duty(sleeper).holds(grip)


def test_a_namesake_of_a_victim_is_never_stopped(busy, sleeper, grip):
    """The number of a victim that has ended may be another's by the next period."""
    change = duty(busy, sleeper)
    change.arguments["processes"][0][1] += 1
    change.apply(grip)
    assert stopped_share(busy.pid, 0.5) == 0
    assert stopped_share(sleeper.pid, 0.5) > 50


WAITS_FOR_ITS_CHILD = """
import os, sys, threading, hashlib
threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha512", b"x", b"y", 10**9), daemon=True).start()
print("ready", flush=True)
sys.stdin.readline()
open_first = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
child = os.posix_spawn("/bin/true", ["true"], {}, file_actions=open_first)  # vfork(2): we wait in D state
os.waitpid(child, 0)
print("went on", flush=True)
"""


def test_a_thread_that_could_not_stop_in_time_is_let_go_later(spawn, grip, tmp_path):
    """One in an uninterruptible wait stops only when that ends, which may be in a later period."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    victim = spawn(sys.executable, "-c", WAITS_FOR_ITS_CHILD, fifo, ready=True, stdin=True)
    victim.stdin.write("go\n")
    victim.stdin.flush()
    assert until(lambda: state_of(victim.pid) == "D")
    change = duty(victim, percent=50)
    observed = change.apply(grip)
    time.sleep(0.35)
    with open(fifo, "w"):
        assert select.select([victim.stdout], [], [], 10)[0], "its main thread is stuck"
    assert victim.stdout.readline() == "went on\n"
    assert change.holds(grip)
    change.undo(observed, grip)
