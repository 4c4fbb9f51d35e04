"""Changes of mode for a whole cluster, grouped, as text and as a document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from narthex.model import IPFamily, Packet, visible
from narthex.proxy.backends.base import Trait
from narthex.proxy.plan.ir import Plan, Sender
from narthex.trace.reports.migration.changes import PathChange

_SHOWN = 4
_SENDERS = {Sender.POD: "pods", Sender.NODE: "this node", Sender.OTHER: "others"}


class NodeChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change, and the node and IP family that it was found for."""

    node: str
    family: IPFamily
    change: PathChange


class _EqualChanges(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[str, ...]
    families: tuple[str, ...]
    arrivals: tuple[str, ...]
    senders: tuple[str, ...]
    sources: tuple[str, ...]
    """Other relevant properties of the source; empty if there are none."""
    before: str
    after: str
    reasons: tuple[str, ...]
    services: tuple[str, ...]


class ChangeGroup(_EqualChanges, frozen=True, kw_only=True):
    """Equal changes in several places."""

    example: Packet


class TraitDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A trait in which the two modes differ."""

    what: str
    before: str
    after: str
    services: tuple[str, ...]


class MigrationReport(msgspec.Struct, frozen=True, kw_only=True):
    """All effects of a change of mode."""

    before: str
    """The current mode."""
    after: str
    nodes: tuple[str, ...]
    services: tuple[str, ...]
    """All Service ports that were compared."""
    groups: tuple[ChangeGroup, ...] = ()
    differences: tuple[TraitDifference, ...] = ()

    def __bool__(self) -> bool:
        """Return True if anything changes."""
        return bool(self.groups or self.differences)


def grouped(found: Iterable[NodeChange]) -> tuple[ChangeGroup, ...]:
    """Group equal changes by sender, IP family, arrival, and node; groups with the most Services first."""
    alike: dict[tuple[Any, ...], dict[str, Packet]] = {}
    for each in found:
        change = each.change
        key = (
            (each.node,),
            (each.family.label,),
            (change.arrival,),
            (_SENDERS[change.sender],),
            (change.source,),
            change.before,
            change.after,
            change.reasons,
        )
        alike.setdefault(key, {}).setdefault(change.service, change.example)
    names = ChangeGroup.__struct_fields__
    values = ((*key, tuple(sorted(held)), held[min(held)]) for key, held in alike.items())
    groups = [ChangeGroup(**dict(zip(names, each, strict=True))) for each in values]
    for field in ("sources", "senders", "families", "arrivals", "nodes"):
        groups = _merged(groups, field)
    return tuple(sorted(groups, key=lambda group: (-len(group.services), group.arrivals, group.senders, group.sources)))


def _merged(groups: list[ChangeGroup], field: str) -> list[ChangeGroup]:
    """Merge groups that differ only in one field."""
    held: dict[tuple[Any, ...], ChangeGroup] = {}
    for group in groups:
        rest = tuple(getattr(group, name) for name in ChangeGroup.__struct_fields__ if name not in (field, "example"))
        first = held.get(rest)
        values = {*(getattr(first, field) if first else ()), *getattr(group, field)}
        if field == "sources" and "" in values:
            values = {""}
        order = [*_SENDERS.values()].index if field == "senders" else None
        held[rest] = msgspec.structs.replace(first or group, **{field: tuple(sorted(values, key=order))})
    return list(held.values())


def differences(
    before: Mapping[Trait, str], after: Mapping[Trait, str], plans: Iterable[Plan]
) -> tuple[TraitDifference, ...]:
    """Return the traits that differ and apply to a Service port of the plans."""
    services = {name: service for plan in plans for name, service in plan.services.items()}
    found = []
    for trait in Trait:
        if before[trait] != after[trait]:
            concerned = tuple(sorted(str(name) for name, service in services.items() if trait.concerns(service)))
            if concerned:
                found.append(
                    TraitDifference(what=trait.words, before=before[trait], after=after[trait], services=concerned)
                )
    return tuple(found)


# ---- for people ----------------------------------------------------------------------------------------------------


def text(migration: MigrationReport, all_services: bool = False) -> str:
    """Return the report; empty if nothing changes. Long lists of Services are cut unless `all_services`."""
    if not migration:
        return ""
    limit = None if all_services else _SHOWN
    count = len(migration.services)
    lines = [
        f"from {migration.before} to {migration.after}, on {some(migration.nodes, limit, 'nodes')}: "
        f"{count} Service port{'' if count == 1 else 's'}"
    ]
    if migration.groups:
        lines += ["", "Packets:"]
    for group in migration.groups:
        lines += ["", *_group_lines(group, migration, limit)]
    if migration.differences:
        lines += ["", "What no single packet shows:"]
    for difference in migration.differences:
        lines += [
            "",
            f"  {difference.what}",
            f"    before: {difference.before}",
            f"    after:  {difference.after}",
            f"    for:    {_services(difference.services, migration.services, limit)}",
        ]
    return "\n".join(map(visible, lines)) + "\n"


def heading(group: ChangeGroup) -> str:
    """Return which packets change: `node port; from others`."""
    senders = " and ".join(group.senders) + ("" if group.sources == ("",) else f" ({', or '.join(group.sources)})")
    return f"{', '.join(group.arrivals)}; from {senders}"


def _group_lines(group: ChangeGroup, migration: MigrationReport, limit: int | None) -> Iterable[str]:
    yield f"  {heading(group)}"
    yield f"    before: {group.before}"
    yield f"    after:  {group.after}"
    for reason in group.reasons:
        yield f"    why:    {reason}"
    if group.services != ("",):
        yield f"    for:    {_services(group.services, migration.services, limit)}"
    if group.nodes != migration.nodes:
        yield f"    on:     {some(group.nodes, limit, 'nodes')}"
    example = f"{group.example}, {', '.join(group.families)}"
    yield f"    as in:  {example}"


def _services(names: tuple[str, ...], everything: tuple[str, ...], limit: int | None) -> str:
    if names == everything and len(names) > 1 and limit is not None:
        return f"all {len(names):,} Service ports"
    return some(names, limit, "more")


def some(names: tuple[str, ...], limit: int | None, what: str) -> str:
    """Return the first names and the number of the others."""
    shown = names[:limit]
    if len(shown) == len(names):
        return ", ".join(names)
    return f"{', '.join(shown)} and {len(names) - len(shown):,} {what if what == 'more' else f'more {what}'}"


# ---- for programs --------------------------------------------------------------------------------------------------


class PacketRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An example packet."""

    source: str = msgspec.field(name="from")
    destination: str = msgspec.field(name="to")
    port: int
    protocol: str
    interface: str


class ChangeRecord(_EqualChanges, frozen=True, kw_only=True):
    """A `ChangeGroup` in a document."""

    example: PacketRecord


class MigrationDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="migrate"):
    """What `narthex migrate -o json` prints: the whole report, without cuts."""

    version: Literal[1] = 1
    before: str = msgspec.field(name="from")
    after: str = msgspec.field(name="to")
    nodes: tuple[str, ...]
    service_ports: int = msgspec.field(name="servicePorts")
    """How many Service ports were compared."""
    changes: tuple[ChangeRecord, ...]
    differences: tuple[TraitDifference, ...]


def migration_document(report: MigrationReport) -> MigrationDocument:
    """Return the document for a report."""
    same = {name: getattr(report, name) for name in ("before", "after", "nodes", "differences")}
    changes = tuple(map(_change_record, report.groups))
    return MigrationDocument(**same, service_ports=len(report.services), changes=changes)


def _change_record(group: ChangeGroup) -> ChangeRecord:
    packet = group.example
    example = PacketRecord(
        source=packet.source,
        destination=packet.destination,
        port=packet.port,
        protocol=packet.protocol.value,
        interface=packet.iif,
    )
    sources = tuple(source for source in group.sources if source)
    return ChangeRecord(**{**msgspec.structs.asdict(group), "sources": sources, "example": example})
