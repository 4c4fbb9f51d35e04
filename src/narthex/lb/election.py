"""Election of the node that announces each load balancer address, with a reason for every node (rows A1-A5, A9, A10).

All announcers compute the election independently from the same objects and the same membership, and reach the same result:
among the eligible nodes, the first in the order of the SHA-256 of node name and first Service address. `lb/handover.py`
handles nodes whose views differ temporarily; `lb/l2.py` encodes the announcements.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from operator import is_

import msgspec

from narthex.lb.heartbeat import PeerState
from narthex.lb.pools import Pools, validate_pools
from narthex.lb.resources import selects_node, selects_pool, selects_service
from narthex.lb.service_status import ALLOCATED_FROM, LOAD_BALANCER, annotation
from narthex.model import IPAddressPool, L2Advertisement, NamespacedName, Node, Service, Slices, Snapshot

EXCLUDE = "node.kubernetes.io/exclude-from-external-load-balancers"


class AnnouncementReason(enum.Enum):
    """Why a node announces an address, or does not. The value is a CamelCase word for conditions and metrics."""

    ANNOUNCES = "Announces"
    ELECTION_LOST = "AnotherNodeAnnounces"
    NOT_IN_A_POOL = "AddressInNoPool"
    NOT_SELECTED = "NotSelectedByAdvertisement"
    NO_ENDPOINT = "NoEndpoint"
    NODE_LOST = "NodeLost"
    NO_ANNOUNCER = "NoAnnouncer"
    LEAVING = "AnnouncerEnds"
    NETWORK_UNAVAILABLE = "NetworkUnavailable"
    NODE_SELECTOR = "NodeNotSelected"
    NO_INTERFACE = "InterfaceMissing"
    NO_LOCAL_ENDPOINT = "NoLocalEndpoint"
    SHARED_ELSEWHERE = "SharerNotServedHere"
    NOT_READY = "NodeNotReady"
    EXCLUDED = "NodeExcluded"


class NodeAnnouncerState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one node's announcer."""

    state: PeerState = PeerState.ALIVE
    leaving: bool = False
    links: tuple[str, ...] | None = None
    """Links on which it can answer; None if unknown, which means any."""
    standing_back: bool = False
    node_gone: bool = False
    """The announcer is lost and the node does not respond either: its endpoints are gone too."""


NO_ANNOUNCER = NodeAnnouncerState(state=PeerState.UNHEARD)


