"""Settings from configuration and secrets: text becomes numbers, and what is secret is never shown."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaosgpu.changes.errors import BadArgument
from chaosgpu.observe.connection import Connection, read_connection

URL = {"prometheus_base_url": "http://127.0.0.1:9090"}


def test_the_address_alone_is_enough() -> None:
    assert read_connection(URL, None) == Connection("http://127.0.0.1:9090")
    assert read_connection({"prometheus_base_url": "https://host/prefix/"}, {}).base_url == "https://host/prefix"


def test_numbers_and_truth_come_as_text(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("")
    read = read_connection(
        {
            **URL,
            "prometheus_timeout": "15s",
            "prometheus_connect_timeout": "500ms",
            "prometheus_retries": "0",
            "prometheus_max_bytes": "1GiB",
            "prometheus_verify_tls": "False",
            "prometheus_ca": str(ca),
            "prometheus_headers": '{"X-Scope-OrgID": "a"}',
            "prometheus_parameters": {"max_source_resolution": 5},
            "somebody_elses": object(),
        },
        {"prometheus_headers": {"X-Key": "k"}, "prometheus_username": "anna", "prometheus_password": " p:w "},
    )
    assert (read.timeout_seconds, read.connect_timeout_seconds, read.retries) == (15, 0.5, 0)
    assert (read.max_bytes, read.verify_tls, read.ca) == (2**30, False, str(ca))
    assert read.headers == {"X-Scope-OrgID": "a", "X-Key": "k"}
    assert read.parameters == {"max_source_resolution": "5"}
    assert (read.username, read.password) == ("anna", " p:w ")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prometheus_base_url": None}, "prometheus_base_url is missing"),
        ({"prometheus_base_url": "127.0.0.1:9090"}, "prometheus_base_url is not usable"),
        ({"prometheus_base_url": "http://host:99999"}, "prometheus_base_url is not usable"),
        ({"prometheus_base_url": "http://host:0"}, "prometheus_base_url is not usable"),
        ({"prometheus_base_url": "http://[::1"}, "prometheus_base_url is not usable"),
        ({"prometheus_base_url": "http://host/?a=hunter2"}, "prometheus_base_url is not usable"),
        ({"prometheus_base_url": "http://anna:hunter2@host"}, "prometheus_base_url holds a user name"),
        ({"prometheus_base_url": ["http://host"]}, "prometheus_base_url is not usable"),
        ({"prometheus_timeout": "soon"}, "prometheus_timeout is 'soon': 0.1 to 600 seconds"),
        ({"prometheus_timeout": 0}, "prometheus_timeout is 0"),
        ({"prometheus_retries": 1.5}, "prometheus_retries is 1.5: a whole number"),
        ({"prometheus_method": "PUT"}, "prometheus_method is 'PUT': one of POST, GET"),
        ({"prometheus_verify_tls": "no"}, "prometheus_verify_tls is 'no': true or false"),
        ({"prometheus_ca": "/no/such/file"}, "prometheus_ca is '/no/such/file': a file on this machine"),
        ({"prometheus_headers": "X: hunter2"}, "prometheus_headers is not usable"),
        ({"prometheus_headers": {"X": "hunter2\r\nY: 1"}}, "prometheus_headers has the entry 'X'"),
        ({"prometheus_headers": {"X Y": "hunter2"}}, "prometheus_headers has the entry 'X Y'"),
        ({"prometheus_headers": {"X": ["hunter2"]}}, "prometheus_headers has the entry 'X'"),
        ({"prometheus_bearer_token": "hunter2\nx"}, "prometheus_bearer_token is not usable (its value is not shown)"),
        ({"prometheus_bearer_token": ""}, "prometheus_bearer_token is not usable"),
        ({"prometheus_password": "hunter2"}, "prometheus_username is missing"),
        ({"prometheus_username": "anna"}, "prometheus_password is missing"),
        ({"prometheus_client_key": __file__}, "prometheus_client_cert is missing"),
        (
            {"prometheus_bearer_token": "hunter2", "prometheus_username": "anna", "prometheus_password": "hunter2"},
            "prometheus_bearer_token and prometheus_username are given: one way",
        ),
        (
            {"prometheus_bearer_token": "hunter2", "prometheus_headers": {"AUTHORIZATION": "hunter2"}},
            "prometheus_bearer_token and prometheus_headers are given: one way",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["configuration", "secrets"])
def test_what_is_wrong_is_named_and_not_shown(settings: dict[str, Any], said: str, where: str) -> None:
    given_settings = {**URL, **settings}
    with pytest.raises(BadArgument) as caught:
        read_connection(*((given_settings, {}) if where == "configuration" else ({}, given_settings)))
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)


@settings(deadline=None)
@given(
    st.sampled_from(["bearer_token", "password", "proxy", "base_url"]),
    st.sampled_from(["hunter2{}", "{}hunter2", "http://anna:hunter2{}@host"]),
    st.text(),
)
def test_no_secret_is_in_an_error_or_a_repr(name: str, form: str, text: str) -> None:
    user = {"prometheus_username": "anna"} if name == "password" else {}
    try:
        told = repr(read_connection(URL, {**user, f"prometheus_{name}": form.replace("{}", text)}))
    except BadArgument as error:
        told = str(error)
    assert "\n" not in told
    assert "hunter2" not in told
