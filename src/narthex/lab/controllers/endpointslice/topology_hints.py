"""Topology hints of endpoints, which proxies read instead of the Service.

`trafficDistribution` (KEP-4444, KEP-3015) assigns each endpoint to its own zone or node. The annotation topology-mode Auto
(KEP-2433) assigns endpoints to zones in proportion to the CPUs of their nodes, with at most 20 % overload; where that is
impossible, no endpoint gets a hint. Kubernetes: `staging/src/k8s.io/endpointslice/{trafficdist,topologycache}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from narthex.lab.controllers.cluster_state import ClusterState
from narthex.lab.controllers.endpointslice.pod_endpoints import ZONE, PortGroup
from narthex.lab.controllers.objects import (
    Object,
    annotations_of,
    condition_holds,
    decimal,
    labels_of,
    spec_of,
    status_of,
)

_SAME_ZONE = ("PreferClose", "PreferSameZone")
_SAME_NODE = "PreferSameNode"
_MODE = "service.kubernetes.io/topology-mode"
_OLD_MODE = "service.kubernetes.io/topology-aware-hints"
_CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
_OVERLOAD = Fraction(1, 5)


def with_hints(service: Object, groups: Sequence[PortGroup], state: ClusterState) -> list[PortGroup]:
    """Return the groups with hints on ready endpoints."""
    distribution = spec_of(service).get("trafficDistribution")
    if has_automatic_mode(service):
        # The annotation takes precedence over the field.
        ready = [each for _, some in groups for each in some if each["conditions"]["ready"]]
        zones = _allocate_to_zones(ready, _cpu_shares(state))
        return [(ports, [_for_zone(each, zones.get(_id(each), "")) for each in some]) for ports, some in groups]
    if distribution in (*_SAME_ZONE, _SAME_NODE):
        return [
            (ports, [_with_own_topology(each, nodes=distribution == _SAME_NODE) for each in some])
            for ports, some in groups
        ]
    return list(groups)


def has_automatic_mode(service: Object) -> bool:
    """Return True if the Service requests hints by CPU share."""
    annotations = annotations_of(service)
    return annotations.get(_MODE, annotations.get(_OLD_MODE, "")) in ("Auto", "auto")


def node_cpu_share(node: Object | None) -> object:
    """Return the zone and CPUs of a node that counts for hints by CPU share, None for others."""
    if node is None or any(label in labels_of(node) for label in _CONTROL_PLANE) or not condition_holds(node, "Ready"):
        return None
    return labels_of(node).get(ZONE) or "", _cpus(node)


def _with_own_topology(endpoint: Object, *, nodes: bool) -> Object:
    if not endpoint["conditions"]["ready"]:
        return endpoint
    hints = {}
    if endpoint.get("zone"):
        hints["forZones"] = [{"name": endpoint["zone"]}]
    if nodes and endpoint.get("nodeName"):
        hints["forNodes"] = [{"name": endpoint["nodeName"]}]
    return {**endpoint, "hints": hints} if hints else endpoint


def _for_zone(endpoint: Object, zone: str) -> Object:
    return {**endpoint, "hints": {"forZones": [{"name": zone}]}} if zone else endpoint


def _id(endpoint: Object) -> str:
    address: str = endpoint["addresses"][0]
    return f"{address} {(endpoint.get('targetRef') or {}).get('name')}"


def _cpus(node: Object) -> Fraction:
    text = str((status_of(node).get("allocatable") or {}).get("cpu", ""))
    return Fraction(decimal(text.removesuffix("m")) or 0, 1000 if text.endswith("m") else 1)


def _cpu_shares(state: ClusterState) -> dict[str, Fraction]:
    """Return each zone's share of all CPUs; empty if a node lacks zone or CPUs, or there is only one zone."""
    cpus: dict[str, Fraction] = {}
    for node in state.all("Node").values():
        share = node_cpu_share(node)
        if not isinstance(share, tuple):
            continue
        zone, count = share
        if not zone or not count:
            return {}
        cpus[zone] = cpus.get(zone, Fraction(0)) + count
    total = sum(cpus.values(), Fraction(0))
    return {zone: count / total for zone, count in sorted(cpus.items())} if len(cpus) > 1 else {}


def _allocate_to_zones(ready: Sequence[Object], shares: Mapping[str, Fraction]) -> dict[str, str]:
    """Return the zone of each endpoint; empty if a zone would get none or an endpoint has an unknown zone."""
    if not shares or len(ready) < len(shares) or any(each.get("zone") not in shares for each in ready):
        return {}
    desired = {zone: share * len(ready) for zone, share in shares.items()}
    minimum = {zone: math.ceil(share_of_endpoints / (1 + _OVERLOAD)) for zone, share_of_endpoints in desired.items()}
    by_zone: dict[str, list[str]] = {zone: [] for zone in shares}
    for each in ready:
        by_zone[each["zone"]].append(_id(each))
    for zone, need in minimum.items():
        while len(by_zone[zone]) < need:
            # Take from the zone with the largest surplus; all minimums together never exceed the endpoints.
            donor = max(by_zone, key=lambda other: (len(by_zone[other]) - minimum[other], other))
            if len(by_zone[donor]) <= minimum[donor]:
                return {}
            by_zone[zone].append(by_zone[donor].pop())
    return {each: zone for zone, some in by_zone.items() for each in some}
