"""Benchmarks: ``python tests/bench/run.py [NAME ...]`` prints ratios measured in one run, and asserts nothing.

These machines are small and noisy, so each figure stands beside what it is compared with. As root; ``netem`` needs a
kernel with sch_netem (``python tests/guest/vm.py -- python tests/bench/run.py netem``), in a namespace of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from chaosgpu.node import client, ledger, places, standby

RUN = uuid.uuid4().hex[:12]


def inject(fault, arguments, seconds):
    answer = client.call(
        {
            "op": "inject",
            "request": uuid.uuid4().hex,
            "run": RUN,
            "fault": fault,
            "arguments": arguments,
            "duration_seconds": seconds,
            "allow": [],
            "owner": "peer",
            "outlive_run": False,
            "dry_run": False,
        }
    )
    if "error" in answer:
        raise SystemExit(f"{fault}: {answer['error']['message']}")
    return answer


def seconds_of(call, times):
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def bench_import():
    """What importing our activities adds to the toolkit's own import."""

    def python(code):
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    base, ours, nothing = [], [], []
    for _ in range(9):  # in turn, so that a drift of the machine's speed hits all three
        nothing.append(seconds_of(python("pass"), 1))
        base.append(seconds_of(python("import chaoslib.experiment"), 1))
        ours.append(seconds_of(python("import chaoslib.experiment, chaosgpu.actions"), 1))
    empty, toolkit, both = (statistics.median(taken) for taken in (nothing, base, ours))
    print(f"import: chaoslib {1e3 * (toolkit - empty):.0f} ms, with chaosgpu.actions {1e3 * (both - empty):.0f} ms:")
    print(f"import: ratio {(both - empty) / (toolkit - empty):.2f} (aim 1.5 or less)")


def bench_lateness(count=200, spread_seconds=10.0):
    """How late undos are, with many faults active, from the ledger's own deadlines and closing times."""
    victims = [subprocess.Popen(["sleep", "600"]) for _ in range(count)]
    try:
        begun = time.monotonic()
        first = 5 + 0.3 * count  # each is proven, one after the other, before the first is due
        for number, victim in enumerate(victims):
            until = first + spread_seconds * number / count
            inject(
                "numa.misplace_processes",
                {"target": {"pid": victim.pid}, "cpus": "0"},
                until - (time.monotonic() - begun),
            )
        print(f"lateness: {count} faults active after {time.monotonic() - begun:.1f} s")
        while client.call({"op": "list"})["faults"]:
            time.sleep(0.5)
    finally:
        for victim in victims:
            victim.kill()
            victim.wait()
    late = []
    for record in ledger.read_all(places.state_dir()):
        closed = record.last("closed")
        if closed and record.planned["run"] == RUN and record.last("undoing")["cause"] == "deadline":
            late.append(1e3 * (closed["at"] - record.planned["deadline_wall"]))
    late.sort()
    p99 = late[int(0.99 * (len(late) - 1))]
    print(f"lateness: {len(late)} undos over {spread_seconds:g} s: median {statistics.median(late):.1f} ms, ", end="")
    print(f"p99 {p99:.1f} ms, worst {late[-1]:.1f} ms (aim p99 100 ms or less)")


def bench_rest(seconds=20.0):
    """What a keeper costs when nothing is under a fault: memory, CPU, wake-ups."""
    client.call({"op": "list"})
    pid = standby.lock_holder()

    def status():
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        switches = int(lines["voluntary_ctxt_switches"]) + int(lines["nonvoluntary_ctxt_switches"])
        return int(lines["VmRSS"].split()[0]) / 1024, switches, sum(map(int, ticks))

    time.sleep(1)
    rss, switches, ticks = status()
    time.sleep(seconds)
    _, switches_after, ticks_after = status()
    print(f"rest: keeper {rss:.1f} MiB resident (aim 25 or less), in {seconds:g} s", end=" ")
    print(f"{switches_after - switches} wake-ups (aim 0), {ticks_after - ticks} clock ticks of CPU")


def bench_netem(times=20):
    """One netem change, injected and undone by a warm keeper, against the bare pair of tc commands."""
    netns = f"bench{os.getpid()}"
    for argv in (
        ["ip", "netns", "add", netns],
        ["ip", "-n", netns, "link", "add", "b0", "type", "veth", "peer", "name", "b1"],
        ["ip", "-n", netns, "addr", "add", "10.99.0.1/24", "dev", "b0"],
        ["ip", "-n", netns, "link", "set", "b0", "up"],
        ["ip", "-n", netns, "link", "set", "b1", "up"],
    ):
        subprocess.run(argv, check=True)
    try:
        tc = ["tc", "-n", netns, "qdisc"]

        def bare():
            subprocess.run([*tc, "add", "dev", "b0", "root", "handle", "7f:", "netem", "delay", "20ms"], check=True)
            subprocess.run([*tc, "del", "dev", "b0", "root", "handle", "7f:"], check=True)

        def ours():
            arguments = {"device": "b0", "delay": 20, "netns": f"/run/netns/{netns}"}
            told = inject("rdma.impair_network", arguments, 30)
            client.call({"op": "revert", "ids": [told["injection"]]})

        ours()
        ratios, pairs, faults = [], [], []
        for _ in range(times):
            pairs.append(seconds_of(bare, 1))
            faults.append(seconds_of(ours, 1))
            ratios.append(faults[-1] / pairs[-1])
        print(
            f"netem: tc pair {1e3 * statistics.median(pairs):.1f} ms, fault {1e3 * statistics.median(faults):.1f} ms:"
        )
        print(f"netem: ratio {statistics.median(ratios):.1f} (aim 5 or less)")
    finally:
        subprocess.run(["ip", "netns", "del", netns], check=True)


BENCHES = {"import": bench_import, "rest": bench_rest, "lateness": bench_lateness, "netem": bench_netem}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], default=[*BENCHES])
    names = parser.parse_args().names or [*BENCHES]
    with tempfile.TemporaryDirectory(prefix="chaosgpu-bench-") as state:
        os.environ.setdefault("CHAOSGPU_STATE", state)
        for name in names:
            BENCHES[name]()
        if standby.lock_holder():
            print(json.dumps(client.call({"op": "leave"})))


if __name__ == "__main__":
    main()
