"""Names and addresses of labs."""

import ipaddress

import pytest

from narthex.cni.request import is_name
from narthex.lab import topology
from narthex.linux.namespaces import namespace_path
from narthex.model.net import address, contains, network
from narthex.model.objects import NamespacedName

LABS = ["a", "a-node-1", "a-fabric", "b", "a-b", "default"]


def test_addresses_are_canonical_and_inside_their_ranges():
    for node in topology.nodes("t", topology.MAX_NODES):
        assert [address(each) for each in node.addresses + node.gateways] == [*node.addresses, *node.gateways]
        assert [network(each) for each in node.pod_cidrs] == list(node.pod_cidrs)
        for gateway, cidr, cluster in zip(node.gateways, node.pod_cidrs, topology.CLUSTER_CIDRS, strict=True):
            assert contains(cidr, gateway)
            assert contains(cluster, gateway)


def test_no_two_nodes_or_pods_share_an_address():
    members = topology.nodes("t", topology.MAX_NODES)
    addresses = [each for node in members for each in (*node.addresses, *node.gateways)]
    assert len(set(addresses)) == len(addresses)
    assert not any(
        one.overlaps(other)
        for index, one in enumerate(map(ipaddress.ip_network, (node.pod_cidrs[0] for node in members)))
        for other in list(map(ipaddress.ip_network, (node.pod_cidrs[0] for node in members)))[index + 1 :]
    )


def all_namespaces(lab):
    pods = [NamespacedName("default", "x"), NamespacedName("node-1", "fabric"), NamespacedName("n" * 63, "p" * 200)]
    return [
        topology.fabric_namespace(lab),
        topology.outside_namespace(lab),
        *(node.namespace for node in topology.nodes(lab, 3)),
        *(topology.pod_namespace(lab, pod) for pod in pods),
    ]


@pytest.mark.parametrize("lab", LABS)
def test_a_namespace_belongs_to_one_lab_only(lab):
    for name in all_namespaces(lab):
        namespace_path(name)
        assert [other for other in LABS if topology.owns(other, name)] == [lab]
        assert topology.lab_of(name) == lab


def test_foreign_namespaces_belong_to_no_lab():
    for name in ("nx-", "nx-a", "nx-a-node-", "nx-a-node-0", "nx-a-node-01", "cni-1234", "a-fabric", "xnx-a-fabric"):
        assert topology.lab_of(name) is None
        assert not topology.owns("a", name)


def test_long_pod_names_stay_apart():
    first, second = (topology.pod_namespace("t", NamespacedName("default", "p" * 200 + end)) for end in "ab")
    assert first != second


@pytest.mark.parametrize("name", ["", "A", "a.b", "a/b", "../x", "-a", "a-", "a" * 21, "a b", "a\n", "ä"])
def test_names_that_no_lab_can_have(name):
    with pytest.raises(ValueError, match="not a valid name of a lab"):
        topology.check_name(name)


@pytest.mark.parametrize("count", [0, -1, topology.MAX_NODES + 1])
def test_node_counts_out_of_range(count):
    with pytest.raises(ValueError, match="1 to 200 nodes"):
        topology.nodes("t", count)


def test_every_node_has_a_route_to_the_pods_of_every_other():
    members = topology.nodes("t", 3)
    for node in members:
        commands = topology.wire_node(node, members).commands
        for other in members:
            for cidr, via in zip(other.pod_cidrs, other.addresses, strict=True):
                assert (f"route add {cidr} via {via}" in commands) == (other is not node)


def test_outside_knows_the_nodes_addresses_only():
    _, outside = topology.wire_fabric("t", topology.nodes("t", 2))
    routes = [command.split()[2] for command in outside.commands if command.startswith("route")]
    assert routes == ["192.168.49.0/24", "fd00:192:168:49::/64"]


@pytest.mark.parametrize("overlay", [topology.VXLAN, topology.HOST_GW])
def test_an_overlay_has_the_routes_to_itself(overlay):
    members = topology.nodes("t", 3)
    commands = topology.wire_node(members[0], members, overlay).commands
    routes = [command for command in commands if command.startswith("route")]
    assert [route.split()[2] for route in routes] == ["default", "default"]


def test_container_ids_are_names_for_plugins_and_stay_apart():
    for pod in (NamespacedName("default", "web-1"), NamespacedName("n" * 63, "p" * 253)):
        assert is_name(topology.container_id(pod)) and len(topology.container_id(pod)) <= 63
    first, second = (topology.container_id(NamespacedName("default", "p" * 200 + end)) for end in "ab")
    assert first != second


def test_the_network_leads_to_load_balancers_without_any_node_having_their_addresses():
    fabric, outside = topology.wire_balancers("t", ["172.6.6.6/32"], ["192.168.15.0/28", "fd00:15::/124"])
    assert fabric.commands == (
        "route del 172.6.6.6/32 dev underlay",
        "route replace 192.168.15.0/28 dev underlay",
        "route replace fd00:15::/124 dev underlay",
    )
    assert outside.commands == (
        "route del 172.6.6.6/32 via 192.0.2.1",
        "route replace 192.168.15.0/28 via 192.0.2.1",
        "route replace fd00:15::/124 via fd00:192:0:2::1",
    )


def test_what_is_taken_is_all_that_the_lab_uses_itself():
    members = topology.nodes("t", 2)
    networks, addresses = topology.taken_networks(), topology.taken_addresses(members)
    for node in members:
        assert {addresses[ip] for ip in node.addresses} == {f"an address of {node.name}"}
    assert addresses["192.168.49.1"] == addresses["fd00:192:168:49::1"] == "the router's"
    for ip in (*topology.OUTSIDE_ADDRESSES, members[0].gateways[0], "10.96.0.10"):
        assert any(contains(cidr, ip) for cidr in networks)
