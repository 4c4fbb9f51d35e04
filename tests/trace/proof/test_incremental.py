"""A change set is proved by the packets that it touches, with the verdict that all packets give."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trace.proof.changed_rules import EDIT_FAULTS, edits_between
from tests.trace.proof.own_rules import MODES_BY_RULES, ruleset_of
from tests.trace.proof.planted_faults import FAULTS

from narthex.model import IPFamily, Store, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.kernel.dataplanes import DATAPLANES
from narthex.proxy.plan.planner import NodeConfig, Planner
from narthex.testing import strategies as some
from narthex.testing.build import HOST, NODE_IPS, endpoint, endpoint_slice, node, service
from narthex.trace.proof.incremental import IncrementalProof

SETTINGS = NodeConfig(node_name="worker-a", cluster_cidrs=("10.64.0.0/12",))
histories = st.lists(st.lists(some.events(), min_size=1, max_size=4), min_size=2, max_size=8)


class EditedBackend:
    """A backend whose changes may be typed data already."""

    def __init__(self, mode):
        self.backend = BACKENDS[mode]
        self.name, self.deviations = self.backend.name, self.backend.deviations
        self.advance, self.diff = self.backend.advance, self.backend.diff

    def edits(self, changes):
        return changes if isinstance(changes, tuple) else self.backend.edits(changes)


class History:
    """The rules of one mode as objects change, and the proofs of their changes."""

    def __init__(self, mode, config, family):
        config = msgspec.structs.replace(config, localhost_node_ports=DATAPLANES[mode].localhost_node_ports)
        self.mode, self.backend = mode, EditedBackend(mode)
        self.store, self.planner = Store(), Planner(config, family)
        self.rules = None
        self.proof = IncrementalProof(self.backend, lambda: HOST)

    def edits(self, changes):
        return self.backend.edits(changes)

    def next(self, events):
        """Return the next plan, rules, and changes, which may be proved and then taken."""
        for event in events:
            self.store.apply(event)
        plan = self.planner.plan(self.store.snapshot, self.store.take_changed())
        return plan, *self.backend.advance(self.rules, plan)

    def verify(self, plan, want, changes):
        return self.proof.verify(self.rules, changes, want, plan)

    def take(self, want):
        self.proof.written()
        self.rules = want

    def whole(self, plan, want, changes):
        """Return the verdict about the same rules from a proof of all packets."""
        fresh = IncrementalProof(self.backend, lambda: HOST)
        base = self.edits(self.backend.diff(None, self.rules)) if self.rules is not None else ()
        verdict = fresh.verify(None, (*base, *self.edits(changes)), want, plan)
        assert verdict.whole or verdict.refusal
        return verdict

    def tables(self):
        return {name: table.table() for name, table in self.proof._proved.tables.items()}


def written_tables(mode, rules):
    """Return tables without the elements that packets add."""
    found = {}
    for table in ruleset_of(mode, rules).tables:
        sets = {name: msgspec.structs.replace(one, elements=dict(one.elements)) for name, one in table.sets.items()}
        found[table.name] = msgspec.structs.replace(table, chains=dict(table.chains), sets=sets)
    return found


@pytest.mark.parametrize("mode", MODES_BY_RULES)
@settings(max_examples=6)
@given(config=some.configs, family=some.families, batches=histories)
def test_all_changes_of_a_history_are_proved(mode, config, family, batches):
    history = History(mode, config, family)
    for batch in batches:
        plan, want, changes = history.next(batch)
        verdict = history.verify(plan, want, changes)
        assert not verdict.refusal, verdict
        assert verdict.undecided == history.whole(plan, want, changes).undecided
        history.take(want)
        assert history.tables() == written_tables(mode, want), "the changes as typed data lead to the rules"


@pytest.mark.parametrize("mode", MODES_BY_RULES)
@settings(max_examples=8)
@given(config=some.configs, family=some.families, batches=histories, seed=st.integers(0, 2**32))
def test_a_fault_in_a_change_set_gets_the_verdict_of_all_packets(mode, config, family, batches, seed):
    history, rng = History(mode, config, family), random.Random(seed)
    for batch in batches:
        plan, want, changes = history.next(batch)
        if history.rules is not None:
            have = ruleset_of(mode, history.rules)
            for fault in rng.sample(EDIT_FAULTS, 3):
                faulty = fault(history.edits(changes), rng, have)
                found, whole = history.verify(plan, want, faulty), history.whole(plan, want, faulty)
                assert bool(found.refusal) == bool(whole.refusal), (fault.__name__, found, whole)
        assert not history.verify(plan, want, changes).refusal
        history.take(want)


def drawn(rng, number):
    """Return a Service and its endpoints, some of which others have, too, or which are addresses of the node or of a Service."""
    pods = [f"10.64.{rng.randint(1, 2)}.{rng.randint(10, 14)}" for _ in range(rng.randint(0, 5))]
    if rng.random() < 0.2:
        pods.append(NODE_IPS[0])
    if rng.random() < 0.1:
        pods.append("203.0.113.1")
    ends = [endpoint(pod, node="worker-b" if pod.startswith("10.64.2") else "worker-a") for pod in dict.fromkeys(pods)]
    made = service(
        f"shop/s{number}",
        f"10.110.0.{5 + number}",
        node_port=rng.choice((0, 30080 + number)),
        external_ips=("203.0.113.1",) if rng.random() < 0.1 else (),
    )
    seconds = rng.choice((None, None, 10))
    made = msgspec.structs.replace(made, affinity_seconds=seconds, external_policy_local=rng.random() < 0.2)
    return Upsert(made), Upsert(endpoint_slice(f"shop/s{number}", *ends, port=rng.choice((80, 8080))))


def faulty_changes(history, want, changes, rng):
    """Yield the name of each fault, and the change set with it."""
    have, whole = ruleset_of(history.mode, history.rules), ruleset_of(history.mode, want)
    for fault in EDIT_FAULTS:
        yield fault.__name__, fault(history.edits(changes), rng, have)
    for planted in FAULTS[history.mode]:
        try:
            yield planted.__name__, edits_between(have, planted(whole, rng))
        except (AssertionError, IndexError):  # these rules have no place for the fault
            continue


@pytest.mark.parametrize("mode", MODES_BY_RULES)
@pytest.mark.parametrize("seed", range(1))
def test_each_fault_in_a_change_is_refused_if_all_packets_show_it(mode, seed):
    rng = random.Random(f"{mode} {seed}")
    history = History(mode, SETTINGS, IPFamily.IPV4)
    refused = looked_at = 0
    for step in range(5):
        events = [Upsert(node())] if not step else []
        for number in range(5) if not step else rng.sample(range(5), rng.choice((1, 1, 2))):
            events += drawn(rng, number)
        plan, want, changes = history.next(events)
        for name, faulty in faulty_changes(history, want, changes, rng) if step else ():
            found, whole = history.verify(plan, want, faulty), history.whole(plan, want, faulty)
            assert bool(found.refusal) == bool(whole.refusal), (step, name, found, whole)
            refused += bool(found.refusal)
            looked_at += not found.whole
        assert not history.verify(plan, want, changes).refusal
        history.take(want)
    assert refused > 10 and looked_at > 10, (refused, looked_at)


def contradicting(number, *pods, on):
    made = service(f"shop/s{number}", f"10.110.0.{5 + number}")
    return Upsert(made), Upsert(
        endpoint_slice(f"shop/s{number}", *(endpoint(pod, node=on) for pod in pods), port=8080 + number)
    )


@pytest.mark.parametrize("mode", MODES_BY_RULES)
def test_slices_that_contradict_each_other_about_an_address_are_proved(mode):
    """An address is this node's own for all Services as soon as one slice says so."""
    history = History(mode, SETTINGS, IPFamily.IPV4)
    pod, other = "10.64.1.10", "10.64.2.11"
    steps = (
        (Upsert(node()), *contradicting(0, pod, other, on="worker-a"), *contradicting(1, pod, other, on="worker-b")),
        contradicting(0, other, on="worker-a"),
        contradicting(0, pod, other, on="worker-b"),
        contradicting(1, pod, other, on="worker-a"),
        (*contradicting(0, on="worker-b"), *contradicting(2, pod, on="worker-b")),
    )
    for events in steps:
        plan, want, changes = history.next(events)
        verdict = history.verify(plan, want, changes)
        assert not verdict.refusal, verdict
        assert not history.whole(plan, want, changes).refusal
        history.take(want)
