"""Objects as protobuf, which Go's typed clients send."""

from importlib import resources

import pytest

from narthex.lab.api import protobuf
from narthex.lab.api.errors import StatusError
from narthex.lab.api.kinds import KINDS
from narthex.lab.api.protobuf_wire import part, text, whole
from narthex.lab.api.types import named, object_type

META = {
    "name": "web",
    "namespace": "shop",
    "uid": "u",
    "resourceVersion": "7",
    "generation": 3,
    "creationTimestamp": "2026-01-02T03:04:05Z",
    "labels": {"a": "b", "c": ""},
    "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "x", "controller": False}],
    "managedFields": [{"manager": "m", "fieldsV1": {"f:spec": {"f:type": {}}}, "time": "2026-01-02T03:04:05Z"}],
}
OBJECTS = [
    {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": META,
        "spec": {
            "containers": [
                {
                    "name": "c",
                    "command": ["a", ""],
                    "ports": [{"containerPort": 80, "protocol": "TCP"}],
                    "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                    "resources": {"limits": {"cpu": "100m"}},
                    "readinessProbe": {"httpGet": {"port": "http", "path": "/"}, "initialDelaySeconds": 5},
                    "livenessProbe": {"tcpSocket": {"port": 0}},
                    "securityContext": {"runAsUser": 0, "privileged": False, "capabilities": {"add": ["NET_ADMIN"]}},
                }
            ],
            "ephemeralContainers": [{"name": "debug", "tty": True, "targetContainerName": "c"}],
            "volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "c", "configMap": {"name": "x"}}],
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists", "tolerationSeconds": -1}],
            "securityContext": {"supplementalGroups": [1, 70000]},
        },
        "status": {"containerStatuses": [{"name": "c", "ready": False, "restartCount": 0, "image": "", "imageID": ""}]},
    },
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": META,
        "spec": {
            "ports": [{"port": 80, "targetPort": 8080}, {"port": 81, "targetPort": "http"}],
            "ipFamilies": ["IPv6"],
        },
        "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1", "ipMode": "VIP"}]}},
    },
    {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "l"},
        "spec": {"renewTime": "2026-01-02T03:04:05.000006Z", "leaseDurationSeconds": 40},
    },
    {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"k": "AAH/"}, "type": "Opaque"},
    {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "e"},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["192.0.2.1"], "conditions": {"ready": False}}],
        "ports": [{"name": "", "port": 0}],
    },
    {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "p"},
        "deleteOptions": {"gracePeriodSeconds": 0},
    },
]


@pytest.mark.parametrize("raw", OBJECTS, ids=lambda raw: raw["kind"])
def test_what_is_written_is_read_again(raw):
    assert protobuf.decode(protobuf.encode(raw)) == raw


def test_go_writes_fields_without_a_value():
    """Zeros mean that fields are unset, except for pointers, and for fields that JSON always has."""
    port = text(1, "") + part(2, b"") + whole(3, 0) + part(4, whole(1, 0) + whole(2, 0)) + whole(5, 0)
    spec = part(1, port) + part(4, b"") + whole(12, 0) + whole(13, 0) + whole(20, 0)
    envelope = part(1, text(1, "v1") + text(2, "Service"))
    meta = text(1, "web") + part(2, b"") + whole(7, 0) + part(8, b"")
    body = protobuf.MAGIC + envelope + part(2, part(1, meta) + part(2, spec) + part(3, part(1, b"")))
    assert protobuf.decode(body) == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"ports": [{"port": 0, "targetPort": 0}], "allocateLoadBalancerNodePorts": False},
        "status": {"loadBalancer": {}},
    }


def test_lists_have_the_kind_of_a_list():
    items = [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]
    encoded = protobuf.encode(
        {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}, "items": items}
    )
    names = [part(2, part(1, text(1, name))) for name in ("a", "b")]
    listed = part(1, text(2, "9")) + b"".join(names)
    assert encoded == protobuf.MAGIC + part(1, text(1, "v1") + text(2, "PodList")) + part(2, listed)


def test_kinds_without_a_message():
    with pytest.raises(StatusError, match=r"Shop \(example\.com/v1\) has no form"):
        protobuf.encode({"kind": "Shop", "apiVersion": "example.com/v1"})
    body = protobuf.MAGIC + part(1, text(1, "example.com/v1") + text(2, "Shop"))
    with pytest.raises(StatusError, match=r"Shop \(example\.com/v1\) is not read"):
        protobuf.decode(body)


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if not kind.group.startswith("metallb")])
def test_every_built_in_kind_has_a_message(kind):
    assert protobuf.message_of(kind.api_version, kind.kind) == object_type(kind).name


def test_numbers_are_unique_and_their_fields_have_types():
    lines = resources.files("narthex.lab.api").joinpath("protobuf_fields.txt").read_text().splitlines()
    for line in lines:
        name, *words = line.split(" ")
        numbers = [word.partition("=")[0].rstrip("*") for word in words]
        assert len(set(numbers)) == len(numbers), name
        of = named(name)
        if of.sort == "struct":
            # Numbers of fields that were removed may be left; no other type may have lost its name.
            assert {word.partition("=")[2] for word in words if "(" not in word} & of.fields.keys() or not of.fields
