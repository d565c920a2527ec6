"""The keeper under systemd as PID 1, and over a power cut."""

import json
import sys
from pathlib import Path

import vm

ROOT = Path(__file__).parents[2]
BOOT_SECONDS = 240

COMMON = f"""
import json, os, signal, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from chaosgpu.node import client

def misplace(seconds):
    victim = subprocess.Popen(["sleep", "600"])
    answer = client.call({{
        "op": "inject", "request": os.urandom(8).hex(), "run": "guest", "fault": "numa.misplace_processes",
        "arguments": {{"target": {{"pid": victim.pid}}, "cpus": [1]}}, "duration_seconds": seconds, "allow": [],
        "owner": "peer", "outlive_run": False, "dry_run": False}})
    assert answer.get("state") == "active", answer
    assert os.sched_getaffinity(victim.pid) == {{1}}
    return victim, answer

def recent():
    (told,) = client.call({{"op": "list", "recent": True}})["faults"]
    return told

def keeper():
    return client.call({{"op": "hello"}})["pid"]

def until(condition, seconds):
    give_up = time.monotonic() + seconds
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.1)
    return condition()
"""

UNDER_SYSTEMD = (
    COMMON
    + """
told = {}
victim, answer = misplace(90)
told["supervisor"] = answer["supervisor"]
active = subprocess.run(["systemctl", "is-active", "chaosgpu-keeper"], capture_output=True, text=True)
told["unit"] = active.stdout.strip()
first = keeper()
os.kill(first, signal.SIGKILL)
told["replaced after SIGKILL"] = until(lambda: keeper() != first, 30)
told["kept"] = recent()["state"]
second = keeper()
os.kill(second, signal.SIGSTOP)
time.sleep(3)
told["replaced after SIGSTOP"] = until(lambda: keeper() != second, 30)
told["undone at the deadline"] = until(lambda: os.sched_getaffinity(victim.pid) == {0, 1}, 100)
told["closed"] = until(lambda: recent()["state"] == "closed", 10)
client.call({"op": "leave"})
told["left for good"] = until(lambda: subprocess.run(
    ["systemctl", "is-active", "--quiet", "chaosgpu-keeper"]).returncode != 0, 20)
time.sleep(2)
told["not brought back"] = subprocess.run(["systemctl", "is-active", "--quiet", "chaosgpu-keeper"]).returncode != 0
open("told", "w").write(json.dumps(told))
"""
)

BEFORE_THE_CUT = (
    COMMON
    + """
victim, answer = misplace(600)
open("written", "w").write(answer["injection"])
time.sleep(600)
"""
)

AFTER_THE_CUT = (
    COMMON
    + """
open("told", "w").write(json.dumps(recent()))
"""
)

# State-changing calls of the family's, from the inject to the end of its revert.
CUT_AT = (9, 17, 22, 28, 36, 46)

LIFE_WITH_A_CUT = (
    COMMON
    + f"""
sys.path.insert(0, {str(ROOT / "tests" / "matrix")!r})
import killer
"""
    + """
number = int(sys.argv[1])
with open("told", "a") as told:
    told.write(json.dumps(client.call({"op": "list", "recent": True})["faults"]) + "\\n")
if number:
    hello = {}
    assert until(lambda: hello.update(client.call({"op": "hello"})) or hello["standby"], 60)
    fate = killer.Started(hello["pid"], hello["standby"], number, "p", hold_seconds=0)
    misplace(600)
    client.call({"op": "revert"})
    raise SystemExit(f"it ended before call {number}: {fate.told()}")
"""
)


def python(code, *arguments):
    return [sys.executable, "-B", "-c", code, *arguments]


def test_under_systemd_a_killed_or_hanging_keeper_is_brought_back(share: Path) -> None:
    result = vm.boot(python(UNDER_SYSTEMD), share, BOOT_SECONDS, init="systemd")
    assert result.exit_code == 0, result.explain()
    assert json.loads((share / "told").read_text()) == {
        "supervisor": "systemd",
        "unit": "active",
        "replaced after SIGKILL": True,
        "kept": "active",
        "replaced after SIGSTOP": True,
        "undone at the deadline": True,
        "closed": True,
        "left for good": True,
        "not brought back": True,
    }


def test_a_power_cut_takes_the_fault_and_leaves_a_record_that_is_closed_as_lost(share: Path) -> None:
    """The ledger is on a disk that survives: the next keeper finds the record of another boot."""
    disks = {"vdb": share / "ledger.img"}
    mount = "mkdir -p /mnt/ledger && mount /dev/vdb /mnt/ledger && export CHAOSGPU_STATE=/mnt/ledger/state && exec "
    shell = ["bash", "-c", f'{mount} "$@"', "bash"]
    first = ["bash", "-c", f'mkfs.ext4 -q /dev/vdb && {mount} "$@"', "bash"]
    cut = vm.boot(
        [*first, *python(BEFORE_THE_CUT)], share, BOOT_SECONDS, disks=disks, cut_when=(share / "written").exists
    )
    assert cut.exit_code == vm.DIED, cut.explain()
    again = vm.boot([*shell, *python(AFTER_THE_CUT)], share, BOOT_SECONDS, disks=disks)
    assert again.exit_code == 0, again.explain()
    told = json.loads((share / "told").read_text())
    assert told["injection"] == (share / "written").read_text()
    assert told["state"] == "closed"
    assert told["verdicts"] == {"0": ["lost", "the machine was restarted"]}


def test_no_instant_of_a_power_cut_leaves_a_record_that_stays_open(share: Path) -> None:
    """Cut after cut on the same ledger: each next keeper closes what it finds, and nothing is damaged or stuck."""
    disks = {"vdb": share / "ledger.img"}
    mount = "mkdir -p /mnt/ledger && mount /dev/vdb /mnt/ledger && export CHAOSGPU_STATE=/mnt/ledger/state && exec "
    for number in (*CUT_AT, 0):
        make = "mkfs.ext4 -q /dev/vdb && " if number == CUT_AT[0] else ""
        shell = ["bash", "-c", f'{make}{mount} "$@"', "bash"]
        cut = vm.boot([*shell, *python(LIFE_WITH_A_CUT, str(number))], share, BOOT_SECONDS, disks=disks)
        assert cut.exit_code == (vm.DIED if number else 0), cut.explain()
    found = [json.loads(line) for line in (share / "told").read_text().splitlines()]
    assert len(found) == len(CUT_AT) + 1
    assert {fault["state"] for faults in found for fault in faults} == {"closed"}
    ends = [fault["verdicts"].get("0", ["nothing"])[0] for fault in found[-1]]
    assert ends.count("lost") >= 3, ends
