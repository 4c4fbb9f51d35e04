"""`narthex cni gc`: remove what is left of attachments whose namespaces are gone, without the list of a runtime."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from narthex.cni.kernel import locks, records
from narthex.cni.kernel.records import STATE, Records
from narthex.cni.kernel.tables import PodTable
from narthex.cni.plugins import masquerade as masquerade_plugin
from narthex.cni.plugins import portmap as portmap_plugin
from narthex.cni.plugins.host_local import DATA_DIR
from narthex.cni.program import masquerade, pod_interfaces, portmap
from narthex.cni.program.elements import ElementKind, remove_orphans, remove_unused
from narthex.cni.program.ipam import IpamLeases
from narthex.cni.program.node import NodeContext
from narthex.model.values import address_text

_KINDS = ((records.PODS, locks.PODS), (records.MASQUERADE, locks.PODS), (records.PORTS, locks.PORTS))
_WAIT_SECONDS = 10.0
"""Requests take milliseconds; one that takes longer fails the command instead of holding it up."""


class CniGarbage(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection found."""

    attachments: tuple[str, ...] = ()
    """`NETWORK:CONTAINER:INTERFACE` of those whose namespace is gone."""
    elements: tuple[str, ...] = ()
    """`TABLE SET KEY OWNER` of set elements that no record describes; the owner is empty for shared ones."""
    reservations: tuple[str, ...] = ()
    """`NETWORK ADDRESS` of addresses whose attachment is gone, or that have no owner."""
    files: tuple[str, ...] = ()
    """Files that were not completely written."""
    kept: int = 0
    """Number of attachments that exist."""

    @property
    def empty(self) -> bool:
        """True if nothing was left behind."""
        return not (self.attachments or self.elements or self.reservations or self.files)


def collect(state: str = STATE, data_dir: str = DATA_DIR, *, dry_run: bool = False) -> CniGarbage:
    """Remove what no attachment needs in this network namespace, and return it; with `dry_run`, only return it.

    Raises OSError, and CniError if requests of a runtime are stuck.
    """
    node = NodeContext(state, _WAIT_SECONDS)
    try:
        return _Collector(node, Path(data_dir), dry_run).run()
    finally:
        node.close()


class _Collector:
    def __init__(self, node: NodeContext, data_dir: Path, dry_run: bool) -> None:
        self._node = node
        self._data_dir = data_dir
        self._dry_run = dry_run

    def run(self) -> CniGarbage:
        """Collect in the order in which DEL removes: rules, reservations, records."""
        names = self._node.names()
        files = self._files()
        gone = sorted(self._gone(names))
        for attachment in gone:
            if not self._dry_run:
                self._close(attachment, names)
        elements = [*self._elements(self._node.masquerade, masquerade.ELEMENTS, masquerade_plugin.TABLE)]
        elements += self._elements(self._node.ports, portmap.ELEMENTS, portmap_plugin.TABLE)
        reservations = self._reservations(names)
        for attachment in gone:
            if not self._dry_run:
                self._forget(attachment, names)
        there = {name for kind, _ in _KINDS for name, _ in self._node.records.all(kind)}
        return CniGarbage(
            attachments=tuple(gone),
            elements=tuple(sorted(elements)),
            reservations=tuple(sorted(reservations)),
            files=tuple(sorted(files)),
            kept=len(there - {*gone}),
        )

    def _gone(self, names: frozenset[str]) -> Iterable[str]:
        for attachment, record in self._node.records.all(records.PODS):
            if records.is_gone(record, names):
                yield attachment

    def _is_gone(self, attachment: str, names: frozenset[str]) -> bool:
        """Return True if an attachment is still gone; a runtime may have added it again."""
        record = self._node.records.get(records.PODS, attachment)
        return record is not None and records.is_gone(record, names)

    def _close(self, attachment: str, names: frozenset[str]) -> None:
        with self._node.exclusive(locks.PODS, attachment):
            if not self._is_gone(attachment, names):
                return
            pod_interfaces.remove_link(self._node, attachment, names)
            masquerade.close(self._node, attachment)
        with self._node.exclusive(locks.PORTS, attachment):
            if self._is_gone(attachment, names):
                portmap.close(self._node, attachment)

    def _forget(self, attachment: str, names: frozenset[str]) -> None:
        with self._node.exclusive(locks.PODS, attachment):
            if self._is_gone(attachment, names):
                self._node.records.drop(records.PODS, attachment)

    def _elements(self, table: PodTable, kind: ElementKind, name: str) -> Iterable[str]:
        orphans = remove_orphans(self._node, table, kind, dry_run=self._dry_run)
        found = [(one.element, one.owner) for one in orphans]
        if kind is masquerade.ELEMENTS:
            found += [(one, "") for one in remove_unused(self._node, table, kind, dry_run=self._dry_run)]
        return [f"{name} {one.set} {one.key.hex()} {owner}".rstrip() for one, owner in found]

    def _reservations(self, names: frozenset[str]) -> list[str]:
        """Release the addresses of attachments that are gone, and those that were never completely reserved."""
        found = []
        for directory in sorted(self._data_dir.iterdir()) if self._data_dir.is_dir() else ():
            leases = IpamLeases(str(directory))
            if not leases.exists():
                continue
            with leases.lock():
                free = []
                for one in leases.all():
                    owner = leases.owner(one)
                    attachment = f"{directory.name}:{owner.container}:{owner.interface}" if owner else ""
                    if owner is None or (records.split(attachment) and self._is_gone(attachment, names)):
                        free.append(one)
                if not self._dry_run:
                    leases.free(free)
            found += [f"{directory.name} {address_text(one)}" for one in free]
        return found

    def _files(self) -> list[str]:
        """Remove the files of writers that were killed."""
        held: Records = self._node.records
        found = []
        for kind, lock in _KINDS:
            for attachment in held.unfinished(kind):
                with self._node.exclusive(lock, attachment):
                    if self._dry_run or held.drop_unfinished(kind, attachment):
                        found.append(f"{held.directory}/{kind}/.{attachment}")
        for directory in sorted(self._data_dir.iterdir()) if self._data_dir.is_dir() else ():
            leases = IpamLeases(str(directory))
            if leases.exists():
                with leases.lock():
                    if leases.has_unfinished():
                        found.append(leases.unfinished)
                        if not self._dry_run:
                            leases.remove_unfinished()
        return found
