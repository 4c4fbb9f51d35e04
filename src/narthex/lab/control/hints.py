"""Which zones and nodes an endpoint is for (KEP-4444 trafficDistribution, KEP-3015 PreferSameNode).

The proxy does not read the Service's wish, only these hints.
"""

from __future__ import annotations

from collections.abc import Sequence

from narthex.lab.control.endpoints import Group
from narthex.lab.control.objects import spec_of
from narthex.lab.control.view import Object

_SAME_ZONE = ("PreferClose", "PreferSameZone")


def hinted(service: Object, groups: Sequence[Group]) -> list[Group]:
    """The endpoints with their hints: each ready one is for its own zone, or for its own node and else its zone."""
    wish = spec_of(service).get("trafficDistribution")
    if wish not in (*_SAME_ZONE, "PreferSameNode"):
        return list(groups)
    return [(ports, [_own(each, nodes=wish == "PreferSameNode") for each in some]) for ports, some in groups]


def _own(endpoint: Object, *, nodes: bool) -> Object:
    if not endpoint["conditions"]["ready"]:
        return endpoint
    hints = {}
    if endpoint.get("zone"):
        hints["forZones"] = [{"name": endpoint["zone"]}]
    if nodes and endpoint.get("nodeName"):
        hints["forNodes"] = [{"name": endpoint["nodeName"]}]
    return {**endpoint, "hints": hints} if hints else endpoint
