"""A real ``chaos`` with our activities: run, validate, discover, plan, report, and what its death leaves (nothing)."""

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from victims import state_of, until

from chaosgpu.node import client

pytestmark = pytest.mark.toolkit

CHAOS = str(Path(sys.executable).with_name("chaos"))


def activity(kind, name, module, func, tolerance=None, **arguments):
    made = {
        "type": kind,
        "name": name,
        "provider": {"type": "python", "module": module, "func": func, "arguments": arguments},
    }
    return made if tolerance is None else {**made, "tolerance": tolerance}


def experiment(folder, method, **more):
    document = {
        "title": "a process that stands still",
        "description": "for the tests",
        "configuration": {"pid": {"type": "env", "key": "VICTIM"}},
        "secrets": {"token": {"value": {"type": "env", "key": "TOKEN"}}},
        "steady-state-hypothesis": {
            "title": "nothing is under a fault",
            "probes": [activity("probe", "none", "chaosgpu.probes", "faults_active", 0)],
        },
        "method": method,
        "rollbacks": [
            activity("action", "undo", "chaosgpu.rollbacks", "revert"),
            activity("action", "proven", "chaosgpu.rollbacks", "verify_restored"),
        ],
        **more,
    }
    path = Path(folder, "experiment.json")
    path.write_text(json.dumps(document))
    return path


def pause(**more):
    return activity("action", "pause", "chaosgpu.actions", "pause_processes", target={"pid": "${pid}"}, **more)


