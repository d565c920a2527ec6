"""Questions to Prometheus and to what speaks its HTTP API: VictoriaMetrics, Thanos, Mimir, Cortex.

The requests are made by prometheus-api-client on a session of ours (see session.py). That library returns only
``data.result``, so which type the result has, and the server's warnings, are read off the response by a hook of the
session, before the library sees it. The hook also refuses what the library would raise with the whole answer in it.
"""

import logging
import time
import urllib.parse
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any

import requests
from prometheus_api_client import PrometheusConnect

from chaosgpu.observe.connection import Connection
from chaosgpu.observe.errors import Unanswered
from chaosgpu.observe.series import Series, decode
from chaosgpu.observe.session import RETRIED_STATUSES, bearer_token, mount_bounded, open_session

logger = logging.getLogger("chaostoolkit")

TOLERATED_SKEW_SECONDS = 5
SHOWN_ERROR_CHARACTERS = 300
SAME_PLACE_REDIRECTS = (307, 308)  # the others turn a POST into a GET without its query
WHAT_TO_DO = {
    400: "check the query",
    401: "check the credentials in the secrets, and X-Scope-OrgID where there are tenants",
    403: "the credentials in the secrets may not ask this",
    404: "check the path in prometheus_base_url",
    405: "this server wants prometheus_method GET",
    422: "check the query",
}


@dataclass(frozen=True)
class Answer:
    """What a query gave.

    ``warnings`` say that something is missing or wrong in it, such as a store that Thanos could not reach.
    ``server_time`` is the server's clock (Unix time in seconds, whole ones) when it answered.
    """

    series: tuple[Series, ...]
    warnings: tuple[str, ...]
    server_time: float


class Prometheus:
    """One server, asked in a ``with`` block by one thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._session = open_session(connection)
        self._session.hooks["response"].append(self._read)
        self._api = PrometheusConnect(
            url=connection.base_url,
            session=self._session,
            method=connection.method,
            timeout=(connection.connect_timeout_seconds, connection.timeout_seconds),
        )
        mount_bounded(self._session, connection)  # after PrometheusConnect has mounted an adapter without bounds
        self._answer: tuple[Any, Any, tuple[str, ...], float] | None = None
        self._skew_told = False

    def __enter__(self) -> "Prometheus":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()

    @property
    def address(self) -> str:
        """The server's address, as errors show it. There are no credentials in it."""
        return self._connection.base_url

    def query(self, promql: str) -> Answer:
        """The value of a query now, by the server's clock.

        :raises Unanswered: there is no usable answer, and why.
        """
        return self._ask(self._api.custom_query, promql)

    def query_range(self, promql: str, start: int, end: int, step_seconds: int) -> Answer:
        """The values of a query from start to end, both included, in Unix time in whole seconds.

        :raises Unanswered: there is no usable answer, and why.
        """
        return self._ask(
            self._api.custom_query_range,
            promql,
            start_time=datetime.fromtimestamp(start, UTC),
            end_time=datetime.fromtimestamp(end, UTC),
            step=str(step_seconds),
            # VictoriaMetrics otherwise moves start and end for its cache. The others do not know it and ignore it.
            more={"nocache": "1"},
        )

    def now(self) -> float:
        """The time at which the server evaluates a query that is asked now: behind its clock on VictoriaMetrics."""
        return self.query("time()").series[0].samples[0][1]

    def _ask(self, method: Any, promql: str, more: dict[str, str] | None = None, **arguments: Any) -> Answer:
        params = {"timeout": f"{self._connection.timeout_seconds:g}", **(more or {}), **self._connection.parameters}
        self._answer = None
        try:
            try:
                method(promql, params=params, **arguments)
            except requests.ConnectTimeout:
                limit = self._connection.connect_timeout_seconds
                raise Unanswered(f"no connection within {limit:g} s", transient=True) from None
            except requests.RequestException as error:
                tls = isinstance(error, requests.exceptions.SSLError)
                raise Unanswered(_innermost(error), transient=not tls) from None
            except OSError as error:  # requests does not wrap those of certificate files
                raise Unanswered(_innermost(error), transient=False) from None
            if self._answer is None:
                raise Unanswered("no answer was read", transient=True)
            result_type, result, warnings, server_time = self._answer
            return Answer(decode(result_type, result), warnings, server_time)
        except Unanswered as error:
            raise Unanswered(f"{self.address} gave no answer: {self._hidden(str(error))}", error.transient) from None

    def _read(self, response: requests.Response, **_: Any) -> None:
        if response.is_redirect:
            _check_redirect(response)
            return
        if response.status_code != 200:
            what_to_do = WHAT_TO_DO.get(response.status_code)
            raise Unanswered(
                f"HTTP {response.status_code}{_server_error(response)}{f': {what_to_do}' if what_to_do else ''}",
                transient=response.status_code in RETRIED_STATUSES or response.status_code >= 500,
            )
        body = _json(response)
        if not isinstance(body, dict) or not isinstance(data := body.get("data"), dict) or "result" not in data:
            raise Unanswered(f"the answer is not of Prometheus' HTTP API{_server_error(response)}", transient=True)
        if body.get("status") != "success":
            raise Unanswered(f"the server failed{_server_error(response)}", transient=True)
        warnings = body.get("warnings")
        told = tuple(self._hidden(str(text)) for text in warnings) if isinstance(warnings, list) else ()
        self._answer = (data.get("resultType"), data["result"], told, self._server_time(response))

    def _server_time(self, response: requests.Response) -> float:
        received = time.time()
        try:
            server_time = parsedate_to_datetime(response.headers["Date"]).timestamp()
        except (KeyError, TypeError, ValueError, OverflowError):
            return received
        skew = max(server_time - received, received - response.elapsed.total_seconds() - server_time - 1)
        if skew > TOLERATED_SKEW_SECONDS and not self._skew_told:
            self._skew_told = True
            logger.warning(
                "The clocks of %s and of this machine are %.0f s apart: samples are judged by the server's clock, "
                "and do not line up with the journal's times",
                self.address,
                skew,
            )
        return server_time

    def _hidden(self, text: str) -> str:
        """The text without credentials: a gateway may echo what it was sent."""
        connection = self._connection
        try:
            token = bearer_token(connection)
        except Unanswered:
            token = None
        secrets = [connection.password, connection.bearer_token, token, *connection.hidden]
        if connection.proxy:
            secrets.append(urllib.parse.urlsplit(connection.proxy).password)
        if connection.username is not None and connection.password is not None:
            sent = requests.auth._basic_auth_str(connection.username.encode(), connection.password.encode())
            secrets.append(sent.removeprefix("Basic "))
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            text = text.replace(secret, "***")
        text = " ".join(text.split())
        return text if len(text) <= SHOWN_ERROR_CHARACTERS else text[: SHOWN_ERROR_CHARACTERS - 3] + "..."


