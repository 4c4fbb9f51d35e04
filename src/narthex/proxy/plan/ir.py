"""The plan: what happens to every packet to a Service, decided once. Read this file first.

A plan speaks of Services, not of netfilter. For every frontend and every class of sender it holds a decision, so a
backend does not interpret policy: it expresses these decisions for its kernel tool. One plan covers one IP family of
one node. ADR 0001 explains why the cut is here.

The handling of a packet is one lookup:

1. Find the frontend by destination address, protocol, and port. An exact address takes precedence over the node's
   addresses.
2. If `allow_from` does not contain the source, drop the packet, whatever the decisions say.
3. The class of the sender selects the decision: `pod`, `node`, or `other`. The first class that matches counts.
4. Forward: select one endpoint of the pool as `ServicePlan.balancing` says, by default each with the same probability, or
   the remembered one when the Service has session affinity. Masquerade the source if the decision says so, and always if the endpoint is the sender itself
   (hairpin).
5. No frontend: reject at a known ClusterIP, drop at a free address of a ServiceCIDR, and leave everything else alone.
"""

from __future__ import annotations

import enum
import itertools
import typing
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from narthex.model import IPFamily, NamespacedName, Protocol, ServicePortName, in_any


class Sender(enum.Enum):
    """Class of the sender of a packet. The first member that matches counts."""

    POD = "pod"
    """A pod of this cluster, according to the detect-local mode (rows of group 6)."""
    NODE = "node"
    """This node: the source is one of its own addresses."""
    OTHER = "other"
    """Any other sender."""

    __hash__ = object.__hash__  # as `model.net.IPFamily`


class Scope(enum.Enum):
    """One of the two endpoint sets of a Service port: of the whole cluster, or of this node."""

    CLUSTER = "cluster"
    LOCAL = "local"

    __hash__ = object.__hash__  # as `model.net.IPFamily`


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Send to an endpoint of the pool with this scope. The pool exists and is not empty."""

    scope: Scope
    masquerade: bool


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Discard the packet: endpoints exist, but policy leaves none (row 13.3)."""


class Reject(msgspec.Struct, frozen=True, tag=True):
    """Refuse the connection with an error: there is no endpoint in the cluster (row 13.1)."""


Decision = Forward | Drop | Reject


class FrontendKind(enum.Enum):
    """Kind of address at which a Service is reached. The value is used in messages."""

    CLUSTER_IP = "cluster IP"
    EXTERNAL_IP = "external IP"
    LOAD_BALANCER = "load balancer IP"
    NODE_PORT = "node port"

    __hash__ = object.__hash__  # as `model.net.IPFamily`


class Frontend(msgspec.Struct, frozen=True, kw_only=True):
    """An address and port of a Service, and the decision for each class of sender."""

    kind: FrontendKind
    address: str | None
    """None: the addresses of the node, as limited by `Plan.node_ports`."""
    protocol: Protocol
    port: int
    allow_from: tuple[str, ...] | None = None
    """Source networks that may connect, without overlaps; None: all. Packets from other sources are dropped (row 10.3).
    """
    pod: Decision
    node: Decision
    other: Decision

    def decision(self, sender: Sender) -> Decision:
        """Return the decision for one class of sender."""
        return self.pod if sender is Sender.POD else self.node if sender is Sender.NODE else self.other

    @property
    def match(self) -> Match:
        """Destination address, protocol, and port of the packets that arrive here."""
        return self.address, self.protocol, self.port


Match = tuple[str | None, Protocol, int]
"""Destination address (None: the node's addresses), protocol, and port."""


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """Address and port of a backend of a Service."""

    address: str
    port: int
    local: bool = False
    """The endpoint runs on this node."""


class OwnEndpoint(typing.NamedTuple):
    """An endpoint of this node."""

    address: str
    protocol: Protocol
    port: int


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Endpoints that a decision may select from; never empty, sorted by address text and port (row 2.12)."""

    endpoints: tuple[Endpoint, ...]
    reason: str = ""
    """Why these endpoints, for people: "ready", "ready and hinted for zone a", "terminating, none is ready"."""


class Balancing(enum.Enum):
    """How a new connection gets one of the endpoints of a pool. The value is that of the annotation."""

    RANDOM = "random"
    """Each endpoint with the same probability."""
    LEAST_CONNECTIONS = "least-connections"
    """The one with fewer open connections from this node, of two that are drawn at random."""
    MAGLEV = "maglev"
    """The one that the client's source address is hashed to, the same on every node (`plan.maglev`)."""

    __hash__ = object.__hash__  # as `model.net.IPFamily`


class ServicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """All decisions for one Service port. An unchanged Service port keeps the identical object from plan to plan."""

    name: ServicePortName
    frontends: tuple[Frontend, ...]
    cluster: Pool | None = None
    """None if no decision uses it."""
    local: Pool | None = None
    serving: tuple[Endpoint, ...] = ()
    """All serving endpoints of the Service port, regardless of policy and topology. Established connections to them may
    continue (rows 18.2, 18.6).
    """
    not_serving: tuple[Endpoint, ...] = ()
    """Endpoints that are not serving. They get no new connections; established TCP and SCTP connections may still end
    properly (row 3.11).
    """
    affinity_seconds: int | None = None
    """ClientIP session affinity: a client keeps its endpoint if it returns within this time, across all frontends of
    the Service port on this node (rows 14.1, 14.2), as long as the endpoint is in the pool that the decision names.
    """
    balancing: Balancing = Balancing.RANDOM
    """RANDOM if `affinity_seconds` is set."""

    @property
    def pools(self) -> dict[Scope, Pool]:
        """The pools that decisions use."""
        pools = {Scope.CLUSTER: self.cluster, Scope.LOCAL: self.local}
        return {scope: pool for scope, pool in pools.items() if pool is not None}

    def own_endpoints(self) -> Iterator[OwnEndpoint]:
        """Yield the endpoints in the pools that the slices of the Service place on this node."""
        for pool in self.pools.values():
            for end in pool.endpoints:
                if end.local:
                    yield OwnEndpoint(end.address, self.name.protocol, end.port)

    @property
    def endpoint_count(self) -> int:
        """Number of distinct endpoints in the pools."""
        if self.cluster is not None and self.local is not None:
            return len({*self.cluster.endpoints, *self.local.endpoints})
        return sum(len(pool.endpoints) for pool in self.pools.values())

    def pool(self, scope: Scope) -> Pool:
        """Return the pool of a Forward decision."""
        pool = self.cluster if scope is Scope.CLUSTER else self.local
        assert pool is not None, f"{self.name}: a decision names the pool {scope.value}, which is not there"
        return pool


class PodDetector(msgspec.Struct, frozen=True, kw_only=True):
    """How packets from pods are recognized. At most one of the three is set; none: detection is off (row 5.3)."""

    cidrs: tuple[str, ...] = ()
    """Modes ClusterCIDR and NodeCIDR: the source is in one of these networks of the family."""
    interface: str = ""
    """Mode BridgeInterface: the packet arrived on this interface."""
    interface_prefix: str = ""
    """Mode InterfaceNamePrefix: the packet arrived on an interface with this name prefix."""

    @property
    def enabled(self) -> bool:
        """True if pods can be recognized at all."""
        return bool(self.cidrs or self.interface or self.interface_prefix)

    @property
    def pod_interface(self) -> str:
        """An interface on which packets from pods arrive; empty if their source alone counts."""
        return self.interface or (f"{self.interface_prefix}0"[:15] if self.interface_prefix else "")

    def matches(self, source: str, iif: str) -> bool:
        """Return True if a packet with this source and input interface (empty: sent by this node) comes from a pod."""
        if self.cidrs:
            return in_any(self.cidrs, source)
        if self.interface:
            return iif == self.interface
        return bool(self.interface_prefix) and iif.startswith(self.interface_prefix)


class NodePorts(msgspec.Struct, frozen=True, kw_only=True):
    """The node's own addresses on which node ports answer (rows of group 9)."""

    cidrs: tuple[str, ...] | None = None
    """Own addresses in one of these networks, evaluated when the packet arrives; None: all own addresses; (): none."""
    localhost: bool = False
    """127.0.0.0/8 as well, always masqueraded (row 9.9). Otherwise rules never answer on loopback, and on `::1` in no case."""
    relayed: bool = False
    """A relay listens on 127.0.0.1 and `::1`, and treats clients like senders outside of the cluster (row 9.13)."""


class ServiceHealthCheck(msgspec.Struct, frozen=True):
    """The answer of this node to the health check of an external load balancer for a Service (rows of group 16)."""

    port: int
    """`healthCheckNodePort`."""
    local_ready: int
    """Distinct addresses of ready endpoints on this node; terminating endpoints do not count (row 16.3)."""


class FrontendConflict(msgspec.Struct, frozen=True, kw_only=True):
    """Two Service ports claim the same match. `winner` gets it, decided by kind and then by name, never by arrival."""

    match: Match
    kind: FrontendKind
    winner: ServicePortName
    loser: ServicePortName


class Lineage:
    """The previous plan, and the Service ports that differ from it, so that later stages can skip all others.

    A shortcut only: plans with different lineage are equal if their content is.
    """

    __slots__ = ("changed", "number", "parent")
    _numbers = itertools.count(1)

    def __init__(self, parent: Lineage | None = None, changed: frozenset[ServicePortName] = frozenset()) -> None:
        self.number = next(self._numbers)
        self.parent = parent.number if parent is not None else 0
        self.changed = changed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lineage)

    def __hash__(self) -> int:
        return 0


