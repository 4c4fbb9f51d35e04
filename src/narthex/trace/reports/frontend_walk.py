"""The frontends that a node's rules have, and what happens to a packet there.

The rules up to the rewriting are walked for each packet, and what follows for one packet of each class (see `forwarding`), so that
thousands of frontends are checked in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

import msgspec

from narthex.model import Disposition, Host, IPFamily, Packet, Protocol, WalkStep, family_of
from narthex.netfilter.ast import Compare, Field, Goto, Jump, Rule, Table, VerdictMap
from narthex.netfilter.lazy import base_chains
from narthex.netfilter.walk.state import AFTER_INPUT, BEFORE_INPUT
from narthex.netfilter.walk.walk import Branch, BranchEnd, HookPoint, HookWalk
from narthex.proxy.plan.ir import Match
from narthex.trace.follow.views import NodeRules, NodeView
from narthex.trace.model import Header
from narthex.trace.reports.forwarding import Endpoint, ForwardingResult, ForwardingWalker

_OURS = ("KUBE-", "kube-proxy", "narthex")


class FrontendOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to a packet at a frontend."""

    endpoints: dict[Endpoint, Fraction]
    """Destinations with their probabilities."""
    fate: Disposition = Disposition.NOT_OURS
    """What happens to the share that is sent nowhere."""
    unknown: str = ""
    forwarding: Mapping[Endpoint, ForwardingResult] = {}
    """What happens to the packet to each endpoint after the rewriting."""
    outside: bool = True
    """The sender is no pod of the cluster."""
    untracked: bool = False
    """Rules prevent the rewriting (`notrack`), as for a DNS cache on the node itself."""
    relayed: bool = False
    """A relay on the node accepts it (userspace mode), so that no rule names the endpoint."""


_RELAYS = ("KUBE-PORTAL", "KUBE-NODEPORT-")
"""Chains of userspace mode, by kube-proxy's names and ours."""


class FrontendPacket(msgspec.Struct, frozen=True, kw_only=True):
    """A packet to a frontend."""

    source: str
    destination: str
    protocol: Protocol
    port: int
    iif: str
    outside: bool = True
    """The sender is no pod of the cluster."""


