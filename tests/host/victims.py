"""What the host tests ask of processes, and how they end a keeper."""

import os
import signal
import time
from pathlib import Path

from chaosgpu.node import ledger, places, standby


def end_keeper():
    """SIGTERM the keeper and wait until it and its standby are gone."""
    holder = standby.lock_holder()
    if not holder:
        return
    os.kill(holder, signal.SIGTERM)
    give_up = time.monotonic() + 10
    while standby.lock_holder() and time.monotonic() < give_up:
        time.sleep(0.01)


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(condition, seconds=5.0):
    """Wait for a condition; whether it came true in time."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def damaged_record(identity):
    """A ledger record whose first line is torn while more follows: stuck as soon as a keeper reads it."""
    os.makedirs(places.state_dir(), mode=0o700, exist_ok=True)
    line = ledger._line({"line": "active", "at": time.time(), "result": {}})
    Path(places.state_dir(), f"{identity}{ledger.SUFFIX}").write_bytes(b"0" * 40 + b"\n" + line)
