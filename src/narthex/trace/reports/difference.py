"""Differences between two nodes, or two states of one node: what packets meet at each frontend, routes, links, addresses, settings.

Two nodes always differ in their own addresses, in the networks and links of their own pods, and in the routes to each other's pods.
Such differences are folded: only their number is reported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, Literal

import msgspec

from narthex.model import FAMILIES, Disposition, IPFamily, address, family_of, in_any, join_port
from narthex.proxy.backends.sockets.document import SocketDocument
from narthex.proxy.plan.ir import Match, Sender
from narthex.trace.follow.views import NodeLink, NodeView
from narthex.trace.model import fraction_text
from narthex.trace.reports.forwarding import ForwardingResult
from narthex.trace.reports.frontend_walk import FrontendOutcome, FrontendPacket, FrontendWalker, frontends
from narthex.trace.reports.migration.report import MigrationReport, heading
from narthex.trace.reports.senders import Senders, pod_networks

_COUNTERS = re.compile(r"\[\d+:\d+\]|counter packets \d+ bytes \d+|^#.*$|\bexpires \w+|# handle \d+", re.MULTILINE)


class ViewDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One difference."""

    part: str
    """`frontend`, `sockets`, `routes`, `policies`, `links`, `addresses`, `sysctls`, or a file of rules."""
    what: str
    before: str = ""
    """Empty: absent."""
    after: str = ""
    services: tuple[str, ...] = ()
    """The Service ports that it concerns, where objects are compared."""


class FoldedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Differences of one part that two nodes always have."""

    part: str
    count: int


class ViewComparison(msgspec.Struct, frozen=True, kw_only=True):
    """All differences between two views."""

    before: str
    after: str
    found: tuple[ViewDifference, ...] = ()
    unknown: tuple[str, ...] = ()
    """What only one side knows, or what could not be decided."""
    not_compared: tuple[str, ...] = msgspec.field(default=(), name="notCompared")
    """What was not compared."""
    folded: tuple[FoldedPart, ...] = ()
    """Differences that two nodes always have, and that are only counted."""

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


def differences(one: NodeView, other: NodeView, *, folded: bool = True) -> ViewComparison:
    """Compare two views. With `folded`, differences that two nodes always have are only counted."""
    unknown: list[str] = []
    skipped: list[str] = []
    found = [*_meanings(one, other, unknown), *_sockets(one, other, unknown)]
    for part in (*_LINES, "sysctls"):
        before, after = _lines(one, part), _lines(other, part)
        if before is None or after is None:
            if before is not None or after is not None:
                where = one.origin if before is None else other.origin
                unknown.append(f"{part}: unknown in {where}")
            else:
                skipped.append(f"{part} (unknown on either side)")
            continue
        found += _keyed(part, before, after)
    if one.rules is None and other.rules is None:
        skipped.insert(0, "rules (unknown on either side)")
    for text in dict.fromkeys((*_missing(one), *_missing(other))):
        lacking = [view.origin for view in (one, other) if text in _missing(view)]
        if len(lacking) == 2:
            skipped.append(f"{text} (on either side)")
        else:
            unknown.append(f"{text} (in {lacking[0]})")
    counts: tuple[FoldedPart, ...] = ()
    if folded and one.name and other.name and one.name != other.name:
        found, counts = TwoNodes(one, other).fold(found)
    return ViewComparison(
        before=one.origin,
        after=other.origin,
        found=tuple(found),
        unknown=tuple(unknown),
        not_compared=(*skipped, *_never_compared(one, other)),
        folded=counts,
    )


def of_modes(report: MigrationReport) -> ViewComparison:
    """Return what a change of mode changes as differences between the two modes."""
    packets = (
        ViewDifference(
            part="packets", what=heading(group), before=group.before, after=group.after, services=group.services
        )
        for group in report.groups
    )
    others = (
        ViewDifference(part="behaviour", what=each.what, before=each.before, after=each.after, services=each.services)
        for each in report.differences
    )
    return ViewComparison(before=f"mode {report.before}", after=f"mode {report.after}", found=(*packets, *others))


_PROXY_TABLES = ("", "nat", "filter", "kube-proxy")
"""Tables whose absence from a copied text hides rules for Services."""


def _missing(view: NodeView) -> list[str]:
    """Return what the rules of a copied text lack, and which parts of it could not be read."""
    if view.rules is None or not view.copied:
        return []
    held = [view.rules[family] for family in FAMILIES]
    gaps = [gap.text for rules in held if rules.ruleset.tables for gap in rules.gaps if gap.table in _PROXY_TABLES]
    return list(dict.fromkeys((*gaps, *view.partial, *(text for rules in held for text in rules.unread))))


_VOLATILE = ("neighbours", "fdb", "connections", "listeners")


def _never_compared(one: NodeView, other: NodeView) -> Iterator[str]:
    """Yield what differs from minute to minute, and the packets that are not tried."""
    held = [part for part in _VOLATILE if getattr(one, part) is not None or getattr(other, part) is not None]
    if held:
        yield f"{', '.join(held)} (they change all the time)"
    if one.rules is not None and other.rules is not None:
        yield "packets to addresses of no Service, and packets that the nodes themselves send"


# ---- meaning -------------------------------------------------------------------------------------------------------


def _meanings(one: NodeView, other: NodeView, unknown: list[str]) -> Iterator[ViewDifference]:
    if one.rules is None or other.rules is None:
        if (one.rules is None) is not (other.rules is None):
            unknown.append(f"rules: unknown in {one.origin if one.rules is None else other.origin}")
        return
    for family in FAMILIES:
        sides = [_Side(view, family) for view in (one, other)]
        matches = sorted(
            {match for side in sides for match in side.known},
            key=lambda match: (match[0] or "", match[1].value, match[2]),
        )
        classes = [Sender.OTHER, *([Sender.POD] if all(side.pods for side in sides) else [])]
        for match in matches:
            seen: set[tuple[str, str]] = set()
            for sender in classes:
                before, after = (side.outcome(match, sender) for side in sides)
                if before != after and (before, after) not in seen:
                    seen.add((before, after))
                    asker = " from a pod" if sender is Sender.POD else ""
                    yield ViewDifference(part="frontend", what=f"{_text(match)}{asker}", before=before, after=after)


class _Side:
    """The frontends of one view, and what happens to packets there."""

    def __init__(self, view: NodeView, family: IPFamily) -> None:
        assert view.rules is not None
        self._own = tuple(ip for ip in view.own_addresses(("kube-ipvs0",)) if family_of(ip) is family)
        self.pods = pod_networks(view, family)
        self.known = frontends(view.rules[family], family, self._own)
        self._walker = FrontendWalker(view, family, self._own)
        self._senders = Senders(view, family, self.pods, self._own)

    def outcome(self, match: Match, sender: Sender) -> str:
        """Return what happens to a packet at a frontend, as text."""
        address, protocol, port = match
        to = address or (self._own[0] if self._own else "")
        if not to:
            return "unknown: no address of the node is known"
        source = self._senders.of(sender, None, to)
        assert source is not None
        outside = sender is not Sender.POD
        packet = FrontendPacket(
            source=source.address, destination=to, protocol=protocol, port=port, iif=source.iif, outside=outside
        )
        return _outcome_text(self._walker.outcome(packet))


def _outcome_text(outcome: FrontendOutcome) -> str:
    if outcome.unknown:
        return f"unknown: {outcome.unknown}"
    if outcome.endpoints:
        shares = sorted(outcome.endpoints.items())
        return ", ".join(
            f"{fraction_text(share)} to {join_port(*endpoint)}{_forwarding_text(outcome.forwarding.get(endpoint))}"
            for endpoint, share in shares
        )
    return "no rule" if outcome.fate is Disposition.NOT_OURS else outcome.fate.value


def _forwarding_text(result: ForwardingResult | None) -> str:
    if result is None:
        return ""
    if result.obstacle is not None:
        return f" ({result.obstacle.fate.value}: {result.obstacle.reason})"
    return " (masqueraded)" if result.masqueraded else ""


def _text(match: Match) -> str:
    address, protocol, port = match
    return f"{join_port(address, port) if address else f'node port {port}'}/{protocol.lower}"


# ---- socket load balancing -----------------------------------------------------------------------------------------


def _sockets(one: NodeView, other: NodeView, unknown: list[str]) -> Iterator[ViewDifference]:
    """Yield what sockets of pods and of the node meet at a frontend, before the rules."""
    views = one, other
    lacking = [view for view in views if "sockets" in view.absent]
    if lacking:
        unknown += [f"sockets: unknown in {view.origin}: {view.absent['sockets']}" for view in lacking]
        return
    if one.sockets is None or other.sockets is None:
        if one.sockets is not other.sockets:
            before, after = ("" if view.sockets is None else "on" for view in views)
            yield ViewDifference(part="sockets", what="socket load balancing", before=before, after=after)
        return
    yield from _keyed("sockets", _socket_lines(one.sockets), _socket_lines(other.sockets))
    hooks = [" ".join(each.hooks) if each.hooks is not None else None for each in (one.sockets, other.sockets)]
    if None not in hooks and hooks[0] != hooks[1]:
        yield ViewDifference(part="sockets", what="attached programs", before=hooks[0] or "", after=hooks[1] or "")


def _socket_lines(held: SocketDocument) -> dict[str, str]:
    """Return what is done to sockets, by frontend and sender. What is left to the rules is left out."""
    lines: dict[str, str] = {}
    for each in held.frontends:
        where = f"{join_port(each.address, each.port)}/{each.protocol.lower()}"
        for who, action in (("a pod", each.pods), ("the node", each.node)):
            pool = Counter({"cluster": each.cluster, "local": each.local}.get(action, ()))
            slots = sum(pool.values()) + each.empty
            text = ", ".join(
                f"{fraction_text(Fraction(count, slots))} to {join_port(*endpoint)}"
                for endpoint, count in sorted(pool.items())
            )
            if action == "reject":
                text = "refused"
            if text and each.least_connections:
                text += " by least connections"
            if text and who == "the node" and each.unbound_only:
                text += " (without a source address)"
            if text:
                lines[f"{where} from {who}"] = text
    return lines


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


# ---- what two nodes always differ in ---------------------------------------------------------------------------------

_WORD = re.compile(r"(?<![\w.:])(?:\d+\.\d+\.\d+\.\d+|[0-9a-f]*:[0-9a-f:.]*)(?:/\d+)?")
_PORT = re.compile(r":(\d+)$")
_AGAIN = re.compile(r" \(\d+\)$")


class TwoNodes:
    """Writes the differences of two nodes in terms of the node itself and of the other one, and removes those that are then equal."""

    def __init__(self, one: NodeView, other: NodeView) -> None:
        """Take the two views."""
        self._views = one, other
        self._own = [{each.address: each.link for each in view.addresses or ()} for view in self._views]
        self._pods = [tuple(cidr for family in FAMILIES for cidr in pod_networks(view, family)) for view in self._views]
        self._veths = [{link.name for link in view.links or () if link.kind == "veth"} for view in self._views]

    def fold(self, found: Iterable[ViewDifference]) -> tuple[list[ViewDifference], tuple[FoldedPart, ...]]:
        """Return the differences that remain, and the numbers of those that do not."""
        kept: list[ViewDifference] = []
        counts: dict[str, int] = {}
        waiting: dict[tuple[str, str, str], list[tuple[int, ViewDifference]]] = {}
        for each in found:
            if self._of_own_pods(each):
                counts[each.part] = counts.get(each.part, 0) + 1
                continue
            kept.append(each)
            for side, text in enumerate((each.before, each.after)):
                if text:
                    form = each.part, self._form(_AGAIN.sub("", each.what), side), self._form(text, side)
                    waiting.setdefault(form, []).append((side, each))
        paired: dict[int, int] = {}
        for held in waiting.values():
            sides = [[each for side, each in held if side == number] for number in (0, 1)]
            for one, other in zip(*sides, strict=False):
                for each in (one, other):
                    paired[id(each)] = paired.get(id(each), 0) + 1
        remaining = []
        for each in kept:
            # A difference with two sides is folded if both have their counterpart.
            if paired.get(id(each), 0) >= bool(each.before) + bool(each.after):
                counts[each.part] = counts.get(each.part, 0) + 1
            else:
                remaining.append(each)
        return remaining, tuple(FoldedPart(part=part, count=count) for part, count in counts.items())

    def _of_own_pods(self, each: ViewDifference) -> bool:
        """Return True for links, settings, and routes of single pods, and for endpoints that are the node's own on each side."""
        if each.part in ("frontend", "sockets"):
            return all(self._only_own_pods(text, side) for side, text in enumerate((each.before, each.after)))
        names = self._veths[0] | self._veths[1]
        if each.part == "links":
            return each.what in names
        if each.part == "sysctls":
            return any(part in names for part in each.what.replace("/", ".").split("."))
        words = set(f"{each.before} {each.after}".split())
        return each.part == "routes" and bool(words & names)

    def _only_own_pods(self, text: str, side: int) -> bool:
        """Return True if packets go only to pods of this node, as a Local policy has it."""
        ends = [end.split(" ")[0] for end in re.findall(r" to (\S+)", text)]
        addresses = [_PORT.sub("", end.rstrip(",")).strip("[]") for end in ends]
        blocked = "(" in text.replace("(masqueraded)", "").replace("(without a source address)", "")
        return bool(addresses) and not blocked and all(self._is_pod(ip, side) for ip in addresses)

    def _is_pod(self, address: str, side: int) -> bool:
        return in_any(self._pods[side], address)

    def _form(self, text: str, side: int) -> str:
        """Return a text with roles in place of the addresses and networks of both nodes."""
        return _WORD.sub(lambda found: self._role(found[0], side), text)

    def _role(self, word: str, side: int) -> str:
        base, slash, bits = word.partition("/")
        try:
            address(base)
        except ValueError:
            return word
        for number, who in ((side, "own"), (1 - side, "other's")):
            if base in self._own[number]:
                return f"<{who} address on {self._own[number][base]}>{slash}{bits}"
            if in_any(self._pods[number], base):
                return f"<{who} pods>{slash}{bits}"
        return word