class RenderedService(typing.Protocol):
    """What a backend keeps of one Service port."""

    @property
    def service(self) -> ServicePlan:
        """The plan of the Service port that was rendered."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All decisions of one node for one IP family."""

    family: IPFamily
    node_name: str = ""
    services: Mapping[ServicePortName, ServicePlan]
    pods: PodDetector = PodDetector()
    node_ports: NodePorts = NodePorts()
    node_addresses: tuple[str, ...] = ()
    """The node's own addresses of the family when the plan was made, without loopback and without addresses of
    Services. For dataplanes that cannot ask the kernel when a packet arrives.
    """
    service_cidrs: tuple[str, ...] = ()
    """Known ServiceCIDRs of the family. Packets to a free address in them are dropped (row 5.9)."""
    masquerade_mark: int = 0x4000
    """The only bit of the packet mark that may be changed."""
    drop_invalid: bool = True
    """Packets that connection tracking considers invalid must not end a connection (rows 19.7, 30.9). False if the
    kernel is set to be liberal: then such packets are not filtered.
    """
    conflicts: tuple[FrontendConflict, ...] = ()
    health_checks: Mapping[NamespacedName, ServiceHealthCheck] = {}
    """LoadBalancer Services with Local policy and a health check node port."""
    lineage: Lineage = msgspec.field(default_factory=Lineage)

    def own_endpoints(self) -> Iterator[OwnEndpoint]:
        """Yield the endpoints of this node.

        Slices of different Services may contradict each other about an address. A pod runs on one node, so that an address is this
        node's own as soon as one Service port says so, for the question whether the pod's connections to itself need this node.
        Pools and topology keep what their own slices say.
        """
        for service in self.services.values():
            yield from service.own_endpoints()

    def differing(self, number: int, known: Mapping[ServicePortName, RenderedService]) -> Iterable[ServicePortName]:
        """Return the Service ports that may differ from an earlier rendering.

        Args:
            number: Lineage number of the plan that was rendered; 0: unknown.
            known: What was rendered of each Service port.
        """
        if self.lineage.number == number:
            return ()
        if number and self.lineage.parent == number:
            return self.lineage.changed
        services = self.services
        gone = [name for name in known if name not in services]
        return gone + [
            name
            for name, service in services.items()
            if (held := known.get(name)) is None or held.service is not service
        ]


class Deviation(enum.Enum):
    """A decision that a backend cannot express, or on purpose does not express, as the plan says.

    A backend lists its deviations as data. `evaluate` takes them into account, and the tests demand exactly these. Each
    member has a name and a sentence for people.
    """

    words: str

    def __new__(cls, value: str, words: str) -> Deviation:
        """Create a member with its sentence."""
        member = object.__new__(cls)
        member._value_ = value
        member.words = words
        return member

    # Rows 5.8, 5.9; iptables.
    NO_CLUSTER_IP_GUARD = (
        "cluster-ip-guard",
        "an unknown port of a cluster IP and a free address of a ServiceCIDR are left alone",
    )
    # Row 10.13; iptables.
    REJECT_BEFORE_RANGES = (
        "reject-before-ranges",
        "a Service without endpoints rejects sources that its ranges would drop",
    )
    # Row 12.4; nftables.
    HAIRPIN_LOCAL_ONLY = (
        "hairpin-local-only",
        "connections of a pod to itself are masqueraded for this node's own endpoints only",
    )
    # Row 12.4; ipvs.
    HAIRPIN_PER_PORT = (
        "hairpin-per-port",
        "where slices contradict each other about an address, it is this node's own for the ports that a slice says so of",
    )
    # Row 25.1; userspace.
    RELAYED = ("relayed", "the node itself connects to the endpoint, which never sees the client's address")
    # Row 25.8; userspace.
    NO_SCTP = ("no-sctp", "SCTP is refused where it would be forwarded")
    # Row 7.9; ipvs.
    ONE_POOL_PER_ADDRESS = (
        "one-pool-per-address",
        "pods and this node get the endpoints that others get: this node's own, under a Local policy",
    )
    # Rows 5.8, 24.3; ipvs.
    BOUND_ADDRESS_GUARD = (
        "bound-address-guard",
        "an unknown port of any address that only Services have is rejected, except for health check ports",
    )
    # Row 5.5; ipvs.
    CLUSTER_IP_SOURCE = (
        "cluster-ip-source",
        "a connection from a cluster IP to a cluster IP is masqueraded, even where pods cannot be recognized",
    )
    # Rows 14.2, 14.6; ipvs.
    AFFINITY_PER_ADDRESS = (
        "affinity-per-address",
        "each address and port of a Service remembers its clients for itself",
    )
    # iptables, userspace.
    NO_CONSISTENT_HASHING = (
        "no-consistent-hashing",
        "a Service that asks for consistent hashing gets the endpoints that other Services would get",
    )
    # ipvs.
    HASH_OF_THE_KERNEL = (
        "hash-of-the-kernel",
        "consistent hashing uses a table of IPVS's own, so that only the kernel knows a client's endpoint",
    )
    # nftables, iptables, userspace.
    NO_LEAST_CONNECTIONS = (
        "no-least-connections",
        "a Service that asks for the least connections gets the endpoints that other Services would get",
    )
