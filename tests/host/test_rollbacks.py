"""Reverting and verifying: all of a run, one by id or fault, what ended before, and what is told when it is stuck."""

import os
import signal

import pytest
from chaoslib.exceptions import ActivityFailed
from victims import damaged_record, end_keeper, state_of, until

from chaosgpu.actions import kill_processes, misplace_processes, pause_processes
from chaosgpu.fleet import runs
from chaosgpu.node import client, standby
from chaosgpu.probes import faults_active, list_faults
from chaosgpu.rollbacks import revert, revert_all, verify_restored

pytestmark = pytest.mark.toolkit


@pytest.fixture(autouse=True)
def new_run(tmp_path, monkeypatch):
    """Each test is a run of its own, remembered in a place of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs.this_run.cache_clear()


def injected(output):
    (told,) = output["nodes"].values()
    return told["injection"]


def test_nothing_injected_starts_no_keeper():
    assert revert() == {"reverted": [], "ended_before": []}
    assert revert(fault="storage.fill_disk") == {"reverted": [], "ended_before": []}
    assert revert_all() == {"reverted": [], "ended_before": []}
    assert verify_restored() == {"verified": 0, "left": []}
    assert faults_active() == 0
    assert list_faults() == []
    assert standby.lock_holder() == 0
    assert not runs.directory().exists()


def test_one_by_its_id_then_one_fault_then_the_rest(sleeper, threaded, busy):
    first = injected(pause_processes({"pid": sleeper.pid}, "60s"))
    second = injected(misplace_processes({"pid": threaded.pid}, "60s", cpus=[0]))
    third = injected(pause_processes({"pid": busy.pid}, "60s"))
    assert faults_active() == 3
    assert faults_active(fault="host.pause_processes") == 2
    assert faults_active(run="another") == 0
    assert [fault["injection"] for fault in list_faults(run=runs.this_run())] == [first, second, third]

    told = revert(injection=first)
    assert [(entry["injection"], entry["state"]) for entry in told["reverted"]] == [(first, "closed")]
    assert told["reverted"][0]["verdicts"] == {"0": ["restored", ""]}
    assert until(lambda: state_of(sleeper.pid) == "S")
    assert state_of(busy.pid) == "t"

    told = revert(fault="numa.misplace_processes")
    assert [entry["injection"] for entry in told["reverted"]] == [second]
    assert told["ended_before"] == []
    with pytest.raises(ActivityFailed, match=f"still in place: {third} host.pause_processes"):
        verify_restored()

    told = revert()
    assert [entry["injection"] for entry in told["reverted"]] == [third]
    assert [entry["injection"] for entry in told["ended_before"]] == [second, first]
    assert verify_restored() == {"verified": 3, "left": []}
    assert revert()["reverted"] == []


def test_what_ended_before_is_told_with_its_cause(sleeper, spawn):
    deadline = injected(pause_processes({"pid": sleeper.pid}, "1s"))
    victim = spawn("sleep", "601")
    done = injected(kill_processes({"pid": victim.pid}, "30s", signal="KILL"))
    assert until(lambda: faults_active() == 0)
    told = {entry["injection"]: entry for entry in revert()["ended_before"]}
    assert told[deadline]["cause"] == "deadline"
    assert told[done]["cause"].startswith("one-shot")
    assert not told[deadline]["ended_early"]


def test_an_effect_that_ended_early_is_told(sleeper):
    identity = injected(misplace_processes({"pid": sleeper.pid}, "60s", cpus=[1]))
    os.sched_setaffinity(sleeper.pid, os.sched_getaffinity(0))
    (told,) = revert()["reverted"]
    assert told["injection"] == identity
    assert told["ended_early"] is True
    assert told["verdicts"]["0"][0] == "already"


def test_another_run_is_left_alone_unless_all_is_said(sleeper, threaded):
    injected(pause_processes({"pid": sleeper.pid}, "60s"))
    runs.this_run.cache_clear()
    assert revert() == {"reverted": [], "ended_before": []}
    assert verify_restored() == {"verified": 0, "left": []}
    assert state_of(sleeper.pid) == "t"
    with pytest.raises(ActivityFailed, match=r"allow: \['concurrent'\]"):
        pause_processes({"pid": threaded.pid}, "60s", dry_run=True)
    assert len(revert_all()["reverted"]) == 1
    assert until(lambda: state_of(sleeper.pid) == "S")


def test_an_unknown_injection_is_an_error_where_a_keeper_can_tell(sleeper):
    pause_processes({"pid": sleeper.pid}, "60s")
    with pytest.raises(ActivityFailed, match="there is no injection feedbeef here"):
        revert(injection="feedbeef")


def test_verify_asks_the_kernel_also_when_the_keeper_has_left(sleeper):
    injected(misplace_processes({"pid": sleeper.pid}, "60s", cpus=[1]))
    revert()
    end_keeper()
    os.sched_setaffinity(sleeper.pid, {1})  # as if the undo had not worked
    with pytest.raises(ActivityFailed, match=r"still in place: .* numa\.misplace_processes"):
        verify_restored()
    os.sched_setaffinity(sleeper.pid, os.sched_getaffinity(0))
    assert verify_restored() == {"verified": 1, "left": []}


def test_a_silent_keeper_is_replaced_by_revert(sleeper):
    pause_processes({"pid": sleeper.pid}, "60s")
    keeper = standby.lock_holder()
    greeting = {}
    assert until(lambda: greeting.update(client.call({"op": "hello"})) or greeting["standby"])
    for pid in (greeting["standby"], keeper):  # with its standby stopped too, nobody replaces it in time
        os.kill(pid, signal.SIGSTOP)
    told = revert()
    os.kill(greeting["standby"], signal.SIGKILL)
    assert standby.lock_holder() not in (0, keeper)
    assert until(lambda: state_of(sleeper.pid) == "S")
    assert [entry["state"] for entry in told["reverted"] + told["ended_before"]] == ["closed"]
    assert verify_restored() == {"verified": 1, "left": []}


def test_a_stuck_fault_fails_revert_and_is_named():
    damaged_record("feedface00")
    with pytest.raises(ActivityFailed, match=r"stuck, retried until it is undone: feedface00 .*first line is damaged"):
        revert_all()
    assert faults_active() == 1
    client.call({"op": "abandon", "id": "feedface00", "reason": "a test"})
    assert faults_active() == 0
