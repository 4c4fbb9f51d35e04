"""The frontends that a node's rules have, and what happens to a packet there.

Only the Service rules are walked, so that thousands of frontends are checked in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import msgspec

from narthex.model.net import IPFamily, Protocol, family_of
from narthex.model.packet import Disposition, Host, Packet, WalkStep
from narthex.netfilter.ast import Compare, Field, Goto, Jump, Rule, Table
from narthex.netfilter.walk.ipvs import AFTER_INPUT, BEFORE_INPUT
from narthex.netfilter.walk.walk import Branch, BranchEnd, HookPoint, HookWalk
from narthex.proxy.plan.ir import Match
from narthex.trace.follow.views import NodeRules, NodeView

_OURS = ("KUBE-", "kube-proxy", "narthex")


class FrontendOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to a packet at a frontend."""

    endpoints: dict[tuple[str, int], Fraction]
    """Destinations with their probabilities."""
    fate: Disposition = Disposition.NOT_OURS
    """What happens to the share that is sent nowhere."""
    unknown: str = ""
    first: Branch | None = None
    """An alternative on which the packet is rewritten."""
    outside: bool = True
    """The sender is no pod of the cluster."""
    untracked: bool = False
    """Rules prevent the rewriting (`notrack`), as for a DNS cache on the node itself."""

    @property
    def foreign(self) -> str:
        """The rule that rewrote it, if it isn't a Service rule; otherwise empty."""
        return _foreign(self.first.steps()) if self.first is not None else ""

    @property
    def relayed(self) -> bool:
        """True if a relay on the node accepts it (userspace mode), so that no rule names the endpoint."""
        steps = self.first.steps() if self.first is not None else ()
        return bool(steps) and steps[-1].chain.startswith(_RELAYS)


_RELAYS = ("KUBE-PORTAL", "KUBE-NODEPORT-")
"""Chains of userspace mode, by kube-proxy's names and ours."""


def meet(
    view: NodeView,
    source: str,
    destination: str,
    protocol: Protocol,
    port: int,
    iif: str,
    own: tuple[str, ...],
    *,
    outside: bool = True,
) -> FrontendOutcome:
    """Walk prerouting, and for packets that it doesn't rewrite, input with IPVS or forward. The rules must be known."""
    assert view.rules is not None
    held = view.rules[family_of(destination)]
    packet = Packet(source=source, destination=destination, port=port, protocol=protocol, iif=iif)
    walk = HookWalk(held.ruleset, packet, Host(addresses=own), objects=held.objects)
    endpoints: dict[tuple[str, int], Fraction] = {}
    first: Branch | None = None
    branches, ended = walk.hook(HookPoint("prerouting", iif=iif), [walk.start()])
    rest: list[Branch] = []
    for branch in branches:
        if branch.doubt:
            continue
        if branch.dnat:
            _add(endpoints, branch)
            first = first or branch
        else:
            rest.append(branch)
    untracked = any(not branch.tracked for branch in rest)
    if rest and walk.local(destination):
        place = HookPoint("input", iif=iif)
        rest, off = walk.hook(place, rest, span=BEFORE_INPUT)
        ended += off
        rest, away, off = walk.balance("input", [each for each in rest if not each.doubt])
        ended += off
        for branch in (*away, *(each for each in rest if each.served is not None)):
            _add(endpoints, branch)
        rest, off = walk.hook(place, [each for each in rest if each.served is None], span=AFTER_INPUT)
        ended += off
    elif rest:
        rest, off = walk.hook(HookPoint("forward", iif=iif, oif=None), rest)
        ended += off
    return FrontendOutcome(
        endpoints=endpoints,
        fate=_fate(ended),
        unknown=_unknown(ended),
        first=first,
        outside=outside,
        untracked=untracked,
    )


def _add(endpoints: dict[tuple[str, int], Fraction], branch: Branch) -> None:
    key = branch.daddr, branch.dport
    endpoints[key] = endpoints.get(key, Fraction(0)) + branch.probability


def _foreign(steps: tuple[WalkStep, ...]) -> str:
    """Return the rule that rewrote the destination, unless it is in a chain of a Service proxy."""
    last = steps[-1] if steps else None
    if last is None or last.chain.startswith(_OURS) or last.table.startswith(_OURS):
        return ""
    return f"{last.where}: {last.what}"


