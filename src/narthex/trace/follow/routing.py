"""Routing decisions of a node: policy rules, tables, longest prefix, metric; and the reverse path check.

After net/ipv4/fib_rules.c, fib_frontend.c (`fib_validate_source`) and route.c of Linux 6.x.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import msgspec

from narthex.model import IPFamily, contains, family_of
from narthex.trace.follow.views import DEFAULT, LOCAL, MAIN, NextHop, NodeRoute, NodeView, PolicyRule

_KERNELS = (LOCAL, MAIN, DEFAULT)
_STANDARD = ((0, LOCAL), (32766, MAIN), (32767, DEFAULT))
"""Priorities and tables of the kernel's own policy rules."""
_REFUSALS = {
    "blackhole": "a blackhole route takes it silently",
    "unreachable": "an unreachable route refuses it: host unreachable",
    "prohibit": "a prohibit route refuses it: administratively prohibited",
}


class RouteDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a route lookup."""

    kind: str
    """`unicast`, `local`, `broadcast`, `multicast`; `lost`; or `unknown`."""
    hops: tuple[tuple[NextHop, Fraction], ...] = ()
    """The next hops of a unicast route, each with its share of the flows."""
    source: str = ""
    """The source address for packets created here, if the route names one."""
    route: NodeRoute | None = None
    reason: str = ""
    """Set for `lost` and `unknown`."""
    evidence: tuple[str, ...] = ()
    """The route, and the policy rule unless it is one of the kernel's three defaults."""


class RouteQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a packet that decide about its route."""

    destination: str
    source: str = ""
    iif: str = ""
    """`lo` or empty for a packet that is created here."""
    oif: str = ""
    mark: int = 0


def look_up(view: NodeView, asked: RouteQuery) -> RouteDecision:
    """Return the route of a packet."""
    family = family_of(asked.destination)
    if view.routes is None:
        return _by_addresses(view, asked)
    routes = [route for route in view.routes if family_of(route.destination) is family]
    tables: dict[str, list[NodeRoute]] = {}
    for route in routes:
        tables.setdefault(route.table, []).append(route)
    if LOCAL not in tables:
        # A listing of `ip route` has the main table alone; the local one follows from the addresses.
        here = _by_addresses(view, asked)
        if here.kind == "local":
            return here
    if not routes:
        return RouteDecision(kind="unknown", reason=f"no routes of {family.label} are known")
    policies = _policies(view, family)
    for policy in policies:
        holds = _holds(policy, asked)
        if holds is None:
            reason = f"it is unknown whether the policy rule {policy.text!r} holds: {policy.strange}"
            return RouteDecision(kind="unknown", reason=reason, evidence=(policy.text,))
        if not holds:
            continue
        found = _in_table(policy, tables, asked)
        if found is not None:
            return found
        if view.copied and policy.table not in tables and policy.table not in _KERNELS:
            reason = f"routing table {policy.table}, which {policy.text!r} asks, is not in the input"
            return RouteDecision(kind="unknown", reason=reason, evidence=(policy.text,))
    if view.copied:
        # A listing may be cut, and no line shows that one is missing.
        return RouteDecision(kind="unknown", reason=f"the input has no route to {asked.destination}, and may lack one")
    return RouteDecision(kind="lost", reason=f"no route to {asked.destination}")


def _by_addresses(view: NodeView, asked: RouteQuery) -> RouteDecision:
    """Decide by the node's own addresses alone, without routes."""
    destination = asked.destination
    if contains(family_of(destination).loopback, destination):
        return RouteDecision(kind="local", evidence=("loopback is always local",))
    own = view.own(destination)
    if own is not None:
        return RouteDecision(kind="local", evidence=(f"{own.address}/{own.prefix} on {own.link}",))
    why = view.absent.get("routes", "")
    return RouteDecision(kind="unknown", reason="the node's routes are unknown" + (f": {why}" if why else ""))


