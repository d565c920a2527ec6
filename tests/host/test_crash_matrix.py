"""A sample of the crash matrix on this kernel, and the proof that it can fail: keepers that are wrong on purpose."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MATRIX = ROOT / "tests" / "matrix" / "matrix.py"


def matrix(*arguments, package=ROOT):
    return subprocess.run(
        [sys.executable, str(MATRIX), *arguments],
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_nothing_is_left_whatever_dies():
    done = matrix("--sample", "2", "--reach", "36", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout


WRONG = {
    "the record is written after the change": (
        "chaosgpu/node/ledger.py",
        "            sync_directory(directory)\n        except OSError",
        "            os.unlink(record.path)  # and append makes it again, too late\n        except OSError",
        "c",
    ),
    "an open record is forgotten at the start": (
        "chaosgpu/node/injections.py",
        '            if record.state == "closed":\n',
        '            if record.state in ("closed", "planned", "undoing"):\n',
        "c",
    ),
    "an undo begins without a line": (
        "chaosgpu/node/injections.py",
        '            {"line": "undoing", "at": time.time(),',
        '            {"line": "thinking", "at": time.time(),',
        "c",
    ),
    "an undo is believed and not looked at": (
        "chaosgpu/changes/affinity.py",
        "        placed = sorted(observed or self.wanted)\n",
        "        return Undone(ALREADY)\n        placed = sorted(observed or self.wanted)\n",
        "a",
    ),
    "the standby guards nothing": (
        "chaosgpu/node/standby.py",
        "    return True\n\n\ndef _keeper_ended",
        "    return False\n\n\ndef _keeper_ended",
        "c",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_keeper_fails_it(name, tmp_path):
    path, right, wrong, mode = WRONG[name]
    shutil.copytree(ROOT / "chaosgpu", tmp_path / "chaosgpu", ignore=shutil.ignore_patterns("__pycache__"))
    source = (tmp_path / path).read_text()
    assert right in source
    (tmp_path / path).write_text(source.replace(right, wrong, 1))
    walk = ("--faults", "misplace", "--modes", mode, "--roads", "revert", "--first-only")
    done = matrix(*walk, package=tmp_path)
    assert done.returncode != 0, done.stdout
    assert "FAILED" in done.stderr
