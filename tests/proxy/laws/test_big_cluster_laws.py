"""The backend laws at the size of real clusters: hundreds of Services with odd policies."""

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.crowds import crowds

from narthex.model.packet import Disposition, agree
from narthex.model.store import Delete, Store, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.kernel.dataplanes import DATAPLANES
from narthex.proxy.plan.planner import Planner, plan_once
from narthex.testing import strategies as some
from narthex.testing.build import HOST
from narthex.trace.evaluate import evaluate

each_mode = pytest.mark.parametrize("mode", sorted(BACKENDS))
# All follows from one seed: there is nothing to shrink.
drawn = [Phase.explicit, Phase.reuse, Phase.generate]


def mode_config(config, mode):
    """Row 9.9: node ports on localhost exist in iptables mode alone."""
    return msgspec.structs.replace(config, localhost_node_ports=DATAPLANES[mode].localhost_node_ports)


def filled(objects):
    store = Store()
    for obj in objects:
        store.apply(Upsert(obj))
    return store


@each_mode
def test_rules_mean_what_the_plan_means(mode):
    backend, met = BACKENDS[mode], set()

    @settings(max_examples=12, phases=drawn)
    @given(some.configs, st.data())
    def law(config, data):
        family = data.draw(some.families)
        crowd = data.draw(crowds(family, packets=40))
        plan = plan_once(filled(crowd.objects).snapshot, mode_config(config, mode), family)
        rules = backend.render(plan)
        for packet in crowd.packets:
            meant = evaluate(plan, packet, HOST, backend.deviations)
            walked = backend.walk(rules, packet, HOST)
            assert agree(meant, walked), f"{packet}\nplan:  {meant.ends()}\nrules: {walked.ends()}"
            met.update(outcome.disposition for outcome in meant.outcomes)

    law()
    assert met == set(Disposition) - {Disposition.UNSUPPORTED}, "the packets must meet all there is"


@each_mode
@settings(max_examples=6, phases=drawn)
@given(some.configs, st.data())
def test_changes_among_hundreds(mode, config, data):
    """Objects go and come back, one after another: each time the difference gives what is wanted."""
    backend, family = BACKENDS[mode], data.draw(some.families)
    crowd = data.draw(crowds(family, packets=5))
    store, planner = filled(crowd.objects), Planner(mode_config(config, mode), family)
    first = have = backend.render(planner.plan(store.snapshot, store.take_changed()))
    chosen = data.draw(st.lists(st.sampled_from(crowd.objects), min_size=1, max_size=6))
    for event in [Delete(type(obj).__name__, obj.key) for obj in chosen] + [Upsert(obj) for obj in chosen]:
        store.apply(event)
        want, changes = backend.advance(have, planner.plan(store.snapshot, store.take_changed()))
        assert backend.patch(have, changes) == want
        have = want
    afresh = backend.render(plan_once(store.snapshot, mode_config(config, mode), family))
    for packet in crowd.packets:
        walks = [backend.walk(rules, packet, HOST) for rules in (first, have, afresh)]
        assert agree(walks[0], walks[1]) and agree(walks[1], walks[2])
