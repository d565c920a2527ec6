"""Where Prometheus is and how we may ask it, from an experiment's ``configuration`` and ``secrets``.

Every key may stand in either; a password, a token and secret headers belong in ``secrets``, since a journal holds the
configuration. Numbers and truth values may be text, as environment variables are.

==============================  ========================================================================================
``prometheus_base_url``         ``http://host:9090``, with a path prefix if there is one (``https://mimir/prometheus``)
``prometheus_timeout``          for one query, its retries and its whole answer (default 10 s)
``prometheus_connect_timeout``  for one connection (default 3 s)
``prometheus_retries``          after a failed connection, 429, 502, 503 and 504 only (default 2)
``prometheus_max_bytes``        the largest answer that is read (default 32 MiB)
``prometheus_method``           POST (default: long queries fit into a form), or GET for gateways that refuse POST
``prometheus_headers``          a mapping, or JSON text: ``{"X-Scope-OrgID": "team-a"}``
``prometheus_parameters``       more query parameters: ``{"partial_response": "false", "dedup": "true"}`` for Thanos
``prometheus_proxy``            a proxy's URL; without it none is used, whatever the environment says
``prometheus_verify_tls``       false accepts any certificate
``prometheus_ca``               a PEM file with the authorities to trust instead of certifi's
``prometheus_client_cert``      a PEM file to show as client (mTLS), and
``prometheus_client_key``       its key, where that is in a file of its own
``prometheus_bearer_token``     sent as ``Authorization: Bearer``; or
``prometheus_bearer_token_file``  a file with it, read again for every request since such tokens are rotated
``prometheus_username``         and ``prometheus_password``: basic authentication
==============================  ========================================================================================
"""

import json
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chaosgpu.changes.errors import BadArgument
from chaosgpu.faults import params

MIB = 1024**2
TOKEN = r"[!-~]+"  # what a header can carry, without blanks
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_HEADER_VALUE = re.compile(r"[!-~]([ \t!-~]*[!-~])?|")


@dataclass(frozen=True)
class Connection:
    """How to ask one server. What is secret is not in its repr."""

    base_url: str
    timeout_seconds: float = 10.0
    connect_timeout_seconds: float = 3.0
    retries: int = 2
    max_bytes: int = 32 * MIB
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    parameters: Mapping[str, str] = field(default_factory=dict)
    proxy: str | None = field(default=None, repr=False)
    verify_tls: bool = True
    ca: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    bearer_token: str | None = field(default=None, repr=False)
    bearer_token_file: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    hidden: tuple[str, ...] = field(default=(), repr=False)  # values of headers that stood in the secrets


def read_connection(configuration: Mapping[str, Any] | None, secrets: Mapping[str, Any] | None) -> Connection:
    """The connection that an experiment describes.

    :raises BadArgument: which key, why, and what is allowed; never the value of one that may be secret.
    """
    read: dict[str, Any] = {}
    for source in (configuration or {}, secrets or {}):
        for key, (name, parse) in _KEYS.items():
            if source.get(key) is not None:
                value = parse(key, source[key])
                read[name] = {**read.get(name, {}), **value} if isinstance(value, dict) else value
    if secrets and secrets.get("prometheus_headers") is not None:
        read["hidden"] = tuple(_headers("prometheus_headers", secrets["prometheus_headers"]).values())
    if "base_url" not in read:
        raise BadArgument(
            "prometheus_base_url is missing: put it into the experiment's configuration, such as http://127.0.0.1:9090"
        )
    for has, lacks in (("username", "password"), ("password", "username"), ("client_key", "client_cert")):
        if has in read and lacks not in read:
            raise BadArgument(f"prometheus_{lacks} is missing: prometheus_{has} is given and needs it")
    ways = [f"prometheus_{name}" for name in ("bearer_token", "bearer_token_file", "username") if name in read]
    ways += ["prometheus_headers" for name in read.get("headers", {}) if name.lower() == "authorization"]
    if len(ways) > 1:
        raise BadArgument(f"{' and '.join(ways)} are given: one way to authenticate is allowed")
    return Connection(**read)


def _url(name: str, value: Any, credentials: bool) -> str:
    """An http or https URL. It is never shown when wrong, since it may hold a password."""
    allowed = "an address such as http://127.0.0.1:9090 or https://host/prefix"
    try:
        if not re.fullmatch(r"https?://[!-~]+", value):
            raise ValueError
        parts = urllib.parse.urlsplit(value)
        if not parts.hostname or parts.port == 0 or parts.query or parts.fragment:
            raise ValueError
    except (TypeError, ValueError):
        raise BadArgument(f"{name} is not usable: {allowed} is allowed, without ? and #") from None
    if "@" in parts.netloc and not credentials:
        raise BadArgument(f"{name} holds a user name: give prometheus_username and prometheus_password in the secrets")
    return str(value).rstrip("/")


def _file(name: str, value: Any) -> str:
    if not isinstance(value, str) or "\0" in value or not os.path.isfile(value):
        raise BadArgument(f"{name} is {params.shown(value)}: a file on this machine is allowed")
    if not os.access(value, os.R_OK):
        raise BadArgument(f"{name} is {params.shown(value)}: this user may not read that file")
    return value


def _secret(pattern: str, allowed: str) -> Callable[[str, Any], str]:
    compiled = re.compile(pattern)

    def parse(name: str, value: Any) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise BadArgument(f"{name} is not usable (its value is not shown): {allowed} is allowed")
        return value

    return parse


def _mapping(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise BadArgument(f'{name} is not usable: a mapping, or JSON text such as {{"name": "value"}}, is allowed')
    for key, text in value.items():
        if not isinstance(key, str) or isinstance(text, bool) or not isinstance(text, (str, int, float)):
            raise BadArgument(f"{name} has the entry {params.shown(key)}: names with text or a number are allowed")
    return {key: str(text) for key, text in value.items()}


def _headers(name: str, value: Any) -> dict[str, str]:
    headers = _mapping(name, value)
    for key, text in headers.items():
        if not _HEADER_NAME.fullmatch(key) or not _HEADER_VALUE.fullmatch(text):
            raise BadArgument(
                f"{name} has the entry {params.shown(key)} (its value is not shown): printable ASCII is allowed"
            )
    return headers


_KEYS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "prometheus_base_url": ("base_url", lambda name, value: _url(name, value, credentials=False)),
    "prometheus_timeout": ("timeout_seconds", params.seconds(0.1, 600)),
    "prometheus_connect_timeout": ("connect_timeout_seconds", params.seconds(0.1, 60)),
    "prometheus_retries": ("retries", params.integer(0, 10)),
    "prometheus_max_bytes": ("max_bytes", params.size_bytes(1024, 1024 * MIB)),
    "prometheus_method": ("method", params.choice("POST", "GET")),
    "prometheus_headers": ("headers", _headers),
    "prometheus_parameters": ("parameters", _mapping),
    "prometheus_proxy": ("proxy", lambda name, value: _url(name, value, credentials=True)),
    "prometheus_verify_tls": ("verify_tls", params.flag),
    "prometheus_ca": ("ca", _file),
    "prometheus_client_cert": ("client_cert", _file),
    "prometheus_client_key": ("client_key", _file),
    "prometheus_bearer_token": ("bearer_token", _secret(TOKEN, "printable ASCII without blanks")),
    "prometheus_bearer_token_file": ("bearer_token_file", _file),
    "prometheus_username": ("username", _secret(r"[^:\x00-\x1f\x7f]+", "text without colon and line break")),
    "prometheus_password": ("password", _secret(r"[^\x00-\x1f\x7f]+", "text without line break")),
}
