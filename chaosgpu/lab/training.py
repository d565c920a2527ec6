"""One rank of the rehearsal training job: ``python -m chaosgpu.lab.training --rank 0 ...``.

Every step both ranks compute a gradient and all-reduce it; every CHECKPOINT_STEPS steps each writes its checkpoint and
waits for it, as synchronous checkpointing does. So one slow disk, one paused or misplaced rank, or a bad link between
the two slows the whole job, and the metrics of each rank tell which it was.
"""

import argparse
import socket
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from chaosgpu.lab.checkpoint import Checkpoint
from chaosgpu.lab.model import Model
from chaosgpu.lab.peer import Peer, PeerLostError

STEP_SECONDS = 0.05  # a step takes at least this long, so that the job leaves the machine to others
CHECKPOINT_STEPS = 20
RATE_WINDOW_SECONDS = 2.0
LOSS_SMOOTHING = 0.02


class Metrics:
    """What a rank shows to Prometheus, in its text format."""

    def __init__(self) -> None:
        self.steps = 0
        self.loss = 0.0
        self.compute_seconds = 0.0
        self.allreduce_seconds = 0.0
        self.checkpoints = 0
        self.checkpoint_failures = 0
        self.rejoins = 0
        self._checkpoint_seconds = 0.0
        self._checkpoint_begun: float | None = None
        self._finished: deque[float] = deque(maxlen=int(2 * RATE_WINDOW_SECONDS / STEP_SECONDS))

    def step_done(self, step: int, loss: float) -> None:
        """Count a step and take its loss into the moving average."""
        self.steps = step
        self.loss = loss if not self.loss else self.loss + LOSS_SMOOTHING * (loss - self.loss)
        self._finished.append(time.monotonic())

    def checkpoint_begins(self) -> None:
        """Start the clock that `checkpoint_seconds` shows while the write lasts."""
        self._checkpoint_begun = time.monotonic()

    def checkpoint_ends(self) -> None:
        """Keep how long the write took."""
        self._checkpoint_seconds = time.monotonic() - (self._checkpoint_begun or time.monotonic())
        self._checkpoint_begun = None

    def text(self) -> str:
        """Everything in Prometheus's text exposition format 0.0.4."""
        now = time.monotonic()
        begun = self._checkpoint_begun
        running = now - begun if begun else 0.0
        rate = sum(now - finished <= RATE_WINDOW_SECONDS for finished in tuple(self._finished)) / RATE_WINDOW_SECONDS
        shown = (
            ("steps_total", "counter", "Training steps done.", self.steps),
            ("steps_per_second", "gauge", "Training steps per second over the last 2 seconds.", rate),
            ("loss", "gauge", "Log loss, a moving average.", self.loss),
            ("compute_seconds", "gauge", "How long the last step's own computation took.", self.compute_seconds),
            ("allreduce_seconds", "gauge", "How long the last step waited for the other rank.", self.allreduce_seconds),
            (
                "checkpoint_seconds",
                "gauge",
                "How long the last checkpoint took, or the one being written has taken, if longer.",
                max(self._checkpoint_seconds, running),
            ),
            ("checkpoints_total", "counter", "Checkpoints written.", self.checkpoints),
            ("checkpoint_failures_total", "counter", "Checkpoints that failed.", self.checkpoint_failures),
            ("rejoins_total", "counter", "Times the other rank was lost and joined again.", self.rejoins),
        )
        return "".join(
            f"# HELP training_{name} {meaning}\n# TYPE training_{name} {kind}\ntraining_{name} {value}\n"
            for name, kind, meaning, value in shown
        )


def serve(metrics: Metrics, listener: socket.socket) -> ThreadingHTTPServer:
    """Answer every GET with the metrics, in a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = metrics.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a scrape every second is no news."""

    server = ThreadingHTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


def train(rank: int, address: tuple[str, int], directory: Path, metrics: Metrics) -> None:
    """Train until killed. ``address`` is where rank 0 waits for rank 1, ``directory`` where checkpoints go."""
    model = Model()
    checkpoint = Checkpoint(directory, rank)
    with Peer(rank, address) as peer:
        _train(rank, peer, model, checkpoint, metrics)


def _train(rank: int, peer: Peer, model: Model, checkpoint: Checkpoint, metrics: Metrics) -> None:
    step = peer.join(checkpoint.load(model), model)
    while True:
        begun = time.monotonic()
        gradient, loss = model.gradient(rank, step)
        computed = time.monotonic()
        try:
            gradient, loss = peer.all_reduce(step, gradient, loss)
        except PeerLostError as lost:
            print(f"step {step}: {lost}; waiting for the other rank", flush=True)
            step = peer.join(step, model)
            metrics.rejoins += 1
            continue
        metrics.compute_seconds, metrics.allreduce_seconds = computed - begun, time.monotonic() - computed
        model.apply(gradient)
        step += 1
        metrics.step_done(step, loss)
        if step % CHECKPOINT_STEPS == 0:
            metrics.checkpoint_begins()
            try:
                checkpoint.save(step, model)
                metrics.checkpoints += 1
            except OSError as error:
                print(f"step {step}: checkpoint not written: {error}", flush=True)
                metrics.checkpoint_failures += 1
            metrics.checkpoint_ends()
        time.sleep(max(0.0, begun + STEP_SECONDS - time.monotonic()))


def main() -> None:
    """Run one rank."""
    arguments = argparse.ArgumentParser(prog="python -m chaosgpu.lab.training", description=__doc__)
    arguments.add_argument("--rank", type=int, choices=(0, 1), required=True)
    arguments.add_argument("--address", required=True, help="where rank 0 listens for rank 1")
    arguments.add_argument("--port", type=int, required=True)
    arguments.add_argument("--checkpoints", type=Path, required=True, help="directory for the checkpoints")
    arguments.add_argument("--metrics-fd", type=int, required=True, help="a listening socket that was handed down")
    given = arguments.parse_args()
    metrics = Metrics()
    serve(metrics, socket.socket(fileno=given.metrics_fd))
    train(given.rank, (given.address, given.port), given.checkpoints, metrics)


if __name__ == "__main__":
    main()
