"""The single writes that a Target makes of the changes of one sync: a process may end, or others may write, between any two.

Each write leads from the rules that the kernel has now to the next ones. It raises KeyError if the kernel lacks what the
write refers to. The order is that of the Targets in `narthex.proxy.kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from typing import Any, NamedTuple

import msgspec
from immutables import Map

from narthex.model import IPFamily
from narthex.netfilter.ast import Goto, Jump, TouchedPart
from narthex.netfilter.ipvs import VirtualServer
from narthex.proxy.backends.base import Backend
from narthex.proxy.backends.iptables.names import OWN_TABLES
from narthex.proxy.backends.iptables.rules import Rules, XtablesChanges, XtablesRules, differing
from narthex.proxy.backends.iptables.script import written_again
from narthex.proxy.backends.ipvs.rules import IpvsChanges, IpvsRules, RealChanges, diff, patch
from narthex.proxy.backends.nftables.changes import NftChanges
from narthex.proxy.backends.userspace.rules import RelayListener, UserspaceChanges, UserspaceRules
from narthex.proxy.plan.ir import Plan


class KernelWrite(NamedTuple):
    """One write."""

    made: Callable[[Any], Any]
    """Returns the rules after the write, given those before."""
    is_notified: bool = True
    """It is a transaction of nf_tables, which the kernel reports to everybody."""


def empty_rules(backend: Backend[Any, Any], family: IPFamily) -> Any:
    """Return the rules of a kernel that has none of ours; None: there is not even a table."""
    nothing = XtablesRules(family, {}, Map())
    match backend.name:
        case "iptables":
            return nothing
        case "ipvs":
            return IpvsRules(family, Map(), frozenset(), {}, nothing)
        case "userspace":
            return UserspaceRules(tables=nothing)
    return None


def kernel_writes(backend: Backend[Any, Any], changes: Any, now: Any) -> list[KernelWrite]:
    """Return the writes of some changes, of which none is made yet, to the rules that the kernel has now."""
    match changes:
        case NftChanges():
            return [KernelWrite(partial(_patched, backend, phase)) for phase in changes.phases()]
        case XtablesChanges():
            return list(_table_writes(changes, lambda rules: rules, lambda _, tables: tables))
        case IpvsChanges():
            return list(_ipvs_writes(changes, now))
        case UserspaceChanges():
            return list(_userspace_writes(changes))
    raise TypeError(f"changes of an unknown mode: {type(changes).__name__}")


def _patched(backend: Backend[Any, Any], changes: NftChanges, rules: Any) -> Any:
    if rules is None:
        if not changes.replace:
            raise KeyError("table")
        rules = backend.render(Plan(family=changes.family, services={}))
    return backend.patch(rules, changes)


# ---- iptables ------------------------------------------------------------------------------------------------------


def _table_writes(
    changes: XtablesChanges, get: Callable[[Any], XtablesRules], put: Callable[[Any, XtablesRules], Any]
) -> Iterator[KernelWrite]:
    """Yield one write for each table: iptables-restore commits them one by one."""
    jumped = {table for table, _ in changes.jumps or ()}
    for table in OWN_TABLES:
        if changes.replace or table in jumped or changes.written.get(table) or changes.removed.get(table):

            def made(rules: Any, table: str = table) -> Any:
                """Return the kernel's rules after the commit of this table."""
                return put(rules, _with_table(get(rules), changes, table))

            yield KernelWrite(made)


def _with_table(rules: XtablesRules, changes: XtablesChanges, table: str) -> XtablesRules:
    """Return the rules after iptables-restore committed one table."""
    written = changes.written.get(table, {})
    chains: Map[str, Rules] = Map(dict(written)) if changes.replace else rules.chains[table].update(written)
    for name in changes.removed.get(table, ()):
        chains = chains.delete(name) if name in chains else chains
    jumps = rules.jumps
    if changes.jumps is not None:
        kept = {place: own for place, own in rules.jumps.items() if place[0] != table}
        jumps = Map(kept | {place: own for place, own in changes.jumps.items() if place[0] == table})
        _check_targets({place[1]: own for place, own in jumps.items() if place[0] == table}, chains)
    _check_targets(written, chains)
    return XtablesRules(changes.family, {**rules.chains, table: chains}, jumps, (*rules.sysctls, *changes.sysctls))


def _check_targets(written: Mapping[str, Rules], chains: Mapping[str, Rules]) -> None:
    """Raise KeyError if a rule leads to a chain that does not exist, as iptables-restore fails then."""
    for rules in written.values():
        for rule in rules:
            for each in rule.expressions:
                if isinstance(each, Jump | Goto) and each.chain not in chains:
                    raise KeyError(each.chain)


def touched_parts(before: Any, after: Any) -> frozenset[TouchedPart] | None:
    """Return the chains that differ, in mode iptables; None if anything may differ."""
    if not isinstance(before, XtablesRules) or not isinstance(after, XtablesRules):
        return None
    chains = {(table, name) for table in OWN_TABLES for name in differing(before.chains[table], after.chains[table])}
    return frozenset(TouchedPart(*place) for place in chains | differing(before.jumps, after.jumps))


