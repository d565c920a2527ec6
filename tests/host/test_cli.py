"""``chaos gpu``: each command for people, in a pipe and on a terminal, as JSON, and with something stuck."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner
from victims import damaged_record, state_of, until

from chaosgpu.actions import misplace_processes, pause_processes
from chaosgpu.cli import gpu
from chaosgpu.faults.base import CATALOGUE
from chaosgpu.fleet import runs
from chaosgpu.node import client, standby

pytestmark = pytest.mark.toolkit


@pytest.fixture(autouse=True)
def new_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs.this_run.cache_clear()


@pytest.fixture
def stuck():
    damaged_record("feedface00")
    yield "STUCK feedface00"
    client.call({"op": "abandon", "id": "feedface00", "reason": "a test"})


def call(*arguments, code=0):
    done = CliRunner().invoke(gpu, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def step(func, name="a step", **arguments):
    provider = {"type": "python", "module": "chaosgpu.actions", "func": func, "arguments": arguments}
    return {"type": "action", "name": name, "provider": provider}


def experiment(folder, method, name="experiment.json", **more):
    path = folder / name
    path.write_text(json.dumps({"title": "t", "description": "d", "method": method, "rollbacks": [], **more}))
    return path


# --- faults, revert, record


def test_nothing_is_there_and_nothing_is_started():
    assert call("faults").stdout == "no faults\n"
    assert json.loads(call("faults", "--json").stdout) == []
    assert call("revert", "--all").stdout == "nothing to revert\n"
    assert standby.lock_holder() == 0


def test_a_fault_is_listed_reverted_and_remembered(sleeper, threaded):
    pause_processes({"pid": sleeper.pid}, "60s")
    misplace_processes({"pid": threaded.pid}, "60s", cpus=[0])
    lines = call("faults").stdout.splitlines()
    assert [line.split("\t")[2:4] for line in lines] == [
        ["host.pause_processes", "active"],
        ["numa.misplace_processes", "active"],
    ]
    assert re.fullmatch(r"\d+ s", lines[0].split("\t")[4])
    identity = lines[0].split("\t")[1]

    by_id = call("revert", identity).stdout.rstrip("\n").split("\t")
    assert by_id[3:] == ["closed", "", "reverted on request", "1 restored"]
    assert until(lambda: state_of(sleeper.pid) == "S")
    newest = json.loads(call("revert", "--run", "--json").stdout)
    assert [(entry["fault"], entry["state"]) for entry in newest] == [("numa.misplace_processes", "closed")]
    assert call("faults").stdout == "no faults\n"
    recent = json.loads(call("faults", "--recent", "--json").stdout)
    assert [entry["state"] for entry in recent] == ["closed", "closed"]

    record = call("record", identity).stdout
    assert record.startswith(f"{identity} host.pause_processes ")
    assert "it would have been undone by hand so:\n  [ ! -e /run/chaosgpu/" in record
    assert json.loads(call("record", identity, "--json").stdout)[0]["line"] == "planned"


def test_a_run_by_its_name(sleeper, threaded):
    pause_processes({"pid": sleeper.pid}, "60s")
    first = runs.this_run()
    runs.this_run.cache_clear()
    pause_processes({"pid": threaded.pid}, "60s", allow=["concurrent"])
    (reverted,) = json.loads(call("revert", "--run", first, "--json").stdout)
    assert reverted["run"] == first
    assert state_of(threaded.pid) == "t"


@pytest.mark.parametrize("arguments", [[], ["abc", "--all"], ["--all", "--run", "r"]])
def test_revert_wants_exactly_one_choice(arguments):
    done = call("revert", *arguments, code=1)
    assert done.stderr == (
        "chaos gpu: say what to revert: an injection's id, --run [RUN] or --all (chaos gpu faults lists them)\n"
    )


def test_an_error_is_one_line_on_stderr():
    done = call("record", "nobody", "--json", code=1)
    assert done.stdout == ""
    assert re.fullmatch(r"chaos gpu: .*there is no injection 'nobody' here\n", done.stderr)
    assert call("revert", "--run", code=1).stderr.startswith("chaos gpu: no run is remembered in ")


@pytest.mark.parametrize("command", [["faults"], ["catalogue"], ["record", "feedface00"], ["lab", "status"]])
def test_what_is_stuck_is_the_first_line_of_every_command(stuck, command):
    assert call(*command, code=3).stdout.startswith(stuck)


def test_what_is_stuck_is_said_beside_json_and_errors(stuck, tmp_path):
    done = call("faults", "--json", code=3)
    assert done.stderr.startswith(stuck)
    assert [entry["state"] for entry in json.loads(done.stdout)] == ["stuck"]
    assert call("record", "nobody", code=3).stdout.startswith(stuck)
    assert call("revert", "--all", code=3).stdout.startswith(stuck)
    plan = experiment(tmp_path, [step("pause_processes", target={"pid": 1}, duration="9h")])
    assert call("plan", plan, code=3).stdout.startswith(stuck)


# --- catalogue


def test_the_catalogue_has_every_fault_with_its_declaration():
    told = {entry["name"]: entry for entry in json.loads(call("catalogue", "--json").stdout)}
    assert set(told) == set(CATALOGUE)
    fill = told["storage.fill_disk"]
    assert fill["action"] == "chaosgpu.actions.fill_disk"
    assert fill["parameters"]["path"]["type"] == "str"
    assert "default" not in fill["parameters"]["path"]
    assert fill["parameters"]["percent"] == {**fill["parameters"]["percent"], "type": "float", "default": None}
    assert told["host.kill_processes"]["parameters"]["signal"]["default"] == "TERM"
    lines = call("catalogue").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == sorted(CATALOGUE)


# --- plan


def test_a_plan_has_every_fault_in_order_from_what_to_what(tmp_path, sleeper):
    other = {
        "type": "probe",
        "name": "not ours",
        "provider": {"type": "python", "module": "os.path", "func": "exists", "arguments": {"path": "/"}},
    }
    method = [
        step("misplace_processes", "move", target={"pid": "${pid}"}, cpus="${cpus}", duration="${seconds}"),
        other,
        step("pause_processes", "pause", target={"command": "^no such ${word}$"}, duration=10),
        {"ref": "move"},
    ]
    configuration = {
        "pid": {"type": "env", "key": "VICTIM_OF_PLAN", "default": "1"},
        "cpus": [0],
        "seconds": "1s",
        "word": {"name": "w", "type": "probe", "provider": {"type": "python", "module": "os", "func": "getcwd"}},
    }
    path = experiment(tmp_path, method, configuration=configuration)
    variables = tmp_path / "more.yaml"
    variables.write_text(f"configuration:\n  pid: {sleeper.pid}\n")
    arguments = ["plan", path, "--var", "seconds:int=20", "--var-file", variables]
    move, pause, again = json.loads(call(*arguments, "--json", code=1).stdout)
    before = ",".join(map(str, sorted(os.sched_getaffinity(sleeper.pid))))
    (change,) = move["would_change"]
    assert (move["activity"], move["fault"], move["duration"]) == ("move", "numa.misplace_processes", "20")
    assert (change["what"], change["to"]) == (f"CPU affinity of process {sleeper.pid}", "0")
    assert change["from"] in (before, before.replace(",", "-"))
    assert change["by_hand"].startswith("taskset ")
    assert f"no process was found for command '^no such {os.getcwd()}$'" in pause["refused"]
    assert again["would_change"] == move["would_change"]

    text = call(*arguments, code=1).stdout
    assert f"1. move: numa.misplace_processes on {move['node']} for 20: would run\n" in text
    assert f"   CPU affinity of process {sleeper.pid}: {change['from']} -> 0\n" in text
    assert f"     undone by  {change['undo_by_hand']}\n" in text
    assert "2. pause: pause_processes for 10: refused\n   ! " in text
    assert os.sched_getaffinity(sleeper.pid) == os.sched_getaffinity(0)
    assert call("faults").stdout == "no faults\n"


def test_a_plan_without_a_refusal_succeeds(tmp_path, sleeper):
    method = [step("pause_processes", target={"pid": sleeper.pid}, duration=10)]
    assert ": running -> stopped\n" in call("plan", experiment(tmp_path, method)).stdout
    empty = experiment(tmp_path, [], "empty.json")
    assert call("plan", empty).stdout == "this experiment has no chaosgpu fault\n"


def test_a_plan_is_refused_while_another_fault_holds_the_same(tmp_path, sleeper):
    pause_processes({"pid": sleeper.pid}, "60s")
    path = experiment(tmp_path, [step("pause_processes", target={"pid": sleeper.pid}, duration=10)])
    assert "! " in call("plan", path, code=1).stdout


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "{", "Expecting property name"),
        ("a.json", "[]", "it is no experiment"),
        ("a.json", "3", "it is no experiment"),
        ("a.json", "{}", "experiment"),
        ("a.json", '{"title": "t", "description": "d"}', "method"),
        ("a.yaml", "a: [", "YAML"),
        ("a.txt", "{}", "extensions are supported"),
        ("a.json", b"\xff\xfe", "utf-8"),
    ],
)
def test_what_is_no_experiment_is_one_line(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = call("plan", path, code=1)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_file_a_missing_variable_and_an_unknown_argument_are_one_line(tmp_path):
    assert "does not exist" in call("plan", tmp_path / "nowhere.json", code=1).stderr
    unset = experiment(tmp_path, [], configuration={"x": {"type": "env", "key": "NOT_SET_ANYWHERE"}})
    assert "NOT_SET_ANYWHERE" in call("plan", unset, code=1).stderr
    wrong = experiment(tmp_path, [step("pause_processes", target={"pid": 1}, colour="red")])
    assert "required argument 'duration' is missing" in call("plan", wrong, code=1).stderr
    for bad in ("NOT_SET_ANYWHERE:int=y", "x:colour=y", "nonsense"):
        (line,) = call("plan", unset, "--var", bad, code=1).stderr.splitlines()
        assert "makes reference" not in line


# --- a terminal


def on_a_terminal(*arguments):
    """What a terminal 100 columns wide gets from a real ``chaos gpu``."""
    main, side = pty.openpty()
    argv = [sys.executable, "-m", "chaostoolkit", "--no-version-check", "--no-log-file", "gpu", *arguments]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"}
    child = subprocess.Popen(argv, stdin=side, stdout=side, stderr=side, env=environment)
    os.close(side)
    written = b""
    with contextlib.suppress(OSError):  # EIO: the child has closed the terminal
        while chunk := os.read(main, 65536):
            written += chunk
    os.close(main)
    return child.wait(), written.decode().replace("\r\n", "\n")


def test_a_terminal_gets_headings_and_colours(sleeper):
    pause_processes({"pid": sleeper.pid}, "60s")
    code, text = on_a_terminal("faults")
    assert code == 0
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert plain != text
    assert plain.splitlines()[0].split() == ["node", "injection", "fault", "state", "left", "ended", "by", "verdicts"]
    assert "host.pause_processes" in plain
    assert max(map(len, plain.splitlines())) <= 100


def test_the_catalogue_fits_a_terminal():
    code, text = on_a_terminal("catalogue")
    assert code == 0
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(map(len, plain.splitlines())) <= 120
    assert "  but not     " in plain
