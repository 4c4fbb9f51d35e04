"""The lab's pods as the machine has them: namespaces, networks by the CNI plugins, and listeners."""

from __future__ import annotations

import errno

from narthex.apps.cni.install import install
from narthex.apps.cni.runtime import Container, NetworkList, Runtime, read_network
from narthex.apps.lab.echo import EchoServer
from narthex.apps.lab.state import StateDirectory
from narthex.cni import address
from narthex.host import links, netns
from narthex.lab import topology
from narthex.lab.cluster_dns import DNS_PORT, resolv_conf
from narthex.lab.pod_network import NETWORK
from narthex.lab.topology import LabNode, Wiring
from narthex.lab.workloads import LabPod
from narthex.model.names import NamespacedName


def wire(wiring: Wiring) -> None:
    """Make one namespace as its wiring says."""
    links.set_sysctls(wiring.namespace, wiring.sysctls)
    links.batch(wiring.namespace, wiring.commands)


def make_network(lab: str, nodes: tuple[LabNode, ...], overlay: str) -> None:
    """Fabric, nodes and `outside`, without pods."""
    fabric, outside = topology.wire_fabric(lab, nodes)
    own_sides = [outside, *(topology.wire_node(node, nodes, overlay) for node in nodes)]
    for wiring in (fabric, *own_sides):
        netns.create(wiring.namespace)
    # Settings come first everywhere: a link takes the defaults of the moment it is made, also the one made from the
    # other end.
    for wiring in own_sides:
        links.set_sysctls(wiring.namespace, wiring.sysctls)
    wire(fabric)
    for wiring in own_sides:
        links.batch(wiring.namespace, wiring.commands)


class PodRunner:
    """Makes and removes pods as a container runtime does. Pods of different nodes may be made and removed side by side."""

    def __init__(self, directory: StateDirectory, nodes: tuple[LabNode, ...], echo: EchoServer) -> None:
        self._directory = directory
        self._lab = directory.name
        self._nodes = {node.name: node for node in nodes}
        self._echo = echo
        self._running: dict[NamespacedName, LabPod] = {}

    def install(self) -> None:
        """Put each node's plugins in place. Raises OSError."""
        for name in self._nodes:
            places = self._directory.node(name)
            install(places.programs, None, socket=str(places.socket), state=str(places.records), subnet="")

    def network_namespace(self, pod: LabPod) -> str:
        """Where the pod's processes run."""
        if pod.pod.spec.host_network:
            return self._nodes[pod.pod.spec.node_name].namespace
        return topology.pod_namespace(self._lab, pod.key)

    def start(self, pod: LabPod) -> tuple[str, ...]:
        """Make the pod; its addresses, when it listens on every containerPort. Raises OSError, LinkError or CniError; then
        nothing of it is left."""
        node = self._nodes[pod.pod.spec.node_name]
        namespace = self.network_namespace(pod)
        addresses = pod.pod.ips
        if pod.pod.spec.host_network:
            _check_host_ports(pod)
        else:
            netns.create(namespace)
        try:
            if not pod.pod.spec.host_network:
                made = self._runtime(node.name).add(self._network(node.name), self._container(pod))
                addresses = tuple(address.text(ip.network.address) for ip in made.ips)
            self._write_resolv_conf(pod.key.namespace)
            self._echo.add(str(pod.key), f"{pod.pod.name} on {node.name}", namespace, _ports(pod))
        except BaseException:
            if not pod.pod.spec.host_network:
                self._detach(pod)
            raise
        self._running[pod.key] = pod
        return addresses

    def stop(self, pod: LabPod) -> None:
        """Remove the pod; nothing happens when it was never made. Raises CniError; then its namespace is gone all the
        same."""
        if self._running.pop(pod.key, None) is None:
            return
        self._echo.remove(str(pod.key))
        if not pod.pod.spec.host_network:
            self._detach(pod)

    def _detach(self, pod: LabPod) -> None:
        try:
            self._runtime(pod.pod.spec.node_name).delete(NETWORK, self._container(pod))
        finally:
            netns.delete(self.network_namespace(pod))

    def _write_resolv_conf(self, namespace: str) -> None:
        path = self._directory.resolv_conf(namespace)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(resolv_conf(namespace))

    def _runtime(self, node: str) -> Runtime:
        places = self._directory.node(node)
        return Runtime([places.programs], places.attached, self._nodes[node].namespace)

    def _network(self, node: str) -> NetworkList:
        return read_network(self._directory.node(node).network.read_bytes())

    def _container(self, pod: LabPod) -> Container:
        name = topology.container_id(pod.key)
        told = {"IgnoreUnknown": "1", "K8S_POD_NAMESPACE": pod.key.namespace, "K8S_POD_NAME": pod.key.name}
        return Container(
            id=name,
            namespace=str(netns.path_of(self.network_namespace(pod))),
            args={**told, "K8S_POD_INFRA_CONTAINER_ID": name},
            capabilities={"portMappings": _host_ports(pod)},
        )


def _ports(pod: LabPod) -> list[tuple[str, int]]:
    """What its containers declare, each once."""
    declared = ((port.protocol.value, port.port) for container in pod.pod.spec.containers for port in container.ports)
    return list(dict.fromkeys(declared))


def _check_host_ports(pod: LabPod) -> None:
    if any(number == DNS_PORT for _, number in _ports(pod)):
        node = pod.pod.spec.node_name
        raise OSError(errno.EADDRINUSE, f"Address already in use: port {DNS_PORT} of {node} is the lab's DNS's")


def _host_ports(pod: LabPod) -> list[dict[str, object]]:
    """The host ports that its containers ask for, as the capability has them."""
    return [
        {"hostPort": port.host_port, "containerPort": port.port, "protocol": port.protocol.value.lower()}
        for container in pod.pod.spec.containers
        for port in container.ports
        if port.host_port
    ]
