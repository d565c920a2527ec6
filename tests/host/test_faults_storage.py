"""A filled filesystem as df sees it, a throttled device as dd and fio see it."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from chaoslib.exceptions import ActivityFailed

from chaosgpu.actions import fill_disk, throttle_io
from chaosgpu.rollbacks import revert, verify_restored


def on_node(output):
    return next(iter(output["nodes"].values()))


@pytest.fixture(params=["ext4", "xfs"])
def volume(request, tmp_path):
    """A loop-mounted filesystem whose path has a blank and a newline in it."""
    yield from mounted(tmp_path, request.param)


@pytest.fixture
def ext4(tmp_path):
    yield from mounted(tmp_path, "ext4")


def mounted(tmp_path, kind):
    image, point = tmp_path / "image", tmp_path / "check points\nhere"
    point.mkdir()
    subprocess.run(["truncate", "-s", "400M", str(image)], check=True)
    subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    yield point
    subprocess.run(["umount", str(point)], check=True)


def df(point, column):
    out = subprocess.run(["df", "-B1", f"--output={column}", str(point)], capture_output=True, text=True, check=True)
    return int(out.stdout.split()[-1].rstrip("%"))


def test_df_shows_the_asked_percentage_and_then_what_it_did_before(volume):
    before = df(volume, "avail")
    fill_disk(str(volume), "30s", percent=90)
    assert abs(df(volume, "pcent") - 90) <= 1
    assert not list(volume.iterdir()) or [entry.name for entry in volume.iterdir()] == ["lost+found"]
    revert()
    assert abs(df(volume, "avail") - before) < 0.01 * before
    assert verify_restored()["left"] == []


def test_a_full_disk_is_full_for_a_writer(ext4):
    fill_disk(str(ext4), "30s", percent=100)
    done = subprocess.run(
        [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "dd",
            "if=/dev/zero",
            f"of={ext4}/x",
            "bs=1M",
            "count=1",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert df(ext4, "avail") == 0
    revert()
    subprocess.run(["dd", "if=/dev/zero", f"of={ext4}/x", "bs=1M", "count=1"], check=True, capture_output=True)


@pytest.mark.parametrize(("argument", "value"), [("bytes", "100MiB"), ("leave_bytes", 50 * 1024**2)])
def test_bytes_taken_and_bytes_left(ext4, argument, value):
    before = df(ext4, "avail")
    fill_disk(str(ext4), "30s", **{argument: value})
    wanted = before - 100 * 1024**2 if argument == "bytes" else value
    assert abs(df(ext4, "avail") - wanted) < 0.01 * before
    revert()


def test_what_is_never_filled(ext4):
    for arguments, message in [
        ({"path": "/", "percent": 99}, "is never filled"),
        ({"path": "/var/log", "percent": 99}, "is never filled"),
        ({"path": "/run/chaosgpu", "percent": 99}, "is never filled"),
        ({"path": "/dev/shm", "percent": 50}, "is memory"),
        ({"path": "/nowhere", "percent": 50}, "No such file"),
        ({"path": str(ext4), "bytes": "1TiB"}, "are available"),
        ({"path": str(ext4), "percent": 50, "bytes": "5MiB"}, "exactly one"),
        ({"path": str(ext4)}, "exactly one"),
        ({"path": str(ext4), "bytes": 5}, "1048576 to"),
    ]:
        with pytest.raises(ActivityFailed, match=message):
            fill_disk(duration="30s", **arguments)
    fill_disk(str(ext4), "30s", percent=50)
    with pytest.raises(ActivityFailed, match="is held by injection"):
        fill_disk(str(ext4), "30s", percent=60)
    with pytest.raises(ActivityFailed, match="fuller already"):
        fill_disk(str(ext4), "30s", percent=40)
    revert()


@pytest.fixture
def group(spawn):
    """A blkio (or v2) cgroup with a process in it."""
    root = Path("/sys/fs/cgroup/blkio")
    if not root.exists():
        pytest.fail("this kernel has no cgroup v1 blkio: the v2 case runs in the guest")
    made = root / f"chaosgpu-test-{os.getpid()}"
    made.mkdir()
    member = spawn("sleep", "600")
    (made / "cgroup.procs").write_text(str(member.pid))
    yield made, member
    member.kill()
    member.wait()
    for _ in range(100):
        try:
            made.rmdir()
            break
        except OSError:
            time.sleep(0.02)


def dd_seconds(made, point, blocks):
    """How long dd takes to write blocks of 64 KiB directly from inside the cgroup."""
    line = f"echo $$ > {made}/cgroup.procs; exec dd if=/dev/zero 'of={point}/x' bs=64k count={blocks} oflag=direct"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    return float(re.search(r"copied, ([\d.]+) s", done.stderr).group(1))


def test_dd_writes_at_the_asked_rate(ext4, group):
    made, member = group
    output = on_node(throttle_io({"pid": member.pid}, "30s", path=str(ext4), write_bytes_per_second="1MiB"))
    assert any("buffered writes escape" in warning for warning in output["warnings"])
    rate = 48 * 65536 / dd_seconds(made, ext4, 48)
    assert abs(rate - 1024**2) < 0.1 * 1024**2
    measured = output["proof"]["rates"]["write_bytes_per_second"]["measured"]
    assert abs(measured - 1024**2) < 0.15 * 1024**2
    revert()
    assert dd_seconds(made, ext4, 48) < 1
    assert (made / "blkio.throttle.write_bps_device").read_text() == ""


def test_reads_are_counted_by_fio(ext4, group):
    made, member = group
    device = subprocess.run(
        ["findmnt", "-no", "SOURCE", str(ext4)], capture_output=True, text=True, check=True
    ).stdout.strip()
    throttle_io({"pid": member.pid}, "30s", device=device, read_iops=100)
    line = (
        f"echo $$ > {made}/cgroup.procs; exec fio --name=r --filename={device} --readonly --rw=randread --bs=4k"
        " --direct=1 --time_based --ramp_time=1 --runtime=4 --output-format=terse --terse-version=3"
    )
    out = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout
    iops = int(out.splitlines()[-1].split(";")[7])
    assert abs(iops - 100) <= 12
    revert()


def test_a_limit_of_someone_else_is_not_touched(ext4, group):
    made, member = group
    device = os.stat(ext4).st_dev
    limit = f"{os.major(device)}:{os.minor(device)} 5000000\n"
    (made / "blkio.throttle.write_bps_device").write_text(limit)
    with pytest.raises(ActivityFailed, match="set by someone else"):
        throttle_io({"pid": member.pid}, "30s", path=str(ext4), write_bytes_per_second="1MiB")
    assert (made / "blkio.throttle.write_bps_device").read_text() == limit


def test_a_limit_that_was_changed_meanwhile_is_left_alone(ext4, group):
    made, member = group
    device = os.stat(ext4).st_dev
    throttle_io({"pid": member.pid}, "30s", path=str(ext4), write_bytes_per_second="1MiB")
    theirs = f"{os.major(device)}:{os.minor(device)} 7000000\n"
    (made / "blkio.throttle.write_bps_device").write_text(theirs)
    told = revert()["reverted"][0]
    assert told["verdicts"]["0"][0] == "superseded"
    assert told["ended_early"]
    assert (made / "blkio.throttle.write_bps_device").read_text() == theirs


def test_what_has_no_device_or_no_cgroup_is_refused(ext4, group, spawn):
    _, member = group
    for arguments, message in [
        ({"target": {"pid": member.pid}, "path": "/run", "write_iops": 5}, "no block device"),
        ({"target": {"pid": member.pid}, "device": "/dev/null", "write_iops": 5}, "is no block device"),
        ({"target": {"pid": member.pid}, "path": str(ext4)}, "at least one of"),
        ({"target": {"pid": spawn("sleep", "60").pid}, "path": str(ext4), "write_iops": 5}, "root cgroup"),
    ]:
        with pytest.raises(ActivityFailed, match=message):
            throttle_io(duration="30s", **arguments)
