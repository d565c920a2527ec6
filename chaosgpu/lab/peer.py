"""The two ranks' collective: a synchronous all-reduce of sparse gradients over one TCP connection."""

import socket
import struct
import time
from array import array

from chaosgpu.lab.model import Gradient, Model

SHARE = struct.Struct("<QId")  # step, number of gradient entries, loss
STEP = struct.Struct("<Q")
RETRY_SECONDS = 0.2


class PeerLostError(ConnectionError):
    """The other rank is gone; the survivor waits for its successor."""


class Peer:
    """The other rank. Rank 0 listens at the address, rank 1 connects to it."""

    def __init__(self, rank: int, address: tuple[str, int]) -> None:
        self._rank = rank
        self._address = address
        self._listener = None if rank else socket.create_server(address, backlog=1)
        self._connection: socket.socket | None = None

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exception: object) -> None:
        for used in (self._connection, self._listener):
            if used:
                used.close()

    def join(self, step: int, model: Model) -> int:
        """Wait for the other rank and agree on a state: the rank that is further hands it over.

        Returns the step to go on from.
        """
        while True:
            try:
                self._connect()
                self._send(STEP.pack(step))
                (other,) = STEP.unpack(self._receive(STEP.size))
                if step > other or (step == other and self._rank == 0):
                    self._send(model.weights.tobytes() + model.squares.tobytes())
                    return step
                half = 8 * len(model.weights)
                model.weights = array("d", self._receive(half))
                model.squares = array("d", self._receive(half))
                return int(other)
            except OSError:
                time.sleep(RETRY_SECONDS)

    def all_reduce(self, step: int, gradient: Gradient, loss: float) -> tuple[Gradient, float]:
        """Exchange shares and return the mean gradient and loss of both ranks.

        :raises PeerLostError: the connection ended, or the ranks are at different steps.
        """
        try:
            share = SHARE.pack(step, len(gradient), loss)
            self._send(share + array("I", gradient.keys()).tobytes() + array("d", gradient.values()).tobytes())
            other_step, entries, other_loss = SHARE.unpack(self._receive(SHARE.size))
            features = array("I", self._receive(4 * entries))
            slopes = array("d", self._receive(8 * entries))
        except OSError as error:
            raise PeerLostError(str(error)) from error
        if other_step != step:
            raise PeerLostError(f"the other rank is at step {other_step}, this one at {step}")
        mean = {feature: slope / 2 for feature, slope in gradient.items()}
        for feature, slope in zip(features, slopes, strict=True):
            mean[feature] = mean.get(feature, 0.0) + slope / 2
        # Both ranks must add in one order: floating-point sums that differ in the last bit would drift apart.
        return {feature: mean[feature] for feature in sorted(mean)}, (loss + other_loss) / 2

    def _connect(self) -> None:
        if self._connection:
            self._connection.close()
        if self._listener:
            self._connection, _ = self._listener.accept()
        else:
            self._connection = socket.create_connection(self._address, timeout=5)
            self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _send(self, data: bytes) -> None:
        assert self._connection
        self._connection.sendall(data)

    def _receive(self, size: int) -> bytes:
        assert self._connection
        data = bytearray()
        while len(data) < size:
            part = self._connection.recv(size - len(data))
            if not part:
                raise ConnectionError("the other rank closed the connection")
            data += part
        return bytes(data)
