"""Limits of the files that a container writes."""

import pytest

from narthex.lab.kubelet.eviction import storage_limits


def limits(text):
    containers = [{"name": "c", "resources": {"limits": {"ephemeral-storage": text, "cpu": "1"}}}, {"name": "other"}]
    return {name: each.size for name, each in storage_limits({"spec": {"containers": containers}}).items()}


@pytest.mark.parametrize(
    ("text", "size"),
    [("5Mi", 5 << 20), ("1.5Ki", 1536), ("2M", 2e6), ("3k", 3e3), ("1e3", 1e3), ("7", 7), (8, 8), ("100m", 0.1)],
)
def test_quantities(text, size):
    assert limits(text) == {"c": size}


def test_what_is_no_quantity_is_no_limit():
    assert limits("..") == limits("") == limits("-5") == {}
