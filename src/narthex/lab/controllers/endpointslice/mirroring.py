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
_MIRRORER = "endpointslicemirroring-controller.k8s.io"


class EndpointSliceMirroringController:
    """Endpoints that a user wrote for a Service without a selector become slices, which is what proxies read."""

    name = "endpointslicemirroring-controller"
    kinds = frozenset({"Service", "Endpoints", "EndpointSlice"})

    def __init__(self) -> None:
        self._writer = EndpointSliceReconciler(_MIRRORER)

    def concerned(self, seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
        """The Endpoints, their Service, their slices."""
        del present
        if seen.kind in ("Service", "Endpoints"):
            return [seen.key]
        if seen.kind == "EndpointSlice":
            names = {labels_of(each).get(SERVICE_NAME) for each in (seen.before, seen.after) if each is not None}
            return [ObjectKey(seen.key.namespace, name) for name in names if name]
        return []

    def look(self, key: ObjectKey, present: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """What the slices need to become."""
        del now
        endpoints, service = present.get("Endpoints", key), present.get("Service", key)
        if endpoints is None or is_terminating(endpoints):
            return
        existing = self._writer.mine(endpoints, key, present)
        if service is None or spec_of(service).get("selector") or not _is_by_hand(endpoints):
            yield from map(delete_slice, existing)
            return
        labels = {name: value for name, value in labels_of(endpoints).items() if name not in RESERVED}
        for family in FAMILIES:
            groups = [group for subset in endpoints.get("subsets") or () if (group := _mirrored(subset, family))[1]]
            mine = [each for each in existing if each.get("addressType") == family]
            if groups:
                yield from self._writer.write(endpoints, labels, family, groups, mine)
            else:
                yield from map(delete_slice, mine)


def _is_by_hand(endpoints: Object) -> bool:
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