class FrontendWalker:
    """Walks packets to the frontends of one node through its rules."""

    def __init__(self, view: NodeView, family: IPFamily, own: tuple[str, ...]) -> None:
        """Prepare for packets of an IP family. The rules must be known; `own` are the node's addresses."""
        assert view.rules is not None
        self._view = view
        self._held = view.rules[family]
        self._own = own
        self._forwarding = ForwardingWalker(view, self._held, family, own)

    @property
    def left_out(self) -> int:
        """Return the number of rewritten packets that were not followed any further."""
        return self._forwarding.left_out

    def outcome(self, asked: FrontendPacket) -> FrontendOutcome:
        """Walk prerouting, and for packets that it doesn't rewrite, input with IPVS or forward; then what follows for the others."""
        walk = self._walk(asked, explained=False)
        branches, ended = walk.hook(HookPoint("prerouting", iif=asked.iif), [walk.start()])
        sent = [branch for branch in branches if branch.dnat and not branch.doubt]
        rest = [branch for branch in branches if not branch.dnat and not branch.doubt]
        untracked = any(not branch.tracked for branch in rest)
        if rest and walk.local(asked.destination):
            place = HookPoint("input", iif=asked.iif)
            rest, off = walk.hook(place, rest, span=BEFORE_INPUT)
            ended += off
            rest, away, off = walk.balance("input", [each for each in rest if not each.doubt])
            ended += off
            sent += [*away, *(each for each in rest if each.served is not None)]
            rest, off = walk.hook(place, [each for each in rest if each.served is None], span=AFTER_INPUT)
            ended += off
        elif rest:
            oif = self._forwarding.link_to(asked.source, asked.destination, asked.iif)
            rest, off = walk.hook(HookPoint("forward", iif=asked.iif, oif=oif), rest)
            ended += off
        endpoints: dict[Endpoint, Fraction] = {}
        for branch in sent:
            key = branch.daddr, branch.dport
            held = endpoints.get(key)
            endpoints[key] = branch.probability if held is None else held + branch.probability
        return FrontendOutcome(
            endpoints=endpoints,
            fate=_fate(ended),
            unknown=_unknown(ended) or ("" if sent else self._lost(asked)),
            forwarding=self._forwarding.results(_header(asked), asked.iif, sent),
            outside=asked.outside,
            untracked=untracked,
            relayed=len(endpoints) == 1
            and all(walk.local(address) for address, _ in endpoints)
            and self._rewriting(asked).chain.startswith(_RELAYS),
        )

    def _lost(self, asked: FrontendPacket) -> str:
        """Return why the text of the rules may lack one that rewrites the packet, which no rule does; otherwise empty."""
        if not self._held.assumed.copied:
            return ""
        walk = self._walk(asked, explained=False, assumed=True)
        branches, ended = walk.hook(HookPoint("prerouting", iif=asked.iif), [walk.start()])
        return next((branch.unsure for branch in branches if branch.unsure and not branch.sent), "") or _unknown(ended)

    def foreign(self, asked: FrontendPacket) -> str:
        """Return the rule that rewrote the packet, if it isn't a Service rule; otherwise empty."""
        last = self._rewriting(asked)
        if not last.where or last.chain.startswith(_OURS) or last.table.startswith(_OURS):
            return ""
        return f"{last.where}: {last.what}"

    def _walk(self, asked: FrontendPacket, *, explained: bool, assumed: bool = False) -> HookWalk:
        packet = Packet(
            source=asked.source, destination=asked.destination, port=asked.port, protocol=asked.protocol, iif=asked.iif
        )
        held = self._held
        rules = held.assumed if assumed else held.ruleset
        return HookWalk(rules, packet, Host(addresses=self._own), objects=held.objects, explained=explained)

    def _rewriting(self, asked: FrontendPacket) -> WalkStep:
        """Return the last step of prerouting for a packet that it rewrites; a step without texts if there is none."""
        walk = self._walk(asked, explained=True)
        branches, _ = walk.hook(HookPoint("prerouting", iif=asked.iif), [walk.start()])
        steps = next((branch.steps() for branch in branches if branch.dnat and not branch.doubt), ())
        return steps[-1] if steps else WalkStep(where="", what="")


def _header(asked: FrontendPacket) -> Header:
    return Header(
        source=asked.source,
        destination=asked.destination,
        protocol=asked.protocol.lower,
        port=asked.port,
        iif=asked.iif,
    )


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
    rewrites: bool = True
    """It sends packets to endpoints. A frontend may also have an element that only filters: source ranges, or no endpoints."""


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
            if not rule.target.startswith(_LEADS):
                continue
            match = frontend_of_rule(rule)
            if match is not None and (match[0] is None) == (name == "KUBE-NODEPORTS"):
                yield match, FrontendOrigin("iptables", rule.target, rules.place(table.name, name, number)[0])


def frontend_of_rule(rule: Rule) -> Match | None:
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
    rewriting = _nat_maps(table)
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
            address = str(named[Field.DADDR]) if Field.DADDR in named else None
            yield (address, protocol, port), FrontendOrigin(title, data.chain, rewrites=held.name in rewriting)


def _nat_maps(table: Table) -> set[str]:
    """Return the verdict maps that the rules of nat chains use, without following the verdicts of their elements."""
    todo = [chain.name for chain in base_chains(table.chains) if chain.hook is not None and chain.hook.type == "nat"]
    seen: set[str] = set()
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen or name not in table.chains:
            continue
        seen.add(name)
        chain = table.chains[name]
        todo += chain.targets
        found |= {each.map for rule in chain.rules for each in rule.expressions if isinstance(each, VerdictMap)}
    return found
