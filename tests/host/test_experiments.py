"""Each shipped experiment on the lab: a healthy job passes it, a broken one does not, and one nobody sees fails."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from victims import until

from chaosgpu import lab
from chaosgpu.node import client

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "experiments").glob("*.json"))
DIRECTORY = Path(f"/run/chaosgpu-test-{os.getpid()}-experiments")
CHAOS = str(Path(sys.executable).with_name("chaos"))
RUN_SECONDS = 180


@pytest.fixture(scope="module", autouse=True)
def _place():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHAOSGPU_LAB", str(DIRECTORY))
        yield
        lab.down(lambda step: None)


@pytest.fixture
def parts():
    """{component: pid} of a lab that is well; what an earlier test broke is made anew."""
    lab.up(lambda step: None)
    return {part["name"]: part["pid"] for part in lab.status()["components"] if "pid" in part}


def started(experiment, folder):
    argv = [
        CHAOS,
        "--no-version-check",
        "run",
        "--rollback-strategy",
        "always",
        "--var-file",
        str(DIRECTORY / "variables.json"),
    ]
    environment = {**os.environ, "HOME": str(folder)}
    return subprocess.Popen(
        [*argv, str(experiment)], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def ended(run, folder):
    run.wait(RUN_SECONDS)
    assert client.call({"op": "list"})["faults"] == []
    return json.loads((folder / "journal.json").read_text())


def known():
    return {fault["injection"] for fault in client.call({"op": "list", "recent": True})["faults"]}


@pytest.mark.parametrize("experiment", SHIPPED, ids=lambda path: path.stem)
def test_a_healthy_job_completes_it(experiment, parts, tmp_path):
    journal = ended(started(experiment, tmp_path), tmp_path)
    assert journal["status"] == "completed"
    assert journal["steady_states"]["before"]["steady_state_met"]
    assert journal["steady_states"]["after"]["steady_state_met"]
    outcomes = {done["activity"]["name"]: (done["status"], done["output"]) for done in journal["run"]}
    assert {status for status, _ in outcomes.values()} == {"succeeded"}, outcomes
    assert not any(output is False for _, output in outcomes.values()), outcomes
    assert {done["status"] for done in journal["rollbacks"]} == {"succeeded"}


@pytest.mark.parametrize("experiment", SHIPPED, ids=lambda path: path.stem)
def test_a_job_that_does_not_recover_deviates(experiment, parts, tmp_path):
    """From the first fault on a rank stands still, by nobody's fault of ours: it is not started again with it."""
    run = started(experiment, tmp_path)
    rank = parts["rank1"]
    try:
        assert until(lambda: client.call({"op": "list"})["faults"], 60)
        os.kill(rank, signal.SIGSTOP)
        journal = ended(run, tmp_path)
    finally:
        os.kill(rank, signal.SIGCONT)
    assert journal["deviated"] is True
    assert not journal["steady_states"]["after"]["steady_state_met"]
    assert {done["status"] for done in journal["rollbacks"]} == {"succeeded"}


@pytest.mark.parametrize("experiment", SHIPPED, ids=lambda path: path.stem)
def test_without_prometheus_no_fault_begins(experiment, parts, tmp_path):
    os.kill(parts["prometheus"], signal.SIGKILL)
    before = known()
    journal = ended(started(experiment, tmp_path), tmp_path)
    assert journal["status"] == "failed"
    assert journal["run"] == []
    (probe, *_) = journal["steady_states"]["before"]["probes"]
    assert probe["status"] == "failed"
    assert "gave no answer: Connection refused" in probe["exception"][-1]
    assert known() == before
