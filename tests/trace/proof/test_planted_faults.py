"""Every planted fault is found, with a packet that the concrete walk and the plan treat differently."""

import random

import pytest
from tests.trace.proof.own_rules import ruleset_of
from tests.trace.proof.planted_faults import FAULTS

from narthex.proxy.backends import BACKENDS
from narthex.testing.build import HOST, endpoint, endpoint_slice, plan, service
from narthex.trace.proof.prove import ProofOutcome, prove

TIMES = 4


def cluster(rng):
    """Return the plan of some Services with two to five endpoints each, on which any fault can be planted."""
    found = []
    for number in range(rng.randint(2, 5)):
        pods = [
            endpoint(f"10.64.{rng.randint(1, 3)}.{10 + 10 * number + at}", node=rng.choice(("worker-a", "worker-b")))
            for at in range(rng.randint(2, 5))
        ]
        found.append(service(f"shop/s{number}", f"10.110.0.{5 + number}", node_port=30080 + number))
        found.append(endpoint_slice(f"shop/s{number}", *pods, port=8080))
    return plan(*found)


CASES = [(mode, fault) for mode, faults in FAULTS.items() for fault in faults]


def planted(mode, fault, seed):
    rng = random.Random(f"{mode} {fault.__name__} {seed}")
    desired, backend = cluster(rng), BACKENDS[mode]
    ruleset = fault(ruleset_of(mode, backend.render(desired)), rng)
    return prove(desired, ruleset, HOST, backend.deviations)


@pytest.mark.parametrize("mode, fault", CASES, ids=[f"{mode}-{fault.__name__}" for mode, fault in CASES])
def test_a_planted_fault_is_found_with_a_packet(mode, fault):
    for seed in range(TIMES):
        report = planted(mode, fault, seed)
        assert report.outcome is ProofOutcome.DIFFERENT, (seed, report)
        assert report.counterexample.confirmed, (seed, report)
