"""What a scenario means: defaults by mode, gates, and who sends from where."""

import pytest

from narthex.model.objects import NamespacedName
from narthex.testing.scenario import parse
from narthex.testing.setting import arrival, from_host, host_of, node_config, packet_of, pod_interface, snapshot, uplink

LB = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web", "namespace": "shop"},
    "spec": {
        "type": "LoadBalancer",
        "clusterIP": "10.110.0.5",
        "externalIPs": ["203.0.113.80"],
        "ports": [{"port": 80}],
    },
    "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.10", "ipMode": "Proxy"}]}},
}
RANGE = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "ServiceCIDR",
    "metadata": {"name": "more"},
    "spec": {"cidrs": ["10.118.4.0/24"]},
}


def scenario(source="10.64.1.200", iface="", **config):
    """One flow from a source."""
    flow = {"from": source, "to": "10.110.0.5" if ":" not in source else "fd6e::5", "port": 80, "expect": "none"}
    node = {"name": "worker-a", "ips": ["10.20.0.11", "fd20::11"], "podCIDRs": ["10.64.1.0/24"], "config": config}
    return parse({"node": node, "objects": [LB, RANGE], "flows": [{**flow, "iface": iface}]}, "x.yaml", "x")


def test_defaults_of_the_modes():
    nft, ipt = (node_config(scenario(), mode) for mode in ("nftables", "iptables"))
    assert (nft.node_port_addresses, nft.localhost_node_ports) == (("primary",), False)
    assert (ipt.node_port_addresses, ipt.localhost_node_ports) == (None, True)
    said = scenario(localhostNodePorts=False, nodePortAddresses=["10.20.1.0/24"], detectLocalMode="")
    assert node_config(said, "iptables").localhost_node_ports is False
    assert node_config(said, "nftables").node_port_addresses == ("10.20.1.0/24",)
    assert node_config(said, "nftables").detect_local_mode == ""


def test_gates_take_fields_away():
    web = NamespacedName("shop", "web")
    assert snapshot(scenario()).services[web].ingress[0].proxy
    assert len(snapshot(scenario()).service_cidrs) == 1
    off = scenario(featureGates={"LoadBalancerIPMode": False, "MultiCIDRServiceAllocator": False})
    assert not snapshot(off).services[web].ingress[0].proxy
    assert len(snapshot(off).service_cidrs) == 0
    assert not node_config(
        scenario(featureGates={"AllowServiceExternalIPs": False}), "iptables"
    ).allow_service_external_ips


@pytest.mark.parametrize(
    ("source", "iface", "host", "interface"),
    [
        ("10.20.0.11", "", True, ""),
        ("fd20::11", "", True, ""),
        ("127.0.0.1", "", True, ""),
        ("::1", "", True, ""),
        ("203.0.113.10", "", True, ""),
        ("203.0.113.80", "", True, ""),
        ("203.0.113.10", "eth7", False, "eth7"),
        ("10.64.1.200", "", False, "cni0"),
        ("10.64.1.200", "eth7", False, "eth7"),
        ("10.64.2.200", "", False, "eth0"),
        ("198.51.100.7", "", False, "eth0"),
    ],
)
def test_who_sends_from_where(source, iface, host, interface):
    case = scenario(source, iface)
    (flow,) = case.flows
    assert (from_host(case, flow), arrival(case, flow)) == (host, interface)
    packet = packet_of(case, flow)
    assert (packet.from_host, packet.iif) == (host, interface)


def test_an_address_that_the_host_sends_from_is_its_own():
    vip, loopback = scenario("203.0.113.10"), scenario("127.0.0.1")
    assert host_of(vip, vip.flows[0]).addresses == ("10.20.0.11", "fd20::11", "203.0.113.10")
    assert host_of(loopback, loopback.flows[0]).addresses == ("10.20.0.11", "fd20::11")


def test_interfaces_fit_the_detection():
    bridge = scenario(detectLocalMode="BridgeInterface", bridgeInterface="eth0")
    assert (pod_interface(bridge), uplink(bridge)) == ("eth0", "wan0")
    prefix = scenario(detectLocalMode="InterfaceNamePrefix", interfaceNamePrefix="e")
    assert (pod_interface(prefix), uplink(prefix)) == ("e0", "wan0")
    longest = scenario(detectLocalMode="InterfaceNamePrefix", interfaceNamePrefix="a" * 15)
    assert pod_interface(longest) == "a" * 15
