"""Qdiscs, their filters and the ifb device, each change by itself between two namespaces, seen by tc, ip and ping."""

import json
import re
import subprocess

import pytest
from drive import by_hand, copied, undone_elsewhere

from chaosgpu.changes.base import ALREADY, LOST, REMOVED, SUPERSEDED
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.netns import find, ifindex, netns_inode
from chaosgpu.changes.qdisc import IfbLink, IngressQdisc, RootQdisc

NEAR = "/run/netns/near"
SINK = ["netem", "loss", "100%"]
PRIO = "prio bands 4 priomap 1 2 2 2 1 2 0 0 1 1 1 1 1 1 1 1".split()


def sh(line):
    done = subprocess.run(["bash", "-ec", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def grip():
    return Grip("0123")


@pytest.fixture(autouse=True)
def network():
    sh(
        """
        ip netns add near; ip netns add far
        ip link add n0 netns near type veth peer name f0 netns far
        ip -n near addr add 10.7.0.1/24 dev n0; ip -n far addr add 10.7.0.2/24 dev f0
        ip -n near link set n0 up; ip -n far link set f0 up
        ip netns exec near ping -q -c 2 -i 0.2 -W 5 10.7.0.2
        """
    )
    yield
    sh("ip netns del near 2> /dev/null || true; ip netns del far")


def answers():
    argv = "ip netns exec near ping -n -q -c 2 -i 0.2 -W 1 10.7.0.2".split()
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def near():
    return (NEAR, netns_inode(NEAR), "n0", ifindex(NEAR, "n0"))


def to_ip(band):
    return "filter add dev n0 parent 1abc: protocol ip pref 1 flower dst_ip 10.7.0.2 classid".split() + [f"1abc:{band}"]


def root(band=4):
    leaf = "qdisc add dev n0 parent 1abc:4 handle 1abd:".split() + SINK
    return RootQdisc(*near(), "1abc:", PRIO, [leaf, to_ip(band)])


def dropped(preference=20000):
    return [str(preference), *"protocol ip flower src_ip 10.7.0.2 action drop".split()]


def ingress(*filters):
    return IngressQdisc(*near(), list(filters or [dropped()]))


def ifb():
    return IfbLink(NEAR, netns_inode(NEAR), "cg0123", SINK)


@pytest.mark.parametrize("make", [root, ingress, ifb])
def test_made_held_recorded_and_removed_elsewhere(make, grip):
    before, change = sh("tc -n near qdisc; ip -n near -br link"), make()
    assert not change.holds(grip)
    assert change.apply(grip) is True
    assert change.holds(grip)
    assert copied(change) == change
    assert answers() is (make is ifb)
    assert undone_elsewhere(change, True).verdict == REMOVED
    assert sh("tc -n near qdisc; ip -n near -br link") == before
    assert answers()
    assert change.undo(True, grip).verdict == ALREADY
    assert change.undo(None, grip).verdict == ALREADY


@pytest.mark.parametrize("make", [root, ingress, ifb])
def test_the_lines_by_hand_do_and_undo_the_same(make, grip):
    before, lines = sh("tc -n near qdisc"), make().describe()
    by_hand(lines.apply)
    assert make().holds(grip)
    assert answers() is (make is ifb)
    by_hand(lines.undo)
    assert not make().holds(grip)
    assert sh("tc -n near qdisc") == before


@pytest.mark.parametrize("make", [root, ingress, ifb])
def test_what_was_half_made_is_found_and_removed(make, grip):
    """tc ended after its first line: whatever it did is below the object that carries the id."""
    change, before = make(), sh("tc -n near qdisc; ip -n near -br link")
    by_hand(change.describe().apply.split("; ")[0])
    assert change.undo(None, grip).verdict == REMOVED
    assert sh("tc -n near qdisc; ip -n near -br link") == before


@pytest.mark.parametrize("make", [root, ingress, ifb])
def test_what_is_there_already_is_not_overwritten(make, grip):
    make().apply(grip)
    with pytest.raises(Moved, match="exists already"):
        make().apply(grip)


def test_a_qdisc_that_someone_else_made_is_left(grip):
    sh("tc -n near qdisc add dev n0 root handle 77: pfifo")
    with pytest.raises(ChangeFailed):
        root().apply(grip)
    assert root().undo(None, grip).verdict == ALREADY
    assert "77:" in sh("tc -n near qdisc show dev n0")


def test_filters_of_others_keep_the_clsact(grip):
    """Also those that were put in front of ours, with a preference that people choose."""
    change = ingress()
    change.apply(grip)
    sh("tc -n near filter add dev n0 ingress pref 1 protocol ip flower dst_ip 10.9.9.9 action pass")
    assert change.undo(True, grip).verdict == SUPERSEDED
    assert re.findall(r"pref (\d+) flower .*handle", sh("tc -n near filter show dev n0 ingress")) == ["1"]
    assert answers()
    assert change.undo(True, grip).verdict == SUPERSEDED


def test_a_filter_of_others_on_egress_keeps_the_clsact(grip):
    change = ingress()
    change.apply(grip)
    sh("tc -n near filter add dev n0 egress pref 20000 protocol ip flower dst_ip 10.9.9.9 action pass")
    assert change.undo(True, grip).verdict == SUPERSEDED
    assert sh("tc -n near filter show dev n0 ingress") == ""
    assert "pref 20000" in sh("tc -n near filter show dev n0 egress")


def test_redirected_traffic_passes_the_ifb(grip):
    into = "protocol ip flower action mirred egress redirect dev cg0123".split()
    changes = [ifb(), ingress(["20000", *into])]
    for change in changes:
        change.apply(grip)
    assert not answers()
    counted = json.loads(sh("tc -s -j -n near qdisc show dev cg0123"))[0]
    assert counted["drops"] >= 2
    for change in reversed(changes):
        assert change.undo(True, grip).verdict == REMOVED
    assert answers()


@pytest.mark.parametrize("make", [root, ingress])
def test_a_namesake_of_the_device_is_lost(make, grip):
    change = make()
    change.apply(grip)
    sh("ip -n near link del n0; ip link add n0 netns near type veth peer name f0 netns far")
    assert ifindex(NEAR, "n0") != change.ifindex
    assert change.undo(True, grip).verdict == LOST
    assert not change.holds(grip)
    with pytest.raises(Moved, match="another one by now"):
        change.apply(grip)


@pytest.mark.parametrize("make", [root, ingress])
def test_a_namespace_that_is_gone_is_lost(make, grip):
    change = make()
    change.apply(grip)
    sh("ip netns del near")
    assert change.undo(True, grip).verdict == LOST


@pytest.mark.parametrize("make", [root, ingress, ifb])
def test_a_namespace_whose_path_is_gone_is_found_by_its_inode(make, grip):
    """As when the container ends by whose process the namespace was named, while its pod's pause process lives."""
    change = make()
    change.apply(grip)
    with subprocess.Popen(["ip", "netns", "exec", "near", "sleep", "600"]) as lives:
        while netns_inode(f"/proc/{lives.pid}/ns/net") != change.netns_inode:
            pass
        sh("ip netns del near")
        assert find(NEAR, change.netns_inode).startswith("/proc/")
        assert change.holds(grip)
        assert change.undo(True, grip).verdict == REMOVED
        assert not change.holds(grip)
        lives.kill()


def test_a_tree_that_tc_refuses_leaves_nothing_after_its_undo(grip):
    before = sh("tc -n near qdisc")
    change = root(band="no-class")
    with pytest.raises(ChangeFailed):
        change.apply(grip)
    assert change.undo(None, grip).verdict in (REMOVED, ALREADY)
    assert sh("tc -n near qdisc") == before
