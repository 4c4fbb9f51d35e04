"""The certificate of a partition: a decision diagram as JSON, which `checker.py` verifies without any other code of Narthex.

Numbers are hexadecimal texts, since an IPv6 address does not fit in a JSON number of common tools.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from narthex.netfilter.sets.branch import PacketEnd
from narthex.netfilter.sets.diagram import Diagram, Distribution, Leaf
from narthex.netfilter.sets.space import FIELD_NAMES, PacketSpace
from narthex.netfilter.sets.values import ValueSet

Spans = tuple[tuple[str, str], ...]
"""First and last values."""


class CertificateField(msgspec.Struct, frozen=True):
    """A field of a packet."""

    name: str
    bits: int


class CertificateNode(msgspec.Struct, frozen=True, kw_only=True):
    """A split of a field: each edge leads values to a node or a leaf of a smaller number."""

    field: int
    edges: tuple[tuple[Spans, int], ...]


class CertificateWeight(msgspec.Struct, frozen=True, kw_only=True):
    """An end with its probability, given how free choices are taken."""

    choices: tuple[tuple[str, bool], ...] = ()
    end: str
    probability: tuple[int, int]


class PartitionCertificate(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="partition-certificate"):
    """A partition of all packets into classes, each with its distribution over ends."""

    version: Literal[1] = 1
    fields: tuple[CertificateField, ...]
    """In the order in which they are split; the last one is split by leaves."""
    nodes: tuple[CertificateNode, ...]
    """Children come before their parents; the last node is the root."""
    ends: tuple[tuple[CertificateWeight, ...], ...]
    """The distributions, by number."""
    impossible: tuple[Spans, ...] = ()
    """For each field, the values that no packet has."""


def certificate(diagram: Diagram, space: PacketSpace) -> PartitionCertificate:
    """Return the certificate of a partition."""
    writer = _Writer()
    writer.node(diagram)
    fields = tuple(CertificateField(name, bits) for name, bits in zip(FIELD_NAMES, space.widths, strict=True))
    impossible = tuple(_spans(whole - some) for whole, some in zip(space.whole, space.possible, strict=True))
    return PartitionCertificate(
        fields=fields, nodes=tuple(writer.nodes), ends=tuple(map(_weights, writer.ends)), impossible=impossible
    )


class _Writer:
    def __init__(self) -> None:
        self.nodes: list[CertificateNode] = []
        self.ends: dict[Distribution, int] = {}
        self._known: dict[int, int] = {}

    def node(self, diagram: Diagram) -> int:
        """Write a node after its children. Return its number."""
        known = self._known.get(id(diagram))
        if known is not None:
            return known
        if isinstance(diagram, Leaf):
            regions = ((part, self.ends.setdefault(key, len(self.ends))) for part, key in diagram.regions)
            made = CertificateNode(field=len(FIELD_NAMES) - 1, edges=tuple((_spans(part), at) for part, at in regions))
        else:
            children = ((part, self.node(child)) for part, child in diagram.edges)
            made = CertificateNode(field=diagram.field, edges=tuple((_spans(part), at) for part, at in children))
        self.nodes.append(made)
        self._known[id(diagram)] = len(self.nodes) - 1
        return len(self.nodes) - 1


def _spans(part: ValueSet) -> Spans:
    return tuple((f"{first:x}", f"{last:x}") for first, last in part.spans)


def _weights(distribution: Distribution) -> tuple[CertificateWeight, ...]:
    found = []
    for choices, end, probability in sorted(distribution, key=str):
        assert isinstance(end, PacketEnd)
        words = f"{end.disposition.value} {end.endpoint[0]} {end.endpoint[1]} {end.masquerade} {end.note}".strip()
        found.append(CertificateWeight(choices=tuple(sorted(choices)), end=words, probability=probability))
    return tuple(found)
