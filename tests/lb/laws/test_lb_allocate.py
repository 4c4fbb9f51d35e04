"""Laws of addresses: random histories of Services, pools, lost writes and restarts never give one address twice, and take
none away without a cause."""

import random

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.lb.laws.address_histories import ADDRESSES, FATES, FOREIGN, NAMES, History, pool, spec

from narthex.lb.allocate import AllocationInput, allocate
from narthex.lb.pools import validate_pools
from narthex.lb.service_status import PREFIX, is_served, status_addresses
from narthex.lb.sharing import sharing_conflict, sharing_profile
from narthex.model.objects import LoadBalancerIngress, Service

keys = st.sampled_from(NAMES)


@st.composite
def specs(draw):
    """`spec`, drawn."""
    return spec(lambda choices: draw(st.sampled_from(choices)))


@st.composite
def pools(draw):
    """`pool`, drawn."""
    return pool(lambda choices: draw(st.sampled_from(choices)))


class Histories(RuleBasedStateMachine):
    """Any history."""

    @initialize(first=pools())
    def begin(self, first):
        self.history = History(first)

    @rule(key=keys, chosen=specs())
    def make_or_change(self, key, chosen):
        self.history.make_or_change(key, chosen)

    @rule(key=keys)
    def drop(self, key):
        self.history.drop(key)

    @rule(made=pools())
    def put_pool(self, made):
        self.history.pools[made.name] = made

    @rule(name=st.sampled_from("abc"))
    def drop_pool(self, name):
        self.history.pools.pop(name, None)

    @rule(key=keys, addresses=st.sampled_from([[], [FOREIGN]]))
    def somebody_writes_a_status(self, key, addresses):
        self.history.overwrite(key, *addresses)

    @rule()
    def start_anew(self):
        self.history.start_anew()

    @rule(count=st.integers(1, 4))
    def see(self, count):
        self.history.see(count)

    @rule(fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=4))
    def turn(self, fates):
        self.history.turn(fates)

    @rule()
    def come_to_rest(self):
        self.history.come_to_rest()


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestHistories = Histories.TestCase


@settings(max_examples=40)
@example(3)
@example(891)
@example(5005)
@example(9102)
@given(st.integers(0, 2**32))
def test_long_histories(seed):
    """Longer than a property test can draw: many small changes between few looks."""
    chance = random.Random(seed)
    history = History(pool(chance.choice, "a"))
    for _ in range(150):
        key = chance.choice(NAMES)
        match chance.choices(range(9), weights=[8, 6, 2, 2, 2, 12, 14, 1, 2])[0]:
            case 0:
                history.make_or_change(key, spec(chance.choice))
            case 1:
                history.change_port(key, chance.choice([80, 81, 82]))
            case 2:
                history.drop(key)
            case 3:
                made = pool(chance.choice)
                history.pools[made.name] = made
            case 4:
                history.overwrite(key, *chance.choice([[], [], [FOREIGN]]))
            case 5:
                history.see(chance.randint(1, 3))
            case 6:
                history.turn([chance.choice(FATES) for _ in range(4)])
            case 7:
                history.start_anew()
            case _:
                history.come_to_rest()


@st.composite
def clusters(draw):
    """Services in any state, whoever brought them there."""
    found = {}
    for key in NAMES:
        if draw(st.booleans()):
            held = draw(st.lists(st.sampled_from(ADDRESSES), max_size=2, unique=True))
            ingress = tuple(LoadBalancerIngress(ip=address) for address in held)
            found[key] = Service(namespace=key.namespace, name=key.name, uid=key.name, **draw(specs()), ingress=ingress)
    return found


several_pools = st.lists(pools(), max_size=3, unique_by=lambda each: each.name)


@settings(max_examples=80)
@given(clusters(), several_pools, keys, specs())
def test_a_new_service_changes_nothing_for_others(services, given_pools, key, chosen):
    """It may only take what nobody had."""
    accepted = validate_pools(given_pools)
    others = {name: each for name, each in services.items() if name != key}
    before = allocate(AllocationInput(services=others.values(), pools=accepted))
    newcomer = Service(namespace=key.namespace, name=key.name, uid="new", **chosen)
    after = allocate(AllocationInput(services=[*others.values(), newcomer], pools=accepted))
    for name, decision in before.items():
        held = set(status_addresses(others[name]))
        assert held & set(decision.addresses) == held & set(after[name].addresses)


@settings(max_examples=80)
@given(clusters(), several_pools)
def test_whatever_any_status_holds_is_given_to_nobody_else(services, given_pools):
    decisions = allocate(AllocationInput(services=services.values(), pools=validate_pools(given_pools)))
    for key, decision in decisions.items():
        for address in set(decision.addresses) - set(status_addresses(services[key])):
            for other, service in services.items():
                if other != key and address in status_addresses(service):
                    theirs = sharing_profile(service, ours=is_served(service, ""))
                    assert not sharing_conflict(sharing_profile(services[key]), theirs)


@settings(max_examples=80)
@given(clusters(), several_pools)
def test_refusing_a_pool_takes_nothing_away(services, given_pools):
    """What was kept with a good pool is kept with the same pool when a fault comes into it."""
    good = allocate(AllocationInput(services=services.values(), pools=validate_pools(given_pools)))
    kept = {key: each for key, each in good.items() if each.addresses and each.pool}
    marked = {
        key: msgspec.structs.replace(
            services[key],
            annotations=tuple(sorted((*services[key].annotations, (PREFIX + "ip-allocated-from-pool", each.pool)))),
            ingress=tuple(LoadBalancerIngress(ip=address) for address in each.addresses),
        )
        for key, each in kept.items()
    }
    broken = [msgspec.structs.replace(each, addresses=(*each.addresses, "nonsense")) for each in given_pools]
    after = allocate(AllocationInput(services=marked.values(), pools=validate_pools(broken)))
    for key, decision in after.items():
        assert decision.addresses == status_addresses(marked[key]), decision
