"""`narthex render`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.model.net import IPFamily
from narthex.netfilter.nft.parse import parse_ruleset
from narthex.netfilter.xtables.parse import parse_save_text
from narthex.netfilter.xtables.print import save_text
from narthex.proxy.backends import BACKENDS

SHOP = """
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIPs: [10.96.0.5, 'fd00::5'], clusterIP: 10.96.0.5, ipFamilies: [IPv4, IPv6], ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.244.1.5], nodeName: node-a}]
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.yaml"
    path.write_text(SHOP)
    return path


def run(*words: object) -> str:
    result = CliRunner().invoke(main, ["render", "--node", "node-a", "--node-ip", "10.20.0.1", *map(str, words)])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_both_families_in_nft_words(shop: Path) -> None:
    text = run("--manifests", shop, "--mode", "nftables")
    assert "table ip narthex" in text
    assert "table ip6 narthex" in text


def test_one_family(shop: Path) -> None:
    four = run("--manifests", shop, "--family", "4")
    six = run("--manifests", shop, "--family", "6")
    assert "10.96.0.5" in four
    assert "ip6 narthex" not in four
    assert "fd00::5" in six
    assert "table ip narthex" not in six


def test_iptables_text_reads_back(shop: Path) -> None:
    text = run("--manifests", shop, "--mode", "iptables", "--family", "4")
    parsed = parse_save_text(text, IPFamily.IPV4)
    assert save_text(parsed) == text
    assert "-d 10.96.0.5/32" in text


def test_nft_text_reads_back(shop: Path) -> None:
    (table,) = parse_ruleset(run("--manifests", shop, "--family", "4")).tables
    assert ("10.96.0.5", "tcp", 80) in table.sets["services"].elements


@pytest.mark.parametrize("mode", sorted(BACKENDS))
def test_json(shop: Path, mode: str) -> None:
    data = json.loads(run("--manifests", shop, "--mode", mode, "-o", "json"))
    assert data["mode"] == mode
    assert data["rules"]["IPv4"] + data["rules"]["IPv6"] == run("--manifests", shop, "--mode", mode)