def _policies(view: NodeView, family: IPFamily) -> list[PolicyRule]:
    known = [rule for rule in view.policies or () if rule.family is family]
    if not known or (view.copied and not any(rule.table == MAIN for rule in known)):
        # The kernel has these three from the start; a listing without the main table is cut.
        held = {rule.table for rule in known}
        standard = (PolicyRule(family=family, priority=priority, table=table) for priority, table in _STANDARD)
        known += [rule for rule in standard if rule.table not in held]
    return sorted(known, key=lambda rule: rule.priority)


def _holds(rule: PolicyRule, asked: RouteQuery) -> bool | None:
    """Return True if a policy rule matches the packet; None if not known."""
    own = (
        (not rule.source or (bool(asked.source) and contains(rule.source, asked.source)))
        and (not rule.destination or contains(rule.destination, asked.destination))
        and (not rule.iif or rule.iif == (asked.iif or "lo"))
        and (not rule.oif or rule.oif == asked.oif)
        and (rule.mark is None or asked.mark & rule.mask == rule.mark)
    )
    if rule.strange and (own or rule.negate):
        return None
    return own is not rule.negate


def _in_table(rule: PolicyRule, tables: dict[str, list[NodeRoute]], asked: RouteQuery) -> RouteDecision | None:
    """Return the decision of a matching policy rule; None if the next rule decides."""
    if rule.action in _REFUSALS:
        return RouteDecision(kind="lost", reason=f"the policy rule says {rule.action}", evidence=(rule.text,))
    if rule.action and rule.action != "to_tbl":
        if rule.action.startswith("nop"):
            return None
        return RouteDecision(
            kind="unknown", reason=f"the policy rule {rule.text!r} is not followed", evidence=(rule.text,)
        )
    best = _best(tables.get(rule.table, ()), asked)
    if best is None or best.kind == "throw":
        return None
    length = int(best.destination.rpartition("/")[2])
    if length <= rule.suppress_prefix:
        return None
    named = (rule.text,) if rule.table not in (LOCAL, MAIN, DEFAULT) or rule.mark is not None else ()
    evidence = (*named, best.text) if best.text else named
    if best.kind in _REFUSALS:
        return RouteDecision(kind="lost", reason=_REFUSALS[best.kind], route=best, evidence=evidence)
    if best.kind != "unicast":
        return RouteDecision(kind=best.kind, route=best, source=best.source, evidence=evidence)
    return RouteDecision(kind="unicast", route=best, hops=_shares(best), source=best.source, evidence=evidence)


def _best(routes: Iterable[NodeRoute], asked: RouteQuery) -> NodeRoute | None:
    fitting = [
        (-int(route.destination.rpartition("/")[2]), route.metric, number, route)
        for number, route in enumerate(routes)
        if contains(route.destination, asked.destination)
        and (not asked.oif or route.kind != "unicast" or any(hop.link == asked.oif for hop in route.hops))
        and not (route.kind == "unicast" and route.hops and all(hop.dead for hop in route.hops))
    ]
    return min(fitting)[3] if fitting else None


def _shares(route: NodeRoute) -> tuple[tuple[NextHop, Fraction], ...]:
    alive = [hop for hop in route.hops if not hop.dead]
    total = sum(hop.weight for hop in alive)
    return tuple((hop, Fraction(hop.weight, total)) for hop in alive if hop.weight)


# ---- what comes in -------------------------------------------------------------------------------------------------


class SourceCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the kernel's source validation."""

    passed: bool | None
    """None: not known."""
    reason: str = ""
    evidence: tuple[str, ...] = ()


