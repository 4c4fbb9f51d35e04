"""Changes that other programs make to our rules."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from immutables import Map

from narthex.netfilter.ast import Chain, Table
from narthex.proxy.backends.iptables.rules import XtablesRules
from narthex.proxy.backends.ipvs.rules import IpvsRules
from narthex.proxy.backends.nftables.backend import NftRules, from_table
from narthex.proxy.backends.userspace.rules import UserspaceRules


def flushed(rules: Any) -> Any:
    """Return what remains after a firewall flushed all rules; None: nothing."""
    if isinstance(rules, IpvsRules):
        return IpvsRules(rules.family, rules.servers, rules.bound, rules.sets, _no_tables(rules.tables))
    if isinstance(rules, UserspaceRules):
        return msgspec.structs.replace(rules, tables=_no_tables(rules.tables))
    return None


def foreign_change(rules: Any, random: Random) -> Any:
    """Return the rules after another program changed some of what the kernel reports to everybody; None: all are gone."""
    if rules is None or random.random() < 0.4:
        return flushed(rules)
    if isinstance(rules, NftRules):
        return from_table(_changed_table(rules.table(), random))
    if isinstance(rules, IpvsRules):
        return IpvsRules(rules.family, rules.servers, rules.bound, rules.sets, _changed_chains(rules.tables, random))
    if isinstance(rules, UserspaceRules):
        return msgspec.structs.replace(rules, tables=_changed_chains(rules.tables, random))
    assert isinstance(rules, XtablesRules)
    return _changed_chains(rules, random)


def silent_change(rules: IpvsRules, random: Random) -> IpvsRules:
    """Return the rules after another program changed virtual servers or addresses, which the kernel does not report."""
    servers, bound = rules.servers, rules.bound
    match random.choice(("clear", "delete a server", "delete a real server", "delete an address")):
        case "clear":
            servers = Map()
        case "delete a server" if servers:
            servers = servers.delete(random.choice(sorted(servers, key=str)))
        case "delete a real server" if servers:
            key = random.choice(sorted(servers, key=str))
            servers = servers.set(key, msgspec.structs.replace(servers[key], reals=servers[key].reals[1:]))
        case "delete an address" if bound:
            bound = bound - {random.choice(sorted(bound))}
    return IpvsRules(rules.family, servers, bound, rules.sets, rules.tables)


def _no_tables(tables: XtablesRules) -> XtablesRules:
    return XtablesRules(tables.family, {}, Map(), tables.sysctls)


def _changed_table(table: Table, random: Random) -> Table:
    kind = random.choice(("flush base chains", "flush a chain", "delete elements", "add a chain"))
    chains = dict(table.chains)
    if kind == "flush base chains":
        for name, chain in chains.items():
            if chain.hook is not None:
                chains[name] = msgspec.structs.replace(chain, rules=())
    elif kind == "flush a chain" and chains:
        name = random.choice(sorted(chains))
        chains[name] = msgspec.structs.replace(chains[name], rules=())
    elif kind == "delete elements":
        filled = sorted(name for name, one in table.sets.items() if one.elements)
        if filled:
            one = table.sets[random.choice(filled)]
            kept = {key: data for key, data in one.elements.items() if random.random() < 0.5}
            sets = {**table.sets, one.name: msgspec.structs.replace(one, elements=kept)}
            return msgspec.structs.replace(table, sets=sets)
    else:
        chains["foo"] = Chain(name="foo")
    return msgspec.structs.replace(table, chains=chains)


def _changed_chains(rules: XtablesRules, random: Random) -> XtablesRules:
    nat = rules.chains["nat"]
    if random.random() < 0.3:
        return XtablesRules(rules.family, rules.chains, Map(), rules.sysctls)
    chain = random.choice(sorted(nat)) if nat else ""
    changed = nat.set(chain, ()) if nat and random.random() < 0.7 else nat.delete(chain) if nat else nat
    return XtablesRules(rules.family, {**rules.chains, "nat": changed}, rules.jumps, rules.sysctls)
