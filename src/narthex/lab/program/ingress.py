"""The lab's load balancer for Ingresses. It starts with the first Ingress."""

from __future__ import annotations

import math
import socket

from narthex.lab import topology
from narthex.lab.api.errors import StatusError
from narthex.lab.api.registry import Registry
from narthex.lab.controllers.ingress.routing import IngressObjects, IngressTarget, build_table, slices_by_service
from narthex.lab.controllers.objects import key_of
from narthex.lab.program.network import wire
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.server.ingress import IngressServer
from narthex.lab.server.pods import PodRuntime, dial_from
from narthex.linux.namespaces import in_namespace
from narthex.model.backoff import Backoff
from narthex.runtime.http.server import listen_tcp
from narthex.runtime.reconciler import Reconciler, Throttle

_KINDS = frozenset({"Ingress", "IngressClass", "Service", "EndpointSlice", "Node", "Secret"})
_PORTS = ((80, False), (443, True))
"""Ports, and whether they speak TLS."""
_CONNECT_SECONDS = 5.0
"""Time to connect to a server, as in ingress-nginx."""
_BACKOFF = Backoff(0.5, 10.0)
_THROTTLE = Throttle(share=2.0, longest=0.25)
"""Changes that come together make one table."""


class LabIngress:
    """Keeps the routes in line with the objects. `run` belongs to one thread."""

    def __init__(self, lab: str, registry: SharedRegistry, pods: PodRuntime) -> None:
        self._lab = lab
        self._registry = registry
        self._pods = pods
        self._server = IngressServer(self._dial)
        self._listening = False
        self._version = -1
        self._reconciler = Reconciler(throttle=_THROTTLE, backoff=_BACKOFF)
        registry.listen(self._reconciler.wake)

    def run(self) -> None:
        """Follow the objects until the process ends."""
        self._reconciler.run(self._reconcile)

    def _reconcile(self) -> float:
        with self._registry.held() as registry:
            version = registry.version
            if not self._concerned(registry):
                self._version = version
                return math.inf
            objects = _objects(registry)
        if not self._listening:
            self._listen()
        self._server.use(build_table(objects))
        self._version = version
        return math.inf

    def _concerned(self, registry: Registry) -> bool:
        """Return True if the routes may have changed."""
        if not self._listening:
            return bool(registry.list("Ingress"))
        try:
            return any(change.kind in _KINDS for change in registry.changes_since(self._version))
        except StatusError:
            # The changes are no longer kept.
            return True

    def _listen(self) -> None:
        wire(topology.wire_ingress(self._lab))
        sockets = []
        with in_namespace(topology.fabric_namespace(self._lab)):
            for port, tls in _PORTS:
                sockets += [(listen_tcp(address, port), tls) for address in topology.INGRESS_ADDRESSES]
        for sock, tls in sockets:
            self._server.listen(sock, tls=tls)
        self._listening = True

    def _dial(self, target: IngressTarget) -> socket.socket:
        """Connect to a pod from its node, or to a node port from the fabric."""
        if target.node:
            return self._pods.dial(target.node, target.address, target.port)
        return dial_from(topology.fabric_namespace(self._lab), target.address, target.port, _CONNECT_SECONDS)


def _objects(registry: Registry) -> IngressObjects:
    ingresses, classes, services, secrets = (
        {key_of(each): each for each in registry.list(kind)}
        for kind in ("Ingress", "IngressClass", "Service", "Secret")
    )
    slices = slices_by_service(registry.list("EndpointSlice"))
    return IngressObjects(ingresses, classes, services, slices, registry.list("Node"), secrets)
