"""Stopped processes and sent signals, change by change, on real processes."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from drive import by_hand, copied, held_elsewhere, undone_elsewhere
from victims import state_of, until

from chaosgpu.changes.base import ALREADY, FD, LOST, RESTORED, start_time_ticks
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.process import SignalSent, StoppedByPtrace, StoppedBySignal
from chaosgpu.helpers.tracer import Tracer

BOTH = [StoppedByPtrace, StoppedBySignal]


@pytest.fixture
def grip():
    held = Grip("test")
    yield held
    held.close()


def stopping(kind, child):
    return kind(child.pid, start_time_ticks(child.pid))


def thread_states(pid):
    return {state_of(int(tid)) for tid in os.listdir(f"/proc/{pid}/task")}


def tracer(pid):
    return int(Path(f"/proc/{pid}/status").read_text().split("TracerPid:")[1].split()[0])


@pytest.mark.parametrize("kind", BOTH)
def test_all_threads_stand_still_and_go_on(kind, threaded, grip):
    change = copied(stopping(kind, threaded))
    assert not change.holds(grip)
    observed = change.apply(grip)
    assert thread_states(threaded.pid) <= {"t", "T"}
    assert change.holds(grip)
    assert change.undo(observed, grip).verdict == RESTORED
    assert not change.holds(grip)
    assert until(lambda: thread_states(threaded.pid) == {"S"})
    assert change.undo(observed, grip).verdict == ALREADY


@pytest.mark.parametrize("kind", BOTH)
def test_one_that_has_ended_is_lost_and_its_successor_is_not_touched(kind, sleeper, grip):
    change = stopping(kind, sleeper)
    namesake = kind(change.pid, change.start + 1)  # the same number, born at another time
    with pytest.raises(Moved):
        namesake.apply(grip)
    assert undone_elsewhere(namesake, None).verdict == LOST
    assert state_of(sleeper.pid) == "S"
    observed = change.apply(grip)
    sleeper.kill()
    assert until(lambda: gone(sleeper, grip))
    assert change.undo(observed, grip).verdict == LOST
    assert not change.holds(grip)


def gone(child, grip):
    """Its tracer must reap it first, as the hand does on SIGCHLD; then it is its parent's."""
    grip.tend()
    return start_time_ticks(child.pid) is None


def test_what_ptrace_stops_runs_again_when_its_holder_is_killed(busy, spawn):
    change = stopping(StoppedByPtrace, busy)
    assert change.bound == FD
    holder = held_elsewhere(spawn, change)
    assert state_of(busy.pid) == "t"
    holder.kill()
    holder.wait()
    assert until(lambda: state_of(busy.pid) == "R")
    assert undone_elsewhere(change, None).verdict == ALREADY


def test_what_a_signal_stops_stays_so_and_another_hand_takes_it_back(sleeper, grip):
    change = stopping(StoppedBySignal, sleeper)
    observed = change.apply(grip)
    assert undone_elsewhere(change, observed).verdict == RESTORED
    assert state_of(sleeper.pid) == "S"
    assert undone_elsewhere(change, observed).verdict == ALREADY


def test_the_lines_for_an_operator(sleeper, spawn):
    by_signal = stopping(StoppedBySignal, sleeper)
    by_hand(by_signal.describe().apply)
    assert until(lambda: state_of(sleeper.pid) == "T")
    by_hand(by_signal.describe().undo)
    assert until(lambda: state_of(sleeper.pid) == "S")
    by_ptrace = stopping(StoppedByPtrace, sleeper)
    holder = held_elsewhere(spawn, by_ptrace)
    by_hand(by_ptrace.describe().undo)
    assert holder.wait(timeout=5) == -9
    assert until(lambda: state_of(sleeper.pid) == "S")


def test_a_process_that_someone_else_traces_is_told(sleeper, spawn, grip):
    debugger = spawn("strace", "-o", "/dev/null", "-p", str(sleeper.pid))
    assert until(lambda: tracer(sleeper.pid) == debugger.pid)
    with pytest.raises(ChangeFailed, match=f"process {debugger.pid} traces it already"):
        stopping(StoppedByPtrace, sleeper).apply(grip)


def test_a_debugger_that_comes_later_is_not_our_doing(sleeper, spawn, grip):
    """What stands still in a debugger after the undo is the debugger's: nothing of ours is left."""
    change = stopping(StoppedByPtrace, sleeper)
    observed = change.apply(grip)
    assert change.undo(observed, grip).verdict == RESTORED
    debugger = spawn(sys.executable, "-c", STOPPER.format(pid=sleeper.pid), ready=True)
    assert tracer(sleeper.pid) == debugger.pid
    assert state_of(sleeper.pid) == "t"
    assert not change.holds(grip)
    assert undone_elsewhere(change, observed).verdict == ALREADY


STOPPER = """
import time
from chaosgpu.helpers.tracer import Tracer, start_time_ticks
tracer = Tracer({pid}, start_time_ticks({pid}))
tracer.stop()
print("ready", flush=True)
while True:
    tracer.tend()
    time.sleep(0.01)
"""

COUNTS_SIGNALS = """
import os, select, signal
incoming, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)  # one byte a delivery, written by the C handler: nothing is merged
for number in (signal.SIGRTMIN, signal.SIGRTMIN + 1):
    signal.signal(number, lambda *_: None)
print("ready", flush=True)
count = 0
while True:
    got = os.read(incoming, 4096)
    count += got.count(int(signal.SIGRTMIN))
    if int(signal.SIGRTMIN) + 1 in got:
        print(count, flush=True)
"""


