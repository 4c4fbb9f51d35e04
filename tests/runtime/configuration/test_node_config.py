"""The settings that a configuration gives the planner."""

import pytest
from tests.runtime.configuration.documents import good

from narthex.proxy.plan.planner import NodeConfig
from narthex.proxy.program.settings import node_config


@pytest.mark.parametrize(
    ("body", "mode", "expected"),
    [
        ("", "", NodeConfig(node_name="a", node_port_addresses=("primary",), bind_address="0.0.0.0")),
        ("", "nftables", NodeConfig(node_name="a", node_port_addresses=("primary",), bind_address="0.0.0.0")),
        ("", "iptables", NodeConfig(node_name="a", localhost_node_ports=True, bind_address="0.0.0.0")),
        ("mode: iptables", "", NodeConfig(node_name="a", localhost_node_ports=True, bind_address="0.0.0.0")),
        ("", "ipvs", NodeConfig(node_name="a", bind_address="0.0.0.0")),
        (
            "nodePortAddresses: [10.0.0.0/8]\nnftables: {masqueradeAll: true, masqueradeBit: 5}\nclusterCIDR: 10.64.0.0/12",
            "nftables",
            NodeConfig(
                node_name="a",
                cluster_cidrs=("10.64.0.0/12",),
                node_port_addresses=("10.0.0.0/8",),
                masquerade_all=True,
                masquerade_bit=5,
                bind_address="0.0.0.0",
            ),
        ),
        (
            "nftables: {masqueradeAll: true, masqueradeBit: 5}\niptables: {localhostNodePorts: false}",
            "iptables",
            NodeConfig(node_name="a", bind_address="0.0.0.0"),
        ),
        (
            "iptables: {masqueradeAll: true, masqueradeBit: 5}",
            "ipvs",
            NodeConfig(node_name="a", masquerade_all=True, masquerade_bit=5, bind_address="0.0.0.0"),
        ),
        (
            "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}\nbindAddress: 10.20.0.11\n"
            "featureGates: {AllowServiceExternalIPs: false}",
            "ipvs",
            NodeConfig(
                node_name="a",
                detect_local_mode="BridgeInterface",
                bridge_interface="cni0",
                bind_address="10.20.0.11",
                allow_service_external_ips=False,
            ),
        ),
        (
            "nodePortAddresses: [localhost]\nfeatureGates: {KubeProxyNFTablesLocalhostNodePorts: true, KubeProxyIPVS: false}",
            "nftables",
            NodeConfig(
                node_name="a", node_port_addresses=("localhost",), relayed_node_ports=True, bind_address="0.0.0.0"
            ),
        ),
        (
            "featureGates: {KubeProxyNFTablesLocalhostNodePorts: true}",
            "iptables",
            NodeConfig(node_name="a", localhost_node_ports=True, bind_address="0.0.0.0"),
        ),
    ],
)
def test_node_config(body, mode, expected):
    assert node_config(good(body), mode, "a") == expected


@pytest.mark.row("6.9", "27.15")
@pytest.mark.parametrize("body", ["", 'detectLocalMode: ""\n', "detectLocalMode: null\n"])
def test_without_a_detection_mode_it_is_cluster_cidr(body):
    assert good(body).detect_local_mode == "ClusterCIDR"
