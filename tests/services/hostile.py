"""An HTTP server that answers as no Prometheus should: the first part of the path says how."""

import base64
import gzip
import json
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

ONE = json.dumps({"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "1"]}]}})


class Hostile:
    """It counts what it was asked, by the first part of the path, and keeps the last request's parts."""

    def __init__(self, context: ssl.SSLContext | None = None, port: int = 0) -> None:
        self.asked: dict[str, int] = {}
        self.last: dict[str, object] = {}
        self.elsewhere = ""
        self._stop = threading.Event()
        hostile = self

        class Handler(_Handler):
            server_of_tests = hostile

        self._server = _QuietServer(("127.0.0.1", port), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if context is None else "https"
        self.base_url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()

    def pause(self, seconds: float) -> bool:
        """Wait; true when the server is closed meanwhile."""
        return self._stop.wait(seconds)


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing: clients that have had enough are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_tests: Hostile

    def do_POST(self) -> None:
        server = self.server_of_tests
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        parts = urlsplit(self.path)
        way = parts.path.split("/")[1]
        server.asked[way] = server.asked.get(way, 0) + 1
        server.last = {
            "method": self.command,
            "path": parts.path,
            "url_parameters": parse_qs(parts.query),
            "form": parse_qs(body),
            "headers": dict(self.headers),
        }
        try:
            getattr(self, f"way_{way.replace('-', '_')}")()
        except OSError:
            self.close_connection = True  # the client has had enough

    do_GET = do_POST

    def answer(self, status: int, body: str | bytes, kind: str = "application/json", **headers: str) -> None:
        raw = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(raw)

    def way_fine(self) -> None:
        self.answer(200, ONE)

    def way_503(self) -> None:
        self.answer(503, '{"status":"error","errorType":"timeout","error":"query timed out in expression evaluation"}')

    def way_500(self) -> None:
        self.answer(500, "it is broken", "text/plain")

    def way_busy(self) -> None:
        """429 once, then fine."""
        if self.server_of_tests.asked["busy"] == 1:
            self.answer(429, "slow down", "text/plain", Retry_After="0")
        else:
            self.answer(200, ONE)

    def way_later(self) -> None:
        self.answer(429, "slow down", "text/plain", Retry_After="40")

    def way_hang(self) -> None:
        self.server_of_tests.pause(60)

    def way_drip(self) -> None:
        """A byte each tenth of a second: no receive ever times out."""
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        while not self.server_of_tests.pause(0.1):
            self.wfile.write(b" ")

    def way_stream(self) -> None:
        """Always something to receive."""
        self.send_response(200)
        self.send_header("Content-Length", "100000000")
        self.end_headers()
        while not self.server_of_tests.pause(0.001):
            self.wfile.write(b" ")

    def way_late(self) -> None:
        """The last byte after 3 s, and no pause as long as 2 s."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(ONE)))
        self.end_headers()
        self.server_of_tests.pause(1.5)
        self.wfile.write(ONE[:-1].encode())
        self.server_of_tests.pause(1.5)
        self.wfile.write(ONE[-1:].encode())

    def way_drip_headers(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not self.server_of_tests.pause(0.1):
            self.wfile.write(b"X")

    def way_moved(self) -> None:
        """To another host that is told to answer fine, if anybody asks."""
        self.answer(307, "", Location=f"{self.server_of_tests.elsewhere}/fine/api/v1/query?token=in-the-url")

    def way_login(self) -> None:
        self.answer(302, "", Location="/login?next=/")

    def way_slash(self) -> None:
        self.answer(307, "", Location="/fine/api/v1/query")

    def way_circle(self) -> None:
        self.answer(307, "", Location="/circle/api/v1/query")

    def way_gigabyte(self) -> None:
        """No length said; blanks are good JSON."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(1024):
            self.wfile.write(b" " * 1024 * 1024)
            self.server_of_tests.last["megabytes"] = self.server_of_tests.last.get("megabytes", 0) + 1  # type: ignore

    def way_bomb(self) -> None:
        self.answer(200, gzip.compress(b" " * 64 * 1024 * 1024, 1), Content_Encoding="gzip")

    def way_401(self) -> None:
        """As a gateway would that is proud of what it was sent."""
        sent = self.headers.get("Authorization", "")
        plain = base64.b64decode(sent.removeprefix("Basic ")).decode() if sent.startswith("Basic ") else ""
        tenant = self.headers.get("X-Secret-Tenant", "")
        error = f"no access with {sent} which is {plain} nor {tenant}"
        self.answer(401, json.dumps({"status": "error", "errorType": "auth", "error": error}))

    def way_405(self) -> None:
        if self.command == "GET":
            self.answer(200, ONE)
        else:
            self.answer(405, "", "text/plain")

    def way_cut(self) -> None:
        """The connection ends in the middle of what was announced."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(ONE)))
        self.end_headers()
        self.wfile.write(ONE[:40].encode())
        self.close_connection = True

    def way_half(self) -> None:
        self.answer(200, ONE[:40])

    def way_deep(self) -> None:
        self.answer(200, "[" * 200_000)

    def way_html(self) -> None:
        self.answer(200, "<html>Please log in, hunter2</html>", "text/html; charset=utf-8")

    def way_empty(self) -> None:
        self.answer(200, "")

    def way_odd(self) -> None:
        self.answer(200, '{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1]}]}}')

    def way_list(self) -> None:
        self.answer(200, "[1, 2]")

    def way_failed(self) -> None:
        self.answer(200, '{"status":"error","errorType":"internal","error":"disk","data":{"result":[]}}')

    def way_warned(self) -> None:
        body = json.loads(ONE)
        body["warnings"] = ["store at 10.0.0.7:10901 is not reachable"]
        self.answer(200, json.dumps(body))

    def way_histogram(self) -> None:
        sample = {"metric": {}, "histogram": [1, {"count": "3", "sum": "4"}]}
        self.answer(200, json.dumps({"status": "success", "data": {"resultType": "vector", "result": [sample]}}))

    def way_skewed(self) -> None:
        """A clock that is an hour behind."""
        raw = ONE.encode()
        self.send_response_only(200)
        self.send_header("Date", self.date_time_string(int(time.time()) - 3600))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def way_clock(self) -> None:
        """A server for which it is 1,000,000.5 s after 1970."""
        if urlsplit(self.path).path.endswith("/query_range"):
            values = [[time, "1"] for time in range(999_990, 1_000_001)]
            data = {"resultType": "matrix", "result": [{"metric": {}, "values": values}]}
        else:
            data = {"resultType": "scalar", "result": [1_000_000.5, "1000000.5"]}
        self.answer(200, json.dumps({"status": "success", "data": data}))

    def way_reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def tls_context(certificate: Path, key: Path, client_authority: Path | None = None) -> ssl.SSLContext:
    """A server's side of TLS; with a client authority, one that wants the client's certificate (mTLS)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if client_authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_authority)
    return context
