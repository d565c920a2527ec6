"""How caller, keeper and hand talk: one JSON object a line over a stream socket."""

import json
import socket
import struct
from typing import Any, Dict, List, NamedTuple, Optional

from chaosgpu.changes.errors import ChaosgpuError

WIRE = 1  # raised when an old keeper could misunderstand a new caller
LONGEST = 8 * 1024 * 1024


class Peer(NamedTuple):
    """Who is at the other end of a unix socket (SO_PEERCRED, unix(7)); pid 0 when not visible from here."""

    pid: int
    uid: int


def peer(sock: socket.socket) -> Peer:
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(pid, uid)


def encode(message: Dict[str, Any]) -> bytes:
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


class Line:
    """One end of a conversation. Never blocks when reading; ``eof`` tells that the other side is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.eof = False
        self._pending = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def receive(self) -> List[Dict[str, Any]]:
        """The complete messages that have arrived. A peer that breaks the protocol is treated as gone."""
        try:
            chunk = self.sock.recv(262144, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        if not chunk:
            self.eof = True
            return []
        self._pending += chunk
        *lines, rest = self._pending.split(b"\n")
        self._pending = rest
        if len(rest) > LONGEST:
            self.eof = True
            return []
        messages: List[Dict[str, Any]] = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.eof = True
                return messages
            messages.append(message)
        return messages

    def send(self, message: Dict[str, Any]) -> bool:
        """Queue a message and send what the socket takes; False when the other side is gone."""
        self._unsent += encode(message)
        return self.flush()

    def flush(self) -> bool:
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return True
            except OSError:
                return False
            del self._unsent[:sent]
        return True

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def close(self) -> None:
        self.sock.close()


def wait_for_message(sock: socket.socket, seconds: Optional[float]) -> Dict[str, Any]:
    """Block for one message (callers and hands, never the keeper). Raises ChaosgpuError, ``socket.timeout`` on time."""
    sock.settimeout(seconds)
    data = bytearray()
    while b"\n" not in data:
        chunk = sock.recv(262144)
        if not chunk:
            raise ChaosgpuError("the connection was closed before an answer came")
        data += chunk
    message = json.loads(data[: data.index(b"\n")])
    if not isinstance(message, dict):
        raise ChaosgpuError("the answer is not a JSON object")
    return message
