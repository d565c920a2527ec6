"""Carry one change through without a keeper: here, in a process that has only its record, or by its own shell line."""

import json
import subprocess
import sys

from chaosgpu.changes.base import Undone, from_json

ELSEWHERE = """
import json, sys
from chaosgpu.changes import affinity, cgroup, command, file_value, held_file, helper, io_limit, nft, process, qdisc
from chaosgpu.changes.base import from_json
from chaosgpu.changes.grip import Grip
document, observed = json.load(sys.stdin)
change, grip = from_json(document), Grip("elsewhere")
json.dump([*change.undo(observed, grip), change.holds(grip)], sys.stdout)
"""

HOLDER = """
import json, sys, time
from chaosgpu.changes import affinity, cgroup, command, file_value, held_file, helper, io_limit, nft, process, qdisc
from chaosgpu.changes.base import from_json
from chaosgpu.changes.grip import Grip
grip = Grip("holder")
print(json.dumps(from_json(json.loads(sys.argv[1])).apply(grip)), flush=True)
while True:
    grip.tend()
    time.sleep(0.02)
"""


def copied(change):
    """The change as it comes back from the ledger."""
    return from_json(json.loads(json.dumps(change.to_json())))


def undone_elsewhere(change, observed):
    """The undo in a fresh process that knows nothing but the record; its verdict, once it holds no more."""
    record = json.dumps([change.to_json(), observed])
    argv = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(argv, input=record, stdout=subprocess.PIPE, text=True, check=True)
    verdict, detail, holds = json.loads(done.stdout)
    assert not (holds and verdict in ("restored", "removed")), "undone without an error, yet it still holds"
    return Undone(verdict, detail)


def by_hand(line):
    """Run a line of ``describe`` as an operator would."""
    subprocess.run(["sh", "-ec", line], check=True, stdout=subprocess.DEVNULL)


def held_elsewhere(spawn, change):
    """A process that has applied the change and holds it; its end ends an fd-bound effect."""
    return spawn(sys.executable, "-c", HOLDER, json.dumps(change.to_json()), ready=True)
