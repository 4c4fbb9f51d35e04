"""Objects as protobuf, which newer kubectl and Go's typed clients send: for `kubectl create`, deletions, and evictions.

Responses are JSON, which all of these clients accept, except for OpenAPI version 2. Numbers are those of k8s.io/api's
generated.proto files. An unknown field is an error, so that nothing is lost (ADR 0012).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from narthex.lab.api.errors import StatusError, bad_request

MAGIC = b"k8s\0"

_TYPES: Mapping[str, str] = {
    "ObjectMeta": "1 name str;2 generateName str;3 namespace str;4 selfLink str;5 uid str;6 resourceVersion str;"
    "7 generation int;8 creationTimestamp time;9 deletionTimestamp time;10 deletionGracePeriodSeconds int*;"
    "11 labels {str};12 annotations {str};13 ownerReferences [OwnerReference];14 finalizers [str]",
    "OwnerReference": "1 kind str;3 name str;4 uid str;5 apiVersion str;6 controller bool*;7 blockOwnerDeletion bool*",
    "Namespace": "1 metadata ObjectMeta;2 spec NamespaceSpec;3 status NamespaceStatus",
    "NamespaceSpec": "1 finalizers [str]",
    "NamespaceStatus": "1 phase str",
    "ConfigMap": "1 metadata ObjectMeta;2 data {str};3 binaryData {bytes};4 immutable bool*",
    "Secret": "1 metadata ObjectMeta;2 data {bytes};3 type str;4 stringData {str};5 immutable bool*",
    "ServiceAccount": "1 metadata ObjectMeta;4 automountServiceAccountToken bool*",
    "Service": "1 metadata ObjectMeta;2 spec ServiceSpec;3 status ServiceStatus",
    "ServiceStatus": "1 loadBalancer LoadBalancerStatus",
    "LoadBalancerStatus": "1 ingress [LoadBalancerIngress]",
    "LoadBalancerIngress": "1 ip str;2 hostname str;3 ipMode str",
    "ServiceSpec": "1 ports [ServicePort];2 selector {str};3 clusterIP str;4 type str;5 externalIPs [str];"
    "7 sessionAffinity str;8 loadBalancerIP str;9 loadBalancerSourceRanges [str];10 externalName str;"
    "11 externalTrafficPolicy str;12 healthCheckNodePort int;13 publishNotReadyAddresses bool;17 ipFamilyPolicy str;"
    "18 clusterIPs [str];19 ipFamilies [str];20 allocateLoadBalancerNodePorts bool*;21 loadBalancerClass str;"
    "22 internalTrafficPolicy str;23 trafficDistribution str",
    "ServicePort": "1 name str;2 protocol str;3 port int;4 targetPort intstr;5 nodePort int;6 appProtocol str",
    "Deployment": "1 metadata ObjectMeta;2 spec DeploymentSpec;3 status DeploymentStatus",
    "DeploymentStatus": "1 observedGeneration int;2 replicas int;3 updatedReplicas int;4 availableReplicas int;"
    "5 unavailableReplicas int;7 readyReplicas int",
    "DeploymentSpec": "1 replicas int*;2 selector LabelSelector;3 template PodTemplateSpec;4 strategy DeploymentStrategy;"
    "5 minReadySeconds int;6 revisionHistoryLimit int*;7 paused bool;9 progressDeadlineSeconds int*",
    "DeploymentStrategy": "1 type str;2 rollingUpdate RollingUpdateDeployment",
    "RollingUpdateDeployment": "1 maxUnavailable intstr;2 maxSurge intstr",
    "LabelSelector": "1 matchLabels {str};2 matchExpressions [LabelSelectorRequirement]",
    "LabelSelectorRequirement": "1 key str;2 operator str;3 values [str]",
    "PodTemplateSpec": "1 metadata ObjectMeta;2 spec PodSpec",
    "PodSpec": "2 containers [Container];3 restartPolicy str;4 terminationGracePeriodSeconds int*;5 activeDeadlineSeconds int*;"
    "6 dnsPolicy str;7 nodeSelector {str};8 serviceAccountName str;9 serviceAccount str;10 nodeName str;"
    "11 hostNetwork bool;12 hostPID bool;13 hostIPC bool;14 securityContext Empty;16 hostname str;17 subdomain str;"
    "19 schedulerName str;20 initContainers [Container];24 priorityClassName str;25 priority int*;"
    "27 shareProcessNamespace bool*;30 enableServiceLinks bool*;31 preemptionPolicy str",
    "Container": "1 name str;2 image str;3 command [str];4 args [str];5 workingDir str;6 ports [ContainerPort];"
    "7 env [EnvVar];8 resources ResourceRequirements;13 terminationMessagePath str;14 imagePullPolicy str;16 stdin bool;"
    "17 stdinOnce bool;18 tty bool;20 terminationMessagePolicy str",
    "ContainerPort": "1 name str;2 hostPort int;3 containerPort int;4 protocol str;5 hostIP str",
    "EnvVar": "1 name str;2 value str",
    "ResourceRequirements": "1 limits {quantity};2 requests {quantity}",
    "Empty": "",
    "Lease": "1 metadata ObjectMeta;2 spec LeaseSpec",
    "LeaseSpec": "1 holderIdentity str;2 leaseDurationSeconds int*;3 acquireTime microtime;4 renewTime microtime;"
    "5 leaseTransitions int*;6 strategy str;7 preferredHolder str",
    "DeleteOptions": "1 gracePeriodSeconds int*;2 preconditions Preconditions;3 orphanDependents bool*;"
    "4 propagationPolicy str;5 dryRun [str]",
    "Preconditions": "1 uid str;2 resourceVersion str",
    "Eviction": "1 metadata ObjectMeta;2 deleteOptions DeleteOptions",
    "Binding": "1 metadata ObjectMeta;2 target ObjectReference",
    "ObjectReference": "1 kind str;2 namespace str;3 name str;4 uid str;5 apiVersion str;6 resourceVersion str;7 fieldPath str",
}
"""Fields as number, name, and type: a scalar, a type of this table, `[item]`, or `{value}` for maps with string keys.

