"""Servers that fail, hang, lie, redirect and echo: the probe ends in bounded time, in one line, without credentials."""

import base64
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from chaoslib.exceptions import ActivityFailed
from daemons import free_port
from hostile import Hostile
from urllib3.exceptions import InsecureRequestWarning

from chaosgpu.observe.client import Prometheus
from chaosgpu.observe.connection import read_connection
from chaosgpu.probes import metric_holds, metric_value, wait_for_metric

pytestmark = [pytest.mark.services, pytest.mark.toolkit]

SECRET = "hunter2-and-more"


def at(server: Hostile, way: str, **more: Any) -> dict[str, Any]:
    return {"prometheus_base_url": f"{server.base_url}/{way}", "prometheus_timeout": "2", **more}


def failure(configuration: dict[str, Any], secrets: dict[str, Any] | None = None) -> str:
    with pytest.raises(ActivityFailed) as caught:
        metric_value("up", configuration=configuration, secrets=secrets)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    assert caught.value.__cause__ is None
    return text


# How it answers; what is said; how often it was asked with two retries allowed.
FAILURES = [
    ("503", "HTTP 503 (timeout: query timed out in expression evaluation)", 3),
    ("500", "HTTP 500", 1),
    ("hang", "no complete answer within 2 s", 1),
    ("drip", "no complete answer within 2 s", 1),
    ("drip-headers", "no complete answer within 2 s", 1),
    ("stream", "no complete answer within 2 s", 1),
    ("late", "no complete answer within 2 s", 1),
    ("moved", "redirects to http://localhost:", 1),
    ("login", "HTTP 302 redirects to http://127.0.0.1:", 1),
    ("circle", "Exceeded 3 redirects", 4),
    ("gigabyte", "the answer is larger than prometheus_max_bytes (1048576)", 1),
    ("bomb", "the answer is larger than prometheus_max_bytes (1048576)", 1),
    ("405", "HTTP 405: this server wants prometheus_method GET", 1),
    ("cut", "more expected", 1),
    ("half", "the answer is not JSON: it breaks off or is malformed after 40 bytes", 1),
    ("deep", "the answer is not JSON", 1),
    ("html", "it is text/html, such as a login page", 1),
    ("empty", "the answer is not JSON", 1),
    ("odd", "its result is malformed", 1),
    ("list", "the answer is not of Prometheus' HTTP API", 1),
    ("failed", "the server failed (internal: disk)", 1),
    ("warned", "the server warns, so that series may be missing: store at 10.0.0.7:10901 is not reachable", 1),
    ("histogram", "native histograms", 1),
    ("reset", "Connection reset by peer", 1),
]


@pytest.mark.parametrize(("way", "said", "asked"), FAILURES, ids=lambda case: str(case)[:20])
def test_failure(hostile: Hostile, way: str, said: str, asked: int) -> None:
    hostile.asked.pop(way, None)
    begun = time.monotonic()
    text = failure(at(hostile, way, prometheus_max_bytes="1MiB"))
    assert said in text
    assert "token=in-the-url" not in text
    assert hostile.asked[way] == asked
    assert time.monotonic() - begun < 20  # not a timing: the hostile ways would else go on for a minute or for ever


def test_a_gigabyte_is_not_read(hostile: Hostile) -> None:
    failure(at(hostile, "gigabyte"))
    assert int(str(hostile.last["megabytes"])) < 100


def test_retries_end_well(hostile: Hostile) -> None:
    hostile.asked.pop("busy", None)
    assert metric_value("up", configuration=at(hostile, "busy")) == 1
    assert hostile.asked["busy"] == 2


def test_no_retries_when_none_are_wanted(hostile: Hostile) -> None:
    hostile.asked.pop("503", None)
    failure(at(hostile, "503", prometheus_retries="0"))
    assert hostile.asked["503"] == 1


def test_a_server_does_not_decide_how_long_we_wait(hostile: Hostile) -> None:
    begun = time.monotonic()
    assert "HTTP 429" in failure(at(hostile, "later", prometheus_retries=1, prometheus_timeout=10))
    assert time.monotonic() - begun < 30  # not a timing: it asked for 40 s


