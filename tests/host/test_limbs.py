"""The barrier against orphans: a limb is whoever holds the lock, and it dies before anything is judged."""

import os
import subprocess
import sys
import time

import pytest

from chaosgpu.changes.base import start_time_ticks
from chaosgpu.node import limbs

pytestmark = pytest.mark.host


def orphan(path):
    """A grandchild that inherited the lock from a process that is gone."""
    script = (
        "import fcntl, os, subprocess, sys\n"
        f"fd = os.open({path!r}, os.O_RDWR | os.O_CREAT); os.set_inheritable(fd, True)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "print(subprocess.Popen(['sleep', '60'], pass_fds=[fd], stdout=subprocess.DEVNULL).pid)\n"
    )
    return int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout)


def test_an_orphan_holds_the_lock_and_the_barrier_ends_it(tmp_path):
    path = str(tmp_path / "abc.lock")
    pid = orphan(path)
    fd = limbs.open_lock(path)
    assert not limbs.try_lock(fd)
    assert limbs.holders(path) == [pid]
    assert limbs.barrier(path, fd)
    assert start_time_ticks(pid) is None
    assert limbs.holders(path) == []


def test_a_free_lock_is_taken_at_once(tmp_path):
    path = str(tmp_path / "abc.lock")
    assert limbs.barrier(path, limbs.open_lock(path))


def test_a_limb_that_cannot_die_in_time_is_told(tmp_path, monkeypatch):
    path = str(tmp_path / "abc.lock")
    monkeypatch.setattr(limbs, "BARRIER_SECONDS", 0.1)
    pid = orphan(path)
    monkeypatch.setattr(limbs.os, "kill", lambda *_: None)  # as a D state would: the signal is sent and nothing ends
    assert not limbs.barrier(path, limbs.open_lock(path))
    monkeypatch.undo()
    os.kill(pid, 9)
    while start_time_ticks(pid) is not None:
        time.sleep(0.01)


def test_the_lock_of_another_injection_is_not_ours(tmp_path):
    pid = orphan(str(tmp_path / "abc.lock"))
    other = str(tmp_path / "xabc.lock")
    limbs.open_lock(other)
    assert pid not in limbs.holders(other)
    os.kill(pid, 9)
