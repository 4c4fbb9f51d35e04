"""A checker of partition certificates. It shares no code with what makes them: it reads JSON and counts.

Three facts make a certificate a partition of all packets. The edges of each node are disjoint sets of values, so that no packet is in two
classes. The sizes of all classes add up to the size of the space, so that every packet is in one. And the probabilities of each class
add up to 1, for every way in which free choices can be taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple


class CertificateError(ValueError):
    """The certificate proves nothing. The message says which part is wrong."""


class CheckedPartition(NamedTuple):
    """What a certificate shows."""

    bits: int
    packets: int
    """Packets in all classes together."""
    classes: int


def check_certificate(text: bytes | str) -> CheckedPartition:
    """Return what a certificate shows. Raises CertificateError."""
    try:
        held = json.loads(text)
        widths = [int(field["bits"]) for field in held["fields"]]
        nodes = [(int(node["field"]), [(_intervals(spans), int(child)) for spans, child in node["edges"]])
                 for node in held["nodes"]]  # fmt: skip
        impossible = [_intervals(spans) for spans in held["impossible"]]
        ends = held["ends"]
    except (KeyError, TypeError, ValueError) as error:
        raise CertificateError(f"not a certificate: {error!r}") from None
    if not nodes or len(impossible) != len(widths):
        raise CertificateError("the certificate has no nodes, or does not fit its fields")
    for number, weights in enumerate(ends):
        _check_weights(number, weights)
    sizes = [(1 << bits) - _size(taken) for bits, taken in zip(widths, impossible, strict=True)]
    packets, classes = _count(nodes, sizes, widths, impossible, len(ends))
    whole = 1
    for size in sizes:
        whole *= size
    if packets != whole:
        raise CertificateError(f"the classes have {packets} packets, and the space has {whole}")
    return CheckedPartition(sum(widths), packets, classes)


Interval = tuple[int, int]


def _intervals(spans: list[list[str]]) -> list[Interval]:
    return [(int(first, 16), int(last, 16)) for first, last in spans]


def _size(intervals: list[Interval]) -> int:
    return sum(last - first + 1 for first, last in intervals)


def _count(
    nodes: list[tuple[int, list[tuple[list[Interval], int]]]],
    sizes: list[int],
    widths: list[int],
    impossible: list[list[Interval]],
    ends: int,
) -> tuple[int, int]:
    """Return the packets and the classes of the last node, which is the root."""
    counted: list[tuple[int, int, int]] = []
    for number, (field, edges) in enumerate(nodes):
        if not 0 <= field < len(sizes):
            raise CertificateError(f"node {number} splits field {field}, which does not exist")
        _check_edges(number, edges, widths[field], impossible[field])
        packets = classes = 0
        for intervals, child in edges:
            below, below_classes = 1, 1
            if field == len(sizes) - 1:
                if not 0 <= child < ends:
                    raise CertificateError(f"node {number} leads to end {child}, which does not exist")
            else:
                if not 0 <= child < number or counted[child][0] <= field:
                    raise CertificateError(f"node {number} leads to node {child}, which does not come after it")
                child_field, below, below_classes = counted[child]
                for skipped in range(field + 1, child_field):
                    below *= sizes[skipped]
            packets += _size(intervals) * below
            classes += below_classes
        counted.append((field, packets, classes))
    field, packets, classes = counted[-1]
    for skipped in range(field):
        packets *= sizes[skipped]
    return packets, classes


def _check_edges(number: int, edges: list[tuple[list[Interval], int]], bits: int, impossible: list[Interval]) -> None:
    """Raise CertificateError unless the sets of a node's edges are disjoint and contain values of the field alone."""
    reached = -1
    for first, last in sorted([each for intervals, _ in edges for each in intervals] + impossible):
        if not reached < first <= last < 1 << bits:
            raise CertificateError(f"node {number}: {first:x}-{last:x} is no interval of its own")
        reached = last


def _check_weights(number: int, weights: list[dict[str, Any]]) -> None:
    """Raise CertificateError unless probabilities add up to 1, for every way in which the choices can be taken."""
    cases: dict[frozenset[tuple[str, bool]], Fraction] = {}
    for weight in weights:
        choices = frozenset((str(name), bool(taken)) for name, taken in weight["choices"])
        above, below = weight["probability"]
        if above < 0 or below <= 0:
            raise CertificateError(f"end {number} has the probability {above}/{below}")
        cases[choices] = cases.get(choices, Fraction(0)) + Fraction(above, below)
    if any(total != 1 for total in cases.values()) or not _exhaust(list(cases)):
        raise CertificateError(f"the probabilities of end {number} do not add up to 1")


def _exhaust(cases: list[frozenset[tuple[str, bool]]]) -> bool:
    """Return True if exactly one of the cases holds however the choices are taken."""
    pending: list[list[frozenset[tuple[str, bool]]]] = [cases]
    while pending:
        held = pending.pop()
        if len(held) == 1 and not held[0]:
            continue
        shared = set.intersection(*({name for name, _ in case} for case in held)) if held else set()
        if not shared:
            return False
        pending += _split(held, min(shared))
    return True


def _split(cases: list[frozenset[tuple[str, bool]]], name: str) -> Iterator[list[frozenset[tuple[str, bool]]]]:
    for taken in (True, False):
        yield [case - {(name, taken)} for case in cases if (name, taken) in case]
