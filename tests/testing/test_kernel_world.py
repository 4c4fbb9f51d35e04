"""Who is placed where, before any namespace is made."""

from narthex.testing.kernel.world import gateways, lay_out, node_wires, site_wires
from narthex.testing.scenario import parse

SLICE = {
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
    "addressType": "IPv4",
    "ports": [{"name": "", "protocol": "TCP", "port": 80}],
    "endpoints": [{"addresses": [a]} for a in ("10.64.1.10", "10.64.2.10", "10.20.0.11")],
}


def layout(*flows):
    """The layout for flows (source, interface)."""
    node = {"name": "worker-a", "ips": ["10.20.0.11"], "podCIDRs": ["10.64.1.0/24"]}
    doc = {
        "node": node,
        "objects": [SLICE],
        "flows": [
            {"from": source, "to": "10.110.0.5", "port": 80, "expect": "none", "iface": iface}
            for source, iface in flows
        ],
    }
    scenario = parse(doc, "x.yaml", "x")
    return lay_out(scenario, scenario.flows)


def test_senders_and_receivers_are_apart():
    plan = layout(("10.64.1.200", ""), ("198.51.100.7", ""), ("10.20.0.11", ""))
    sites = {(site.interface, site.addresses) for site in plan.sites}
    assert sites == {
        ("eth0", ("10.110.0.5", "10.64.2.10")),
        ("cni0", ("10.64.1.10",)),
        ("cni0", ("10.64.1.200",)),
        ("eth0", ("198.51.100.7",)),
    }
    assert plan.interfaces == ("eth0", "cni0")
    assert plan.sites[0].interface == "eth0"
    assert set(plan.senders) == {("10.64.1.200", "cni0"), ("198.51.100.7", "eth0")}


def test_who_sends_and_receives_has_a_site_alone():
    plan = layout(("10.64.1.10", ""), ("10.64.2.10", ""))
    for address, interface in (("10.64.1.10", "cni0"), ("10.64.2.10", "eth0")):
        site = plan.sites[plan.senders[address, interface]]
        assert site.addresses == (address,)
        assert plan.homes[address] == plan.senders[address, interface]


def test_one_source_by_two_interfaces():
    plan = layout(("198.51.100.7", ""), ("198.51.100.7", "docker0"))
    home, other = plan.senders["198.51.100.7", "eth0"], plan.senders["198.51.100.7", "docker0"]
    assert home != other and plan.homes["198.51.100.7"] == home
    assert plan.sites[other].interface == "docker0" and "docker0" in plan.interfaces


def test_masqueraded_packets_never_look_like_the_node():
    plan = layout(("10.64.1.200", ""))
    assert not gateways(plan) & set(plan.node_ips)
    wires = node_wires(plan, [f"ns{number}" for number in range(len(plan.sites))])
    assert [each.text for each in wires if "10.20.0.11/32" in each.text] == ["address add 10.20.0.11/32 dev nxs-own"]


def test_only_those_who_send_to_loopback_get_its_routes():
    plan = layout(("10.64.1.200", ""))
    assert not any("127.0.0" in each.text for number in range(len(plan.sites)) for each in site_wires(plan, number))
