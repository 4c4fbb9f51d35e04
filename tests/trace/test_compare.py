"""What is told of two ways of serving the same cluster."""

import itertools

import msgspec
import pytest
from tests.scenario_files import SCENARIOS

from narthex.model.net import IPFamily, family_of
from narthex.model.objects import EndpointPort, ServiceCIDR, ServicePort
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.ir import Deviation, Sender
from narthex.proxy.plan.planner import plan_once
from narthex.testing import setting
from narthex.testing.build import CONFIG, HOST, endpoint, endpoint_slice, service, snapshot
from narthex.trace.evaluate import evaluate, find_frontend, sender_of
from narthex.trace.reports.migration.changes import ModeSetup, compare, factors, serving

WEB = (
    service("shop/web", "10.110.0.5", node_port=30080),
    endpoint_slice("shop/web", endpoint("10.64.1.10"), endpoint("10.64.2.10", node="worker-b"), port=8080),
)


def side(mode="one", deviations=(), **config):
    return ModeSetup(mode=mode, config=msgspec.structs.replace(CONFIG, **config), deviations=frozenset(deviations))


def told(before, after, *objects, family=IPFamily.IPV4, host=HOST):
    cluster = snapshot(*(objects or WEB))
    return list(compare(serving(cluster, family, before), list(factors(cluster, family, before, after)), host))


def said(changes):
    return {(change.arrival, change.sender.value, change.source, change.before, change.after) for change in changes}


def test_nothing_is_told_of_the_same():
    assert told(side("one"), side("other")) == []


def test_a_setting_is_named_with_both_values():
    changes = told(side("one"), side("other", masquerade_all=True))
    assert said(changes) == {
        (
            "cluster IP",
            "pod",
            "",
            "to an endpoint of the cluster, source kept",
            "to an endpoint of the cluster, source rewritten",
        ),
        (
            "cluster IP",
            "pod",
            "itself an endpoint, on this node",
            "to an endpoint of the cluster, source rewritten when it meets itself",
            "to an endpoint of the cluster, source rewritten",
        ),
        (
            "cluster IP",
            "pod",
            "itself an endpoint, on another node",
            "to an endpoint of the cluster, source rewritten when it meets itself",
            "to an endpoint of the cluster, source rewritten",
        ),
    }
    assert {change.reasons for change in changes} == {("masqueradeAll is off in one mode, on in other mode",)}


def test_node_ports_are_told_by_kind_of_address():
    changes = told(side("one", node_port_addresses=None, localhost_node_ports=True), side("other"))
    ways = {(change.arrival, change.sender.value, change.after) for change in changes}
    assert ways == {
        *(("node port on another address of the node", sender, "left alone") for sender in ("pod", "node", "other")),
        ("node port on loopback (127.0.0.0/8)", "node", "left alone"),
    }
    addresses = "nodePortAddresses is every address in one mode, primary in other mode"
    localhost = "localhostNodePorts is on in one mode, off in other mode"
    # Each of the two settings alone would take the port from loopback.
    assert {change.arrival: change.reasons for change in changes} == {
        "node port on another address of the node": (addresses,),
        "node port on loopback (127.0.0.0/8)": (addresses, localhost),
    }


def test_a_second_address_that_answers_in_neither_mode_is_not_told():
    changes = told(side("one", node_port_addresses=("10.20.0.0/24",)), side("other"))
    assert changes == []


@pytest.mark.parametrize(
    "deviation, arrival, before, after",
    [
        (Deviation.NO_CLUSTER_IP_GUARD, "unknown port of the cluster IP", "refused", "left alone"),
        (Deviation.NO_CLUSTER_IP_GUARD, "ping of the cluster IP", "refused", "left alone"),
        (
            Deviation.HAIRPIN_LOCAL_ONLY,
            "cluster IP",
            "to an endpoint of the cluster, source rewritten when it meets itself",
            "to an endpoint of the cluster, source kept",
        ),
    ],
    ids=lambda value: getattr(value, "value", value),
)
def test_a_deviation_is_told_in_its_own_words(deviation, arrival, before, after):
    for one, other in ((side("one"), side("other", [deviation])), (side("other", [deviation]), side("one"))):
        found = [change for change in told(one, other) if change.arrival == arrival]
        assert found
        forth = one.mode == "one"
        for change in found:
            assert (change.before, change.after) == ((before, after) if forth else (after, before))
            assert change.reasons == (f"in other mode {deviation.words}",)


def test_sources_in_and_out_of_ranges_are_told_apart():
    empty = service(
        "shop/web",
        "10.110.0.5",
        type="LoadBalancer",
        balancers=["203.0.113.9"],
        source_ranges=("198.51.100.0/24", "10.20.0.0/24"),
    )
    changes = told(side("one"), side("other", [Deviation.REJECT_BEFORE_RANGES]), empty)
    assert said(changes) == {
        ("load balancer IP", "pod", "in none of its source ranges", "dropped silently", "refused"),
        ("load balancer IP", "other", "in none of its source ranges", "dropped silently", "refused"),
        ("load balancer IP", "node", "in none of its source ranges", "dropped silently", "refused"),
    }


