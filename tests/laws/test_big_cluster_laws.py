"""The backend laws at the size of real clusters: hundreds of Services, each of a few odd patterns."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narthex.backends import BACKENDS
from narthex.model.events import Delete, Upsert
from narthex.model.packet import agree
from narthex.plan.planner import Planner, plan_once
from narthex.state.store import Store
from narthex.testing import strategies as some
from narthex.testing.build import HOST
from narthex.trace.evaluate import evaluate


def mode_config(config, mode):
    """Row 9.9: node ports on localhost exist in iptables mode alone."""
    return msgspec.structs.replace(config, localhost_node_ports=mode == "iptables")


@pytest.mark.parametrize("mode", sorted(BACKENDS))
@settings(max_examples=40)
@given(some.configs, some.families, some.big_clusters(), st.data())
def test_rules_mean_what_the_plan_means(mode, config, family, cluster, data):
    backend, store = BACKENDS[mode], Store()
    for obj in cluster.objects:
        store.apply(Upsert(obj))
    plan = plan_once(store.snapshot, mode_config(config, mode), family)
    rules = backend.render(plan)
    for packet in data.draw(st.lists(some.aimed_packets(cluster, family), min_size=8, max_size=25)):
        meant = evaluate(plan, packet, HOST, backend.deviations)
        walked = backend.walk(rules, packet, HOST)
        assert agree(meant, walked), f"{packet}\nplan:  {meant.ends()}\nrules: {walked.ends()}"


@pytest.mark.parametrize("mode", sorted(BACKENDS))
@settings(max_examples=15)
@given(some.configs, some.families, some.big_clusters(), st.data())
def test_changes_among_hundreds(mode, config, family, cluster, data):
    """Objects go and come back, one after another: each time the difference gives what is wanted."""
    backend, store = BACKENDS[mode], Store()
    for obj in cluster.objects:
        store.apply(Upsert(obj))
    planner = Planner(mode_config(config, mode), family)
    first = have = backend.render(planner.plan(store.snapshot, store.take_changed()))
    chosen = data.draw(st.lists(st.sampled_from(cluster.objects), min_size=1, max_size=4))
    events = [Delete(type(obj).__name__, obj.key) for obj in chosen] + [Upsert(obj) for obj in chosen]
    for event in events:
        store.apply(event)
        want = backend.render(planner.plan(store.snapshot, store.take_changed()), have)
        assert backend.patch(have, backend.diff(have, want)) == want
        have = want
    back = backend.render(plan_once(store.snapshot, mode_config(config, mode), family))
    for packet in data.draw(st.lists(some.aimed_packets(cluster, family), min_size=1, max_size=5)):
        walks = [backend.walk(rules, packet, HOST) for rules in (first, have, back)]
        assert agree(walks[0], walks[1]) and agree(walks[1], walks[2])
