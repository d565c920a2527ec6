"""Who restarts a keeper that dies: systemd where it is PID 1, else a standby process of our own.

Under systemd the keeper is a transient unit (systemd-run(1)) with ``Restart=always`` and a watchdog (sd_notify(3)).
"""

import os
import shutil
import socket
import subprocess
import sys
from typing import Dict, List

from chaosgpu.changes.errors import ChaosgpuError
from chaosgpu.node import places

UNIT = "chaosgpu-keeper.service"
WATCHDOG_USEC = 1_000_000
LEFT_STATUS = 77  # a keeper that leaves on purpose: the unit must not bring it back


def find() -> str:
    """Who would bring a keeper back: ``systemd``, ``kubelet``, ``cron`` (a sweep), or only the ``standby``.

    systemd by sd_booted(3): /run/systemd/system exists. All but systemd have a standby too.
    """
    if os.geteuid() == 0 and os.path.isdir("/run/systemd/system"):
        if shutil.which("systemd-run", path=places.SAFE_PATH):
            return "systemd"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubelet"
    return "cron" if _sweeps() else "standby"


def _sweeps() -> bool:
    """Whether a system crontab (crontab(5), /etc/crontab and /etc/cron.d) runs our sweep."""
    try:
        tables = ["/etc/crontab", *(f"/etc/cron.d/{name}" for name in os.listdir("/etc/cron.d"))]
    except OSError:
        tables = ["/etc/crontab"]
    for table in tables:
        try:
            with open(table, encoding="utf-8", errors="replace") as file:
                if any("chaosgpu" in line and "sweep" in line for line in file if not line.startswith("#")):
                    return True
        except OSError:
            continue
    return False


def notify(state: str) -> None:
    """Tell the service manager (sd_notify(3)); silent where there is none."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError:
            pass


def leave(kind: str) -> None:
    sys.stdout.flush()
    os._exit(LEFT_STATUS if kind == "systemd" else 0)


def environment() -> Dict[str, str]:
    """The keeper's whole environment: nothing of the caller's that could change what its commands do."""
    kept = {"PATH": places.SAFE_PATH, "LC_ALL": "C.UTF-8", "HOME": "/", "CHAOSGPU_STATE": places.state_dir()}
    for name in ("CHAOSGPU_PYTHON", "XDG_RUNTIME_DIR", "KUBERNETES_SERVICE_HOST", "COVERAGE_PROCESS_START"):
        if name in os.environ:
            kept[name] = os.environ[name]
    return kept


def start_keeper(bundle: str) -> None:
    """Start a keeper that outlives us. Which of two starters wins is decided by the keeper's lock."""
    python = places.system_python()
    if find() == "systemd":
        _start_unit([python, bundle, "keeper"])
    else:
        _detach([python, bundle, "keeper"])


def _detach(argv: List[str]) -> None:
    with open(os.path.join(places.private_dir(places.state_dir()), "keeper.err"), "ab") as complaints:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            cwd="/",
            env=environment(),
            start_new_session=True,
        )
    child.returncode = 0  # it is not ours to wait for: no warning when this object goes


def _start_unit(argv: List[str]) -> None:
    properties = [
        "Type=notify",
        "NotifyAccess=main",
        "Restart=always",
        "RestartSec=0",
        f"RestartPreventExitStatus={LEFT_STATUS}",
        f"SuccessExitStatus={LEFT_STATUS}",
        "StartLimitIntervalSec=0",
        "OOMPolicy=continue",
        "OOMScoreAdjust=-999",
        "KillMode=mixed",
        "TimeoutStopSec=60",
        "UMask=0077",
    ]
    command = ["systemd-run", "--quiet", "--collect", "--no-block", f"--unit={UNIT}"]
    command += [f"--property={value}" for value in properties]
    command += [f"--setenv={name}={value}" for name, value in environment().items()]
    done = subprocess.run([*command, "--", *argv], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0 and "already" not in done.stderr:
        raise ChaosgpuError(f"systemd-run could not start {UNIT}: {done.stderr.strip() or done.returncode}")


def _cgroup_home() -> str:
    """Our directory in the cgroup v2 hierarchy, "" where there is none."""
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        if os.path.exists(f"{root}/cgroup.controllers"):
            return f"{root}/chaosgpu"
    return ""


def own_cgroup(role: str) -> None:
    """Move to a cgroup of our own, so that ending the caller's session or container scope ends neither of us.

    Keeper and standby (``role``) have one each. Best effort: without cgroup v2 or rights we stay where we are;
    under systemd we have a unit's.
    """
    home = _cgroup_home()
    if home and find() != "systemd":
        try:
            os.makedirs(f"{home}/{role}", exist_ok=True)
            with open(f"{home}/{role}/cgroup.procs", "w", encoding="ascii") as members:
                members.write(str(os.getpid()))
        except OSError:
            pass


def leave_cgroups() -> None:
    """Take our cgroups away, when nobody else is in them. Best effort."""
    home = _cgroup_home()
    if home and os.path.isdir(home):
        try:
            with open(f"{os.path.dirname(home)}/cgroup.procs", "w", encoding="ascii") as members:
                members.write(str(os.getpid()))
            for role in ("keeper", "standby"):
                if os.path.isdir(f"{home}/{role}"):
                    os.rmdir(f"{home}/{role}")
            os.rmdir(home)
        except OSError:
            pass


def protect() -> None:
    """Be the last that the OOM killer chooses and the first that the scheduler does. Needs rights, so best effort."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    except OSError:
        pass
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("-999")
    except OSError:
        pass
