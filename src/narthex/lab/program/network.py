"""The lab's network on the machine: namespaces, veth pairs, and pods attached by CNI plugins."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.cni.program.install import install
from narthex.cni.program.runtime import NetworkConfigList, Runtime, RuntimeConf, read_network
from narthex.lab import topology
from narthex.lab.program.node_cgroups import node_cgroup
from narthex.lab.program.state import StateDirectory
from narthex.lab.topology import NETWORK, LabNode, Wiring
from narthex.linux.links import ip_batch, set_sysctls
from narthex.linux.namespaces import create_namespace, delete_namespace, namespace_path
from narthex.model import NamespacedName
from narthex.model.values import address_text


def wire(wiring: Wiring) -> None:
    """Configure one namespace."""
    set_sysctls(wiring.namespace, wiring.sysctls)
    ip_batch(wiring.namespace, wiring.commands)


def make_network(lab: str, nodes: tuple[LabNode, ...], overlay: str) -> None:
    """Create the fabric, nodes, and `outside`, without pods."""
    fabric, outside = topology.wire_fabric(lab, nodes)
    own_sides = [outside, *(topology.wire_node(node, nodes, overlay) for node in nodes)]
    for wiring in (fabric, *own_sides):
        create_namespace(wiring.namespace)
    # Set sysctls in all namespaces first: a link takes the defaults at its creation, which may happen from its peer.
    for wiring in own_sides:
        set_sysctls(wiring.namespace, wiring.sysctls)
    wire(fabric)
    for wiring in own_sides:
        ip_batch(wiring.namespace, wiring.commands)


class PodNetwork:
    """Attaches pods to their nodes' networks. Pods of different nodes may be handled in parallel."""

    def __init__(self, directory: StateDirectory, nodes: tuple[LabNode, ...], *, in_cgroups: bool = False) -> None:
        """Attach pods to nodes. `in_cgroups` says that each node has a control group."""
        self._directory = directory
        self._in_cgroups = in_cgroups
        self._nodes = {node.name: node for node in nodes}
        self._networks: dict[str, NetworkConfigList] = {}

    def install(self) -> None:
        """Install each node's CNI plugins. Raises OSError."""
        for name in self._nodes:
            paths = self._directory.node(name)
            install(paths.programs, None, socket=str(paths.socket), state=str(paths.records))

    def namespace(self, pod: Mapping[str, Any]) -> str:
        """Return the name of the network namespace of a pod, which may not exist yet."""
        if pod["spec"].get("hostNetwork"):
            return self._nodes[pod["spec"]["nodeName"]].namespace
        return topology.pod_namespace(self._directory.name, _key(pod))

    def cgroup(self, pod: Mapping[str, Any]) -> str:
        """Return the directory of the control group of a pod's programs; empty: that of the lab."""
        return str(node_cgroup(self._directory.name, pod["spec"]["nodeName"])) if self._in_cgroups else ""

    def add(self, pod: Mapping[str, Any]) -> tuple[str, ...]:
        """Create the pod's network and return its addresses. Raises OSError, LinkError, or CniError and leaves nothing behind."""
        node = self._nodes[pod["spec"]["nodeName"]]
        if pod["spec"].get("hostNetwork"):
            return node.addresses
        namespace = self.namespace(pod)
        create_namespace(namespace)
        try:
            set_sysctls(namespace, sysctls_of(pod))
            container = self._container(pod)
            network = without_idle_plugins(self._network(node.name), container)
            made = self._runtime(node.name).add(network, container)
        except BaseException:
            delete_namespace(namespace)
            raise
        return tuple(address_text(ip.network.address) for ip in made.ips)

    def remove(self, pod: Mapping[str, Any]) -> None:
        """Remove the pod's network if it exists. Raises CniError after the namespace is removed."""
        if pod["spec"].get("hostNetwork"):
            return
        try:
            self._runtime(pod["spec"]["nodeName"]).delete(NETWORK, self._container(pod))
        finally:
            with contextlib.suppress(FileNotFoundError):
                delete_namespace(self.namespace(pod))

    def _runtime(self, node: str) -> Runtime:
        paths = self._directory.node(node)
        return Runtime([paths.programs], paths.attached, self._nodes[node].namespace)

    def _network(self, node: str) -> NetworkConfigList:
        if node not in self._networks:
            self._networks[node] = read_network(self._directory.node(node).network.read_bytes())
        return self._networks[node]

    def _container(self, pod: Mapping[str, Any]) -> RuntimeConf:
        key = _key(pod)
        name = topology.container_id(key)
        args = {"IgnoreUnknown": "1", "K8S_POD_NAMESPACE": key.namespace, "K8S_POD_NAME": key.name}
        return RuntimeConf(
            id=name,
            namespace=str(namespace_path(self.namespace(pod))),
            args={**args, "K8S_POD_INFRA_CONTAINER_ID": name},
            capabilities={"portMappings": _host_ports(pod)},
        )


_SAFE_SYSCTLS = frozenset({
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_syncookies",
})  # fmt: skip
"""Kernel settings of a network namespace that a kubelet allows by default (pkg/kubelet/sysctl/safe_sysctls.go)."""


def sysctls_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the kernel settings that a pod asks for and may have, by their path below /proc/sys."""
    requested = (pod["spec"].get("securityContext") or {}).get("sysctls") or ()
    return {each["name"].replace(".", "/"): str(each["value"]) for each in requested if each["name"] in _SAFE_SYSCTLS}


def without_idle_plugins(network: NetworkConfigList, container: RuntimeConf) -> NetworkConfigList:
    """Return the network without plugins that only serve capabilities of which the container uses none, such as portmap.

    Such a plugin passes the result on. Each one costs the start of a program.
    """
    first, *others = network.plugins
    used = {name for name, value in container.capabilities.items() if value}
    kept = (each for each in others if not (declared := each.get("capabilities")) or used & {*declared})
    return msgspec.structs.replace(network, plugins=(first, *kept))


def _key(pod: Mapping[str, Any]) -> NamespacedName:
    return NamespacedName(pod["metadata"]["namespace"], pod["metadata"]["name"])


def _host_ports(pod: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the host ports of a pod in the form of the CNI capability `portMappings`."""
    return [
        {
            "hostPort": port["hostPort"],
            "containerPort": port["containerPort"],
            "protocol": str(port.get("protocol") or "TCP").lower(),
            **({"hostIP": port["hostIP"]} if port.get("hostIP") else {}),
        }
        for container in pod["spec"]["containers"]
        for port in container.get("ports") or ()
        if port.get("hostPort")
    ]
