"""Every fault of an experiment as a dry run, with the experiment's own configuration filled in by the toolkit."""

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from chaoslib import convert_vars, merge_vars, substitute
from chaoslib.configuration import load_configuration, load_dynamic_configuration
from chaoslib.exceptions import ChaosException
from chaoslib.experiment import ensure_experiment_is_valid
from chaoslib.loader import load_experiment
from chaoslib.secret import load_secrets
from chaoslib.settings import CHAOSTOOLKIT_CONFIG_PATH, load_settings

from chaosgpu.changes.errors import ChaosgpuError

ACTIONS = "chaosgpu.actions"
KEPT = ("would_change", "warnings", "facts", "supervisor")


def plan(
    source: str, var: Sequence[str] = (), var_file: Sequence[str] = (), settings: str = CHAOSTOOLKIT_CONFIG_PATH
) -> list[dict[str, Any]]:
    """The method's chaosgpu faults in order: activity, action, fault, duration, and what would change or why not.

    ``source`` is what ``chaos run`` takes, a file or a URL; ``settings`` the toolkit's settings file. Dynamic
    configuration is evaluated as ``chaos run`` would. Raises ChaosgpuError when ``chaos run`` would not take it.
    """
    quiet = logging.getLogger("chaostoolkit")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        return _plan(load_experiment(source, load_settings(settings)), var, var_file)
    except (ChaosException, OSError, ValueError) as error:
        raise ChaosgpuError(f"{source} cannot be planned: {error}") from None
    finally:
        quiet.setLevel(level)


def _plan(experiment: Any, var: Sequence[str], var_file: Sequence[str]) -> list[dict[str, Any]]:
    if not isinstance(experiment, dict):
        raise ValueError("it is no experiment, which is an object with a method")
    given, given_secrets = merge_vars(convert_vars(list(var)), list(var_file))
    ensure_experiment_is_valid(experiment)
    configuration = load_configuration(experiment.get("configuration", {}), given or {})
    secrets = load_secrets(experiment.get("secrets", {}), configuration, given_secrets or {})
    configuration = load_dynamic_configuration(configuration, secrets)
    method = experiment.get("method", [])
    hypothesis = experiment.get("steady-state-hypothesis") or {}
    named = {activity.get("name"): activity for activity in [*method, *hypothesis.get("probes", [])]}
    planned = []
    for step in method:
        activity = named[step["ref"]] if "ref" in step else step
        provider = activity["provider"]
        if provider["type"] == "python" and provider["module"].startswith(ACTIONS):
            arguments = substitute(provider.get("arguments", {}), configuration, secrets)
            planned.append({"activity": activity["name"], **_dry_run(provider, dict(arguments or {}))})
    return planned


def _dry_run(provider: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    told = {"action": provider["func"], "duration": str(arguments.get("duration", "?"))}
    action = getattr(importlib.import_module(provider["module"]), provider["func"])
    try:
        answer = action(**{**arguments, "dry_run": True})
    except ChaosException as error:
        return {**told, "refused": " ".join(str(error).split())}
    node, details = next(iter(answer["nodes"].items()))
    return {**told, "fault": answer["fault"], "node": node, **{name: details[name] for name in KEPT if name in details}}
