"""The space of all first packets of connections of one IP family, and how the words of rules select parts of it.

A packet is a point of n bits: destination, protocol, both ports, the link of arrival, and source, in the order in which maps look
them up. The mark (0), the state of connection tracking (new), and its contents are parameters, not parts of a packet.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from narthex.model import Host, IPFamily, Packet, Protocol, address_key, family_of, ipv6_text, parsed_network
from narthex.netfilter import ast
from narthex.netfilter.sets.values import EMPTY, ValueSet, span, union, values

DADDR, PROTOCOL, DPORT, SPORT, LINK, SADDR = range(6)
FIELD_NAMES = ("destination", "protocol", "destination port", "source port", "link", "source")

Box = tuple[ValueSet, ...]
"""One set for each field, the destination first: all packets whose fields lie in these sets."""

PORTS = values(*(protocol.number for protocol in Protocol if protocol is not Protocol.ICMP))
"""The protocols that have ports."""
HERE = values(0)
"""The link of packets that a process on this node sends."""
_PORT, _LINKS = span(0, 0xFFFF), span(0, 0xFFFF)
_NUMBERS = {"icmp": 1, "tcp": 6, "udp": 17, "dccp": 33, "gre": 47, "esp": 50, "ah": 51, "icmpv6": 58, "ipv6-icmp": 58,
            "sctp": 132, "udplite": 136}  # fmt: skip
_LOOPBACK_LINK = "lo"


class NotInterpreted(Exception):
    """A rule or an element that has no exact set. The message is the reason."""


class PacketSpace:
    """All packets of one family, with numbers for the links that rules name.

    Number 0 is the node itself, each name and each pattern has a number, and all others stand for links that no rule names.
    """

    def __init__(
        self, family: IPFamily, host: Host, links: Iterable[str] = (), bound: Iterable[str] = frozenset()
    ) -> None:
        """Prepare the space of a family on a node.

        Args:
            family: The family.
            host: The node.
            links: All names and patterns (`veth*`) of links that matter.
            bound: Further local addresses, which the node has only for its Services (mode ipvs).
        """
        self.family = family
        self._networks: dict[str, ValueSet] = {}
        self.widths = (family.host_bits, 8, 16, 16, 16, family.host_bits)
        """Bits of each field."""
        self.addresses = span(0, (1 << family.host_bits) - 1)
        self.whole: Box = (self.addresses, span(0, 255), _PORT, _PORT, _LINKS, self.addresses)
        self.loopback = self.network(family.loopback)
        self.node = values(*(self.address(own) for own in host.addresses if family_of(own) is family))
        """The addresses of the host."""
        self.own = union((self.node, self.loopback))
        """The addresses of the host, with loopback."""
        self.local = union((self.own, *(values(self.address(each)) for each in bound if family_of(each) is family)))
        """All addresses that the kernel takes for local ones."""
        self.host = host
        # A pattern that contains another one comes later, so that a name belongs to the longest pattern.
        names = sorted({each for each in links if each}, key=lambda each: (each.endswith("*"), -len(each), each))
        self._links = {name: number for number, name in enumerate(names, start=1)}

    @property
    def bits(self) -> int:
        """The number of bits of a packet."""
        return sum(self.widths)

    @property
    def possible(self) -> Box:
        """The packets that a node can meet: its loopback link brings no packet that it did not send itself."""
        lo = self._links.get(_LOOPBACK_LINK)
        return (*self.whole[:LINK], _LINKS - values(lo) if lo else _LINKS, self.whole[SADDR])

    # ---- words of rules to sets ----------------------------------------------------------------------------------------------

    def address(self, text: str) -> int:
        """Return the number of an address."""
        return address_key(text)[1]

    def network(self, text: str) -> ValueSet:
        """Return the addresses of an address, a network, or a range; those of the other family are none. Raises NotInterpreted."""
        known = self._networks.get(text)
        if known is None:
            known = self._networks[text] = self._network(text)
        return known

    def _network(self, text: str) -> ValueSet:
        first, dash, last = text.partition("-")
        try:
            if family_of(first.partition("/")[0]) is not self.family:
                return EMPTY
            if dash:
                return span(self.address(first), self.address(last))
            if "/" not in text:
                return values(self.address(text))
            net = parsed_network(text)
        except ValueError as error:
            raise NotInterpreted(f"{text} is no address: {error}") from None
        first_value = int(net.network_address)
        return span(first_value, first_value + net.num_addresses - 1)

    def networks(self, texts: Iterable[str]) -> ValueSet:
        """Return the union of networks. Raises NotInterpreted."""
        return union(map(self.network, texts))

    @staticmethod
    def protocol(atom: ast.Atom) -> ValueSet:
        """Return the set of one protocol by name or number. Raises NotInterpreted."""
        text = str(atom)
        number = int(text) if text.isdigit() else _NUMBERS.get(text)
        if number is None or number > 255:
            raise NotInterpreted(f"the protocol {text} is unknown")
        return _single(number)

    @staticmethod
    def port(atom: ast.Atom) -> ValueSet:
        """Return the set of a port or of a range `80-90`. Raises NotInterpreted."""
        first, _, last = str(atom).partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise NotInterpreted(f"{atom} is no port")
        return span(int(first), int(last)) & _PORT if last else _single(int(first)) & _PORT

    def link(self, pattern: str) -> ValueSet:
        """Return the links with a name, or with the prefix of a pattern `veth*`."""
        if pattern == "*":
            return _LINKS - HERE
        if not pattern.endswith("*"):
            return values(self._links[pattern])
        prefix = pattern[:-1]
        return values(*(number for name, number in self._links.items() if name.removesuffix("*").startswith(prefix)))

    def field_values(self, field: ast.Field, atom: ast.Atom) -> ValueSet:
        """Return the values of a field that a component of a set element stands for. Raises NotInterpreted."""
        if field in ADDRESSES:
            return self.network(str(atom))
        if field is ast.Field.L4PROTO:
            return self.protocol(atom)
        if field in PORT_FIELDS:
            return self.port(atom)
        if field is ast.Field.IIFNAME:
            return self.link(str(atom))
        raise NotInterpreted(f"{field.value} in a key is not interpreted")

    # ---- sets to packets -----------------------------------------------------------------------------------------------------

    def address_text(self, number: int) -> str:
        """Return an address as text."""
        return str(ipaddress.IPv4Address(number)) if self.family is IPFamily.IPV4 else ipv6_text(number)

    def link_name(self, number: int) -> str:
        """Return a name for a link: one that no rule names, for the numbers of the others."""
        name = next((name for name, known in self._links.items() if known == number), "")
        if name.endswith("*"):
            prefix = name[:-1]
            taken = self._links.keys()
            return next(made for made in (f"{prefix}{count}"[:15] for count in range(10_000)) if made not in taken)
        taken_by_rule = tuple(each.removesuffix("*") if each.endswith("*") else each for each in self._links)
        unused = (f"nic{count}" for count in range(10_000))
        return name or next(made for made in unused if not made.startswith(taken_by_rule or ("\0",)))

    def packet(self, point: tuple[int, ...]) -> Packet | None:
        """Return the packet at a point; None for a protocol that a packet of the concrete walk can't have."""
        protocols = {each.number: each for each in Protocol}
        protocols[_NUMBERS["icmp" if self.family is IPFamily.IPV4 else "icmpv6"]] = Protocol.ICMP
        protocol = protocols.get(point[PROTOCOL])
        if protocol is None:
            return None
        ports = protocol is not Protocol.ICMP
        return Packet(
            source=self.address_text(point[SADDR]),
            destination=self.address_text(point[DADDR]),
            port=point[DPORT] if ports else 0,
            source_port=point[SPORT] if ports else 0,
            protocol=protocol,
            iif="" if point[LINK] == 0 else self.link_name(point[LINK]),
            from_host=point[LINK] == 0,
        )


