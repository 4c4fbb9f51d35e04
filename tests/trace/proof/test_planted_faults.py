"""Every planted fault that changes what happens to some packet is found, with a packet that the concrete walk treats differently.

A fault may change nothing, such as two rules swapped that no packet meets both of. Whether it does is decided by a judge that knows no
sets: it walks packets of all frontends and senders through the rules before and after. NARTHEX_FAULTS is the number of faults in each
mode; `make fuzz` plants 125 of them, 500 in all.
"""

import itertools
import os
import random

import pytest
from tests.trace.proof.own_rules import MODES, referred_of, ruleset_of
from tests.trace.proof.planted_faults import FAULTS, OBJECT_FAULTS

from narthex.model import Packet, Protocol
from narthex.netfilter.walk.walk import walk
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.userspace.backend import UserspaceBackend
from narthex.testing.build import HOST, NODE_IPS, endpoint, endpoint_slice, plan, service
from narthex.trace.proof.prove import ProofOutcome, prove

COUNT = int(os.environ.get("NARTHEX_FAULTS", "12"))
SEED = os.environ.get("NARTHEX_SEED", "1")
OUTSIDE = "198.51.100.7"


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


def packets(desired):
    """Yield packets of all kinds of senders to all frontends, to ports beside them, and to endpoints."""
    pools = [pool for one in desired.services.values() for pool in one.pools.values()]
    ends = {each.address for pool in pools for each in pool.endpoints}
    senders = {each.address for each in pools[0].endpoints}
    fronts = {
        (front.address or NODE_IPS[0], front.port) for one in desired.services.values() for front in one.frontends
    }
    places = {(address, port + more) for address, port in fronts for more in (0, 1, 2, 9)} | {
        (end, 8080) for end in ends
    }
    for source in (*sorted(senders), "10.64.9.9", OUTSIDE, NODE_IPS[0]):
        own = source == NODE_IPS[0]
        for address, port in sorted(places):
            yield Packet(
                source=source,
                destination=address,
                port=port,
                protocol=Protocol.TCP,
                iif="" if own else "eth7",
                from_host=own,
            )


def said(ruleset, referred, packet):
    """Return the ends of a packet by the concrete walk."""
    walked = walk(ruleset, packet, HOST, objects=referred.objects)
    return (UserspaceBackend.onwards(walked, referred.listeners) if referred.listeners else walked).ends()


def changes(before, after, desired):
    """Return True if some packet ends in another way, or with another probability."""
    return any(said(*before, packet) != said(*after, packet) for packet in packets(desired))


@pytest.mark.parametrize("mode", MODES)
def test_planted_faults_are_found_with_a_packet(mode):
    faults = [*((each, False) for each in FAULTS[mode]), *((each, True) for each in OBJECT_FAULTS.get(mode, ()))]
    found, backend = dict.fromkeys((fault.__name__ for fault, _ in faults), 0), BACKENDS[mode]
    for number, (fault, of_objects) in enumerate(itertools.cycle(faults)):
        if sum(found.values()) >= COUNT:
            break
        rng = random.Random(f"{SEED} {mode} {number}")
        desired = cluster(rng)
        rules = backend.render(desired)
        before = ruleset_of(mode, rules), referred_of(mode, rules)
        after = (before[0], fault(before[1], rng)) if of_objects else (fault(before[0], rng), before[1])
        report = prove(desired, after[0], HOST, backend.deviations, referred=after[1])
        where = f"NARTHEX_SEED={SEED}: {mode} {fault.__name__} {number}"
        if report.outcome is ProofOutcome.PROVED:
            assert not changes(before, after, desired), where
        else:
            assert report.outcome is ProofOutcome.DIFFERENT, (where, report)
            assert report.counterexample.confirmed, (where, report)
            found[fault.__name__] += 1
    assert all(found.values()), found
