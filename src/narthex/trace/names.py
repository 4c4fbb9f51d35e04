"""Names of addresses in Kubernetes terms, and where the addresses are located."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from narthex.model import Node, Snapshot, contains, family_of
from narthex.trace.model import PathStep

_NAME = r"[a-z0-9-]+/[a-z0-9.-]+"
_COMMENT = re.compile(rf"(?:[A-Za-z ]+ (?:for|to) )?({_NAME}(?::[a-z0-9-]*)?)(?: [A-Za-z>-].*)?$")
"""A comment of kube-proxy that names a Service port: "shop/web:http cluster IP", "masquerade traffic for shop/web:http …"."""
_CHAIN = re.compile(
    rf"\b(?:service|local|external|firewall|endpoint)-[A-Z0-9]{{8}}-({_NAME})/(?:tcp|udp|sctp)/([a-z0-9-]*?)(?=__|[^a-z0-9-]|$)"
)
"""kube-proxy's chains of a Service port in nftables mode."""
_OF_ELEMENTS = ("service-endpoints-check", "nodeport-endpoints-check")
"""kube-proxy's chains of nftables whose map elements name the Service port in their comments."""


def service_of_chain(text: str) -> str:
    """Return the Service port (`shop/web:http`) in the first chain name of kube-proxy's nftables mode in a text, or ""."""
    match = _CHAIN.search(text)
    return "" if match is None else match[1] + (f":{match[2]}" if match[2] else "")


def service_of_comment(comment: str) -> str:
    """Return the Service port that a comment of kube-proxy's rules names, or ""."""
    match = _COMMENT.match(comment)
    return match[1].rstrip(":") if match is not None else ""


def service_of_steps(steps: Iterable[PathStep]) -> str:
    """Return the Service port (`shop/web:http`) that kube-proxy's rules name, or ""."""
    for step in steps:
        commented = step.chain.startswith("KUBE-") or step.chain in _OF_ELEMENTS
        name = service_of_comment(step.why) if commented else ""
        if not name and step.table == "kube-proxy":
            name = service_of_chain(step.chain) or service_of_chain(step.what)
        if name:
            return name
    return ""


class AddressName(msgspec.Struct, frozen=True):
    """The object that owns an address."""

    kind: str
    """`pod`, `Service`, `node`, `endpoint of`, or `outside`."""
    name: str
    """`namespace/name`, or the name of a node."""
    node: str = ""
    """The node that the address is on; empty if not known or not applicable."""

    def __str__(self) -> str:
        """Return `pod shop/web-1 on worker-a`."""
        text = f"{self.kind} {self.name}" if self.name else self.kind
        return f"{text} on {self.node}" if self.node else text


class AddressNames:
    """The names of all addresses in a snapshot; `others` are addresses that no object owns, such as an outside client."""

    def __init__(self, snapshot: Snapshot, others: dict[str, AddressName] | None = None) -> None:
        """Index the addresses of all objects."""
        self._nodes: list[Node] = sorted(snapshot.nodes.values(), key=lambda node: node.name)
        self._held: dict[str, AddressName] = dict(others or {})
        for pod in snapshot.pods.values():
            if not pod.spec.host_network:
                for ip in pod.ips:
                    self._held[ip] = AddressName("pod", str(pod.key), pod.spec.node_name)
        for slices in snapshot.slices.values():
            for each in slices.values():
                for endpoint in each.endpoints:
                    if endpoint.target:
                        found = AddressName("pod", f"{each.namespace}/{endpoint.target}", endpoint.node_name)
                    else:
                        found = AddressName("endpoint of", str(each.service), endpoint.node_name)
                    self._held.setdefault(endpoint.address, found)
        for service in snapshot.services.values():
            balancers = (entry.ip for entry in service.ingress)
            for ip in (*service.cluster_ips, *service.external_ips, *balancers):
                self._held.setdefault(ip, AddressName("Service", str(service.key)))
        for node in self._nodes:
            for ip in (*node.internal_ips, *node.external_ips):
                # A host-network pod shares the node's address; the node is what people mean by it.
                self._held[ip] = AddressName("node", node.name)

    def named(self, address: str) -> AddressName | None:
        """Return the owner of an address."""
        return self._held.get(address)

    def of(self, address: str) -> str:
        """Return the owner as text ("pod shop/web-1 on worker-a"); empty if there is none."""
        found = self._held.get(address)
        return str(found) if found else ""

    def route(self, address: str, here: str) -> str:
        """Return where a packet for the address leaves the node `here`, according to Node objects."""
        held = self._held.get(address)
        if held is not None and held.kind == "node":
            return "stays on this node" if held.name == here else f"straight to node {held.name}"
        for node in self._nodes:
            cidr = next((cidr for cidr in node.pod_cidrs if contains(cidr, address)), None)
            if cidr is None:
                continue
            if node.name == here:
                return f"{cidr} is this node's pod range: over its bridge (cni0) to the pod"
            via = next((ip for ip in node.internal_ips if family_of(ip) is family_of(address)), "")
            return f"{cidr} is {node.name}'s pod range: by way of {node.name}{f' ({via})' if via else ''}"
        if held is not None and held.node:
            where = "this node" if held.node == here else held.node
            return f"on {where}, says its EndpointSlice; no Node has a pod range that holds it"
        return "in no pod range of a known Node: by the node's own routes"
