"""The crash matrix where this kernel is needed: network faults, by commands of a hand's, and limits by cgroup v2."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MATRIX = ROOT / "tests" / "matrix" / "matrix.py"


def matrix(*arguments, package=ROOT):
    return subprocess.run(
        [sys.executable, str(MATRIX), "--settle", "10", "--workers", "1", *arguments],  # in emulation
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(autouse=True)
def controllers():
    """The matrix switches controllers on for its cgroups; the tests after it find them as they were."""
    switches = Path("/sys/fs/cgroup/cgroup.subtree_control")
    before = switches.read_text().split()
    yield
    switches.write_text(" ".join(f"-{name}" for name in switches.read_text().split() if name not in before))


def test_nothing_is_left_whatever_dies():
    done = matrix("--faults", "slow,impair,throttle", "--modes", "ce", "--sample", "1", "--reach", "24", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout


def test_without_the_barrier_a_dead_hands_command_changes_what_was_undone(tmp_path):
    """The keeper and the hand die while ``tc`` stands at a call: who comes next must wait until it has ended."""
    shutil.copytree(ROOT / "chaosgpu", tmp_path / "chaosgpu", ignore=shutil.ignore_patterns("__pycache__"))
    hand = tmp_path / "chaosgpu" / "node" / "hand.py"
    right = "free = limbs.barrier(self.lock_path, self.lock_fd)"
    assert right in hand.read_text()
    hand.write_text(hand.read_text().replace(right, "free = True"))
    done = matrix("--faults", "impair", "--roads", "revert", "--modes", "e", "--first-only", package=tmp_path)
    assert done.returncode != 0, done.stdout
    assert "FAILED" in done.stderr
