"""The lab on this kernel: made once, harmed and healed, killed at every step of its making, gone without a trace."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaosgpu import lab
from chaosgpu.lab.checkpoint import BLOCK_BYTES, Checkpoint
from chaosgpu.lab.cluster import STEP_RATE
from chaosgpu.lab.debian import unpack
from chaosgpu.lab.model import Model
from chaosgpu.lab.monitoring import value

DIRECTORY = Path(f"/run/chaosgpu-test-{os.getpid()}")
COMMAND = [sys.executable, "-m", "chaosgpu.lab"]
CHANGE_LIMIT_SECONDS = 30


def silent(step: lab.Step) -> None:
    """Show no progress."""


def traces() -> list[str]:
    """All that a lab of this directory can leave on the machine."""
    found = [str(DIRECTORY)] if DIRECTORY.exists() else []
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if DIRECTORY.name in line]
    found += [
        f"{loop}: {backing}"
        for loop in Path("/sys/block").glob("loop*/loop/backing_file")
        if DIRECTORY.name in (backing := loop.read_text())
    ]
    found += [str(group) for group in Path("/sys/fs/cgroup").glob(f"**/{DIRECTORY.name}")]
    found += [str(link) for link in Path("/sys/class/net").glob("wire*")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and f"CHAOSGPU_LAB={DIRECTORY}".encode() in (
                (process / "environ").read_bytes()
            ):
                found.append(f"{process.name}: {(process / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True, scope="module")
def _place():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHAOSGPU_LAB", str(DIRECTORY))
        yield
        lab.down(silent)


@pytest.fixture
def running() -> dict:
    lab.up(silent)
    return lab.status()


def wait_for(prometheus: str, query: str, holds) -> float:
    deadline = time.monotonic() + CHANGE_LIMIT_SECONDS
    seen = None
    while time.monotonic() < deadline:
        seen = value(prometheus, query)
        if seen is not None and holds(seen):
            return seen
        time.sleep(0.2)
    raise AssertionError(f"{query} was {seen} after {CHANGE_LIMIT_SECONDS} s")


def pids(status: dict) -> dict[str, int]:
    return {part["name"]: part["pid"] for part in status["components"] if "pid" in part}


def test_up_twice_changes_nothing(running) -> None:
    assert running["state"] == "up", running
    outcomes = []
    lab.up(lambda step: outcomes.append(step.outcome))
    assert set(outcomes) <= {"begins", "kept", "missing"}
    assert pids(lab.status()) == pids(running)
    assert set(pids(running)) == {"node_exporter", "rank0", "rank1", "prometheus"}


def test_variables_are_what_the_toolkit_reads(running) -> None:
    from chaoslib import merge_vars

    configuration, secrets = merge_vars(var_files=[running["variables"]])
    assert secrets == {}
    assert set(configuration) == {
        "prometheus_base_url",
        "checkpoints",
        "checkpoint_device",
        "rank0_cgroup",
        "rank1_cgroup",
    }
    assert Path(configuration["checkpoints"]).is_mount()
    assert Path(configuration["checkpoint_device"]).is_block_device()
    rank0 = Path(f"/proc/{pids(running)['rank0']}/cgroup").read_text()
    assert configuration["rank0_cgroup"] in rank0


def test_prometheus_sees_job_volume_and_machine(running) -> None:
    queries = running["queries"]
    if running["checkpoints"] not in Path("/proc/1/mounts").read_text():
        # node_exporter reads that file, so it sees no mount of a namespace that a test runner made for itself.
        queries.pop("volume, bytes free")
    for query in queries.values():
        assert wait_for(running["prometheus_base_url"], query, lambda seen: seen >= 0) is not None
    assert wait_for(running["prometheus_base_url"], "sum(up)", lambda seen: seen == 3)


def test_ranks_talk_over_their_own_wire_and_not_over_the_machines(running) -> None:
    machine = Path("/proc/self/ns/net").stat()
    homes = [Path(f"/proc/{pids(running)[rank]}/ns/net").stat() for rank in ("rank0", "rank1")]
    assert len({home.st_ino for home in [machine, *homes]}) == 3


def test_throttled_volume_slows_the_job_and_lifting_it_heals(running) -> None:
    (number,) = re.findall(r"\((\d+:\d+)\)", str(running["components"]))
    groups = [Path(group) for group in running["cgroups"]["rank0"]]
    limits = [(group / name) for group in groups for name in ("io.max", "blkio.throttle.write_bps_device")]
    (limit,) = [file for file in limits if file.exists()]
    on, off = ("wbps=262144", "wbps=max") if limit.name == "io.max" else ("262144", "0")
    limit.write_text(f"{number} {on}")
    try:
        wait_for(running["prometheus_base_url"], STEP_RATE, lambda rate: rate < 8)
        wait_for(running["prometheus_base_url"], "max(training_checkpoint_seconds)", lambda seconds: seconds > 2)
    finally:
        limit.write_text(f"{number} {off}")
    wait_for(running["prometheus_base_url"], STEP_RATE, lambda rate: rate > 10)


def test_stopped_rank_stops_the_job_and_is_told(running) -> None:
    pid = pids(running)["rank1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(running["prometheus_base_url"], STEP_RATE, lambda rate: rate < 1)
        health = lab.status()
        assert health["state"] == "partial"
        told = {part["name"]: part["detail"] for part in health["components"] if not part["healthy"]}
        assert told["rank1"] == "stopped by a signal or a tracer"
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(running["prometheus_base_url"], STEP_RATE, lambda rate: rate > 10)
    assert pids(lab.status()) == pids(running)


def test_up_replaces_a_killed_rank_which_goes_on_where_the_job_was(running) -> None:
    steps = "min(training_steps_total)"
    before = wait_for(running["prometheus_base_url"], steps, lambda count: count > 0)
    os.kill(pids(running)["rank0"], signal.SIGKILL)
    lab.up(silent)
    after = pids(lab.status())
    assert after["rank0"] != pids(running)["rank0"]
    assert after["rank1"] == pids(running)["rank1"]
    assert wait_for(running["prometheus_base_url"], steps, lambda count: count > before)
    assert wait_for(running["prometheus_base_url"], "sum(training_rejoins_total)", lambda count: count >= 1)


def test_up_remakes_a_network_whose_wire_is_gone(running) -> None:
    subprocess.run(["nsenter", f"--net={DIRECTORY}/netns/rank0", "ip", "link", "del", "wire"], check=True)
    wait_for(running["prometheus_base_url"], STEP_RATE, lambda rate: rate < 1)
    assert lab.status()["state"] == "partial"
    lab.up(silent)
    assert lab.status()["state"] == "up"


def test_checkpoint_survives_a_write_that_fails_and_a_torn_file(running) -> None:
    directory = DIRECTORY / "checkpoints" / "test"
    directory.mkdir()
    try:
        model = Model()
        model.weights[7], model.squares[8] = 0.5, 0.25
        checkpoint = Checkpoint(directory, 0)
        assert checkpoint.load(Model()) == 0
        checkpoint.save(40, model)
        free = shutil.disk_usage(directory).free
        with (directory / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, free - 64 * 1024)
            with pytest.raises(OSError, match="No space left"):
                checkpoint.save(60, Model())
        (directory / "filler").unlink()
        read = Model()
        assert checkpoint.load(read) == 40
        assert (read.weights, read.squares) == (model.weights, model.squares)
        file = directory / "rank0.ckpt"
        content = bytearray(file.read_bytes())
        content[BLOCK_BYTES + 100] ^= 1
        file.write_bytes(content)
        assert checkpoint.load(Model()) == 0
        file.write_bytes(content[:100])
        assert checkpoint.load(Model()) == 0
    finally:
        shutil.rmtree(directory)


def test_down_names_who_uses_the_volume_and_goes_on_later(running) -> None:
    user = subprocess.Popen(["sleep", "60"], cwd=DIRECTORY / "checkpoints")
    try:
        with pytest.raises(lab.LabError, match=rf"sleep \(pid {user.pid}\)"):
            lab.down(silent)
    finally:
        user.kill()
        user.wait()
    lab.down(silent)
    assert traces() == []


def test_down_leaves_nothing_and_twice_is_fine() -> None:
    lab.up(silent)
    assert traces() != []
    subprocess.run([*COMMAND, "down"], check=True, capture_output=True)
    assert traces() == []
    again = subprocess.run([*COMMAND, "down"], check=True, capture_output=True, text=True)
    assert again.stdout.startswith("absent")
    assert json.loads(
        subprocess.run([*COMMAND, "status", "--json"], check=False, capture_output=True, text=True).stdout
    ) == {
        "state": "down",
        "directory": str(DIRECTORY),
        "components": [],
    }


def killed(command: str, call: str, number: int) -> bool:
    """Run a command of the lab and kill it at its n-th call; False when it ended before.

    The tools that it started live on, as they do when a person's terminal or the OOM killer takes it.
    """
    done = subprocess.run(
        ["strace", "-qq", "-o", os.devnull, "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={number}"]
        + [*COMMAND, command],
        check=False,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
    return done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("call", ["/^(vfork|clone3?)$", "/^(mkdir|rename|unlink)$"])
def test_up_killed_at_any_step_is_undone_by_down_and_completed_by_up(call) -> None:
    for number in range(1, 200):
        if not killed("up", call, number):
            break
        if number % 8 == 0:
            lab.up(silent)
            assert lab.status()["state"] == "up"
        lab.down(silent)
        assert traces() == [], f"{call} {number}"
    assert number > 8
    lab.down(silent)


@pytest.mark.parametrize("call", ["/^(vfork|clone3?)$", "/^(rmdir|unlink|unlinkat|pidfd_send_signal)$"])
def test_down_killed_at_any_step_is_completed_by_down(call) -> None:
    for number in range(1, 200):
        if not DIRECTORY.exists():
            lab.up(silent)
        if not killed("down", call, number):
            break
    assert number > 2
    lab.down(silent)
    assert traces() == []


def test_two_at_once_make_one_lab() -> None:
    both = [subprocess.Popen([*COMMAND, "up"], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [command.communicate()[0] for command in both]
    assert [command.returncode for command in both] == [0, 0], said
    assert lab.status()["state"] == "up"
    lab.down(silent)
    assert traces() == []


@pytest.mark.parametrize(
    ("wrapper", "says"),
    [
        # This capability lets them read a checkout or an environment under /root.
        (
            [
                "setpriv",
                "--reuid=nobody",
                "--clear-groups",
                *(f"--{c}-caps=+dac_read_search" for c in ("inh", "ambient")),
            ],
            "not root",
        ),
        (["env", "PATH=/nowhere"], "apt-get install mount"),
        (["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"], "mounting is not allowed"),
        (["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup; exec "$@"', "sh"], "cgroups"),
        (["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev; exec "$@"', "sh"], "loop devices"),
    ],
)
def test_what_is_missing_is_one_line_and_nothing_is_made(wrapper, says) -> None:
    done = subprocess.run([*wrapper, *COMMAND, "up"], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert [line for line in lines if says in line], lines
    assert all(line.startswith("lab: ") for line in lines)
    assert traces() == []


def test_without_namespaces_the_ranks_use_loopback_and_it_is_said(tmp_path) -> None:
    nsenter = tmp_path / "unshare"
    nsenter.write_text('#!/bin/sh\ncase "$*" in --net*) echo "unshare: not permitted" >&2; exit 1;; esac\n')
    nsenter.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([*COMMAND, "up"], check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^missing +network .*not permitted: the ranks talk over loopback", done.stdout, re.MULTILINE)
    assert lab.status()["state"] == "up"
    lab.up(silent)
    assert lab.status()["state"] == "up"
    lab.down(silent)
    assert traces() == []


def test_a_port_in_use_is_passed_over() -> None:
    import socket

    with socket.create_server(("0.0.0.0", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "chaosgpu.lab.cluster.FIRST_PORTS",
                dict.fromkeys(("prometheus", "node_exporter", "rank0", "rank1", "training"), taken),
            )
            lab.up(silent)
        assert lab.status()["state"] == "up"
        assert f":{taken}" not in lab.status()["prometheus_base_url"]
    lab.down(silent)
    assert traces() == []


@pytest.fixture
def archive(tmp_path, monkeypatch) -> Path:
    """apt's view of an archive on this disk, with one package and no lists fetched yet; and an empty cache."""
    tree = tmp_path / "toy"
    (tree / "DEBIAN").mkdir(parents=True)
    control = "Package: toy\nVersion: 1.0\nArchitecture: all\nMaintainer: Nobody <nobody@localhost>\nDescription: toy\n"
    (tree / "DEBIAN/control").write_text(control)
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/toy").write_text("#!/bin/sh\necho toy\n")
    (tree / "usr/bin/toy").chmod(0o755)
    deb = tmp_path / "archive" / "toy_1.0_all.deb"
    deb.parent.mkdir()
    subprocess.run(["dpkg-deb", "-b", tree, deb], check=True, capture_output=True)
    digest = hashlib.sha256(deb.read_bytes()).hexdigest()
    (deb.parent / "Packages").write_text(
        control + f"Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n"
    )
    (tmp_path / "sources.list").write_text(f"deb [trusted=yes] file:{deb.parent} ./\n")
    (tmp_path / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list"; Dir::Etc::sourceparts "/dev/null";'
    )
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    monkeypatch.setenv("CHAOSGPU_CACHE", str(tmp_path / "cache"))
    return deb.parent


