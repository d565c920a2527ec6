"""What the caller's side refuses, before a node is asked or a run is remembered."""

import pytest
from chaoslib.exceptions import ActivityFailed

from chaosgpu import probes, rollbacks
from chaosgpu.actions import fill_disk, kill_processes, pause_processes
from chaosgpu.fleet import runs
from chaosgpu.fleet.inject import _told

TARGET = {"pid": 2**22}


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield
    assert not runs.directory().exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"duration": None}, "duration is None"),
        ({"duration": "2h"}, "allow: ['long_duration'] raises the cap"),
        ({"duration": "8d", "allow": ["long_duration"]}, "duration is '8d'"),
        ({"duration": "30s", "allow": ["everything"]}, "allow is ['everything']: a list of long_duration"),
        ({"duration": "30s", "allow": {"long_duration": 1}}, "allow is {'long_duration': 1}"),
        ({"duration": "30s", "dry_run": 1}, "dry_run is 1: true or false"),
        ({"duration": "30s", "outlive_run": "maybe"}, "outlive_run is 'maybe'"),
        ({"duration": "30s", "nodes": ["elsewhere"]}, "nodes is ['elsewhere']: ['local']"),
        ({"duration": "30s", "nodes": []}, "nodes is []"),
        ({"duration": "30s", "target": {"pid": 1, "unit": "a.service"}}, "target.pid, target.command"),
        ({"duration": "30s", "target": "{"}, "target is not a target"),
    ],
)
def test_one_line_says_which_argument_and_what_is_allowed(arguments, said):
    with pytest.raises(ActivityFailed) as refused:
        pause_processes(**{"target": TARGET, **arguments})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_arguments_that_exclude_each_other():
    with pytest.raises(ActivityFailed, match="exactly one of percent, bytes, leave_bytes"):
        fill_disk(path="/nowhere", duration="30s")


def test_a_signal_by_its_name():
    with pytest.raises(ActivityFailed, match="signal is 'STOP': one of"):
        kill_processes(target=TARGET, duration="30s", signal="STOP")


@pytest.mark.parametrize("ask", [rollbacks.revert, probes.faults_active, probes.list_faults])
def test_a_misspelt_fault_is_not_read_as_no_fault(ask):
    with pytest.raises(ActivityFailed, match=r"fault is 'storage\.fil_disk': one of host\.kill_processes"):
        ask(fault="storage.fil_disk")


@pytest.mark.parametrize("injection", ["", 7, ["a"], {}, "a b", "../x", "\ud800"])
def test_a_malformed_injection_does_not_mean_all(injection):
    with pytest.raises(ActivityFailed, match="injection is "):
        rollbacks.revert(injection=injection)


def test_what_became_of_a_fault_that_failed_half_way_is_told():
    undone = _told({"message": "vm: no effect", "injection": "abc"})
    assert undone == "vm: no effect; what was done of it is undone (chaos gpu record abc)"
    stuck = _told({"message": "vm: no\neffect", "injection": "abc", "stuck": ["tc is missing", "x"]})
    assert "STUCK" in stuck
    assert "tc is missing; x" in stuck
    assert "\n" not in stuck
    assert _told({"message": "vm: refused"}) == "vm: refused"
