"""Comparison of a cluster's objects with what a node's kernel does, frontend by frontend.

It walks the rules and compares outcomes with the plan, so that it works for every proxy and mode, and follows packets that the rules
rewrite through routes, other rules, and links. Senders are a client outside and a pod; masquerading is not compared.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Literal

import msgspec

from narthex.model import Disposition, Protocol, family_of, in_any, join_port
from narthex.proxy.plan.ir import (
    Decision,
    Drop,
    Forward,
    Frontend,
    FrontendKind,
    Match,
    Plan,
    Reject,
    Sender,
    ServicePlan,
)
from narthex.trace.follow.views import NodeView
from narthex.trace.model import Fate
from narthex.trace.reports.forwarding import Obstacle
from narthex.trace.reports.frontend_walk import (
    FrontendOrigin,
    FrontendOutcome,
    FrontendPacket,
    FrontendWalker,
    frontends,
)
from narthex.trace.reports.senders import Senders

_TOLERANCE = 1 / 2000
"""Older kube-proxy versions write probabilities with five digits."""
_PROTOCOLS = {protocol.lower: protocol for protocol in Protocol}


class DiscrepancyKind(enum.Enum):
    """The kinds of discrepancies."""

    MISSING = "missing"
    """The kernel lacks a frontend or an endpoint that the objects have."""
    STALE = "stale"
    """The kernel sends to an endpoint that the objects don't have."""
    EXTRA = "extra"
    """The kernel has a frontend that the objects don't have."""
    SHARE = "wrong share"
    ANSWER = "wrong answer"
    """The kernel drops, rejects, or passes what the plan decides otherwise."""
    BLOCKED = "blocked"
    """The kernel sends to an endpoint, and other rules, routes, or links keep the packet from it."""
    DUPLICATE = "duplicate"
    """Two proxies, or two rules, have the same frontend."""
    SHADOWED = "shadowed"
    """A rule of another program takes the packet first."""
    CONNECTION = "dead connection"
    """A tracked connection continues to an endpoint that is gone."""


class Discrepancy(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between objects and kernel."""

    kind: DiscrepancyKind
    service: str
    """The Service port; empty if no object names it."""
    frontend: str
    """`10.96.0.10:53/udp (cluster IP)`."""
    said: str
    """One sentence."""
    endpoint: str = ""
    place: str = ""
    """Position in the dump, if known."""
    sender: str = ""
    others: int = 0
    """How many more pairs of a frontend and an endpoint the same obstacle concerns (blocked)."""


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one IP family."""

    node: str
    family: str
    frontends: int
    endpoints: int
    """How many were compared; those of one Service port count once."""
    findings: tuple[Discrepancy, ...] = ()
    unknown: tuple[str, ...] = ()
    """What could not be decided, and why."""

    @property
    def status(self) -> int:
        """The exit status: 0 without differences, 1 with differences, 2 if it can't be decided."""
        return 1 if self.findings else 2 if self.unknown else 0


class CheckDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="check"):
    """What `narthex check -o json` prints."""

    version: Literal[1] = 1
    status: int
    """The exit status."""
    reports: tuple[CheckReport, ...]
    """One for each IP family."""


def check(plan: Plan, view: NodeView, own: tuple[str, ...]) -> CheckReport:
    """Compare a plan with a view. `own` are the node's addresses of the plan's IP family."""
    held = view.rules.get(plan.family) if view.rules is not None else None
    count = sum(len(service.frontends) for service in plan.services.values())
    report = CheckReport(
        node=plan.node_name,
        family=plan.family.label,
        frontends=count,
        endpoints=sum(len(service.cluster.endpoints) if service.cluster else 0 for service in plan.services.values()),
    )
    if held is None:
        why = view.absent.get("rules", "")
        return msgspec.structs.replace(report, unknown=("the node's rules are unknown" + (f": {why}" if why else ""),))
    there = frontends(held, plan.family, own)
    checker = _Checker(plan, view, own, there)
    services = sorted(plan.services.values(), key=lambda service: (str(service.name), service.name.protocol.value))
    findings = [finding for service in services for finding in checker.service(service)]
    findings = [*checker.blocked(), *findings]
    findings += checker.extra()
    findings += checker.duplicates()
    findings += checker.connections()
    partial = (f"the input is partial: {gap}" for gap in held.gaps if gap.table in _PROXY_TABLES)
    unknown = (*view.partial, *held.unread, *partial, *checker.unknown, *checker.left_out())
    return msgspec.structs.replace(report, findings=tuple(findings), unknown=tuple(dict.fromkeys(unknown)))


