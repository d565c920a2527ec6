"""The local transport: this machine's keeper over its socket."""

from typing import Any, Dict

from chaosgpu.node.client import ANSWER_SECONDS, Client

NAME = "local"


def call(request: Dict[str, Any], start: bool = True, seconds: float = ANSWER_SECONDS) -> Dict[str, Any]:
    """One request to this machine's keeper. Raises Unreachable."""
    with Client(start) as client:
        return client.call(request, seconds)
