"""Which endpoints a Service port may use: readiness, termination, topology hints, locality (rows of groups 2 to 4)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from narthex.model.net import IPFamily
from narthex.model.objects import EndpointSlice, ServicePort, SliceEndpoint
from narthex.plan.ir import Endpoint, Pool

HEADLESS_LABEL = "service.kubernetes.io/headless"


class Place(msgspec.Struct, frozen=True):
    """Where the proxy runs, as far as the choice of endpoints depends on it."""

    node_name: str
    zone: str = ""
    """The Node's `topology.kubernetes.io/zone`, empty when it has none."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """An endpoint of this Service port, whatever its state."""

    endpoint: Endpoint
    state: SliceEndpoint

    @property
    def fading(self) -> bool:
        """Serving and terminating: used only when nothing is ready (row 3.2)."""
        return self.state.serving and self.state.terminating


class Selection(msgspec.Struct, frozen=True):
    """The two sets that decisions draw from."""

    cluster: Pool | None
    local: Pool | None
    any_usable: bool
    """Some endpoint of the cluster could be used, so a policy that leaves none means DROP, not REJECT (row 3.7)."""


def candidates(
    slices: Iterable[EndpointSlice], port: ServicePort, family: IPFamily, place: Place
) -> tuple[Candidate, ...]:
    """The endpoints of one Service port in all its slices, sorted by text, each address and port once.

    Slices match by port name and protocol (row 2.4). Of two entries for one address and port the one that is not
    terminating counts: the address was given to a new pod at once (row 2.8).
    """
    found: dict[tuple[str, int], Candidate] = {}
    here = place.node_name
    for endpoint_slice in slices:
        if endpoint_slice.family is not family or endpoint_slice.label(HEADLESS_LABEL) is not None:
            continue
        for slice_port in endpoint_slice.ports:
            number = slice_port.port
            if number is None or slice_port.name != port.name or slice_port.protocol is not port.protocol:
                continue
            for state in endpoint_slice.endpoints:
                key = state.address, number
                held = found.get(key)
                if held is None or (held.state.terminating and not state.terminating):
                    node = state.node_name
                    found[key] = Candidate(Endpoint(state.address, number, node == here and bool(node)), state)
    # Ports are sorted by their text, but a Service port mostly has one only.
    one_port = len({number for _, number in found}) < 2
    return tuple([found[key] for key in (sorted(found) if one_port else sorted(found, key=_by_text))])


def _by_text(key: tuple[str, int]) -> tuple[str, str]:
    return key[0], str(key[1])


def select(found: tuple[Candidate, ...], place: Place, *, cluster: bool, local: bool) -> Selection:
    """The sets that a Service port needs; `cluster` and `local` say which (row 3.6)."""
    ready = [candidate for candidate in found if candidate.state.ready]
    rest = len(ready) < len(found)
    fading = [candidate for candidate in found if candidate.fading and not candidate.state.ready] if rest else []
    return Selection(
        cluster=_cluster_pool(ready, fading, place) if cluster else None,
        local=_local_pool(ready, fading) if local else None,
        any_usable=bool(ready or fading),
    )


def _cluster_pool(ready: list[Candidate], fading: list[Candidate], place: Place) -> Pool | None:
    if not ready:
        return _pool(fading, "terminating but serving, since none is ready")
    chosen, reason = _by_hints(ready, place)
    return _pool(chosen, reason)


def _local_pool(ready: list[Candidate], fading: list[Candidate]) -> Pool | None:
    here = [candidate for candidate in ready if candidate.endpoint.local]
    if here:
        return _pool(here, "ready on this node")
    return _pool(
        [candidate for candidate in fading if candidate.endpoint.local],
        "terminating but serving on this node, since none here is ready",
    )


def _by_hints(ready: list[Candidate], place: Place) -> tuple[list[Candidate], str]:
    """Node hints, then zone hints; a kind of hint counts only when every ready endpoint has it and one fits."""
    if all(candidate.state.for_nodes for candidate in ready):
        near = [candidate for candidate in ready if place.node_name in candidate.state.for_nodes]
        if near:
            return near, f"ready and hinted for node {place.node_name}"
    if place.zone and all(candidate.state.for_zones for candidate in ready):
        near = [candidate for candidate in ready if place.zone in candidate.state.for_zones]
        if near:
            return near, f"ready and hinted for zone {place.zone}"
    return ready, "ready"


def _pool(chosen: list[Candidate], reason: str) -> Pool | None:
    if not chosen:
        return None
    return Pool(endpoints=tuple([candidate.endpoint for candidate in chosen]), reason=reason)
