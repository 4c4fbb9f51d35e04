"""Faults in rules, each a small change that proves nothing to packets that nobody tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from decimal import Decimal

import msgspec

from narthex.netfilter import ast
from narthex.netfilter.ipvs import VirtualServer
from narthex.trace.proof.referred import ReferredObjects

Fault = Callable[[ast.Ruleset, random.Random], ast.Ruleset]
ObjectFault = Callable[[ReferredObjects, random.Random], ReferredObjects]
ServerChange = Callable[[VirtualServer], VirtualServer]


def _chains(ruleset: ast.Ruleset, prefixes: tuple[str, ...]) -> list[tuple[ast.Table, ast.Chain]]:
    found = [
        (table, table.chains[name])
        for table in ruleset.tables
        for name in sorted(table.chains)
        if name.startswith(prefixes) and table.name in ("nat", "narthex")
    ]
    assert found
    return found


def _with_rules(ruleset: ast.Ruleset, table: ast.Table, chain: ast.Chain, rules: Sequence[ast.Rule]) -> ast.Ruleset:
    chains = {**table.chains, chain.name: msgspec.structs.replace(chain, rules=tuple(rules))}
    return _with_table(ruleset, table, msgspec.structs.replace(table, chains=chains))


def _with_table(ruleset: ast.Ruleset, old: ast.Table, new: ast.Table) -> ast.Ruleset:
    return msgspec.structs.replace(ruleset, tables=tuple(new if each is old else each for each in ruleset.tables))


def _with_elements(
    ruleset: ast.Ruleset, table: ast.Table, name: str, elements: dict[ast.ElementKey, ast.ElementData]
) -> ast.Ruleset:
    sets = {**table.sets, name: msgspec.structs.replace(table.sets[name], elements=elements)}
    return _with_table(ruleset, table, msgspec.structs.replace(table, sets=sets))


def _change(rule: ast.Rule, old: ast.Expression, *new: ast.Expression) -> ast.Rule:
    expressions = tuple(part for each in rule.expressions for part in (new if each is old else (each,)))
    return msgspec.structs.replace(rule, expressions=expressions)


# ---- iptables ------------------------------------------------------------------------------------------------------------------


def _drawing(ruleset: ast.Ruleset) -> list[tuple[ast.Table, ast.Chain]]:
    """Return the chains that draw among at least two endpoints."""
    return [pair for pair in _chains(ruleset, ("KUBE-SVC-",)) if any(map(_random, pair[1].rules))]


def _random(rule: ast.Rule) -> ast.RandomMatch | None:
    return next((each for each in rule.expressions if isinstance(each, ast.RandomMatch)), None)


def swapped_rules(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    table, chain = rng.choice(_drawing(ruleset))
    rules = list(chain.rules)
    at = rng.choice([number for number, rule in enumerate(rules) if _random(rule) is not None])
    rules[at], rules[at + 1] = rules[at + 1], rules[at]
    return _with_rules(ruleset, table, chain, rules)


def shifted_probability(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    table, chain = rng.choice(_drawing(ruleset))
    rules = list(chain.rules)
    at = rng.choice([number for number, rule in enumerate(rules) if _random(rule) is not None])
    random_match = _random(rules[at])
    assert random_match is not None
    by = rng.choice((Decimal("0.000000001"), Decimal("-0.000000001")))
    rules[at] = _change(rules[at], random_match, ast.RandomMatch(f"{Decimal(random_match.probability) + by:.11f}"))
    return _with_rules(ruleset, table, chain, rules)


def port_range(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    table, chain = rng.choice(_chains(ruleset, ("KUBE-SERVICES",)))
    rules = list(chain.rules)
    ported = [
        (number, each)
        for number, rule in enumerate(rules)
        for each in rule.expressions
        if isinstance(each, ast.Compare) and each.field is ast.Field.DPORT
    ]
    at, port = rng.choice(ported)
    first = int(port.values[0])
    rules[at] = _change(rules[at], port, ast.PortRange(ast.Field.DPORT, first, first + rng.randint(1, 9)))
    return _with_rules(ruleset, table, chain, rules)


def mark_bit(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    table, chain = rng.choice(_chains(ruleset, ("KUBE-MARK-MASQ", "send-", "nodeport-")))
    while not any(isinstance(each, (ast.MarkOr, ast.SetMark)) for rule in chain.rules for each in rule.expressions):
        table, chain = rng.choice(_chains(ruleset, ("KUBE-MARK-MASQ", "send-", "nodeport-")))
    bit = 1 << rng.choice([at for at in range(32) if at != 14])
    rules = []
    for rule in chain.rules:
        marks = [each for each in rule.expressions if isinstance(each, (ast.MarkOr, ast.SetMark))]
        rules.append(_change(rule, marks[0], ast.MarkOr(bit)) if marks else rule)
    return _with_rules(ruleset, table, chain, rules)


def missing_endpoint(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    table, chain = rng.choice(_drawing(ruleset))
    rules = list(chain.rules)
    del rules[rng.choice([number for number, rule in enumerate(rules) if rule.target.startswith("KUBE-SEP-")])]
    return _with_rules(ruleset, table, chain, rules)


def early_jump(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    """Go to the Service's chain before the packet is marked."""
    external = [pair for pair in _chains(ruleset, ("KUBE-EXT-",)) if pair[1].rules[0].target == "KUBE-MARK-MASQ"]
    table, chain = rng.choice(external)
    return _with_rules(ruleset, table, chain, chain.rules[::-1])


