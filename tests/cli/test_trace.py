"""`narthex trace` over manifests."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.ir import Deviation

SHOP = """
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Node
  metadata: {name: node-a}
  spec: {podCIDRs: [10.244.1.0/24]}
  status: {addresses: [{type: InternalIP, address: 192.168.49.11}]}
- apiVersion: v1
  kind: Node
  metadata: {name: node-b}
  spec: {podCIDRs: [10.244.2.0/24]}
  status: {addresses: [{type: InternalIP, address: 192.168.49.12}]}
- apiVersion: v1
  kind: Service
  metadata: {name: hello, namespace: shop}
  spec:
    type: NodePort
    clusterIP: 10.106.183.112
    ports: [{name: http, port: 4000, targetPort: 8080, nodePort: 30001}]
- apiVersion: discovery.k8s.io/v1
  kind: EndpointSlice
  metadata: {name: hello-1, namespace: shop, labels: {kubernetes.io/service-name: hello}}
  addressType: IPv4
  ports: [{name: http, port: 8080}]
  endpoints:
  - {addresses: [10.244.1.5], nodeName: node-a, targetRef: {kind: Pod, name: hello-x1}}
  - {addresses: [10.244.2.7], nodeName: node-b, targetRef: {kind: Pod, name: hello-x2}}
"""

each_mode = pytest.mark.parametrize("mode", sorted(BACKENDS))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.yaml").write_text(SHOP)
    return tmp_path


def run(shop: Path, *words: str) -> tuple[int, str, str]:
    always = ["--manifests", str(shop), "--cluster-cidr", "10.244.0.0/16"]
    result = CliRunner().invoke(main, ["trace", *words, *always])
    return result.exit_code, result.stdout, result.stderr


@each_mode
def test_node_port_from_outside(shop: Path, mode: str, golden) -> None:
    status, out, err = run(shop, "outside", "node-a:30001", "--mode", mode)
    assert (status, err) == (0, "")
    golden(f"trace/cli-node-port-{mode}.txt", out)
    for needed in (
        "Service port shop/hello:http by its node port 30001/TCP",
        "sender    other; 198.51.100.7 is neither a pod nor an address of this node",
        "└─ 1/2  10.244.2.7:8080  pod shop/hello-x2 on node-b",
        "made anew" if Deviation.RELAYED in BACKENDS[mode].deviations else "source rewritten (masquerade)",
        "route        10.244.2.0/24 is node-b's pod range: by way of node-b (192.168.49.12)",
        "plan and rules agree",
    ):
        assert " ".join(needed.split()) in " ".join(out.split())


@each_mode
def test_pod_to_service(shop: Path, mode: str) -> None:
    status, out, _ = run(shop, "pod/shop/hello-x2", "shop/hello:http", "--mode", mode, "-o", "json")
    data = json.loads(out)
    assert (status, data["start"], data["plan"]["node"], data["plan"]["agree"]) == (0, "node-b", "node-b", True)
    assert data["source"] == {"address": "10.244.2.7", "name": "pod shop/hello-x2 on node-b"}
    assert data["plan"]["sender"] == "pod"
    assert data["service"] == "shop/hello:http"
    other, itself = data["ends"]
    relayed = Deviation.RELAYED in BACKENDS[mode].deviations
    assert (other["name"], other["masqueraded"]) == ("pod shop/hello-x1 on node-a", relayed)
    assert (itself["name"], itself["masqueraded"]) == ("pod shop/hello-x2 on node-b", True)
    assert ("made anew" if relayed else "hairpin") in itself["rewriting"][-1]


@each_mode
def test_every_witness_agrees_for_all_kinds_of_sender(shop: Path, mode: str) -> None:
    for source in ("hello-x1", "hello-x2", "node-a", "node-b", "outside", "127.0.0.1"):
        for destination in ("hello", "node-a:30001", "node-b:30001", "10.106.183.112:81", "10.106.183.112/icmp"):
            status, out, _ = run(shop, source, destination, "--node", "node-a", "--mode", mode)
            assert status == 0
            assert "; plan and rules agree)" in " ".join(out.split()), (source, destination, out)


def test_unknown_names_are_answered_with_known_ones(shop: Path) -> None:
    status, out, err = run(shop, "hello-x9", "hello")
    assert (status, out) == (1, "")
    assert "shop/hello-x1" in err


def test_where_to_look_must_be_said(shop: Path) -> None:
    result = CliRunner().invoke(main, ["trace", "outside", "hello:80"])
    assert result.exit_code == 2
    assert "--manifests DIR, --kubeconfig FILE, --master URL or --lab NAME" in result.stderr
    both = CliRunner().invoke(main, ["trace", "outside", "hello:80", "--manifests", str(shop), "--lab", "default"])
    assert both.exit_code == 2


def test_a_lab_that_does_not_run() -> None:
    result = CliRunner().invoke(main, ["trace", "outside", "node-1:80", "--lab", "there-is-none"])
    assert result.exit_code == 1
    assert "there is no lab 'there-is-none'" in result.stderr


@each_mode
def test_rules_from_what_tools_printed(shop: Path, tmp_path: Path, mode: str) -> None:
    """A dump of the plan's own rules tells the same story; one from before the last change does not."""
    words = ("outside", "node-a:30001", "--mode", mode)
    always = ["--manifests", str(shop), "--cluster-cidr", "10.244.0.0/16", "--node", "node-a", "--mode", mode]
    (tmp_path / "rules.txt").write_text(CliRunner().invoke(main, ["render", *always]).stdout)
    status, out, err = run(shop, *words, "--rules", str(tmp_path / "rules.txt"))
    assert (status, err) == (0, "")
    rendered = run(shop, *words)[1].replace("rendered from the plan", "read from dumps")
    assert out == rendered
    (tmp_path / "rules.txt").write_text((tmp_path / "rules.txt").read_text().replace("10.244.2.7", "10.244.2.8"))
    status, out, _ = run(shop, *words, "--rules", str(tmp_path / "rules.txt"))
    assert status == 0 and "the rules say: 50.00 % (1/2) delivered to 10.244.2.8:8080" in out


