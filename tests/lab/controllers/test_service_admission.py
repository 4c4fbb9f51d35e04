"""What a Service is given as it is written, and the words when it cannot have what it asks for."""

import ipaddress

import pytest

from narthex.lab.api.errors import StatusError
from narthex.lab.controllers.service.allocator import address_range, port_range
from narthex.lab.topology import SERVICE_CIDRS

from .world import World, service

PORTS = [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "http"}]


def port(number=80, protocol="TCP", node=0, name=""):
    return {"name": name or f"p{number}{protocol.lower()}", "protocol": protocol, "port": number} | (
        {"nodePort": node} if node else {}
    )


def made(*services, world=None):
    world = world or World(nodes=0)
    for each in services:
        world.put(each)
    return world.get("Service", services[-1]["metadata"]["name"])["spec"]


def refusal(world, obj):
    with pytest.raises(StatusError) as caught:
        world.put(obj)
    return caught.value


def families(spec):
    return ["IPv6" if ":" in address else "IPv4" for address in spec["clusterIPs"]]


def test_an_address_of_the_range_above_the_static_band():
    spec = made(service())
    address = ipaddress.ip_address(spec["clusterIP"])
    assert address in ipaddress.ip_network(SERVICE_CIDRS[0])
    assert int(address) > int(ipaddress.ip_address("10.96.1.0")), "the lower 256 are for who asks"
    assert (spec["clusterIPs"], spec["ipFamilies"], spec["ipFamilyPolicy"]) == (
        [spec["clusterIP"]],
        ["IPv4"],
        "SingleStack",
    )


