"""Servers that are started once a session, and certificates to speak TLS with."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from daemons import Exporter, prometheus, victoria_metrics
from hostile import Hostile, tls_context


@dataclass(frozen=True)
class Monitoring:
    """The real servers' base URLs, and the targets that all of them scrape each second.

    VictoriaMetrics answers for a while ago, 30 s by default: one is made to answer for now, one for 10 s ago.
    """

    prometheus: str
    victoria: str
    victoria_late: str
    exporter: Exporter
    mortal: Exporter


@pytest.fixture(scope="session")
def monitoring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitoring]:
    exporter, mortal = Exporter(), Exporter()
    started = time.monotonic()
    exporter.lines = {
        'g{rank="0"}': 50,
        'g{rank="1"}': 60,
        "not_a_number": "NaN",
        "no_end": "+Inf",
        "steps_total": lambda: (time.monotonic() - started) * 10,
        'idle_bucket{le="1"}': 0,
        'idle_bucket{le="+Inf"}': 0,
        "idle_sum": 0,
        "idle_count": 0,
        "pushed": f"5 {int((time.time() - 60) * 1000)}",  # its time is a minute ago, and stays there
        "knob": 1,
        "vanishing": 7,
    }
    mortal.lines = {"alive": 1}
    targets = {"exporter": exporter, "mortal": mortal}
    where = [tmp_path_factory.mktemp(name) for name in ("prometheus", "victoria", "victoria-late")]
    with (
        prometheus(where[0], targets, prefix="/monitoring") as one,
        victoria_metrics(where[1], targets, "-search.latencyOffset=1ms") as two,
        victoria_metrics(where[2], targets, "-search.latencyOffset=10s") as three,
    ):
        yield Monitoring(one, two, three, exporter, mortal)


@pytest.fixture(scope="session")
def hostile() -> Iterator[Hostile]:
    server = Hostile()
    other = Hostile()
    server.elsewhere = other.base_url.replace("127.0.0.1", "localhost")
    yield server
    assert not other.asked, "a redirect to another host was followed"
    server.close()
    other.close()


@dataclass(frozen=True)
class Certificates:
    """PEM files of an authority, and of a server and a client that it vouches for."""

    authority: Path
    other_authority: Path
    server: tuple[Path, Path]
    client: tuple[Path, Path]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    at = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=at, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    for name in ("authority", "other"):
        # Python 3.13 verifies strictly (RFC 5280): an authority says that it signs certificates.
        usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        openssl("req", "-x509", *key, *usage, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    for name in ("server", "client"):
        openssl(
            "req", "-x509", *key, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
            "-addext", "basicConstraints=critical,CA:FALSE", "-CA", "authority.pem", "-CAkey", "authority.key",
            "-keyout", f"{name}.key", "-out", f"{name}.pem",
        )  # fmt: skip
    return Certificates(
        at / "authority.pem",
        at / "other.pem",
        (at / "server.pem", at / "server.key"),
        (at / "client.pem", at / "client.key"),
    )


@pytest.fixture(scope="session")
def tls(certificates: Certificates) -> Iterator[Hostile]:
    server = Hostile(tls_context(*certificates.server))
    yield server
    server.close()


@pytest.fixture(scope="session")
def mutual_tls(certificates: Certificates) -> Iterator[Hostile]:
    server = Hostile(tls_context(*certificates.server, certificates.authority))
    yield server
    server.close()
