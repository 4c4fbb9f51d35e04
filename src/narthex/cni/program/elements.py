"""Restoring and collecting the elements of our tables: each must be described by a record.

An element is changed only while the lock of its attachment is held and after its record was read again, so requests that run at
the same time, in this process or another, neither lose elements nor leave some behind.
"""

from __future__ import annotations

from narthex.cni.kernel import locks, records
from narthex.cni.kernel.tables import owner_of
from narthex.model.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from narthex.cni.kernel.tables import PodTable
    from narthex.cni.plan import SetElement
    from narthex.cni.program.node import NodeContext

    Described: TypeAlias = tuple[Sequence[SetElement], Sequence[SetElement]]


class ElementKind(Value):
    """The elements that the records of one kind describe."""

    record: str
    """Kind of the records."""
    lock: int
    sets: tuple[str, ...]
    """Sets of elements with an owner."""
    shared: tuple[str, ...]
    """Sets of elements that several attachments use."""
    describe: Callable[[Mapping[str, object]], Described]
    """Return the own and the shared elements of a record. Raises CniError for an invalid one."""


class OrphanedElement(Value):
    """An element that no record describes."""

    element: SetElement
    owner: str


def restore(node: NodeContext, table: PodTable, kind: ElementKind, attachments: Iterable[str]) -> int:
    """Add missing elements of attachments; return the number of those with an owner. Raises OSError, CniError."""
    names = list(attachments)
    if not names and not table.is_whole():
        return 0
    table.restore()
    there = {(held.element.set, held.element.key) for held in table.held((*kind.sets, *kind.shared))}
    added = 0
    for attachment in names:
        if not any(_missing(there, part) for part in _described(node, kind, attachment)):
            continue
        with node.exclusive(kind.lock, attachment), node.shared():
            own, shared = (_missing(there, part) for part in _described(node, kind, attachment))
            table.add(own, owner_of(attachment), shared)
            added += len(own)
    return added


def _missing(there: set[tuple[str, bytes]], elements: Iterable[SetElement]) -> list[SetElement]:
    return [one for one in elements if (one.set, one.key) not in there]


def _described(node: NodeContext, kind: ElementKind, attachment: str) -> Described:
    record = node.records.get(kind.record, attachment)
    if record is None or record.get("backend") != "nftables":
        return (), ()
    return kind.describe(record)


def remove_orphans(
    node: NodeContext, table: PodTable, kind: ElementKind, network: str = "", dry_run: bool = False
) -> list[OrphanedElement]:
    """Remove elements, of one network or all, that no record describes; return them. Raises OSError, CniError.

    Elements are read before records, since a record is written before and removed after its elements.
    """
    by_owner: dict[str, list[SetElement]] = {}
    for held in table.held(kind.sets):
        if network in ("", _network_of(held.owner, network)):
            by_owner.setdefault(held.owner, []).append(held.element)
    removed = []
    for owner, elements in _undescribed(node, kind, by_owner).items():
        with node.exclusive(kind.lock, owner):
            left = _undescribed(node, kind, {owner: elements}).get(owner, [])
            if not dry_run:
                table.remove(left, owner)
        removed += [OrphanedElement(one, owner) for one in left]
    return removed


def _network_of(owner: str, network: str) -> str:
    """Return the network of an owner. That of a long name is cut, so it is compared with the beginning of `network`."""
    parts = owner.split(":")
    return network if parts[1:2] == ["sha256"] and network.startswith(parts[0]) else parts[0]


def _undescribed(
    node: NodeContext, kind: ElementKind, by_owner: Mapping[str, list[SetElement]]
) -> dict[str, list[SetElement]]:
    if not by_owner:
        return {}
    described: dict[str, set[tuple[str, bytes]]] = {}
    for attachment in _attachments(node, kind, by_owner):
        owner = owner_of(attachment)
        if owner in by_owner:
            own, _ = _described(node, kind, attachment)
            described[owner] = {(one.set, one.key) for one in own}
    left = {
        owner: [one for one in elements if (one.set, one.key) not in described.get(owner, ())]
        for owner, elements in by_owner.items()
    }
    return {owner: elements for owner, elements in left.items() if elements}


def _attachments(node: NodeContext, kind: ElementKind, owners: Iterable[str]) -> list[str]:
    """Return the attachments that may be these owners: all with a record, or the only owner itself."""
    only = [*owners]
    if len(only) == 1 and records.split(only[0]) is not None:
        return only
    return [attachment for attachment, _ in node.records.all(kind.record)]


def remove_unused(node: NodeContext, table: PodTable, kind: ElementKind, dry_run: bool = False) -> list[SetElement]:
    """Remove shared elements that no record uses; return them. Raises OSError, CniError."""
    if not table.held(kind.shared):
        return []
    with node.exclusive(locks.SUBNETS, ""):
        used = {
            (one.set, one.key)
            for attachment, _ in node.records.all(kind.record)
            for one in _described(node, kind, attachment)[1]
        }
        unused = [held.element for held in table.held(kind.shared) if (held.element.set, held.element.key) not in used]
        if not dry_run:
            table.remove(unused, "")
    return unused
