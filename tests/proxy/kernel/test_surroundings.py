"""Sixteen known faults of kube-proxy, and what happens here instead. One test each; deeper ones stand beside the parts."""

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.proxy.kernel.modes import MODES_HERE
from tests.proxy.kernel.small_cluster import HERE, THERE, SmallCluster, slices
from tests.proxy.kernel.small_cluster import service as service_manifest

from narthex.cli import main
from narthex.linux.run import run
from narthex.linux.sysctls import apply_sysctls
from narthex.model.kernel_setting import KernelSetting
from narthex.model.net import FAMILIES, ConntrackFlow, IPFamily, Protocol
from narthex.model.objects import EndpointPort, ServiceCIDR, ServicePort
from narthex.model.packet import Disposition, Memory
from narthex.model.store import Store, Synced, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.planner import Planner
from narthex.proxy.plan.stale import StaleReason, StaleSearch
from narthex.proxy.program.health import ProxyHealth
from narthex.proxy.program.report import written as say_written
from narthex.testing.build import (
    CONFIG,
    HOST,
    NODE_IPS,
    endpoint,
    endpoint_slice,
    node,
    packet,
    plan,
    service,
    snapshot,
)
from narthex.testing.fakes import FakeClock
from narthex.trace.evaluate import evaluate

DOCS = Path(__file__).parents[3] / "docs"
OUTSIDER, POD = "198.51.100.7", "10.64.1.200"
NODE_IP, SECOND_IP = NODE_IPS[0], NODE_IPS[1]
LOCAL = {"type": "NodePort", "external_policy_local": True}

each_mode = pytest.mark.parametrize("mode", sorted(BACKENDS))
each_mode_here = pytest.mark.parametrize("mode", MODES_HERE)


def row(number, *others):
    return pytest.mark.row(f"29.{number}", *others)


def ends(mode, made, sent, memory=None, now=0.0):
    """How a packet ends by a mode's rules: dispositions and endpoints."""
    backend = BACKENDS[mode]
    trace = backend.walk(backend.render(made), sent, HOST, memory, now)
    return {(outcome.disposition, outcome.endpoint) for outcome in trace.outcomes}


def only(disposition):
    return {(disposition, None)}


def fading(address, **fields):
    return endpoint(address, ready=False, serving=True, terminating=True, **fields)


@row(1, "17.7")
def test_a_proxy_that_never_synced_is_not_healthy():
    clock = FakeClock()
    health = ProxyHealth(FAMILIES, 30.0, clock)
    assert health.healthz()[0] == 503
    clock.advance(1000)
    assert health.healthz()[0] == 503
    for family in FAMILIES:
        health.synced(family)
    assert health.healthz()[0] == 200


@row(2, "9.4", "9.5")
@each_mode
def test_an_unknown_node_address_opens_nothing(mode):
    objects = (
        service("shop/web", "10.110.0.1", type="NodePort", node_port=30080),
        endpoint_slice("shop/web", endpoint("10.64.1.5")),
    )
    unknown = plan(*objects, node(internal_ips=()), node_port_addresses=("primary",))
    other_family = plan(*objects, node_port_addresses=("fd20::/64",), strict_node_port_addresses=True)
    for made in (unknown, other_family):
        for address in (NODE_IP, SECOND_IP):
            assert ends(mode, made, packet(OUTSIDER, f"{address}:30080")) == only(Disposition.NOT_OURS)


@row(3, "18.7", "18.8")
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP, Protocol.SCTP])
def test_connections_to_endpoints_that_are_gone_are_ended_also_the_last_ones(protocol):
    ports = (ServicePort(name="p", port=80, protocol=protocol),)
    web = service("shop/web", "10.110.0.1", ports=ports)
    full = endpoint_slice(
        "shop/web", endpoint("10.64.1.5"), ports=(EndpointPort(name="p", protocol=protocol, port=8080),)
    )
    planner = Planner(CONFIG, IPFamily.IPV4)
    before, after = planner.plan(snapshot(web, full)), planner.plan(snapshot(web))
    flow = ConntrackFlow(protocol, POD, 40000, "10.110.0.1", 80, "10.64.1.5", 8080)
    assert StaleSearch(after, before, after.lineage.changed).reason(flow, NODE_IPS) is StaleReason.ENDPOINT_GONE


