"""A whole run by the toolkit: the report has the charts, the journal is JSON and holds no secret."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile import Hostile

from chaosgpu.probes import wait_for_metric

pytestmark = [pytest.mark.services, pytest.mark.toolkit]

SECRET = "hunter2-and-more"
CHARTED = "chaosgpu.probes.chaosprometheus"


def chaos(*arguments: str, at: Path) -> None:
    program = Path(sys.executable).with_name("chaos")
    environment = {**os.environ, "TOKEN_OF_TEST": SECRET, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([program, *arguments], cwd=at, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr


def probe(func: str, module: str = "chaosgpu.probes", **arguments: Any) -> dict[str, Any]:
    provider = {"type": "python", "module": module, "func": func, "arguments": arguments, "secrets": ["metrics"]}
    return {"type": "probe", "name": f"{func} {arguments['query']}", "provider": provider}


def test_report(monitoring: Any, hostile: Hostile, tmp_path: Path) -> None:
    configuration = {"prometheus_base_url": monitoring.prometheus}
    assert wait_for_metric("count(g)", "==", 2, timeout=40, configuration=configuration)
    experiment = {
        "title": "Charts",
        "description": "What chaos report draws",
        "configuration": {
            **configuration,
            "elsewhere": f"{hostile.base_url}/401",
            "prometheus_retries": {"type": "env", "key": "RETRIES_OF_TEST", "default": "1"},
        },
        "secrets": {"metrics": {"prometheus_bearer_token": {"type": "env", "key": "TOKEN_OF_TEST"}}},
        "steady-state-hypothesis": {
            "title": "It is well",
            "probes": [{**probe("metric_holds", query="g", op=">=", value="50"), "tolerance": True}],
        },
        "method": [
            probe("metric_value", query="no_end"),
            *(probe("metric_range", CHARTED, query=query, seconds=5) for query in ("g", "g / 100", "nosuch", "no_end")),
        ],
        "rollbacks": [],
    }
    (tmp_path / "experiment.json").write_text(json.dumps(experiment))
    experiment["configuration"] = {"prometheus_base_url": f"{hostile.base_url}/401"}
    experiment["steady-state-hypothesis"] = None
    (tmp_path / "refused.json").write_text(json.dumps({k: v for k, v in experiment.items() if v is not None}))

    chaos("validate", "experiment.json", at=tmp_path)
    chaos("run", "--journal-path", "refused-journal.json", "refused.json", at=tmp_path)
    chaos("run", "experiment.json", at=tmp_path)
    chaos("report", "--export-format=html5", "journal.json", "report.html", at=tmp_path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"the journal has {constant}, which is not JSON")

    journal = json.loads((tmp_path / "journal.json").read_text(), parse_constant=refuse)
    assert journal["status"] == "completed"
    assert not journal["deviated"]
    assert [run["status"] for run in journal["run"]] == ["failed"] + ["succeeded"] * 4
    refused = json.loads((tmp_path / "refused-journal.json").read_text())
    assert {run["status"] for run in refused["run"]} == {"failed"}
    for file in tmp_path.iterdir():
        assert SECRET not in file.read_text(), f"{file.name} holds the token"

    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4
    assert page.count('class="dots') >= 12  # a series of at least 6 samples for each of the first two queries
    assert "{rank=&quot;0&quot;} (times 1000)" in page or '{rank="0"} (times 1000)' in page
    assert "No data" in page
