"""One HTTP session to Prometheus: every wait, retry and answer has a bound, and credentials go to one place only."""

import http.client
import io
import re
import time
from pathlib import Path
from socket import socket
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase, HTTPBasicAuth
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, ReadTimeoutError
from urllib3.response import BaseHTTPResponse
from urllib3.util import Retry

from chaosgpu.observe.connection import TOKEN, Connection
from chaosgpu.observe.errors import Unanswered

RETRIED_STATUSES = (429, 502, 503, 504)
BACKOFF_FACTOR_SECONDS = 0.3  # 0, 0.6, 1.2, ... s before a retry
LONGEST_BACKOFF_SECONDS = 5
CHUNK_BYTES = 65536


def open_session(connection: Connection) -> requests.Session:
    """A session that asks as the connection says. Its adapter is mounted by ``mount_bounded``."""
    session = _FormSession()
    # The environment's proxies and CA bundle, and ~/.netrc, must not decide where a probe's credentials go.
    session.trust_env = False
    session.verify = connection.ca or connection.verify_tls
    if connection.client_cert:
        session.cert = (connection.client_cert, connection.client_key or connection.client_cert)
    if connection.proxy:
        session.proxies = {"http": connection.proxy, "https": connection.proxy}
    if connection.username is not None and connection.password is not None:
        session.auth = HTTPBasicAuth(connection.username.encode(), connection.password.encode())
    elif connection.bearer_token or connection.bearer_token_file:
        session.auth = _Bearer(connection)
    session.headers.update(connection.headers)
    session.max_redirects = 3
    return session


def mount_bounded(session: requests.Session, connection: Connection) -> None:
    """Let all requests of the session go through one adapter with the connection's bounds."""
    adapter = _BoundedAdapter(connection)
    session.adapters.clear()
    for scheme in ("http://", "https://"):
        session.mount(scheme, adapter)


class _FormSession(requests.Session):
    """Sends a POST's parameters in its body: prometheus-api-client puts them into the URL, whose length is limited."""

    def prepare_request(self, request: requests.Request) -> requests.PreparedRequest:
        if request.method == "POST":
            request.data, request.params = request.params, {}
        return super().prepare_request(request)


class _Bearer(AuthBase):
    """Adds the token, read again each time: Kubernetes and other issuers rotate such files."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {bearer_token(self._connection)}"
        return request


def bearer_token(connection: Connection) -> str | None:
    """The token as it is now, or None where the connection has none.

    :raises Unanswered: its file cannot be read, or holds no token.
    """
    if connection.bearer_token_file is None:
        return connection.bearer_token
    try:
        token = Path(connection.bearer_token_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise Unanswered(f"{connection.bearer_token_file}: {why}: no token to ask with", transient=True) from None
    if not re.fullmatch(TOKEN, token):
        raise Unanswered(f"{connection.bearer_token_file}: it must hold one token and nothing else", transient=True)
    return token


class _BoundedRetry(Retry):
    """A server may ask us to come back later, but not to hang the experiment until tomorrow."""

    def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
        asked = super().get_retry_after(response)
        return None if asked is None else min(asked, LONGEST_BACKOFF_SECONDS)


class _BoundedAdapter(HTTPAdapter):
    """Reads the answer itself, up to a size and within a time for all of it.

    requests' own timeout is for one receive: a server that sends a byte a second never runs into it.
    """

    def __init__(self, connection: Connection) -> None:
        self._seconds = connection.timeout_seconds
        self._max_bytes = connection.max_bytes
        self._deadline = 0.0
        super().__init__(
            max_retries=_BoundedRetry(
                total=connection.retries,
                connect=connection.retries,
                status=connection.retries,
                read=False,
                other=False,
                redirect=False,
                status_forcelist=RETRIED_STATUSES,
                allowed_methods=None,  # a query changes nothing, so it may be repeated whatever its method
                backoff_factor=BACKOFF_FACTOR_SECONDS,
                backoff_max=LONGEST_BACKOFF_SECONDS,
                raise_on_status=False,
            )
        )

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = self._pool_classes()

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **options)
        manager.pool_classes_by_scheme = self._pool_classes()
        return manager

    def send(self, *args: Any, **options: Any) -> requests.Response:
        self._deadline = time.monotonic() + self._seconds
        try:
            response = super().send(*args, **options)
            # requests reads an answer's content from here on, and finds it complete.
            response.raw = io.BytesIO(self._read(response))
        except (requests.ReadTimeout, ReadTimeoutError):
            raise Unanswered(f"no complete answer within {self._seconds:g} s", transient=True) from None
        except HTTPError as error:
            raise requests.ConnectionError(error) from error
        return response

    def _read(self, response: requests.Response) -> bytes:
        read = bytearray()
        try:
            # read1 returns what one receive brought. It counts after unpacking, so that a small gzip bomb is large.
            while chunk := response.raw.read1(CHUNK_BYTES, decode_content=True):
                read += chunk
                if len(read) > self._max_bytes:
                    raise Unanswered(
                        f"the answer is larger than prometheus_max_bytes ({self._max_bytes}): aggregate in the query",
                        transient=False,
                    )
        except BaseException:
            response.close()
            raise
        return bytes(read)

    def _pool_classes(self) -> dict[str, type[HTTPConnectionPool]]:
        adapter = self

        class TimedResponse(http.client.HTTPResponse):
            def __init__(self, sock: Any, *args: Any, **options: Any) -> None:
                timed: Any = _TimedSocket(sock, adapter._deadline)
                super().__init__(timed, *args, **options)

        class Plain(HTTPConnection):
            response_class = TimedResponse

        class Secure(HTTPSConnection):
            response_class = TimedResponse

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        return {"http": PlainPool, "https": SecurePool}


class _TimedSocket:
    """As much of a socket as http.client reads an answer from."""

    def __init__(self, used: socket, deadline: float) -> None:
        self._used = used
        self._deadline = deadline

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._used, self._deadline))


class _TimedReader(io.RawIOBase):
    """Gives each receive what is left of the time."""

    def __init__(self, used: socket, deadline: float) -> None:
        self._used = used
        self._deadline = deadline
        self._file = used.makefile("rb", buffering=0)  # keeps the socket open while the answer is read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._used.settimeout(left)
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()
