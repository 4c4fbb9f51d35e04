"""Every scenario's packets, explained: what arrives as it should has no cause, what is refused has one."""

import pytest
from tests.scenario_files import SCENARIOS

from narthex.model.net import IPFamily, family_of, join_port
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.planner import plan_once
from narthex.testing.findings import DROP, REJECT, targets_of
from narthex.testing.scenario import Scenario
from narthex.testing.setting import as_declared, families_of, host_of, node_config, packet_of, snapshot
from narthex.trace.causes.find import find
from narthex.trace.follow.views import LinkAddress, NodeView
from narthex.trace.node.view import RulesByFamily
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel

CASES = [
    pytest.param(mode, scenario, id=f"{scenario.name}-{mode}")
    for scenario in SCENARIOS
    for mode in ("nftables", "iptables", "ipvs")
    if mode in scenario.modes and scenario.level == "must" and scenario.flows_in(mode)
]


def rules_of(scenario: Scenario, mode: str) -> RulesByFamily:
    """What the mode's tools would print on the node."""
    objects, config, backend = snapshot(scenario), node_config(scenario, mode), BACKENDS[mode]
    texts = []
    for family in families_of(scenario.flows_in(mode)):
        tool = "iptables" if family is IPFamily.IPV4 else "ip6tables"
        name = f"{family.value}.nft" if mode == "nftables" else f"rules/{tool}-nft.txt"
        texts.append((name, backend.text(backend.render(plan_once(objects, config, family)))))
    return RulesByFamily(texts)


@pytest.mark.parametrize(("mode", "scenario"), CASES)
def test_only_what_does_not_arrive_has_a_cause(mode: str, scenario: Scenario) -> None:
    cluster, rules = snapshot(scenario), rules_of(scenario, mode)
    for flow in as_declared(scenario.flows_in(mode), BACKENDS[mode].deviations):
        packet, host = packet_of(scenario, flow), host_of(scenario, flow)
        # IPVS mode puts the Services' addresses on a link of its own.
        bound = rules[family_of(flow.destination)].objects.bound
        own = tuple(LinkAddress(each, 128 if ":" in each else 32, "eth0") for each in (*host.addresses, *sorted(bound)))
        view = NodeView(name=scenario.node_name, rules=rules, addresses=own)
        wish = TraceRequest(
            source=flow.source, destination=f"{join_port(flow.destination, flow.port)}/{flow.protocol.lower}",
            node=scenario.node_name, iif="" if packet.from_host else packet.iif,
        )  # fmt: skip
        journey = travel(KnownCluster(views=(view,), snapshot=cluster, has_objects=True), wish)
        found = find(journey, {view.name: view}, cluster)
        told = [(each.cause.id, each.sentence) for each in found]
        targets = targets_of(flow.expect)
        # A pod of another node that meets itself here with its source kept cannot be answered, whatever the rules.
        if targets and flow.source not in {address for address, _ in targets}:
            assert not found, (flow.label, told)
        if flow.expect in (DROP, REJECT):
            assert found, flow.label
            assert found[0].explains, (flow.label, told)
            assert found[0].advice
            # The rules were made from these very objects.
            assert found[0].cause.id not in ("stale-rules", "stale-endpoint", "no-proxy", "two-proxies"), told
