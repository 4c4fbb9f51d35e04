"""Consistent hashing in mode nftables: a map of slots for each pool, and changes no larger than what moved."""

import msgspec
import pytest
from tests.proxy.backends.nft_plans import (
    EXTERNAL_LOCAL,
    INTERNAL,
    after,
    frontend,
    node_port,
    plan,
    pool,
    port_name,
    service,
)

from narthex.model.packet import Host, Packet
from narthex.netfilter.ast import Compare, DnatMap, Field, Goto, HashedFields
from narthex.netfilter.nft.parse import parse_ruleset
from narthex.proxy.backends.counters import NftCounterOwners, counted_sets
from narthex.proxy.backends.nftables.backend import NftablesBackend
from narthex.proxy.plan.ir import Balancing
from narthex.proxy.plan.maglev import SEED, client_slot, lookup_table
from narthex.trace.evaluate import evaluate

BACKEND = NftablesBackend()
HOST = Host(addresses=("10.20.0.11",))
FRONTENDS = (frontend("10.96.0.9", 80, INTERNAL), node_port(30090, EXTERNAL_LOCAL))


def hashed(*numbers, local=(10,), balancing=Balancing.MAGLEV):
    made = service("web", *FRONTENDS, cluster=pool(*numbers, local=local), local=pool(*local, local=local))
    return msgspec.structs.replace(made, balancing=balancing)


def maps(table):
    return {name: one for name, one in table.sets.items() if name.startswith("maglev-")}


@pytest.mark.row("29.18")
def test_each_pool_has_a_map_that_all_frontends_share():
    made = plan(hashed(10, 11, 12))
    table = BACKEND.render(made).table()
    both = maps(table)
    assert [len(one.elements) for one in both.values()] == [1021, 1021]
    cluster = next(one for name, one in both.items() if name.endswith("-c"))
    expected = lookup_table(made.services[port_name("web")].pool(FRONTENDS[0].pod.scope).endpoints)
    assert [cluster.elements[slot,] for slot in range(1021)] == [(one.address, one.port) for one in expected]
    drawn = table.chains[cluster.name].rules
    number = HashedFields((Field.SADDR,), 1021, SEED)
    assert [rule.expressions for rule in drawn] == [
        (Compare(Field.L4PROTO, ("tcp",)), DnatMap((number,), cluster.name))
    ]
    assert isinstance(table.sets["services"].elements["10.96.0.9", "tcp", 80], Goto)
    assert not table.sets["endpoints"].elements


def test_the_text_is_read_back():
    table = BACKEND.render(plan(hashed(10, 11, 12))).table()
    (read,) = parse_ruleset(BACKEND.text(BACKEND.render(plan(hashed(10, 11, 12))))).tables
    assert read.chains == table.chains
    assert read.sets == table.sets


def test_a_change_of_one_endpoint_moves_its_share():
    first = plan(hashed(*range(10, 20)))
    rules, _ = BACKEND.advance(None, first)
    following, changes = BACKEND.advance(rules, after(first, hashed(*range(10, 19))))
    assert BACKEND.patch(rules, changes) == following
    assert not changes.chains and not changes.sets
    assert changes.element_count() < 2 * 1021 * 0.15


@pytest.mark.parametrize("balancing", [Balancing.RANDOM, Balancing.LEAST_CONNECTIONS])
def test_the_request_can_come_and_go(balancing):
    plain = plan(hashed(10, 11, 12, balancing=balancing))
    rules, _ = BACKEND.advance(None, plain)
    assert not maps(rules.table())
    requested = after(plain, hashed(10, 11, 12))
    there, changes = BACKEND.advance(rules, requested)
    assert BACKEND.patch(rules, changes) == there and len(maps(there.table())) == 2
    back, changes = BACKEND.advance(there, after(requested, hashed(10, 11, 12, balancing=balancing)))
    assert BACKEND.patch(there, changes) == back and not maps(back.table())
    # The old sets of counts stay, as those of other rows do.
    assert back.table().sets["endpoints"] == rules.table().sets["endpoints"]


def test_the_table_grows_with_the_endpoints():
    first = plan(hashed(*range(10, 30)))
    rules, _ = BACKEND.advance(None, first)
    following, changes = BACKEND.advance(rules, after(first, hashed(*range(10, 31))))
    assert BACKEND.patch(rules, changes) == following
    assert max(len(one.elements) for one in maps(following.table()).values()) == 16381


@pytest.mark.parametrize("source", ["10.64.1.200", "198.51.100.7", "10.20.0.11", "10.64.1.11"])
def test_a_trace_is_certain_of_the_endpoint(source):
    made = plan(hashed(10, 11, 12))
    packet = Packet(source=source, destination="10.96.0.9", port=80)
    walked = BACKEND.walk(BACKEND.render(made), packet, HOST)
    meant = evaluate(made, packet, HOST, BACKEND.deviations)
    assert walked.ends() == meant.ends() and len(meant.outcomes) == 1
    slot = client_slot(source, 1021)
    assert f"slot {slot} of 1021" in [step.what for step in meant.outcomes[0].steps]
    assert any(f"{{ {slot} : " in step.what for step in walked.outcomes[0].steps)


def test_connections_are_counted_by_endpoint():
    made = plan(hashed(10, 11))
    declared = counted_sets(made, endpoints=True)
    (name,) = [each for each in declared if each.endswith("-c")]
    counted = NftCounterOwners(made).counted([(name, (5,), ("10.64.0.10", 8080), 7)])
    assert [(each.name, each.endpoint, each.connections) for each in counted] == [
        (port_name("web"), ("10.64.0.10", 8080), 7)
    ]
    assert not [each for each in counted_sets(made, endpoints=False) if each.startswith("maglev-")]
