"""Choosing processes is pure: the same processes, target and seed give the same choice, and the protected never."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosgpu.changes.errors import BadArgument
from chaosgpu.faults.base import House
from chaosgpu.faults.target import Process, choose, containers, protected_pids, target

HOUSE = House("/run/chaosgpu", (500, 501))

PROCESSES = [
    Process(1, 1, 0, "/sbin/init", frozenset({"/init.scope"})),
    Process(2, 1, 0, "", frozenset({"/"})),
    Process(33, 1, 2, "", frozenset({"/"})),
    Process(100, 5, 1, "python train.py --rank 0", frozenset({"/kubepods/podx/cri-containerd-abcdef123456.scope"})),
    Process(101, 5, 1, "python train.py --rank 1", frozenset({"/docker/0123456789ab"})),
    Process(102, 5, 1, "bash -c train.py", frozenset({"/system.slice/trainer.service"})),
    Process(103, 5, 1, "python train.py --rank 2", frozenset({"/user.slice"}), "Z"),
    Process(500, 5, 1, "python keeper.pyz", frozenset({"/chaosgpu/keeper"})),
    Process(501, 5, 1, "chaos run train.py", frozenset({"/user.slice"})),
]
PROTECTED = protected_pids(PROCESSES, HOUSE)


def pids(wanted):
    return [process.pid for process in choose(PROCESSES, target("target", wanted), PROTECTED).chosen]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ({"pid": 100}, [100]),
        ({"pid": "100"}, [100]),
        ({"pid": [101, 100]}, [100, 101]),
        ({"command": r"train\.py"}, [100, 101, 102]),
        ({"command": r"rank [01]$"}, [100, 101]),
        ({"cgroup": "/system.slice"}, [102]),
        ({"cgroup": "kubepods/podx"}, [100]),
        ({"cgroup": "/kube"}, []),
        ({"container": "abcdef"}, [100]),
        ({"container": "dead"}, []),
        ({"container": "0123456789ab"}, [101]),
        ({"unit": "trainer.service"}, [102]),
        ({"pid": 1}, []),
        ({"pid": [2, 33]}, []),
        ({"pid": [500, 501]}, []),
        ('{"pid": 102}', [102]),
    ],
)
def test_ways_to_name_processes(wanted, chosen):
    assert pids(wanted) == chosen


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/docker/" + "ab" * 32, {"ab" * 32}),
        ("/system.slice/docker-" + "ab" * 32 + ".scope", {"ab" * 32}),
        ("/kubepods.slice/kubepods-pod7a.slice/cri-containerd-" + "12" * 32 + ".scope", {"12" * 32}),
        ("/kubepods/besteffort/pod0a1b2c3d-1111-2222-3333-444455556666/" + "12" * 32, {"12" * 32}),
        ("/kubepods.slice/kubepods-pod7a.slice/crio-" + "cd" * 32 + ".scope/container", {"cd" * 32}),
        ("/kubepods.slice/kubepods-pod7a.slice/crio-conmon-" + "cd" * 32 + ".scope", set()),
        ("/machine.slice/libpod-" + "ef" * 32 + ".scope/container", {"ef" * 32}),
        ("/machine.slice/libpod_pod_" + "ef" * 32 + ".slice", set()),
        ("/system.slice/dead.service", set()),
        ("/system.slice/decade.mount", set()),
        ("/user.slice/user-1000.slice/session-4242.scope", set()),
    ],
)
def test_containers_by_their_cgroups(path, found):
    assert containers(Process(7, 1, 1, "work", frozenset({path}))) == found


def test_a_start_that_several_containers_share_names_them_all():
    alike = [Process(pid, 1, 1, "work", frozenset({f"/docker/abcd{pid:08}"})) for pid in (600, 601)]
    assert choose(alike, {"container": "abcd"}, {}).containers == ["abcd00000600", "abcd00000601"]
    choice = choose(alike, {"container": "abcd00000601"}, {})
    assert (choice.chosen, choice.containers) == (alike[1:], ["abcd00000601"])


def test_the_spared_are_named_with_the_reason():
    choice = choose(PROCESSES, target("target", {"pid": [1, 33, 501]}), PROTECTED)
    assert choice.spared == {1: "it is pid 1", 33: "it is a kernel thread", 501: "it is chaosgpu's or the caller's own"}
    assert choice.matched == 3


@given(
    numbers=st.sets(st.integers(10, 5000), min_size=1, max_size=60),
    count=st.integers(1, 80),
    seed=st.integers(0, 1000),
)
def test_a_seeded_count_is_the_same_each_time_whatever_the_order(numbers, count, seed):
    processes = [Process(pid, 1, 1, "work", frozenset()) for pid in numbers]
    wanted = {"command": "work", "count": count, "seed": seed}
    first = choose(processes, wanted, {}).chosen
    again = choose(list(reversed(processes)), wanted, {}).chosen
    assert sorted(first) == sorted(again)
    assert len(first) == min(count, len(numbers))
    assert set(first) <= set(processes)


@given(numbers=st.sets(st.integers(10, 5000), min_size=1, max_size=60), percent=st.floats(0.1, 100))
def test_a_percentage_takes_at_least_one_and_at_most_that(numbers, percent):
    processes = [Process(pid, 1, 1, "work", frozenset()) for pid in numbers]
    chosen = choose(processes, {"command": "work", "percent": percent}, {}).chosen
    assert 1 <= len(chosen) <= max(1, len(numbers) * percent / 100)


@given(protected=st.sets(st.integers(10, 60)), count=st.integers(1, 60))
def test_the_protected_are_never_chosen(protected, count):
    processes = [Process(pid, 1, 1, "work", frozenset()) for pid in range(10, 60)]
    reasons = dict.fromkeys(protected, "why")
    chosen = choose(processes, {"command": "work", "count": count}, reasons).chosen
    assert not {process.pid for process in chosen} & protected


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        7,
        "train.py",
        [],
        {},
        {"pid": 1, "command": "x"},
        {"pid": 0},
        {"pid": -5},
        {"pid": [1, "two"]},
        {"pid": []},
        {"pid": True},
        {"command": "("},
        {"command": ""},
        {"command": "x", "count": 0},
        {"command": "x", "count": 1, "percent": 5},
        {"command": "x", "percent": 0},
        {"command": "x", "colour": "red"},
        {"gpu": 0},
        {"unit": "no suffix"},
        {"container": "ab"},
        {"container": "system"},
        {"cgroup": "/"},
        {"cgroup": "//"},
        {"cgroup": "work/../.."},
        {"cgroup": "a\0b"},
        {3: 4},
    ],
)
def test_what_is_no_target(wanted):
    with pytest.raises(BadArgument) as refusal:
        target("target", wanted)
    assert "target" in str(refusal.value)
    assert "\n" not in str(refusal.value)
