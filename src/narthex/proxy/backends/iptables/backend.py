"""The iptables backend: kube-proxy's chains, names, and structure, so that existing knowledge and tools apply.

Two things differ from kube-proxy on purpose, so that all modes behave alike (rows 13.4, 13.6, 29.5): a process on this
node is refused by an external address without endpoints, and node ports without endpoints are refused only where node
ports answer. In addition, the chains of the filter table begin with a rule that accepts what nat has already forwarded:
an endpoint may have the address and port of another frontend, as host network pods do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import msgspec
from immutables import Map, MapMutation

from narthex.model import Host, Memory, NamespacedName, Packet, ServicePortName, Trace
from narthex.netfilter.walk.walk import walk
from narthex.netfilter.xtables.print import save_text
from narthex.proxy.backends.base import Backend
from narthex.proxy.backends.iptables import names
from narthex.proxy.backends.iptables.chains import IptablesFragment, fragment
from narthex.proxy.backends.iptables.frame import Frame
from narthex.proxy.backends.iptables.refusals import (
    exact_lines,
    external_lines,
    firewall_lines,
    health_check_lines,
    unless_sent,
)
from narthex.proxy.backends.iptables.rules import Rules, XtablesChanges, XtablesRules, diff, edits_of, patch
from narthex.proxy.backends.traits import IPTABLES
from narthex.proxy.plan.ir import Deviation, Plan, ServiceHealthCheck

LARGE = 1000
"""Number of endpoints above which endpoint rules carry no comments (row 21.12)."""
SMALL_AGAIN = 800
"""Number of endpoints below which comments return. The gap keeps a cluster that fluctuates about one number from
rewriting all endpoint chains at every change.
"""

Fragments = Map[ServicePortName, IptablesFragment]


class _Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """What a rendering keeps for the next one."""

    plan_number: int
    frame: Frame
    fragments: Fragments
    endpoints: int
    health_checks: Mapping[NamespacedName, ServiceHealthCheck]


class IptablesBackend(Backend[XtablesRules, XtablesChanges]):
    """Renders plans as kube-proxy's chains."""

    name = "iptables"
    deviations = frozenset(
        {
            Deviation.NO_CLUSTER_IP_GUARD,
            Deviation.REJECT_BEFORE_RANGES,
            Deviation.NO_CONSISTENT_HASHING,
            Deviation.NO_LEAST_CONNECTIONS,
        }
    )
    traits = IPTABLES

    def advance(self, previous: XtablesRules | None, plan: Plan) -> tuple[XtablesRules, XtablesChanges]:
        """Return the rules for a plan and the changes. Fragments of unchanged Service ports are taken over."""
        last = cast("_Rendering | None", previous.rendering) if previous else None
        endpoints = _count(plan, last)
        large = last is not None and not last.frame.commented
        frame = Frame.of(plan, commented=endpoints <= (SMALL_AGAIN if large else LARGE))
        if previous is None or last is None or last.frame != frame:
            rules = _render_all(plan, frame, endpoints)
            return rules, diff(previous, rules)
        rules, touched = _render_changes(plan, previous, last, endpoints)
        return rules, diff(previous, rules, touched)

    diff = staticmethod(diff)
    patch = staticmethod(patch)
    edits = staticmethod(edits_of)

    def walk(
        self, rules: XtablesRules, packet: Packet, host: Host, memory: Memory | None = None, now: float = 0.0
    ) -> Trace:
        """Return the path of a packet through these rules alone."""
        return walk(rules.ruleset, packet, host, memory, now)

    def contents(self, rules: XtablesRules) -> Mapping[str, object]:
        """Return chains and jumps."""
        return {"chains": rules.chains, "jumps": rules.jumps}

    def served(self, rules: XtablesRules) -> int:
        """Return the number of Service ports with endpoints."""
        return sum(name.startswith(names.ENDPOINT_SETS) for name in rules.chains["nat"])

    def text(self, rules: XtablesRules) -> str:
        """Return the rules as iptables-save prints them in an otherwise empty network namespace."""
        return save_text(rules.ruleset)


def _count(plan: Plan, last: _Rendering | None) -> int:
    if last is None:
        return sum(service.endpoint_count for service in plan.services.values())
    count = last.endpoints
    for name in plan.differing(last.plan_number, last.fragments):
        service, held = plan.services.get(name), last.fragments.get(name)
        count += (service.endpoint_count if service else 0) - (held.endpoints if held else 0)
    return count


