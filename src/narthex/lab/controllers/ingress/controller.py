"""The Ingress controller: the address of each Ingress that the lab serves, and Events about objects that are missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.ingress.routing import IngressObjects, faults_of, is_served
from narthex.lab.controllers.objects import (
    Object,
    ObjectKey,
    ReconcileResult,
    UpdateObject,
    is_terminating,
    key_of,
    spec_of,
    status_of,
    with_fields,
)
from narthex.lab.topology import INGRESS_ADDRESSES

_ADDRESSES = [{"ip": address} for address in INGRESS_ADDRESSES]


class IngressController:
    """Sets `status.loadBalancer`. `lab/server/ingress.py` answers at the address."""

    name = "ingress-controller"
    kinds = frozenset({"Ingress", "IngressClass", "Service", "Secret"})

    def __init__(self) -> None:
        self._reported: dict[ObjectKey, frozenset[tuple[str, str]]] = {}
        """Faults for which there is an Event."""

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the Ingress, or those that may name the changed object."""
        if change.kind == "Ingress":
            return [change.key]
        namespace = change.key.namespace
        return [key for key in state.all("Ingress") if not namespace or key.namespace == namespace]

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Set the address, and report new faults."""
        ingress = state.get("Ingress", key)
        if ingress is None or is_terminating(ingress) or not is_served(ingress, state.all("IngressClass")):
            self._reported.pop(key, None)
            if ingress is not None:
                yield from _released(ingress)
            return
        if (status_of(ingress).get("loadBalancer") or {}).get("ingress") != _ADDRESSES:
            yield UpdateObject(
                "Ingress", with_fields(ingress, "status", loadBalancer={"ingress": _ADDRESSES}), "status"
            )
        faults = frozenset(faults_of(ingress, _objects(ingress, state)))
        for reason, message in sorted(faults - self._reported.get(key, frozenset())):
            yield event_about(ingress, reason, message, now, source=self.name, warning=True)
        self._reported[key] = faults


def _released(ingress: Object) -> Iterator[ReconcileResult]:
    """Remove the lab's address from an Ingress that another controller serves from now on."""
    if (status_of(ingress).get("loadBalancer") or {}).get("ingress") == _ADDRESSES and not is_terminating(ingress):
        yield UpdateObject("Ingress", with_fields(ingress, "status", loadBalancer={}), "status")


def _objects(ingress: Object, state: ClusterState) -> IngressObjects:
    """Return the objects on which faults depend. Endpoints and nodes come and go without one."""
    secrets = [
        ObjectKey(key_of(ingress).namespace, tls.get("secretName") or "") for tls in spec_of(ingress).get("tls") or ()
    ]
    return IngressObjects(
        ingresses={},
        classes={},
        services=state.all("Service"),
        slices={},
        nodes=(),
        secrets={key: found for key in secrets if (found := state.get("Secret", key)) is not None},
    )