def test_services_that_differ_in_their_ranges_alone_are_judged_apart():
    fields = {"type": "LoadBalancer"}
    guarded = service(
        "shop/guarded", "10.110.0.5", balancers=["203.0.113.9"], source_ranges=("198.51.100.0/24",), **fields
    )
    open_one = service("shop/open", "10.110.0.6", balancers=["203.0.113.10"], **fields)
    for objects in ((guarded, open_one), (open_one, guarded)):
        changes = told(side("one"), side("other", [Deviation.REJECT_BEFORE_RANGES]), *objects)
        assert {change.service for change in changes} == {"shop/guarded:http"}
    # The name decides who is judged first.
    last = service("shop/z", "10.110.0.7", balancers=["203.0.113.11"], source_ranges=("198.51.100.0/24",), **fields)
    changes = told(side("one"), side("other", [Deviation.REJECT_BEFORE_RANGES]), open_one, last)
    assert {change.service for change in changes} == {"shop/z:http"}


def test_a_free_address_of_a_service_cidr_is_told():
    changes = told(
        side("one"),
        side("other", [Deviation.NO_CLUSTER_IP_GUARD]),
        *WEB,
        ServiceCIDR(name="kubernetes", cidrs=("10.110.0.0/16",)),
    )
    free = [change for change in changes if change.arrival == "a free address of 10.110.0.0/16"]
    assert {(change.service, change.before, change.after) for change in free} == {
        ("", "dropped silently", "left alone")
    }
    assert {change.sender for change in free} == set(Sender)


def test_a_port_with_the_same_number_elsewhere_is_not_mistaken():
    """An external IP that is the node's own address, with the number of another Service's node port."""
    other = service("shop/other", "10.110.0.6", port=30080, external_ips=("10.20.1.11",))
    changes = told(side("one", node_port_addresses=None), side("other"), *WEB, other)
    assert not [change for change in changes if change.service == "shop/other:http"]
    assert not [change for change in changes if change.example.destination == "10.20.1.11"]


def test_services_without_a_difference_are_not_named():
    quiet = (
        service("shop/quiet", "10.110.0.7", ports=(ServicePort(name="dns", port=53),)),
        endpoint_slice("shop/quiet", endpoint("10.64.1.11"), ports=(EndpointPort(name="dns", port=53),)),
    )
    changes = told(side("one"), side("other", [Deviation.HAIRPIN_LOCAL_ONLY]), *WEB, *quiet)
    assert {change.service for change in changes} == {"shop/web:http"}


def way(scenario, mode):
    return ModeSetup(mode=mode, config=setting.node_config(scenario, mode), deviations=BACKENDS[mode].deviations)


def tells(change, packet, plans, host):
    """Whether a change speaks of the cell that a packet meets."""
    if change.sender is not sender_of(plans[0], packet, host):
        return False
    found = [found for plan in plans if (found := find_frontend(plan, packet, host))]
    if not found:
        holders = {
            str(service.name)
            for plan in plans
            for service in plan.services.values()
            if any(frontend.address == packet.destination for frontend in service.frontends)
        }
        return change.arrival.startswith(("unknown port", "a free address")) and change.service in (holders or {""})
    return any(
        change.service == str(service.name) and change.arrival.startswith(frontend.kind.value)
        for service, frontend in found
    )


@pytest.mark.parametrize("one, other", [*itertools.combinations(BACKENDS, 2)])
def test_what_scenarios_show_between_modes_is_told(one, other):
    """Of every flow of every scenario, whatever modes the file is for."""
    differing = 0
    for scenario in SCENARIOS:
        cluster, sides = setting.snapshot(scenario), [way(scenario, mode) for mode in (one, other)]
        families = {family_of(flow.destination) for flow in scenario.flows}
        made = {family: [plan_once(cluster, each.config, family) for each in sides] for family in families}
        known = {}
        for flow in scenario.flows:
            packet, host = setting.packet_of(scenario, flow), setting.host_of(scenario, flow)
            family, plans = family_of(flow.destination), made[family_of(flow.destination)]
            ends = [
                evaluate(plan, packet, host, side.deviations).ends() for plan, side in zip(plans, sides, strict=True)
            ]
            if ends[0] == ends[1]:
                continue
            differing += 1
            if (family, host) not in known:
                found = compare(serving(cluster, family, sides[0]), list(factors(cluster, family, *sides)), host)
                known[family, host] = list(found)
            found = known[family, host]
            assert any(tells(change, packet, plans, host) for change in found), f"{scenario.name}: {packet}"
    assert differing > 10