@pytest.mark.parametrize(
    ("asked", "got", "policy"),
    [
        ({}, ["IPv4"], "SingleStack"),
        ({"ipFamilies": ["IPv6"]}, ["IPv6"], "SingleStack"),
        ({"ipFamilyPolicy": "PreferDualStack"}, ["IPv4", "IPv6"], "PreferDualStack"),
        ({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6"]}, ["IPv6", "IPv4"], "RequireDualStack"),
        ({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]}, ["IPv6", "IPv4"], "RequireDualStack"),
        ({"clusterIP": "fd00:10:96::7"}, ["IPv6"], "SingleStack"),
        ({"clusterIP": "10.96.0.7", "ipFamilyPolicy": "PreferDualStack"}, ["IPv4", "IPv6"], "PreferDualStack"),
        (
            {"clusterIPs": ["fd00:10:96::7", "10.96.0.7"], "ipFamilyPolicy": "PreferDualStack"},
            ["IPv6", "IPv4"],
            "PreferDualStack",
        ),
    ],
)
def test_families(asked, got, policy):
    spec = made(service(**asked))
    assert (families(spec), spec["ipFamilies"], spec["ipFamilyPolicy"]) == (got, got, policy)
    for address in asked.get("clusterIPs") or ([asked["clusterIP"]] if "clusterIP" in asked else []):
        assert address in spec["clusterIPs"]


@pytest.mark.parametrize(
    ("selector", "got", "policy"),
    [({"app": "web"}, ["IPv4"], "SingleStack"), (None, ["IPv4", "IPv6"], "RequireDualStack")],
)
def test_headless(selector, got, policy):
    spec = made(service(clusterIP="None", selector=selector))
    assert (spec["clusterIP"], spec["clusterIPs"]) == ("None", ["None"])
    assert (spec["ipFamilies"], spec["ipFamilyPolicy"]) == (got, policy)


def test_an_external_name_is_given_nothing():
    spec = made(service(type="ExternalName", externalName="example.org", ports=PORTS))
    assert not {"clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"} & spec.keys()


@pytest.mark.parametrize(
    ("asked", "has"),
    [
        ({"type": "ClusterIP"}, False),
        ({"type": "NodePort"}, True),
        ({"type": "LoadBalancer"}, True),
        ({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": False}, False),
    ],
)
def test_which_types_have_node_ports(asked, has):
    (given,) = made(service(**asked))["ports"]
    assert ("nodePort" in given) is has
    if has:
        assert 30086 <= given["nodePort"] <= 32767, "the lower 86 are for who asks"


def test_a_port_of_two_protocols_has_one_number():
    tcp, udp = made(service(type="NodePort", ports=[port(53, "TCP"), port(53, "UDP")]))["ports"]
    assert tcp["nodePort"] == udp["nodePort"]
    asked = made(service(type="NodePort", ports=[port(53, "TCP"), port(53, "UDP", 30053), port(54)]))["ports"]
    assert [each["nodePort"] for each in asked[:2]] == [30053, 30053]
    assert asked[2]["nodePort"] != 30053


@pytest.mark.parametrize(
    ("asked", "has"),
    [
        ({"type": "LoadBalancer", "externalTrafficPolicy": "Local"}, True),
        ({"type": "LoadBalancer", "externalTrafficPolicy": "Cluster"}, False),
        ({"type": "NodePort", "externalTrafficPolicy": "Local"}, False),
    ],
)
def test_who_has_a_health_check_port(asked, has):
    assert ("healthCheckNodePort" in made(service(**asked))) is has


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"clusterIP": "10.96.0.10"},
            'spec.clusterIPs: Invalid value: []string{"10.96.0.10"}: failed to allocate IP 10.96.0.10: '
            "provided IP is already allocated",
        ),
        (
            {"clusterIP": "192.0.2.1"},
            'spec.clusterIPs: Invalid value: []string{"192.0.2.1"}: failed to allocate IP 192.0.2.1: '
            "the provided IP (192.0.2.1) is not in the valid range. The range of valid IPs is 10.96.0.0/16",
        ),
        (
            {"type": "NodePort", "ports": [port(80, node=30080)]},
            "spec.ports[0].nodePort: Invalid value: 30080: provided port is already allocated",
        ),
        (
            {"type": "NodePort", "ports": [port(80), port(81, node=80)]},
            "spec.ports[1].nodePort: Invalid value: 80: provided port is not in the valid range. "
            "The range of valid ports is 30000-32767",
        ),
        (
            {"type": "NodePort", "ports": [port(80, node=30001), port(81, node=30001)]},
            "spec.ports[1].nodePort: Invalid value: 30001: provided port is already allocated",
        ),
        (
            {"ports": [port(80, node=30001)]},
            "spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'",
        ),
        (
            {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 30080},
            "spec.healthCheckNodePort: Invalid value: 30080: failed to allocate requested HealthCheck NodePort 30080: "
            "provided port is already allocated",
        ),
        (
            {"ipFamilies": ["IPv4", "IPv6"]},
            'spec.ipFamilyPolicy: Invalid value: "SingleStack": must be RequireDualStack or PreferDualStack when multiple '
            "ipFamilies are specified",
        ),
        (
            {"clusterIP": "10.96.0.5", "ipFamilies": ["IPv6"]},
            'spec.clusterIPs[0]: Invalid value: "10.96.0.5": expected an IPv6 value as indicated by `ipFamilies[0]`',
        ),
        (
            {"type": "ExternalName", "externalName": "a.example", "clusterIP": "10.96.0.5"},
            "spec.clusterIPs: Forbidden: may not be set for ExternalName services",
        ),
        (
            {"type": "ExternalName", "externalName": "a.example", "ipFamilyPolicy": "SingleStack"},
            "spec.ipFamilyPolicy: Forbidden: may not be set for ExternalName services",
        ),
        (
            {"type": "NodePort", "clusterIP": "None"},
            "spec.clusterIPs[0]: Invalid value: []string{\"None\"}: may not be set to 'None' for NodePort services",
        ),
    ],
)
def test_what_cannot_be_had(asked, message):
    world = World(nodes=0)
    world.put(service("first", type="NodePort", clusterIP="10.96.0.10", ports=[port(80, node=30080)]))
    fault = refusal(world, service(**asked))
    assert (fault.code, fault.reason) == (422, "Invalid")
    assert fault.message == f'Service "web" is invalid: {message}'
    assert world.get("Service", "web") is None


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"clusterIP": "10.96.0.5", "clusterIPs": ["10.96.0.5"]}, "may not change once set"),
        ({"clusterIP": "None"}, {"clusterIP": "10.96.0.5", "clusterIPs": ["10.96.0.5"]}, "may not change once set"),
        (
            {"ipFamilyPolicy": "PreferDualStack", "clusterIPs": ["10.96.0.5", "fd00:10:96::5"]},
            {"clusterIPs": ["10.96.0.5"], "ipFamilies": ["IPv4"]},
            "secondary clusterIP can only be unset when the ipFamilyPolicy is 'SingleStack'",
        ),
    ],
)
def test_addresses_stay(before, after, message):
    world = World(nodes=0)
    world.put(service(**before))
    with pytest.raises(StatusError, match=message):
        world.patch("Service", "web", **after)


