"""The EndpointSlice mirroring controller (kubernetes `pkg/controller/endpointslicemirroring`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import SERVICE_NAME, ClusterState, ObjectChange
from narthex.lab.controllers.endpoints import MANAGED_BY, MANAGER, MAX_ADDRESSES
from narthex.lab.controllers.endpointslice.controller import RESERVED
from narthex.lab.controllers.endpointslice.pod_endpoints import FAMILIES, PortGroup
from narthex.lab.controllers.endpointslice.reconciler import EndpointSliceReconciler, delete_slice
from narthex.lab.controllers.interfaces import Object, ObjectKey, ReconcileResult
from narthex.lab.controllers.objects import annotations_of, is_terminating, labels_of, spec_of

SKIP_MIRROR = "endpointslice.kubernetes.io/skip-mirror"
_LEADER = "control-plane.alpha.kubernetes.io/leader"
_MIRRORING_MANAGER = "endpointslicemirroring-controller.k8s.io"


class EndpointSliceMirroringController:
    """Mirrors user-managed Endpoints of Services without a selector into EndpointSlices, which proxies read."""

    name = "endpointslicemirroring-controller"
    kinds = frozenset({"Service", "Endpoints", "EndpointSlice"})

    def __init__(self) -> None:
        self._slices = EndpointSliceReconciler(_MIRRORING_MANAGER)

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the Endpoints with the name of the changed Service, Endpoints, or slice label."""
        del state
        if change.kind in ("Service", "Endpoints"):
            return [change.key]
        if change.kind == "EndpointSlice":
            names = {labels_of(each).get(SERVICE_NAME) for each in (change.before, change.after) if each is not None}
            return [ObjectKey(change.key.namespace, name) for name in names if name]
        return []

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Yield the writes that the mirrored slices need."""
        del now
        endpoints, service = state.get("Endpoints", key), state.get("Service", key)
        if endpoints is None or is_terminating(endpoints):
            return
        existing = self._slices.managed_slices(endpoints, key, state)
        if service is None or spec_of(service).get("selector") or not _is_user_managed(endpoints):
            yield from map(delete_slice, existing)
            return
        labels = {name: value for name, value in labels_of(endpoints).items() if name not in RESERVED}
        for family in FAMILIES:
            groups = [group for subset in endpoints.get("subsets") or () if (group := _mirrored(subset, family))[1]]
            current = [each for each in existing if each.get("addressType") == family]
            if groups:
                yield from self._slices.reconcile(endpoints, labels, family, groups, current)
            else:
                yield from map(delete_slice, current)


def _is_user_managed(endpoints: Object) -> bool:
    labels = labels_of(endpoints)
    others = labels.get(MANAGED_BY) == MANAGER or labels.get(SKIP_MIRROR) == "true"
    return not others and _LEADER not in annotations_of(endpoints)


def _mirrored(subset: Object, family: str) -> PortGroup:
    ports = tuple(
        {
            "name": port.get("name") or "",
            "protocol": port.get("protocol") or "TCP",
            "port": port["port"],
            **({"appProtocol": port["appProtocol"]} if port.get("appProtocol") else {}),
        }
        for port in subset.get("ports") or ()
    )
    found: list[Object] = []
    for field, ready in (("addresses", True), ("notReadyAddresses", False)):
        for address in (subset.get(field) or ())[:MAX_ADDRESSES]:
            if (":" in address["ip"]) == (family == "IPv6"):
                kept = {name: address[name] for name in ("hostname", "nodeName", "targetRef") if address.get(name)}
                found.append({"addresses": [address["ip"]], "conditions": {"ready": ready}, **kept})
    return ports, found
