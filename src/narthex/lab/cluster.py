"""Initial objects of a lab's API, and its cluster DNS.

Each node serves the cluster DNS: on the Service's address where the proxy mode allows it, and on its own addresses, which
are the Service's endpoints. A user's Service with the same name replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narthex.lab.topology import API_ADDRESS, API_PORT, SERVICE_CIDRS, LabNode
from narthex.model import FAMILIES, IPFamily, NamespacedName, family_of

Object = dict[str, Any]

NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system")
API_SERVICE = NamespacedName("default", "kubernetes")
API_SERVICE_ADDRESS = "10.96.0.1"
"""The first address of the Service range, as in Kubernetes."""


DOMAIN = "cluster.local"
DNS_SERVICE = NamespacedName("kube-system", "kube-dns")
DNS_LABELS = {"k8s-app": "kube-dns"}
DNS_CONFIG = NamespacedName("kube-system", "coredns")
"""The ConfigMap with the Corefile of the cluster DNS."""
COREFILE = "Corefile"
ADDRESSES = ("10.96.0.10", "fd00:10:96::a")
"""The tenth address of each Service range, by convention."""
DNS_PORT = 53
DNS_PORTS = (("dns", "UDP"), ("dns-tcp", "TCP"))


SYSTEM_NAMESPACE = "kube-system"


def namespace(name: str) -> Object:
    """Return a Namespace."""
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}},
        "spec": {"finalizers": ["kubernetes"]},
        "status": {"phase": "Active"},
    }


def service_cidr() -> Object:
    """Return the ServiceCIDR."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": list(SERVICE_CIDRS)},
    }


def api_service() -> list[Object]:
    """Return the Service `default/kubernetes`, its EndpointSlice, and its Endpoints."""
    key = API_SERVICE
    labels = {"component": "apiserver", "provider": "kubernetes"}
    ports = [{"name": "https", "protocol": "TCP", "port": 443, "targetPort": API_PORT}]
    endpoints = [{"addresses": [API_ADDRESS], "conditions": {"ready": True}}]
    slice_ports = [{"name": "https", "protocol": "TCP", "port": API_PORT}]
    return [
        _service(key, labels, [API_SERVICE_ADDRESS], ports),
        _slice(key, key.name, IPFamily.IPV4, endpoints, slice_ports),
        _endpoints(key, [{"ip": API_ADDRESS}], slice_ports),
    ]


def _service(key: NamespacedName, labels: dict[str, str], addresses: Sequence[str], ports: list[Object]) -> Object:
    """Return a Service without a selector on these addresses, one per family."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": key.name, "namespace": key.namespace, "labels": labels},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": addresses[0],
            "clusterIPs": list(addresses),
            "ipFamilies": [family_of(address).label for address in addresses],
            "ipFamilyPolicy": "PreferDualStack" if len(addresses) > 1 else "SingleStack",
            "internalTrafficPolicy": "Cluster",
            "sessionAffinity": "None",
            "ports": ports,
        },
        "status": {"loadBalancer": {}},
    }


def _slice(
    service: NamespacedName, name: str, family: IPFamily, endpoints: list[Object], ports: list[Object]
) -> Object:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": {"kubernetes.io/service-name": service.name},
        },
        "addressType": family.label,
        "endpoints": endpoints,
        "ports": ports,
    }


def _endpoints(service: NamespacedName, addresses: list[Object], ports: list[Object]) -> Object:
    """Return Endpoints next to slices that exist already, which the label keeps from being mirrored again."""
    labels = {"endpointslice.kubernetes.io/skip-mirror": "true"}
    return {
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": {"name": service.name, "namespace": service.namespace, "labels": labels},
        "subsets": [{"addresses": addresses, "ports": ports}],
    }


def custom_resource_definitions() -> list[Object]:
    """Return the definitions of MetalLB's kinds, which configure load balancers."""
    return [_definition("metallb.io", "v1beta1", kind) for kind in ("IPAddressPool", "L2Advertisement")]


def _definition(group: str, version: str, kind: str) -> Object:
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()},
            "scope": "Namespaced",
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {"status": {}},
                }
            ],
        },
    }


def dns_service(nodes: Sequence[LabNode]) -> list[Object]:
    """Return the DNS Service, which has no selector, and its EndpointSlices and Endpoints with all nodes."""
    labels = {**DNS_LABELS, "kubernetes.io/name": "CoreDNS"}
    ports = [{"name": name, "protocol": protocol, "port": DNS_PORT} for name, protocol in DNS_PORTS]
    service = _service(DNS_SERVICE, labels, ADDRESSES, [{**port, "targetPort": DNS_PORT} for port in ports])
    slices = []
    for family in FAMILIES:
        endpoints = [
            {"addresses": [address], "conditions": {"ready": True}, "nodeName": node.name}
            for node in nodes
            for address in node.addresses
            if family_of(address) is family
        ]
        slices.append(_slice(DNS_SERVICE, f"{DNS_SERVICE.name}-{family.label.lower()}", family, endpoints, ports))
    addresses = [{"ip": node.addresses[0], "nodeName": node.name} for node in nodes]
    return [service, *slices, _endpoints(DNS_SERVICE, addresses, ports)]


def config_map(name: str, data: dict[str, str]) -> Object:
    """Return a ConfigMap of a cluster's component."""
    metadata = {"name": name, "namespace": SYSTEM_NAMESPACE}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def own_addresses(proxy_binds: bool) -> tuple[str, ...]:
    """Return the Service addresses that nodes assign to themselves; none if the proxy binds all of them."""
    return () if proxy_binds else ADDRESSES


def corefile() -> str:
    """Return the nodes' Corefile. It serves the root zone too: the lab has no upstream server, so no query waits for one."""
    zones = f"{DOMAIN} in-addr.arpa ip6.arpa"
    return (
        f"{zones} {{\n    errors\n    kubernetes {zones} {{\n        pods insecure\n    }}\n"
        "    prometheus :9353\n    loadbalance\n}\n"
        ". {\n    errors\n    kubernetes .\n}\n"
    )


def resolv_conf(namespace: str) -> str:
    """Return a pod's resolv.conf as a kubelet writes it (row S22)."""
    zones = f"{namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
    return f"search {zones}\nnameserver {ADDRESSES[0]}\noptions ndots:5\n"
