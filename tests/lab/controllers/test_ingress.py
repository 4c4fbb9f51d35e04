"""Ingresses: routes, and what the controller says about each."""

import pytest
from tests.lab.controllers.world import START, World, service

from narthex.lab.api.registry import stamp
from narthex.lab.controllers.ingress.routing import (
    CONTROLLER,
    TARGET_TYPE,
    IngressObjects,
    build_table,
    host_matches,
    host_name,
    is_served,
    path_matches,
    slices_by_service,
)
from narthex.lab.controllers.objects import key_of
from narthex.lab.topology import INGRESS_ADDRESSES


def backend(name="web", **port):
    return {"service": {"name": name, "port": port or {"number": 80}}}


def rule(host, *paths):
    return {**({"host": host} if host else {}), "http": {"paths": list(paths)}}


def path(path, name="web", type="Prefix", **port):
    return {"path": path, "pathType": type, "backend": backend(name, **port)}


def ingress(*rules, name="shop", age=0, target="", **spec):
    metadata = {"name": name, "namespace": "shop", "creationTimestamp": f"2026-01-01T00:00:{59 - age:02}Z"}
    metadata["annotations"] = {TARGET_TYPE: target} if target else {}
    made = {"rules": list(rules), **spec}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": metadata, "spec": made}


def endpoint_slice(name="web", ready=(True, False, True), family="IPv4"):
    prefix = "10.244.1." if family == "IPv4" else "fd00::"
    endpoints = [
        {"addresses": [f"{prefix}{index}"], "conditions": {"ready": each}, "nodeName": f"node-{index}"}
        for index, each in enumerate(ready, 1)
    ]
    labels = {"kubernetes.io/service-name": name}
    return {
        "metadata": {"name": f"{name}-{family.lower()}", "namespace": "shop", "labels": labels},
        "addressType": family,
        "ports": [{"name": "http", "port": 8080}],
        "endpoints": endpoints,
    }


def node(number, ready="True"):
    addresses = [{"type": "InternalIP", "address": f"192.168.49.{10 + number}"}]
    status = {"addresses": addresses, "conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": {"name": f"node-{number}"}, "status": status}


def node_port(name="web", number=30080, **spec):
    port = {"name": "http", "port": 80, "nodePort": number}
    return service(name, ports=[port], type="NodePort", **spec)


def table(*ingresses, services=None, slices=None, nodes=(), secrets=()):
    services = services if services is not None else [service(name) for name in ("web", "api", "other")]
    slices = slices if slices is not None else [endpoint_slice(each["metadata"]["name"]) for each in services]
    found = {key_of(each): each for each in ingresses}
    of_services = {key_of(each): each for each in services}
    of_secrets = {key_of(each): each for each in secrets}
    return build_table(IngressObjects(found, {}, of_services, slices_by_service(slices), list(nodes), of_secrets))


@pytest.mark.parametrize(
    ("rule", "host", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "x.a.b", False),
        ("*.a.b", "x.a.b", True),
        ("*.a.b", "a.b", False),
        ("*.a.b", "y.x.a.b", False),
        ("*.a.b", ".a.b", False),
        ("", "anything", True),
    ],
)
def test_hosts(rule, host, expected):
    assert host_matches(rule, host) is expected


@pytest.mark.parametrize(
    ("field", "name"),
    [("Shop.Example.COM:8080", "shop.example.com"), ("a.b.", "a.b"), ("[fd00::1]:80", "fd00::1"), ("", "")],
)
def test_names_in_the_field_host(field, name):
    assert host_name(field) == name


@pytest.mark.parametrize(
    ("rule", "path", "exact", "expected"),
    [
        ("/", "/", False, True),
        ("/", "/any/thing", False, True),
        ("/foo", "/foo", False, True),
        ("/foo", "/foo/", False, True),
        ("/foo/", "/foo", False, True),
        ("/foo/", "/foo/bar", False, True),
        ("/foo", "/foobar", False, False),
        ("/aaa/bb", "/aaa/bbb", False, False),
        ("/aaa/bbb/", "/aaa/bbb/ccc", False, True),
        ("/foo", "/FOO", False, False),
        ("/foo", "/foo", True, True),
        ("/foo", "/foo/", True, False),
        ("/foo/", "/foo", True, False),
        ("/img/*", "/img/a.png", False, True),
        ("/*", "/anything", False, True),
        ("", "/anything", False, True),
    ],
)
def test_paths(rule, path, exact, expected):
    assert path_matches(rule, path, exact=exact) is expected