@lru_cache(maxsize=1 << 16)
def _single(value: int) -> ValueSet:
    """Return the set of a protocol or a port; one object for all elements that have it."""
    return ValueSet(((value, value),))


ADDRESSES = frozenset((ast.Field.SADDR, ast.Field.DADDR, ast.Field.ORIG_SADDR, ast.Field.ORIG_DADDR))
PORT_FIELDS = frozenset((ast.Field.SPORT, ast.Field.DPORT, ast.Field.ORIG_SPORT, ast.Field.ORIG_DPORT))


class LinkNames(NamedTuple):
    """Collects the names of links in rules."""

    names: set[str]

    def read(self, table: ast.Table) -> None:
        """Add the names that the chains and sets of a table have."""
        for chain in table.chains.values():
            for rule in chain.rules:
                for each in rule.expressions:
                    self._expression(each)
        for held in table.sets.values():
            places = [at for at, part in enumerate(held.key) if part is ast.Field.IIFNAME]
            self.names.update(str(key[at]) for key in held.elements for at in places if len(key) > at)

    def _expression(self, e: ast.Expression) -> None:
        if isinstance(e, ast.Compare) and e.field is ast.Field.IIFNAME:
            self.names.update(map(str, e.values))
        elif isinstance(e, ast.AnyOf):
            for alternative in e.alternatives:
                for each in alternative:
                    self._expression(each)
        elif isinstance(e, ast.InlineVerdictMap):
            for matches, _ in e.arms:
                for each in matches:
                    self._expression(each)
