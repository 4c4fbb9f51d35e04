"""Laws of mode ipvs alone: its text says all, and a history leaves nothing behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narthex.model.packet import agree
from narthex.model.store import Store
from narthex.netfilter.dump.read import read_dumps
from narthex.netfilter.walk.walk import walk
from narthex.proxy.backends.ipvs.backend import IpvsBackend
from narthex.proxy.plan.planner import Planner
from narthex.testing import strategies as some
from narthex.testing.build import HOST

TURNS = st.lists(st.lists(some.events(), max_size=6), min_size=1, max_size=5)
SCHEDULERS = st.sampled_from(["rr", "wlc", "sh", "mh"])


def plans(config, family, turns):
    """The plan after each turn."""
    store, planner = Store(), Planner(config, family)
    for turn in turns:
        for event in turn:
            store.apply(event)
        yield planner.plan(store.snapshot, store.take_changed())


@settings(max_examples=25)
@given(some.configs, some.families, TURNS, SCHEDULERS)
def test_a_history_leaves_nothing_behind(config, family, turns, scheduler):
    backend, rules = IpvsBackend(scheduler), None
    for plan in plans(config, family, turns):
        rules, _ = backend.advance(rules, plan)
        fresh = backend.render(plan)
        assert rules == fresh
        assert not backend.diff(rules, fresh) and not backend.diff(fresh, rules)


@settings(max_examples=25)
@given(some.configs, some.families, TURNS, SCHEDULERS)
def test_what_is_printed_is_read_back(config, family, turns, scheduler):
    backend = IpvsBackend(scheduler)
    for plan in plans(config, family, turns):
        rules = backend.render(plan)
        dump = read_dumps([("text", backend.text(rules))], family).for_family(family)
        assert dump.objects.sets == rules.sets
        assert dump.objects.servers == dict(rules.servers)
        assert dump.ruleset == rules.tables.ruleset
        # No dump says which of the addresses are the node's own; those never need to be bound.
        assert dump.objects.bound - set(HOST.addresses) == rules.bound


@pytest.mark.row("24.2", "24.14")
@settings(max_examples=25)
@given(some.configs, some.families, TURNS, st.data())
def test_a_dump_tells_the_same_story(config, family, turns, data):
    backend = IpvsBackend()
    *_, plan = plans(config, family, turns)
    rules = backend.render(plan)
    dump = read_dumps([("text", backend.text(rules))], family).for_family(family)
    for packet in data.draw(st.lists(some.packets(family), min_size=1, max_size=4)):
        walked = walk(dump.ruleset, packet, HOST, objects=dump.objects)
        assert agree(walked, backend.walk(rules, packet, HOST)), packet