_PROXY_TABLES = ("nat", "filter", "kube-proxy", "narthex")
"""Tables in which Service proxies write."""


class _Blocked(msgspec.Struct):
    """All packets that one obstacle keeps from their endpoints."""

    first: Discrepancy
    others: int = 0


class _Checker:
    def __init__(
        self, plan: Plan, view: NodeView, own: tuple[str, ...], there: dict[Match, list[FrontendOrigin]]
    ) -> None:
        self._plan = plan
        self._view = view
        self._own = own
        self._there = there
        self.unknown: list[str] = []
        self._walker = FrontendWalker(view, plan.family, own)
        self._senders = Senders(view, plan.family, plan.pods.cidrs, own)
        self._blocked: dict[Obstacle, _Blocked] = {}
        self._by_match = {each.match: service for service in plan.services.values() for each in service.frontends}

    # ---- frontends -------------------------------------------------------------------------------------------------

    def service(self, service: ServicePlan) -> Iterator[Discrepancy]:
        """Yield the discrepancies of one Service port."""
        seen: set[tuple[DiscrepancyKind, str, str]] = set()
        for frontend in service.frontends:
            for sender in self._classes(frontend):
                for finding in self._frontend(service, frontend, sender):
                    key = finding.kind, finding.frontend, finding.endpoint
                    if key not in seen:
                        seen.add(key)
                        yield finding

    def _classes(self, frontend: Frontend) -> list[Sender]:
        pods = bool(self._plan.pods.cidrs)
        if frontend.kind is FrontendKind.CLUSTER_IP:
            return [Sender.POD if pods else Sender.OTHER]
        differs = _scope(frontend.pod) != _scope(frontend.other)
        if any(each.proxy == "IPVS" for each in self._there.get(frontend.match, ())):
            # A virtual server has one pool for all senders, that of other machines (row 7.10).
            return [Sender.OTHER]
        return [Sender.OTHER, Sender.POD] if pods and differs else [Sender.OTHER]

    def _frontend(self, service: ServicePlan, frontend: Frontend, sender: Sender) -> Iterator[Discrepancy]:
        to = self._destination(frontend)
        source = self._senders.of(sender, frontend.allow_from, to) if to is not None else None
        if to is None or source is None:
            return
        asked = FrontendPacket(
            source=source.address,
            destination=to,
            protocol=frontend.protocol,
            port=frontend.port,
            iif=source.iif,
            outside=sender is not Sender.POD,
        )
        outcome = self._walker.outcome(asked)
        if outcome.unknown:
            self.unknown.append(f"{frontend_text(frontend)} of {service.name}: {outcome.unknown}")
            return
        if outcome.relayed:
            why = "a relay on this node takes it (userspace mode); no rule says where it connects to"
            self.unknown.append(f"{frontend_text(frontend)} of {service.name}: {why}")
            return
        if outcome.untracked and not outcome.endpoints and self._view.own(to) is not None:
            return  # a process on this node answers there, and rules see to it
        asker = f"{sender.value} {source.address}"
        expected = _expected(service, frontend, source.address, sender)
        foreign = self._walker.foreign(asked) if outcome.endpoints.keys() != expected.endpoints else ""
        for finding in _differences(service, frontend, outcome, expected, foreign, self._there):
            yield msgspec.structs.replace(finding, sender=asker)
        self._obstructed(service, frontend, outcome, expected, asker)

    def _obstructed(
        self, service: ServicePlan, frontend: Frontend, outcome: FrontendOutcome, expected: _Expected, asker: str
    ) -> None:
        """Record the expected endpoints that packets do not reach, by what is in the way."""
        for endpoint, result in outcome.forwarding.items():
            obstacle = result.obstacle
            if obstacle is None or endpoint not in expected.endpoints:
                continue
            held = self._blocked.get(obstacle)
            if held is not None:
                held.others += 1
                continue
            at = join_port(*endpoint)
            said = f"{frontend_text(frontend)} of {service.name} is sent to {at} and then {_FATES[obstacle.fate]}: {obstacle.reason}"
            finding = Discrepancy(
                kind=DiscrepancyKind.BLOCKED,
                service=str(service.name),
                frontend=frontend_text(frontend),
                said=said,
                endpoint=at,
                place=obstacle.place,
                sender=asker,
            )
            self._blocked[obstacle] = _Blocked(finding)

    def blocked(self) -> Iterator[Discrepancy]:
        """Yield one discrepancy for each obstacle; those of an unknown outcome become reasons in `unknown`."""
        for obstacle, held in self._blocked.items():
            more = f"; the same for {held.others:,} more" if held.others else ""
            if obstacle.fate is Fate.UNKNOWN:
                self.unknown.append(f"{held.first.said}{more}")
            else:
                yield msgspec.structs.replace(held.first, said=f"{held.first.said}{more}", others=held.others)

    def left_out(self) -> Iterator[str]:
        """Yield what was not compared because there was too much of it."""
        count = self._walker.left_out
        if count:
            yield f"{count:,} rewritten packets were not followed to their endpoints: the rules distinguish too many of them"

    def _destination(self, frontend: Frontend) -> str | None:
        if frontend.address is not None:
            return frontend.address
        cidrs = self._plan.node_ports.cidrs
        known = (ip for ip in self._own if family_of(ip) is self._plan.family)
        return next((ip for ip in known if cidrs is None or in_any(cidrs, ip)), None)

    # ---- what only the kernel has ----------------------------------------------------------------------------------

    def extra(self) -> Iterator[Discrepancy]:
        """Yield frontends that no Service has."""
        node_ports = {(protocol, port) for address, protocol, port in self._by_match if address is None}
        for match, places in self._there.items():
            address, protocol, port = match
            if match in self._by_match or (address in self._own and (protocol, port) in node_ports):
                continue
            frontend_words = match_text(match)
            said = f"{frontend_words} leads to {places[0].leads}, and no Service has it"
            yield Discrepancy(
                kind=DiscrepancyKind.EXTRA, service="", frontend=frontend_words, said=said, place=places[0].place
            )

    def duplicates(self) -> Iterator[Discrepancy]:
        """Yield frontends with several origins."""
        for match, places in self._there.items():
            rewriting = [each for each in places if each.rewrites]
            proxies = sorted({each.proxy for each in places})
            leads = sorted({each.leads for each in rewriting})
            service = self._by_match.get(match)
            if len(proxies) < 2 and len(leads) < 2:
                continue
            frontend_words = match_text(match)
            why = (
                f"two proxies have it: {', '.join(proxies)}" if len(proxies) > 1 else f"it leads to {', '.join(leads)}"
            )
            yield Discrepancy(
                kind=DiscrepancyKind.DUPLICATE,
                service=str(service.name) if service else "",
                frontend=frontend_words,
                said=f"{frontend_words} is in the rules twice: {why}; only the first one matters",
                place=places[-1].place,
            )

    def connections(self) -> Iterator[Discrepancy]:
        """Yield tracked connections to endpoints that are gone."""
        if self._view.connections is None:
            return
        dead: Counter[tuple[str, str, str]] = Counter()
        for one in self._view.connections.all():
            protocol = _PROTOCOLS.get(one.protocol)
            if one.reply_source == one.destination or protocol is None:
                continue
            match = one.destination, protocol, one.port
            service = self._by_match.get(match)
            if service is None and one.destination in self._own:
                service = self._by_match.get((None, protocol, one.port))
            leads = one.reply_source, one.reply_source_port
            if service is not None and leads not in _alive(service):
                dead[str(service.name), match_text(match), join_port(*leads)] += 1
        for (name, frontend, endpoint), count in dead.items():
            said = f"{count} known connection(s) to {frontend} go on to {endpoint}, which is no endpoint of {name}"
            yield Discrepancy(
                kind=DiscrepancyKind.CONNECTION, service=name, frontend=frontend, endpoint=endpoint, said=said
            )