def test_dumps_that_are_none(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("to whom it may concern")
    status, _, err = run(shop, "outside", "node-a:30001", "--rules", str(tmp_path / "notes.txt"))
    assert status == 1 and "notes.txt: is not what iptables-save" in err
    result = CliRunner().invoke(main, ["trace", "a", "b", "--lab", "x", "--rules", str(tmp_path / "notes.txt")])
    assert result.exit_code == 2 and "leave out --rules" in result.stderr


def test_a_name_from_a_pod(shop: Path) -> None:
    asked = ["trace", "shop/hello-x1", "hello.shop:http", "--manifests", str(shop), "--node", "node-a"]
    done = CliRunner().invoke(main, [*asked, "-o", "json"])
    data = json.loads(done.output)
    assert [(each["question"], each["answer"]) for each in data["lookup"]] == [
        ("hello.shop.shop.svc.cluster.local.", "no such name"),
        ("hello.shop.svc.cluster.local.", "10.106.183.112"),
    ]
    assert data["service"] == "shop/hello:http" and data["plan"]["agree"]
    assert "hello.shop.svc.cluster.local.: 10.106.183.112\nto " in CliRunner().invoke(main, asked).output
    other = CliRunner().invoke(main, [*asked, "--cluster-domain", "k8s.example"])
    assert "hello.shop.svc.k8s.example.: 10.106.183.112" in other.output


@pytest.mark.parametrize(
    ("sender", "name", "message"),
    [
        ("shop/hello-x1", "hullo.shop", "hullo.shop.svc.cluster.local.: no such name"),
        ("shop/hello-x1", "example.org", "example.org.: not the cluster's; the servers behind its DNS are asked"),
        ("10.244.1.5", "shop.svc", "shop.svc.cluster.local.: exists, without an address"),
        ("node-a", "hello.shop", "which pods ask, and node-a is no pod"),
        ("outside", "hello.shop", "name a Service as NAMESPACE/NAME"),
        ("shop/hello-x1", "a..b", "the name 'a..b' or the domain 'cluster.local' has an empty label"),
    ],
)
def test_a_name_that_leads_nowhere(shop: Path, sender: str, name: str, message: str) -> None:
    done = CliRunner().invoke(main, ["trace", sender, name, "--manifests", str(shop), "--node", "node-a"])
    assert done.exit_code == 1 and message in done.output


def test_the_options_name_a_node_that_the_manifests_lack(tmp_path):
    """--node and --node-ip are enough to trace to a node port."""
    manifest = tmp_path / "web.yaml"
    manifest.write_text(
        """
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.20, type: NodePort, ports: [{port: 80, nodePort: 30080}]}
"""
    )
    options = ("--manifests", str(manifest), "--node", "worker-a", "--node-ip", "192.168.1.2")
    done = CliRunner().invoke(main, ["trace", "outside", "worker-a:30080", *options])
    assert done.exit_code == 0, done.output
    assert "192.168.1.2:30080" in done.output
