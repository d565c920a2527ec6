"""The crash matrix: for every fault, SIGKILL at every state-changing system call of its inject and its undo.

Modes: ``a`` kills the caller of the call; ``b`` the keeper, while a child of its stands at the call; ``c`` the keeper
and all limbs together; ``d`` the standby with them; ``e`` keeper and hand, while a command of the hand's stands at the
call; ``r`` keeper and limbs of a fault in place, then everybody at a call of the recovery.

Roads to the undo: ``revert`` (the killer counts from the inject on), ``deadline``, and ``owner`` (the owner is killed).

What must hold: a fault has its whole effect or none; no undo that began needs anyone to ask for it again; once all is
done the witness, the whole-node snapshot and the ledger are as before, within ``--settle`` seconds. Where the standby
died too (``d``, ``r``), what ends with its holder must have ended by itself, and one sweep must do the rest.

``python tests/matrix/matrix.py --out kills.jsonl`` runs all of it, ``--sample 4 --seed 1`` a part. As root; each worker
works in a private mount namespace with a /run of its own, so with a keeper of its own.
"""

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # behind PYTHONPATH, which may name another package to try
sys.path.insert(0, str(Path(__file__).parent))

import killer
import scenarios
import snapshot

from chaosgpu.changes.errors import ChaosgpuError
from chaosgpu.node import client, ledger, places

DURATION_SECONDS = 60.0
SWEPT = "dr"  # modes in which the standby dies too


class Failure(Exception):
    """Something was left after a kill, or half done, or a caller hung."""


class Owner:
    """A process that injects, tells the answer, and lives on: the injection's owner, as ``chaos run`` would be."""

    def __init__(self, request):
        self._answers, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                try:
                    answer = client.call(request, start=False, seconds=60)
                except ChaosgpuError as error:
                    answer = {"broken": str(error)}
                os.write(write, json.dumps(answer).encode())
                while True:
                    signal.pause()
            finally:
                os._exit(1)
        os.close(write)

    def fileno(self):
        return self._answers

    def answer(self):
        if not readable([self], 70):
            raise Failure("the caller hangs")
        return json.loads(os.read(self._answers, 1 << 16))

    def end(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._answers)
        self.pid = 0


def readable(files, seconds):
    return select.select(files, [], [], seconds)[0]


def family():
    """(keeper, standby) of this /run, once both stand, as the keeper says."""
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        hello = client.call({"op": "hello"})
        if hello["standby"]:
            return hello["pid"], hello["standby"]
        time.sleep(0.005)
    raise Failure("keeper and standby did not both come up in 20 s")


