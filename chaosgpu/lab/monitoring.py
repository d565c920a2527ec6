"""A real Prometheus and node_exporter, from Debian's packages, on loopback."""

import json
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

from chaosgpu.lab.debian import unpack
from chaosgpu.lab.errors import LabError

SCRAPE_INTERVAL = "1s"  # experiments of seconds need samples of seconds
COLLECTORS = (
    "cpu",
    "diskstats",
    "filesystem",
    "loadavg",
    "meminfo",
    "meminfo_numa",
    "netdev",
    "pressure",
    "stat",
    "uname",
)
ANSWER_LIMIT_SECONDS = 3


def node_exporter_command(port: int) -> list[str]:
    """How node_exporter is run: a few collectors, and the lab's own volume not left out."""
    program = str(unpack("prometheus-node-exporter") / "usr/bin/prometheus-node-exporter")
    helped = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    known = helped.stdout + helped.stderr
    # By default it leaves out loop devices and mounts below /run, where the checkpoint volume is. The options' names
    # differ between the releases in Debian 11 and 12 (node_exporter 1.1 to 1.5).
    exclusions = {
        ("--collector.diskstats.device-exclude", "--collector.diskstats.ignored-devices"): "^(ram|fd)[0-9]+$",
        (
            "--collector.filesystem.mount-points-exclude",
            "--collector.filesystem.ignored-mount-points",
        ): "^/(dev|proc|sys)($|/)",
    }
    command = [program, f"--web.listen-address=127.0.0.1:{port}", "--collector.disable-defaults", "--log.level=warn"]
    command += [f"--collector.{name}" for name in COLLECTORS]
    for names, pattern in exclusions.items():
        command += [f"{name}={pattern}" for name in names if f"{name}=" in known][:1]
    return command


def prometheus_configuration(ports: dict[str, int]) -> str:
    """What Prometheus scrapes, as its configuration file (JSON is YAML)."""
    ranks = [{"targets": [f"127.0.0.1:{ports[f'rank{rank}']}"], "labels": {"rank": str(rank)}} for rank in (0, 1)]
    configuration = {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL},
        "scrape_configs": [
            {"job_name": "training", "static_configs": ranks},
            {"job_name": "node", "static_configs": [{"targets": [f"127.0.0.1:{ports['node_exporter']}"]}]},
        ],
    }
    return json.dumps(configuration, indent=1) + "\n"


def prometheus_command(directory: Path, port: int) -> list[str]:
    """How Prometheus is run with the configuration and the data in a directory."""
    return [
        str(unpack("prometheus") / "usr/bin/prometheus"),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--storage.tsdb.retention.time=2h",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]


def get(url: str) -> str:
    """What a loopback server answers; LabError when it does not, whatever proxy the environment names."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=ANSWER_LIMIT_SECONDS) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError) as error:
        raise LabError(f"{url}: {error}") from error


def value(prometheus: str, query: str) -> float | None:
    """The value of a query that gives one sample; None when it gives none."""
    answer = json.loads(get(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"))
    samples = answer["data"]["result"]
    return float(samples[0]["value"][1]) if samples else None
