"""`conntrack` of the configuration as kernel settings (group 19)."""

import pytest

from narthex.proxy.program.kernel_settings import conntrack_settings
from narthex.runtime.configuration.values import ConntrackConfiguration


def values(cores=2, **fields):
    return {
        each.path.removeprefix("net/netfilter/nf_conntrack_"): each.value
        for each in conntrack_settings(ConntrackConfiguration(**fields), cores)
    }


@pytest.mark.row("19.1", "19.2", "19.3")
def test_the_defaults():
    assert values(cores=8) == {
        "max": 262144,
        "buckets": 65536,
        "tcp_timeout_established": 86400,
        "tcp_timeout_close_wait": 3600,
    }


@pytest.mark.row("19.1", "19.2")
@pytest.mark.parametrize(
    ("cores", "fields", "most"),
    [
        (2, {}, 131072),
        (4, {}, 131072),
        (5, {}, 163840),
        (32, {}, 1048576),
        (33, {}, 1048576),
        (128, {}, 1048576),
        (1, {"min": 1048577}, 1048576),
        (1, {"min": 2000000, "max_per_core": 1}, 1048576),
        (3, {"min": 0, "max_per_core": 100}, 300),
    ],
)
def test_the_limit_is_per_core_with_a_least_and_a_most_that_beats_it(cores, fields, most):
    assert values(cores, **fields)["max"] == most
    assert values(cores, **fields)["buckets"] == most // 4


@pytest.mark.row("19.1", "19.3")
def test_zero_leaves_things_as_they_are():
    assert values(max_per_core=0, tcp_established_timeout=0, tcp_close_wait_timeout=0) == {}
    assert values(max_per_core=0, min=500000, tcp_established_timeout=0, tcp_close_wait_timeout=0) == {}


@pytest.mark.row("19.3", "19.4")
def test_what_is_set_only_when_asked_for():
    asked = values(udp_timeout=30.0, udp_stream_timeout=120.0, tcp_be_liberal=True)
    assert (asked["udp_timeout"], asked["udp_timeout_stream"], asked["tcp_be_liberal"]) == (30, 120, 1)
    assert not {"udp_timeout", "udp_timeout_stream", "tcp_be_liberal"} & values().keys()


def test_parts_of_a_second_are_cut_off_but_never_to_nothing():
    asked = values(udp_timeout=1.9, udp_stream_timeout=0.5)
    assert (asked["udp_timeout"], asked["udp_timeout_stream"]) == (1, 1)


def test_the_limit_comes_before_the_hash_that_depends_on_it():
    assert [each.path.rpartition("_")[2] for each in conntrack_settings(ConntrackConfiguration(), 2)][:2] == [
        "max",
        "buckets",
    ]


@pytest.mark.row("19.2", "19.5")
def test_only_the_hash_may_be_larger():
    held = {
        each.path.rpartition("_")[2]: each.held_by(each.value + 1)
        for each in conntrack_settings(ConntrackConfiguration(), 2)
    }
    assert held == {"max": False, "buckets": True, "established": False, "wait": False}
