"""Requests that the API server passes on to a pod, a Service, or a node: the subresource `proxy`.

    /api/v1/namespaces/NAMESPACE/pods/[SCHEME:]NAME[:PORT]/proxy/PATH
    /api/v1/namespaces/NAMESPACE/services/[SCHEME:]NAME[:PORT]/proxy/PATH
    /api/v1/nodes/[SCHEME:]NAME[:PORT]/proxy/PATH

Without a port, a node's is that of its kubelet. A Service's request goes to one of its endpoints that is a pod (pkg/registry/core/{pod,service,node}, `ResourceLocation`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from narthex.lab.api import errors
from narthex.lab.api.registry import Registry

_PATH = re.compile(
    r"(?P<prefix>/api/v1/(?:namespaces/(?P<namespace>[^/]+)/(?P<plural>pods|services)|nodes)/(?P<id>[^/]+)/proxy)(?P<rest>/.*)?"
)

KUBELET_PORT = 10250

Object = Mapping[str, Any]


class ProxyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A response that another server gives."""

    node: str
    """The node that connects: the one that has the pod."""
    host: str
    """Address of the server."""
    port: int
    tls: bool
    prefix: str
    """What precedes the server's own paths in the paths of the API."""
    path: str
    """Path for the server, percent-encoded. Empty: the client asked for the prefix alone."""


class KubeletProxyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A response that the kubelet of a node gives."""

    node: str
    path: str
    """Path of the kubelet's API."""


def proxy_request(registry: Registry, target: str) -> ProxyRequest | KubeletProxyRequest | None:
    """Return what the path of a request addresses, None if it is no proxy's. Raises StatusError.

    `target` is percent-encoded.
    """
    found = _PATH.fullmatch(target)
    if found is None:
        return None
    sort, identity = found["plural"] or "nodes", unquote(found["id"])
    scheme, name, port = _split(identity)
    if not name or scheme not in ("", "http", "https"):
        raise errors.bad_request(f'invalid {sort.removesuffix("s")} request "{identity}"')
    find = {"pods": _pod, "services": _service, "nodes": _node}[sort]
    node, host, number = find(registry, unquote(found["namespace"] or ""), name, port)
    if sort == "nodes" and number == KUBELET_PORT:
        return KubeletProxyRequest(node=node, path=unquote(found["rest"] or "/"))
    return ProxyRequest(
        node=node,
        host=host,
        port=number or (443 if scheme == "https" else 80),
        tls=scheme == "https",
        prefix=found["prefix"],
        path=found["rest"] or "",
    )


def _split(identity: str) -> tuple[str, str, str]:
    """Return scheme, name, and port, as `SplitSchemeNamePort` does. The name is empty if there are more parts."""
    parts = identity.split(":")
    if len(parts) > 3:
        return "", "", ""
    scheme = parts.pop(0) if len(parts) == 3 else ""
    return scheme, parts[0], parts[1] if len(parts) > 1 else ""


def _pod(registry: Registry, namespace: str, name: str, port: str) -> tuple[str, str, int]:
    pod = registry.get("Pod", namespace, name)
    if pod is None:
        raise errors.not_found("pods", "", name)
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        raise errors.bad_request("address not allowed")
    ports = [each for container in pod["spec"]["containers"] for each in container.get("ports") or ()]
    if port and not port.isdigit():
        number = next((int(each["containerPort"]) for each in ports if each.get("name") == port), 0)
        if not number:
            raise errors.bad_request(f'pod "{name}" has no port "{port}"')
        return pod["spec"]["nodeName"], address, number
    return pod["spec"]["nodeName"], address, int(port) if port else int(ports[0]["containerPort"]) if ports else 0


def _service(registry: Registry, namespace: str, name: str, port: str) -> tuple[str, str, int]:
    service = registry.get("Service", namespace, name)
    if service is None:
        raise errors.not_found("services", "", name)
    if port.isdigit():
        ports = (service.get("spec") or {}).get("ports") or ()
        found = [each.get("name") or "" for each in ports if each.get("port") == int(port)]
        if not found:
            raise _unavailable(f'no service port {port} found for service "{name}"')
        port = found[0]
    candidates = list(_endpoints(registry, namespace, name, port))
    if not candidates:
        raise _unavailable(f'no endpoints available for service "{name}"')
    # In turn, without state: the version grows with each change, and the clock between them.
    return candidates[registry.now().microsecond % len(candidates)]


def _endpoints(registry: Registry, namespace: str, name: str, port: str) -> Iterator[tuple[str, str, int]]:
    """Yield the pods behind a named port of a Service."""
    endpoints = registry.get("Endpoints", namespace, name) or {}
    for subset in endpoints.get("subsets") or ():
        for each in subset.get("ports") or ():
            if (each.get("name") or "") != port:
                continue
            for address in subset.get("addresses") or ():
                target = address.get("targetRef") or {}
                pod = registry.get("Pod", target.get("namespace", namespace), target.get("name", ""))
                if target.get("kind") == "Pod" and pod is not None:
                    yield pod["spec"]["nodeName"], str(address["ip"]), int(each["port"])


def _node(registry: Registry, _namespace: str, name: str, port: str) -> tuple[str, str, int]:
    node = registry.get("Node", "", name)
    if node is None:
        raise errors.not_found("nodes", "", name)
    if port and not port.isdigit():
        raise errors.bad_request(f'node "{name}" has no port "{port}"')
    addresses = (node.get("status") or {}).get("addresses") or ()
    found = next((each["address"] for each in addresses if each.get("type") == "InternalIP"), None)
    if found is None:
        raise errors.bad_request(f'no preferred addresses found for node "{name}"')
    return name, str(found), int(port or KUBELET_PORT)


def _unavailable(message: str) -> errors.StatusError:
    return errors.StatusError(503, "ServiceUnavailable", message)
