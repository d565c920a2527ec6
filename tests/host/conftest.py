"""Real victims, and a keeper that is gone after each test with nothing left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from victims import end_keeper

from chaosgpu.node import client, places

THREADED = (
    "import threading, time\n"
    "for _ in range(3): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def spawn():
    """Start programs of our own; they are ended after the test, whatever became of them."""
    children = []

    def start(*argv, ready=False, stdin=False):
        child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if stdin else None,
            stdout=subprocess.PIPE if ready or stdin else subprocess.DEVNULL,
            text=True,
        )
        children.append(child)
        if ready:
            child.stdout.readline()
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe:
                pipe.close()


@pytest.fixture
def sleeper(spawn):
    return spawn("sleep", "600")


@pytest.fixture
def threaded(spawn):
    """A process with four threads."""
    return spawn(sys.executable, "-c", THREADED, ready=True)


@pytest.fixture
def busy(spawn):
    """A process that uses a whole CPU."""
    return spawn(sys.executable, "-c", "print('ready', flush=True)\nwhile True: pass", ready=True)


@pytest.fixture(autouse=True)
def keeper_gone():
    """After each test: everything is undone and the keeper is gone; a leftover record fails the test that left it."""
    yield
    if not os.path.isdir(places.run_dir()):
        return
    left = client.rescue({"op": "revert"}) or {"reverted": []}
    stuck = [entry for entry in left["reverted"] if entry["state"] == "stuck"]
    end_keeper()
    for record in Path(places.run_dir()).glob("*.record"):
        record.unlink()
    assert not stuck, stuck
