"""What lies under ``inside`` runs in the guest; the rest boots guests of its own."""

import os
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    inside = Path(__file__).parent / "inside"
    if collection_path == inside and "CHAOSGPU_GUEST" not in os.environ:
        return True
    return None


def pytest_report_header() -> str | None:
    return None if "CHAOSGPU_GUEST" in os.environ else "tests/guest/inside: not on this kernel; use `tests/run guest`"


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """A directory which a guest may write."""
    made = tmp_path / "share"
    made.mkdir()
    return made
