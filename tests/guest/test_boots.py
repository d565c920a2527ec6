"""The guest itself: exit status, time limit, power cut, systemd."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import vm

BOOT_SECONDS = 180

SYSTEMD = """
set -e
[ "$(cat /proc/1/comm)" = systemd ]
systemd-run --quiet --unit=x --property=Restart=always --property=RestartSec=0 sleep 60
first=$(systemctl show x --property=MainPID --value)
kill -KILL "$first"
for i in $(seq 50); do
  second=$(systemctl show x --property=MainPID --value)
  [ "$second" = "$first" ] || [ "$second" = 0 ] || break
  sleep 0.2
done
echo "restarts=$(systemctl show x --property=NRestarts --value)"
[ "$(cat /proc/$second/comm)" = sleep ]
"""

WRITE_AND_WAIT = """
set -e
mkfs.ext4 -q /dev/vdb && mkdir -p /mnt/ledger && mount /dev/vdb /mnt/ledger
echo kept > /mnt/ledger/flushed && sync /mnt/ledger/flushed /mnt/ledger
echo never flushed > /mnt/ledger/unflushed
touch written
sleep 600
"""

READ = "mkdir -p /mnt/ledger && mount /dev/vdb /mnt/ledger && cat /mnt/ledger/flushed"


def test_exit_status_and_output_come_through(share: Path) -> None:
    result = vm.boot(
        ["sh", "-c", 'echo "$GREETING"; pwd; exit 7'], share, BOOT_SECONDS, environment={"GREETING": "a  b"}
    )
    assert result.exit_code == 7, result.explain()
    assert result.output == f"a  b\n{share}\n"


def test_time_limit_ends_the_guest(share: Path) -> None:
    result = vm.boot(["sleep", "600"], share, timeout_seconds=3)
    assert result.exit_code == vm.TIMED_OUT, result.explain()


def test_guest_that_dies_is_told_from_a_command_that_fails(share: Path) -> None:
    result = vm.boot(["sh", "-c", "echo c > /proc/sysrq-trigger"], share, BOOT_SECONDS)
    assert result.exit_code == vm.DIED
    assert "sysrq triggered crash" in result.console, result.explain()


def test_systemd_restarts_a_killed_unit(share: Path) -> None:
    result = vm.boot(["bash", "-c", SYSTEMD], share, BOOT_SECONDS, init="systemd")
    assert result.exit_code == 0, result.explain()
    assert result.output == "restarts=1\n"


def test_disk_keeps_over_a_power_cut_what_was_flushed_and_only_that(share: Path) -> None:
    disks = {"vdb": share / "ledger.img"}
    cut = vm.boot(["bash", "-c", WRITE_AND_WAIT], share, BOOT_SECONDS, disks=disks, cut_when=(share / "written").exists)
    assert cut.exit_code == vm.DIED, cut.explain()
    again = vm.boot(["bash", "-c", READ], share, BOOT_SECONDS, disks=disks)
    assert again.output == "kept\n", again.explain()
    assert b"never flushed" not in (share / "ledger.img").read_bytes()


def test_guest_dies_with_its_harness(share: Path) -> None:
    harness = subprocess.Popen([sys.executable, vm.__file__, "--share", share, "--", "sh", "-c", "touch up; sleep 600"])
    try:
        give_up = time.monotonic() + BOOT_SECONDS
        while not (share / "up").exists() and time.monotonic() < give_up:
            time.sleep(0.1)
        (guest,) = [int(pid) for pid in Path(f"/proc/{harness.pid}/task/{harness.pid}/children").read_text().split()]
        watched = os.pidfd_open(guest)
    finally:
        harness.send_signal(signal.SIGKILL)
        harness.wait()
    try:
        assert select.select([watched], [], [], 10)[0], f"QEMU {guest} outlived its harness"
    finally:
        os.close(watched)
