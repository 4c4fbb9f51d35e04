"""Routes of Ingresses: which Service answers a request for a host and a path, and which servers are behind it.

Hosts: an exact one precedes a wildcard, which precedes a rule without a host. Paths: the longest that matches, Exact before Prefix.
Of equal rules, the one of the oldest Ingress counts. A request that no path matches goes to a default backend, at first to that of
an Ingress with a rule for its host.

The annotation `target-type` is that of AWS' load balancers: `ip` leads straight to pods, `instance` to the node port of the Service.
Without it, a Service with a node port is reached through it, and any other one at its pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from narthex.lab.controllers.cluster_state import SERVICE_NAME
from narthex.lab.controllers.objects import (
    Object,
    ObjectKey,
    annotations_of,
    condition_holds,
    key_of,
    labels_of,
    spec_of,
    status_of,
)

CONTROLLER = "narthex.example/ingress"
"""`spec.controller` of an IngressClass that the lab's controller serves."""
TARGET_TYPE = "alb.ingress.kubernetes.io/target-type"
_CLASS = "kubernetes.io/ingress.class"
_IP, _INSTANCE = "ip", "instance"


class IngressObjects(msgspec.Struct, frozen=True):
    """The objects that routes depend on, by key."""

    ingresses: Mapping[ObjectKey, Object]
    classes: Mapping[ObjectKey, Object]
    services: Mapping[ObjectKey, Object]
    slices: Mapping[ObjectKey, Sequence[Object]]
    """EndpointSlices by Service."""
    nodes: Sequence[Object]
    secrets: Mapping[ObjectKey, Object]


class IngressTarget(msgspec.Struct, frozen=True):
    """A server that answers requests."""

    address: str
    port: int
    node: str = ""
    """Node of the pod; empty for a node port."""


class IngressBackend(msgspec.Struct, frozen=True):
    """The servers behind a Service's port, or why there are none."""

    title: str
    """The Service and its port."""
    targets: tuple[IngressTarget, ...] = ()
    fault: str = ""
    """What is wrong with the objects; empty if nothing is."""


class IngressRoute(msgspec.Struct, frozen=True):
    """A host, a path, and what answers. Routes are sorted: the first that matches counts."""

    host: str
    """In lower case, perhaps with `*.` in front. Empty: any."""
    path: str
    """Empty: any, for default backends."""
    exact: bool
    backend: IngressBackend

    def matches(self, host: str, path: str) -> bool:
        """Return True if a request for a host and a decoded path takes this route."""
        return host_matches(self.host, host) and path_matches(self.path, path, exact=self.exact)


class IngressCertificate(msgspec.Struct, frozen=True):
    """A certificate for hosts, from a Secret."""

    hosts: tuple[str, ...]
    """Empty: any."""
    certificate: str
    """Base64 of PEM, as in the Secret."""
    key: str


class IngressTable(msgspec.Struct, frozen=True):
    """All routes and certificates."""

    routes: tuple[IngressRoute, ...] = ()
    certificates: tuple[IngressCertificate, ...] = ()

    def find(self, host: str, path: str) -> IngressBackend | None:
        """Return what answers a request, None if nothing does. `host` is the field Host, `path` is percent-encoded."""
        name, decoded = host_name(host), unquote(path)
        return next((route.backend for route in self.routes if route.matches(name, decoded)), None)

    def certificate(self, server_name: str) -> IngressCertificate | None:
        """Return the certificate for a TLS server name: for exactly this, else for a wildcard, else for any."""
        name = server_name.lower()
        found = (each for each in self.certificates for host in each.hosts or ("",) if host_matches(host, name))
        return min(
            found,
            key=lambda each: min(_generality(h) for h in each.hosts or ("",) if host_matches(h, name)),
            default=None,
        )


def host_name(host: str) -> str:
    """Return the name in a field Host: in lower case, without port and final dot."""
    name = host.lower()
    if name.startswith("["):
        return name.partition("]")[0].removeprefix("[")
    return name.partition(":")[0].removesuffix(".")


def host_matches(rule: str, host: str) -> bool:
    """Return True if a rule's host matches. A wildcard stands for exactly one label."""
    if rule.startswith("*."):
        label, dot, rest = host.partition(".")
        return bool(label and dot) and rest == rule[2:]
    return not rule or rule == host


def path_matches(rule: str, path: str, *, exact: bool) -> bool:
    """Return True if a rule's path matches: as a whole, or the first elements of it. A final `*` stands for any characters."""
    if exact:
        return path == rule
    if rule.endswith("*"):
        return path.startswith(rule[:-1])
    prefix = rule.rstrip("/")
    return path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", "/")


def is_served(ingress: Object, classes: Mapping[ObjectKey, Object]) -> bool:
    """Return True unless the Ingress names an IngressClass of another controller."""
    name = spec_of(ingress).get("ingressClassName") or annotations_of(ingress).get(_CLASS)
    known = classes.get(ObjectKey("", name)) if name else None
    return known is None or spec_of(known).get("controller") == CONTROLLER


def build_table(objects: IngressObjects) -> IngressTable:
    """Return the routes of all Ingresses that the controller serves."""
    served = [each for each in objects.ingresses.values() if is_served(each, objects.classes)]
    served.sort(key=lambda each: (each["metadata"].get("creationTimestamp") or "", key_of(each)))
    routes = [route for each in served for route in _routes(each, objects)]
    # Sorting is stable: the oldest of equal routes stays first.
    routes.sort(
        key=lambda route: (not route.path, _generality(route.host), -len(route.path.rstrip("*/")), not route.exact)
    )
    return IngressTable(
        tuple(routes), tuple(found for each in served for found, _ in _certificates(each, objects) if found)
    )


