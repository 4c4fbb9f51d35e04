"""What scenarios mean once sockets on the node are balanced: flows of local pods and of the node itself."""

from __future__ import annotations

import msgspec

from narthex.model import Disposition, EndpointSlice, IPFamily, family_of
from narthex.proxy.plan.ir import Plan, Reject, Sender
from narthex.proxy.plan.planner import plan_once
from narthex.proxy.plan.sockets import (
    LeftToRules,
    SocketDecision,
    SocketDeviation,
    SocketForward,
    deviation,
    socket_decision,
)
from narthex.testing.findings import REJECT, Ends
from narthex.testing.scenario import Scenario, ScenarioFlow
from narthex.testing.setting import families_of, from_host, host_of, is_local_pod, node_config, packet_of, snapshot
from narthex.trace.evaluate import find_frontend

MODE = "nftables"


def stranger_on_the_node(scenario: Scenario) -> Scenario:
    """Return the scenario of endpoints outside of the pod ranges, with one of them on this node as a client."""
    objects = tuple(
        msgspec.structs.replace(
            each, endpoints=tuple(msgspec.structs.replace(one, node_name=scenario.node_name) for one in each.endpoints)
        )
        if isinstance(each, EndpointSlice)
        else each
        for each in scenario.objects
    )
    (flow,) = (flow for flow in scenario.flows if flow.label == "outside")
    client = msgspec.structs.replace(flow, label="stranger", source="198.51.100.90")
    return msgspec.structs.replace(scenario, name="stranger-on-the-node", objects=objects, flows=(client,))


class SocketFlow(msgspec.Struct, frozen=True, kw_only=True):
    """A flow of a socket on this node, as it must end with socket load balancing."""

    flow: ScenarioFlow
    """With the ends that sockets must produce."""
    original: Ends
    """The ends that the scenario's file demands."""
    sender: Sender
    decision: SocketDecision
    deviations: frozenset[SocketDeviation] = frozenset()


def plans_of(scenario: Scenario) -> dict[IPFamily, Plan]:
    objects, config = snapshot(scenario), node_config(scenario, MODE)
    return {family: plan_once(objects, config, family) for family in families_of((*scenario.flows, *scenario.steps))}


def socket_flows(scenario: Scenario) -> list[SocketFlow]:
    """Return the flows whose sockets are on the node. A probe binds its socket to the source of the flow."""
    plans = plans_of(scenario)
    found = []
    for flow in scenario.flows_in(MODE):
        host = from_host(scenario, flow)
        # A pod whose packets come in by another interface is none of this machine.
        if not host and (flow.iface or not is_local_pod(scenario, flow.source)):
            continue
        sender = Sender.NODE if host else Sender.POD
        plan = plans[family_of(flow.destination)]
        place = find_frontend(plan, packet_of(scenario, flow), host_of(scenario, flow))
        decision = socket_decision(plan, *place, sender) if place else LeftToRules.NO_FRONTEND
        expected, differences = flow.expect, set()
        if isinstance(decision, Reject):
            expected = REJECT
        elif isinstance(decision, SocketForward) and not decision.unbound_only and place:
            endpoints = place[0].pool(decision.scope).endpoints
            expected = frozenset((Disposition.DELIVERED, (each.address, each.port), False) for each in endpoints)
            if expected != flow.expect:
                kept = {place for _, place, rewritten in flow.expect if not rewritten}
                changed = [each for each in endpoints if (each.address, each.port) not in kept]
                differences = {deviation(plan, decision, sender, flow.source, each.address) for each in changed}
        assert None not in differences, f"{scenario.name}: {flow.label}: a difference that is not declared"
        found.append(
            SocketFlow(
                flow=msgspec.structs.replace(flow, expect=expected),
                original=flow.expect,
                sender=sender,
                decision=decision,
                deviations=frozenset(each for each in differences if each is not None),
            )
        )
    return found
