"""The rules of kube-proxy's versions are proved, or the true difference is found; what can't be interpreted is undecided."""

import pytest
from tests.trace import kube_proxy_layouts as layouts

from narthex.model import EndpointPort, Host, IPFamily, NamespacedName, Protocol, ServicePort
from narthex.netfilter import ast
from narthex.netfilter.dump.read import read_dump
from narthex.proxy.backends import BACKENDS
from narthex.testing.build import endpoint, endpoint_slice, name, plan, service
from narthex.trace.proof.prove import ProofOutcome, prove
from narthex.trace.proof.text import proof_lines

HOST = Host(addresses=(layouts.NODE,))


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


@pytest.mark.parametrize("version", layouts.VERSIONS)
@pytest.mark.parametrize("service_name", ["shop/web", "kube-system/dns"])
def test_a_service_of_kube_proxy(version, service_name):
    report = prove(desired(), ruleset(version), HOST, BACKENDS["iptables"].deviations, name(service_name))
    print(*proof_lines(report), sep="\n")
    assert report.outcome is ProofOutcome.PROVED, list(proof_lines(report))


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