def test_a_second_family_comes_and_goes():
    world = World(nodes=0)
    first = made(service(), world=world)["clusterIP"]
    both = world.patch("Service", "web", ipFamilyPolicy="PreferDualStack")["spec"]
    assert (both["clusterIPs"][0], families(both), both["ipFamilies"]) == (first, ["IPv4", "IPv6"], ["IPv4", "IPv6"])
    one = world.patch("Service", "web", ipFamilyPolicy="SingleStack")["spec"]
    assert (one["clusterIPs"], one["ipFamilies"]) == ([first], ["IPv4"])


def test_an_update_that_leaves_all_open_keeps_all():
    world = World(nodes=0)
    wanted = service(type="LoadBalancer", externalTrafficPolicy="Local", ipFamilyPolicy="PreferDualStack")
    before = made(wanted, world=world)
    changed = service(
        type="LoadBalancer", externalTrafficPolicy="Local", ipFamilyPolicy="PreferDualStack", selector={"app": "x"}
    )
    assert made(changed, world=world) == {**before, "selector": {"app": "x"}}


def test_through_all_types_and_back():
    world = World(nodes=0)
    cluster_ip = made(service(), world=world)["clusterIP"]
    node_port = world.patch("Service", "web", type="NodePort")["spec"]["ports"][0]["nodePort"]
    balancer = world.patch("Service", "web", type="LoadBalancer", externalTrafficPolicy="Local")["spec"]
    assert (balancer["ports"][0]["nodePort"], balancer["clusterIP"]) == (node_port, cluster_ip)
    assert balancer["healthCheckNodePort"]
    plain = world.patch("Service", "web", type="ClusterIP")["spec"]
    assert "nodePort" not in plain["ports"][0]
    assert not {"healthCheckNodePort", "externalTrafficPolicy"} & plain.keys()
    name = world.patch("Service", "web", type="ExternalName", externalName="example.org")["spec"]
    assert not {"clusterIP", "clusterIPs", "ipFamilies"} & name.keys()
    assert world.patch("Service", "web", type="ClusterIP")["spec"]["clusterIP"] == cluster_ip, "free, and found again"


def test_what_is_let_go_can_be_had_again():
    world = World(nodes=0)
    first = service("first", type="NodePort", clusterIP="10.96.0.9", ports=[port(80, node=30001)])
    second = service("second", type="NodePort", clusterIP="10.96.0.9", ports=[port(80, node=30001)])
    world.put(first)
    refusal(world, second)
    world.delete("Service", "first")
    assert made(second, world=world)["clusterIP"] == "10.96.0.9"


def test_ranges_that_are_added_are_asked_and_drawn_from():
    world = World(nodes=0)
    for name, cidr in (("kubernetes", "10.0.0.0/30"), ("more", "10.7.0.0/24")):
        world.put(
            {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "ServiceCIDR",
                "metadata": {"name": name},
                "spec": {"cidrs": [cidr]},
            }
        )
    found = [made(service(f"s{index}"), world=world)["clusterIP"] for index in range(4)]
    assert sorted(found[:2]) == ["10.0.0.1", "10.0.0.2"]
    assert all(address.startswith("10.7.0.") for address in found[2:])
    assert made(service(clusterIP="10.7.0.7"), world=world)["clusterIP"] == "10.7.0.7"
    world.delete("ServiceCIDR", "more", "")
    assert world.get("ServiceCIDR", "more", "") is not None, "Services have addresses of it"
    fault = refusal(world, service("late"))
    assert (fault.code, fault.message) == (
        500,
        "Internal error occurred: failed to allocate a serviceIP: range is full",
    )
    for name in ("s2", "s3", "web"):
        world.delete("Service", name)
    assert world.get("ServiceCIDR", "more", "") is None


@pytest.mark.parametrize(
    ("cidr", "count", "static"),
    [("10.96.0.0/16", 65534, 256), ("10.0.0.0/24", 254, 16), ("10.0.0.0/29", 6, 0), ("10.0.0.0/20", 4094, 255)],
)
def test_bands_of_addresses(cidr, count, static):
    found = address_range(cidr)
    assert (found.count, found.static) == (count, static)


def test_the_band_of_ports():
    assert port_range().static == 86
    assert {port_range().pick(str(seed), ()) for seed in range(500)}.isdisjoint(range(30000, 30086))


def test_a_full_upper_band_draws_from_the_lower():
    small = address_range("10.0.0.0/27")
    taken = set()
    for number in range(30):
        drawn = small.pick(f"s{number}", taken)
        assert (drawn - small.first >= small.static) is (number < 30 - small.static)
        taken.add(drawn)
    assert small.pick("one more", taken) is None
