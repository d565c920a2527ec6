"""Real monitoring servers and a scripted exporter, on loopback, for as long as a test session lives."""

import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from chaosgpu.lab.debian import unpack

START_LIMIT_SECONDS = 30


class Exporter:
    """A target that shows the lines it is told to, until it is killed."""

    def __init__(self) -> None:
        self.lines: dict[str, Callable[[], float] | float | str] = {}
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                shown = {name: value() if callable(value) else value for name, value in exporter.lines.items()}
                body = "".join(f"{name} {value}\n" for name, value in shown.items()).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def kill(self) -> None:
        """Be gone: connections are refused from now on."""
        self._server.shutdown()
        self._server.server_close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape_configuration(targets: dict[str, Exporter]) -> str:
    """One job a target, scraped each second. JSON is YAML."""
    jobs = [{"job_name": job, "static_configs": [{"targets": [one.address]}]} for job, one in targets.items()]
    timing = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    return json.dumps({"global": timing, "scrape_configs": jobs})


@contextmanager
def prometheus(directory: Path, targets: dict[str, Exporter], prefix: str = "") -> Iterator[str]:
    """Debian's Prometheus. Gives its base URL."""
    configuration = directory / "prometheus.yml"
    configuration.write_text(scrape_configuration(targets))
    address = f"127.0.0.1:{free_port()}"
    command = [
        str(unpack("prometheus") / "usr/bin/prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
        f"--web.external-url=http://{address}{prefix}",
        "--log.level=warn",
    ]
    with _running(command, directory, f"http://{address}{prefix}"):
        yield f"http://{address}{prefix}"


@contextmanager
def victoria_metrics(directory: Path, targets: dict[str, Exporter], *options: str) -> Iterator[str]:
    """Debian's VictoriaMetrics. Gives its base URL."""
    configuration = directory / "prometheus.yml"
    configuration.write_text(scrape_configuration(targets))
    address = f"127.0.0.1:{free_port()}"
    command = [
        str(unpack("victoria-metrics") / "usr/bin/victoria-metrics"),
        f"-promscrape.config={configuration}",
        f"-storageDataPath={directory / 'data'}",
        f"-httpListenAddr={address}",
        "-memory.allowedBytes=64MB",
        "-loggerLevel=WARN",
        *options,
    ]
    with _running(command, directory, f"http://{address}"):
        yield f"http://{address}"


@contextmanager
def _running(command: list[str], directory: Path, base_url: str) -> Iterator[None]:
    with (directory / "log").open("wb") as log:
        # It ends with this process, however that ends.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
        )
        try:
            _await_answer(process, directory / "log", f"{base_url}/api/v1/query?query=1")
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_answer(process: "subprocess.Popen[bytes]", log: Path, url: str) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    limit = time.monotonic() + START_LIMIT_SECONDS
    while time.monotonic() < limit and process.poll() is None:
        try:
            with direct.open(url, timeout=1):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} does not answer: {log.read_text(errors='replace')[-2000:]}")
