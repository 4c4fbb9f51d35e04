"""Read-only inspection of a cluster's load balancers: planned writes, pool usage, and why an address is announced or not."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from immutables import Map

from narthex.kube.access import Access
from narthex.kube.client import ApiClient, Unreachable
from narthex.kube.manifests import ManifestSource
from narthex.kube.resources import L2_ADVERTISEMENTS, LISTED_SLICES, of_an_allocator
from narthex.lb import why
from narthex.lb.allocate import AllocationInput, allocate
from narthex.lb.election import ElectionInput, NodeAnnouncerState, announced_addresses, elect
from narthex.lb.heartbeat import PeerState
from narthex.lb.pools import Pools, PoolUse, namespace_labels, reserved_addresses, usage, validate_pools
from narthex.lb.program.announcer import PATH
from narthex.lb.resources import LoadBalancerConfiguration, read
from narthex.lb.service_status import (
    LOAD_BALANCER,
    AllocationDecision,
    ServiceChanges,
    required_changes,
    status_addresses,
)
from narthex.model import (
    Event,
    InputError,
    IPFamily,
    NamespacedName,
    Problem,
    Service,
    Snapshot,
    Store,
    Synced,
    family_of,
)


class InspectionError(InputError):
    """The cluster cannot be inspected; the message says why."""


class ClusterInspection(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster at one moment, with the allocation decisions."""

    snapshot: Snapshot
    """With the pools and advertisements in force."""
    pools: Pools
    uses: tuple[PoolUse, ...]
    decisions: dict[NamespacedName, AllocationDecision]
    problems: tuple[Problem, ...] = ()

    def planned(self) -> list[tuple[Service, AllocationDecision, ServiceChanges]]:
        """Return what a controller would write, by Service name."""
        found = []
        for key in sorted(self.decisions):
            service, decision = self.snapshot.services[key], self.decisions[key]
            found.append((service, decision, required_changes(service, decision)))
        return found


def inspect_cluster(
    *,
    manifests: Path | None = None,
    access: Access | None = None,
    config: Path | None = None,
    load_balancer_class: str = "",
    cluster_cidrs: tuple[str, ...] = (),
    endpoints: bool = False,
) -> ClusterInspection:
    """Read manifests or an API server once, and allocate. `endpoints`: also read EndpointSlices. Raises InspectionError."""
    if manifests is not None:
        events, problems = _read_manifests(manifests)
    else:
        events, problems = _read_api(access or Access(), pools=config is None, endpoints=endpoints)
    store = Store()
    for event in (*events, Synced()):
        store.apply(event)
    snapshot = store.snapshot
    own = _configuration(config) if config is not None else LoadBalancerConfiguration()
    objects = own.pools if config is not None else tuple(snapshot.address_pools.values())
    advertisements = own.advertisements if config is not None else tuple(snapshot.l2_advertisements.values())
    if config is not None:
        snapshot = msgspec.structs.replace(
            snapshot,
            address_pools=Map((each.key, each) for each in objects),
            l2_advertisements=Map((each.key, each) for each in advertisements),
        )
    pools = validate_pools(objects, reserved_addresses(snapshot, cluster_cidrs))
    decisions = allocate(
        AllocationInput(
            services=snapshot.services.values(),
            pools=pools,
            namespaces=namespace_labels(snapshot),
            load_balancer_class=load_balancer_class,
        )
    )
    uses = usage(pools, snapshot.services.values(), decisions, advertisements)
    return ClusterInspection(
        snapshot=snapshot, pools=pools, uses=uses, decisions=decisions, problems=(*own.problems, *problems)
    )


def _read_manifests(manifests: Path) -> tuple[list[Event], tuple[Problem, ...]]:
    source = ManifestSource(manifests)
    events = source.scan()
    if not any(isinstance(event, Synced) for event in events):
        raise InspectionError(
            "; ".join(problem.message for problem in source.problems) or f"{manifests} cannot be read"
        )
    return events, source.problems


def _read_api(access: Access, *, pools: bool, endpoints: bool) -> tuple[list[Event], tuple[Problem, ...]]:
    from narthex.kube.snapshot import read_once

    resources = [*of_an_allocator(pools=pools), *([LISTED_SLICES] if endpoints else [])]
    try:
        return read_once(access, resources + ([L2_ADVERTISEMENTS] if pools else []))
    except Unreachable as error:
        raise InspectionError(str(error)) from error


def _configuration(config: Path) -> LoadBalancerConfiguration:
    try:
        found = read(config.read_bytes(), str(config))
    except OSError as error:
        raise InspectionError(f"{config} cannot be read: {error.strerror or error}") from error
    if found.failed:
        raise InspectionError("\n".join(map(str, found.problems)))
    return found


def as_data(found: ClusterInspection) -> list[dict[str, Any]]:
    """Return the planned writes as JSON data."""
    return [
        {
            "service": str(service.key),
            "holds": status_addresses(service),
            "addresses": decision.addresses,
            "pool": decision.pool,
            "refusal": decision.refusal.text if decision.refusal else "",
            "advice": decision.refusal.advice if decision.refusal else "",
            "cause": decision.cause,
            "note": decision.note,
            "foreign": decision.foreign,
            "writesStatus": todo.status is not None,
            "writesAnnotation": todo.pool is not None,
        }
        for service, decision, todo in found.planned()
    ]


_ASK_SECONDS = 1.0
_PROXY_SECONDS = 5.0
"""An API server waits for a node that is gone."""
_AT_ONCE = 32
_MOST_BYTES = 16 << 20
STATUS_PORT = 10256
"""The health port, which other machines reach: the metrics port usually listens on loopback."""

