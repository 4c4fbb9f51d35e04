"""Laws of state and plan: the past leaves no trace, and nothing that did not change is made anew."""

from hypothesis import given, settings
from hypothesis import strategies as st

from narthex.model.net import IPFamily
from narthex.model.store import Store, Synced, Upsert
from narthex.proxy.plan.planner import Planner, plan_once
from narthex.proxy.plan.stale import MatchOwners
from narthex.testing import strategies as some


@settings(max_examples=60)
@given(some.configs, some.families, st.lists(st.lists(some.events(), max_size=6), max_size=6))
def test_incremental_equals_from_scratch(config, family, turns):
    store, planner = Store(), Planner(config, family)
    for turn in turns:
        for event in turn:
            store.apply(event)
        plan = planner.plan(store.snapshot, store.take_changed())
        assert plan == plan_once(store.snapshot, config, family)


@settings(max_examples=60)
@given(some.configs, some.families, st.lists(some.objects, max_size=8), st.randoms(use_true_random=False))
def test_order_of_events_does_not_matter(config, family, objects, random):
    last = {(type(obj).__name__, obj.key): obj for obj in objects}
    shuffled = list(last.values())
    random.shuffle(shuffled)
    plans = []
    for order in (list(last.values()), shuffled):
        store = Store()
        for obj in order:
            store.apply(Upsert(obj))
        plans.append(plan_once(store.apply(Synced()), config, family))
    assert plans[0] == plans[1]


@settings(max_examples=60)
@given(some.configs, st.lists(some.objects, max_size=8), some.objects)
def test_unchanged_services_keep_the_identical_plan(config, objects, another):
    store, planner = Store(), Planner(config, IPFamily.IPV4)
    for obj in objects:
        store.apply(Upsert(obj))
    before = planner.plan(store.snapshot, store.take_changed())
    assert planner.plan(store.snapshot) is before
    store.apply(Upsert(another))
    after = planner.plan(store.snapshot, store.take_changed())
    for name in set(before.services) & set(after.services):
        same = after.services[name] is before.services[name]
        assert same == (after.services[name] == before.services[name])
        assert same or name in after.lineage.changed
    assert after.lineage.changed >= set(before.services) ^ set(after.services)


@settings(max_examples=60)
@given(some.configs, some.families, st.lists(some.objects, max_size=8))
def test_the_plan_is_total(config, family, objects):
    """Every decision that forwards names a pool that is there, and no match belongs to two Service ports."""
    store = Store()
    for obj in objects:
        store.apply(Upsert(obj))
    plan = plan_once(store.snapshot, config, family)
    seen = set()
    for service in plan.services.values():
        assert service.frontends
        for frontend in service.frontends:
            assert frontend.match not in seen
            seen.add(frontend.match)
            for decision in (frontend.pod, frontend.node, frontend.other):
                if hasattr(decision, "scope"):
                    assert service.pool(decision.scope).endpoints


@settings(max_examples=40)
@given(some.configs, some.families, st.lists(st.lists(some.events(), max_size=6), min_size=1, max_size=6), st.data())
def test_owners_kept_from_plan_to_plan_are_those_of_the_last(config, family, turns, data):
    store, planner, owners = Store(), Planner(config, family), MatchOwners()
    for turn in turns:
        store.apply_all(turn)
        plan = planner.plan(store.snapshot, store.take_changed())
        # A plan that was never brought to the kernel is not followed.
        if data.draw(st.integers(0, 5)):
            owners.follow(plan)
            assert owners.of(plan) == MatchOwners().of(plan)