def test_package_is_unpacked_once_whole_and_by_several_at_once(archive) -> None:
    ask = [sys.executable, "-c", "from chaosgpu.lab.debian import unpack; print(unpack('toy'))"]
    asked = [subprocess.Popen(ask, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {process.communicate()[0] for process in asked}
    assert len(said) == 1
    unpacked = Path(said.pop().strip())
    assert subprocess.run([unpacked / "usr/bin/toy"], check=True, capture_output=True).stdout == b"toy\n"
    assert sorted(left.name for left in unpacked.parent.iterdir()) == [".lock", "toy"]
    shutil.rmtree(archive)
    assert unpack("toy") == unpacked


def test_unpacking_killed_at_any_step_leaves_nothing_half_done(archive) -> None:
    cache = Path(os.environ["CHAOSGPU_CACHE"])
    for number in range(1, 100):
        done = subprocess.run(
            ["strace", "-qq", "-o", os.devnull, "-e", "trace=/^(vfork|mkdir|rename|rmdir)$"]
            + ["-e", f"inject=/^(vfork|mkdir|rename|rmdir)$:signal=KILL:when={number}"]
            + [sys.executable, "-c", "from chaosgpu.lab.debian import unpack; unpack('toy')"],
            check=False,
        )
        shelves = [shelf for shelf in (cache / "debian").glob("*-*") if (shelf / "toy").exists()]
        assert all((shelf / "toy/usr/bin/toy").stat().st_size > 0 for shelf in shelves)
        if done.returncode == 0:
            break
        for shelf in shelves:
            shutil.rmtree(shelf / "toy")
    assert number > 5
    assert subprocess.run([unpack("toy") / "usr/bin/toy"], check=True, capture_output=True).stdout == b"toy\n"
    assert sorted(left.name for left in unpack("toy").parent.iterdir()) == [".lock", "toy"]


def test_package_that_is_not_there_or_no_apt_is_one_line(archive, monkeypatch) -> None:
    with pytest.raises(lab.LabError, match=r"no-such-package: .*apt-get download no-such-package") as error:
        unpack("no-such-package")
    assert "\n" not in str(error.value)
    monkeypatch.setenv("PATH", str(archive))
    with pytest.raises(lab.LabError, match="apt-get is not on this machine"):
        unpack("toy")
