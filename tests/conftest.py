"""A test's tier is the directory it lies in."""

from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
TIERS = ("unit", "host", "guest", "services")

settings.register_profile("busy machine", deadline=None)  # a time limit for one example would test the machine
settings.load_profile("busy machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = item.path.relative_to(HERE).parts[0]
        if tier in TIERS:
            item.add_marker(tier)
