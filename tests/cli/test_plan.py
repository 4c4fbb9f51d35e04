"""`narthex plan`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main

SHOP = """
apiVersion: v1
kind: Node
metadata: {name: node-a}
spec: {podCIDRs: [10.244.1.0/24]}
status: {addresses: [{type: InternalIP, address: 192.168.49.11}]}
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
    (tmp_path / "shop.yaml").write_text(SHOP)
    return tmp_path


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(word) for word in words])
    return result.exit_code, result.stdout, result.stderr


def test_table(shop: Path) -> None:
    status, out, err = run("plan", "--manifests", shop, "--cluster-cidr", "10.244.0.0/16")
    assert (status, err) == (0, "")
    assert "node node-a, IPv4: 1 service port, 2 frontends" in out
    assert "shop/web      cluster IP 10.96.0.5:80/TCP  cluster" in out
    assert "10.244.1.5:8080*" in out


def test_json(shop: Path) -> None:
    status, out, _ = run("plan", "--manifests", shop, "--node", "node-a", "-o", "json")
    (plan,) = json.loads(out)["plans"]
    assert status == 0
    assert plan["services"][0]["cluster"]["endpoints"] == [{"address": "10.244.1.5", "port": 8080, "local": True}]


def test_what_is_wrong_goes_to_stderr_and_the_rest_is_planned(shop: Path) -> None:
    (shop / "bad.yaml").write_text("apiVersion: v1\nkind: Service\nmetadata: {name: bad}\nspec: {ports: [{port: 0}]}\n")
    status, out, err = run("plan", "--manifests", shop)
    assert status == 0
    assert "Service default/bad" in err
    assert "shop/web" in out


def test_nothing_to_plan(tmp_path: Path) -> None:
    status, out, err = run("plan", "--manifests", tmp_path)
    assert (status, out) == (1, "")
    assert "holds no Service" in err


def test_unknown_mode(shop: Path) -> None:
    status, _, err = run("plan", "--manifests", shop, "--mode", "magic")
    assert status == 2
    assert "'magic' is not one of nftables, iptables" in err