RULES = ingress(
    rule("shop.example.com", path("/"), path("/api", "api"), path("/api", "other", "Exact")),
    rule("*.example.com", path("/", "other")),
    rule("", path("/health", "api")),
)


@pytest.mark.parametrize(
    ("host", "requested", "expected"),
    [
        ("shop.example.com", "/", "web"),
        ("SHOP.example.com:80", "/x", "web"),
        ("shop.example.com", "/api/1", "api"),
        ("shop.example.com", "/api", "other"),
        ("shop.example.com", "/%61pi/1", "api"),
        ("blog.example.com", "/api/1", "other"),
        ("example.com", "/", None),
        ("example.com", "/health", "api"),
        ("", "/health/x", "api"),
    ],
)
def test_the_closest_rule_answers(host, requested, expected):
    found = table(RULES).find(host, requested)
    assert (found.title if found else None) == (f"Service shop/{expected} port 80" if expected else None)


def test_of_equal_rules_the_oldest_ingress_counts():
    one, two = ingress(rule("a", path("/")), age=1), ingress(rule("a", path("/", "api")), name="second", age=9)
    assert table(one, two).find("a", "/").title == "Service shop/api port 80"


def test_default_backends_come_last():
    with_host = ingress(rule("a", path("/x")), defaultBackend=backend("api"))
    for_all = ingress(name="all", age=5, defaultBackend=backend("other"))
    found = table(with_host, for_all)
    titles = {request: found.find(*request).title for request in (("a", "/x"), ("a", "/y"), ("b", "/y"))}
    assert [title.split()[1] for title in titles.values()] == ["shop/web", "shop/api", "shop/other"]


def targets(sort="", **given):
    (route,) = table(ingress(rule("", path("/")), target=sort), **given).routes
    return [(each.address, each.port, each.node) for each in route.backend.targets], route.backend.fault


NODES = [node(1), node(2), node(3, "False")]
PODS = [("10.244.1.1", 8080, "node-1"), ("10.244.1.3", 8080, "node-3")]


@pytest.mark.parametrize(
    ("sort", "of", "expected"),
    [
        ("ip", service(), PODS),
        ("", service(), PODS),
        ("ip", node_port(), PODS),
        ("", node_port(), [("192.168.49.11", 30080, ""), ("192.168.49.12", 30080, "")]),
        ("instance", node_port(), [("192.168.49.11", 30080, ""), ("192.168.49.12", 30080, "")]),
        ("instance", node_port(externalTrafficPolicy="Local"), [("192.168.49.11", 30080, "")]),
        ("ip", service(ipFamilies=["IPv6", "IPv4"]), [("fd00::1", 8080, "node-1")]),
    ],
)
def test_which_servers_are_behind_a_service(sort, of, expected):
    slices = [endpoint_slice(), endpoint_slice(ready=(True,), family="IPv6")]
    assert targets(sort, services=[of], slices=slices, nodes=NODES) == (expected, "")


@pytest.mark.parametrize(
    ("sort", "services", "expected"),
    [
        ("", [], "there is no such Service"),
        ("", [service(ports=[{"name": "http", "port": 81}])], "the Service has no such port"),
        ("instance", [service()], f"{TARGET_TYPE} is instance, which needs a Service of type NodePort or LoadBalancer"),
        ("pod", [service()], f"{TARGET_TYPE} is pod, but ip and instance are known"),
    ],
)
def test_faults_of_backends(sort, services, expected):
    assert targets(sort, services=services, nodes=NODES) == ([], expected)


def test_a_service_without_ready_pods_has_no_node_ports():
    slices = [endpoint_slice(ready=(False,))]
    assert targets(services=[node_port()], slices=slices, nodes=NODES) == ([], "")


def secret(name, **data):
    return {"metadata": {"name": name, "namespace": "shop"}, "data": data}


