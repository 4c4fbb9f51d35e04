"""The rules of kube-proxy's versions are proved, or the true difference is found; what can't be interpreted is undecided."""

from pathlib import Path

import pytest
from tests.trace import kube_proxy_layouts as layouts

from narthex.model import EndpointPort, Host, IPFamily, NamespacedName, Protocol, ServiceCIDR, ServicePort
from narthex.netfilter import ast
from narthex.netfilter.dump.read import read_dump
from narthex.proxy.backends import BACKENDS
from narthex.testing.build import endpoint, endpoint_slice, name, node, plan, service
from narthex.trace.program.reports import KUBE_PROXY_NFTABLES
from narthex.trace.proof.prove import ProofOutcome, prove
from narthex.trace.proof.text import proof_lines

HOST = Host(addresses=(layouts.NODE,))
DUMPS = Path(__file__).parents[2] / "dumps"


def desired(**config):
    dns = (ServicePort(name="dns", port=53, protocol=Protocol.UDP),)
    return plan(
        service("shop/web", layouts.WEB, node_port=layouts.NODE_PORT),
        endpoint_slice("shop/web", endpoint("10.244.1.7"), endpoint("10.244.2.7", node="worker-b"), port=8080),
        service("shop/empty", layouts.EMPTY),
        service("kube-system/dns", layouts.DNS, ports=dns),
        endpoint_slice(
            "kube-system/dns", endpoint("10.244.1.3"), ports=(EndpointPort(name="dns", port=53, protocol=Protocol.UDP),)
        ),
        cluster_cidrs=("10.244.0.0/16",),
        node_addresses=(layouts.NODE,),
        node_port_addresses=None,
        localhost_node_ports=True,
        **config,
    )


def ruleset(version):
    return read_dump(layouts.saved(version)).for_family(IPFamily.IPV4).ruleset


def nft_desired():
    """Return the plan of the Services in the dumps of kube-proxy in mode nftables."""
    unnamed = (ServicePort(name="", port=80),)
    return plan(
        node(internal_ips=(layouts.NODE,)),
        service(
            "shop/web",
            "10.96.0.50",
            node_port=30080,
            balancers=("192.168.15.7",),
            source_ranges=("10.0.0.0/8", "203.0.113.0/24"),
        ),
        endpoint_slice("shop/web", endpoint("10.244.1.5"), endpoint("10.244.2.7", node="worker-b"), port=8080),
        service("shop/sticky", "10.96.0.60", ports=unnamed, affinity_seconds=10800),
        endpoint_slice("shop/sticky", endpoint("10.244.1.6"), ports=(EndpointPort(name="", port=80),)),
        service("shop/empty", "10.96.0.77"),
        ServiceCIDR(name="kubernetes", cidrs=("10.96.0.0/16",)),
        cluster_cidrs=("10.244.0.0/16",),
        node_addresses=(layouts.NODE,),
        node_port_addresses=("primary",),
        localhost_node_ports=False,
    )


FOREIGN_DROP = "any address to 203.0.113.9, tcp port 443"
"""The rules have a Service shop/lb that the plan lacks."""

LAYOUTS = [
    ("1.18", "", ""),
    ("1.25", "", FOREIGN_DROP),
    ("1.30", "", FOREIGN_DROP),
    ("1.36", "", FOREIGN_DROP),
    *((version, each, "") for version in layouts.VERSIONS for each in ("shop/web", "kube-system/dns", "shop/empty")),
]
"""Version, Service or all packets, and the smallest class that differs: empty if the rules are proved."""


@pytest.mark.parametrize("version, about, differs", LAYOUTS)
def test_the_rules_of_kube_proxy_in_mode_iptables(version, about, differs):
    about = name(about) if about else None
    judge(prove(desired(), ruleset(version), HOST, BACKENDS["iptables"].deviations, about), differs)


NO_GUARD = "any address to 10.96.0.60, tcp port 0-79, 81-65535"
"""The set cluster-ips of the dump lacks the cluster IP of shop/sticky, so that its other ports are not refused."""
NFT = [("shop/web", ""), ("shop/sticky", ""), ("shop/empty", ""), ("", NO_GUARD)]


@pytest.mark.parametrize("dump", ["kube-proxy.nft-list-a", "kube-proxy.nft-json"])
@pytest.mark.parametrize("about, differs", NFT)
def test_the_rules_of_kube_proxy_in_mode_nftables(dump, about, differs):
    text = (DUMPS / dump).read_text(encoding="utf-8")
    rules = read_dump(text).for_family(IPFamily.IPV4).ruleset
    judge(prove(nft_desired(), rules, HOST, KUBE_PROXY_NFTABLES, name(about) if about else None), differs)


def judge(report, differs):
    """Check that rules are proved, or that the smallest class that differs is the known one, with a packet that shows it."""
    lines = list(proof_lines(report))
    assert report.outcome is (ProofOutcome.DIFFERENT if differs else ProofOutcome.PROVED), lines
    if differs:
        assert report.counterexample.described == differs, lines
        assert report.counterexample.confirmed, lines


def test_an_unknown_service_is_no_proof():
    with pytest.raises(ValueError, match="no Service shop/none"):
        prove(desired(), ruleset("1.36"), HOST, BACKENDS["iptables"].deviations, NamespacedName("shop", "none"))


def test_a_rule_that_is_not_understood_leaves_its_packets_undecided():
    rules = BACKENDS["iptables"].render(plan_ := desired()).ruleset
    nat = next(table for table in rules.tables if table.name == "nat")
    first = ast.Rule((ast.Compare(ast.Field.DADDR, (layouts.DNS,)), ast.Unknown("-m magic"), ast.DropPacket()))
    chains = dict(nat.chains)
    chains["PREROUTING"] = ast.Chain(
        name="PREROUTING", hook=chains["PREROUTING"].hook, rules=(first, *chains["PREROUTING"].rules)
    )
    changed = ast.Table(family=nat.family, name="nat", chains=chains, sets=nat.sets)
    tables = tuple(changed if table is nat else table for table in rules.tables)
    report = prove(plan_, ast.Ruleset(tables), HOST, BACKENDS["iptables"].deviations)
    assert report.outcome is ProofOutcome.UNDECIDED
    (rule,) = report.undecided
    assert "prerouting nat PREROUTING" in rule.rule
    assert "-m magic" in rule.rule
    assert 0 < rule.share <= 2**-32
    others = prove(plan_, ast.Ruleset(tables), HOST, BACKENDS["iptables"].deviations, name("shop/web"))
    assert others.outcome is ProofOutcome.PROVED


def test_a_silent_rule_with_an_unknown_match_changes_nothing():
    rules = BACKENDS["iptables"].render(plan_ := desired()).ruleset
    nat = next(table for table in rules.tables if table.name == "nat")
    first = ast.Rule((ast.Unknown("-m magic"), ast.IgnoredStatement("-j LOG")))
    chains = dict(nat.chains)
    chains["PREROUTING"] = ast.Chain(
        name="PREROUTING", hook=chains["PREROUTING"].hook, rules=(first, *chains["PREROUTING"].rules)
    )
    changed = ast.Table(family=nat.family, name="nat", chains=chains, sets=nat.sets)
    tables = tuple(changed if table is nat else table for table in rules.tables)
    assert prove(plan_, ast.Ruleset(tables), HOST, BACKENDS["iptables"].deviations).outcome is ProofOutcome.PROVED
