"""Comparison of a plan with the maps of socket load balancing on a node: frontends, endpoints, and programs.

Rules see no packet of a connection that a program sends to an endpoint, so a wrong map is a fault that no walk of rules finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from narthex.model import FAMILIES, IPFamily, Protocol, family_of, join_port
from narthex.proxy.backends.sockets.document import SocketDocument, SocketFrontend
from narthex.proxy.plan.ir import Frontend, Match, Plan, Reject, Sender, ServicePlan
from narthex.proxy.plan.sockets import LeftToRules, SocketDecision, SocketForward, socket_decision
from narthex.trace.follow.views import NodeView
from narthex.trace.node.layout import SOCKETS_FILE
from narthex.trace.reports.check import CheckReport, Discrepancy, DiscrepancyKind, frontend_text, match_text

_MAPS = "maps of socket load balancing"
_HOOKS = ("connect", "sendmsg", "recvmsg", "getpeername")
_SENDERS = {Sender.POD: "pods", Sender.NODE: "the node"}


def with_sockets(report: CheckReport, plan: Plan, view: NodeView) -> CheckReport:
    """Add to a report what the maps and programs of socket load balancing do otherwise than the plan."""
    if "sockets" in view.absent:
        why = f"{_MAPS}: {view.absent['sockets']}"
        return msgspec.structs.replace(report, unknown=(*report.unknown, why))
    if view.sockets is None:
        return report
    return msgspec.structs.replace(report, findings=(*report.findings, *_findings(plan, view.sockets)))


def _findings(plan: Plan, held: SocketDocument) -> Iterator[Discrepancy]:
    yield from _programs(plan.family, held)
    places: dict[Match, SocketFrontend] = {
        (each.address, Protocol(each.protocol), each.port): each
        for each in held.frontends
        if family_of(each.address) is plan.family
    }
    for service in sorted(plan.services.values(), key=lambda each: (str(each.name), each.name.protocol.value)):
        seen: set[tuple[DiscrepancyKind, str, str]] = set()
        for frontend in service.frontends:
            if frontend.address is None:
                continue
            found = places.pop(frontend.match, None)
            ejected = held.ejected if service.name.protocol is Protocol.TCP else ()
            for finding in _of_frontend(plan, service, frontend, found, ejected):
                key = finding.kind, finding.frontend, finding.endpoint
                if key not in seen:
                    seen.add(key)
                    yield finding
    yield from _extra(places)


def _programs(family: IPFamily, held: SocketDocument) -> Iterator[Discrepancy]:
    """Yield a finding if hooks lack a program: its sockets then meet the rules, or see endpoints in place of Services."""
    number = "4" if family is FAMILIES[0] else "6"
    lacking = [f"{hook}{number}" for hook in _HOOKS if not held.runs(f"{hook}{number}")]
    if lacking:
        said = (
            f"no program of socket load balancing is attached to {', '.join(lacking)}: restart the proxy of this node"
        )
        yield Discrepancy(
            kind=DiscrepancyKind.MISSING, service="", frontend=family.label, said=said, place=SOCKETS_FILE
        )


def _extra(places: dict[Match, SocketFrontend]) -> Iterator[Discrepancy]:
    for match, each in places.items():
        if {each.pods, each.node} != {"rules"}:
            text = match_text(match)
            said = f"the {_MAPS} have {text}, and no Service has it"
            yield Discrepancy(kind=DiscrepancyKind.EXTRA, service="", frontend=text, said=said, place=SOCKETS_FILE)


def _of_frontend(
    plan: Plan,
    service: ServicePlan,
    frontend: Frontend,
    held: SocketFrontend | None,
    ejected: tuple[tuple[str, int], ...],
) -> Iterator[Discrepancy]:
    text, name = frontend_text(frontend), str(service.name)
    for sender, words in _SENDERS.items():
        decision = socket_decision(plan, service, frontend, sender)
        expected = _action(decision)
        action = "rules" if held is None else held.pods if sender is Sender.POD else held.node
        who = f"sockets of {words} that connect to {text} of {name}"

        def finding(kind: DiscrepancyKind, said: str, endpoint: str = "", asker: str = sender.value) -> Discrepancy:
            """Return a finding of this frontend."""
            return Discrepancy(
                kind=kind, service=name, frontend=text, said=said, endpoint=endpoint, sender=asker, place=SOCKETS_FILE
            )

        if action != expected:
            kind = DiscrepancyKind.MISSING if action == "rules" else DiscrepancyKind.ANSWER
            yield finding(kind, f"{who} are {_DOES[action]}, and are to be {_meant(decision)}")
        elif held is not None and isinstance(decision, SocketForward):
            if sender is Sender.NODE and held.unbound_only is not decision.unbound_only:
                only = "only if they have no source address" if decision.unbound_only else "whatever their source"
                yield finding(DiscrepancyKind.ANSWER, f"{who} are to be sent to an endpoint {only}: the maps differ")
            if held.least_connections is not decision.least_connections:
                way = "the one with fewer open connections of two" if decision.least_connections else "any"
                yield finding(DiscrepancyKind.ANSWER, f"{who} are to be sent to {way}: the maps differ")
            endpoints = held.cluster if action == "cluster" else held.local
            desired = {(each.address, each.port) for each in service.pool(decision.scope).endpoints}
            # The proxy leaves them out on purpose, for a limited time.
            desired -= {*ejected} - {*endpoints}
            for kind, said, endpoint in _pool_differences(Counter(endpoints), desired, held.empty):
                yield finding(kind, f"{who} {said}", endpoint)


_DOES = {
    "rules": "left to the rules",
    "reject": "refused",
    "cluster": "sent to endpoints of the cluster",
    "local": "sent to endpoints of this node",
}


def _action(decision: SocketDecision) -> str:
    if isinstance(decision, SocketForward):
        return decision.scope.value
    return "reject" if isinstance(decision, Reject) else "rules"


def _meant(decision: SocketDecision) -> str:
    because = f", because {decision.words}" if isinstance(decision, LeftToRules) else ""
    return f"{_DOES[_action(decision)]}{because}"


def _pool_differences(
    held: Counter[tuple[str, int]], desired: set[tuple[str, int]], empty: int
) -> Iterator[tuple[DiscrepancyKind, str, str]]:
    """Yield the kind, the end of a sentence, and the endpoint of each difference of a pool."""
    for endpoint in sorted(held.keys() - desired):
        at = join_port(*endpoint)
        yield DiscrepancyKind.STALE, f"are sent to {at}, which is not among its endpoints", at
    for endpoint in sorted(desired - held.keys()):
        at = join_port(*endpoint)
        yield DiscrepancyKind.MISSING, f"are never sent to its endpoint {at}", at
    for endpoint, count in sorted(held.items()):
        if count > 1 and endpoint in desired:
            at = join_port(*endpoint)
            yield DiscrepancyKind.SHARE, f"are sent to {at} {count} times as often as to other endpoints", at
    if empty:
        yield DiscrepancyKind.SHARE, f"are left to the rules when they draw one of {empty} empty slots", ""
