"""What hinders an undo on real nodes: a clock that is set, a tool that is gone."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaosgpu.actions import impair_network, misplace_processes
from chaosgpu.node import client
from chaosgpu.rollbacks import revert, verify_restored

HOUR = 3600


def node(*arguments):
    command = [sys.executable, "-m", "chaosgpu.node.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def until(condition, seconds):
    give_up = time.monotonic() + seconds
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.05)
    return condition()


def allowed(pid):
    shown = subprocess.run(["taskset", "-cp", str(pid)], capture_output=True, text=True, check=True)
    return shown.stdout.rpartition(":")[2].strip()


@pytest.fixture
def sleeper():
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


@pytest.fixture
def clock():
    """Sets the wall clock by some seconds, as ntpd or an operator would; it is right again after the test."""
    true = time.time() - time.monotonic()
    yield lambda seconds: time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)
    time.clock_settime(time.CLOCK_REALTIME, true + time.monotonic())


@pytest.mark.parametrize("keeper_dies", [False, True])
def test_a_clock_set_back_an_hour_delays_no_undo(sleeper, clock, keeper_dies):
    misplace_processes({"pid": sleeper.pid}, "8s", cpus=[1])
    deadline = time.monotonic() + 8
    clock(-HOUR)
    if keeper_dies:  # its successor has the record alone to go by
        os.kill(client.call({"op": "hello"})["pid"], signal.SIGKILL)
    assert allowed(sleeper.pid) == "1"
    assert until(lambda: allowed(sleeper.pid) == "0,1", deadline - time.monotonic() + 10)
    assert time.monotonic() > deadline - 0.5
    assert until(lambda: node("list").stdout == "no faults\n", 10)
    assert verify_restored()["left"] == []


def test_a_clock_set_forward_an_hour_ends_it_no_later(sleeper, clock):
    misplace_processes({"pid": sleeper.pid}, "8s", cpus=[1])
    clock(HOUR)
    assert until(lambda: allowed(sleeper.pid) == "0,1", 18)
    assert until(lambda: node("list").stdout == "no faults\n", 10)
    assert verify_restored()["left"] == []


@pytest.fixture
def device():
    script = "ip link add t0 type veth peer name t1; ip link set t0 up; ip link set t1 up"
    subprocess.run(["sh", "-ec", script], check=True)
    yield "t0"
    subprocess.run(["ip", "link", "del", "t0"], check=True)


def qdiscs(device):
    shown = subprocess.run(["ip", "-d", "link", "show", "dev", device], capture_output=True, text=True, check=True)
    return shown.stdout.partition("qdisc ")[2].split()[0]


def test_an_undo_whose_tool_is_gone_is_stuck_and_loud_and_is_done_when_it_is_back(device):
    impair_network("300s", device=device, delay=5)
    assert qdiscs(device) == "prio"
    tc = Path(shutil.which("tc")).resolve()
    aside = Path("/run/tc-aside")
    shutil.copy2(tc, aside)
    tc.unlink()
    try:
        reverted = node("revert", "--all")
        assert reverted.returncode == 3, reverted
        assert reverted.stdout.startswith("STUCK "), reverted.stdout
        assert "tc" in reverted.stdout.splitlines()[0]
        assert node("list").returncode == 3
        assert qdiscs(device) == "prio"
    finally:
        shutil.copy2(aside, tc)
        aside.unlink()
    assert until(lambda: qdiscs(device) == "noqueue", 90), "nobody tried again"
    assert until(lambda: node("list").returncode == 0, 10)
    assert revert()["reverted"] == []
    assert until(lambda: node("list").stdout == "no faults\n", 10)
    assert verify_restored()["left"] == []
