"""The frontends of Services in a space of packets, by plans and by rules, and what packets without a frontend are sent to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from narthex.model import IPFamily, Protocol, family_of, join_port
from narthex.netfilter.ast import DropPacket, RejectPacket, Table
from narthex.netfilter.sets.space import DADDR, DPORT, PROTOCOL, Box, PacketSpace
from narthex.netfilter.sets.values import EMPTY, ValueSet, union, values
from narthex.proxy.plan.ir import FrontendKind, Match, Plan
from narthex.trace.follow.views import NodeRules
from narthex.trace.names import service_of_chain, service_of_comment
from narthex.trace.proof.describe import PROTOCOL_NAMES, addresses_text, numbers_text
from narthex.trace.reports.frontend_walk import frontend_of_rule, frontends

_MANY_PORTS, _MANY_PROTOCOLS = 60_000, 200
"""Numbers of ports and protocols from which a class stands for all that are not a Service's."""
_OTHER_PORTS = "addresses of Services at other ports"
_REFUSING = ("KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS")
"""Chains whose rules of table filter refuse or drop packets to a Service, with its name in the comment."""
_NUMBERS = {each: each.number for each in Protocol}


class FrontendName(NamedTuple):
    """A frontend in words."""

    service: str
    """`shop/web:http`; empty if nothing names the Service."""
    kind: str
    """`cluster IP`, `node port`, …, or `frontend` where only rules are known."""
    at: str
    """`10.96.0.5:80/TCP`, or `30080/TCP` for a node port."""


_Key = tuple[int, int]
"""Protocol and port."""