`*` marks a pointer in Go, of which zero is a value. Go writes all other fields, so their zero means that they are unset.
"""


def decode(body: bytes) -> dict[str, Any]:
    """Decode a body that begins with MAGIC. Raises StatusError."""
    try:
        parts = dict(_fields(body[len(MAGIC) :]))
        named = dict(_fields(_data(parts.get(1, b""))))
        version, kind = _data(named.get(1, b"")).decode(), _data(named.get(2, b"")).decode()
        if kind not in _TYPES:
            raise _unreadable(f"{kind} ({version})")
        return {"apiVersion": version, "kind": kind, **_struct(_data(parts.get(2, b"")), kind)}
    except (IndexError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise bad_request(f"error decoding the body: {error}") from None


def _unreadable(what: str) -> StatusError:
    message = f"{what} is not read as application/vnd.kubernetes.protobuf here: send application/json"
    return StatusError(415, "UnsupportedMediaType", message)


def _struct(data: bytes, name: str) -> dict[str, Any]:
    known = {
        int(number): (field, of) for number, field, of in (each.split(" ") for each in _TYPES[name].split(";") if each)
    }
    found: dict[str, Any] = {}
    for number, value in _fields(data):
        if number not in known:
            raise _unreadable(f"field {number} of {name}")
        field, of = known[number]
        if of.startswith("["):
            found.setdefault(field, []).append(_value(value, of[1:-1]))
        elif of.startswith("{"):
            pair = dict(_fields(_data(value)))
            found.setdefault(field, {})[_data(pair.get(1, b"")).decode()] = _value(pair.get(2, b""), of[1:-1])
        else:
            read = _value(value, of.rstrip("*"))
            # Go writes all fields that are not pointers, so empty means unset.
            if read not in ("", None) and (of.endswith("*") or (read is not False and read != 0)):
                found[field] = read
    return found


def _value(value: int | bytes, of: str) -> Any:
    match of:
        case "str":
            return _data(value).decode()
        case "int":
            number = _number(value)
            return number - (1 << 64) if number >> 63 else number
        case "bool":
            return bool(_number(value))
        case "bytes":
            return base64.b64encode(_data(value)).decode()
        case "quantity":
            return _data(dict(_fields(_data(value))).get(1, b"")).decode()
        case "intstr":
            parts = dict(_fields(_data(value)))
            return _data(parts.get(3, b"")).decode() if parts.get(1) else _value(parts.get(2, 0), "int")
        case "time" | "microtime":
            parts = dict(_fields(_data(value)))
            if not parts:
                return None
            moment = datetime.fromtimestamp(_value(parts.get(1, 0), "int"), UTC)
            micro = _number(parts.get(2, 0)) // 1000
            return moment.strftime("%Y-%m-%dT%H:%M:%S") + (f".{micro:06}Z" if of == "microtime" else "Z")
    return _struct(_data(value), of)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield field numbers and values. Strings and nested messages are bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise ValueError("the message ends too soon")
            yield number, data[at : at + length]
            at += length
        else:
            raise ValueError(f"wire type {wire} is not used by Kubernetes' objects")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")


def _data(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where a text belongs")
    return value


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a text where a number belongs")
    return value


OPENAPI_ACCEPTED = (
    "application/com.github.proto-openapi.spec.v2@v1.0+protobuf",
    "application/com.github.proto-openapi.spec.v2.v1.0+protobuf",
)
"""Media types by which clients request it."""
OPENAPI_MEDIA_TYPE = OPENAPI_ACCEPTED[1]
"""Media type of the response. Some clients reject the other one, whose syntax is invalid."""
_VERBS = {"get": 2, "put": 3, "post": 4, "delete": 5, "patch": 8}


def encode_openapi(document: Mapping[str, Any]) -> bytes:
    """Encode an OpenAPI document of version 2 (gnostic's openapiv2/OpenAPIv2.proto), as kubectl before 1.27 requests it."""
    info = _text(1, document["info"]["title"]) + _text(2, document["info"]["version"])
    paths = b"".join(_part(2, _named(path, _path(item))) for path, item in document["paths"].items())
    definitions = b"".join(_part(1, _named(name, _schema(each))) for name, each in document["definitions"].items())
    return _text(1, document["swagger"]) + _part(2, info) + _part(8, paths) + _part(9, definitions)


def _path(item: Mapping[str, Any]) -> bytes:
    return b"".join(_part(_VERBS[verb], _operation(each)) for verb, each in item.items())


def _operation(operation: Mapping[str, Any]) -> bytes:
    parameters = b"".join(_part(8, _part(1, _part(2, _part(3, _query(each))))) for each in operation["parameters"])
    responses = b"".join(
        _part(1, _text(1, code) + _part(2, _part(1, _text(1, each["description"]))))
        for code, each in operation["responses"].items()
    )
    return _text(5, operation["operationId"]) + parameters + _part(9, responses) + _extensions(13, operation)


def _query(parameter: Mapping[str, Any]) -> bytes:
    return _text(2, parameter["in"]) + _text(4, parameter["name"]) + _text(6, parameter["type"])


def _schema(schema: Mapping[str, Any]) -> bytes:
    found = (
        _text(1, schema.get("$ref", "")) + _text(2, schema.get("format", "")) + _text(4, schema.get("description", ""))
    )
    found += b"".join(_text(19, name) for name in schema.get("required", ()))
    more = schema.get("additionalProperties")
    if isinstance(more, Mapping):
        found += _part(21, _part(1, _schema(more)))
    if schema.get("type"):
        found += _part(22, _text(1, schema["type"]))
    if isinstance(schema.get("items"), Mapping):
        found += _part(23, _part(1, _schema(schema["items"])))
    if schema.get("properties"):
        fields = (_part(1, _named(name, _schema(each))) for name, each in schema["properties"].items())
        found += _part(25, b"".join(fields))
    return found + _extensions(31, schema)


def _extensions(number: int, of: Mapping[str, Any]) -> bytes:
    """Encode vendor extensions as YAML, of which JSON is a subset."""
    return b"".join(
        _part(number, _named(name, _text(2, msgspec.json.encode(value).decode() + "\n")))
        for name, value in of.items()
        if name.startswith("x-")
    )


def _named(name: str, value: bytes) -> bytes:
    return _text(1, name) + _part(2, value)


def _text(number: int, text: str) -> bytes:
    return _part(number, text.encode()) if text else b""


def _part(number: int, data: bytes) -> bytes:
    """Encode a length-delimited field."""
    return bytes(_base_128(number << 3 | 2)) + bytes(_base_128(len(data))) + data


def _base_128(value: int) -> Iterable[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value