def _render_all(plan: Plan, frame: Frame, endpoints: int) -> XtablesRules:
    fragments: Fragments = Map({name: fragment(service, frame) for name, service in plan.services.items()})
    nat: dict[str, Rules] = frame.fixed_nat() | _shared_nat(fragments, frame)
    for each in fragments.values():
        nat.update(each.chains)
    return XtablesRules(
        plan.family,
        {
            "nat": Map(nat),
            "filter": Map(frame.fixed_filter() | _shared_filter(fragments) | _health_check_ports(plan)),
            "mangle": Map({names.CANARY: ()}),
        },
        Map(frame.jumps()),
        frame.sysctls(),
        rendering=_rendering(plan, frame, fragments, endpoints),
    )


def _rendering(plan: Plan, frame: Frame, fragments: Fragments, endpoints: int) -> _Rendering:
    return _Rendering(
        plan_number=plan.lineage.number,
        frame=frame,
        fragments=fragments,
        endpoints=endpoints,
        health_checks=plan.health_checks,
    )


def _render_changes(
    plan: Plan, previous: XtablesRules, last: _Rendering, endpoints: int
) -> tuple[XtablesRules, set[tuple[str, str]]]:
    """Return the next rules, and the chains (table and name) that may differ."""
    touched: set[tuple[str, str]] = set()
    shared_differ = False
    fragments = last.fragments
    with previous.chains["nat"].mutate() as nat:
        for name in plan.differing(last.plan_number, last.fragments):
            service, before = plan.services.get(name), last.fragments.get(name)
            after = fragment(service, last.frame) if service else None
            shared_differ |= _shared(before) != _shared(after)
            fragments = fragments.delete(name) if after is None and before else fragments
            fragments = fragments.set(name, after) if after else fragments
            touched.update(_replace_chains(nat, before.chains if before else {}, after.chains if after else {}))
        chains = dict(previous.chains)
        if shared_differ:
            shared = _shared_nat(fragments, last.frame)
            nat.update(shared)
            touched.update(("nat", chain) for chain in shared)
            refusals = _shared_filter(fragments)
            chains["filter"] = previous.chains["filter"].update(refusals)
            touched.update(("filter", chain) for chain in refusals)
        chains["nat"] = nat.finish()
    if plan.health_checks is not last.health_checks:
        ports = _health_check_ports(plan)
        # Mostly it is a count that differs, of which rules know nothing.
        if ports[names.NODE_PORTS] != chains["filter"][names.NODE_PORTS]:
            chains["filter"] = chains["filter"].update(ports)
            touched.add(("filter", names.NODE_PORTS))
    rendering = _rendering(plan, last.frame, fragments, endpoints)
    return XtablesRules(plan.family, chains, previous.jumps, previous.sysctls, rendering), touched


def _shared(each: IptablesFragment | None) -> tuple[object, ...]:
    return each.shared if each else ()


def _replace_chains(
    nat: MapMutation[str, Rules], before: Mapping[str, Rules], after: Mapping[str, Rules]
) -> Iterable[tuple[str, str]]:
    """Replace the chains of one Service port; yields those that differ."""
    for chain in before.keys() - after.keys():
        del nat[chain]
        yield "nat", chain
    for chain, rules in after.items():
        if before.get(chain) != rules:
            nat[chain] = rules
            yield "nat", chain


def _sorted(fragments: Fragments) -> list[IptablesFragment]:
    return [each for _, each in sorted(fragments.items(), key=lambda item: item[0].sort_key)]


def _shared_nat(fragments: Fragments, frame: Frame) -> dict[str, Rules]:
    """Return the chains of the nat table in which every Service port has rules."""
    ordered = _sorted(fragments)
    services = exact_lines((each.services, each.refused) for each in ordered)
    return {
        names.SERVICES: (*services, *frame.jumps_to_node_ports(names.NODE_PORTS)),
        names.NODE_PORTS: tuple(line for each in ordered for line in each.node_ports),
    }


def _shared_filter(fragments: Fragments) -> dict[str, Rules]:
    """Return the chains of the filter table in which Service ports have rules."""
    ordered = [each.refused for each in _sorted(fragments)]
    return {
        names.SERVICES: unless_sent(line for each in ordered for line in each.cluster),
        names.EXTERNAL_SERVICES: unless_sent(external_lines(ordered)),
        names.PROXY_FIREWALL: unless_sent(firewall_lines(ordered)),
    }


def _health_check_ports(plan: Plan) -> dict[str, Rules]:
    """Return the chain that accepts health checks of load balancers (row 16.9)."""
    return {names.NODE_PORTS: tuple(health_check_lines(plan))}
