"""The rules of the ipvs backend: virtual servers, the addresses bound for them, sets, and fixed iptables rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import msgspec
from immutables import Map

from narthex.model import IPFamily
from narthex.netfilter.ipset import IpSet
from narthex.netfilter.ipvs import RealServer, ServerKey, VirtualServer
from narthex.proxy.backends.iptables import rules as xtables
from narthex.proxy.backends.iptables.rules import XtablesChanges, XtablesRules


class IpvsRules:
    """All of our objects for one family. Immutable; equal if the parts are equal.

    A real server that leaves is absent here. The Target keeps it with weight 0 while connections need it (row 24.8),
    and reads a real server with weight 0 as absent.
    """

    def __init__(
        self,
        family: IPFamily,
        servers: Map[ServerKey, VirtualServer],
        bound: frozenset[str],
        sets: Mapping[str, IpSet],
        tables: XtablesRules,
        rendering: object = None,
    ) -> None:
        self.family = family
        self.servers = servers
        self.bound = bound
        """Addresses on the link kube-ipvs0."""
        self.sets = sets
        """By name."""
        self.tables = tables
        """The fixed iptables part. Its rules name sets, so the sets must be there first and go last."""
        self.rendering = rendering
        """The renderer's notes for the next time; None for rules read from a kernel."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IpvsRules):
            return NotImplemented
        return (
            self.family is other.family
            and self.servers == other.servers
            and self.bound == other.bound
            and self.sets == other.sets
            and self.tables == other.tables
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<ipvs rules for {self.family.label}: {len(self.servers)} virtual servers, {len(self.sets)} sets>"


class RealChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Real servers of one virtual server that are added, get another weight, or are removed."""

    added: tuple[RealServer, ...] = ()
    edited: tuple[RealServer, ...] = ()
    """With the new weight."""
    removed: tuple[RealServer, ...] = ()


class SetChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of one set that are added or removed."""

    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()


class IpvsChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The changes to write, part by part; unchanged objects are not mentioned. False if there is nothing to do."""

    family: IPFamily
    """All other fields are changes."""
    replace: bool = False
    """The state is unknown: objects of ours that are not named here are removed. All rules are among the additions."""
    servers_added: tuple[VirtualServer, ...] = ()
    """With all their real servers."""
    servers_edited: tuple[VirtualServer, ...] = ()
    """With the new settings; changes of their real servers are in `reals`."""
    servers_removed: tuple[ServerKey, ...] = ()
    reals: Mapping[ServerKey, RealChanges] = {}
    """Of virtual servers that exist and stay."""
    bind: frozenset[str] = frozenset()
    unbind: frozenset[str] = frozenset()
    sets_added: tuple[IpSet, ...] = ()
    """With all their entries; the removed may include one of the same name if its kind differs."""
    sets_removed: tuple[str, ...] = ()
    entries: Mapping[str, SetChanges] = {}
    """Of sets that exist and stay."""
    tables: XtablesChanges

    def __bool__(self) -> bool:
        return any(msgspec.structs.astuple(self)[1:])


def diff(have: IpvsRules | None, want: IpvsRules, touched: Set[ServerKey] | None = None) -> IpvsChanges:
    """Return the changes from one to the other; None as `have` means that everything is written.

    `touched` names the virtual servers that may differ; None: any may.
    """
    if have is None:
        return IpvsChanges(
            family=want.family,
            replace=True,
            servers_added=_sorted(want.servers.values()),
            bind=want.bound,
            sets_added=tuple(want.sets[name] for name in sorted(want.sets)),
            tables=xtables.diff(None, want.tables),
        )
    added: list[VirtualServer] = []
    edited: list[VirtualServer] = []
    removed: list[ServerKey] = []
    reals: dict[ServerKey, RealChanges] = {}
    for key in xtables.differing(have.servers, want.servers) if touched is None else touched:
        old, new = have.servers.get(key), want.servers.get(key)
        if old is new or old == new:
            continue
        if old is None:
            assert new is not None
            added.append(new)
        elif new is None:
            removed.append(key)
        else:
            edited += [new] if old.settings != new.settings else []
            if old.reals != new.reals:
                reals[key] = _real_changes(old.reals, new.reals)
    sets_added, sets_removed, entries = _set_changes(have.sets, want.sets)
    return IpvsChanges(
        family=want.family,
        servers_added=_sorted(added),
        servers_edited=_sorted(edited),
        servers_removed=tuple(sorted(removed, key=_key_order)),
        reals=reals,
        bind=want.bound - have.bound if want.bound is not have.bound else frozenset(),
        unbind=have.bound - want.bound if want.bound is not have.bound else frozenset(),
        sets_added=sets_added,
        sets_removed=sets_removed,
        entries=entries,
        tables=xtables.diff(have.tables, want.tables),
    )


def patch(have: IpvsRules, changes: IpvsChanges) -> IpvsRules:
    """Return the rules after the changes."""
    servers: Map[ServerKey, VirtualServer] = Map() if changes.replace else have.servers
    sets: dict[str, IpSet] = {} if changes.replace else dict(have.sets)
    bound: frozenset[str] = frozenset() if changes.replace else have.bound
    with servers.mutate() as mutation:
        for key in changes.servers_removed:
            del mutation[key]
        mutation.update({server.key: server for server in changes.servers_added})
        for server in changes.servers_edited:
            mutation[server.key] = msgspec.structs.replace(server, reals=mutation[server.key].reals)
        for key, change in changes.reals.items():
            mutation[key] = msgspec.structs.replace(mutation[key], reals=_changed_reals(mutation[key].reals, change))
        servers = mutation.finish()
    for name in changes.sets_removed:
        del sets[name]
    sets.update((held.name, held) for held in changes.sets_added)
    for name, entries in changes.entries.items():
        after = (sets[name].entries - entries.removed) | entries.added
        sets[name] = msgspec.structs.replace(sets[name], entries=after)
    return IpvsRules(
        changes.family,
        servers,
        (bound - changes.unbind) | changes.bind,
        sets,
        xtables.patch(have.tables, changes.tables),
    )


def _real_changes(old: tuple[RealServer, ...], new: tuple[RealServer, ...]) -> RealChanges:
    before = {(real.address, real.port): real for real in old}
    after = {(real.address, real.port): real for real in new}
    return RealChanges(
        added=tuple(real for where, real in after.items() if where not in before),
        edited=tuple(real for where, real in after.items() if where in before and before[where] != real),
        removed=tuple(real for where, real in before.items() if where not in after),
    )


def _changed_reals(reals: tuple[RealServer, ...], change: RealChanges) -> tuple[RealServer, ...]:
    kept = {(real.address, real.port): real for real in reals}
    for real in change.removed:
        del kept[real.address, real.port]
    for real in (*change.added, *change.edited):
        kept[real.address, real.port] = real
    return tuple(sorted(kept.values(), key=lambda real: real.sort_key))


def _set_changes(
    have: Mapping[str, IpSet], want: Mapping[str, IpSet]
) -> tuple[tuple[IpSet, ...], tuple[str, ...], dict[str, SetChanges]]:
    """Return added sets, names of removed sets, and the changes within the others."""
    added: list[IpSet] = []
    entries: dict[str, SetChanges] = {}
    removed = [name for name in have if name not in want]
    for name, new in want.items():
        old = have.get(name)
        if old is new:
            continue
        if old is None or (old.kind, old.family) != (new.kind, new.family):
            added.append(new)
            removed += [name] if old is not None else []
        elif old.entries != new.entries:
            entries[name] = SetChanges(added=new.entries - old.entries, removed=old.entries - new.entries)
    return tuple(sorted(added, key=lambda held: held.name)), tuple(sorted(removed)), entries


def _key_order(key: ServerKey) -> tuple[str, str, int]:
    address, protocol, port = key
    return address, protocol.value, port


def _sorted(servers: Iterable[VirtualServer]) -> tuple[VirtualServer, ...]:
    return tuple(sorted(servers, key=lambda server: _key_order(server.key)))