def test_certificates_by_server_name():
    tls = [
        {"hosts": ["*.example.com"], "secretName": "wild"},
        {"hosts": ["shop.example.com"], "secretName": "shop"},
        {"secretName": "any"},
        {"hosts": ["lost.org"], "secretName": "lost"},
        {"hosts": ["half.org"], "secretName": "half"},
    ]
    secrets = [secret(name, **{"tls.crt": name, "tls.key": "k"}) for name in ("wild", "shop", "any")]
    found = table(ingress(rule("", path("/")), tls=tls), secrets=[*secrets, secret("half", **{"tls.crt": "x"})])
    names = ("shop.example.com", "Blog.example.com", "example.com", "lost.org", "half.org", "")
    assert [found.certificate(name).certificate for name in names] == ["shop", "wild", "any", "any", "any", "any"]
    assert table(RULES).certificate("shop.example.com") is None


@pytest.mark.parametrize(
    ("chosen", "annotation", "controller", "expected"),
    [
        (None, None, CONTROLLER, True),
        ("lab", None, CONTROLLER, True),
        ("lab", None, "example.com/other", False),
        (None, "lab", "example.com/other", False),
        ("unknown", None, "example.com/other", True),
    ],
)
def test_which_ingresses_are_served(chosen, annotation, controller, expected):
    made = ingress(rule("", path("/")), ingressClassName=chosen)
    if annotation:
        made["metadata"]["annotations"] = {"kubernetes.io/ingress.class": annotation}
    known = {"metadata": {"name": "lab"}, "spec": {"controller": controller}}
    assert is_served(made, {key_of(known): known}) is expected


def address(world, name="shop"):
    return world.get("Ingress", name)["status"]["loadBalancer"].get("ingress")


ADDRESS = [{"ip": each} for each in INGRESS_ADDRESSES]


def test_an_ingress_gets_the_address_and_events_about_what_is_missing():
    world = World()
    world.put(ingress(rule("a", path("/")), tls=[{"hosts": ["a"], "secretName": "cert"}]))
    assert address(world) == ADDRESS
    faults = [
        (
            "BackendNotFound",
            "Service shop/web port 80: there is no such Service; requests for it are answered with 503",
        ),
        ("CertificateNotFound", "there is no Secret shop/cert; clients get a certificate that the lab has made itself"),
    ]
    assert sorted(world.events()) == faults
    world.put(service())
    world.put({"apiVersion": "v1", "kind": "Secret", **secret("cert", **{"tls.crt": "eA==", "tls.key": "eA=="})})
    world.wait(10)
    assert sorted(world.events()) == faults
    world.delete("Service", "web")
    assert len(world.events("BackendNotFound")) == 2


def ingress_class(name, controller, *, default=False):
    notes = {"ingressclass.kubernetes.io/is-default-class": "true"} if default else {}
    metadata = {"name": name, "annotations": notes, "creationTimestamp": stamp(START)}
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "IngressClass"}
    return {**kind, "metadata": metadata, "spec": {"controller": controller}}


def test_another_controller_s_class_is_left_to_it():
    world = World()
    world.put(ingress_class("other", "example.com/other", default=True))
    world.put(service())
    world.put(ingress(rule("a", path("/"))))
    assert world.get("Ingress", "shop")["spec"]["ingressClassName"] == "other"
    assert address(world) is None
    world.put(ingress_class("lab", CONTROLLER))
    world.patch("Ingress", "shop", ingressClassName="lab")
    assert address(world) == ADDRESS
    world.patch("Ingress", "shop", ingressClassName="other")
    assert address(world) is None


def test_of_several_default_classes_the_newest_counts_then_the_first_name():
    world = World()
    for name, seconds in (("old", 0), ("b", 5), ("a", 0)):
        world.wait(seconds)
        world.put(ingress_class(name, "example.com/other", default=True))
    world.put(ingress(rule("a", path("/"))))
    world.put(ingress(rule("a", path("/")), name="own", ingressClassName="mine"))
    chosen = [world.get("Ingress", name)["spec"]["ingressClassName"] for name in ("shop", "own")]
    assert chosen == ["a", "mine"]
