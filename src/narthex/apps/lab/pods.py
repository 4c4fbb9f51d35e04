"""The lab's pods as the machine has them: namespaces, cables and listeners."""

from __future__ import annotations

from narthex.apps.lab.echo import EchoServer
from narthex.host import links, netns
from narthex.lab import topology
from narthex.lab.topology import LabNode, Wiring
from narthex.lab.workloads import LabPod
from narthex.model.names import NamespacedName


def wire(wiring: Wiring) -> None:
    """Make one namespace as its wiring says."""
    links.set_sysctls(wiring.namespace, wiring.sysctls)
    links.batch(wiring.namespace, wiring.commands)


def make_network(lab: str, nodes: tuple[LabNode, ...]) -> None:
    """Fabric, nodes and `outside`, without pods."""
    fabric, outside = topology.wire_fabric(lab, nodes)
    own_sides = [outside, *(topology.wire_node(node, nodes) for node in nodes)]
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
    """Makes and removes pods. Used by one thread."""

    def __init__(self, lab: str, nodes: tuple[LabNode, ...], echo: EchoServer) -> None:
        self._lab = lab
        self._nodes = {node.name: node for node in nodes}
        self._echo = echo
        self._running: dict[NamespacedName, LabPod] = {}

    def network_namespace(self, pod: LabPod) -> str:
        """Where the pod's processes run."""
        if pod.pod.spec.host_network:
            return self._nodes[pod.pod.spec.node_name].namespace
        return topology.pod_namespace(self._lab, pod.key)

    def start(self, pod: LabPod) -> None:
        """Make the pod; returns when it listens on every containerPort. Raises OSError or LinkError; then nothing of
        it is left."""
        node = self._nodes[pod.pod.spec.node_name]
        namespace = self.network_namespace(pod)
        if not pod.pod.spec.host_network:
            netns.create(namespace)
        try:
            if not pod.pod.spec.host_network:
                on_node, in_pod = topology.wire_pod(node, namespace, pod.slot)
                links.set_sysctls(namespace, in_pod.sysctls)
                links.batch(on_node.namespace, on_node.commands)
                links.batch(in_pod.namespace, in_pod.commands)
            self._echo.add(str(pod.key), f"{pod.pod.name} on {node.name}", namespace, _ports(pod))
        except BaseException:
            if not pod.pod.spec.host_network:
                netns.delete(namespace)
            raise
        self._running[pod.key] = pod

    def stop(self, pod: LabPod) -> None:
        """Remove the pod; nothing happens when it was never made."""
        if self._running.pop(pod.key, None) is None:
            return
        self._echo.remove(str(pod.key))
        if not pod.pod.spec.host_network:
            wire(topology.unwire_pod(self._nodes[pod.pod.spec.node_name], pod.slot))
            netns.delete(topology.pod_namespace(self._lab, pod.key))


def _ports(pod: LabPod) -> list[tuple[str, int]]:
    """What its containers declare, each once."""
    declared = ((port.protocol.value, port.port) for container in pod.pod.spec.containers for port in container.ports)
    return list(dict.fromkeys(declared))