@row(4, "18.2")
def test_connections_to_other_machines_at_a_node_ports_number_are_left_alone():
    ports = (ServicePort(name="p", port=80, protocol=Protocol.UDP, node_port=30053),)
    web = service("shop/web", "10.110.0.1", type="NodePort", ports=ports)
    planner = Planner(CONFIG, IPFamily.IPV4)
    slice_ports = (EndpointPort(name="p", protocol=Protocol.UDP, port=53),)
    before, after = (
        planner.plan(snapshot(web, endpoint_slice("shop/web", endpoint(pod), ports=slice_ports)))
        for pod in ("10.64.1.5", "10.64.1.6")
    )
    search = StaleSearch(after, before, after.lineage.changed)
    assert search.reason(ConntrackFlow(Protocol.UDP, POD, 4000, NODE_IP, 30053, "10.64.1.5", 53), NODE_IPS)
    assert search.reason(ConntrackFlow(Protocol.UDP, POD, 4000, OUTSIDER, 30053, OUTSIDER, 30053), NODE_IPS) is None


@row(5, "13.4", "13.6")
@each_mode
def test_an_empty_service_gives_one_answer_in_all_modes(mode):
    """A process of the node is refused by an external address, too; a node port is refused only where it answers."""
    empty = plan(service("shop/web", "10.110.0.1", type="NodePort", node_port=30080, external_ips=("203.0.113.5",)))
    assert ends(mode, empty, packet(NODE_IP, "203.0.113.5:80")) == only(Disposition.REJECTED)
    assert ends(mode, empty, packet(OUTSIDER, f"{NODE_IP}:30080")) == only(Disposition.REJECTED)
    assert ends(mode, empty, packet(OUTSIDER, f"{SECOND_IP}:30080")) == only(Disposition.NOT_OURS)


@row(6, "7.5", "8.2")
@each_mode
def test_local_policies_never_send_to_other_nodes(mode):
    """Upstream's ipvs mode does, when nothing is here; all modes here drop."""
    elsewhere = endpoint_slice("shop/web", endpoint("10.64.2.5", "worker-b"))
    outside = plan(service("shop/web", "10.110.0.1", node_port=30080, **LOCAL), elsewhere)
    assert ends(mode, outside, packet(OUTSIDER, f"{NODE_IP}:30080")) == only(Disposition.DROPPED)
    inside = plan(
        service("shop/web", "10.110.0.1", internal_policy_local=True, external_ips=("203.0.113.5",)), elsewhere
    )
    for source in (POD, NODE_IP, OUTSIDER):
        assert ends(mode, inside, packet(source, "10.110.0.1:80")) == only(Disposition.DROPPED)


@row(7, "14.3", "14.4", "14.6")
@each_mode
def test_clients_are_not_pinned_to_what_is_not_ready(mode):
    """`tests/proxy/kernel/test_sessions.py` does it with packets. In nftables mode an endpoint remembers 65,535 clients."""
    web = service("shop/web", "10.110.0.1", affinity_seconds=10800)
    both = (endpoint("10.64.1.5"), endpoint("10.64.1.6"))
    memory, sent = Memory(), packet(POD, "10.110.0.1:80")
    backend = BACKENDS[mode]
    first = backend.walk(backend.render(plan(web, endpoint_slice("shop/web", *both))), sent, HOST, memory)
    for name, key in next(each for each in first.outcomes if each.endpoint == ("10.64.1.5", 80)).remembers:
        memory.touch(name, key, 0.0)
    still = plan(web, endpoint_slice("shop/web", *both))
    assert ends(mode, still, sent, memory, 1.0) == {(Disposition.DELIVERED, ("10.64.1.5", 80))}
    unready = endpoint("10.64.1.5", ready=False, serving=False)
    left = plan(web, endpoint_slice("shop/web", unready, both[1]))
    assert ends(mode, left, sent, memory, 1.0) == {(Disposition.DELIVERED, ("10.64.1.6", 80))}
    if mode == "nftables":
        remembering = [one for one in backend.render(still).table().sets.values() if one.dynamic]
        assert len(remembering) == 2 and all(one.size == 65535 for one in remembering)


@row(8, "19.6")
def test_a_setting_that_cannot_be_written_is_told_and_ends_nothing(tmp_path):
    (tmp_path / "kept").write_text("1")
    wanted = [KernelSetting("not/there", 5, "min"), KernelSetting("kept", 7, "maxPerCore")]
    outcomes = {done.setting.path: done.error for done in apply_sysctls(wanted, tmp_path)}
    assert outcomes["not/there"] and not outcomes["kept"]
    assert (tmp_path / "kept").read_text() == "7"


