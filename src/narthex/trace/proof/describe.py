"""Classes of packets in words, and a packet that stands for a class."""

from __future__ import annotations

from narthex.model import Protocol, join_port, networks_between
from narthex.netfilter.sets.space import DADDR, DPORT, HERE, LINK, PROTOCOL, SPORT, Box, PacketSpace
from narthex.netfilter.sets.values import ValueSet
from narthex.proxy.plan.ir import FrontendKind, Plan
from narthex.trace.proof.plan_ends import PlanEnds

_FEW = 2
"""Networks of a set that are named."""
_LIKELY = ("198.51.100.7", "2001:db8:c::7", "203.0.113.77", "192.0.2.7")
"""Sources and destinations from networks for documentation, which readers know as such."""
PROTOCOL_NAMES = {each.number: each.lower for each in Protocol} | {58: "icmpv6"}


class ClassDescriber:
    """Describes the classes of one node's packets."""

    def __init__(self, space: PacketSpace, plan: Plan, ends: PlanEnds) -> None:
        self._space = space
        self._pods = space.networks(plan.pods.cidrs)
        self._ends = ends

    def describe(self, box: Box, sources: ValueSet) -> str:
        """Return `pods to shop/web:http (cluster IP 10.96.0.5:80/tcp)` for a class."""
        words = f"{self._sources(box, sources)} to {self._destination(box)}"
        ports = box[SPORT]
        if ports.size != self._space.whole[SPORT].size:
            words += f", from port {numbers_text(ports)}"
        return words

    def _sources(self, box: Box, sources: ValueSet) -> str:
        space = self._space
        links = box[LINK]
        where = ""
        if links == HERE:
            where = "this node as "
        elif links.size < (space.possible[LINK] - HERE).size:
            names = [space.link_name(value) for value in range(links.first, links.first + min(links.size, _FEW + 1))]
            where = f"link {names[0]} from " if links.size == 1 else f"links such as {names[0]} from "
        named = ((space.addresses, "any address"), (self._pods, "pods"), (space.own, "this node's addresses"),
                 (space.addresses - self._pods, "others than pods"))  # fmt: skip
        for known, words in named:
            if known and sources == known:
                return where + words
            if (
                known
                and sources.size > 1
                and not sources - known
                and (known - sources).size <= 2 * len(known.spans) + 64
            ):
                return f"{where}{words} except {self._addresses(known - sources)}"
        if sources.size > 1 and self._pods and not sources - self._pods:
            return f"{where}pods {self._addresses(sources)}"
        return where + self._addresses(sources)

    def _destination(self, box: Box) -> str:
        space = self._space
        address, protocol, port = box[DADDR], box[PROTOCOL], box[DPORT]
        if protocol.size == port.size == 1:
            claim = self._ends.claim(address.first, protocol.first, port.first)
            if claim is not None:
                frontend = claim.frontend
                kind = frontend.kind.value
                if frontend.kind is FrontendKind.NODE_PORT:
                    return f"{claim.service.name} ({kind} {port.first}/{PROTOCOL_NAMES[protocol.first]} of {self._addresses(address)})"
                at = join_port(space.address_text(address.first), port.first)
                return f"{claim.service.name} ({kind} {at}/{PROTOCOL_NAMES[protocol.first]})"
        words = "any address" if address == space.addresses else self._addresses(address)
        if protocol.size == 1:
            words += f", {PROTOCOL_NAMES.get(protocol.first, f'protocol {protocol.first}')}"
        elif protocol != space.whole[PROTOCOL]:
            words += f", {protocol.size} protocols"
        if port != space.whole[DPORT]:
            words += f" port {numbers_text(port)}"
        return words

    def _addresses(self, addresses: ValueSet) -> str:
        return addresses_text(self._space, addresses)


def addresses_text(space: PacketSpace, addresses: ValueSet) -> str:
    """Return `10.244.1.0/24 and 10.0.0.1-10.0.0.9` for a set of addresses, with the number of ranges that are left out."""
    texts: list[str] = []
    text = space.address_text
    for first, last in addresses.spans[: _FEW + 1]:
        nets = networks_between(text(first), text(last))
        texts += (
            [nets[0].removesuffix("/32").removesuffix("/128")] if len(nets) == 1 else [f"{text(first)}-{text(last)}"]
        )
    if len(addresses.spans) > _FEW:
        return f"{', '.join(texts[:_FEW])} and {_more_ranges(addresses)}"
    return " and ".join(texts)


def _more_ranges(found: ValueSet) -> str:
    count = len(found.spans) - _FEW
    return f"{count:,} more range{'s' if count > 1 else ''}"


def numbers_text(found: ValueSet) -> str:
    """Return `80, 443` or `1-1023` for a set of numbers, with the number of ranges that are left out."""
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in found.spans[:_FEW]]
    more = f" and {_more_ranges(found)}" if len(found.spans) > _FEW else ""
    return ", ".join(texts) + more


def sample_point(space: PacketSpace, box: Box, sources: ValueSet) -> tuple[int, ...]:
    """Return a packet of a class that is as ordinary as possible."""
    known = [space.address(text) for text in _LIKELY if (":" in text) == (":" in space.family.loopback)]
    links = box[LINK]
    link = links.spans[-1][1]
    own = [address.first for address in (space.node,) if address] if link == 0 else []
    return (
        _choose(box[DADDR], known),
        _choose(box[PROTOCOL], (6, 17, 132, 1 if space.widths[DADDR] == 32 else 58)),
        _choose(box[DPORT], (80, 1)),
        _choose(box[SPORT], (0, 40_000)),
        link,
        _choose(sources, (*own, *known)),
    )


def _choose(among: ValueSet, preferred: tuple[int, ...] | list[int]) -> int:
    return next((value for value in preferred if value in among), among.first)
