"""A container's environment and command line, as a kubelet makes them."""

import base64
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.lab.kubelet.environment import ContainerConfigError, command_line, environment, expand, field_value

POD = {
    "metadata": {
        "name": "web-1",
        "namespace": "shop",
        "uid": "u-1",
        "labels": {"app": "web", "tier": "front"},
        "annotations": {"a.b/c": "d"},
    },
    "spec": {"nodeName": "node-1"},
    "status": {
        "podIP": "10.244.1.2",
        "podIPs": [{"ip": "10.244.1.2"}, {"ip": "fd00::2"}],
        "hostIP": "192.168.49.11",
        "hostIPs": [{"ip": "192.168.49.11"}, {"ip": "fd00::b"}],
    },
}
HELD = {
    ("ConfigMap", "words"): {"data": {"hello": "there", "other": "x"}},
    ("Secret", "keys"): {"data": {"door": base64.b64encode(b"open").decode()}},
}


def service(name, address, *ports, namespace="shop"):
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"clusterIP": address, "ports": list(ports)}}


def made(container=None, services=(), pod=POD):
    return environment(pod, container or {}, services, lambda kind, name: HELD.get((kind, name)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "one"),
        ("x$(A)y$(B)", "xoney$(B)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$one"),
        ("$A ${A}", "$A ${A}"),
        ("$(A", "$(A"),
        ("$()", "$()"),
        ("100$", "100$"),
        ("$$", "$"),
    ],
)
def test_references_are_expanded(text, expected):
    assert expand(text, {"A": "one"}) == expected


@given(st.text(alphabet="$()AB x"))
def test_what_names_nothing_known_only_loses_escapes(text):
    """A reference to an unknown variable stays as it is, escapes inside its parentheses included."""
    expected = re.sub(r"\$\$|\$\([^)]*\)", lambda found: "$" if found[0] == "$$" else found[0], text)
    assert expand(text, {}) == expected


def test_variables_see_those_before_them_and_services():
    container = {
        "env": [
            {"name": "A", "value": "one"},
            {"name": "B", "value": "$(A) $(C) $(REDIS_SERVICE_HOST)"},
            {"name": "C", "value": "late"},
            {"name": "PATH", "value": "/mine"},
            {"name": "EMPTY"},
        ]
    }
    known = made(container, [service("redis", "10.96.0.5", {"port": 6379})])
    assert (known["B"], known["PATH"], known["EMPTY"], known["HOSTNAME"]) == (
        "one $(C) 10.96.0.5",
        "/mine",
        "",
        "web-1",
    )


def test_services_as_docker_links_had_them():
    ports = ({"name": "http", "port": 80, "protocol": "TCP"}, {"name": "dns-udp", "port": 53, "protocol": "UDP"})
    known = made(None, [service("my-web", "10.96.0.5", *ports)])
    expected = {
        "MY_WEB_SERVICE_HOST": "10.96.0.5",
        "MY_WEB_SERVICE_PORT": "80",
        "MY_WEB_SERVICE_PORT_HTTP": "80",
        "MY_WEB_SERVICE_PORT_DNS_UDP": "53",
        "MY_WEB_PORT": "tcp://10.96.0.5:80",
        "MY_WEB_PORT_80_TCP": "tcp://10.96.0.5:80",
        "MY_WEB_PORT_80_TCP_PROTO": "tcp",
        "MY_WEB_PORT_80_TCP_PORT": "80",
        "MY_WEB_PORT_80_TCP_ADDR": "10.96.0.5",
        "MY_WEB_PORT_53_UDP": "udp://10.96.0.5:53",
        "MY_WEB_PORT_53_UDP_PROTO": "udp",
        "MY_WEB_PORT_53_UDP_PORT": "53",
        "MY_WEB_PORT_53_UDP_ADDR": "10.96.0.5",
    }
    assert {name: value for name, value in known.items() if name.startswith("MY_")} == expected


