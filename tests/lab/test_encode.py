"""What the lab writes reads back as the same objects."""

import msgspec
import pytest
from msgspec.structs import replace

from narthex.lab.encode import encode
from narthex.model.decode.objects import load
from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import (
    Container,
    ContainerPort,
    Deployment,
    IPAddressPool,
    L2Advertisement,
    LoadBalancerIngress,
    Node,
    Pod,
    PodSpec,
    Service,
    ServiceAllocation,
    ServiceCIDR,
    ServicePort,
)
from narthex.model.selector import Requirement
from narthex.testing.build import endpoint, endpoint_slice, service

LABELS = (("app", "web"),)


def manifest_list(objects):
    """A JSON `kind: List` with one object in each line, so that line numbers in messages identify objects."""
    lines = b",\n".join(msgspec.json.encode(encode(obj)) for obj in objects)
    return b'{"apiVersion":"v1","kind":"List","items":[\n' + lines + b"\n]}\n"


def round_trip(*things):
    loaded = load(manifest_list(things), "lab.json")
    assert [str(problem) for problem in loaded.problems] == []
    return [replace(obj, origin="") for obj in loaded.objects]


def test_a_cluster_of_many_kinds():
    things = (
        Node(name="node-1", labels=(("topology.kubernetes.io/zone", "east"),), internal_ips=("192.0.2.1",)),
        ServiceCIDR(name="kubernetes", cidrs=("10.96.0.0/16",)),
        service("shop/web", "10.96.0.9", type="NodePort"),
        service("shop/name", type="ExternalName", external_name="example.org", ports=(), selector=()),
        endpoint_slice(
            "shop/by-hand", endpoint("192.0.2.9", node=""), labels=(("kubernetes.io/service-name", "by-hand"),)
        ),
        Pod(
            name="web-1",
            namespace="shop",
            labels=LABELS,
            ips=("10.244.1.2",),
            ready=True,
            phase="Running",
            spec=PodSpec(node_name="node-1", containers=(Container(name="c", ports=(ContainerPort(port=80),)),)),
        ),
    )
    assert round_trip(*things) == [replace(thing, origin="") for thing in things]


def test_a_service_with_everything():
    everything = Service(
        name="all",
        namespace="shop",
        labels=LABELS,
        annotations=(("a", "b"),),
        type="LoadBalancer",
        cluster_ips=("10.96.1.1", "fd00:10:96::5"),
        ip_families=(IPFamily.IPV4, IPFamily.IPV6),
        ip_family_policy="RequireDualStack",
        external_ips=("198.51.100.7",),
        ingress=(LoadBalancerIngress(ip="203.0.113.1"), LoadBalancerIngress(ip="203.0.113.2", proxy=True)),
        source_ranges=("10.0.0.0/8",),
        ports=(
            ServicePort(name="a", port=80, target_port="http", node_port=30080),
            ServicePort(name="b", port=53, protocol=Protocol.UDP, target_port=5353, node_port=30053),
        ),
        selector=LABELS,
        external_policy_local=True,
        internal_policy_local=True,
        affinity_seconds=77,
        health_check_node_port=30099,
        publish_not_ready=True,
        allocate_node_ports=False,
        traffic_distribution="PreferClose",
    )
    assert round_trip(everything) == [everything]


@pytest.mark.parametrize("said", [{}, {"ready": False}, {"network_unavailable": True}])
def test_what_balancers_must_know_of_a_node(said):
    node = Node(name="node-1", **said)
    assert round_trip(node) == [node]


def test_deployments_are_not_for_proxies():
    with pytest.raises(TypeError, match="Deployment"):
        encode(Deployment(name="web", namespace="shop"))


def test_one_object_a_line():
    lines = manifest_list([service("shop/a", "10.96.0.1"), service("shop/b", "10.96.0.2")]).splitlines()
    assert [b'"name":"a"' in lines[1], b'"name":"b"' in lines[2]] == [True, True]


def test_pools_and_advertisements():
    selector = (Requirement("app", "in", ("a", "b")), Requirement("old", "absent"), Requirement("x", "exists"))
    pool = IPAddressPool(
        name="lan",
        namespace="metallb-system",
        labels=LABELS,
        addresses=("192.168.15.0/28", "192.168.15.20-192.168.15.29"),
        auto_assign=False,
        avoid_buggy=True,
        allocation=ServiceAllocation(
            priority=3,
            namespaces=("shop",),
            namespace_selectors=(selector,),
            service_selectors=(selector[:1], selector),
        ),
    )
    advertisement = L2Advertisement(
        name="on-the-lan",
        namespace="metallb-system",
        pools=("lan",),
        pool_selectors=(selector,),
        node_selectors=((Requirement("zone", "notin", ("east",)),),),
        service_selectors=(selector,),
        interfaces=("eth0",),
    )
    plain = IPAddressPool(name="plain", namespace="x", addresses=("192.168.16.0/28",))
    everyone = L2Advertisement(name="all", namespace="x")
    things = [pool, plain, advertisement, everyone]
    assert round_trip(*things) == things