@pytest.mark.kernel
@row(9, "21.17")
@each_mode_here
def test_flushed_rules_are_back_within_a_second(mode, tmp_path):
    """The quickest of three counts, and where even the tool that flushes takes long, the machine is that slow."""
    with SmallCluster(tmp_path, mode) as cluster:
        cluster.serve(HERE[4][0])
        cluster.put("web", service_manifest(), *slices({HERE[4][0]: "ready"}))
        cluster.start().ready()
        whole, times, slowest = cluster.rules(), [], 0.0
        for _ in range(3):
            tool = ["nft", "flush", "ruleset"] if mode == "nftables" else ["iptables", "-t", "nat", "-F"]
            start = time.monotonic()
            run(tool, namespace=cluster.world.node)
            slowest = max(slowest, time.monotonic() - start)
            start = time.monotonic()
            cluster.wait(lambda: sorted(cluster.rules().split("\n")) == sorted(whole.split("\n")), "the rules")
            times.append(time.monotonic() - start)
        assert min(times) < max(1.0, 20 * slowest), (times, slowest)


@row(10, "21.6", "21.13", "21.19")
@each_mode
def test_a_change_costs_the_same_among_two_thousand(mode):
    """Counted, not timed: what is written for one endpoint more, in a small and in a big cluster."""
    backend, written = BACKENDS[mode], []
    for count in (5, 2000):
        store, planner = Store(), Planner(CONFIG, IPFamily.IPV4)
        for number in range(count):
            name = f"shop/s{number}"
            store.apply(Upsert(service(name, f"10.110.{number >> 8}.{number & 255}")))
            store.apply(Upsert(endpoint_slice(name, endpoint("10.64.1.5"))))
        have = backend.render(planner.plan(store.apply(Synced()), store.take_changed()))
        store.apply(Upsert(endpoint_slice("shop/s3", endpoint("10.64.1.5"), endpoint("10.64.1.6"))))
        changes = backend.advance(have, planner.plan(store.snapshot, store.take_changed()))[1]
        written.append(say_written(changes))
    assert written[0] == written[1]
    assert 0 < sum(map(int, re.findall(r"\d+", written[0]))) < 15


@row(11)
@each_mode
def test_why_is_this_packet_not_balanced(mode, tmp_path):
    """One command shows the rules on a packet's way, and the reason why just these endpoints are drawn from."""
    pod = {"conditions": {"ready": True}, "nodeName": "worker-a"}
    made = slices({HERE[4][0]: "ready", THERE[4][0]: "ready"})
    made[0]["endpoints"] = [
        {**pod, "addresses": [HERE[4][0]], "hints": {"forZones": [{"name": "east"}]}},
        {**pod, "addresses": [THERE[4][0]], "hints": {"forZones": [{"name": "west"}]}},
    ]
    here = {"kind": "Node", "apiVersion": "v1", "status": {"addresses": [{"type": "InternalIP", "address": NODE_IP}]}}
    here["metadata"] = {"name": "worker-a", "labels": {"topology.kubernetes.io/zone": "east"}}
    objects = [here, service_manifest(), made[0]]
    (tmp_path / "all.json").write_text(json.dumps({"kind": "List", "apiVersion": "v1", "items": objects}))
    arguments = ["trace", "--manifests", str(tmp_path), "--mode", mode, "--cluster-cidr", "10.64.0.0/12"]
    done = CliRunner().invoke(main, [*arguments, POD, "10.110.0.1:80"])
    assert done.exit_code == 0, done.output
    assert "shop/web:http" in done.output
    assert f"{HERE[4][0]}:8080" in done.output and THERE[4][0] not in done.output
    decided = CliRunner().invoke(main, ["plan", *arguments[1:3], "--cluster-cidr", "10.64.0.0/12"])
    assert "ready and hinted for zone east" in decided.output


@row(12, "15.8", "4.12")
@each_mode
def test_a_change_of_the_node_is_decided_anew_in_place(mode):
    """Its addresses and its zone; `tests/proxy/kernel/test_reload.py` does it with configuration files."""
    web = service("shop/web", "10.110.0.1", type="NodePort", node_port=30080)
    ends_of_zones = [endpoint(f"10.64.1.{n}", for_zones=(zone,)) for n, zone in ((5, "east"), (6, "west"))]
    store, planner = Store(), Planner(CONFIG, IPFamily.IPV4)
    for obj in (node(zone="east"), web, endpoint_slice("shop/web", *ends_of_zones)):
        store.apply(Upsert(obj))
    one = planner.plan(store.snapshot, store.take_changed())
    store.apply(Upsert(node(zone="west", internal_ips=(SECOND_IP,))))
    other = planner.plan(store.snapshot, store.take_changed())
    delivered = Disposition.DELIVERED
    assert ends(mode, one, packet(OUTSIDER, f"{NODE_IP}:30080")) == {(delivered, ("10.64.1.5", 80))}
    assert ends(mode, other, packet(OUTSIDER, f"{SECOND_IP}:30080")) == {(delivered, ("10.64.1.6", 80))}
    assert ends(mode, other, packet(OUTSIDER, f"{NODE_IP}:30080")) == only(Disposition.NOT_OURS)


