"""The local transport: this machine's keeper over its socket."""

from typing import Any

from chaosgpu.node.client import ANSWER_SECONDS, Broken, Client

NAME = "local"


def call(request: dict[str, Any], start: bool = True, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """One request to this machine's keeper. Raises Unreachable.

    A keeper that dies while it answers is replaced, and the request is sent once more: its id makes the new keeper tell
    what became of it, never do it twice.
    """
    try:
        with Client(start) as client:
            return client.call(request, seconds)
    except Broken:
        with Client(start) as client:
            return client.call(request, seconds)