def test_a_server_that_comes_up_is_found() -> None:
    port = free_port()
    configuration = {"prometheus_base_url": f"http://127.0.0.1:{port}/fine"}
    assert "Connection refused" in failure({**configuration, "prometheus_retries": 0})
    servers: list[Hostile] = []
    later = threading.Timer(0.3, lambda: servers.append(Hostile(port=port)))
    later.start()
    try:
        assert metric_value("up", configuration={**configuration, "prometheus_retries": "4"}) == 1
    finally:
        later.join()
        servers[0].close()


def test_waiting_survives_a_server_that_is_away_but_not_one_that_refuses(hostile: Hostile) -> None:
    hostile.asked.pop("busy", None)
    configuration = at(hostile, "busy", prometheus_retries=0)
    assert wait_for_metric("up", "==", 1, timeout=10, interval=0.1, configuration=configuration)
    assert hostile.asked["busy"] == 2
    hostile.asked.pop("401", None)
    with pytest.raises(ActivityFailed, match="HTTP 401"):
        wait_for_metric("up", "==", 1, timeout=60, configuration=at(hostile, "401"))
    assert hostile.asked["401"] == 1
    with pytest.raises(ActivityFailed, match="HTTP 500"):
        wait_for_metric("up", "==", 1, timeout=0.3, interval=0.1, configuration=at(hostile, "500"))


def test_the_query_is_in_the_form_and_the_settings_are_sent(hostile: Hostile) -> None:
    configuration = at(
        hostile,
        "fine/deep/prefix/",
        prometheus_headers='{"X-Scope-OrgID": "team-a"}',
        prometheus_parameters={"partial_response": "false"},
    )
    assert metric_value('up{job="x y"}', configuration=configuration) == 1
    assert hostile.last["method"] == "POST"
    assert hostile.last["path"] == "/fine/deep/prefix/api/v1/query"
    assert hostile.last["url_parameters"] == {}
    assert hostile.last["form"] == {"query": ['up{job="x y"}'], "timeout": ["2"], "partial_response": ["false"]}
    assert hostile.last["headers"]["X-Scope-OrgID"] == "team-a"  # type: ignore[index]


def test_get_where_a_gateway_wants_it(hostile: Hostile) -> None:
    assert metric_value("up", configuration=at(hostile, "405", prometheus_method="GET")) == 1
    assert hostile.last["url_parameters"]["query"] == ["up"]  # type: ignore[index]


def test_a_redirect_in_place_keeps_the_query(hostile: Hostile) -> None:
    assert metric_value("up", configuration=at(hostile, "slash")) == 1
    assert hostile.last["form"]["query"] == ["up"]  # type: ignore[index]


def test_warnings_are_logged_or_fail(hostile: Hostile, caplog: pytest.LogCaptureFixture) -> None:
    configuration = at(hostile, "warned")
    assert not metric_holds("up", "==", 1, configuration=configuration)
    caplog.clear()
    assert metric_holds("up", "==", 1, on_warning="log", configuration=configuration)
    assert "10.0.0.7:10901 is not reachable" in caplog.text


def test_clock_skew_is_told(hostile: Hostile, caplog: pytest.LogCaptureFixture) -> None:
    assert metric_value("up", configuration=at(hostile, "fine")) == 1
    assert "apart" not in caplog.text
    assert metric_value("up", configuration=at(hostile, "skewed")) == 1
    assert "3600 s apart" in caplog.text or "3599 s apart" in caplog.text


def test_a_window_ends_when_the_server_says_it_is_now(hostile: Hostile) -> None:
    assert metric_holds("up", "==", 1, for_seconds=4, configuration=at(hostile, "clock"))
    asked = {name: hostile.last["form"][name] for name in ("start", "end", "step")}  # type: ignore[index]
    assert asked == {"start": ["999996"], "end": ["1000000"], "step": ["1"]}
    assert not metric_holds("up", "==", 1, for_seconds=11, configuration=at(hostile, "clock"))