class NamedFrontends:
    """Frontends by destination."""

    def __init__(self, space: PacketSpace) -> None:
        """Start without frontends."""
        self._space = space
        self._exact: dict[int, dict[_Key, FrontendName]] = {}
        self._by_port: dict[_Key, FrontendName] = {}
        self._addresses = EMPTY
        self._service_networks = EMPTY

    def add_plan(self, plan: Plan) -> None:
        """Add the frontends of a plan. Those that are known already keep their names."""
        for service in plan.services.values():
            for frontend in service.frontends:
                self._add(frontend.match, str(service.name), frontend.kind.value)
        self._service_networks = union((self._service_networks, self._space.networks(plan.service_cidrs)))
        self._addresses = values(*self._exact)

    def add_rules(self, rules: NodeRules, family: IPFamily, own: tuple[str, ...]) -> None:
        """Add the frontends that rules have, with the names that chains and comments tell."""
        chains = {name: chain for table in rules.ruleset.tables for name, chain in table.chains.items()}
        for match, origins in frontends(rules, family, own).items():
            leads = [each.leads for each in origins]
            comments = (rule.comment for name in leads if name in chains for rule in chains[name].rules)
            named = (*map(service_of_chain, leads), *map(service_of_comment, comments))
            kind = FrontendKind.NODE_PORT.value if match[0] is None else "frontend"
            self._add(match, next(filter(None, named), ""), kind)
        for table in rules.ruleset.tables:
            if table.family in (None, family):
                self._add_refusing(table)
        self._addresses = values(*self._exact)

    def _add_refusing(self, table: Table) -> None:
        """Add the frontends whose packets kube-proxy's rules refuse or drop: no chain of a Service has them."""
        for chain in (table.chains[name] for name in _REFUSING if name in table.chains):
            for rule in chain.rules:
                match, service = frontend_of_rule(rule), service_of_comment(rule.comment)
                refuses = any(isinstance(each, (DropPacket, RejectPacket)) for each in rule.expressions)
                if match is None or not service or not refuses or not self._is_of_family(match):
                    continue
                self._add(match, service, FrontendKind.NODE_PORT.value if match[0] is None else "frontend")

    def _is_of_family(self, match: Match) -> bool:
        return match[0] is None or family_of(match[0]) is self._space.family

    def _add(self, match: Match, service: str, kind: str) -> None:
        address, protocol, port = match
        at = f"{port if address is None else join_port(address, port)}/{protocol.value}"
        held = self._by_port if address is None else self._exact.setdefault(self._space.address(address), {})
        key = _NUMBERS[protocol], port
        if key not in held or not held[key].service:
            held[key] = FrontendName(service, kind, at)

    def of_service(self, service: str) -> list[Box]:
        """Return the packets to the frontends of a Service (`shop/web`) or of a Service port (`shop/web:http`), as disjoint boxes."""
        rest = self._space.possible[DPORT + 1 :]
        found: list[Box] = []
        for address, held in self._exact.items():
            for (protocol, port), name in held.items():
                if service in (name.service, name.service.partition(":")[0]):
                    found.append((values(address), values(protocol), values(port), *rest))
        for key, name in self._by_port.items():
            if service in (name.service, name.service.partition(":")[0]):
                taken = values(*(address for address, held in self._exact.items() if key in held))
                if free := self._space.own - taken:
                    found.append((free, values(key[0]), values(key[1]), *rest))
        return found

    @property
    def services(self) -> list[str]:
        """The names of all Service ports."""
        names = [name for held in (*self._exact.values(), self._by_port) for name in held.values()]
        return sorted({name.service for name in names if name.service})

    def has(self, address: int, port: int | None) -> bool:
        """Return True if an address has a frontend, at a port if one is given."""
        keys = [*self._exact.get(address, ()), *(self._by_port if address in self._space.own else ())]
        return any(port in (None, number) for _, number in keys)

    def split(self, box: Box) -> Iterator[tuple[FrontendName | None, Box]]:
        """Split a box into the packets for each frontend in it, and those without a frontend."""
        hits = self._hits(box)
        if not hits:
            yield None, box
            return
        tail = box[DPORT + 1 :]
        by_protocol: dict[int, ValueSet] = {}
        for (protocol, port), found in hits.items():
            one, at = values(protocol), values(port)
            by_protocol[protocol] = by_protocol.get(protocol, EMPTY) | at
            left = box[DADDR]
            for name, addresses in found:
                yield name, (addresses, one, at, *tail)
                left = left - addresses
            if left:
                yield None, (left, one, at, *tail)
        for protocol, ports in by_protocol.items():
            if free := box[DPORT] - ports:
                yield None, (box[DADDR], values(protocol), free, *tail)
        if others := box[PROTOCOL] - values(*by_protocol):
            yield None, (box[DADDR], others, *box[DPORT:])

    def _hits(self, box: Box) -> dict[_Key, list[tuple[FrontendName, ValueSet]]]:
        """Return the frontends that packets of a box meet, with their addresses, by protocol and port."""
        daddr, protocols, ports = box[:3]
        found: dict[_Key, list[tuple[FrontendName, ValueSet]]] = {}
        inside = daddr & self._addresses
        for address in (value for first, last in inside.spans for value in range(first, last + 1)):
            for key, name in _within(self._exact[address], protocols, ports):
                found.setdefault(key, []).append((name, values(address)))
        if here := daddr & self._space.own:
            for key, name in _within(self._by_port, protocols, ports):
                taken = union(addresses for _, addresses in found.get(key, ()))
                if free := here - taken:
                    found.setdefault(key, []).append((name, free))
        return found

    def place(self, box: Box) -> str:
        """Return what packets without a frontend are sent to, in words that are equal for all places of a kind."""
        space = self._space
        address, protocol, port = box[:3]
        if port.size >= _MANY_PORTS or protocol.size >= _MANY_PROTOCOLS:
            if not address - self._addresses:
                return _OTHER_PORTS
            unused = self._service_networks - self._addresses
            if unused and not address - unused:
                return "unused addresses of Service networks"
            if not address - space.loopback:
                return "loopback"
            if not address - space.own:
                return "this node at other ports"
        words = "any other address" if address.size > space.addresses.size // 2 else addresses_text(space, address)
        if address == space.addresses:
            words = "any address"
        if protocol.size == 1:
            words += f", {PROTOCOL_NAMES.get(protocol.first, f'protocol {protocol.first}')}"
        elif protocol != space.whole[PROTOCOL]:
            words += f", {protocol.size} protocols"
        return words if port == space.whole[DPORT] else f"{words} port {numbers_text(port)}"


def _within(
    held: dict[_Key, FrontendName], protocols: ValueSet, ports: ValueSet
) -> Iterable[tuple[_Key, FrontendName]]:
    if protocols.size == ports.size == 1:
        key = protocols.first, ports.first
        return ((key, held[key]),) if key in held else ()
    return (each for each in held.items() if each[0][0] in protocols and each[0][1] in ports)