def test_no_signal_is_swallowed_or_doubled_by_stopping(spawn):
    """A storm of queued signals while a process is stopped and let go again and again: each arrives once."""
    victim = spawn(sys.executable, "-c", COUNTS_SIGNALS, ready=True)
    for _ in range(60):
        held = Tracer(victim.pid, start_time_ticks(victim.pid))
        for _ in range(4):
            os.kill(victim.pid, signal.SIGRTMIN)
        held.stop()
        for _ in range(4):
            os.kill(victim.pid, signal.SIGRTMIN)
        held.close()
    os.kill(victim.pid, signal.SIGRTMIN + 1)
    assert victim.stdout.readline() == "480\n"


def test_a_stop_signal_during_the_pause_counts_after_it(threaded, grip):
    change = stopping(StoppedByPtrace, threaded)
    observed = change.apply(grip)
    os.kill(threaded.pid, signal.SIGSTOP)
    time.sleep(0.05)
    grip.tend()
    assert thread_states(threaded.pid) == {"t"}
    change.undo(observed, grip)
    assert until(lambda: thread_states(threaded.pid) == {"T"})
    assert not change.holds(grip)
    os.kill(threaded.pid, signal.SIGCONT)
    assert until(lambda: thread_states(threaded.pid) == {"S"})


def test_a_continue_during_the_pause_does_not_end_it(sleeper, grip):
    change = stopping(StoppedByPtrace, sleeper)
    observed = change.apply(grip)
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.kill(sleeper.pid, signal.SIGCONT)
    time.sleep(0.05)
    grip.tend()
    assert state_of(sleeper.pid) == "t"
    change.undo(observed, grip)
    assert until(lambda: state_of(sleeper.pid) == "S")


SPAWNS_THREADS = """
import threading
def breed():
    while True:
        child = threading.Thread(target=lambda: None)
        child.start()
        child.join()
for _ in range(3):
    threading.Thread(target=breed, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


def test_threads_born_while_it_is_being_stopped_stop_too(spawn, grip):
    victim = spawn(sys.executable, "-c", SPAWNS_THREADS, ready=True)
    for _ in range(10):
        change = stopping(StoppedByPtrace, victim)
        observed = change.apply(grip)
        assert thread_states(victim.pid) == {"t"}
        tids = set(os.listdir(f"/proc/{victim.pid}/task"))
        time.sleep(0.02)
        assert set(os.listdir(f"/proc/{victim.pid}/task")) == tids
        change.undo(observed, grip)


def test_a_program_that_replaces_itself_is_stopped_and_goes_on(spawn, grip):
    """execve(2) by a thread other than the first ends the rest and takes their number."""
    reborn = "import os, sys, threading; threading.Thread(target=os.execv, args=(sys.executable, sys.argv)).start()"
    victim = spawn(sys.executable, "-S", "-c", f"import sys; sys.argv = [sys.executable, '-S', '-c', {reborn!r}]; " + reborn)  # fmt: skip  # noqa: E501
    for _ in range(20):
        change = stopping(StoppedByPtrace, victim)
        observed = change.apply(grip)
        time.sleep(0.01)
        grip.tend()
        assert thread_states(victim.pid) <= {"t"}
        assert change.undo(observed, grip).verdict == RESTORED
    assert until(lambda: state_of(victim.pid) in "RSD")


SIGNALLED = "import signal, time; signal.signal(15, lambda *_: None); print(1, flush=True)\nwhile 1: time.sleep(1)"


def test_a_signal_is_sent_once_and_cannot_be_taken_back(spawn, grip):
    mild, deaf = spawn("sleep", "600"), spawn(sys.executable, "-c", SIGNALLED, ready=True)
    processes = [[child.pid, start_time_ticks(child.pid)] for child in (mild, deaf)]
    change = copied(SignalSent(processes, "TERM", 0.2))
    assert change.apply(grip) == {"sent": [mild.pid, deaf.pid], "killed": [deaf.pid]}
    assert (mild.wait(timeout=5), deaf.wait(timeout=5)) == (-15, -9)
    assert undone_elsewhere(change, None).verdict == ALREADY


def test_a_signal_never_reaches_a_namesake(sleeper, grip):
    change = SignalSent([[sleeper.pid, start_time_ticks(sleeper.pid) + 1]], "KILL")
    assert change.apply(grip) == {"sent": [], "killed": []}
    assert sleeper.poll() is None


FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_first_thread_has_ended_is_alive(spawn, grip):
    victim = spawn(sys.executable, "-c", FIRST_THREAD_ENDS, ready=True)
    start = start_time_ticks(victim.pid)
    assert until(lambda: state_of(victim.pid) == "Z")
    assert start_time_ticks(victim.pid) == start
    change = stopping(StoppedByPtrace, victim)
    observed = change.apply(grip)
    assert thread_states(victim.pid) == {"Z", "t"}
    assert change.holds(grip)
    assert change.undo(observed, grip).verdict == RESTORED
    assert until(lambda: thread_states(victim.pid) == {"Z", "S"})
    victim.kill()
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
    assert start_time_ticks(victim.pid) is None