class Life:
    """One life of an injection, with one kill in it."""

    def __init__(self, scenario, number, mode, road, settle_seconds):
        scenario.renew()
        self.scenario, self.number, self.mode, self.road = scenario, number, mode, road
        self.settle_seconds = settle_seconds
        self.hold_seconds = 0.3 * settle_seconds  # longer than whoever takes over needs to begin
        self.duration_seconds = 0.6 * settle_seconds if road == "deadline" else DURATION_SECONDS
        self.request = {
            "op": "inject",
            "request": uuid.uuid4().hex,
            "run": "matrix",
            "fault": scenario.fault,
            "arguments": scenario.arguments,
            "duration_seconds": self.duration_seconds,
            "allow": [],
            "owner": "peer",
            "outlive_run": False,
            "dry_run": False,
        }
        self.before = self.during = None
        self.phase = "inject"
        self.killer = self.owner = None

    def live(self):
        """What was struck, or None when all was over before the Nth call."""
        self.before = snapshot.take(self.scenario.pids)
        self.keeper, self.standby = family()
        try:
            struck = self._asked() if self.road == "revert" else self._by_itself()
            if struck:
                struck["phase"] = self.phase
            try:
                self._check(struck)
            except Failure as failure:
                raise Failure(f"after {struck}: {failure}") from None
            return struck
        finally:
            if self.owner:
                self.owner.end()

    def _asked(self):
        """Inject, then revert once; the killer is there from the start."""
        self.killer = killer.Started(self.keeper, self.standby, self.number, self.mode, self.hold_seconds)
        self.owner = Owner(self.request)
        answer = self.owner.answer()
        if not readable([self.killer], 0):
            self._must_be_in_place(answer)
            self.during = snapshot.take(self.scenario.pids)
            self.phase = "undo"
            if answer["state"] == "active":
                try:
                    client.call({"op": "revert"}, start=False, seconds=60)
                except ChaosgpuError:
                    if not readable([self.killer], 0):
                        raise
        return self.killer.told()

    def _by_itself(self):
        """Inject; the killer comes when the fault is in place; nobody asks for anything any more."""
        self.owner = Owner(self.request)
        self._must_be_in_place(self.owner.answer())
        self.phase = "undo"
        limbs = [pid for pid in killer.descendants(self.keeper) if pid != self.standby]
        self.killer = killer.Started(self.keeper, self.standby, self.number, self.mode, self.hold_seconds, limbs)
        if self.road == "owner":
            self.owner.end()
        give_up = time.monotonic() + 2 * self.settle_seconds
        while not readable([self.killer], 0.01) and opened() and time.monotonic() < give_up:
            pass
        return self.killer.told()

    def _must_be_in_place(self, answer):
        wanted = "done" if self.scenario.one_shot else "active"
        if answer.get("state") != wanted:
            self.killer and self.killer.told()
            raise Failure(f"with nobody killed, the injection was answered by {answer}")

    def _check(self, struck):
        if struck and self.mode in SWEPT:
            if self.scenario.held:
                self._soon(lambda: self._traces(), "it did not end with its holder")
            sweep()
        elif struck:
            self._taken_over()
        if struck and self.phase == "inject":
            self._ask_again()
        elif self.phase == "undo" and self.road == "revert" and not self._undo_began():
            time.sleep(0.3)  # nobody asked anyone who lived to tell: it stays, whole, or is undone, whole
            if not self._undo_began():
                self._must_equal(self.during, "it is neither in place nor undone")
                client.call({"op": "revert"}, start=False, seconds=60)
        self._soon(lambda: opened() or self._traces(), "something was left")

    def _undo_began(self):
        return self.scenario.held or self.scenario.one_shot or not any(state == "active" for state in opened().values())

    def _taken_over(self):
        """The standby does this by itself: whoever asks here starts no keeper."""
        give_up = time.monotonic() + 5
        while True:
            try:
                client.call({"op": "hello"}, start=False)
                return
            except ChaosgpuError as error:
                if time.monotonic() > give_up:
                    raise Failure(f"nobody took the keeper's place: {error}") from None
                time.sleep(0.005)

    def _ask_again(self):
        """As a caller would whose keeper died: the same request once more, then, where it is in place, the revert."""
        answer = client.call(self.request, seconds=60)
        if "error" not in answer and answer["state"] == "active":
            client.rescue({"op": "revert"})

    def _must_equal(self, wanted, complaint):
        found = snapshot.difference(wanted, snapshot.take(self.scenario.pids))
        if found and not self._undo_began():
            raise Failure(f"{complaint}: {'; '.join(found)}")

    def _traces(self):
        if self.scenario.in_place():
            return ["the witness sees the fault"]
        if self.scenario.one_shot:
            return []
        return snapshot.difference(self.before, snapshot.take(self.scenario.pids))

    def _soon(self, look, complaint):
        """Nothing may be seen any more within the settling time."""
        give_up = time.monotonic() + self.settle_seconds
        while left := look():
            if time.monotonic() > give_up:
                raise Failure(f"{complaint}: {left}")
            time.sleep(0.01)


def opened():
    """{injection: state} of what the ledger has open, read from its files: asking could start a keeper."""
    return {record.id: record.state for record in ledger.read_all(places.state_dir()) if record.state != "closed"}


def sweep():
    """With keeper and standby dead: what cron would run."""
    subprocess.run(
        [sys.executable, "-m", "chaosgpu.node.cli", "sweep"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])},
        check=False,
        capture_output=True,
        timeout=60,
    )


def walk(scenario, mode, road, numbers, given, report):
    """The kills of one scenario, mode and road; without ``numbers`` one at each call until there are no more."""
    for number in numbers or range(1, 10**6):
        row = {"scenario": scenario.name, "mode": mode, "road": road, "number": number}
        try:
            struck = Life(scenario, number, mode, road, given.settle).live()
        except (Failure, ChaosgpuError) as failure:
            report({**row, "failure": str(failure)})
            if given.first_only:
                return
            client.rescue({"op": "revert"})
            continue
        if struck:
            report({**row, **struck})
        elif not numbers:
            break


