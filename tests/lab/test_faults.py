"""Faults as data: what can be, what is in force, and which rules they become."""

import os

import msgspec
import pytest

from narthex.lab.faults import (
    TABLE,
    FaultKind,
    FaultTarget,
    InjectedFault,
    InvalidFault,
    active_faults,
    delays,
    delete_table,
    next_end,
    rules,
    validate_fault,
)
from narthex.linux.libnftables import run_nft
from narthex.linux.namespaces import create_namespace, delete_namespace

PLACES = {
    **{f"node-{n}": FaultTarget(namespace="fabric", device=f"node-{n}", node=True) for n in (1, 2, 3)},
    "shop/web": FaultTarget(namespace="web", device="eth0", node=False),
}


def fault(kind, *targets, number=1, **more):
    return InjectedFault(number=number, kind=kind, targets=targets, **more)


LOSS = fault(FaultKind.LOSS, "node-1", "shop/web", percent=30)
APART = fault(FaultKind.PARTITION, "node-1", "node-2")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (fault(FaultKind.LOSS, percent=5), "name a node"),
        (fault(FaultKind.LOSS, "node-9", percent=5), "there is no node or pod 'node-9'; there are: node-1, node-2"),
        (fault(FaultKind.LOSS, "node-1"), "0 % is not a valid loss"),
        (fault(FaultKind.LOSS, "node-1", percent=101), "101 % is not a valid loss"),
        (fault(FaultKind.DELAY, "node-1"), "0 ms is not a valid delay"),
    ],
)
def test_what_cannot_be(wrong, said):
    with pytest.raises(InvalidFault, match=said):
        validate_fault(wrong, PLACES)


def test_what_can_be():
    for each in (LOSS, APART, fault(FaultKind.DELAY, "shop/web", milliseconds=5), fault(FaultKind.API)):
        assert validate_fault(each, PLACES) is each


def test_faults_end_by_time_and_with_their_targets():
    timed = msgspec.structs.replace(LOSS, until=10.0)
    assert active_faults([timed, APART], PLACES, 9.9) == (timed, APART)
    assert active_faults([timed, APART], PLACES, 10.0) == (APART,)
    left = {name: place for name, place in PLACES.items() if name != "shop/web"}
    assert active_faults([LOSS], left, 0)[0].targets == ("node-1",)
    assert active_faults([fault(FaultKind.PARTITION, "shop/web")], left, 0) == ()
    assert active_faults([fault(FaultKind.API)], {}, 0)
    assert (next_end([timed, APART]), next_end([APART])) == (10.0, None)


def test_rules_of_a_loss_are_in_both_directions_and_spare_a_pods_loopback():
    made = rules([LOSS], PLACES)
    lost = "numgen random mod 100 < 30 counter drop"
    assert set(made) == {"fabric", "web"}
    for line in (f'iifname "node-1" {lost}', f'oifname "node-1" {lost}'):
        assert made["fabric"].count(line) == 2
    assert f'iifname != "lo" {lost}' in made["web"]
    assert f"table bridge {TABLE}" in made["fabric"]
    assert f"table inet {TABLE}" in made["web"]


def test_nodes_of_one_side_of_a_partition_reach_one_another():
    made = rules([APART], PLACES)["fabric"]
    assert 'iifname "node-1" oifname != { "node-1", "node-2" } counter drop' in made
    assert 'iifname != { "node-1", "node-2" } oifname "node-2" counter drop' in made


def test_nothing_without_faults():
    assert rules([], PLACES) == {}
    assert rules([fault(FaultKind.API), fault(FaultKind.DELAY, "node-1", milliseconds=9)], PLACES) == {}


def test_delays_add_up():
    some = [
        fault(FaultKind.DELAY, "node-1", milliseconds=5),
        fault(FaultKind.DELAY, "node-1", "shop/web", milliseconds=20),
    ]
    assert delays(some, PLACES) == {("fabric", "node-1"): 25, ("web", "eth0"): 20}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (LOSS, "loss of 30 % at node-1, shop/web"),
        (fault(FaultKind.API, until=12.0), "the API server is down, 7 s more"),
        (fault(FaultKind.DELAY, "node-1", milliseconds=9), "delay of 9 ms at node-1"),
    ],
)
def test_words(given, said):
    assert given.text(5.0) == said


@pytest.fixture
def namespace():
    name = f"nxt-faults-{os.getpid()}"
    create_namespace(name)
    yield name
    delete_namespace(name)


@pytest.mark.kernel
def test_the_kernel_takes_the_rules_and_they_leave_nothing(namespace):
    for text in rules([LOSS, APART], PLACES).values():
        run_nft(text, namespace)
    assert run_nft("list ruleset", namespace).count(TABLE) == 2
    # Again and with other faults: replaced, not added to.
    run_nft(rules([APART], PLACES)["fabric"], namespace)
    assert "numgen" not in run_nft(f"list table bridge {TABLE}", namespace)
    for node in (True, False):
        run_nft(delete_table(node), namespace)
        run_nft(delete_table(node), namespace)
    assert run_nft("list ruleset", namespace).strip() == ""
