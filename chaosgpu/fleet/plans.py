"""Every fault of an experiment as a dry run, with the experiment's own configuration filled in by the toolkit."""

import contextlib
import importlib
import io
import logging
from collections.abc import Sequence
from typing import Any

from chaoslib import convert_vars, merge_vars, substitute
from chaoslib.configuration import load_configuration
from chaoslib.exceptions import ChaosException
from chaoslib.loader import load_experiment
from chaoslib.secret import load_secrets
from chaoslib.settings import load_settings

from chaosgpu.changes.errors import ChaosgpuError

ACTIONS = "chaosgpu.actions"


def plan(path: str, var: Sequence[str] = (), var_file: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The method's chaosgpu faults in order: activity, fault, duration, and what would change or why it is refused.

    Dynamic configuration is evaluated as ``chaos run`` would. Raises ChaosgpuError when the file is no experiment.
    """
    logging.getLogger("chaostoolkit").setLevel(logging.ERROR)
    try:
        experiment = load_experiment(path, load_settings())
        given = _variables(var, var_file)
        configuration = load_configuration(experiment.get("configuration", {}), given[0])
        secrets = load_secrets(experiment.get("secrets", {}), configuration, given[1])
    except (ChaosException, OSError, ValueError) as error:
        raise ChaosgpuError(f"{path} cannot be planned: {error}") from None
    planned = []
    for activity in experiment.get("method", []):
        provider = activity.get("provider", {})
        if provider.get("type") == "python" and str(provider.get("module", "")).startswith(ACTIONS):
            arguments = substitute(provider.get("arguments", {}), configuration, secrets)
            planned.append({"activity": activity["name"], **_dry_run(provider, dict(arguments or {}))})
    return planned


def _variables(var: Sequence[str], var_file: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Variables as ``chaos run --var`` and ``--var-file`` read them: (configuration, secrets)."""
    configuration, secrets = merge_vars(convert_vars(list(var)), list(var_file))
    return configuration or {}, secrets or {}


def _dry_run(provider: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    told = {"fault": provider["func"], "duration": str(arguments.get("duration", "?"))}
    try:
        action = getattr(importlib.import_module(provider["module"]), provider["func"])
        with contextlib.redirect_stdout(io.StringIO()):
            answer = action(**{**arguments, "dry_run": True})
    except (ChaosException, AttributeError, ImportError, TypeError) as error:
        return {**told, "refused": " ".join(str(error).split())}
    node, details = next(iter(answer["nodes"].items()))
    kept = {name: details[name] for name in ("shell", "warnings", "changes", "facts")}
    return {**told, "fault": answer["fault"], "node": node, **kept}