def check_source(view: NodeView, asked: RouteQuery, out: str = "lo") -> SourceCheck:
    """Validate the source as `fib_validate_source` does: martians and rp_filter.

    `asked` is the packet as it is routed, with its input interface. `out` is the output interface: the kernel looks up the reverse
    route as if the reply came in by it.
    """
    source = asked.source
    if family_of(source) is IPFamily.IPV6 or asked.iif in ("", "lo"):
        return SourceCheck(passed=True)
    if contains("127.0.0.0/8", source) and not _on(view, asked.iif, "route_localnet"):
        return SourceCheck(passed=False, reason=f"{source} is loopback and came in by {asked.iif} (a martian source)")
    mode = _rp_filter(view, asked.iif)
    accepts_local = _on(view, asked.iif, "accept_local")
    if view.own(source) is not None and accepts_local is not True:
        if accepts_local is None and view.sysctls is None:
            return SourceCheck(passed=False, reason=f"{source} is the node's own address and came in by {asked.iif}")
        return SourceCheck(
            passed=False,
            reason=f"{source} is the node's own address and came in by {asked.iif} (a martian source)",
            evidence=(f"net.ipv4.conf.{asked.iif}.accept_local = 0",),
        )
    if mode is None:
        return SourceCheck(passed=None, reason="net.ipv4.conf.*.rp_filter is unknown")
    number, evidence = mode
    if number == 0:
        return SourceCheck(passed=True)
    if view.routes is None:
        return SourceCheck(passed=None, reason="rp_filter is on and the routes are unknown", evidence=evidence)
    mark = asked.mark if _on(view, asked.iif, "src_valid_mark") else 0
    back = look_up(view, RouteQuery(destination=source, source=asked.destination, iif=out, mark=mark))
    return _reverse(back, number, asked, evidence)


def _reverse(back: RouteDecision, mode: int, asked: RouteQuery, evidence: tuple[str, ...]) -> SourceCheck:
    kept = (*evidence, *back.evidence)
    if back.kind == "unknown":
        return SourceCheck(passed=None, reason=back.reason, evidence=kept)
    if back.kind not in ("unicast", "local"):
        return SourceCheck(passed=False, reason=f"rp_filter: no route back to {asked.source}", evidence=kept)
    links = [hop.link for hop, _ in back.hops]
    if mode == 2 or asked.iif in links:
        return SourceCheck(passed=True, evidence=kept)
    reason = (
        f"rp_filter is strict on {asked.iif}, and the route back to {asked.source} leaves by {', '.join(links) or 'lo'}"
    )
    return SourceCheck(passed=False, reason=reason, evidence=kept)


def _rp_filter(view: NodeView, link: str) -> tuple[int, tuple[str, ...]] | None:
    """Return the larger of the interface's setting and that of `all`; loose (2) is larger than strict (1)."""
    names = [f"net.ipv4.conf.{name}.rp_filter" for name in ("all", setting_name(link))]
    values = [view.sysctl(name) for name in names]
    if any(value is None or not value.isdigit() for value in values):
        return None
    numbers = [int(value or 0) for value in values]
    return max(numbers), tuple(f"{name} = {number}" for name, number in zip(names, numbers, strict=True))


def setting_name(link: str) -> str:
    """Return the name of a link as it occurs in the name of a sysctl."""
    return link.replace(".", "/")


def _on(view: NodeView, link: str, name: str) -> bool | None:
    """Return True if the setting is on for the interface or for `all`; None if not known."""
    values = [view.sysctl(f"net.ipv4.conf.{each}.{name}") for each in ("all", setting_name(link))]
    if "1" in values:
        return True
    return None if None in values else False


def localnet(view: NodeView, link: str) -> bool | None:
    """Return True if packets to 127.0.0.0/8 may come in by this link (route_localnet); None if not known."""
    return _on(view, link, "route_localnet")


def forwards(view: NodeView, family: IPFamily, link: str) -> bool | None:
    """Return True if the node forwards packets that came in by this link; None if not known."""
    own = view.sysctl(f"net.ipv{family.value}.conf.{setting_name(link)}.forwarding")
    every = view.sysctl("net.ipv4.ip_forward" if family is IPFamily.IPV4 else "net.ipv6.conf.all.forwarding")
    value = every if family is IPFamily.IPV6 else own if own is not None else every
    return None if value is None else value == "1"
