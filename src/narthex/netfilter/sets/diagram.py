"""Decision diagrams of packets: the canonical form of a function from packets to distributions over ends.

A node splits one field along disjoint sets of values that together are all values. Nodes are shared: two functions are equal if and
only if their roots are the same object. The source is not a level of its own: a leaf holds, for each end, the sources that get it and
with which probability. Thus a pool of n endpoints, each of which is treated in a special way as a sender, takes n entries and not n * n.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from narthex.netfilter.sets.space import SADDR, Box, PacketSpace
from narthex.netfilter.sets.values import ValueSet, disjoint_union, segments, union

Choice = tuple[str, bool]
"""A free choice of the environment, and how it is taken: whether an affinity list has the sender."""
End = Hashable


class WeightedBox(NamedTuple):
    """All packets of a box end in this way with this probability, given the choices."""

    box: Box
    end: End
    probability: Fraction = Fraction(1)
    choices: frozenset[Choice] = frozenset()


Ratio = tuple[int, int]
"""A probability as numerator and denominator, which are compared and hashed much faster than a `Fraction`."""
Share = tuple[frozenset[Choice], End, ValueSet, Ratio]
"""Given the choices, packets of these sources end in this way with this probability."""


class Leaf:
    """What happens to the packets of a region, by source. Equal leaves of one diagram are the same object."""

    __slots__ = ("_regions", "shares")

    def __init__(self, shares: frozenset[Share]) -> None:
        self.shares = shares
        self._regions: list[tuple[ValueSet, Distribution]] | None = None

    @property
    def regions(self) -> list[tuple[ValueSet, Distribution]]:
        """The sources in disjoint sets, each with its distribution over (choices, end)."""
        if self._regions is None:
            shares = list(self.shares)
            grouped: dict[Distribution, list[ValueSet]] = {}
            for part, active in segments([each[2] for each in shares]):
                key = frozenset((shares[at][0], shares[at][1], shares[at][3]) for at in active)
                grouped.setdefault(key, []).append(part)
            self._regions = [(parts[0] if len(parts) == 1 else union(parts), key) for key, parts in grouped.items()]
        return self._regions


Distribution = frozenset[tuple[frozenset[Choice], End, Ratio]]
"""The probability of each end, given choices."""


class SplitNode:
    """A split of a field. Equal nodes of one builder are the same object."""

    __slots__ = ("edges", "field")

    def __init__(self, field: int, edges: tuple[tuple[ValueSet, SplitNode | Leaf], ...]) -> None:
        self.field, self.edges = field, edges


Diagram = SplitNode | Leaf


class DiagramBuilder:
    """Builds the diagrams of functions that are to be compared."""

    def __init__(self, space: PacketSpace) -> None:
        self.space = space
        self._leaves: dict[frozenset[Share], Leaf] = {}
        self._nodes: dict[tuple[object, ...], SplitNode] = {}

    def build(self, boxes: Sequence[WeightedBox]) -> Diagram:
        """Return the diagram of a function. The boxes cover the whole space, with probabilities that add up to 1 everywhere."""
        return self._build(list(boxes), 0)

    def _build(self, boxes: list[WeightedBox], field: int) -> Diagram:
        if field == SADDR:
            return self._leaf(boxes)
        whole = self.space.whole[field]
        first = boxes[0].box[field]
        if first is whole and all(each.box[field] is whole for each in boxes):
            return self._build(boxes, field + 1)
        children: dict[Diagram, list[ValueSet]] = {}
        for part, active in segments([each.box[field] for each in boxes]):
            children.setdefault(self._build([boxes[at] for at in active], field + 1), []).append(part)
        edges = [(parts[0] if len(parts) == 1 else union(parts), child) for child, parts in children.items()]
        if len(edges) == 1 and edges[0][0].size == whole.size:
            return edges[0][1]
        edges.sort(key=lambda edge: edge[0].spans[0])
        key = (field, *((part, id(child)) for part, child in edges))
        known = self._nodes.get(key)
        if known is None:
            known = self._nodes[key] = SplitNode(field, tuple(edges))
        return known

    def _leaf(self, boxes: list[WeightedBox]) -> Leaf:
        by_end: dict[tuple[frozenset[Choice], End], list[WeightedBox]] = {}
        for each in boxes:
            by_end.setdefault((each.choices, each.end), []).append(each)
        shares: list[Share] = []
        for (choices, end), found in by_end.items():
            shares += [(choices, end, *part) for part in _step_function(found)]
        key = frozenset(shares)
        known = self._leaves.get(key)
        if known is None:
            known = self._leaves[key] = Leaf(key)
        return known


def _step_function(boxes: list[WeightedBox]) -> Iterator[tuple[ValueSet, Ratio]]:
    """Yield the probability of an end by source: for each probability that is not 0, all sources that have it."""
    if len(boxes) == 1:
        yield boxes[0].box[SADDR], boxes[0].probability.as_integer_ratio()
        return
    sets = [each.box[SADDR] for each in boxes]
    first = boxes[0].probability
    if all(each.probability is first for each in boxes):
        whole = disjoint_union(sets)
        if whole is not None:
            yield whole, first.as_integer_ratio()
            return
    summed: dict[Ratio, list[ValueSet]] = {}
    for part, active in segments(sets):
        total = sum((boxes[at].probability for at in active), Fraction(0))
        summed.setdefault(total.as_integer_ratio(), []).append(part)
    for ratio, parts in summed.items():
        if ratio[0]:
            yield union(parts), ratio


def leaves(diagram: Diagram, space: PacketSpace) -> Iterator[tuple[Box, Leaf]]:
    """Yield each path of a diagram as a box of all fields but the source, which is whole, and its leaf."""
    path = list(space.whole)

    def descend(node: Diagram) -> Iterator[tuple[Box, Leaf]]:
        """Yield the paths below a node."""
        if isinstance(node, Leaf):
            yield tuple(path), node
            return
        before = path[node.field]
        for part, child in node.edges:
            path[node.field] = part
            yield from descend(child)
        path[node.field] = before

    yield from descend(diagram)


def differing(one: Diagram, other: Diagram, space: PacketSpace) -> Iterator[tuple[Box, Leaf, Leaf]]:
    """Yield all regions in which two diagrams of one builder have different leaves. Shared pairs are compared once."""
    path = list(space.whole)
    same: set[tuple[int, int]] = set()

    def descend(a: Diagram, b: Diagram) -> Iterator[tuple[Box, Leaf, Leaf]]:
        """Yield the regions below a pair of nodes."""
        if a is b or (id(a), id(b)) in same:
            return
        if isinstance(a, Leaf) and isinstance(b, Leaf):
            yield tuple(path), a, b
            return
        field = min(each.field for each in (a, b) if isinstance(each, SplitNode))
        left, right = _edges(a, field, space), _edges(b, field, space)
        before, found = path[field], False
        pairs: dict[tuple[int, int], list[ValueSet]] = {}
        both = [part for part, _ in left] + [part for part, _ in right]
        for part, (here, there) in segments(both):
            pairs.setdefault((here, there - len(left)), []).append(part)
        for (here, there), parts in pairs.items():
            path[field] = union(parts)
            for each in descend(left[here][1], right[there][1]):
                found = True
                yield each
        path[field] = before
        if not found:
            same.add((id(a), id(b)))

    yield from descend(one, other)


def _edges(node: Diagram, field: int, space: PacketSpace) -> Sequence[tuple[ValueSet, Diagram]]:
    if isinstance(node, SplitNode) and node.field == field:
        return node.edges
    return ((space.whole[field], node),)