def lacking_parts(have: Any, desired: Any, touched: Set[TouchedPart]) -> frozenset[TouchedPart]:
    """Return the touched chains that have too few rules, in mode iptables."""
    if not isinstance(have, XtablesRules) or not isinstance(desired, XtablesRules):
        return frozenset()
    return frozenset(part for part in touched if _rule_count(have, part) < _rule_count(desired, part))


def _rule_count(rules: XtablesRules, part: TouchedPart) -> int:
    return len(rules.chains[part.table].get(part.chain, ()))


def parts_again(rules: Any, touched: Set[TouchedPart] | None) -> XtablesChanges | None:
    """Return the changes that write the touched chains again, in mode iptables; None if a reading is needed."""
    return written_again(rules, touched) if touched and isinstance(rules, XtablesRules) else None


# ---- ipvs ----------------------------------------------------------------------------------------------------------


def _ipvs_writes(changes: IpvsChanges, now: IpvsRules) -> Iterator[KernelWrite]:
    if changes.replace:
        differences = diff(now, patch(now, changes))
        changes = msgspec.structs.replace(differences, tables=changes.tables)
    yield _silent(lambda rules: _replaced(rules, bound=rules.bound | changes.bind))
    yield _silent(partial(_with_entries, changes, add=True))
    yield from _table_writes(
        changes.tables, lambda rules: rules.tables, lambda rules, tables: _replaced(rules, tables=tables)
    )
    yield _silent(partial(_with_servers, changes))
    for server in changes.servers_added:
        yield _silent(partial(_with_server, server))
    for key, change in changes.reals.items():
        for part in real_writes(change):
            yield _silent(partial(_with_reals, key, part))
    yield _silent(partial(_with_entries, changes, add=False))
    yield _silent(lambda rules: _replaced(rules, bound=rules.bound - changes.unbind))


def real_writes(change: RealChanges) -> tuple[RealChanges, ...]:
    """Return the messages of one datagram in the order in which the kernel takes them."""
    return RealChanges(added=change.added), RealChanges(edited=change.edited, removed=change.removed)


def _silent(made: Callable[[Any], Any]) -> KernelWrite:
    return KernelWrite(made, is_notified=False)


def _replaced(rules: IpvsRules, **parts: Any) -> IpvsRules:
    fields = {name: parts.get(name, getattr(rules, name)) for name in ("servers", "bound", "sets", "tables")}
    return IpvsRules(rules.family, **fields)


def _with_entries(changes: IpvsChanges, rules: IpvsRules, *, add: bool) -> IpvsRules:
    sets = dict(rules.sets)
    if add:
        sets.update((held.name, held) for held in changes.sets_added)
    else:
        for name in changes.sets_removed:
            sets.pop(name, None)
    for name, change in changes.entries.items():
        held = sets[name]
        entries = held.entries | change.added if add else held.entries - change.removed
        sets[name] = msgspec.structs.replace(held, entries=entries)
    return _replaced(rules, sets=sets)


def _with_servers(changes: IpvsChanges, rules: IpvsRules) -> IpvsRules:
    """Return the rules without the removed virtual servers, and with the settings of the edited ones."""
    servers = rules.servers
    for key in changes.servers_removed:
        servers = servers.delete(key) if key in servers else servers
    for server in changes.servers_edited:
        servers = servers.set(server.key, msgspec.structs.replace(server, reals=servers[server.key].reals))
    return _replaced(rules, servers=servers)


def _with_server(server: VirtualServer, rules: IpvsRules) -> IpvsRules:
    return _replaced(rules, servers=rules.servers.set(server.key, server))


def _with_reals(key: Any, change: RealChanges, rules: IpvsRules) -> IpvsRules:
    server = rules.servers[key]
    reals = {(real.address, real.port): real for real in server.reals}
    for real in change.removed:
        reals.pop((real.address, real.port), None)
    reals |= {(real.address, real.port): real for real in (*change.added, *change.edited)}
    ordered = tuple(sorted(reals.values(), key=lambda real: real.sort_key))
    return _replaced(rules, servers=rules.servers.set(key, msgspec.structs.replace(server, reals=ordered)))


# ---- userspace -----------------------------------------------------------------------------------------------------


def _userspace_writes(changes: UserspaceChanges) -> Iterator[KernelWrite]:
    def opened(rules: UserspaceRules) -> UserspaceRules:
        """Return the rules with the new listeners and the mark."""
        listeners = rules.listeners.update({one.key: one for one in changes.listen})
        return msgspec.structs.replace(rules, listeners=listeners, mark=changes.mark)

    def closed(rules: UserspaceRules) -> UserspaceRules:
        """Return the rules without the listeners that were closed or replaced."""
        desired = {one.key for one in changes.listen}
        gone = {key for key in rules.listeners if changes.replace and key not in desired} | set(changes.close)
        kept: dict[Any, RelayListener] = {key: one for key, one in rules.listeners.items() if key not in gone}
        return msgspec.structs.replace(rules, listeners=Map(kept))

    yield _silent(opened)
    yield from _table_writes(
        changes.tables, lambda rules: rules.tables, lambda rules, tables: msgspec.structs.replace(rules, tables=tables)
    )
    yield _silent(closed)