class ElectionInput(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an election depends on."""

    snapshot: Snapshot
    announcers: Mapping[str, NodeAnnouncerState]
    """By node name; other nodes have no announcer."""
    ignore_exclude_label: bool = False

    @property
    def nodes(self) -> dict[str, Node]:
        """All candidate nodes: those with a Node object, and those with an announcer, which may have none without an API server."""
        known = {key.name: node for key, node in self.snapshot.nodes.items()}
        return {name: known.get(name) or Node(name=name) for name in sorted({*known, *self.announcers})}


class NodeEligibility(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one node can announce one address, and why."""

    node: str
    reason: AnnouncementReason
    text: str

    @property
    def eligible(self) -> bool:
        """True if the node could announce the address."""
        return self.reason in (AnnouncementReason.ANNOUNCES, AnnouncementReason.ELECTION_LOST)


class AddressElection(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the election for one address."""

    address: str
    services: tuple[NamespacedName, ...]
    """Services that have the address, in order."""
    first: str = ""
    """First address of the first Service; the input of the election hash."""
    pool: str = ""
    order: tuple[str, ...] = ()
    """Eligible nodes, the best first."""
    verdicts: tuple[NodeEligibility, ...] = ()
    """One entry per node, ordered by node name."""
    interfaces: tuple[str, ...] | None = None
    """Links that the holder may use, from its advertisements; None means all."""
    notes: tuple[str, ...] = ()

    @property
    def holder(self) -> str:
        """The elected node; empty if there is none."""
        return self.order[0] if self.order else ""

    def verdict(self, node: str) -> NodeEligibility | None:
        """Return the eligibility of a node, or None."""
        return next((each for each in self.verdicts if each.node == node), None)


def announced_addresses(service: Service) -> tuple[str, ...]:
    """Return the status addresses of a Service that a node may have to answer for; `ipMode: Proxy` is excluded (row L2)."""
    if service.type != LOAD_BALANCER:
        return ()
    return tuple(dict.fromkeys(each.ip for each in service.ingress if not each.proxy))


def rank(node: str, first_address: str) -> bytes:
    """Return the sort key of a node in the election for a Service; the smallest wins.

    Same hash as MetalLB, so that addresses stay in place when the announcers are replaced.
    """
    return hashlib.sha256(f"{node}#{first_address}".encode()).digest()


class AddressElector:
    """Runs elections and caches results: an endpoint change only affects the addresses of its Service."""

    def __init__(self) -> None:
        self._common: tuple[object, ...] = ()
        self._known: dict[str, tuple[tuple[object, ...], AddressElection]] = {}
        self._nodes: Mapping[str, Node] = {}
        self._pools = Pools()

    def elect(self, view: ElectionInput) -> Mapping[str, AddressElection]:
        """Return the election of each address."""
        snapshot = view.snapshot
        held = (snapshot.nodes, snapshot.address_pools, snapshot.l2_advertisements)
        common = (*map(id, held), view.announcers, view.ignore_exclude_label)
        if common != self._common[1:]:
            # Objects compared by identity must stay alive.
            self._common, self._known = (held, *common), {}
            self._nodes, self._pools = view.nodes, validate_pools(snapshot.address_pools.values())
        nodes, pools = self._nodes, self._pools
        before, self._known = self._known, {}
        for address, services in _sharers(snapshot).items():
            slices = [snapshot.slices.get(service.key) for service in services]
            made_of = (*services, *slices)
            known = before.get(address)
            if known is None or len(known[0]) != len(made_of) or not all(map(is_, known[0], made_of)):
                known = made_of, _decide(address, services, nodes, pools, view)
            self._known[address] = known
        return {address: decision for address, (_, decision) in self._known.items()}


def elect(view: ElectionInput) -> Mapping[str, AddressElection]:
    """Return the election of each address, without a cache."""
    return AddressElector().elect(view)


def _sharers(snapshot: Snapshot) -> dict[str, list[Service]]:
    """Return the Services of each address, in the order of their names."""
    sharers: dict[str, list[Service]] = {}
    for _, service in sorted(snapshot.services.items()):
        for address in announced_addresses(service):
            sharers.setdefault(address, []).append(service)
    return sharers


def _pool_of(address: str, services: Sequence[Service], pools: Pools) -> IPAddressPool | None:
    """Return the pool of an address. A refused pool assigns nothing, but its assigned addresses are still announced."""
    found = pools.of(address)
    if found is not None:
        return found.object
    refused = (pools.refusal_of(annotation(service, ALLOCATED_FROM)) for service in services)
    return next((each.object for each in refused if each is not None), None)


def _decide(
    address: str, services: list[Service], nodes: Mapping[str, Node], pools: Pools, view: ElectionInput
) -> AddressElection:
    snapshot = view.snapshot
    keys = tuple(service.key for service in services)
    pool = _pool_of(address, services, pools)
    if pool is None:
        text = f"{address} is in no known IPAddressPool, so another speaker must announce it"
        return _unannounced(address, keys, nodes, AnnouncementReason.NOT_IN_A_POOL, text)
    every = [each for _, each in sorted(snapshot.l2_advertisements.items()) if selects_pool(each, pool)]
    chosen = [each for each in every if any(selects_service(each, service) for service in services)]
    if every and not chosen:
        names = ", ".join(each.name for each in every)
        text = f"the advertisements of pool {pool.name} ({names}) select other Services: see their serviceSelectors"
        return _unannounced(address, keys, nodes, AnnouncementReason.NOT_SELECTED, text, pool)
    notes = []
    if not every:
        notes.append(f"no L2Advertisement selects pool {pool.name}: it is announced on all links of all nodes")
    backed = {service.key: _Backing(snapshot.slices.get(service.key), view.announcers) for service in services}
    serving = [service for service in services if backed[service.key].somewhere]
    if not serving:
        gone = sorted({name for each in backed.values() for name in each.gone})
        text = f"no endpoint of {_listed(keys)} can serve"
        text += f": those on {_listed(gone)} are gone with the node" if gone else ""
        return _unannounced(address, keys, nodes, AnnouncementReason.NO_ENDPOINT, text, pool)
    judge = _Judge(address, serving, chosen, backed, view)
    verdicts = {name: judge.of(node) for name, node in nodes.items()}
    notes += _soften(verdicts, judge)
    order = _order(verdicts, services[0], view)
    notes += [
        f"{service.key} is not served: it is Local, shares the address, and has no endpoint on {order[0]}"
        for service in (judge.unserved(order[0]) if order else ())
    ]
    final = tuple(_final(verdict, order, services[0]) for verdict in verdicts.values())
    holder = nodes[order[0]] if order else None
    return AddressElection(
        address=address,
        services=keys,
        first=announced_addresses(services[0])[0],
        pool=pool.name,
        order=order,
        verdicts=final,
        interfaces=_interfaces(chosen, holder) if holder else None,
        notes=tuple(notes),
    )


def _unannounced(
    address: str,
    services: tuple[NamespacedName, ...],
    nodes: Iterable[str],
    reason: AnnouncementReason,
    text: str,
    pool: IPAddressPool | None = None,
) -> AddressElection:
    """Return an election without eligible nodes, for one common reason."""
    return AddressElection(
        address=address,
        services=services,
        pool=pool.name if pool else "",
        verdicts=tuple(NodeEligibility(node=name, reason=reason, text=text) for name in nodes),
    )


class _Backing:
    """The nodes with serving endpoints of a Service: ready ones, and terminating ones that still serve (row A4).

    Endpoints on a lost node are gone long before Kubernetes reports it.
    """

    def __init__(self, slices: Slices | None, announcers: Mapping[str, NodeAnnouncerState]) -> None:
        able = [each for part in (slices or {}).values() for each in part.endpoints if each.ready or each.serving]
        away = {name for name, each in announcers.items() if each.node_gone}
        self.gone = {each.node_name for each in able} & away
        left = [each for each in able if each.node_name not in away]
        self.somewhere = bool(left)
        self.nodes = frozenset(each.node_name for each in left)


class _Judge:
    """Determines the eligibility of each node for one address, before the election."""

    def __init__(
        self,
        address: str,
        services: Sequence[Service],
        advertisements: Sequence[L2Advertisement],
        backed: Mapping[NamespacedName, _Backing],
        view: ElectionInput,
    ) -> None:
        """Store the inputs; each of `services` has a serving endpoint on some node."""
        self._address = address
        self._services = services
        self._advertisements = advertisements
        self._backed = backed
        self._view = view

    def of(self, node: Node) -> NodeEligibility:
        """Return the first reason that excludes a node, or ELECTION_LOST until the election is decided."""
        announcer = self._view.announcers.get(node.name, NO_ANNOUNCER)
        reason, text = self._kept_out(node, announcer) or (AnnouncementReason.ELECTION_LOST, "")
        return NodeEligibility(node=node.name, reason=reason, text=text)

    def unserved(self, node: str) -> list[Service]:
        """Return the Services that need a local endpoint and have none on the node."""
        local = [service for service in self._services if service.external_policy_local]
        return [service for service in local if node not in self._backed[service.key].nodes]

    def _kept_out(self, node: Node, announcer: NodeAnnouncerState) -> tuple[AnnouncementReason, str] | None:
        if announcer.state in _DEAD:
            reason, text = _DEAD[announcer.state]
            return reason, text.format(node=node.name)
        if announcer.leaving:
            return AnnouncementReason.LEAVING, f"the announcer on {node.name} is shutting down"
        if node.network_unavailable:
            return AnnouncementReason.NETWORK_UNAVAILABLE, f"Node {node.name} has the condition NetworkUnavailable"
        fitting = [each for each in self._advertisements if selects_node(each, node.labels)]
        if self._advertisements and not fitting:
            names = _listed(each.name for each in self._advertisements)
            return AnnouncementReason.NODE_SELECTOR, f"the nodeSelectors of {names} do not select Node {node.name}"
        if announcer.links is not None:
            allowed = _interfaces(fitting, node)
            if not announcer.links:
                return AnnouncementReason.NO_INTERFACE, f"no broadcast link of {node.name} is up"
            if allowed is not None and not set(allowed) & set(announcer.links):
                have = _listed(announcer.links)
                return AnnouncementReason.NO_INTERFACE, f"only {_listed(allowed)} may be used; {node.name} has {have}"
        if unserved := self.unserved(node.name):
            names = _listed(each.key for each in unserved)
            if len(unserved) == len(self._services):
                text = f"externalTrafficPolicy is Local, and no endpoint of {names} is on {node.name}"
                return AnnouncementReason.NO_LOCAL_ENDPOINT, text
            return (
                AnnouncementReason.SHARED_ELSEWHERE,
                f"{names} shares the address, is Local, and has no endpoint on {node.name}",
            )
        if not self._view.ignore_exclude_label and node.label(EXCLUDE) is not None:
            return AnnouncementReason.EXCLUDED, f"Node {node.name} has the label {EXCLUDE}"
        if not node.ready:
            return AnnouncementReason.NOT_READY, f"Node {node.name} is not Ready"
        return None


_DEAD = {
    PeerState.UNHEARD: (
        AnnouncementReason.NO_ANNOUNCER,
        "no heartbeat from {node} yet: does an announcer run there, with the same key?",
    ),
    PeerState.LOST: (AnnouncementReason.NODE_LOST, "the announcer on {node} has timed out"),
    PeerState.LEFT: (AnnouncementReason.LEAVING, "the announcer on {node} has ended"),
}

_SOFT = (
    (AnnouncementReason.EXCLUDED, f"the label {EXCLUDE} would leave no node, so it is ignored"),
    (AnnouncementReason.NOT_READY, "no node that is Ready could answer, so that is ignored"),
    (AnnouncementReason.SHARED_ELSEWHERE, "no node has local endpoints of all Services that share the address"),
)
"""Exclusions that are lifted, one after the other, if otherwise no node would be eligible."""


def _soften(verdicts: dict[str, NodeEligibility], judge: _Judge) -> list[str]:
    """Lift soft exclusions until some node is eligible; return notes about it."""
    for reason, text in _SOFT:
        if any(each.eligible for each in verdicts.values()):
            return []
        found = {name: len(judge.unserved(name)) for name, each in verdicts.items() if each.reason is reason}
        for name, unserved in found.items():
            if unserved == min(found.values()):
                verdicts[name] = NodeEligibility(node=name, reason=AnnouncementReason.ELECTION_LOST, text="")
        if found:
            return [text]
    return []


def _order(verdicts: Mapping[str, NodeEligibility], first: Service, view: ElectionInput) -> tuple[str, ...]:
    address = announced_addresses(first)[0]
    able = [name for name, each in verdicts.items() if each.eligible]
    return tuple(
        sorted(able, key=lambda name: (view.announcers.get(name, NO_ANNOUNCER).standing_back, rank(name, address)))
    )


def _final(verdict: NodeEligibility, order: Sequence[str], first: Service) -> NodeEligibility:
    """Return the eligibility with the result of the election."""
    if not verdict.eligible:
        return verdict
    place = order.index(verdict.node) + 1
    by = f"{place}. of {len(order)} by the hash of node and {announced_addresses(first)[0]}"
    if place == 1:
        return NodeEligibility(node=verdict.node, reason=AnnouncementReason.ANNOUNCES, text=by)
    return NodeEligibility(node=verdict.node, reason=AnnouncementReason.ELECTION_LOST, text=f"{order[0]} has it; {by}")


def _interfaces(advertisements: Sequence[L2Advertisement], node: Node) -> tuple[str, ...] | None:
    """Return the links that a node may use (row A9); None means all."""
    fitting = [each for each in advertisements if selects_node(each, node.labels)]
    if not fitting or any(not each.interfaces for each in fitting):
        return None
    return tuple(sorted({name for each in fitting for name in each.interfaces}))


def _listed(things: Iterable[object]) -> str:
    return ", ".join(map(str, things))
