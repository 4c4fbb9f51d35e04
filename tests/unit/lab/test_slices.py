"""Selectors become EndpointSlices."""

from msgspec.structs import replace

from narthex.lab.controllers import objects
from narthex.lab.slices import MAX_ENDPOINTS
from narthex.model.net import IPFamily
from narthex.model.objects import Container, ContainerPort, EndpointPort, EndpointSlice, Node, PodSpec, ServicePort
from narthex.testing.build import endpoint, endpoint_slice

from .clusters import deployment, ready, service, snapshot, start, step, template


def slices(cluster, *wanted):
    return [obj for obj in objects(snapshot(*wanted), cluster) if isinstance(obj, EndpointSlice)]


def made(*wanted):
    return slices(start(*wanted), *wanted)


def test_the_slice_of_a_service():
    (got,) = made(deployment(2), service())
    assert (got.service_name, got.label("kubernetes.io/service-name")) == ("web", "web")
    assert got.ports == (EndpointPort(name="http", port=8080),)
    assert [(each.address, each.node_name, each.ready) for each in got.endpoints] == [
        ("10.244.1.2", "node-1", True),
        ("10.244.2.2", "node-2", True),
    ]
    assert all(each.target.startswith("web-") for each in got.endpoints)


def test_one_slice_per_family():
    got = made(deployment(1), service(ip_family_policy="PreferDualStack"))
    assert [each.family for each in got] == [IPFamily.IPV4, IPFamily.IPV6]
    assert got[1].endpoints[0].address == "fd00:10:244:1::2"


def test_target_ports_by_number_by_name_and_by_default():
    ports = (
        ServicePort(name="a", port=80, target_port=9000),
        ServicePort(name="b", port=81, target_port="http"),
        ServicePort(name="c", port=82),
        ServicePort(name="d", port=83, target_port="no-such-name"),
    )
    (got,) = made(deployment(1), service(ports=ports))
    assert [(port.name, port.port) for port in got.ports] == [("a", 9000), ("b", 8080), ("c", 82)]


def test_a_named_port_with_two_numbers_needs_two_slices():
    before = start(deployment(1), service())
    changed = deployment(1, template=template(port=9090))
    got = slices(step(before, changed, service()), changed, service())
    assert [(each.ports[0].port, each.endpoints[0].terminating) for each in got] == [(8080, True), (9090, False)]
    assert len({each.name for each in got}) == 2


def test_only_the_selected_pods_of_the_namespace():
    assert made(deployment(1), service(selector=(("app", "other"),))) == []
    assert made(deployment(1), service(namespace="elsewhere")) == []


def test_conditions():
    before = start(deployment(2), service())
    (leaving,) = [
        each for each in slices(step(before, deployment(1), service()), service())[0].endpoints if each.terminating
    ]
    assert (leaving.ready, leaving.serving) == (False, True)
    unready = replace(before, pods=tuple(replace(pod, pod=replace(pod.pod, ready=False)) for pod in before.pods))
    assert {(e.ready, e.serving) for e in slices(unready, service())[0].endpoints} == {(False, False)}
    published = replace(
        unready, services={key: replace(s, publish_not_ready=True) for key, s in unready.services.items()}
    )
    assert {(e.ready, e.serving) for e in slices(published, service())[0].endpoints} == {(True, True)}


def test_traffic_distribution_becomes_hints():
    zone = Node(name="node-1", labels=(("topology.kubernetes.io/zone", "east"),))
    (got,) = made(deployment(2), service(traffic_distribution="PreferSameNode"), zone)
    assert [(each.zone, each.for_zones, each.for_nodes) for each in got.endpoints] == [
        ("east", ("east",), ("node-1",)),
        ("", (), ("node-2",)),
    ]


def test_many_endpoints_need_many_slices():
    got = made(deployment(MAX_ENDPOINTS + 1), service())
    assert sorted(len(each.endpoints) for each in got) == [1, MAX_ENDPOINTS]
    assert len({each.name for each in got}) == 2


def test_headless_services_have_marked_slices():
    (got,) = made(deployment(1), service(cluster_ips=("None",)))
    assert got.label("service.kubernetes.io/headless") == ""


def test_slices_by_hand_count_for_services_without_selector():
    by_hand = endpoint_slice("shop/web", endpoint("192.0.2.9", node=""))
    assert made(service(selector=()), by_hand) == [by_hand]
    assert made(service(), by_hand) == []
    assert made(by_hand) == []


def test_udp_and_tcp_of_one_name_are_told_apart():
    from narthex.model.net import Protocol

    ports = (ContainerPort(name="dns", port=53, protocol=Protocol.UDP), ContainerPort(name="dns-tcp", port=5353))
    spec = PodSpec(containers=(Container(name="dns", ports=ports),))
    wanted = service(ports=(ServicePort(name="x", port=53, protocol=Protocol.TCP, target_port="dns"),))
    (got,) = made(deployment(1, template=spec), wanted)
    assert got.ports == ()
    assert ready(start(deployment(1, template=spec), wanted)).pods[0].pod.ready
