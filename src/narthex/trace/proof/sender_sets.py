"""Sets of senders in operators' terms: pods, this node, other nodes, and the outside, each as links of arrival and sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from narthex.model import family_of
from narthex.netfilter.sets.space import HERE, LINK, PacketSpace
from narthex.netfilter.sets.values import EMPTY, ValueSet, segments, union
from narthex.trace.proof.describe import addresses_text, numbers_text

SenderPart = tuple[ValueSet, ValueSet, ValueSet]
"""Source ports, links of arrival, and sources."""
_FEW = 3
"""Nodes and links that are named."""
_MOST_MISSING = 64
"""Addresses that a set may lack and still have the name of the whole."""


def _no_name(_address: str) -> str:
    return ""


class SenderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the senders of a node's packets."""

    pods: tuple[str, ...] = ()
    """Networks of pods."""
    pod_links: tuple[str, ...] = ()
    """Names and patterns of links by which pods' packets arrive, where links and not networks tell pods from others."""
    pods_by_node: Mapping[str, tuple[str, ...]] = {}
    """Networks of the pods of each node."""
    nodes: Mapping[str, tuple[str, ...]] = {}
    """Addresses of all nodes."""
    name_of: Callable[[str], str] = _no_name
    """Returns the name of the owner of an address; empty for none."""


class SenderRegion(NamedTuple):
    """A named set of senders."""

    name: str
    links: ValueSet
    sources: ValueSet


class SenderSets:
    """The named sets of senders of one node. They are disjoint, and they are all senders."""

    def __init__(self, space: PacketSpace, facts: SenderFacts) -> None:
        """Prepare the sets of a space."""
        self._space, self._facts = space, facts
        self.knows_pods = bool(facts.pods or facts.pod_links)
        """Networks or links of pods are known, of this or another family."""
        received = space.possible[LINK] - HERE
        links = union(space.link(each) for each in facts.pod_links) & received if facts.pod_links else EMPTY
        nodes = union(space.networks(self._of_family(each)) for each in facts.nodes.values()) - space.own
        if links:
            self.pods = SenderRegion("pods", links, space.addresses - space.own)
            others, free = received - links, space.addresses - space.own
        else:
            self.pods = SenderRegion("pods", received, space.networks(self._of_family(facts.pods)) - space.own)
            others, free = received, space.addresses - space.own - self.pods.sources
        self.this_node = SenderRegion("this node", HERE, space.own)
        self.nodes = SenderRegion("other nodes", others, nodes & free)
        self.outside = SenderRegion("outside" if self.pods.sources else "others", others, free - nodes)
        self._misfits = (
            SenderRegion("this node with the address of another sender", HERE, space.addresses - space.own),
            SenderRegion("others with an address of this node", received, space.own),
        )
        self.regions = tuple(
            each for each in (self.pods, self.this_node, self.nodes, self.outside) if each.links and each.sources
        )
        self._nodes_with_pods = frozenset(name for name, networks in facts.pods_by_node.items() if networks)
        self._by_node = {
            found: name
            for name, each in facts.pods_by_node.items()
            if (found := space.networks(self._of_family(each)) & self.pods.sources)
        }
        self._known: dict[frozenset[SenderPart], str] = {}

    def _of_family(self, addresses: Iterable[str]) -> tuple[str, ...]:
        return tuple(each for each in addresses if family_of(each.partition("/")[0]) is self._space.family)

    def pods_on(self, node: str) -> SenderRegion | None:
        """Return the pods of a node; None if its networks are unknown."""
        if node not in self._nodes_with_pods:
            return None
        found = next((each for each, name in self._by_node.items() if name == node), EMPTY)
        return SenderRegion(f"pods on {node}", self.pods.links, found)

    def words(self, parts: Iterable[SenderPart]) -> str:
        """Return `pods on node-2 and outside 198.51.100.0/24` for disjoint parts.

        Senders whose address does not fit the place that they send from are left out, unless all are such.
        """
        key = frozenset(parts)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._worded(key)
        return known

    def _worded(self, parts: frozenset[SenderPart]) -> str:
        by_port: dict[ValueSet, list[SenderPart]] = {}
        for each in parts:
            by_port.setdefault(each[0], []).append(each)
        texts = []
        for ports, found in sorted(by_port.items(), key=lambda each: -each[0].size):
            text = self._of_links(found)
            if ports.size != self._space.whole[3].size:
                text += f" from source port {numbers_text(ports)}"
            texts.append(text)
        return joined(texts)

    def _of_links(self, parts: list[SenderPart]) -> str:
        found = [
            (sources, union(parts[at][1] for at in active)) for sources, active in segments([each[2] for each in parts])
        ]
        texts, whole = self._named(self.regions, found)
        if texts and whole == len(self.regions):
            return "anyone"
        return joined(texts or self._named(self._misfits, found)[0])

    def _named(self, regions: Iterable[SenderRegion], found: list[tuple[ValueSet, ValueSet]]) -> tuple[list[str], int]:
        """Return the words for the part of each region, and the number of regions that are there as a whole."""
        texts: list[str] = []
        whole = 0
        for region in regions:
            by_links: dict[ValueSet, list[ValueSet]] = {}
            for sources, links in found:
                part, by = sources & region.sources, links & region.links
                if part and by:
                    by_links.setdefault(by, []).append(part)
            for by, held in by_links.items():
                sources = union(held)
                if by == region.links:
                    whole += sources == region.sources
                    texts.append(self._sources(region, sources))
                else:
                    texts.append(f"{self._sources(region, sources)} by {self._links(by, region.links)}")
        return texts, whole

    def _links(self, links: ValueSet, among: ValueSet) -> str:
        missing = among - links
        if missing.size <= _FEW < links.size:
            return f"links other than {joined([self._space.link_name(each) for each in _values(missing)])}"
        names = [self._space.link_name(each) for each in _values(links)[:_FEW]]
        return f"link {names[0]}" if links.size == 1 else f"links such as {names[0]}"

    def _sources(self, region: SenderRegion, sources: ValueSet) -> str:
        if sources == region.sources:
            return region.name
        if region is self.this_node:
            return f"{region.name} as {addresses_text(self._space, sources)}"
        missing = region.sources - sources
        if missing.size <= _MOST_MISSING < sources.size or len(missing.spans) < len(sources.spans):
            return f"{region.name} except {self._text(missing)}"
        if region is self.pods:
            named, rest = self._pods_of_nodes(sources)
            if named:
                return joined([f"pods on {named}", *([f"pods {self._text(rest)}"] if rest else [])])
        return f"{region.name} {self._text(sources)}"

    def _pods_of_nodes(self, sources: ValueSet) -> tuple[str, ValueSet]:
        names = []
        for networks, name in self._by_node.items():
            if not networks - sources:
                names.append(name)
                sources = sources - networks
            elif sources.size > 1 and not sources - networks and (networks - sources).size <= _MOST_MISSING:
                return f"{name} except {self._text(networks - sources)}", EMPTY
        more = [f"{len(names) - _FEW} more nodes"] if len(names) > _FEW else []
        return joined([*sorted(names)[:_FEW], *more]), sources

    def _text(self, addresses: ValueSet) -> str:
        text = addresses_text(self._space, addresses)
        name = self._facts.name_of(text) if addresses.size == 1 else ""
        return f"{text} ({name})" if name else text


def _values(found: ValueSet) -> list[int]:
    """Return the first values of a set, a few more than are ever shown."""
    return [value for first, last in found.spans for value in range(first, min(last, first + _FEW) + 1)]


def joined(texts: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