@pytest.mark.parametrize(
    "secrets",
    [
        {"prometheus_bearer_token": SECRET},
        {"prometheus_username": "anna", "prometheus_password": SECRET},
        {"prometheus_headers": {"X-Secret-Tenant": SECRET}},
        {"prometheus_headers": {"authorization": f"Bearer {SECRET}"}},
    ],
    ids=lambda secrets: "+".join(secrets),
)
def test_credentials_are_sent_and_never_told(
    hostile: Hostile, caplog: pytest.LogCaptureFixture, secrets: dict[str, Any]
) -> None:
    with caplog.at_level(logging.DEBUG):
        text = failure(at(hostile, "401"), secrets)
    sent = " ".join(str(value) for value in hostile.last["headers"].values())  # type: ignore[attr-defined]
    assert SECRET in sent or base64.b64encode(f"anna:{SECRET}".encode()).decode() in sent
    assert "HTTP 401 (auth: no access with" in text
    assert "***" in text
    for told in (text, caplog.text):
        assert SECRET not in told
        assert base64.b64encode(f"anna:{SECRET}".encode()).decode() not in told


def test_a_bearer_token_file_is_read_for_each_request(hostile: Hostile, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    connection = read_connection(at(hostile, "fine"), {"prometheus_bearer_token_file": str(file)})
    with Prometheus(connection) as server:
        server.query("up")
        assert hostile.last["headers"]["Authorization"] == "Bearer first"  # type: ignore[index]
        file.write_text("second\n")
        server.query("up")
        assert hostile.last["headers"]["Authorization"] == "Bearer second"  # type: ignore[index]
    file.write_text("two tokens")
    text = failure(at(hostile, "fine"), {"prometheus_bearer_token_file": str(file)})
    assert "it must hold one token" in text
    assert "two tokens" not in text


def test_no_proxy_and_no_netrc_of_the_environment(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text(f"machine 127.0.0.1 login anna password {SECRET}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert metric_value("up", configuration=at(hostile, "fine")) == 1
    assert "Authorization" not in hostile.last["headers"]  # type: ignore[operator]


def test_a_proxy_that_is_asked_for(hostile: Hostile) -> None:
    configuration = {
        "prometheus_base_url": "http://prometheus.invalid/fine",
        "prometheus_proxy": hostile.base_url.replace("//", f"//anna:{SECRET}@"),
    }
    assert metric_value("up", configuration=configuration) == 1
    assert hostile.last["headers"]["Host"] == "prometheus.invalid"  # type: ignore[index]
    text = failure({**configuration, "prometheus_base_url": "http://prometheus.invalid/500"})
    assert SECRET not in text


def test_tls_with_the_right_authority_only(tls: Hostile, certificates: Any) -> None:
    configuration = at(tls, "fine")
    assert metric_value("up", configuration={**configuration, "prometheus_ca": str(certificates.authority)}) == 1
    tls.asked.clear()
    for trust in ({"prometheus_ca": str(certificates.other_authority)}, {}):
        assert "CERTIFICATE_VERIFY_FAILED" in failure({**configuration, **trust})
    named = configuration["prometheus_base_url"].replace("127.0.0.1", "localhost")
    wrong_name = {"prometheus_base_url": named, "prometheus_ca": str(certificates.authority)}
    assert "CERTIFICATE_VERIFY_FAILED" in failure(wrong_name) or "doesn't match" in failure(wrong_name)
    assert not tls.asked
    with pytest.warns(InsecureRequestWarning):
        assert metric_value("up", configuration={**configuration, "prometheus_verify_tls": "false"}) == 1


def test_tls_hangs_and_drips_are_cut_too(tls: Hostile, certificates: Any) -> None:
    for way in ("hang", "drip", "drip-headers"):
        text = failure({**at(tls, way), "prometheus_ca": str(certificates.authority)})
        assert "no complete answer within 2 s" in text


def test_mutual_tls(mutual_tls: Hostile, certificates: Any) -> None:
    secrets = {"prometheus_ca": str(certificates.authority)}
    failure(at(mutual_tls, "fine"), secrets)
    assert not mutual_tls.asked
    secrets["prometheus_client_cert"], secrets["prometheus_client_key"] = map(str, certificates.client)
    assert metric_value("up", configuration=at(mutual_tls, "fine"), secrets=secrets) == 1
    secrets["prometheus_client_key"] = str(certificates.server[1])
    assert "KEY_VALUES_MISMATCH" in failure(at(mutual_tls, "fine"), secrets)
    assert mutual_tls.asked == {"fine": 1}


def test_plain_http_where_tls_is_wanted(tls: Hostile) -> None:
    text = failure({"prometheus_base_url": tls.base_url.replace("https", "http") + "/fine", "prometheus_retries": 0})
    assert "gave no answer: " in text