States = Mapping[str, why.AnnouncerStatus]


class WhyError(InputError):
    """The explanation is not possible; the message says why and what to do."""


def why_service(
    text: str,
    *,
    manifests: Path | None = None,
    access: Access | None = None,
    config: Path | None = None,
    status_port: int = STATUS_PORT,
    states: States | None = None,
) -> why.ServiceExplanation:
    """Explain the announcement of a Service, `NAMESPACE/NAME` or `NAME` in namespace `default`.

    `config` is a pools file. `status_port` is the port for querying announcers, 0 to skip this; `states` are their states if
    already known. Raises WhyError, InspectionError.
    """
    found = inspect_cluster(manifests=manifests, access=access, config=config, endpoints=True)
    snapshot = found.snapshot
    key = _named(snapshot, text)
    asked = states is not None or bool(status_port)
    if states is None:
        states = _states(snapshot, status_port, access) if status_port else {}
    view = ElectionInput(snapshot=snapshot, announcers=announcers(snapshot, states))
    decisions = [decision for decision in elect(view).values() if key in decision.services]
    said = why.explain(str(key), decisions, states)
    return msgspec.structs.replace(said, notes=tuple(_notes(found, key, states, asked=asked)))


def announcers(snapshot: Snapshot, states: States) -> dict[str, NodeAnnouncerState]:
    """Return the state of each node's announcer: from itself, else from a peer, else assumed alive."""
    known: dict[str, NodeAnnouncerState] = {}
    for state in states.values():
        for peer in state.peers:
            known[peer.node] = NodeAnnouncerState(
                state=peer.state,
                leaving=peer.leaving,
                standing_back=peer.standing_back,
                links=peer.links if peer.state is PeerState.ALIVE else None,
            )
    for node, state in states.items():
        links = tuple(link.name for link in state.links)
        known[node] = NodeAnnouncerState(links=links, leaving=state.leaving, standing_back=state.standing_back)
    return {key.name: known.get(key.name, NodeAnnouncerState()) for key in snapshot.nodes}


def _named(snapshot: Snapshot, text: str) -> NamespacedName:
    namespace, slash, name = text.rpartition("/")
    key = NamespacedName(namespace if slash else "default", name)
    if key in snapshot.services:
        return key
    same = sorted(str(each) for each in snapshot.services if each.name == name)
    if not slash and len(same) == 1:
        return next(each for each in snapshot.services if each.name == name)
    hint = f"; there is {', '.join(same)}" if same else ""
    advice = "" if slash else ": name it as NAMESPACE/NAME"
    raise WhyError(f"there is no Service {key}{hint}{advice}")


def _notes(found: ClusterInspection, key: NamespacedName, states: States, *, asked: bool) -> list[str]:
    service = found.snapshot.services[key]
    notes = []
    if service.type != LOAD_BALANCER:
        notes.append(f"it is of type {service.type}, so it has no address to announce")
    elif not announced_addresses(service):
        decision = found.decisions.get(key)
        refusal = decision.refusal if decision else None
        reason = (
            f": {refusal.text}; {refusal.advice}" if refusal else ": does a controller run (narthex lb controller)?"
        )
        notes.append(f"its status has no address{reason}")
    silent = [name.name for name in sorted(found.snapshot.nodes) if name.name not in states]
    if asked and silent and notes == []:
        notes.append(
            f"no announcer could be asked on {', '.join(silent)}, neither at the node nor through the API server: what others or the "
            "objects say is shown; bind healthzBindAddress to an address that others reach, or allow the verb get on nodes/proxy"
        )
    return notes


def _states(snapshot: Snapshot, port: int, access: Access | None) -> States:
    """Query the announcers of all nodes, directly, and others through the API server; return the states of those that respond."""
    ways = {key.name: (*node.internal_ips, *node.external_ips) for key, node in sorted(snapshot.nodes.items())}
    reachable = {name: addresses[0] for name, addresses in ways.items() if addresses}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda address: _ask(address, port), reachable.values())
        found = {name: state for name, state in zip(reachable, answers, strict=True) if state is not None}
    missing = ways.keys() - found.keys()
    return {**found, **asyncio.run(_through_api(access, sorted(missing), port))} if access and missing else found


async def _through_api(access: Access, nodes: Sequence[str], port: int) -> States:
    """Query announcers through the API server's proxy of nodes, which a machine outside the cluster's network needs."""
    places = asyncio.Semaphore(_AT_ONCE)
    async with aclosing(ApiClient(access)) as api:
        answers = await asyncio.gather(*(_ask_api(api, places, node, port) for node in nodes))
    return {node: state for node, state in zip(nodes, answers, strict=True) if state is not None}


async def _ask_api(api: ApiClient, places: asyncio.Semaphore, node: str, port: int) -> why.AnnouncerStatus | None:
    path = f"/api/v1/nodes/http:{node}:{port}/proxy{PATH}"
    try:
        async with places, asyncio.timeout(_PROXY_SECONDS):
            code, body = await api.exchange("GET", path, None, "application/json")
    except (Unreachable, TimeoutError):
        return None
    return why.read_status(body) if code == 200 and len(body) <= _MOST_BYTES else None


def _ask(address: str, port: int) -> why.AnnouncerStatus | None:
    host = f"[{address}]" if family_of(address) is IPFamily.IPV6 else address
    connection = http.client.HTTPConnection(host, port, timeout=_ASK_SECONDS)
    try:
        connection.request("GET", PATH)
        answer = connection.getresponse()
        data = answer.read(_MOST_BYTES)
        return why.read_status(data) if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
