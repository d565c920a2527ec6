"""What a rank shows to Prometheus."""

import re
import socket
import time
import urllib.request

from chaosgpu.lab.training import RATE_WINDOW_SECONDS, Metrics, serve

LINE = re.compile(r"(# (HELP|TYPE) training_\w+ .+|training_\w+ -?\d+(\.\d+)?(e-?\d+)?)")


def sample(text: str, name: str) -> float:
    (found,) = re.findall(rf"^training_{name} (\S+)$", text, re.MULTILINE)
    return float(found)


def test_every_line_is_of_the_exposition_format() -> None:
    metrics = Metrics()
    metrics.step_done(1, 0.7)
    lines = metrics.text().splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    for name in ("steps_total", "steps_per_second", "loss", "checkpoint_seconds"):
        assert sum(line.startswith(f"training_{name} ") for line in lines) == 1


def test_step_rate_counts_the_last_two_seconds_only() -> None:
    metrics = Metrics()
    for step in range(10):
        metrics.step_done(step + 1, 0.7)
    assert sample(metrics.text(), "steps_per_second") == 10 / RATE_WINDOW_SECONDS
    metrics._finished.extend(time.monotonic() - RATE_WINDOW_SECONDS - 1 for _ in range(metrics._finished.maxlen or 0))
    assert sample(metrics.text(), "steps_per_second") == 0


def test_a_checkpoint_being_written_shows_how_long_it_has_taken() -> None:
    metrics = Metrics()
    assert sample(metrics.text(), "checkpoint_seconds") == 0
    metrics.checkpoint_begins()
    time.sleep(0.05)
    assert sample(metrics.text(), "checkpoint_seconds") >= 0.05
    metrics.checkpoint_ends()
    taken = sample(metrics.text(), "checkpoint_seconds")
    time.sleep(0.05)
    assert sample(metrics.text(), "checkpoint_seconds") == taken


def test_metrics_are_served_on_a_socket_that_was_handed_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        metrics = Metrics()
        metrics.step_done(42, 0.7)
        server = serve(metrics, listener)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics", timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert sample(answer.read().decode(), "steps_total") == 42
        server.shutdown()
