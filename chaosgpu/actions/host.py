"""Actions on processes: pause, kill, slow."""

from typing import Any, Dict, List

from chaoslib.types import Configuration, Secrets

from chaosgpu.fleet.inject import inject

__all__ = ["kill_processes", "pause_processes", "slow_processes"]


def pause_processes(
    target: Dict[str, Any],
    duration: str,
    nodes: List[str] = None,
    dry_run: bool = False,
    allow: List[str] = None,
    outlive_run: bool = False,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> Dict[str, Any]:
    """Stop processes with all their threads; they go on where they were when the fault ends or chaosgpu dies.

    ``target`` chooses processes: one of ``pid`` (number or list), ``command`` (regular expression on the command line),
    ``cgroup``, ``container``, ``unit``; with ``count`` or ``percent`` and ``seed``. ``duration`` in seconds or "90s".
    By ptrace(2), PTRACE_SEIZE and PTRACE_INTERRUPT; by SIGSTOP where a process cannot be traced.
    """
    return inject(
        "host.pause_processes",
        {"target": target},
        duration=duration,
        nodes=nodes,
        dry_run=dry_run,
        allow=allow,
        outlive_run=outlive_run,
        configuration=configuration,
    )


def kill_processes(
    target: Dict[str, Any],
    duration: str,
    signal: str = "TERM",
    grace_seconds: float = None,
    watch_seconds: float = 1.0,
    nodes: List[str] = None,
    dry_run: bool = False,
    allow: List[str] = None,
    outlive_run: bool = False,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> Dict[str, Any]:
    """Send a signal to processes and tell what died and what came back; nothing of it can be taken back.

    ``signal`` without SIG: TERM, KILL, INT, HUP, QUIT, ABRT, SEGV, BUS, USR1, USR2, ALRM or PIPE. After
    ``grace_seconds``, if given, those alive get SIGKILL. Then the node looks for ``watch_seconds`` whether the same
    command is running again. SIGKILL to a process that holds a GPU needs ``allow: ["kill_gpu_client"]``. By
    pidfd_send_signal(2).
    """
    return inject(
        "host.kill_processes",
        {"target": target, "signal": signal, "grace_seconds": grace_seconds, "watch_seconds": watch_seconds},
        duration=duration,
        nodes=nodes,
        dry_run=dry_run,
        allow=allow,
        outlive_run=outlive_run,
        configuration=configuration,
    )


def slow_processes(
    target: Dict[str, Any],
    percent: float,
    duration: str,
    how: str = "auto",
    nodes: List[str] = None,
    dry_run: bool = False,
    allow: List[str] = None,
    outlive_run: bool = False,
    configuration: Configuration = None,
    secrets: Secrets = None,
) -> Dict[str, Any]:
    """Cap the CPU time of processes, as a straggler has it.

    ``percent`` of one CPU for all of them together, by the cgroup CPU controller (cpu.max, or cpu.cfs_quota_us in
    cgroup v1). ``how`` is ``auto``, ``cgroup`` or ``duty``; duty stops and continues each process, so that it runs for
    ``percent`` of the time. ``auto`` takes the cgroup where the processes share one and it can be capped.
    """
    return inject(
        "host.slow_processes",
        {"target": target, "percent": percent, "how": how},
        duration=duration,
        nodes=nodes,
        dry_run=dry_run,
        allow=allow,
        outlive_run=outlive_run,
        configuration=configuration,
    )
