"""An nftables table in a network namespace of its own, seen by nft and by ping."""

import os
import signal
import subprocess

import pytest
from drive import by_hand, held_elsewhere, undone_elsewhere
from victims import until

from chaosgpu.changes import base
from chaosgpu.changes.errors import ChangeFailed, Moved
from chaosgpu.changes.grip import Grip
from chaosgpu.changes.netns import netns_inode
from chaosgpu.changes.nft import NftTable

NETNS = "/run/netns/chaosgpu-nft"
BODY = """
chain out {
    type filter hook output priority -200; policy accept;
    ip daddr 127.0.0.2 drop
    ip daddr 127.0.0.3 counter
}
"""


@pytest.fixture(autouse=True)
def namespace():
    subprocess.run(["ip", "netns", "add", "chaosgpu-nft"], check=True)
    subprocess.run(["ip", "-n", "chaosgpu-nft", "link", "set", "lo", "up"], check=True)
    yield
    subprocess.run(["ip", "netns", "del", "chaosgpu-nft"], check=True)


def table(body=BODY):
    return NftTable(NETNS, netns_inode(NETNS), "chaosgpu_0123", body)


def nft(*words):
    return subprocess.run(["ip", "netns", "exec", "chaosgpu-nft", "nft", *words], capture_output=True, text=True)


def answers(address):
    argv = ["ip", "netns", "exec", "chaosgpu-nft", "ping", "-c", "1", "-W", "1", address]
    return subprocess.run(argv, capture_output=True).returncode == 0


def test_what_it_drops_is_dropped_until_the_undo():
    grip, change = Grip("0123"), table()
    assert not change.holds(grip)
    observed = change.apply(grip)
    assert change.holds(grip)
    assert not answers("127.0.0.2")
    assert answers("127.0.0.3")
    assert change.undo(observed, grip).verdict == base.REMOVED
    assert not change.holds(grip)
    assert answers("127.0.0.2")
    assert change.undo(observed, grip).verdict == base.ALREADY


def test_nobody_else_can_flush_or_delete_it():
    grip, change = Grip("0123"), table()
    change.apply(grip)
    assert nft("flush", "ruleset").returncode == 0
    assert change.holds(grip)
    assert "not permitted" in nft("delete", "table", "inet", "chaosgpu_0123").stderr
    with pytest.raises(ChangeFailed, match="only its owner"):
        table().undo(None, Grip("0123"))
    grip.close()
    assert not change.holds(grip)


def test_it_ends_with_its_killed_holder(spawn):
    holder = held_elsewhere(spawn, table())
    assert "drop" in nft("list", "ruleset").stdout
    holder.kill()
    holder.wait()
    assert until(lambda: nft("list", "ruleset").stdout == "")
    assert undone_elsewhere(table(), {"pid": 1}).verdict == base.ALREADY


def test_a_table_of_that_name_is_not_ours():
    assert nft("add", "table", "inet", "chaosgpu_0123").returncode == 0
    with pytest.raises(Moved, match="exists already"):
        table().apply(Grip("0123"))


def test_a_wrong_rule_is_an_error_and_leaves_nothing():
    grip = Grip("0123")
    with pytest.raises(ChangeFailed, match="syntax error"):
        table("chain out {\nno such rule\n}").apply(grip)
    assert nft("list", "ruleset").stdout == ""
    grip.close()


def test_a_namespace_that_is_gone_is_lost():
    change = NftTable("/run/netns/no-such", 1, "chaosgpu_0123", BODY)
    with pytest.raises(Moved, match="is gone"):
        change.apply(Grip("0123"))
    assert change.undo(None, Grip("0123")).verdict == base.LOST


def test_an_owner_that_ends_is_noticed():
    grip = Grip("0123")
    observed = table().apply(grip)
    os.kill(observed["pid"], signal.SIGKILL)
    os.waitid(os.P_PID, observed["pid"], os.WEXITED | os.WNOWAIT)
    with pytest.raises(ChangeFailed, match="ended before its time"):
        grip.tend()
    grip.close()


def test_the_lines_by_hand(spawn):
    lines = table().describe()
    typed = spawn("sh", "-c", lines.apply)
    assert until(lambda: table().holds(Grip("0123")))
    started = subprocess.run(["pgrep", "-x", "-P", str(typed.pid), "sleep"], capture_output=True, text=True).stdout
    by_hand(lines.undo)
    assert until(lambda: not table().holds(Grip("0123")))
    os.kill(int(started), signal.SIGKILL)