# ---- nftables ------------------------------------------------------------------------------------------------------------------


def _narthex(ruleset: ast.Ruleset) -> ast.Table:
    return next(table for table in ruleset.tables if table.name == "narthex")


def swapped_nft_rules(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    """Swap the test of the sender with the goto for all others."""
    table = _narthex(ruleset)
    both = [chain for _, chain in _chains(ruleset, ("send-c-", "nodeport-c-")) if len(chain.rules) > 1]
    chain = rng.choice(both)
    rules = list(chain.rules)
    rules[-2], rules[-1] = rules[-1], rules[-2]
    return _with_rules(ruleset, table, chain, rules)


def wider_draw(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    """Draw one number more than there are endpoints."""
    table = _narthex(ruleset)
    drawn = [
        (chain, number, each)
        for _, chain in _chains(ruleset, ("send-", "nodeport-"))
        for number, rule in enumerate(chain.rules)
        for each in rule.expressions
        if isinstance(each, ast.DnatMap)
    ]
    chain, number, dnat = rng.choice(drawn)
    key = tuple(ast.Slot(part.mod + 1) if isinstance(part, ast.Slot) else part for part in dnat.key)
    rules = list(chain.rules)
    rules[number] = _change(rules[number], dnat, ast.DnatMap(key, dnat.map))
    return _with_rules(ruleset, table, chain, rules)


def other_port(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    table = _narthex(ruleset)
    elements = dict(table.sets["services"].elements)
    address, protocol, port = key = rng.choice([key for key, data in elements.items() if isinstance(data, ast.Goto)])
    elements[address, protocol, int(port) + 1] = elements[key]
    del elements[key]
    return _with_elements(ruleset, table, "services", elements)


def missing_element(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    table = _narthex(ruleset)
    elements = dict(table.sets["endpoints"].elements)
    del elements[rng.choice(list(elements))]
    return _with_elements(ruleset, table, "endpoints", elements)


def swapped_endpoints(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    """Swap the endpoints of two Services."""
    table = _narthex(ruleset)
    elements = dict(table.sets["endpoints"].elements)
    one = rng.choice(list(elements))
    other = rng.choice([key for key in elements if key[0] != one[0] and elements[key] != elements[one]])
    elements[one], elements[other] = elements[other], elements[one]
    return _with_elements(ruleset, table, "endpoints", elements)


def early_goto(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    """Go on before the packet is marked."""
    table = _narthex(ruleset)
    marking = [
        chain
        for _, chain in _chains(ruleset, ("send-cm", "nodeport-cm"))
        if any(isinstance(each, ast.MarkOr) for rule in chain.rules for each in rule.expressions)
    ]
    chain = rng.choice(marking)
    rules = [msgspec.structs.replace(rule, expressions=rule.expressions[::-1]) for rule in chain.rules]
    return _with_rules(ruleset, table, chain, rules)


# ---- userspace -----------------------------------------------------------------------------------------------------------------

_PORTALS = (
    "KUBE-PORTALS-CONTAINER",
    "KUBE-PORTALS-HOST",
    "KUBE-NODEPORT-CONTAINER",
    "KUBE-NODEPORT-HOST",
    "KUBE-PORTAL-",
)


def _redirecting(ruleset: ast.Ruleset) -> list[tuple[ast.Table, ast.Chain, int, ast.Redirect]]:
    """Return the rules that redirect to the relay."""
    return [
        (table, chain, number, each)
        for table, chain in _chains(ruleset, _PORTALS)
        for number, rule in enumerate(chain.rules)
        for each in rule.expressions
        if isinstance(each, ast.Redirect)
    ]


def other_listener(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    """Redirect to a port of the relay that is another Service's."""
    found = _redirecting(ruleset)
    table, chain, number, redirect = rng.choice(found)
    rules = list(chain.rules)
    rules[number] = _change(rules[number], redirect, ast.Redirect(rng.choice([each.port for *_, each in found])))
    return _with_rules(ruleset, table, chain, rules)


def missing_portal(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    table, chain, number, _ = rng.choice(_redirecting(ruleset))
    rules = list(chain.rules)
    del rules[number]
    return _with_rules(ruleset, table, chain, rules)


def wider_portal(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    table, chain, number, _ = rng.choice(_redirecting(ruleset))
    rules = list(chain.rules)
    ports = [
        each for each in rules[number].expressions if isinstance(each, ast.Compare) and each.field is ast.Field.DPORT
    ]
    if ports:
        first = int(ports[0].values[0])
        wider = ast.PortRange(ast.Field.DPORT, first, first + rng.randint(1, 9))
        rules[number] = _change(rules[number], ports[0], wider)
    return _with_rules(ruleset, table, chain, rules)


def early_doors(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    """Refuse connections to the relay before those that were redirected are accepted."""
    table = next(table for table in ruleset.tables if table.name == "filter")
    chain = table.chains["KUBE-NODEPORT-NON-LOCAL"]
    rules = list(chain.rules)
    at = 2 * rng.randrange(len(rules) // 2)
    rules[at], rules[at + 1] = rules[at + 1], rules[at]
    rules[at] = ast.Rule(tuple(each for each in rules[at].expressions if not isinstance(each, ast.CtState)))
    return _with_rules(ruleset, table, chain, rules)


def idle_endpoint(referred: ReferredObjects, rng: random.Random) -> ReferredObjects:
    """Take an endpoint from the table of the relay."""
    key = rng.choice(sorted(referred.listeners, key=str))
    listener = referred.listeners[key]
    ends = list(listener.endpoints)
    del ends[rng.randrange(len(ends))]
    changed = msgspec.structs.replace(listener, endpoints=tuple(ends or listener.endpoints))
    return referred._replace(listeners=referred.listeners.set(key, changed))


# ---- ipvs ----------------------------------------------------------------------------------------------------------------------


def missing_entry(referred: ReferredObjects, rng: random.Random) -> ReferredObjects:
    """Take an entry from an ipset."""
    sets = dict(referred.objects.sets)
    held = sets[rng.choice(sorted(name for name, each in sets.items() if each.entries))]
    gone = rng.choice(sorted(held.entries))
    sets[held.name] = msgspec.structs.replace(held, entries=held.entries - {gone})
    return referred._replace(objects=msgspec.structs.replace(referred.objects, sets=sets))


def _with_server(referred: ReferredObjects, rng: random.Random, change: ServerChange) -> ReferredObjects:
    servers = dict(referred.objects.servers)
    key = rng.choice(sorted(servers, key=str))
    servers[key] = change(servers[key])
    return referred._replace(objects=msgspec.structs.replace(referred.objects, servers=servers))


def missing_real_server(referred: ReferredObjects, rng: random.Random) -> ReferredObjects:
    return _with_server(
        referred, rng, lambda server: msgspec.structs.replace(server, reals=server.reals[: len(server.reals) - 1])
    )


def heavier_real_server(referred: ReferredObjects, rng: random.Random) -> ReferredObjects:
    """Give a real server twice the weight, which round robin does not look at, and weighted round robin does."""
    scheduler = rng.choice(("rr", "wrr"))

    def change(server: VirtualServer) -> VirtualServer:
        """Return the virtual server with another scheduler and weight."""
        first, *others = server.reals
        reals = (msgspec.structs.replace(first, weight=2), *others)
        return msgspec.structs.replace(server, scheduler=scheduler, reals=reals)

    return _with_server(referred, rng, change)


def other_server_port(referred: ReferredObjects, rng: random.Random) -> ReferredObjects:
    servers = dict(referred.objects.servers)
    key = rng.choice(sorted(servers, key=str))
    server = servers.pop(key)
    moved = msgspec.structs.replace(server, port=server.port + 1)
    servers[moved.key] = moved
    return referred._replace(objects=msgspec.structs.replace(referred.objects, servers=servers))


def swapped_ipvs_rules(ruleset: ast.Ruleset, rng: random.Random) -> ast.Ruleset:
    """Swap the rule that spares packets without a mark with the one that takes marks off, so that all are masqueraded."""
    del rng
    table, chain = next(pair for pair in _chains(ruleset, ("KUBE-POSTROUTING",)))
    rules = list(chain.rules)
    at = next(
        number for number, rule in enumerate(rules) if any(isinstance(each, ast.Return) for each in rule.expressions)
    )
    rules[at], rules[at + 1] = rules[at + 1], rules[at]
    return _with_rules(ruleset, table, chain, rules)


FAULTS: dict[str, tuple[Fault, ...]] = {
    "iptables": (swapped_rules, shifted_probability, port_range, mark_bit, missing_endpoint, early_jump),
    "nftables": (swapped_nft_rules, wider_draw, other_port, mark_bit, missing_element, swapped_endpoints, early_goto),
    "userspace": (other_listener, missing_portal, wider_portal, early_doors),
    "ipvs": (mark_bit, swapped_ipvs_rules),
}
"""Faults in rules."""
OBJECT_FAULTS: dict[str, tuple[ObjectFault, ...]] = {
    "userspace": (idle_endpoint,),
    "ipvs": (missing_entry, missing_real_server, heavier_real_server, other_server_port),
}
"""Faults in what rules refer to."""