def _json(response: requests.Response) -> Any:
    try:
        return response.json()
    except (ValueError, RecursionError):
        kind = response.headers.get("Content-Type", "").partition(";")[0]
        if kind and "json" not in kind:
            why = f"it is {kind}, such as a login page: check prometheus_base_url"
        else:
            why = f"it breaks off or is malformed after {len(response.content)} bytes"
        raise Unanswered(f"the answer is not JSON: {why}", transient=True) from None


def _server_error(response: requests.Response) -> str:
    """The server's own words, from the API's error format; nothing of any other body is shown."""
    try:
        body = response.json()
        return f" ({body['errorType']}: {body['error']})"
    except (ValueError, RecursionError, KeyError, TypeError):
        return ""


def _check_redirect(response: requests.Response) -> None:
    """Follow only what keeps scheme, host, port, method and body: credentials and the query go to no other place."""
    here = urllib.parse.urlsplit(response.url)
    try:
        there = urllib.parse.urlsplit(urllib.parse.urljoin(response.url, response.headers["Location"]))
        target = f"{there.scheme}://{there.hostname}{f':{there.port}' if there.port else ''}{there.path}"
    except ValueError:
        raise Unanswered("the server redirects to an address that is none", transient=False) from None
    same = (here.scheme, here.hostname, here.port) == (there.scheme, there.hostname, there.port)
    if not same or response.status_code not in SAME_PLACE_REDIRECTS:
        raise Unanswered(
            f"HTTP {response.status_code} redirects to {target}, and is not followed: "
            "check prometheus_base_url, and whether a login is wanted",
            transient=False,
        )


def _innermost(error: BaseException) -> str:
    """What happened, without urllib3's and requests' wrappings around it."""
    seen = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = [getattr(error, "reason", None), error.__cause__, *error.args]
        error = next((one for one in inner if isinstance(one, BaseException)), error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
