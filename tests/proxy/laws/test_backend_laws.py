"""Laws that every backend must keep, over generated clusters and packets. A new backend meets them unasked."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narthex.model.packet import agree
from narthex.model.store import Store, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.kernel.dataplanes import DATAPLANES
from narthex.proxy.plan.planner import Planner
from narthex.testing import strategies as some
from narthex.testing.build import HOST
from narthex.trace.evaluate import evaluate

each_backend = pytest.mark.parametrize("mode", sorted(BACKENDS))


def mode_config(config, mode):
    """Row 9.9: node ports on localhost exist in iptables mode alone."""
    return msgspec.structs.replace(config, localhost_node_ports=DATAPLANES[mode].localhost_node_ports)


def fill(objects):
    store = Store()
    for obj in objects:
        store.apply(Upsert(obj))
    return store


@each_backend
@settings(max_examples=45)
@given(some.configs, some.families, st.lists(some.objects, min_size=2, max_size=10), st.data())
def test_rules_mean_what_the_plan_means(mode, config, family, objects, data):
    backend = BACKENDS[mode]
    plan = Planner(mode_config(config, mode), family).plan(fill(objects).snapshot)
    rules = backend.render(plan)
    for packet in data.draw(st.lists(some.packets(family), min_size=1, max_size=6)):
        meant = evaluate(plan, packet, HOST, backend.deviations)
        walked = backend.walk(rules, packet, HOST)
        assert agree(meant, walked), f"{packet}\nplan:  {meant.ends()}\nrules: {walked.ends()}"


@each_backend
@settings(max_examples=35)
@given(some.configs, some.families, st.lists(st.lists(some.events(), max_size=5), min_size=1, max_size=5))
def test_patching_with_the_difference_gives_what_is_wanted(mode, config, family, turns):
    backend, store = BACKENDS[mode], Store()
    planner = Planner(mode_config(config, mode), family)
    have = None
    for turn in turns:
        for event in turn:
            store.apply(event)
        plan = planner.plan(store.snapshot, store.take_changed())
        want, changes = backend.advance(have, plan)
        if have is not None:
            assert backend.patch(have, changes) == want
            assert backend.patch(have, backend.diff(have, want)) == want
        assert not backend.diff(want, want)
        assert not backend.advance(want, plan)[1]
        have = want


@each_backend
@settings(max_examples=20)
@given(some.configs, some.families, st.lists(st.lists(some.events(), max_size=5), min_size=2, max_size=4), st.data())
def test_rules_with_a_past_mean_the_same(mode, config, family, turns, data):
    """Slots may lie elsewhere after a history of changes; what happens to packets may not."""
    backend, store = BACKENDS[mode], Store()
    planner = Planner(mode_config(config, mode), family)
    rules = None
    for turn in turns:
        for event in turn:
            store.apply(event)
        plan = planner.plan(store.snapshot, store.take_changed())
        rules, _ = backend.advance(rules, plan)
    for packet in data.draw(st.lists(some.packets(family), min_size=1, max_size=4)):
        assert agree(evaluate(plan, packet, HOST, backend.deviations), backend.walk(rules, packet, HOST))


@each_backend
@settings(max_examples=20)
@given(some.configs, some.families, st.lists(some.objects, max_size=8), st.randoms(use_true_random=False))
def test_rendering_does_not_depend_on_arrival(mode, config, family, objects, random):
    last = list({(type(obj).__name__, obj.key): obj for obj in objects}.values())
    shuffled = list(last)
    random.shuffle(shuffled)
    backend = BACKENDS[mode]
    one, other = (
        backend.render(Planner(mode_config(config, mode), family).plan(fill(order).snapshot))
        for order in (last, shuffled)
    )
    assert one == other
    assert backend.text(one) == backend.text(other)
