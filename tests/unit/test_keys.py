"""Which keys may not be held at once."""

import pytest

from chaosgpu.node import keys

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ("netdev:4026531840/3", "netdev:4026531840/3", True),
        ("netdev:4026531840/3", "netdev:4026531840/30", False),
        ("cgroup:/a", "cgroup:/a/b", True),
        ("cgroup:/a/b/c", "cgroup:/a", True),
        ("cgroup:/a", "cgroup:/ab", False),
        ("cgroup:/", "cgroup:/a", True),
        ("process:12/99", "process:12/98", False),
    ],
)
def test_conflict_is_symmetric_containment(one, other, clash):
    assert keys.conflict(one, other) is clash
    assert keys.conflict(other, one) is clash


def test_the_first_pair_is_named():
    assert keys.first_conflict(["a:1", "cgroup:/x/y"], ["b:1", "cgroup:/x"]) == ("cgroup:/x/y", "cgroup:/x")
    assert keys.first_conflict([], ["a:1"]) is None