def test_which_services_count():
    services = [
        service("headless", "None", {"port": 1}),
        service("far", "10.96.0.6", {"port": 1}, namespace="other"),
        service("near", "fd00::6", {"port": 1}),
        service("kubernetes", "10.96.0.1", {"name": "https", "port": 443}, namespace="default"),
    ]
    known = made(None, services)
    assert {name.partition("_SERVICE_HOST")[0] for name in known if name.endswith("_SERVICE_HOST")} == {
        "NEAR",
        "KUBERNETES",
    }
    assert known["NEAR_PORT"] == "tcp://[fd00::6]:1"
    without = {**POD, "spec": {"enableServiceLinks": False}}
    assert "NEAR_SERVICE_HOST" not in made(None, services, without)
    assert made(None, services, without)["KUBERNETES_SERVICE_PORT_HTTPS"] == "443"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("metadata.name", "web-1"),
        ("metadata.namespace", "shop"),
        ("metadata.uid", "u-1"),
        ("metadata.labels['tier']", "front"),
        ("metadata.labels['none']", ""),
        ("metadata.annotations['a.b/c']", "d"),
        ("metadata.labels", 'app="web"\ntier="front"'),
        ("spec.nodeName", "node-1"),
        ("spec.serviceAccountName", "default"),
        ("status.podIP", "10.244.1.2"),
        ("status.podIPs", "10.244.1.2,fd00::2"),
        ("status.hostIP", "192.168.49.11"),
        ("status.hostIPs", "192.168.49.11,fd00::b"),
    ],
)
def test_the_downward_api(path, expected):
    assert field_value(POD, path) == expected
    assert made({"env": [{"name": "V", "valueFrom": {"fieldRef": {"fieldPath": path}}}]})["V"] == expected


def test_a_field_that_is_none_is_a_fault():
    with pytest.raises(ContainerConfigError, match="unsupported fieldPath"):
        field_value(POD, "spec.containers")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"configMapKeyRef": {"name": "words", "key": "hello"}}, "there"),
        ({"secretKeyRef": {"name": "keys", "key": "door"}}, "open"),
        ({"configMapKeyRef": {"name": "words", "key": "none", "optional": True}}, None),
        ({"configMapKeyRef": {"name": "none", "key": "none", "optional": True}}, None),
        ({"resourceFieldRef": {"resource": "limits.cpu"}}, "500m"),
    ],
)
def test_values_from_elsewhere(source, expected):
    container = {"env": [{"name": "V", "valueFrom": source}], "resources": {"limits": {"cpu": "500m"}}}
    assert made(container).get("V") == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"configMapKeyRef": {"name": "none", "key": "k"}}, 'configmap "none" not found'),
        ({"secretKeyRef": {"name": "none", "key": "k"}}, 'secret "none" not found'),
        ({"configMapKeyRef": {"name": "words", "key": "k"}}, "couldn't find key k in ConfigMap shop/words"),
    ],
)
def test_what_is_missing_is_said_as_a_kubelet_says_it(source, message):
    with pytest.raises(ContainerConfigError) as raised:
        made({"env": [{"name": "V", "valueFrom": source}]})
    assert str(raised.value) == message


def test_all_of_an_object_with_a_prefix():
    sources = [{"prefix": "W_", "configMapRef": {"name": "words"}}, {"secretRef": {"name": "keys"}}]
    known = made({"envFrom": sources})
    assert (known["W_hello"], known["W_other"], known["door"]) == ("there", "x", "open")
    assert made({"envFrom": [{"configMapRef": {"name": "none", "optional": True}}]})
    with pytest.raises(ContainerConfigError, match='configmap "none" not found'):
        made({"envFrom": [{"configMapRef": {"name": "none"}}]})


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({}, ("/bin/serve", "--default")),
        ({"args": ["--x", "$(A)"]}, ("/bin/serve", "--x", "one")),
        ({"command": ["sh", "-c"], "args": ["echo $(A) $$(A)"]}, ("sh", "-c", "echo one $(A)")),
        ({"command": ["$(A)"]}, ("one",)),
    ],
)
def test_command_lines(container, expected):
    assert command_line(container, ("/bin/serve",), ("--default",), {"A": "one"}) == expected
