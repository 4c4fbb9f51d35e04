"""Laws of comparing modes: what is told differs, what differs is told, and from a mode to itself there is nothing."""

import itertools
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crowds import crowds

from narthex.model.store import Store, Synced, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.planner import plan_once
from narthex.testing import strategies as some
from narthex.testing.build import HOST
from narthex.trace.evaluate import evaluate, find_frontend, sender_of
from narthex.trace.reports.migration.changes import ModeSetup, compare, factors, serving
from narthex.trace.reports.migration.sample_packets import SamplePackets

PAIRS = [pytest.param(*pair, id="-".join(pair)) for pair in itertools.permutations(BACKENDS, 2)]


def side(config, mode, primary, all_masqueraded):
    """A mode with settings that may differ from the other's."""
    words = config.node_port_addresses if primary is None else primary
    config = msgspec.structs.replace(
        config,
        node_port_addresses=words,
        localhost_node_ports=mode == "iptables",
        masquerade_all=config.masquerade_all ^ all_masqueraded,
    )
    return ModeSetup(mode=mode, config=config, deviations=BACKENDS[mode].deviations)


def snapshot(objects):
    store = Store()
    for obj in objects:
        store.apply(Upsert(obj))
    return store.apply(Synced())


def changes(cluster, family, before, after):
    return list(compare(serving(cluster, family, before), list(factors(cluster, family, before, after)), HOST))


def cells(plans, packet):
    """The Service ports and ways in that a change may name for a packet; for no frontend, what the address is."""
    found = [found for plan in plans if (found := find_frontend(plan, packet, HOST))]
    if found:
        return {(str(service.name), frontend.kind.value) for service, frontend in found}
    near = {
        (str(service.name), f"unknown port of the {frontend.kind.value}")
        for plan in plans
        for service in plan.services.values()
        for frontend in service.frontends
        if frontend.address == packet.destination
    }
    return near or {("", "a free address of ")}


@pytest.mark.parametrize("from_mode, to_mode", PAIRS)
@settings(max_examples=25)
@given(
    some.configs,
    some.families,
    st.lists(some.objects, min_size=2, max_size=10),
    st.sampled_from([None, ("primary",), ("127.0.0.0/8", "10.20.1.0/24")]),
    st.booleans(),
    st.data(),
)
def test_a_cell_is_told_if_and_only_if_packets_fare_otherwise(
    from_mode, to_mode, config, family, objects, primary, all_masqueraded, data
):
    cluster = snapshot(objects)
    before, after = side(config, from_mode, None, False), side(config, to_mode, primary, all_masqueraded)
    ways = [(plan_once(cluster, each.config, family), each.deviations) for each in (before, after)]
    told = changes(cluster, family, before, after)
    for change in told:
        one, other = (evaluate(plan, change.example, HOST, deviations).ends() for plan, deviations in ways)
        assert one != other or "for a client back" in change.arrival, change
        assert change.reasons, change
        assert change.before != change.after, change
    for packet in data.draw(st.lists(some.packets(family), min_size=1, max_size=12)):
        one, other = (evaluate(plan, packet, HOST, deviations).ends() for plan, deviations in ways)
        if one != other:
            expected = cells([plan for plan, _ in ways], packet)
            sender = sender_of(ways[0][0], packet, HOST)
            assert any(
                change.sender is sender and change.service == service and change.arrival.startswith(arrival)
                for change in told
                for service, arrival in expected
            ), f"{packet} is not told: {one} becomes {other}"


@pytest.mark.parametrize("mode", BACKENDS)
@settings(max_examples=30)
@given(some.configs, some.families, st.lists(some.objects, max_size=8))
def test_from_a_mode_to_itself_nothing_changes(mode, config, family, objects):
    same = side(config, mode, None, False)
    assert changes(snapshot(objects), family, same, same) == []


@settings(max_examples=25)
@given(some.configs, some.families, st.lists(some.objects, min_size=4, max_size=12), st.randoms(use_true_random=False))
def test_what_is_told_does_not_depend_on_the_order_of_objects(config, family, objects, random):
    last = list({(type(obj).__name__, obj.key): obj for obj in objects}.values())
    before, after = side(config, "iptables", None, False), side(config, "nftables", ("primary",), False)
    one = changes(snapshot(last), family, before, after)
    random.shuffle(last)
    assert changes(snapshot(last), family, before, after) == one


def without_examples(told):
    return {msgspec.structs.replace(change, example=None) for change in told}


@settings(max_examples=12)
@given(some.configs, st.data())
def test_judging_by_shapes_is_the_same_as_judging_each(config, data):
    family = data.draw(some.families)
    crowd = data.draw(crowds(family, least=10, most=20, packets=1))
    before, after = side(config, "iptables", None, False), side(config, "nftables", ("primary",), True)
    cluster = snapshot(crowd.objects)
    by_shapes = changes(cluster, family, before, after)
    with mock.patch.object(SamplePackets, "shape", lambda _, name: (name,)):
        each = changes(cluster, family, before, after)
    assert without_examples(by_shapes) == without_examples(each)
