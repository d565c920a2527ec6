"""What the faults' tests count on in this guest."""

import os
import re
import subprocess
import time
from pathlib import Path


def run(line: str) -> str:
    done = subprocess.run(["bash", "-ec", line], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout


def test_modules_are_there() -> None:
    run(
        "modprobe -a sch_netem sch_prio cls_flower cls_u32 act_mirred ifb veth nf_tables dm-mod dm-delay dm-flakey loop"
        " null_blk rdma_rxe ext4 xfs"
    )


def test_netem_delay_is_seen_by_ping() -> None:
    run(
        """
        ip netns add far
        ip link add near0 type veth peer name far0 netns far
        ip addr add 10.9.0.1/24 dev near0; ip link set near0 up
        ip -n far addr add 10.9.0.2/24 dev far0; ip -n far link set far0 up
        """
    )
    try:
        before = rtt_milliseconds()
        run("tc qdisc add dev near0 root netem delay 100ms")
        assert 95 < rtt_milliseconds() - before < 150
    finally:
        run("ip netns del far")


def rtt_milliseconds() -> float:
    """The least of some round trips: emulation makes some of them slow."""
    seen = run("ping -c 1 -w 20 10.9.0.2 > /dev/null; ping -c 5 -i 0.2 10.9.0.2")
    (least,) = re.findall(r"rtt min/avg/max/mdev = ([\d.]+)/", seen)
    return float(least)


def test_io_max_slows_a_write_to_the_virtio_disk() -> None:
    device = Path("/sys/block/vda/dev").read_text().strip()
    write = "dd if=/dev/zero of=/dev/vda bs=256K count=8 oflag=direct status=none"
    run("echo +io > /sys/fs/cgroup/cgroup.subtree_control; mkdir /sys/fs/cgroup/slow")
    try:
        start = time.monotonic()
        run(write)
        free = time.monotonic() - start
        run(f"echo '{device} wbps=524288' > /sys/fs/cgroup/slow/io.max")
        start = time.monotonic()
        run(f"echo $$ > /sys/fs/cgroup/slow/cgroup.procs; exec {write}")
        slow = time.monotonic() - start
        assert slow > 2 + free, f"2 MiB took {free:.1f} s, and {slow:.1f} s at 512 KiB/s"
    finally:
        os.rmdir("/sys/fs/cgroup/slow")
        run("echo -io > /sys/fs/cgroup/cgroup.subtree_control")


def test_two_numa_nodes_with_a_cpu_each_and_the_nvme_on_the_far_one() -> None:
    assert [Path(f"/sys/devices/system/node/node{node}/cpulist").read_text() for node in (0, 1)] == ["0\n", "1\n"]
    assert Path("/sys/devices/system/node/node0/distance").read_text().split() == ["10", "21"]
    assert Path("/sys/class/nvme/nvme0/device/numa_node").read_text() == "1\n"


def test_ptrace_works() -> None:
    assert "exit_group" in run("strace -e trace=exit_group true 2>&1")


def test_cgroups_are_v2_only() -> None:
    assert Path("/proc/self/cgroup").read_text().startswith("0::/")
    assert {"cpu", "cpuset", "io", "memory", "pids"} <= set(
        Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    )
