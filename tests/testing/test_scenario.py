"""The scenario format: what is read, what is forgiven, what is refused and in which words."""

import copy

import pytest
import yaml

from narthex.model.net import Protocol
from narthex.model.packet import Disposition
from narthex.testing.findings import DROP, NONE, REJECT
from narthex.testing.scenario import ScenarioError, expectation, find, load, parse

DOC = yaml.safe_load(
    """
name: web
modes: [nftables, iptables, ipvs]
node:
  name: worker-a
  ips: [10.20.0.11, 'fd20::11']
  podCIDRs: [10.64.1.0/24]
  labels: {topology.kubernetes.io/zone: zone-east}
  config:
    detectLocalMode: ClusterCIDR
    clusterCIDR: 10.64.0.0/12, fd64::/48
    nodePortAddresses: [primary]
    featureGates: {AllowServiceExternalIPs: false}
objects:
- {apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, spec: {clusterIP: 10.110.0.5, ports: [{port: 80}]}}
flows:
- {label: pod, from: 010.64.1.200, to: 10.110.0.5, port: 80, proto: TCP, expect: reject, modes: [nftables]}
- {label: outside, from: 198.51.100.7, to: 10.110.0.5, port: 80, proto: UDP, iface: eth7, expect: none}
steps:
- {at: 0, from: 10.64.1.200, to: 10.110.0.5, port: 80, proto: TCP, pick: any}
- {at: 10, from: 10.64.1.200, to: 10.110.0.5, port: 80, proto: TCP, pick: same-as-0}
"""
)


def changed(*path, value):
    """DOC with one value replaced; the last part of the path is set."""
    doc = copy.deepcopy(DOC)
    where = doc
    for part in path[:-1]:
        where = where[part]
    where[path[-1]] = value
    return doc


def test_everything_named_is_read():
    scenario = parse(DOC, "web.yaml", "web")
    assert (scenario.name, scenario.level, scenario.node_name) == ("web", "must", "worker-a")
    assert scenario.config.cluster_cidrs == ("10.64.0.0/12", "fd64::/48")
    assert scenario.config.node_port_addresses == ("primary",)
    assert scenario.config.gate("AllowServiceExternalIPs") is False and scenario.config.gate("Other") is None
    assert [service.name for service in scenario.services] == ["web"]
    pod, outside = scenario.flows
    assert (pod.source, pod.protocol, pod.modes) == ("10.64.1.200", Protocol.TCP, ("nftables",))
    assert (outside.protocol, outside.iface, outside.expect) == (Protocol.UDP, "eth7", NONE)
    assert [flow.label for flow in scenario.flows_in("iptables")] == ["outside"]
    assert [(step.number, step.refers_to) for step in scenario.steps_in("ipvs")] == [(0, None), (1, 0)]


def test_what_is_absent_has_a_default():
    least = {"flows": [{"from": "10.64.1.200", "to": "10.110.0.5", "port": 80, "expect": "none"}]}
    scenario = parse(least, "least.yaml", "least")
    assert (scenario.name, scenario.modes) == ("least", ("nftables", "iptables"))
    assert scenario.config.node_port_addresses is None and scenario.config.localhost_node_ports is None
    assert scenario.config.detect_local_mode == "ClusterCIDR"
    assert scenario.flows[0].label == "10.64.1.200 to 10.110.0.5:80"


def test_an_unknown_key_of_a_flow_is_a_warning():
    scenario = parse(changed("flows", 0, "colour", value="red"), "web.yaml", "web")
    assert scenario.warnings == ("web.yaml: flows[0].colour: unknown key, not read",)


