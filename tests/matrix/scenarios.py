"""One real target for each fault, and a witness that reads the kernel without our code."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import snapshot

THREADED = (
    "import threading, time\n"
    "for _ in range(2): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    "time.sleep(600)\n"
)


class Scenario:
    """``arguments`` for ``fault``; ``in_place()`` and ``pids``; ``close()`` takes the target away."""

    fault = ""
    held = False  # whether it ends with its holder
    one_shot = False
    by_commands = False

    def __init__(self, name):
        self.name = name
        self.pids = []
        self._children = []

    @staticmethod
    def possible():
        """Whether this kernel can do it."""
        return True

    def spawn(self, *argv):
        child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._children.append(child)
        self.pids.append(child.pid)
        snapshot.leaf(child.pid)
        return child.pid

    def threads_ready(self, pid, count):
        give_up = time.monotonic() + 30
        while len(os.listdir(f"/proc/{pid}/task")) < count and time.monotonic() < give_up:
            time.sleep(0.01)

    def renew(self):
        """Before each kill: whatever the fault may consume is put there anew."""

    def close(self):
        for child in self._children:
            child.kill()
            child.wait()


class Pause(Scenario):
    fault = "host.pause_processes"
    held = True

    def __init__(self, name):
        super().__init__(name)
        pid = self.spawn(sys.executable, "-c", THREADED)
        self.threads_ready(pid, 3)
        self.arguments = {"target": {"pid": [pid, self.spawn("sleep", "600")]}}

    def in_place(self):
        return any(stat_of(pid) in "tT" for pid in self.pids)


class Misplace(Scenario):
    fault = "numa.misplace_processes"

    def __init__(self, name):
        super().__init__(name)
        pid = self.spawn(sys.executable, "-c", THREADED)
        self.threads_ready(pid, 3)
        self.arguments = {"target": {"pid": pid}, "cpus": [max(os.sched_getaffinity(0))]}

    def in_place(self):
        return len(os.sched_getaffinity(self.pids[0])) == 1


class Slow(Scenario):
    fault = "host.slow_processes"

    def __init__(self, name):
        super().__init__(name)
        self.arguments = {"target": {"pid": self.spawn("sleep", "600")}, "percent": 50}

    def in_place(self):
        where = Path(f"/proc/{self.pids[0]}/cgroup").read_text()
        limit = Path("/sys/fs/cgroup" + where.strip().rpartition("::")[2], "cpu.max")
        return "/chaosgpu-" in where or (limit.exists() and not limit.read_text().startswith("max"))


class SlowByDuty(Slow):
    held = True

    def __init__(self, name):
        super().__init__(name)
        self.arguments["how"] = "duty"

    def in_place(self):
        return stat_of(self.pids[0]) in "tT"


class Kill(Scenario):
    fault = "host.kill_processes"
    one_shot = True

    def __init__(self, name):
        super().__init__(name)
        self.arguments = {}
        self.renew()

    def renew(self):
        self.close()
        self.pids, self._children = [], []
        self.arguments = {"target": {"pid": self.spawn("sleep", "600")}, "grace_seconds": 2, "watch_seconds": 0.05}

    def in_place(self):
        return False


class Fill(Scenario):
    fault = "storage.fill_disk"
    held = True

    def __init__(self, name):
        super().__init__(name)
        self.folder = tempfile.mkdtemp(prefix="chaosgpu-matrix-")
        self.point = f"{self.folder}/mnt"
        os.mkdir(self.point)
        subprocess.run(["truncate", "-s", "64M", f"{self.folder}/image"], check=True)
        subprocess.run(["mkfs.ext4", "-q", f"{self.folder}/image"], check=True)
        subprocess.run(["modprobe", "-q", "loop"], check=False)  # where it is not part of the kernel
        subprocess.run(["mount", "-o", "loop", f"{self.folder}/image", self.point], check=True)
        self.arguments = {"path": self.point, "percent": 80}

    def in_place(self):
        space = os.statvfs(self.point)
        return space.f_bavail < space.f_blocks / 2

    def close(self):
        super().close()
        subprocess.run(["umount", self.point], check=True)
        subprocess.run(["rm", "-r", self.folder], check=True)


class Throttle(Fill):
    fault = "storage.throttle_io"
    held = False

    def __init__(self, name):
        super().__init__(name)
        pid = self.spawn("sleep", "600")
        self.group = f"/sys/fs/cgroup/{snapshot.WORKER}/of-{pid}"
        if not snapshot.UNIFIED:
            self.group = f"/sys/fs/cgroup/blkio/{snapshot.WORKER}/limited"
            os.mkdir(self.group)
            Path(self.group, "cgroup.procs").write_text(str(pid))
        self.arguments = {"target": {"pid": pid}, "path": self.point, "write_iops": 200}

    def in_place(self):
        files = ("io.max", "blkio.throttle.write_iops_device")
        return any(Path(self.group, name).exists() and Path(self.group, name).read_text().strip() for name in files)


class Impair(Scenario):
    fault = "rdma.impair_network"
    by_commands = True

    @staticmethod
    def possible():
        netem = ["unshare", "-n", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(netem, capture_output=True, check=False).returncode == 0

    def __init__(self, name):
        super().__init__(name)
        self.netns = f"matrix{os.getpid()}"
        script = f"""
            ip netns add {self.netns}; ip netns add {self.netns}p
            ip link add m0 netns {self.netns} type veth peer name m1 netns {self.netns}p
            ip -n {self.netns} addr add 10.98.0.1/24 dev m0; ip -n {self.netns}p addr add 10.98.0.2/24 dev m1
            ip -n {self.netns} link set m0 up; ip -n {self.netns}p link set m1 up
            ip netns exec {self.netns} ping -q -c 1 -W 5 10.98.0.2
            for n in {self.netns} {self.netns}p; do
              while ip -n $n addr | grep -q tentative; do sleep 0.1; done # their routes come when that is over
            done"""
        subprocess.run(["sh", "-ec", script], check=True, stdout=subprocess.DEVNULL)
        path = f"/run/netns/{self.netns}"
        self.arguments = {"device": "m0", "delay": 5, "netns": path, "direction": "both"}

    def in_place(self):
        listed = subprocess.run(["tc", "-n", self.netns, "qdisc"], capture_output=True, text=True, check=True).stdout
        return "netem" in listed

    def close(self):
        super().close()
        for name in (self.netns, f"{self.netns}p"):
            subprocess.run(["ip", "netns", "del", name], check=True)


SCENARIOS = {
    "pause": Pause,
    "misplace": Misplace,
    "slow": Slow,
    "duty": SlowByDuty,
    "kill": Kill,
    "fill": Fill,
    "throttle": Throttle,
    "impair": Impair,
}


def stat_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