_FATES = {Fate.DROPPED: "dropped", Fate.REJECTED: "rejected", Fate.LOST: "lost", Fate.UNKNOWN: "followed no further"}


class _Expected(msgspec.Struct, frozen=True):
    """What the plan decides for one sender of a frontend."""

    decision: Decision
    endpoints: frozenset[tuple[str, int]]
    """Each gets the same share of the connections."""


def _expected(service: ServicePlan, frontend: Frontend, source: str, sender: Sender) -> _Expected:
    decision = frontend.decision(sender)
    if isinstance(decision, Forward) and frontend.allow_from is not None and not in_any(frontend.allow_from, source):
        decision = Drop()
    pool = service.pool(decision.scope).endpoints if isinstance(decision, Forward) else ()
    return _Expected(decision, frozenset([(each.address, each.port) for each in pool]))


def _differences(
    service: ServicePlan,
    frontend: Frontend,
    outcome: FrontendOutcome,
    expected: _Expected,
    foreign: str,
    there: dict[Match, list[FrontendOrigin]],
) -> Iterator[Discrepancy]:
    decision, want = expected.decision, expected.endpoints
    frontend_words, name = frontend_text(frontend), str(service.name)
    place = next((each.place for each in there.get(frontend.match, ()) if each.place), "")

    def finding(kind: DiscrepancyKind, said: str, endpoint: str = "") -> Discrepancy:
        """Return a discrepancy of this frontend, at the line of its rules."""
        return Discrepancy(kind=kind, service=name, frontend=frontend_words, said=said, endpoint=endpoint, place=place)

    if foreign:
        yield finding(
            DiscrepancyKind.SHADOWED, f"{frontend_words} of {name} never comes to its rules: {foreign} takes it first"
        )
        return
    if not outcome.endpoints:
        yield from _nowhere(finding, decision, outcome, frontend_words, name)
        return
    for endpoint in sorted(outcome.endpoints.keys() - want):
        at = join_port(*endpoint)
        yield finding(
            DiscrepancyKind.STALE,
            f"{frontend_words} of {name} is sent to {at}, which {_why_not(service, endpoint, decision)}",
            at,
        )
    for endpoint in sorted(want - outcome.endpoints.keys()):
        at = join_port(*endpoint)
        yield finding(DiscrepancyKind.MISSING, f"{frontend_words} of {name} is never sent to its endpoint {at}", at)
    if want == outcome.endpoints.keys():
        share = Fraction(1, len(want))
        # Differences of exact fractions with long denominators would be a tenth of the time of a large check.
        shares = [(endpoint, float(have)) for endpoint, have in outcome.endpoints.items()]
        near = float(share)
        for endpoint, have in sorted(each for each in shares if abs(each[1] - near) > _TOLERANCE):
            at = join_port(*endpoint)
            said = f"{frontend_words} of {name}: {at} gets {have * 100:.1f} % of the connections and not {share}"
            yield finding(DiscrepancyKind.SHARE, said, at)