@row(13, "5.9", "5.11")
def test_a_new_service_cidr_counts_at_once():
    backend, store, planner = BACKENDS["nftables"], Store(), Planner(CONFIG, IPFamily.IPV4)
    for obj in (node(), service("shop/web", "10.110.0.1")):
        store.apply(Upsert(obj))
    free = packet(POD, "10.118.4.77:80")
    before = planner.plan(store.apply(Synced()), store.take_changed())
    assert ends("nftables", before, free) == only(Disposition.NOT_OURS)
    store.apply(Upsert(ServiceCIDR(name="more", cidrs=("10.118.4.0/24",))))
    after = planner.plan(store.snapshot, store.take_changed())
    assert after is not before
    assert backend.diff(backend.render(before), backend.render(after))
    assert ends("nftables", after, free) == only(Disposition.DROPPED)


@row(14, "16.3", "3.3")
@each_mode
def test_balancers_are_told_to_go_while_terminating_endpoints_still_serve(mode):
    """Meant so: a balancer drains the node before its last endpoint ends. The page of differences says it."""
    web = service(
        "shop/web",
        "10.110.0.1",
        type="LoadBalancer",
        balancers=("203.0.113.10",),
        external_policy_local=True,
        health_check_node_port=32000,
    )
    made = plan(web, endpoint_slice("shop/web", fading("10.64.1.5"), endpoint("10.64.2.5", "worker-b")))
    (check,) = made.health_checks.values()
    assert check.local_ready == 0
    assert ends(mode, made, packet(OUTSIDER, "203.0.113.10:80")) == {(Disposition.DELIVERED, ("10.64.1.5", 80))}
    assert "16.3, 29.14" in (DOCS / "reference/differences.md").read_text()


@pytest.mark.kernel
@row(15, "26.1", "26.2")
@each_mode_here
def test_another_mode_leaves_no_rules_of_the_one_before(mode, tmp_path):
    with SmallCluster(tmp_path, mode) as cluster:
        cluster.serve(HERE[4][0])
        cluster.put("web", service_manifest(), *slices({HERE[4][0]: "ready"}))
        cluster.start().ready()
        former = cluster.rules()
        cluster.kill()
        cluster.mode = next(other for other in MODES_HERE if other != mode)
        cluster.start().ready()
        own, cluster.mode = cluster.mode, mode
        trace = {"nftables": "table ip narthex", "iptables": "KUBE-SVC-", "userspace": "KUBE-PORTALS-"}[mode]
        assert trace in former
        cluster.wait(lambda: trace not in cluster.rules(), f"the end of the {mode} rules")
        cluster.mode = own
        assert HERE[4][0] in cluster.rules()


@row(16, "10.4")
@each_mode
def test_node_ports_and_external_ips_obey_source_ranges_on_request(mode):
    fields = {"source_ranges": ("198.51.100.7/32",), "type": "LoadBalancer", "external_ips": ("203.0.113.5",)}
    objects = (
        service("shop/web", "10.110.0.1", node_port=30080, balancers=("203.0.113.10",), **fields),
        endpoint_slice("shop/web", endpoint("10.64.1.5")),
    )
    lax, strict = plan(*objects), plan(*objects, strict_source_ranges=True)
    for destination in (f"{NODE_IP}:30080", "203.0.113.5:80"):
        allowed, stranger = packet(OUTSIDER, destination), packet("198.51.100.8", destination)
        assert ends(mode, lax, stranger) == ends(mode, strict, allowed) == {(Disposition.DELIVERED, ("10.64.1.5", 80))}
        assert ends(mode, strict, stranger) == only(Disposition.DROPPED)
        deviations = BACKENDS[mode].deviations
        assert {end[0] for end in evaluate(strict, stranger, HOST, deviations).ends()} == {Disposition.DROPPED}
    assert ends(mode, strict, packet("198.51.100.8", "10.110.0.1:80")) != only(Disposition.DROPPED)
