"""impair_network between two namespaces, measured by ping, by TCP and by tc's own account."""

import math
import re
import subprocess
import sys

import pytest
from chaoslib.exceptions import ActivityFailed

from chaosgpu.actions import impair_network
from chaosgpu.rollbacks import revert, verify_restored

NEAR = "/run/netns/near"


def sh(line):
    done = subprocess.run(["bash", "-ec", line], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def network():
    sh(
        """
        ip netns add near; ip netns add far
        ip link add n0 netns near type veth peer name f0 netns far
        ip -n near addr add 10.7.0.1/24 dev n0; ip -n far addr add 10.7.0.2/24 dev f0
        ip -n near addr add fd07::1/64 dev n0 nodad; ip -n far addr add fd07::2/64 dev f0 nodad
        ip -n near link set lo up; ip -n far link set lo up
        ip -n near link set n0 up; ip -n far link set f0 up
        ip netns exec near ping -q -c 2 -i 0.2 -W 5 10.7.0.2; ip netns exec near ping -q -c 2 -i 0.2 -W 5 fd07::2
        """
    )
    yield
    sh("ip netns del near; ip netns del far")


@pytest.fixture(autouse=True)
def undone():
    before = sh("tc -n near qdisc; ip -n near -br link | cut -d' ' -f1")
    yield
    revert()
    assert sh("tc -n near qdisc; ip -n near -br link | cut -d' ' -f1") == before
    assert verify_restored()["left"] == []


def ping(address="10.7.0.2", count=20, interval=0.05):
    """(received, least round trip in ms): emulation makes single round trips slow, never fast."""
    out = sh(f"ip netns exec near ping -n -c {count} -i {interval} -W 3 {address} || true")
    times = [float(text) for text in re.findall(r"time=([\d.]+) ms", out)]
    return len(times), min(times, default=math.inf)


def on_node(output):
    return next(iter(output["nodes"].values()))


@pytest.mark.parametrize(("direction", "times"), [("egress", 1), ("ingress", 1), ("both", 2)])
def test_the_delay_is_what_was_asked_for_within_5_percent(direction, times):
    _, before = ping()
    output = on_node(impair_network("60s", device="n0", delay="100ms", direction=direction, netns=NEAR))
    _, during = ping()
    assert abs(during - before - times * 100) < 0.05 * times * 100
    assert output["proof"]["exercised"]


def test_the_loss_is_within_the_binomial_99_percent_band():
    impair_network("60s", peer="10.7.0.2", loss_percent=20, netns=NEAR)
    sent = 500
    received, _ = ping(count=sent, interval=0.01)
    half = 2.576 * math.sqrt(0.2 * 0.8 / sent)
    assert abs((sent - received) / sent - 0.2) < half


def test_only_the_peer_is_hit_and_in_both_families():
    sh("ip -n far addr add 10.7.0.3/24 dev f0")
    impair_network("60s", peer="fd07::2", delay=80, netns=NEAR)
    assert ping("fd07::2")[1] > 75
    assert ping("10.7.0.2")[1] < 40
    revert()
    impair_network("60s", peer="10.7.0.3", delay=80, netns=NEAR)
    assert ping("10.7.0.3")[1] > 75
    assert ping("10.7.0.2")[1] < 40
    sh("ip -n far addr del 10.7.0.3/24 dev f0")


def serve(netns, port, code):
    script = f"import socket\ns = socket.create_server(('0.0.0.0', {port}))\nprint('ready', flush=True)\n{code}"
    child = subprocess.Popen(
        ["ip", "netns", "exec", netns, sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    child.stdout.readline()
    return child


SINK = (
    "import time\nc, _ = s.accept()\nc.recv(1)\nbegun = time.monotonic()\n"
    "while c.recv(65536): pass\nprint(time.monotonic() - begun, flush=True)"
)


def test_the_rate_is_within_10_percent():
    bits = 4_000_000
    sink = serve("far", 5001, SINK)
    impair_network("60s", device="n0", rate="4mbit", netns=NEAR)
    send = "import socket\nc = socket.create_connection(('10.7.0.2', 5001))\nc.sendall(bytes(2000000))\nc.close()"
    subprocess.run(["ip", "netns", "exec", "near", sys.executable, "-c", send], check=True)
    seconds = float(sink.stdout.readline())
    sink.wait()
    sink.stdout.close()
    wire = 2_000_000 * 8 * 1514 / 1448  # TCP segments of 1448 bytes in frames of 1514
    assert abs(wire / seconds - bits) < 0.1 * bits


def test_a_port_is_hit_and_the_rest_is_not():
    sink = serve("far", 5002, "while True: s.accept()[0].close()")
    output = on_node(impair_network("60s", peer="10.7.0.2", port=5002, delay=200, netns=NEAR))
    assert output["proof"]["during"]["how"] == "TCP connect to 10.7.0.2:5002"
    assert 190 < output["proof"]["added_ms"] < 400
    assert ping()[1] < 40
    sink.kill()
    sink.wait()
    sink.stdout.close()


def test_total_loss_spares_arp_neighbour_discovery_and_the_way_in():
    """Whoever controls the machine stays connected: here a TCP connection to port 22."""
    way_in = serve("near", 22, "c, _ = s.accept()\nwhile True: c.sendall(c.recv(100))")
    script = (
        "import socket, sys\nc = socket.create_connection(('10.7.0.1', 22), timeout=10)\nprint('up', flush=True)\n"
        "for line in sys.stdin: c.sendall(b'x'); print(c.recv(1), flush=True)"
    )
    argv = ["ip", "netns", "exec", "far", sys.executable, "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as operator:
        operator.stdout.readline()
        output = on_node(impair_network("60s", device="n0", loss_percent=100, direction="both", netns=NEAR))
        assert output["proof"]["during"] is None
        assert ping(count=3, interval=0.2)[0] == 0
        sh("ip -n far neigh flush all; ip -n near neigh flush all")
        operator.stdin.write("\n")
        operator.stdin.flush()
        assert operator.stdout.readline() == "b'x'\n"
        assert "REACHABLE" in sh("ip -n far neigh show 10.7.0.1; ip -n near neigh show 10.7.0.2")
        operator.kill()
    way_in.kill()
    way_in.wait()
    way_in.stdout.close()


def test_the_limit_holds_what_the_delay_keeps_back():
    output = on_node(impair_network("60s", device="n0", delay="2s", rate="100mbit", netns=NEAR, dry_run=True))
    line = output["shell"][0][0]
    assert int(re.search(r"limit (\d+)", line).group(1)) >= 100e6 / 8 * 2 / 1500


def test_what_is_refused():
    sh("ip -n near route add default via 10.7.0.2")
    with pytest.raises(ActivityFailed, match="carries the default route"):
        impair_network("60s", device="n0", delay=5, netns=NEAR)
    sh("ip -n near route del default")
    sh("tc -n near qdisc add dev n0 root handle 77: pfifo")
    with pytest.raises(ActivityFailed, match=r"qdisc pfifo 77:, set by someone else"):
        impair_network("60s", device="n0", delay=5, netns=NEAR)
    sh("tc -n near qdisc del dev n0 root; tc -n near qdisc add dev n0 clsact")
    with pytest.raises(ActivityFailed, match="has an ingress qdisc of someone else"):
        impair_network("60s", device="n0", delay=5, direction="ingress", netns=NEAR)
    sh("tc -n near qdisc del dev n0 clsact")
    for arguments, message in [
        ({"device": "nope", "delay": 5}, "device nope is not there"),
        ({"peer": "192.0.2.1", "delay": 5}, "no route to 192.0.2.1"),
        ({"peer": "no.such.host.invalid", "delay": 5}, "does not resolve"),
        ({"device": "n0"}, "give at least one of delay"),
        ({"device": "n0", "jitter": 5, "loss_percent": 1}, "need a delay"),
        ({"delay": 5}, "give device or peer"),
    ]:
        with pytest.raises(ActivityFailed, match=message):
            impair_network("60s", netns=NEAR, **arguments)


def test_an_edited_qdisc_of_ours_is_still_removed():
    impair_network("60s", device="n0", delay=50, netns=NEAR)
    leaf = re.search(r"qdisc netem (\w+):", sh("tc -n near qdisc show dev n0")).group(1)
    sh(f"tc -n near qdisc change dev n0 handle {leaf}: parent {int(leaf, 16) - 1:x}:4 netem delay 1ms")
    told = revert()["reverted"][0]
    assert told["verdicts"]["0"][0] == "removed"


def test_a_device_that_was_replaced_by_a_namesake_is_left_alone():
    sh("ip netns add spare; ip link add x0 netns spare type veth peer name x1 netns spare; ip -n spare link set x0 up")
    impair_network("60s", device="x0", delay=5, netns="/run/netns/spare")
    sh(
        "ip -n spare link del x0; ip link add x0 netns spare type veth peer name x1 netns spare;"
        "tc -n spare qdisc add dev x0 root handle 55: pfifo"
    )
    told = revert()["reverted"][0]
    assert told["verdicts"]["0"][0] == "lost"
    assert "55:" in sh("tc -n spare qdisc show dev x0")
    sh("ip netns del spare")


def test_a_namespace_that_is_gone_is_lost():
    sh("ip netns add spare; ip link add x0 netns spare type veth peer name x1 netns spare; ip -n spare link set x0 up")
    impair_network("60s", device="x0", delay=5, netns="/run/netns/spare")
    sh("ip netns del spare")
    assert revert()["reverted"][0]["verdicts"]["0"][0] == "lost"


def test_soft_roce_traffic_is_hit():
    """An rxe device on the interface: tc reaches its packets, and the kernel counts them."""
    sh("modprobe -a rdma_rxe; ip link add r0 type veth peer name r1; ip link set r0 up; ip link set r1 up")
    sh("rdma link add rxe0 type rxe netdev r0")
    try:
        output = on_node(impair_network("60s", device="r0", delay=5, dry_run=True))
        assert output["facts"]["rdma"] == "rxe"
    finally:
        sh("rdma link del rxe0; ip link del r0")