def _nowhere(
    finding: Callable[[DiscrepancyKind, str], Discrepancy],
    decision: Decision,
    outcome: FrontendOutcome,
    frontend_words: str,
    name: str,
) -> Iterator[Discrepancy]:
    """Return the discrepancy if the kernel sends the packet to no endpoint."""
    fate = outcome.fate
    if isinstance(decision, Forward):
        if fate is Disposition.NOT_OURS:
            yield finding(DiscrepancyKind.MISSING, f"the kernel has no rule for {frontend_words} of {name}")
        else:
            yield finding(
                DiscrepancyKind.ANSWER, f"{frontend_words} of {name} is {fate.value}, though it has endpoints"
            )
    elif isinstance(decision, Reject) and fate is not Disposition.REJECTED:
        how = "no rule refuses it" if fate is Disposition.NOT_OURS else f"it is {fate.value}"
        yield finding(
            DiscrepancyKind.ANSWER, f"{frontend_words} of {name} has no endpoint and is to be refused at once: {how}"
        )
    elif isinstance(decision, Drop) and fate is Disposition.NOT_OURS:
        said = f"{frontend_words} of {name} is to be dropped (Local policy or source ranges), and no rule drops it"
        yield finding(DiscrepancyKind.ANSWER, said)


def _why_not(service: ServicePlan, endpoint: tuple[str, int], decision: Decision) -> str:
    if any((each.address, each.port) == endpoint for each in service.not_serving):
        return "is there but not ready"
    if any((each.address, each.port) == endpoint for each in service.serving):
        return "serves, but is not among those that policy and topology choose here"
    return "is no endpoint of it" if isinstance(decision, Forward) else "is no endpoint of it: it has none"


def _alive(service: ServicePlan) -> set[tuple[str, int]]:
    pools = [pool.endpoints for pool in (service.cluster, service.local) if pool is not None]
    return {(each.address, each.port) for held in (*pools, service.serving, service.not_serving) for each in held}


def _scope(decision: Decision) -> object:
    return decision.scope if isinstance(decision, Forward) else type(decision)


def frontend_text(frontend: Frontend) -> str:
    """Return a frontend as in findings: `10.96.0.10:53/udp (cluster IP)`."""
    return f"{match_text(frontend.match)} ({frontend.kind.value})"


def match_text(match: Match) -> str:
    """Return an address, port, and protocol as in findings: `10.96.0.10:53/udp`."""
    address, protocol, port = match
    return f"{join_port(address, port) if address else f'port {port}'}/{protocol.lower}"
