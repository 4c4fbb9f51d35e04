"""Rules are proved equal to the plan for all packets, in all scenarios and for random clusters."""

import random
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scenario_files import SCENARIOS
from tests.trace.proof.own_rules import MODES, draw, ends_of, partitions_of, proved

from narthex.model import Host, Memory, Packet, Store, Upsert
from narthex.netfilter.sets.diagram import leaves
from narthex.proxy.backends import BACKENDS
from narthex.proxy.kernel.dataplanes import DATAPLANES
from narthex.proxy.plan.ir import Balancing, Deviation
from narthex.proxy.plan.planner import Planner, plan_once
from narthex.testing import strategies as some
from narthex.testing.build import HOST, endpoint, endpoint_slice, node, plan, service
from narthex.testing.setting import families_of, node_config, snapshot
from narthex.trace.evaluate import evaluate
from narthex.trace.proof.prove import ProofOutcome


def assert_proved(report, plan, deviations):
    """Where endpoints are selected by a hash, the proof may be undecided, and nothing differs."""
    hashes = any(service.balancing is Balancing.MAGLEV for service in plan.services.values())
    if hashes and Deviation.NO_CONSISTENT_HASHING not in deviations and report.undecided:
        assert not report.differing, report
        assert all("a hash of the" in rule.rule for rule in report.undecided), report
    else:
        assert report.outcome is ProofOutcome.PROVED, report


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_every_scenario_is_proved(scenario, mode):
    for family in families_of((*scenario.flows, *scenario.steps)):
        plan = plan_once(snapshot(scenario), node_config(scenario, mode), family)
        report = proved(mode, plan, Host(addresses=scenario.node_ips))
        assert_proved(report, plan, BACKENDS[mode].deviations)


def cluster(mode, config, family, objects):
    config = msgspec.structs.replace(config, localhost_node_ports=DATAPLANES[mode].localhost_node_ports)
    store = Store()
    for obj in objects:
        store.apply(Upsert(obj))
    return Planner(config, family).plan(store.snapshot)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8)
@given(config=some.configs, family=some.families, objects=st.lists(some.objects, min_size=2, max_size=10))
def test_random_clusters_are_proved(mode, config, family, objects):
    plan = cluster(mode, config, family, objects)
    assert_proved(proved(mode, plan), plan, BACKENDS[mode].deviations)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=5)
@given(some.configs, some.families, st.lists(some.objects, min_size=2, max_size=8), st.integers(0, 2**32))
def test_a_random_packet_of_each_class_takes_the_way_of_its_class(mode, config, family, objects, seed):
    plan, backend, rng = cluster(mode, config, family, objects), BACKENDS[mode], random.Random(seed)
    rules, found = backend.render(plan), partitions_of(mode, plan)
    for diagram, answer in (
        (found.rules, lambda packet, memory: backend.walk(rules, packet, HOST, memory)),
        (found.plan, lambda packet, memory: evaluate(plan, packet, HOST, backend.deviations, memory)),
    ):
        for box, leaf in leaves(diagram, found.space):
            for sources, distribution in leaf.regions:
                point = (*(draw(rng, each) for each in box[:-1]), draw(rng, sources))
                packet = found.space.packet(point)
                if packet is None:
                    continue
                names = sorted({name for asked, _, _ in distribution for name, _ in asked})
                for choices in (set(), *({name} for name in names)):
                    memory = Memory()
                    for choice in choices:
                        name = choice.rpartition(" within ")[0]
                        memory.touch(name, (packet.source,), 0.0)
                        memory.touch(found.lists.get(name, name), (packet.source,), 0.0)
                    got, said = answer(packet, memory).ends(), ends_of(distribution, choices)
                    assert got.keys() == said.keys(), (packet, got, said)
                    assert all(abs(got[end] - said[end]) < Fraction(1, 10**8) for end in got), (packet, got, said)


@pytest.mark.parametrize("mode", MODES)
def test_slices_that_contradict_each_other_about_an_address(mode):
    """The plan says what holds then: the address is this node's own for all Services, in mode ipvs for the port."""
    objects = [node()]
    for number, home in enumerate(("worker-a", "worker-b")):
        objects.append(service(f"shop/s{number}", f"10.110.0.{5 + number}"))
        objects.append(endpoint_slice(f"shop/s{number}", endpoint("10.64.1.10", node=home), port=8080 + number))
    desired = plan(*objects)
    report = proved(mode, desired)
    assert report.outcome is ProofOutcome.PROVED, report
    packet = Packet(source="10.64.1.10", destination="10.110.0.6", port=80, iif="veth1")
    ends = evaluate(desired, packet, HOST, BACKENDS[mode].deviations).ends()
    assert [masked for _, _, masked in ends] == [mode != "ipvs"]
