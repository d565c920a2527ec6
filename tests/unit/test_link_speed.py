"""A link whose driver tells no speed is no reason to fail."""

from chaosgpu.faults.rdma import _megabits_per_second


def test_a_loopback_has_no_speed():
    assert _megabits_per_second("lo") == ""


def test_nor_has_a_device_that_is_gone():
    assert _megabits_per_second("nowhere0") == ""
