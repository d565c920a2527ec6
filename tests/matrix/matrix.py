"""The crash matrix: for every fault, SIGKILL at every state-changing system call of its inject and its undo.

Modes: ``a`` kills the caller of the call; ``b`` kills the keeper while a child stands at the call; ``c`` kills the
keeper and all limbs together; ``d`` the standby with them, after which a sweep must clean up (what ends with its holder
must have ended by itself). After each kill nothing may be left: the witness is clean, the whole-node snapshot is as
before, no record is open. A kill during the undo gets no second request: the node must finish by itself.

``python tests/matrix/matrix.py --faults all --modes abcd --workers 2`` runs all of it, ``--sample 40 --seed 1`` a part.
As root; each worker works in a private mount namespace with a /run of its own, so in a keeper of its own.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # behind PYTHONPATH, which may name another package to try
sys.path.insert(0, str(Path(__file__).parent))

import scenarios
import snapshot

from chaosgpu.changes.errors import ChaosgpuError
from chaosgpu.node import client

DURATION_SECONDS = 30.0
SETTLE_SECONDS = 2.0
HERE = Path(__file__).parent


class Failure(Exception):
    """A kill after which something was left, or a caller that hung."""


def family():
    """(keeper, standby) of this /run, once both stand, as the keeper says."""
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        hello = client.call({"op": "hello"})
        if hello["standby"]:
            return hello["pid"], hello["standby"]
        time.sleep(0.01)
    raise Failure("keeper and standby did not both come up in 20 s")


class Caller(threading.Thread):
    """Injects, then reverts, as an experiment would; a dead keeper is asked again with the same request id."""

    def __init__(self, scenario):
        super().__init__(daemon=True)
        self.request = {
            "op": "inject",
            "request": uuid.uuid4().hex,
            "run": "matrix",
            "fault": scenario.fault,
            "arguments": scenario.arguments,
            "duration_seconds": DURATION_SECONDS,
            "allow": [],
            "owner": "peer",
            "outlive_run": False,
            "dry_run": False,
        }
        self.phase = "inject"
        self.answer = None

    def run(self):
        try:
            self.answer = client.call(self.request, seconds=60)
            if "error" not in self.answer and self.answer["state"] == "active":
                self.phase = "undo"
                client.rescue({"op": "revert"})
            self.phase = "done"
        except ChaosgpuError as error:
            self.answer = {"broken": str(error)}


def strike(scenario, number, mode):
    """One life of an injection with one kill; what was struck, or None when it ended before the Nth call."""
    scenario.renew()
    before = snapshot.take(scenario.pids)
    keeper, guard = family()
    argv = [sys.executable, str(HERE / "killer.py"), str(keeper), str(guard), str(number), mode]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as killer:
        killer.stdout.readline()
        caller = Caller(scenario)
        caller.start()
        while caller.is_alive() and killer.poll() is None:
            caller.join(0.02)
        phase = caller.phase
        killer.terminate()
        told = json.loads(killer.stdout.readline())
    struck = told["struck"]
    caller.join(70)
    if caller.is_alive():
        raise Failure(f"the caller hangs after {struck} in {phase}")
    if struck is None:
        return None
    struck["phase"] = phase
    check(scenario, before, struck, caller, mode)
    return struck


def check(scenario, before, struck, caller, mode):
    """After a kill: ask again where a caller would, then nothing may be left within the settling time."""
    if mode == "d":
        if not listed_or_swept():
            raise Failure(f"no keeper after {struck}")
    if struck["phase"] == "inject" and caller.phase != "done":
        answer = client.call(caller.request, seconds=60)
        if "error" not in answer:
            client.rescue({"op": "revert"})
    give_up = time.monotonic() + SETTLE_SECONDS
    while True:
        left = leftovers(scenario, before)
        if not left:
            return
        if time.monotonic() > give_up:
            raise Failure(f"after {struck}: {'; '.join(left)}")
        time.sleep(0.02)


def listed_or_swept():
    """With keeper and standby dead: the sweep that cron would run."""
    argv = [sys.executable, "-m", "chaosgpu.node.cli", "sweep"]
    subprocess.run(argv, check=False, capture_output=True, timeout=60)
    return True


def leftovers(scenario, before):
    opened = client.call({"op": "list"}, seconds=30)["faults"]
    left = [
        f"{entry['injection']} is {entry['state']} ({entry.get('stuck', entry.get('cause', ''))})" for entry in opened
    ]
    if scenario.in_place():
        left.append("the witness still sees the fault")
    if scenario.fault != "host.kill_processes":
        left += snapshot.difference(before, snapshot.take(scenario.pids))
    return left


def walk(name, mode, numbers, stop_at_end, report):
    """All kills of one scenario and mode, in one private /run."""
    scenario = scenarios.SCENARIOS[name]()
    kills = failures = 0
    try:
        for number in numbers:
            try:
                struck = strike(scenario, number, mode)
            except Failure as failure:
                failures += 1
                report({"scenario": name, "mode": mode, "number": number, "failure": str(failure)})
                client.rescue({"op": "revert"})
                continue
            if struck is None:
                if stop_at_end:
                    break
                continue
            kills += 1
            report({"scenario": name, "mode": mode, "number": number, **struck})
    finally:
        scenario.close()
    return kills, failures


def worker(jobs):
    """Runs in its own mount namespace: jobs as (scenario, mode, numbers or null) from the command line."""
    snapshot.apart()
    for name, mode, numbers in jobs:
        endless = numbers is None
        walk(
            name,
            mode,
            iter(range(1, 10**6)) if endless else numbers,
            endless,
            lambda row: print(json.dumps(row), flush=True),
        )
    client.call({"op": "leave"})
    snapshot.leave()


def private(argv):
    """The command in a private mount namespace with an empty /run."""
    script = 'mount -t tmpfs -o mode=755 run /run && exec "$@"'
    return ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", *argv]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--faults", default="all", help="scenarios, comma-separated, or all that this kernel can do")
    parser.add_argument("--modes", default="abcd")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sample", type=int, help="this many kills per scenario and mode, at calls chosen by --seed")
    parser.add_argument("--reach", type=int, default=60, help="a sample's highest call number")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="every kill as a JSON line")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.jobs:
        worker(json.loads(given.jobs))
        return
    here = [name for name, scenario in scenarios.SCENARIOS.items() if scenario.needs != "guest"]
    names = here if given.faults == "all" else given.faults.split(",")
    chance = random.Random(given.seed)
    jobs = [
        (name, mode, sorted(chance.sample(range(1, given.reach + 1), given.sample)) if given.sample else None)
        for mode in given.modes
        for name in names
    ]
    sys.exit(run(jobs, given))


def run(jobs, given):
    begun = time.monotonic()
    rows, lock = [], threading.Lock()
    out = given.out.open("w") if given.out else None

    def work(mine):
        argv = [sys.executable, __file__, "--jobs", json.dumps(mine)]
        with subprocess.Popen(private(argv), stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout:
                with lock:
                    rows.append(json.loads(line))
                    if out:
                        out.write(line)
                    if "failure" in rows[-1]:
                        print(f"\nFAILED {line.strip()}", file=sys.stderr)
                    elif sys.stderr.isatty():
                        print(f"\r{len(rows)} kills", end="", file=sys.stderr)
        if child.returncode != 0:
            with lock:
                rows.append({"scenario": "?", "mode": "?", "failure": f"a worker ended with {child.returncode}"})

    def pull():
        while True:
            with lock:
                if not jobs:
                    return
                mine = jobs.pop(0)
            work([mine])

    workers = [threading.Thread(target=pull) for _ in range(given.workers)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    return summary(rows, time.monotonic() - begun)


def summary(rows, seconds):
    table = {}
    for row in rows:
        kills, failures = table.get((row["scenario"], row["mode"]), (0, 0))
        failed = "failure" in row
        table[row["scenario"], row["mode"]] = (kills + (not failed), failures + failed)
    print(f"\n{'scenario':12}{'mode':6}{'kills':>7}{'failed':>8}")
    for (scenario, mode), (kills, failures) in sorted(table.items()):
        print(f"{scenario:12}{mode:6}{kills:7}{failures:8}")
    kills, failures = (sum(column) for column in zip(*table.values(), strict=True)) if table else (0, 0)
    print(f"{kills} kills survived, {failures} failed, in {seconds:.0f} s")
    return 1 if failures or not kills else 0


if __name__ == "__main__":
    os.umask(0o077)
    main()
