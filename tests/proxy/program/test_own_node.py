"""A node without a Node object still knows its own addresses."""

from narthex.model.net import IPFamily
from narthex.model.objects import NamespacedName
from narthex.proxy.plan.planner import plan_once
from narthex.proxy.program.start import NodeCompleter
from narthex.testing.build import CONFIG, NODE, node, service, snapshot

KEY = NamespacedName("", NODE)


def test_a_node_with_addresses_is_left_alone():
    before = snapshot(node())
    assert NodeCompleter(NODE, lambda: ("10.9.9.9",)).complete(before) is before


def test_a_missing_node_gets_the_addresses_found():
    completed = NodeCompleter(NODE, lambda: ("10.9.9.9", "fd09::9")).complete(snapshot(with_node=False))
    assert completed.nodes[KEY].internal_ips == ("10.9.9.9", "fd09::9")
    assert plan_once(completed, CONFIG, IPFamily.IPV4).node_ports.cidrs == ("10.9.9.9/32",)


def test_a_node_without_addresses_keeps_the_rest():
    completed = NodeCompleter(NODE, lambda: ("10.9.9.9",)).complete(snapshot(node(zone="a", internal_ips=())))
    assert completed.nodes[KEY].internal_ips == ("10.9.9.9",)
    assert completed.nodes[KEY].label("topology.kubernetes.io/zone") == "a"


def test_the_same_question_gives_the_identical_answer():
    addresses = [("10.9.9.9",)]
    own, before = NodeCompleter(NODE, lambda: addresses[0]), snapshot(with_node=False)
    first = own.complete(before)
    assert own.complete(before) is first
    addresses[0] = ("10.9.9.10",)
    second = own.complete(before)
    assert second.nodes[KEY].internal_ips == ("10.9.9.10",)
    assert own.complete(snapshot(service("shop/web", "10.110.0.1"), with_node=False)) is not second


def test_all_addresses_of_the_machine_where_they_are_asked_for():
    machine = [("10.9.9.9", "10.9.9.10")]
    before = snapshot()
    own = NodeCompleter(NODE, tuple, lambda: machine[0])
    first = own.complete(before)
    assert first.nodes[KEY].machine_ips == ("10.9.9.9", "10.9.9.10")
    assert first.nodes[KEY].internal_ips == before.nodes[KEY].internal_ips
    assert own.complete(before) is first
    machine[0] = ("10.9.9.9",)
    assert own.complete(before).nodes[KEY].machine_ips == ("10.9.9.9",)
