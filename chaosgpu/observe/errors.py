"""Why a look at Prometheus gave nothing: it did not answer, or its answer holds no number."""

from chaosgpu.changes.errors import ChaosgpuError


class Unanswered(ChaosgpuError):
    """The server gave no usable answer: this says nothing about the system under fault.

    ``transient`` is true where the same question may be answered a little later (a refused connection, a timeout, 429,
    5xx), false where it will not (a parse error, a missing credential, a wrong certificate).
    """

    kind = "unanswered"

    def __init__(self, reason: str, transient: bool) -> None:
        super().__init__(reason)
        self.transient = transient


class NoValue(ChaosgpuError):
    """The server answered without a number that may be used: no data, NaN, too few series, stale samples."""

    kind = "no-value"