def test_a_broken_object_is_a_warning_and_the_others_stay():
    doc = copy.deepcopy(DOC)
    doc["objects"].append(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "bad", "namespace": "shop"}, "spec": 7}
    )
    scenario = parse(doc, "web.yaml", "web")
    assert [service.name for service in scenario.services] == ["web"]
    assert any("shop/bad" in warning for warning in scenario.warnings)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("colour",), "red", "colour: unknown key"),
        (("modes",), ["nft"], "modes: ['nft'] is no list of"),
        (("level",), "should", "level: 'should' is neither"),
        (("flows",), [], ""),
        (("flows",), {}, "flows: not a list"),
        (("flows", 0), "x", "flows[0]: not a mapping"),
        (("flows", 0, "from"), "10.64.1", "flows[0].from: '10.64.1' is not an IP address"),
        (("flows", 0, "to"), "fd6e::5", "flows[0]: 10.64.1.200 and fd6e::5 are of two families"),
        (("flows", 0, "port"), 70000, "flows[0].port: 70000 is no port"),
        (("flows", 0, "port"), "80", "flows[0].port: '80' is no port"),
        (("flows", 0, "proto"), "ICMP", "flows[0].proto: 'ICMP' is none of"),
        (("flows", 0, "expect"), "refuse", "flows[0].expect: 'refuse' is none of"),
        (("flows", 0, "expect"), {"dnat": []}, "flows[0].expect: neither a word"),
        (("flows", 0, "expect"), {"dnat": ["x"]}, "flows[0].expect.dnat: 'x' is not address:port"),
        (("flows", 0, "expect"), {"dnat": ["10.0.0.1:1"], "mask": True}, "flows[0].expect.mask: unknown key"),
        (("flows", 0, "iface"), "eth0 type dummy", "flows[0].iface: 'eth0 type dummy' is no interface name"),
        (("flows", 0, "iface"), "-batch", "flows[0].iface: '-batch' is no interface name"),
        (("flows", 0, "modes"), ["userspace"], "flows[0].modes: names a mode that the file does not"),
        (("steps", 0, "pick"), "best", "steps[0].pick: 'best' is none of"),
        (("steps", 1, "pick"), "same-as-1", "steps[1].pick: 'same-as-1' does not refer to an earlier step"),
        (("steps", 1, "at"), "soon", "steps[1].at: 'soon' is no time"),
        (("steps", 0, "at"), 11, "steps[1].at: goes back in time"),
        (("node", "config", "clusterCIDR"), "10.0.0.0", "node.config.clusterCIDR: '10.0.0.0' is not a CIDR"),
        (("node", "config", "colour"), "red", "node.config.colour: unknown setting"),
        (("node", "config", "masqueradeAll"), "no", "node.config.masqueradeAll: 'no' is neither true nor false"),
        (("node", "config", "detectLocalMode"), "Guess", "node.config.detectLocalMode: 'Guess' is none of"),
        (("node", "config", "bridgeInterface"), "cni0; drop", "node.config.bridgeInterface: 'cni0; drop' is no"),
        (("node", "ips"), ["10.20.0.300"], "node.ips: '10.20.0.300' is not an IP address"),
    ],
)
def test_a_wrong_value_is_named_by_file_and_key(tmp_path, path, value, message):
    file = tmp_path / "web.yaml"
    doc = changed(*path, value=value)
    if path == ("flows",) and value == []:
        doc["steps"], message = [], "flows: there is no flow"
    file.write_text(yaml.safe_dump(doc))
    with pytest.raises(ScenarioError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize("content", [b"", b"- 1", b"a: [", b"\x00\xff\xfe", b"\xff\xfe\xfa"])
def test_what_is_no_document_is_named_by_file(tmp_path, content):
    file = tmp_path / "odd.yaml"
    file.write_bytes(content)
    with pytest.raises(ScenarioError, match=r"odd\.yaml: "):
        load(file)


def test_expectations():
    assert expectation("reject") == REJECT and expectation("drop") == DROP
    kept, own = ("10.64.2.10", 80), ("10.64.1.10", 80)
    ends = expectation({"dnat": ["10.64.01.10:80", "10.64.2.10:80"], "masq": False, "masq_for": ["10.64.1.10:80"]})
    assert ends == {(Disposition.DELIVERED, kept, False), (Disposition.DELIVERED, own, True)}


def test_files_of_a_folder_in_order_and_once(tmp_path):
    for name in ("b.yaml", "a.yaml", "notes.md"):
        (tmp_path / name).touch()
    assert [path.name for path in find([tmp_path, tmp_path / "b.yaml"])] == ["a.yaml", "b.yaml"]
    with pytest.raises(ScenarioError, match="no such file"):
        find([tmp_path / "c.yaml"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ScenarioError, match=r"no \*\.yaml file"):
        find([tmp_path / "empty"])