def chaos(folder, victim, *arguments, start=subprocess.run, **options):
    environment = {**os.environ, "VICTIM": str(victim), "TOKEN": "s3cret-token", "HOME": str(folder)}
    argv = [CHAOS, "--no-version-check", *map(str, arguments)]
    return start(
        argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def journal(folder):
    text = Path(folder, "journal.json").read_text()
    assert "NaN" not in text
    assert "s3cret-token" not in text
    return json.loads(text)


def test_a_run_with_a_fault_a_revert_and_its_proof(tmp_path, sleeper):
    undo = activity("action", "undo early", "chaosgpu.rollbacks", "revert")
    path = experiment(tmp_path, [pause(duration="30s"), undo])
    done = chaos(tmp_path, sleeper.pid, "run", "--rollback-strategy", "always", path)
    assert done.returncode == 0, done.stdout
    told = journal(tmp_path)
    assert told["status"] == "completed"
    paused = next(iter(told["run"][0]["output"]["nodes"].values()))
    assert paused["proof"]["states"] == {str(sleeper.pid): "t"}
    assert paused["undo"] == f"chaos gpu revert {paused['injection']}"
    assert told["run"][1]["output"]["reverted"][0]["verdicts"] == {"0": ["restored", ""]}
    assert told["rollbacks"][1]["output"] == {"verified": 1, "left": []}
    assert until(lambda: state_of(sleeper.pid) == "S")


def test_rollbacks_of_a_run_that_injected_nothing_are_safe_and_start_nothing(tmp_path, sleeper):
    never = experiment(tmp_path, [])
    done = chaos(tmp_path, sleeper.pid, "run", "--rollback-strategy", "always", never)
    assert done.returncode == 0, done.stdout
    told = journal(tmp_path)
    assert [activity["status"] for activity in told["rollbacks"]] == ["succeeded", "succeeded"]
    assert told["rollbacks"][0]["output"]["reverted"] == []
    assert told["rollbacks"][1]["output"] == {"verified": 0, "left": []}
    assert not os.path.exists("/run/chaosgpu/keeper.sock")


def started(folder, victim, duration, **more):
    """A run that holds its fault in a pause of the method."""
    held = {**pause(duration=duration, **more), "pauses": {"after": 60}}
    run = chaos(folder, victim, "run", experiment(folder, [held]), start=subprocess.Popen)
    assert until(lambda: state_of(victim) == "t", 30)
    time.sleep(0.5)  # its evidence is taken meanwhile
    return run


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_whatever_ends_chaos_the_fault_ends_with_it(tmp_path, sleeper, number):
    run = started(tmp_path, sleeper.pid, "120s")
    run.send_signal(number)
    run.communicate(timeout=60)
    assert until(lambda: state_of(sleeper.pid) == "S", 2)
    assert until(lambda: client.call({"op": "list"})["faults"] == [])


def test_a_fault_that_outlives_its_run_ends_at_its_deadline(tmp_path, sleeper):
    run = started(tmp_path, sleeper.pid, "5s", outlive_run=True)
    run.kill()
    run.communicate(timeout=60)
    assert state_of(sleeper.pid) == "t"
    assert until(lambda: state_of(sleeper.pid) == "S", 8)


def test_numbers_from_the_environment_are_text_and_understood(tmp_path, sleeper):
    path = experiment(tmp_path, [pause(duration="${seconds}")], configuration={
        "pid": {"type": "env", "key": "VICTIM"}, "seconds": {"type": "env", "key": "UNSET", "default": "20"},
    })  # fmt: skip
    done = chaos(tmp_path, sleeper.pid, "run", path)
    assert journal(tmp_path)["run"][0]["status"] == "succeeded", done.stdout


def test_a_refused_fault_fails_its_activity_in_one_line(tmp_path, sleeper):
    path = experiment(tmp_path, [pause(duration="3h")])
    chaos(tmp_path, sleeper.pid, "run", path)
    (failed,) = journal(tmp_path)["run"]
    assert failed["status"] == "failed"
    assert "1 to 3600 seconds" in str(failed["exception"])


def test_validate_accepts_it_and_finds_a_wrong_argument(tmp_path, sleeper):
    assert chaos(tmp_path, sleeper.pid, "validate", experiment(tmp_path, [pause(duration="30s")])).returncode == 0
    wrong = chaos(tmp_path, sleeper.pid, "validate", experiment(tmp_path, [pause(duration="30s", colour="red")]))
    assert wrong.returncode != 0
    assert "colour" in wrong.stdout


def test_the_plan_says_what_would_change_and_what_would_be_refused(tmp_path, sleeper):
    path = experiment(tmp_path, [pause(duration="30s"), {**pause(duration="9h"), "name": "too long"}])
    done = chaos(tmp_path, sleeper.pid, "gpu", "plan", path, "--json")
    assert done.returncode == 1
    good, bad = json.loads(done.stdout[done.stdout.index("[\n") :])
    assert good["fault"] == "host.pause_processes"
    assert str(sleeper.pid) in json.dumps(good)
    assert "1 to 3600 seconds" in bad["refused"]
    assert until(lambda: state_of(sleeper.pid) == "S")


def test_the_commands_for_people(tmp_path, sleeper):
    empty = chaos(tmp_path, sleeper.pid, "gpu", "faults")
    assert empty.returncode == 0
    assert "no faults" in empty.stdout
    run = started(tmp_path, sleeper.pid, "120s")
    listed = json.loads(chaos(tmp_path, 0, "gpu", "faults", "--json").stdout)
    assert [(entry["fault"], entry["state"]) for entry in listed] == [("host.pause_processes", "active")]
    record = chaos(tmp_path, 0, "gpu", "record", listed[0]["injection"]).stdout
    assert "undo by hand, in this order:" in record
    reverted = chaos(tmp_path, 0, "gpu", "revert", "--run")
    assert reverted.returncode == 0, reverted.stdout
    assert "closed" in reverted.stdout
    assert until(lambda: state_of(sleeper.pid) == "S")
    run.kill()
    run.communicate()
    catalogue = json.loads(chaos(tmp_path, 0, "gpu", "catalogue", "--json").stdout)
    assert {entry["name"] for entry in catalogue} >= {"storage.fill_disk", "rdma.impair_network"}
    nothing = chaos(tmp_path, 0, "gpu", "revert")
    assert nothing.returncode == 1
    assert "say what to revert" in nothing.stdout


def test_it_composes_with_other_drivers_controls_and_the_report(tmp_path, sleeper):
    """An http probe, an addons control, our activities; then ``chaos report`` on the journal."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    web = {
        "type": "probe",
        "name": "a web server answers",
        "tolerance": 200,
        "provider": {"type": "http", "url": f"http://127.0.0.1:{server.server_port}/", "timeout": 5},
    }
    controls = []
    if sys.version_info >= (3, 12):
        controls = [
            {
                "name": "repeat",
                "provider": {
                    "type": "python",
                    "module": "chaosaddons.controls.repeat",
                    "arguments": {"repeat_count": 2},
                },
            }
        ]
    undo = activity("action", "undo early", "chaosgpu.rollbacks", "revert")
    path = experiment(tmp_path, [{**web, "controls": controls}, pause(duration="30s"), undo])
    done = chaos(tmp_path, sleeper.pid, "run", "--rollback-strategy", "always", path)
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stdout
    assert journal(tmp_path)["status"] == "completed"
    report = chaos(tmp_path, sleeper.pid, "report", "--export-format=html", "journal.json", "report.html")
    assert report.returncode == 0, report.stdout
    assert re.search("a process that stands still", Path(tmp_path, "report.html").read_text())
