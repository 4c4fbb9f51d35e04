"""Selectors become EndpointSlices and Endpoints."""

from collections import Counter

import pytest

from narthex.lab.controllers.endpointslice.reconciler import MAX_ENDPOINTS

from .world import World, node, pod, service

ZONE = "topology.kubernetes.io/zone"


def with_pods(count=2, *, nodes=2, ready=True, service_=None, **spec):
    world = World(nodes=nodes)
    world.put(service_ or service())
    for index in range(count):
        world.put(pod(f"web-{index}", {"app": "web"}, **spec))
    world.run_pods(ready=ready)
    return world


def only(world, family="IPv4", name="web"):
    (found,) = [
        each
        for each in world.list("EndpointSlice")
        if each["addressType"] == family and each["metadata"]["labels"]["kubernetes.io/service-name"] == name
    ]
    return found


def conditions(world):
    return [tuple(each["conditions"].values()) for each in only(world)["endpoints"]]


def test_the_slice_of_a_service():
    world = with_pods(2)
    found = only(world)
    web = world.get("Service", "web")
    assert found["metadata"]["name"].startswith("web-")
    assert found["metadata"]["labels"] == {
        "kubernetes.io/service-name": "web",
        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
    }
    assert found["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "name": "web",
            "uid": web["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
    assert found["ports"] == [{"name": "http", "protocol": "TCP", "port": 8080}]
    first, second = found["endpoints"]
    held = world.get("Pod", "web-0")
    assert first == {
        "addresses": [held["status"]["podIP"]],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        "targetRef": {"kind": "Pod", "namespace": "shop", "name": "web-0", "uid": held["metadata"]["uid"]},
        "nodeName": "node-1",
    }
    assert second["nodeName"] == "node-2"


def test_before_there_is_any_pod_an_empty_slice_says_so():
    world = with_pods(0)
    assert (only(world)["endpoints"], only(world)["ports"]) == ([], [])
    name = only(world)["metadata"]["name"]
    world.put(pod("web-0", {"app": "web"}))
    world.run_pods()
    assert only(world)["metadata"]["name"] == name
    world.delete("Pod", "web-0", grace=0)
    assert (only(world)["endpoints"], only(world)["metadata"]["name"]) == ([], name)


@pytest.mark.parametrize(
    ("publish", "ready", "leaving", "expected"),
    [
        (False, True, False, (True, True, False)),
        (False, False, False, (False, False, False)),
        (False, True, True, (False, True, True)),
        (False, False, True, (False, False, True)),
        (True, False, False, (True, False, False)),
        (True, True, True, (True, True, True)),
    ],
)
def test_conditions(publish, ready, leaving, expected):
    world = with_pods(1, ready=ready, service_=service(publishNotReadyAddresses=publish))
    if leaving:
        world.delete("Pod", "web-0")
    assert conditions(world) == [expected]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_is_over_is_no_endpoint(phase):
    world = with_pods(1)
    world.set_ready(world.get("Pod", "web-0"), False, phase=phase)
    assert conditions(world) == []


def test_a_pod_without_an_address_is_no_endpoint():
    world = World()
    world.put(service())
    world.put(pod("web-0", {"app": "web"}))
    assert conditions(world) == []


def test_both_families_have_slices_of_their_own():
    world = with_pods(2, service_=service(ipFamilyPolicy="PreferDualStack"))
    assert ":" in only(world, "IPv6")["endpoints"][0]["addresses"][0]
    assert ":" not in only(world, "IPv4")["endpoints"][0]["addresses"][0]
    world.patch("Service", "web", ipFamilyPolicy="SingleStack")
    assert [each["addressType"] for each in world.list("EndpointSlice")] == ["IPv4"]


def test_a_named_port_that_differs_between_pods_makes_two_slices():
    world = with_pods(1)
    other = pod("web-9", {"app": "web"})
    other["spec"]["containers"][0]["ports"] = [{"name": "http", "containerPort": 9090}]
    world.put(other)
    third = pod("web-none", {"app": "web"})
    third["spec"]["containers"][0]["ports"] = []
    world.put(third)
    world.run_pods()
    slices = world.list("EndpointSlice")
    assert sorted([port["port"] for port in each["ports"]] for each in slices) == [[], [8080], [9090]]


@pytest.mark.parametrize(
    ("port", "number"),
    [
        ({"port": 80}, 80),
        ({"port": 80, "targetPort": 8080}, 8080),
        ({"port": 80, "targetPort": "http"}, 8080),
        ({"port": 80, "targetPort": "http", "protocol": "UDP"}, None),
        ({"port": 80, "targetPort": "nothing"}, None),
    ],
)
def test_target_ports(port, number):
    world = with_pods(1, service_=service(ports=[{"name": "http", "protocol": "TCP", **port}]))
    assert [each["port"] for each in only(world)["ports"]] == ([number] if number else [])


def test_an_application_protocol_is_told():
    port = {"name": "h2", "port": 80, "targetPort": 8080, "appProtocol": "kubernetes.io/h2c"}
    (got,) = only(with_pods(1, service_=service(ports=[port])))["ports"]
    assert got == {"name": "h2", "protocol": "TCP", "port": 8080, "appProtocol": "kubernetes.io/h2c"}


def test_headless():
    world = with_pods(1, service_=service(clusterIP="None"), hostname="db-0", subdomain="web")
    found = only(world)
    assert found["metadata"]["labels"]["service.kubernetes.io/headless"] == ""
    assert found["endpoints"][0]["hostname"] == "db-0"


def test_labels_of_the_service_are_those_of_its_slices():
    world = with_pods(1)
    held = world.get("Service", "web")
    world.put({**held, "metadata": {**held["metadata"], "labels": {"team": "a", "kubernetes.io/service-name": "x"}}})
    assert only(world)["metadata"]["labels"]["team"] == "a"


@pytest.mark.parametrize(
    ("wish", "zones", "nodes"),
    [
        (None, None, None),
        ("PreferClose", [{"name": "a"}], None),
        ("PreferSameZone", [{"name": "a"}], None),
        ("PreferSameNode", [{"name": "a"}], [{"name": "node-1"}]),
    ],
)
def test_hints(wish, zones, nodes):
    world = with_pods(1, nodes=1, service_=service(trafficDistribution=wish))
    held = world.get("Node", "node-1", "")
    world.put({**held, "metadata": {**held["metadata"], "labels": {ZONE: "a"}}})
    (endpoint,) = only(world)["endpoints"]
    assert endpoint["zone"] == "a"
    hints = endpoint.get("hints", {})
    assert (hints.get("forZones"), hints.get("forNodes")) == (zones, nodes)
    world.set_ready(world.get("Pod", "web-0"), False)
    assert "hints" not in only(world)["endpoints"][0], "an endpoint that is not ready is for nobody"


@pytest.mark.parametrize(
    ("cpus", "pods", "expected"),
    [
        ({"a": "4", "b": "4"}, {"a": 4, "b": 4}, {("a", "a"): 4, ("b", "b"): 4}),
        ({"a": "4", "b": "4"}, {"a": 6, "b": 2}, {("a", "a"): 4, ("a", "b"): 2, ("b", "b"): 2}),
        ({"a": "4", "b": "4"}, {"a": 4, "b": 0}, {("a", "a"): 2, ("a", "b"): 2}),
        ({"a": "9000m", "b": "1"}, {"a": 5, "b": 5}, {("a", "a"): 5, ("b", "a"): 3, ("b", "b"): 2}),
        # No hints: fewer endpoints than zones, one zone only, a node without CPUs.
        ({"a": "4", "b": "4"}, {"a": 1, "b": 0}, {("a", None): 1}),
        ({"a": "4"}, {"a": 3}, {("a", None): 3}),
        ({"a": "4", "b": "many"}, {"a": 2, "b": 2}, {("a", None): 2, ("b", None): 2}),
    ],
)
def test_automatic_hints_go_by_the_zones_cpus(cpus, pods, expected):
    world = World(nodes=0)
    for zone, count in cpus.items():
        made = node(f"node-{zone}")
        made["metadata"]["labels"][ZONE] = zone
        made["status"]["allocatable"] = {"cpu": count, "pods": "110"}
        world.put(made)
    made = service()
    made["metadata"]["annotations"] = {"service.kubernetes.io/topology-mode": "Auto"}
    world.put(made)
    for zone, count in pods.items():
        for index in range(count):
            world.put(pod(f"web-{zone}-{index}", {"app": "web"}, nodeName=f"node-{zone}"))
    world.run_pods()
    got = Counter(
        (each["zone"], each["hints"]["forZones"][0]["name"] if "hints" in each else None)
        for each in only(world)["endpoints"]
    )
    assert got == expected


def test_without_a_selector_slices_are_the_user_s():
    world = World(nodes=0)
    world.put(service(selector=None))
    by_hand = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [],
        "endpoints": [{"addresses": ["192.0.2.7"]}],
    }
    held = world.put(by_hand)
    assert world.list("EndpointSlice") == [held]


def test_a_slice_that_somebody_changed_or_deleted_is_put_right():
    world = with_pods(2)
    before = only(world)
    world.put({**before, "endpoints": []})
    assert only(world)["endpoints"] == before["endpoints"]
    world.delete("EndpointSlice", before["metadata"]["name"])
    assert only(world)["endpoints"] == before["endpoints"]


def test_a_hundred_and_the_rest():
    world = with_pods(250, nodes=3)
    sizes = sorted(len(each["endpoints"]) for each in world.list("EndpointSlice"))
    assert sizes == [50, MAX_ENDPOINTS, MAX_ENDPOINTS]
    before = world.registry.version
    world.set_ready(world.get("Pod", "web-7"), False)
    # The pod's status, one slice, and the Endpoints.
    assert world.registry.version - before == 3


def test_endpoints_say_the_same_for_older_programs():
    world = with_pods(2)
    world.set_ready(world.get("Pod", "web-1"), False)
    found = world.get("Endpoints", "web")
    assert found["metadata"]["labels"] == {"endpoints.kubernetes.io/managed-by": "endpoint-controller"}
    (subset,) = found["subsets"]
    assert subset["ports"] == [{"name": "http", "protocol": "TCP", "port": 8080}]
    assert [each["targetRef"]["name"] for each in subset["addresses"]] == ["web-0"]
    assert [each["targetRef"]["name"] for each in subset["notReadyAddresses"]] == ["web-1"]
    world.delete("Pod", "web-1")
    assert "notReadyAddresses" not in world.get("Endpoints", "web")["subsets"][0]


def test_endpoints_by_hand_are_mirrored():
    world = World(nodes=0)
    world.put(service(selector=None))
    by_hand = {
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": {"name": "web", "namespace": "shop"},
        "subsets": [
            {
                "addresses": [{"ip": "192.0.2.7"}, {"ip": "2001:db8::7"}],
                "notReadyAddresses": [{"ip": "192.0.2.8", "nodeName": "node-1"}],
                "ports": [{"name": "http", "port": 8080}],
            }
        ],
    }
    world.put(by_hand)
    four = only(world)
    assert four["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] == (
        "endpointslicemirroring-controller.k8s.io"
    )
    assert four["endpoints"] == [
        {"addresses": ["192.0.2.7"], "conditions": {"ready": True}},
        {"addresses": ["192.0.2.8"], "conditions": {"ready": False}, "nodeName": "node-1"},
    ]
    assert [each["addresses"] for each in only(world, "IPv6")["endpoints"]] == [["2001:db8::7"]]
    world.put({**by_hand, "subsets": []})
    assert world.list("EndpointSlice") == []
    world.put(by_hand)
    world.delete("Endpoints", "web")
    assert world.list("EndpointSlice") == []


def test_one_pod_of_a_large_cluster_costs_what_it_concerns():
    """A thousand Services: what is asked of the objects when a pod changes does not grow with them."""

    def asked(services):
        world = with_pods(1)
        for index in range(services):
            world.registry.create("Service", service(f"other-{index}", selector={"app": f"other-{index}", "tier": "x"}))
        world.settle()
        present, asked_for = world.control._state, []
        get = present.get
        present.get = lambda kind, key: asked_for.append(key) or get(kind, key)
        world.set_ready(world.get("Pod", "web-0"), False)
        return len(asked_for)

    assert asked(1000) == asked(2)
