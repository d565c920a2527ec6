"""How anything on a node calls its keeper: connect, start one when there is none, ask once, get one answer."""

import contextlib
import json
import os
import socket
import sys
import time
from typing import Any, Dict, Iterator, Optional

from chaosgpu.changes.errors import ChaosgpuError, Unreachable
from chaosgpu.node import bundle, ledger, places, supervisor, wire
from chaosgpu.node.lock import lock_holder

START_SECONDS = 60.0
HELLO_SECONDS = 3.0
ANSWER_SECONDS = 180.0


class Silent(Unreachable):
    """A keeper holds the lock and does not answer: ``takeover`` replaces it."""


class Broken(Unreachable):
    """The keeper died before it answered: asking again, with the same request id, tells what became of it."""


class Client:
    """One connection to this node's keeper. While it is open it is a lease: a fault owned by it ends with it."""

    def __init__(self, start: bool = True) -> None:
        """Connect. With ``start`` a keeper is started where there is none; without, ``Unreachable`` is raised."""
        self.node = os.uname().nodename
        with _usable():
            self.sock = self._connect(start)

    def call(self, request: Dict[str, Any], seconds: float = ANSWER_SECONDS) -> Dict[str, Any]:
        """Send one request and wait for its answer, at most ``seconds``. An error in the answer stays in it."""
        try:
            self.sock.sendall(wire.encode(request))
            return wire.wait_for_message(self.sock, seconds)
        except socket.timeout:
            raise Silent(f"{self.node}: the keeper gave no answer in {seconds:g} s: `chaosgpu-node takeover`") from None
        except (OSError, ChaosgpuError) as error:
            raise Broken(f"{self.node}: the connection to the keeper broke ({error})") from None

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self, start: bool) -> socket.socket:
        give_up = time.monotonic() + START_SECONDS
        started_at = 0.0
        while True:
            sock = _dial()
            if sock is not None:
                hello = self._hello(sock)
                if hello is not None:
                    return sock
            elif not start:
                raise Unreachable(f"{self.node}: no keeper runs here")
            elif time.monotonic() - started_at > 10.0:
                supervisor.start_keeper(bundle.install())
                started_at = time.monotonic()
            if time.monotonic() > give_up:
                raise Unreachable(f"{self.node}: the keeper did not start in {START_SECONDS:g} s{_complaint()}")
            time.sleep(0.01)

    def _hello(self, sock: socket.socket) -> Optional[Dict[str, Any]]:
        """The keeper's greeting; None when this one is leaving and another must be waited for."""
        try:
            sock.sendall(wire.encode({"op": "hello"}))
            hello = wire.wait_for_message(sock, HELLO_SECONDS)
        except socket.timeout:
            sock.close()
            raise Silent(
                f"{self.node}: the keeper (pid {lock_holder()}) is silent for {HELLO_SECONDS:g} s:"
                " `chaosgpu-node takeover` replaces it"
            ) from None
        except (OSError, ChaosgpuError):
            sock.close()
            return None
        if hello.get("wire") == wire.WIRE:
            return hello
        sock.sendall(wire.encode({"op": "leave"}))
        leaving = wire.wait_for_message(sock, HELLO_SECONDS).get("leaving")
        sock.close()
        if not leaving:
            raise Unreachable(
                f"{self.node}: a keeper of version {hello.get('version')} holds {hello.get('open')} open faults"
                " and speaks another protocol: revert them first (chaosgpu-node revert --all)"
            )
        return None


def _dial() -> Optional[socket.socket]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(places.socket_path())
        return sock
    except OSError as error:
        sock.close()
        if isinstance(error, PermissionError):
            raise Unreachable(f"the keeper of {os.uname().nodename} is root's: run as root") from None
        return None


def _complaint() -> str:
    """The last line the keeper wrote before it failed to start."""
    try:
        with open(os.path.join(places.state_dir(), "keeper.err"), encoding="utf-8", errors="replace") as file:
            lines = file.read()[-2000:].strip().splitlines()
        return f": {lines[-1]}" if lines else ""
    except OSError:
        return ""


@contextlib.contextmanager
def _usable() -> Iterator[None]:
    """What the filesystem of the keeper's files refuses, as one line for an operator."""
    try:
        yield
    except OSError as error:
        where, why = error.filename or places.run_dir(), error.strerror or error
        raise Unreachable(
            f"{os.uname().nodename}: {where}: {why}: keeper, lock and ledger need {places.run_dir()} as a writable"
            " directory with some MiB free (mount, df and ls -ld tell); the lines by hand are in its *.record files"
        ) from None


def warn_if_not_root() -> None:
    """On stderr: who is not root sees faults of their own only, and that must not be read as an all-clear."""
    if os.geteuid() != 0 and os.path.exists("/run/chaosgpu"):
        print(
            f"chaosgpu: only faults of uid {os.geteuid()} are looked at, root's (/run/chaosgpu) are not: use sudo",
            file=sys.stderr,
        )


def takeover() -> Dict[str, Any]:
    """Break glass: SIGKILL whatever holds the keeper lock, start a fresh keeper and let it read the ledger."""
    with _usable():
        holder = lock_holder()
    if holder:
        os.kill(holder, 9)
        give_up = time.monotonic() + 5
        while lock_holder() == holder and time.monotonic() < give_up:
            time.sleep(0.005)
    with Client() as client:
        listed = client.call({"op": "list", "recent": True})
    return {"killed": holder, **listed}


def call(request: Dict[str, Any], start: bool = True, seconds: float = ANSWER_SECONDS) -> Dict[str, Any]:
    """One request over a connection of its own."""
    with Client(start) as client:
        return client.call(request, seconds)


def call_if_kept(request: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """One request where there is something to ask about; None where no keeper runs and no ledger has an open record.

    Looking costs no keeper, so a rollback of an experiment that injected nothing starts none.
    """
    with _usable():
        if not lock_holder():
            directories = {places.state_dir(), *places.known_states()}
            if all(record.state == "closed" for directory in directories for record in ledger.read_all(directory)):
                return None
    return call(request)


def rescue(request: Dict[str, Any], start: bool = False) -> Optional[Dict[str, Any]]:
    """For what must happen: a keeper that died is asked again, a silent one is replaced first.

    None where there is nothing to ask about, as for ``call_if_kept``, unless ``start`` asks for a keeper all the same.
    """
    try:
        return call(request) if start else call_if_kept(request)
    except Silent:
        takeover()
    except Broken:
        pass
    return call(request)


def call_text(text: str) -> Dict[str, Any]:
    """One request as JSON text, for ``chaosgpu-node request`` at the far end of a transport."""
    try:
        request = json.loads(text)
    except ValueError:
        raise ChaosgpuError("the request is not JSON") from None
    if not isinstance(request, dict):
        raise ChaosgpuError("the request is not a JSON object")
    return call(request)
