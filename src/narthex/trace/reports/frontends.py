"""Frontends that a node's rules have, whoever wrote them: kube-proxy in any mode and age, or Narthex.

Chains are known by kube-proxy's names, maps by their keys in the tables of both, virtual servers by themselves. Rules of
others (port maps, firewalls) are no frontends of Services.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from narthex.model.net import IPFamily, Protocol, family_of
from narthex.netfilter.ast import Compare, Field, Goto, Jump, Rule, Table
from narthex.proxy.plan.ir import Match
from narthex.trace.follow.views import NodeRules

_CHAINS = ("KUBE-SERVICES", "KUBE-NODEPORTS")
_LEADS = ("KUBE-SVC-", "KUBE-EXT-", "KUBE-XLB-", "KUBE-FW-", "KUBE-SVL-")
_NFT_TABLES = ("kube-proxy", "narthex")
_PROTOCOLS = {protocol.lower: protocol for protocol in Protocol} | {str(each.number): each for each in Protocol}


class FrontendOrigin(msgspec.Struct, frozen=True):
    """Where a frontend was found."""

    proxy: str
    """Who writes such: `iptables`, `nftables table ip kube-proxy`, `IPVS`. Two of them are two proxies."""
    leads: str
    """Where it leads: a chain, or the virtual server itself."""
    place: str = ""


def frontends(rules: NodeRules, family: IPFamily, own: tuple[str, ...]) -> dict[Match, list[FrontendOrigin]]:
    """All frontends, each with every place that has it. `own` are the node's addresses."""
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
    """What a rule asks of a packet's destination; None when that is no frontend."""
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
