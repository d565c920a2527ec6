"""What ``chaos discover`` shows: every activity, documented, with types that have a name."""

import inspect

import pytest

import chaosgpu
from chaosgpu import actions, probes, rollbacks

pytestmark = pytest.mark.toolkit

FOUND = chaosgpu.discover()["activities"]
NAMED = ("string", "integer", "number", "boolean", "list", "mapping")  # for people; anything else is "object"


def test_every_exported_activity_is_found_once_under_its_documented_module():
    found = [(entry["type"], entry["mod"].split(".")[1], entry["name"]) for entry in FOUND]
    assert len(found) == len(set(found))
    for module, kind in ((actions, "action"), (probes, "probe"), (rollbacks, "action")):
        part = module.__name__.split(".")[1]
        assert {name for k, m, name in found if (k, m) == (kind, part)} >= set(module.__all__)


@pytest.mark.parametrize("entry", FOUND, ids=lambda entry: f"{entry['mod']}.{entry['name']}")
def test_it_has_a_docstring_and_no_argument_without_a_type(entry):
    assert entry["doc"].strip()
    for argument in entry["arguments"]:
        assert argument["type"] in NAMED, argument


def test_every_argument_of_every_activity_can_be_given_by_name():
    """Keyword-only parameters do not show in discovery."""
    for module in (actions, probes, rollbacks):
        for name in module.__all__:
            kinds = {p.kind for p in inspect.signature(getattr(module, name)).parameters.values()}
            assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}, name
