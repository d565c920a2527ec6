"""Any argument to any action: a one-line error or a valid plan, never a traceback, and nothing touched.

``python tests/tools/fuzz.py --cases 100000 --seed 1`` prints the figures. Arguments that pass the caller's checks go on
to a dry run through a real keeper. As root, in a private /run (tests/run host does that for its sample).
"""

import argparse
import collections
import inspect
import json
import math
import os
import random
import string
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "matrix"))

import snapshot
from chaoslib.exceptions import ActivityFailed

import chaosgpu.actions

STRANGE = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**70), 10**400, 0.0, 1e308, math.nan, math.inf, -math.inf, "", " ",
    "\n", "\0", "nan", "inf", "-1", "1e9", "9" * 20, "٣", "💥", "\ud800", "a" * 10000, "../../etc/passwd",
    "/a b\nc", "/dev/null", "$(reboot)", "; reboot", "%s%n", "{}", "[]", "null", [], {}, [[]], [None], {"a": {"b": []}},
    (), b"bytes", object(), [1] * 1000, {1: 2}, float, lambda: None,
]  # fmt: skip


def likely(chance, victim):
    """Values that often pass: so that plans are made, not only refusals."""
    return {
        "target": [
            {"pid": victim},
            {"pid": str(victim)},
            {"command": "^sleep 8642$"},
            '{"command": "sleep"}',
            {"pid": 1},
        ],
        "duration": ["30s", 5, "5m", "1h", "2h", 3600, 0.5],
        "path": ["/", "/dev/shm", "/tmp", "/proc", "/nowhere", "/run"],
        "percent": [10, "50%", 99.5, 100, "7"],
        "bytes": ["10MiB", 1],
        "leave_bytes": ["1GiB"],
        "device": ["lo", "/dev/loop0", "eth0"],
        "cpus": ["0", [0, 1], "1-3"],
        "numa_node": ["remote", "0", 1],
        "signal": ["TERM", "KILL", "USR1"],
        "how": ["auto", "cgroup", "duty"],
        "direction": ["egress", "ingress", "both"],
        "peer": ["127.0.0.1", "::1", "10.0.0.0/8", "localhost"],
        "dry_run": [True],
        "allow": [None, [], ["long_duration"], "concurrent", ["nothing"]],
        "nodes": [None, ["local"], "local", ["other"]],
        "outlive_run": [False, "true"],
        "port": [80, "443"],
    }


def value(chance, name, victim):
    kind = chance.random()
    known = likely(chance, victim).get(name)
    if known and kind < 0.75:
        return chance.choice(known)
    if kind < 0.85:
        return chance.choice(STRANGE)
    if kind < 0.93:
        return chance.choice([chance.uniform(-10, 110), chance.randrange(-5, 5000), str(chance.randrange(2000))])
    return "".join(chance.choice(string.printable) for _ in range(chance.randrange(20)))


def case(chance, victim):
    """An action with some of its arguments, all as they come, the dry run mostly asked for as it must be."""
    name = chance.choice(chaosgpu.actions.__all__)
    parameters = inspect.signature(getattr(chaosgpu.actions, name)).parameters
    given = {}
    for argument, spec in parameters.items():
        if argument in ("configuration", "secrets", "dry_run"):
            continue
        if spec.default is inspect.Parameter.empty or chance.random() < 0.3:
            given[argument] = value(chance, argument, victim)
    return name, given


def outcome(name, given):
    """``refused`` or ``planned``; raises AssertionError for anything else."""
    try:
        told = getattr(chaosgpu.actions, name)(**given, dry_run=True)
    except ActivityFailed as refusal:
        text = str(refusal)
        fine = text and "\n" not in text and len(text) < 2000 and "Traceback" not in text
        assert fine and "internal error" not in text, f"{name} {given!r}: {text!r}"  # noqa: PT018
        return "refused"
    json.dumps(told, allow_nan=False)
    (node,) = told["nodes"].values()
    assert node["dry_run"] is True
    return "planned"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    victim = subprocess.Popen(["sleep", "8642"])
    before = snapshot.take([victim.pid])
    counts = collections.Counter()
    begun = time.monotonic()
    try:
        for number in range(given.cases):
            name, arguments = case(chance, victim.pid)
            counts[outcome(name, arguments)] += 1
            if sys.stderr.isatty() and number % 500 == 0:
                print(f"\r{number} of {given.cases}", end="", file=sys.stderr)
        left = snapshot.difference(before, snapshot.take([victim.pid]))
        records = list(Path(os.environ.get("CHAOSGPU_STATE", "/run/chaosgpu")).glob("*.record"))
    finally:
        victim.kill()
        victim.wait()
    assert not left, left
    assert not records, records
    seconds = time.monotonic() - begun
    print(f"{given.cases} cases, seed {given.seed}: {counts['refused']} refused in one line, ", end="")
    print(f"{counts['planned']} planned, nothing touched, {seconds:.0f} s")


if __name__ == "__main__":
    main()