def worker(job, given):
    """Runs in its own mount namespace: (scenario, mode, road, numbers) from the command line."""
    name, mode, road, numbers = job
    snapshot.apart()
    scenario = scenarios.SCENARIOS[name](name)
    try:
        walk(scenario, mode, road, numbers, given, lambda row: print(json.dumps(row), flush=True))
    finally:
        scenario.close()
        client.call({"op": "leave"})
        snapshot.leave()


def private(argv):
    """The command in a private mount namespace with an empty /run."""
    script = 'mount -t tmpfs -o mode=755 run /run && exec "$@"'
    return ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", *argv]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--faults", default="all", help="scenarios, comma-separated, or all that this kernel can do")
    parser.add_argument("--modes", default="abcdr")
    parser.add_argument("--roads", default="revert,deadline,owner")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="walk everything so often")
    parser.add_argument("--sample", type=int, help="this many kills per scenario, mode and road, chosen by --seed")
    parser.add_argument("--reach", type=int, default=40, help="a sample's highest call number on the road of revert")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settle", type=float, default=2.0, help="seconds until nothing may be left (default: 2)")
    parser.add_argument("--first-only", action="store_true", help="end each walk at its first failure")
    parser.add_argument("--out", type=Path, help="every kill as a JSON line")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        worker(json.loads(given.job), given)
        return
    sys.exit(run(jobs_of(given), given))


def jobs_of(given):
    chance = random.Random(given.seed)
    jobs = []
    here = [name for name, scenario in scenarios.SCENARIOS.items() if scenario.possible()]
    for name in here if given.faults == "all" else given.faults.split(","):
        for mode in given.modes:
            for road in given.roads.split(","):
                if not makes_sense(scenarios.SCENARIOS[name], mode, road):
                    continue
                calls = range(1, 1 + (given.reach if road == "revert" else given.reach // 3))
                numbers = sorted(chance.sample(calls, given.sample)) if given.sample else None
                jobs.append((name, mode, road, numbers))
    return jobs * given.rounds


def makes_sense(scenario, mode, road):
    if scenario.one_shot and road != "revert":
        return False
    if mode == "r":
        return road == "owner"
    return mode != "e" or scenario.by_commands


def run(jobs, given):
    begun = time.monotonic()
    rows, lock = [], threading.Lock()
    out = given.out.open("w") if given.out else None

    def work(job):
        argv = [sys.executable, __file__, *sys.argv[1:], "--job", json.dumps(job)]
        with subprocess.Popen(private(argv), stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout:
                with lock:
                    rows.append(json.loads(line))
                    if out:
                        out.write(line)
                        out.flush()
                    if "failure" in rows[-1]:
                        print(f"\nFAILED {line.strip()}", file=sys.stderr)
                    elif sys.stderr.isatty():
                        print(f"\r{len(rows)} kills", end="", file=sys.stderr)
        if child.returncode != 0:
            with lock:
                name, mode, road, _ = job
                failure = f"the worker ended with {child.returncode}"
                rows.append({"scenario": name, "mode": mode, "road": road, "failure": failure})

    def pull():
        while True:
            with lock:
                if not jobs:
                    return
                job = jobs.pop(0)
            work(job)

    workers = [threading.Thread(target=pull) for _ in range(given.workers)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    return summary(rows, time.monotonic() - begun)


def summary(rows, seconds):
    """A table of kills, a line for each scenario and road, a column for each mode; failures in brackets."""
    modes = sorted({row["mode"] for row in rows})
    cells = {}
    for row in rows:
        cell = cells.setdefault((row["scenario"], row["road"]), {}).setdefault(row["mode"], [0, 0])
        cell["failure" in row] += 1
    print(f"\n{'scenario':12}{'road':10}" + "".join(f"{mode:>10}" for mode in modes))
    for (scenario, road), by_mode in sorted(cells.items()):
        told = (by_mode.get(mode, (0, 0)) for mode in modes)
        print(f"{scenario:12}{road:10}" + "".join(f"{f'{k} ({f})' if f else str(k):>10}" for k, f in told))
    failures = sum("failure" in row for row in rows)
    print(f"{len(rows) - failures} kills survived, {failures} failed, in {seconds:.0f} s")
    return 1 if failures or not rows else 0


if __name__ == "__main__":
    os.umask(0o077)
    main()
