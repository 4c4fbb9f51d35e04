"""host-local: what is configured, and which address comes next."""

import json

import pytest

from narthex.cni import request
from narthex.cni.errors import CniError
from narthex.cni.plugins import host_local as ipam
from narthex.model.values import address_text, packed_address


def configured(ipam_config, version="1.1.0", args="", **more):
    environment = {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "a",
        "CNI_NETNS": "/n",
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": args,
    }
    config = {"cniVersion": version, "name": "net", "ipam": ipam_config, **more}
    return ipam.read(request.read("host-local", environment, json.dumps(config).encode()))


def ranges(*sets):
    return {"ranges": [[{"subnet": subnet} for subnet in one] for one in sets]}


def drawn(config, count):
    """The addresses that so many attachments get, one after another."""
    taken, last, found = set(), {}, []
    for _ in range(count):
        choice = ipam.choose(config, taken, last)
        for number, ip in enumerate(choice.ips):
            taken.add(ip.network.address)
            last[number] = ip.network.address
        found.append(" ".join(str(ip.network) for ip in choice.ips))
    return found


def test_one_after_another_without_network_gateway_and_broadcast():
    config = configured(ranges(["10.0.0.0/29"]))
    assert drawn(config, 5) == [f"10.0.0.{number}/29" for number in (2, 3, 4, 5, 6)]
    with pytest.raises(ipam.RangeExhausted) as caught:
        drawn(config, 6)
    assert "10.0.0.1-10.0.0.6" in str(caught.value) and caught.value.code == 50


def test_the_last_ipv6_address_is_given():
    assert drawn(configured(ranges(["fd00::/126"])), 2) == ["fd00::2/126", "fd00::3/126"]


def test_a_freed_address_comes_last():
    config = configured(ranges(["10.0.0.0/29"]))
    taken = {packed_address(f"10.0.0.{number}") for number in (3, 4)}
    for last, expected in (("10.0.0.4", "10.0.0.5"), ("10.0.0.6", "10.0.0.2"), ("10.9.9.9", "10.0.0.2")):
        assert str(ipam.choose(config, taken, {0: packed_address(last)}).ips[0].network) == f"{expected}/29"


def test_ranges_of_a_set_are_used_in_turn_and_sets_at_once():
    config = configured(ranges(["10.0.0.0/30", "10.0.1.0/30"], ["fd00::/64"]))
    assert drawn(config, 2) == ["10.0.0.2/30 fd00::2/64", "10.0.1.2/30 fd00::3/64"]
    assert address_text(ipam.choose(config, set(), {}).ips[1].gateway) == "fd00::1"


def test_bounds_and_gateway():
    config = configured(
        {
            "ranges": [
                [{"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.9", "rangeEnd": "10.0.0.11", "gateway": "10.0.0.10"}]
            ]
        }
    )
    assert drawn(config, 2) == ["10.0.0.9/24", "10.0.0.11/24"]


def test_where_ranges_come_from():
    given = {"subnet": "10.1.0.0/24", **ranges(["10.2.0.0/24"])}
    config = configured(given, runtimeConfig={"ipRanges": [[{"subnet": "10.0.0.0/24"}]]})
    assert drawn(config, 1) == ["10.0.0.2/24 10.1.0.2/24 10.2.0.2/24"]


@pytest.mark.parametrize(
    "said, words",
    [
        ({}, "no IP ranges"),
        ({"ranges": []}, "no IP ranges"),
        ({"ranges": [[]]}, "at least one range"),
        ({"ranges": [{}]}, "at least one range"),
        (ranges(["10.0.0.0/31"]), "too small"),
        (ranges(["10.0.0.0/32"]), "too small"),
        (ranges(["fd00::/127"]), "too small"),
        (ranges(["10.0.0.1/24"]), "host bits"),
        (ranges(["10.0.0.0"]), "prefix length"),
        (ranges(["10.0.0.0/33"]), "prefix length"),
        (ranges(["10.0.0.0/24", "fd00::/64"]), "mixed address families"),
        (ranges(["10.0.0.0/24"], ["10.0.0.128/25"]), "overlap"),
        ({"ranges": [[{"subnet": "10.0.0.0/24", "rangeStart": "10.0.1.1"}]]}, "rangeStart"),
        ({"ranges": [[{"subnet": "10.0.0.0/24", "rangeEnd": "10.0.0.255"}]]}, "rangeEnd"),
        ({"ranges": [[{"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.9", "rangeEnd": "10.0.0.8"}]]}, "behind"),
        ({"subnet": "10.0.0.0/24", "dataDir": "relative"}, "dataDir"),
        ({"subnet": "10.0.0.0/24", "dataDir": "/var/../etc"}, "dataDir"),
        ({"subnet": "10.0.0.0/24", "routes": [{"dst": "x"}]}, "routes[0].dst"),
    ],
)
def test_what_is_refused(said, words):
    with pytest.raises(CniError) as caught:
        configured(said)
    assert caught.value.code == 7 and words in caught.value.message


def test_two_of_a_family_need_a_newer_version():
    two = ranges(["10.0.0.0/24"], ["10.1.0.0/24"])
    assert configured(two, "0.3.0")
    with pytest.raises(CniError, match="does not support more than 1"):
        configured(two, "0.2.0")


@pytest.mark.parametrize(
    "more", [{"args": "IP=10.0.0.7/24"}, {"args": "IP=10.0.0.7"}, {"runtimeConfig": {"ips": ["10.0.0.7"]}}]
)
def test_an_address_that_is_asked_for(more):
    config = configured(ranges(["10.0.0.0/24"], ["fd00::/64"]), **more)
    assert drawn(config, 1) == ["10.0.0.7/24 fd00::2/64"]
    with pytest.raises(CniError, match="not available") as caught:
        ipam.choose(config, {packed_address("10.0.0.7")}, {})
    assert caught.value.code == 100


@pytest.mark.parametrize(
    "asked, words", [("10.0.0.1", "gateway"), ("10.0.1.7", "no range"), ("10.0.0.255", "no range")]
)
def test_an_address_that_cannot_be_had(asked, words):
    with pytest.raises(CniError, match=words):
        ipam.choose(configured(ranges(["10.0.0.0/24"]), args=f"IP={asked}"), set(), {})
