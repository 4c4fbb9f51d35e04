"""Differences between two nodes, or two states of one node: outcomes at each frontend, routes, links, addresses, and settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec

from narthex.model.net import FAMILIES, IPFamily, family_of, join_port
from narthex.model.packet import Disposition
from narthex.proxy.plan.ir import Match
from narthex.trace.follow.meeting import FrontendOutcome, frontends, meet
from narthex.trace.follow.views import NodeLink, NodeView
from narthex.trace.model import fraction_text

_OUTSIDE = {IPFamily.IPV4: "198.51.100.7", IPFamily.IPV6: "2001:db8:c::7"}
_COUNTERS = re.compile(r"\[\d+:\d+\]|counter packets \d+ bytes \d+|^#.*$|\bexpires \w+|# handle \d+", re.MULTILINE)


class ViewDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One difference."""

    part: str
    """`frontend`, `routes`, `policies`, `links`, `addresses`, `sysctls`, or a file of rules."""
    what: str
    before: str = ""
    """Empty: absent."""
    after: str = ""


class ViewComparison(msgspec.Struct, frozen=True, kw_only=True):
    """All differences between two views."""

    before: str
    after: str
    found: tuple[ViewDifference, ...] = ()
    unknown: tuple[str, ...] = ()
    """What could not be compared."""

    @property
    def status(self) -> int:
        """The exit status: 0 without differences, 1 with differences, 2 if nothing differs and something could not be compared."""
        return 1 if self.found else 2 if self.unknown else 0


class DiffDocument(ViewComparison, frozen=True, kw_only=True, tag_field="kind", tag="diff"):
    """What `narthex diff -o json` prints."""

    version: Literal[1] = 1
    exit_status: int = msgspec.field(name="status")


def diff_document(comparison: ViewComparison) -> DiffDocument:
    """Return the document for a comparison."""
    return DiffDocument(exit_status=comparison.status, **msgspec.structs.asdict(comparison))


def differences(one: NodeView, other: NodeView) -> ViewComparison:
    """Compare two views."""
    unknown: list[str] = []
    found = [*_meanings(one, other, unknown)]
    for part in (*_LINES, "sysctls"):
        before, after = _lines(one, part), _lines(other, part)
        if before is None or after is None:
            if (before is None) is not (after is None):
                where = one.origin if before is None else other.origin
                unknown.append(f"{part}: not known in {where}")
            continue
        found += _keyed(part, before, after)
    return ViewComparison(before=one.origin, after=other.origin, found=tuple(found), unknown=tuple(unknown))


# ---- meaning -------------------------------------------------------------------------------------------------------


def _meanings(one: NodeView, other: NodeView, unknown: list[str]) -> Iterator[ViewDifference]:
    if one.rules is None or other.rules is None:
        if (one.rules is None) is not (other.rules is None):
            unknown.append(f"rules: not known in {one.origin if one.rules is None else other.origin}")
        return
    for family in FAMILIES:
        own = [_own(view, family) for view in (one, other)]
        held = [view.rules[family] for view in (one, other) if view.rules is not None]
        known = [frontends(rules, family, mine) for rules, mine in zip(held, own, strict=True)]
        matches = sorted({*known[0], *known[1]}, key=lambda match: (match[0] or "", match[1].value, match[2]))
        for match in matches:
            outcomes = [_met(view, mine, match, family) for view, mine in zip((one, other), own, strict=True)]
            if outcomes[0] != outcomes[1]:
                yield ViewDifference(part="frontend", what=_text(match), before=outcomes[0], after=outcomes[1])


def _met(view: NodeView, own: tuple[str, ...], match: Match, family: IPFamily) -> str:
    """Return what happens to a packet from outside at a frontend, as text."""
    address, protocol, port = match
    to = address or (own[0] if own else "")
    if not to:
        return "not known: no address of the node is known"
    uplink = next(
        (
            route.hops[0].link
            for route in view.routes or ()
            if route.destination in ("0.0.0.0/0", "::/0") and route.hops and family_of(route.destination) is family
        ),
        "eth0",
    )
    return _meeting_text(meet(view, _OUTSIDE[family], to, protocol, port, uplink, own))


def _meeting_text(met: FrontendOutcome) -> str:
    if met.unknown:
        return f"not known: {met.unknown}"
    if met.endpoints:
        shares = sorted(met.endpoints.items())
        return ", ".join(f"{fraction_text(share)} to {join_port(*endpoint)}" for endpoint, share in shares)
    return "no rule" if met.fate is Disposition.NOT_OURS else met.fate.value


def _own(view: NodeView, family: IPFamily) -> tuple[str, ...]:
    return tuple(ip for ip in view.own_addresses(("kube-ipvs0",)) if family_of(ip) is family)


def _text(match: Match) -> str:
    address, protocol, port = match
    return f"{join_port(address, port) if address else f'node port {port}'}/{protocol.lower}"


# ---- parts ---------------------------------------------------------------------------------------------------------


def _lines(view: NodeView, part: str) -> dict[str, str] | None:
    """Return a part as comparable lines, by what they are about."""
    if part == "sysctls":
        held = view.sysctls
        return None if held is None else {name: held[name] for name in held if not name.endswith("nf_conntrack_count")}
    entries = getattr(view, part)
    if entries is None:
        return None
    lines = map(_LINES[part], entries)
    return _numbered(lines) if part in ("routes", "policies") else dict(lines)


def _link_line(link: NodeLink) -> tuple[str, str]:
    words = [link.kind or "link", f"mtu {link.mtu}", "up" if link.up else "down"]
    words += [f"master {link.master}"] if link.master else []
    if link.kind == "vxlan":
        words.append(f"id {link.vxlan_id} local {link.vxlan_local} port {link.vxlan_port}")
    return link.name, " ".join(words)


_LINES: dict[str, Callable[[Any], tuple[str, str]]] = {
    "routes": lambda route: (f"{route.destination} table {route.table}", route.text),
    "policies": lambda rule: (f"{rule.family.nft} rule {rule.priority}", rule.text),
    "links": _link_line,
    "addresses": lambda held: (f"{held.address}/{held.prefix}", f"on {held.link}"),
}


def _numbered(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return lines by name; several of one name get a number each."""
    found: dict[str, str] = {}
    for name, text in pairs:
        key, number = name, 1
        while key in found:
            number += 1
            key = f"{name} ({number})"
        found[key] = text
    return found


def _keyed(part: str, before: dict[str, str], after: dict[str, str]) -> Iterator[ViewDifference]:
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            yield ViewDifference(part=part, what=key, before=before.get(key, ""), after=after.get(key, ""))


def rules_in_text(before: dict[str, str], after: dict[str, str]) -> Iterator[ViewDifference]:
    """Yield lines of rules that only one side has, file by file, without counters and comments."""
    for name in sorted({*before, *after}):
        if not name.startswith("rules/") or name.endswith(("nft.json", "stats.txt")):
            continue
        one, other = (_plain(side.get(name, "")) for side in (before, after))
        gone = [line for line in one if line not in set(other)]
        come = [line for line in other if line not in set(one)]
        if gone or come:
            what = f"{len(gone)} line(s) only before, {len(come)} only after"
            yield ViewDifference(part=name, what=what, before="\n".join(gone[:5]), after="\n".join(come[:5]))


def _plain(text: str) -> list[str]:
    return [line.strip() for line in _COUNTERS.sub("", text).splitlines() if line.strip()]
