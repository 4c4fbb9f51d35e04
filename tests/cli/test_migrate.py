"""`narthex migrate`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main

TWO_NODES = """
apiVersion: v1
kind: Node
metadata: {name: node-a}
spec: {podCIDRs: [10.244.1.0/24]}
status: {addresses: [{type: InternalIP, address: 192.168.49.11}]}
---
apiVersion: v1
kind: Node
metadata: {name: node-b}
spec: {podCIDRs: [10.244.2.0/24]}
status: {addresses: [{type: InternalIP, address: 192.168.49.12}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  type: NodePort
  clusterIP: 10.96.0.5
  ports: [{port: 80, nodePort: 30001}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.244.1.5], nodeName: node-a, targetRef: {kind: Pod, name: web-x1}}
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.yaml").write_text(TWO_NODES)
    return tmp_path


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["migrate", *(str(word) for word in words), "--cluster-cidr", "10.244.0.0/16"])
    return result.exit_code, result.stdout, result.stderr


def test_all_nodes_are_looked_at(shop: Path) -> None:
    status, out, err = run("--from", "iptables", "--to", "nftables", "--manifests", shop)
    assert (status, err) == (3, "")
    assert out.startswith("from iptables to nftables, on node-a, node-b: 1 Service port\n")
    # A pod of node-a that meets itself by way of the other node.
    assert "on:     node-b\n" in out
    assert "node port on loopback (127.0.0.0/8); from this node\n" in out


def test_one_node_can_be_chosen(shop: Path) -> None:
    status, out, _ = run("--from", "iptables", "--to", "nftables", "--manifests", shop, "--node", "node-a")
    assert status == 3
    assert out.startswith("from iptables to nftables, on node-a: ")
    assert "node-b" not in out


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_from_a_mode_to_itself_nothing_is_printed(shop: Path, mode: str) -> None:
    assert run("--from", mode, "--to", mode, "--manifests", shop) == (0, "", "")


def test_the_configuration_counts(shop: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.conf"
    file.write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
        "nodePortAddresses: [192.168.49.0/24]\niptables: {masqueradeAll: true}\nnftables: {masqueradeAll: false}\n"
    )
    _, out, _ = run("--from", "iptables", "--to", "nftables", "--manifests", shop / "shop.yaml", "--config", file)
    assert "nodePortAddresses" not in out
    assert "masqueradeAll is on in iptables mode, off in nftables mode\n" in out


def test_json(shop: Path) -> None:
    status, out, _ = run("--from", "nftables", "--to", "iptables", "--manifests", shop, "-o", "json")
    data = json.loads(out)
    assert status == 3
    assert (data["from"], data["to"], data["nodes"]) == ("nftables", "iptables", ["node-a", "node-b"])
    unknown = next(change for change in data["changes"] if "unknown port of the cluster IP" in change["arrivals"])
    assert (unknown["before"], unknown["after"]) == ("refused", "left alone")
    assert unknown["services"] == ["shop/web"]


@pytest.mark.parametrize(
    "words, message",
    [
        (("--from", "iptables", "--to", "abacus"), "'abacus' is not one of"),
        (("--from", "", "--to", "nftables"), "'' is not one of"),
        (("--from", "iptables"), "Missing option '--to'"),
        (("--from", "iptables", "--to", "nftables", "--node-ip", "192.168.49.11"), "--node-ip is for one node"),
    ],
)
def test_what_cannot_be_done_is_no_change(shop: Path, words: tuple[str, ...], message: str) -> None:
    status, out, err = run(*words, "--manifests", shop)
    assert status in (1, 2)
    assert message in err
    assert out == ""
