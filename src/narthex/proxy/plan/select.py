"""Selects the endpoints of a Service port: readiness, termination, topology hints, locality (groups 2 to 4)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import msgspec

from narthex.model import EndpointSlice, IPFamily, ServicePort, SliceEndpoint
from narthex.proxy.plan.ir import Endpoint, Pool

HEADLESS_LABEL = "service.kubernetes.io/headless"


class ProxyLocation(msgspec.Struct, frozen=True):
    """The node and zone of the proxy, which the selection of endpoints depends on."""

    node_name: str
    zone: str = ""
    """The Node's `topology.kubernetes.io/zone`; empty if it has none."""


class Candidates(msgspec.Struct, frozen=True):
    """The endpoints of a Service port in any state, sorted by text, each address and port once."""

    endpoints: tuple[Endpoint, ...]
    states: tuple[SliceEndpoint, ...]
    """The conditions of each endpoint in its slice."""
    all_ready: bool

    def where(self, holds: Callable[[SliceEndpoint], bool]) -> Candidates:
        """Return the endpoints whose state satisfies the predicate."""
        kept = [pair for pair in zip(self.endpoints, self.states, strict=True) if holds(pair[1])]
        states = tuple([state for _, state in kept])
        return Candidates(tuple([end for end, _ in kept]), states, all(state.ready for state in states))


class Selection(msgspec.Struct, frozen=True):
    """The two endpoint sets that decisions select from."""

    cluster: Pool | None
    local: Pool | None
    any_usable: bool
    """Some endpoint of the cluster is usable, so a policy that leaves none means Drop, not Reject (row 3.7)."""


def candidates(
    slices: Iterable[EndpointSlice], port: ServicePort, family: IPFamily, place: ProxyLocation
) -> Candidates:
    """Return the endpoints of one Service port in all its slices.

    Slices match by port name and protocol (row 2.4). Of two entries for one address and port the one that is not
    terminating counts: the address was given to a new pod at once (row 2.8).
    """
    parts: list[tuple[int, tuple[SliceEndpoint, ...]]] = []
    for endpoint_slice in slices:
        if endpoint_slice.family is not family or _is_headless(endpoint_slice):
            continue
        for slice_port in endpoint_slice.ports:
            number = slice_port.port
            if number is not None and slice_port.name == port.name and slice_port.protocol is port.protocol:
                parts.append((number, endpoint_slice.endpoints))
    here = place.node_name
    if len(parts) == 1:
        # Nearly all are like this.
        number, states = parts[0]
        several = len(states) > 1
        if not several or len({state.address for state in states}) == len(states):
            states = tuple(sorted(states, key=_BY_ADDRESS)) if several else states
            ends = [Endpoint(state.address, number, state.node_name == here != "") for state in states]
            return Candidates(tuple(ends), states, False not in [state.ready for state in states])
    found: dict[tuple[str, int], SliceEndpoint] = {}
    for number, states in parts:
        for state in states:
            held = found.setdefault((state.address, number), state)
            if held.terminating and not state.terminating:
                found[state.address, number] = state
    ordered = sorted(found, key=_by_text)
    states = tuple([found[key] for key in ordered])
    ends = [Endpoint(*key, state.node_name == here != "") for key, state in zip(ordered, states, strict=True)]
    return Candidates(tuple(ends), states, False not in [state.ready for state in states])


_BY_ADDRESS = operator.attrgetter("address")


def _is_headless(one: EndpointSlice) -> bool:
    for key, _ in one.labels:  # noqa: SIM110 - a generator takes twice as long, for each slice of a cluster
        if key == HEADLESS_LABEL:
            return True
    return False


def _by_text(key: tuple[str, int]) -> tuple[str, str]:
    return key[0], str(key[1])


def select(found: Candidates, place: ProxyLocation, *, cluster: bool, local: bool) -> Selection:
    """Return the endpoint sets that a Service port needs; `cluster` and `local` say which (row 3.6)."""
    ready = found if found.all_ready else found.where(is_ready)
    fading = _NOBODY if found.all_ready else found.where(_is_fading)
    return Selection(
        cluster=_cluster_pool(ready, fading, place) if cluster else None,
        local=_local_pool(ready, fading) if local else None,
        any_usable=bool(ready.endpoints or fading.endpoints),
    )


_NOBODY = Candidates((), (), True)


def is_ready(state: SliceEndpoint) -> bool:
    """Return True if new connections may go to the endpoint."""
    return state.ready


def _is_fading(state: SliceEndpoint) -> bool:
    """Return True if the endpoint is serving and terminating: used only if no endpoint is ready (row 3.2)."""
    return state.serving and state.terminating and not state.ready


def _cluster_pool(ready: Candidates, fading: Candidates, place: ProxyLocation) -> Pool | None:
    if not ready.endpoints:
        return _pool(fading.endpoints, "terminating but serving, since none is ready")
    chosen, reason = _by_hints(ready, place)
    return _pool(chosen.endpoints, reason)


def _local_pool(ready: Candidates, fading: Candidates) -> Pool | None:
    here = tuple([end for end in ready.endpoints if end.local])
    if here:
        return _pool(here, "ready on this node")
    return _pool(
        tuple([end for end in fading.endpoints if end.local]),
        "terminating but serving on this node, since none here is ready",
    )


def _by_hints(ready: Candidates, place: ProxyLocation) -> tuple[Candidates, str]:
    """Apply node hints, then zone hints. A kind of hint counts only if every ready endpoint has it and one matches."""
    first = ready.states[0]
    if first.for_nodes and all(state.for_nodes for state in ready.states):
        near = ready.where(lambda state: place.node_name in state.for_nodes)
        if near.endpoints:
            return near, f"ready and hinted for node {place.node_name}"
    if place.zone and first.for_zones and all(state.for_zones for state in ready.states):
        near = ready.where(lambda state: place.zone in state.for_zones)
        if near.endpoints:
            return near, f"ready and hinted for zone {place.zone}"
    return ready, "ready"


def _pool(chosen: tuple[Endpoint, ...], reason: str) -> Pool | None:
    return Pool(endpoints=chosen, reason=reason) if chosen else None
