"""Changes that other programs make to our rules."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from immutables import Map

from narthex.netfilter.ast import Chain, Table
from narthex.proxy.backends.iptables.rules import XtablesRules
from narthex.proxy.backends.nftables.backend import NftRules, from_table


def foreign_change(rules: Any, random: Random) -> Any:
    """Return the rules after another program changed them; None: it flushed everything."""
    if rules is None or random.random() < 0.4:
        return None
    if isinstance(rules, NftRules):
        return from_table(_changed_table(rules.table(), random))
    assert isinstance(rules, XtablesRules)
    return _changed_chains(rules, random)


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
