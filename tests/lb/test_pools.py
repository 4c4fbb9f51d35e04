"""Pools: what can be used, what is refused and with which words, and addresses found without listing them."""

import pytest

from narthex.lb.pools import ReservedAddresses, address_text, pool_containing, read_range, validate_pools
from narthex.model.net import IPFamily, address_key
from narthex.model.objects import IPAddressPool

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
AROUND = ReservedAddresses(
    networks={"10.64.0.0/16": "the pods of node a", "10.96.0.0/12": "ServiceCIDR kubernetes"},
    addresses={"192.168.15.5": "an address of node a", "fd20::11": "an address of node a"},
)


def pool(name, *addresses, **fields):
    return IPAddressPool(name=name, namespace="metallb-system", addresses=addresses, **fields)


def only(*addresses, **fields):
    found = validate_pools([pool("p", *addresses, **fields)])
    assert not found.refused
    return found.accepted[0]


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        ([], "has no addresses"),
        (["0.0.0.0/0"], "all addresses there are"),
        (["::/0"], "all addresses there are"),
        (["192.168.15.9/28"], "has bits of a host: write 192.168.15.0/28, or 192.168.15.9/32 for one address"),
        (["192.168.15.9"], "has no prefix length: write 192.168.15.9/32"),
        (["fd00::9"], "has no prefix length: write fd00::9/128"),
        (["192.168.15.9/33"], "is not a network"),
        (["hello"], "is not a network"),
        (["192.168.15.9-"], "is not a range"),
        (["a-b"], "is not a range"),
        (["192.168.15.9-192.168.15.1"], "ends before it begins: write 192.168.15.1-192.168.15.9"),
        (["192.168.15.9-fd00::1"], "begins as IPv4 and ends as IPv6"),
        (["224.0.0.0/24"], "multicast"),
        (["ff02::/64"], "multicast"),
        (["255.255.255.0/24"], "broadcast"),
        (["223.255.255.0-224.0.0.1"], "multicast"),
        (["127.0.0.0/24"], "loopback"),
        (["::1/128"], "loopback"),
        (["169.254.7.0/24"], "link-local"),
        (["fe80::/64"], "link-local"),
        (["0.0.0.0/24"], "no host"),
        (["::ffff:192.168.15.0/120"], "written as IPv6"),
        (["192.168.15.0/28", "192.168.15.8-192.168.15.20"], "overlap: write each address once"),
        (["10.64.3.0/24"], "overlaps 10.64.0.0/16, the pods of node a"),
        (["10.0.0.0/8"], "overlaps 10.64.0.0/16, the pods of node a"),
        (["10.96.7.0-10.96.7.9"], "ServiceCIDR kubernetes"),
        (
            ["192.168.15.0/28"],
            "holds 192.168.15.5, an address of node a: leave it out: "
            "192.168.15.0-192.168.15.4 and 192.168.15.6-192.168.15.15",
        ),
        (["192.168.15.5/32"], "an address of node a: take another address"),
        (["fd20::/64"], "holds fd20::11"),
    ],
)
def test_bad_pools_are_refused_with_the_reason(addresses, said):
    found = validate_pools([pool("good", "172.6.6.0/29"), pool("p", *addresses)], AROUND)
    assert [each.name for each in found.accepted] == ["good"]
    (refused,) = found.refused
    assert said in refused.reason


def test_of_two_that_overlap_the_first_by_name_stays():
    objects = [pool("b", "192.168.15.8-192.168.15.20"), pool("a", "192.168.15.0/28"), pool("c", "192.168.15.20/32")]
    for order in (objects, objects[::-1]):
        found = validate_pools(order)
        assert [each.name for each in found.accepted] == ["a", "c"]
        (refused,) = found.refused
        assert refused.reason.startswith("192.168.15.8-192.168.15.20 overlaps 192.168.15.0/28 of pool a")


def test_one_name_in_two_namespaces():
    twin = IPAddressPool(name="p", namespace="other", addresses=("172.6.6.6/32",))
    found = validate_pools([pool("p", "192.168.15.0/28"), twin])
    assert [each.object.namespace for each in found.accepted] == ["metallb-system"]
    assert "metallb-system/p has its name, too" in found.refused[0].reason


def test_the_addresses_of_the_seeds():
    found = validate_pools([pool("lan", "192.168.15.1/32", "192.168.15.8-192.168.15.8"), pool("other", "172.6.6.6/32")])
    assert [found.of(ip).name for ip in ("192.168.15.1", "192.168.15.8", "172.6.6.6")] == ["lan", "lan", "other"]
    assert found.of("192.168.15.2") is None


@pytest.mark.parametrize(
    ("addresses", "buggy", "size"),
    [
        (["192.168.15.0/24"], False, 256),
        (["192.168.15.0/24"], True, 254),
        (["192.168.15.255-192.168.16.0"], True, 0),
        (["192.168.15.1/32", "10.0.0.0/8"], False, 2**24 + 1),
        (["fd00::/64", "192.168.15.0/30"], True, 2**64 + 3),
    ],
)
def test_size(addresses, buggy, size):
    assert only(*addresses, avoid_buggy=buggy).size == size


def test_the_lowest_free_address_of_each_family():
    mixed = only("192.168.15.254-192.168.16.1", "fd00::/64", avoid_buggy=True)
    taken = {address_key("192.168.15.254")[1]}
    assert address_text(V4, mixed.lowest_free(V4, taken)) == "192.168.16.1"
    assert address_text(V6, mixed.lowest_free(V6, {address_key("fd00::")[1]})) == "fd00::1"
    assert mixed.lowest_free(V4, taken | {address_key("192.168.16.1")[1]}) is None


def test_huge_pools_cost_nothing():
    huge = only("11.0.0.0/8", "fd00::/16")
    counted = Counted()
    assert address_text(V4, huge.lowest_free(V4, counted, address_key("11.250.0.0")[1])) == "11.250.0.0"
    assert address_text(V6, huge.lowest_free(V6, counted)) == "fd00::"
    assert counted.asked == 2


class Counted:
    """A set without members that counts how often it is asked."""

    asked = 0

    def __contains__(self, _):
        self.asked += 1
        return False


def test_whose_address_it_was_is_known_of_refused_pools_too():
    overlapping = [pool("a", "192.168.15.0/28"), pool("b", "192.168.15.8-192.168.15.20", "nonsense")]
    assert pool_containing(overlapping, "192.168.15.9").name == "a"
    assert pool_containing(overlapping, "192.168.15.20").name == "b"
    assert pool_containing(overlapping, "192.168.15.21") is None


def test_ranges_are_written_with_or_without_spaces():
    assert read_range("192.168.15.1 - 192.168.15.9") == read_range("192.168.15.1-192.168.15.9")
