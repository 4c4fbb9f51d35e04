"""From what a person types to a packet."""

import pytest

from narthex.model.net import Protocol
from narthex.model.objects import Node, Pod, PodSpec, ServicePort
from narthex.testing.build import endpoint, endpoint_slice, node, service, snapshot
from narthex.trace.program.inputs import ClusterObjects, NodeInputs, NodeOptions, node_inputs
from narthex.trace.program.places import (
    DestinationSpec,
    OwnerIndex,
    ResolvedRequest,
    TraceError,
    ask,
    question,
    split_destination,
)

SNAPSHOT = snapshot(
    node(),
    Node(name="worker-b", pod_cidrs=("10.64.2.0/24",), internal_ips=("10.20.0.12", "fd20::12")),
    service("shop/web", "10.110.0.5", "fd6e::5", node_port=30001, balancers=("203.0.113.10",)),
    endpoint_slice("shop/web", endpoint("10.64.1.10", target="web-1"), port=8080),
    endpoint_slice("shop/web", endpoint("fd64:0:0:1::10", target="web-1"), port=8080, suffix="2"),
    service("default/dns", "10.110.0.10", ports=(
        ServicePort(name="dns", port=53, protocol=Protocol.UDP),
        ServicePort(name="dns-tcp", port=53),
        ServicePort(name="metrics", port=9153),
    )),
    service("other/dns", "10.110.0.11"),
    service("shop/none", "None"),
    Pod(namespace="shop", name="client", ips=("10.64.1.200",), spec=PodSpec(node_name="worker-a")),
    Pod(namespace="shop", name="web", ips=("10.64.1.201",), spec=PodSpec(node_name="worker-a")),
)  # fmt: skip
PLACES = OwnerIndex(SNAPSHOT)
INPUTS: NodeInputs = node_inputs(
    ClusterObjects(snapshot=SNAPSHOT), NodeOptions(node="worker-a", cluster_cidr="10.64.0.0/12,fd64::/48")
)


def asked(source: str, destination: str, iif: str | None = None) -> ResolvedRequest:
    sender, target, wanted = ask(PLACES, source, destination)
    return question(PLACES, sender, target, wanted, INPUTS, INPUTS.host, iif)


def packet_of(source: str, destination: str) -> tuple[str, str, int, str]:
    packet = asked(source, destination).packet
    return packet.source, packet.destination, packet.port, packet.protocol.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:80", DestinationSpec(name="10.0.0.1", port="80")),
        ("10.0.0.1:80/udp", DestinationSpec(name="10.0.0.1", port="80", protocol=Protocol.UDP)),
        ("10.0.0.1/icmp", DestinationSpec(name="10.0.0.1", protocol=Protocol.ICMP)),
        ("[fd00::1]:80/SCTP", DestinationSpec(name="fd00::1", port="80", protocol=Protocol.SCTP)),
        ("fd00::1", DestinationSpec(name="fd00::1")),
        ("shop/web", DestinationSpec(name="shop/web")),
        ("shop/web:http/tcp", DestinationSpec(name="shop/web", port="http", protocol=Protocol.TCP)),
        ("shop/web/tcp", DestinationSpec(name="shop/web", protocol=Protocol.TCP)),
        ("shop/udp", DestinationSpec(name="shop/udp")),
        ("web:80/udp", DestinationSpec(name="web", port="80", protocol=Protocol.UDP)),
    ],
)
def test_destinations_are_taken_apart(text: str, expected: DestinationSpec) -> None:
    assert split_destination(text) == expected


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        ("pod/shop/client", "shop/web", ("10.64.1.200", "10.110.0.5", 80, "TCP")),
        ("client", "service/shop/web:http", ("10.64.1.200", "10.110.0.5", 80, "TCP")),
        ("shop/client", "pod/shop/web:99", ("10.64.1.200", "10.64.1.201", 99, "TCP")),
        ("outside", "worker-a:30001", ("198.51.100.7", "10.20.0.11", 30001, "TCP")),
        ("outside", "node/worker-b:30001/udp", ("198.51.100.7", "10.20.0.12", 30001, "UDP")),
        ("2001:db8:c::9", "shop/web", ("2001:db8:c::9", "fd6e::5", 80, "TCP")),
        ("web-1", "dns:dns", ("10.64.1.10", "10.110.0.10", 53, "UDP")),
        ("web-1", "dns:53", ("10.64.1.10", "10.110.0.10", 53, "TCP")),
        ("web-1", "dns:53/udp", ("10.64.1.10", "10.110.0.10", 53, "UDP")),
        ("web-1", "other/dns", ("10.64.1.10", "10.110.0.11", 80, "TCP")),
        ("web-1", "203.0.113.10", ("10.64.1.10", "203.0.113.10", 80, "TCP")),
        ("web-1", "10.110.0.5/icmp", ("10.64.1.10", "10.110.0.5", 0, "ICMP")),
    ],
)
def test_packets_are_what_was_meant(source: str, destination: str, expected: tuple[str, str, int, str]) -> None:
    assert packet_of(source, destination) == expected


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        ("shop/clint", "shop/web", "shop/client"),
        ("client", "dns", "53/udp (dns), 53/tcp (dns-tcp), 9153/tcp (metrics)"),
        ("client", "shop/web:htp", "there are 80/tcp (http)"),
        ("client", "192.0.2.1", "which port"),
        ("client", "192.0.2.1:0", "not a port"),
        ("client", "192.0.2.1:70000", "not a port"),
        ("client", "shop/none", "has no address"),
        ("10.64.1.200", "fd6e::5:80", "no IP family in common"),
        ("client", "[fd6e::5", "is not [ADDRESS]:PORT"),
        ("shop/none", "shop/web", "there is no"),
    ],
)
def test_what_cannot_be_meant_is_answered_with_what_could(source: str, destination: str, message: str) -> None:
    with pytest.raises(TraceError) as error:
        asked(source, destination)
    assert message in str(error.value)


def test_a_sender_has_no_port() -> None:
    with pytest.raises(TraceError, match="'client:80' has a port: a sender is a pod"):
        asked("client:80", "shop/web")


def test_two_of_one_name_must_be_named_in_full() -> None:
    twice = OwnerIndex(snapshot(service("a/web", "10.110.0.1"), service("b/web", "10.110.0.2")))
    with pytest.raises(TraceError, match="a/web, b/web"):
        twice.destination("web")


def test_the_interface_fits_the_sender() -> None:
    assert asked("client", "shop/web").packet.iif == "cni0"
    assert asked("10.64.1.77", "shop/web").packet.iif == "cni0"
    assert asked("outside", "shop/web").packet.iif == "eth0"
    assert asked("outside", "shop/web", iif="wan0").packet.iif == "wan0"
    host = asked("worker-a", "shop/web").packet
    assert (host.iif, host.from_host) == ("", True)
    assert asked("127.0.0.1", "10.20.0.11:30001").packet.from_host
    assert not asked("worker-b", "shop/web").packet.from_host


def test_a_name_that_only_objects_can_explain_asks_for_them():
    with pytest.raises(TraceError, match=r"there are outside.*--kubeconfig"):
        OwnerIndex(snapshot()).sender("shop/client")
    with pytest.raises(TraceError, match=r"or give an address$"):
        PLACES.sender("shop/clerk")