def faults_of(ingress: Object, objects: IngressObjects) -> Iterator[tuple[str, str]]:
    """Yield reason and message of what is wrong with the objects that an Ingress names."""
    for backend in dict.fromkeys(route.backend for route in _routes(ingress, objects)):
        if backend.fault:
            yield "BackendNotFound", f"{backend.title}: {backend.fault}; requests for it are answered with 503"
    for found, fault in _certificates(ingress, objects):
        if found is None:
            yield "CertificateNotFound", f"{fault}; clients get a certificate that the lab has made itself"


def _generality(host: str) -> int:
    return 2 if not host else 1 if host.startswith("*.") else 0


def _routes(ingress: Object, objects: IngressObjects) -> Iterator[IngressRoute]:
    spec, hosts = spec_of(ingress), []
    for rule in spec.get("rules") or ():
        host = str(rule.get("host") or "").lower()
        hosts.append(host)
        for each in (rule.get("http") or {}).get("paths") or ():
            backend = _backend(ingress, each.get("backend") or {}, objects)
            yield IngressRoute(host, each.get("path") or "/", each.get("pathType") == "Exact", backend)
    if spec.get("defaultBackend"):
        backend = _backend(ingress, spec["defaultBackend"], objects)
        for host in dict.fromkeys([*hosts, ""]):
            yield IngressRoute(host, "", False, backend)


def _backend(ingress: Object, given: Mapping[str, Any], objects: IngressObjects) -> IngressBackend:
    chosen = given.get("service")
    if not chosen:
        return IngressBackend("a resource backend", fault="the lab's controller knows Services only")
    key, given_port = ObjectKey(key_of(ingress).namespace, chosen.get("name") or ""), chosen.get("port") or {}
    title = f"Service {key} port {given_port.get('name') or given_port.get('number')}"
    service = objects.services.get(key)
    if service is None:
        return IngressBackend(title, fault="there is no such Service")
    ports = spec_of(service).get("ports") or ()
    port = next((each for each in ports if _is_chosen(each, given_port)), None)
    if port is None:
        return IngressBackend(title, fault="the Service has no such port")
    sort = annotations_of(ingress).get(TARGET_TYPE) or (_INSTANCE if port.get("nodePort") else _IP)
    if sort == _INSTANCE:
        if not port.get("nodePort"):
            text = f"{TARGET_TYPE} is instance, which needs a Service of type NodePort or LoadBalancer"
            return IngressBackend(title, fault=text)
        return IngressBackend(title, tuple(_nodes(service, int(port["nodePort"]), objects)))
    if sort != _IP:
        return IngressBackend(title, fault=f"{TARGET_TYPE} is {sort}, but ip and instance are known")
    return IngressBackend(title, tuple(_pods(service, port, objects)))


def _is_chosen(port: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    return port.get("name") == chosen["name"] if chosen.get("name") else port.get("port") == chosen.get("number")


def _pods(service: Object, port: Mapping[str, Any], objects: IngressObjects) -> Iterator[IngressTarget]:
    """Yield the ready pods behind a port, in the Service's first IP family."""
    family = next(iter(spec_of(service).get("ipFamilies") or ()), "IPv4")
    for each in objects.slices.get(key_of(service), ()):
        number = next(
            (p.get("port") for p in each.get("ports") or () if (p.get("name") or "") == (port.get("name") or "")), 0
        )
        if each.get("addressType") != family or not number:
            continue
        for endpoint in each.get("endpoints") or ():
            if (endpoint.get("conditions") or {}).get("ready") is not False and endpoint.get("nodeName"):
                yield IngressTarget(endpoint["addresses"][0], int(number), endpoint["nodeName"])


def _nodes(service: Object, port: int, objects: IngressObjects) -> Iterator[IngressTarget]:
    """Yield the node port on each ready node; with externalTrafficPolicy Local, on those that have a ready pod."""
    slices = objects.slices.get(key_of(service), ())
    ready = [
        endpoint
        for each in slices
        for endpoint in each.get("endpoints") or ()
        if (endpoint.get("conditions") or {}).get("ready") is not False
    ]
    local = spec_of(service).get("externalTrafficPolicy") == "Local"
    with_pods = {endpoint.get("nodeName") for endpoint in ready}
    for node in objects.nodes if ready else ():
        addresses = status_of(node).get("addresses") or ()
        address = next((each["address"] for each in addresses if each.get("type") == "InternalIP"), "")
        name = node["metadata"]["name"]
        if address and condition_holds(node, "Ready") and (not local or name in with_pods):
            yield IngressTarget(address, port)


def _certificates(ingress: Object, objects: IngressObjects) -> Iterator[tuple[IngressCertificate | None, str]]:
    """Yield each certificate, or None and what is wrong."""
    for each in spec_of(ingress).get("tls") or ():
        if not each.get("secretName"):
            continue
        key = ObjectKey(key_of(ingress).namespace, each["secretName"])
        secret = objects.secrets.get(key)
        data = (secret or {}).get("data") or {}
        if secret is None:
            yield None, f"there is no Secret {key}"
        elif not data.get("tls.crt") or not data.get("tls.key"):
            yield None, f"Secret {key} lacks tls.crt or tls.key"
        else:
            hosts = tuple(str(host).lower() for host in each.get("hosts") or ())
            yield IngressCertificate(hosts, data["tls.crt"], data["tls.key"]), ""


def slices_by_service(slices: Iterable[Object]) -> dict[ObjectKey, list[Object]]:
    """Return EndpointSlices by the Service that they belong to."""
    found: dict[ObjectKey, list[Object]] = {}
    for each in slices:
        if service := labels_of(each).get(SERVICE_NAME):
            found.setdefault(ObjectKey(key_of(each).namespace, service), []).append(each)
    return found