def _fate(ended: list[tuple[Branch, BranchEnd]]) -> Disposition:
    known = [end.disposition for branch, end in ended if not branch.doubt]
    return next((each for each in known if each is not Disposition.UNSUPPORTED), Disposition.NOT_OURS)


def _unknown(ended: list[tuple[Branch, BranchEnd]]) -> str:
    return next(
        (end.note for branch, end in ended if not branch.doubt and end.disposition is Disposition.UNSUPPORTED), ""
    )


_CHAINS = ("KUBE-SERVICES", "KUBE-NODEPORTS")
_LEADS = ("KUBE-SVC-", "KUBE-EXT-", "KUBE-XLB-", "KUBE-FW-", "KUBE-SVL-")
_NFT_TABLES = ("kube-proxy", "narthex")
_PROTOCOLS = {protocol.lower: protocol for protocol in Protocol} | {str(each.number): each for each in Protocol}


class FrontendOrigin(msgspec.Struct, frozen=True):
    """A rule, map element, or virtual server that implements a frontend."""

    proxy: str
    """What writes such rules: `iptables`, `nftables table ip kube-proxy`, `IPVS`."""
    leads: str
    """The chain that it leads to, or the virtual server itself."""
    place: str = ""


def frontends(rules: NodeRules, family: IPFamily, own: tuple[str, ...]) -> dict[Match, list[FrontendOrigin]]:
    """Return all frontends of the rules, each with all its origins. `own` are the node's addresses.

    Chains are recognized by kube-proxy's names, maps by their keys in the tables of both proxies. Rules of other programs (port
    maps, firewalls) are no frontends of Services.
    """
    found: dict[Match, list[FrontendOrigin]] = {}
    for table in rules.ruleset.tables:
        if table.family not in (None, family):
            continue
        pairs = _of_chains(rules, table) if table.name == "nat" else ()
        if table.name in _NFT_TABLES or table.name.startswith("narthex"):
            pairs = _of_maps(table)
        for match, place in pairs:
            found.setdefault(match, []).append(place)
    for address, protocol, port in rules.objects.servers:
        if family_of(address) is family and port:
            match = (None if address in own else address, protocol, port)
            held = found.setdefault(match, [])
            if not any(each.proxy == "IPVS" for each in held):
                held.append(FrontendOrigin("IPVS", f"virtual server {address}"))
    return found


def _of_chains(rules: NodeRules, table: Table) -> Iterator[tuple[Match, FrontendOrigin]]:
    for name in _CHAINS:
        if name not in table.chains:
            continue
        for number, rule in enumerate(table.chains[name].rules):
            leads = next((each.chain for each in rule.expressions if isinstance(each, (Jump, Goto))), "")
            if not leads.startswith(_LEADS):
                continue
            match = _match(rule)
            if match is not None and (match[0] is None) == (name == "KUBE-NODEPORTS"):
                yield match, FrontendOrigin("iptables", leads, rules.place(table.name, name, number)[0])


def _match(rule: Rule) -> Match | None:
    """Return the destination that a rule matches; None if it is no frontend."""
    address: str | None = None
    protocol: Protocol | None = None
    port: int | None = None
    for each in rule.expressions:
        if not isinstance(each, Compare) or each.negate or len(each.values) != 1:
            continue
        value = each.values[0]
        if each.field is Field.DADDR:
            base, _, bits = str(value).partition("/")
            if bits not in ("", "32", "128"):
                continue
            address = base
        elif each.field is Field.L4PROTO:
            protocol = _PROTOCOLS.get(str(value))
        elif each.field is Field.DPORT and isinstance(value, int):
            port = value
    return None if protocol is None or port is None else (address, protocol, port)


def _of_maps(table: Table) -> Iterator[tuple[Match, FrontendOrigin]]:
    title = f"nftables table {table.name}"
    for held in table.sets.values():
        if held.data != "verdict":
            continue
        fields = held.key
        for key, data in held.elements.items():
            if not isinstance(data, (Jump, Goto)) or len(key) != len(fields):
                continue
            named = dict(zip(fields, key, strict=True))
            protocol = _PROTOCOLS.get(str(named.get(Field.L4PROTO)))
            port = named.get(Field.DPORT)
            if protocol is None or not isinstance(port, int) or Field.SADDR in named:
                continue
            address = named.get(Field.DADDR)
            yield (str(address) if address is not None else None, protocol, port), FrontendOrigin(title, data.chain)
