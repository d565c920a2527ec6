"""A fault that lacks a column is not released: declaration, action, doc row, scenario in the crash matrix, evidence."""

import dataclasses
import inspect
import sys
import typing
from pathlib import Path

import pytest

import chaosgpu.actions
from chaosgpu.changes import base as changes
from chaosgpu.faults.base import CATALOGUE, LAYERS, Declaration, Fault

ROOT = Path(__file__).parents[2]
COMMON = {
    "duration": (str, inspect.Parameter.empty),
    "nodes": (typing.List[str], None),  # noqa: UP006 - what discovery understands
    "dry_run": (bool, False),
    "allow": (typing.List[str], None),  # noqa: UP006
    "outlive_run": (bool, False),
}
FAULTS = sorted(CATALOGUE)
ACTIONS = sorted(chaosgpu.actions.__all__)


def action_of(name):
    return getattr(chaosgpu.actions, name.partition(".")[2])


def test_faults_and_actions_are_the_same_set():
    assert sorted(name.partition(".")[2] for name in FAULTS) == ACTIONS


@pytest.mark.parametrize("name", FAULTS)
def test_the_declaration_is_complete(name):
    told: Declaration = CATALOGUE[name].declaration
    assert told.layer in LAYERS
    assert told.reversible in ("exact", "distribution", "one-shot", "lower-layer-only")
    assert told.takes_effect in ("now", "new-connections", "next-launch")
    assert told.danger in ("none", "service", "hardware")
    for field in ("summary", "scope", "certifies", "does_not_certify", "residue"):
        assert getattr(told, field).strip(), field
    assert told.needs
    assert told.metrics
    assert set(told.seen_on) <= {"simulator", "guest", "host"} or any("hardware" in place for place in told.seen_on)
    assert told.seen_on


@pytest.mark.parametrize("name", FAULTS)
def test_parameters_and_arguments_agree_in_name_type_and_default(name):
    arguments = dict(inspect.signature(action_of(name)).parameters)
    for common, (kind, default) in COMMON.items():
        given = arguments.pop(common)
        assert (given.annotation, given.default) == (kind, default), common
    for injected in ("configuration", "secrets"):
        assert arguments.pop(injected).default is None
    hints = typing.get_type_hints(CATALOGUE[name])
    for field in dataclasses.fields(CATALOGUE[name]):
        given = arguments.pop(field.name)
        wanted = [kind for kind in typing.get_args(hints[field.name]) if kind is not type(None)] or [hints[field.name]]
        kind = hints[field.name] if type(None) not in typing.get_args(hints[field.name]) else wanted[0]
        assert given.annotation == kind, field.name
        missing = field.default is dataclasses.MISSING
        assert given.default == (inspect.Parameter.empty if missing else field.default), field.name
    assert not arguments


@pytest.mark.parametrize("name", FAULTS)
def test_the_readme_has_a_row(name):
    assert f"| `{name.partition('.')[2]}` | `{name}` |" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", FAULTS)
def test_the_crash_matrix_has_a_scenario(name):
    sys.path.insert(0, str(ROOT / "tests" / "matrix"))
    import scenarios

    assert name in {scenario.fault for scenario in scenarios.SCENARIOS.values()}


@pytest.mark.parametrize("name", FAULTS)
def test_an_outsider_saw_it(name):
    """A test of the host or guest tier injects it through its public action."""
    action = name.partition(".")[2]
    tests = [*ROOT.glob("tests/host/test_*.py"), *ROOT.glob("tests/guest/inside/test_*.py")]
    assert any(f"{action}(" in path.read_text() for path in tests)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_implements_its_whole_job(name):
    for method in ("survey", "changes", "evidence"):
        assert getattr(CATALOGUE[name], method) is not getattr(Fault, method)
    assert (CATALOGUE[name].__doc__ or "").strip()
    assert (inspect.getdoc(action_of(name)) or "").strip()


@pytest.mark.parametrize("kind", sorted(changes._KINDS))
def test_a_change_implements_its_whole_job(kind):
    cls = changes._KINDS[kind]
    assert cls.bound in (changes.FD, changes.BOOT, changes.DISK)
    for method in ("keys", "describe", "name"):
        assert getattr(cls, method) is not getattr(changes.Change, method), method


def test_importing_actions_loads_nothing_heavy():
    import subprocess

    code = "import sys, chaosgpu.actions; print([m for m in ('pynvml', 'kubernetes', 'prometheus_api_client', 'rich', 'aiohttp') if m in sys.modules])"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
