"""The plan: what must happen to every packet that concerns a Service, decided once. Read this file first.

A plan speaks Service, not netfilter. For every frontend and every class of sender it holds a decision, so no backend
has anything to interpret: it only says how these decisions look in its kernel tool. One plan covers one IP family of
one node. ADR 0001 tells why the cut is here.

A packet's fate is one look-up:

1. Find the frontend by destination address, protocol and port; an exact address wins over the node's addresses.
2. `allow_from` that does not hold the source: dropped, whatever the rest says.
3. The sender's class picks the decision: `pod`, `node` or `other`; the first class that fits counts.
4. Forward: one endpoint of the pool, each equally likely, or the one remembered when the Service has affinity. The
   source is masqueraded when the decision says so, and always when the endpoint drawn is the sender itself (hairpin).
5. No frontend: a known ClusterIP rejects, a free address of a ServiceCIDR drops, and nothing else is ours.
"""

from __future__ import annotations

import enum
import itertools
import typing
from collections.abc import Iterable, Mapping

import msgspec

from narthex.model.names import NamespacedName, ServicePortName
from narthex.model.net import IPFamily, Protocol, in_any


class Sender(enum.Enum):
    """Who sent the packet. First match wins."""

    POD = "pod"
    """A pod of this cluster, by the detect-local mode (rows of group 6)."""
    NODE = "node"
    """This node: the source is one of its own addresses."""
    OTHER = "other"
    """Anyone else."""

    __hash__ = object.__hash__  # as `model.net.IPFamily`


class Scope(enum.Enum):
    """Which of a Service port's two endpoint sets."""

    CLUSTER = "cluster"
    LOCAL = "local"

    __hash__ = object.__hash__  # as `model.net.IPFamily`


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Send to an endpoint of the pool with this scope. The pool exists and is not empty."""

    scope: Scope
    masquerade: bool


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Throw away in silence: endpoints exist, but policy leaves none (row 13.3)."""


class Reject(msgspec.Struct, frozen=True, tag=True):
    """Refuse at once: no endpoint anywhere (row 13.1)."""


Decision = Forward | Drop | Reject


class FrontendKind(enum.Enum):
    """How a Service is reached; the value is how people say it."""

    CLUSTER_IP = "cluster IP"
    EXTERNAL_IP = "external IP"
    LOAD_BALANCER = "load balancer IP"
    NODE_PORT = "node port"

    __hash__ = object.__hash__  # as `model.net.IPFamily`


class Frontend(msgspec.Struct, frozen=True, kw_only=True):
    """One way in, and what becomes of each class of sender there."""

    kind: FrontendKind
    address: str | None
    """None: the node's addresses, as `Plan.node_ports` limits them."""
    protocol: Protocol
    port: int
    allow_from: tuple[str, ...] | None = None
    """Networks that may use it, without overlap; None: everyone. Others are dropped (row 10.3)."""
    pod: Decision
    node: Decision
    other: Decision

    def decision(self, sender: Sender) -> Decision:
        """The cell for one class of sender."""
        return self.pod if sender is Sender.POD else self.node if sender is Sender.NODE else self.other

    @property
    def match(self) -> Match:
        """What a packet must have to arrive here."""
        return self.address, self.protocol, self.port


Match = tuple[str | None, Protocol, int]
"""Destination address (None: the node's), protocol and port."""


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """One address and port that connections are sent to."""

    address: str
    port: int
    local: bool = False
    """It runs on this node."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoints that a decision may draw from; never empty, sorted by address text and port (row 2.12)."""

    endpoints: tuple[Endpoint, ...]
    reason: str = ""
    """Why just these: for people ("ready", "ready and hinted for zone a", "terminating, none is ready")."""


class ServicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """All about one Service port. An unchanged Service keeps the identical object from plan to plan."""

    name: ServicePortName
    frontends: tuple[Frontend, ...]
    cluster: Pool | None = None
    """None when no decision uses it."""
    local: Pool | None = None
    serving: tuple[Endpoint, ...] = ()
    """All endpoints of the Service port that serve, whatever policy and topology choose: a connection to one of these
    may live on (rows 18.2, 18.6)."""
    resting: tuple[Endpoint, ...] = ()
    """Endpoints that the Service port has but that do not serve. Nothing new is sent there; what was begun with TCP or
    SCTP may still end well (row 3.11)."""
    affinity_seconds: int | None = None
    """ClientIP affinity: a client keeps its endpoint while it returns within this time, across all frontends of the
    Service port on this node (rows 14.1, 14.2), as long as the endpoint is in the pool that the decision names."""

    def pool(self, scope: Scope) -> Pool:
        """The pool of a Forward decision."""
        pool = self.cluster if scope is Scope.CLUSTER else self.local
        assert pool is not None, f"{self.name}: a decision names the pool {scope.value}, which is not there"
        return pool


class PodDetector(msgspec.Struct, frozen=True, kw_only=True):
    """How a pod is told from others. At most one of the three is set; none: detection is off (row 5.3)."""

    cidrs: tuple[str, ...] = ()
    """Modes ClusterCIDR and NodeCIDR: the source lies in one of these (of this family)."""
    interface: str = ""
    """Mode BridgeInterface: came in on exactly this interface."""
    interface_prefix: str = ""
    """Mode InterfaceNamePrefix: came in on an interface whose name begins so."""

    @property
    def enabled(self) -> bool:
        """Whether pods can be told from others at all."""
        return bool(self.cidrs or self.interface or self.interface_prefix)

    def matches(self, source: str, iif: str) -> bool:
        """Whether a packet with this source, come in on this interface (empty: made here), is from a pod."""
        if self.cidrs:
            return in_any(self.cidrs, source)
        if self.interface:
            return iif == self.interface
        return bool(self.interface_prefix) and iif.startswith(self.interface_prefix)


class NodePorts(msgspec.Struct, frozen=True, kw_only=True):
    """On which of the node's own addresses node ports answer (rows of group 9)."""

    cidrs: tuple[str, ...] | None = None
    """Own addresses inside one of these, read at the moment of the packet; None: all own addresses; (): none."""
    localhost: bool = False
    """127.0.0.0/8 too, always masqueraded (row 9.9). Without it loopback never answers; `::1` never does."""


class ServiceHealthCheck(msgspec.Struct, frozen=True):
    """What a balancer is told that asks this node for a Service (rows of group 16)."""

    port: int
    """`healthCheckNodePort`."""
    local_ready: int
    """Distinct addresses of ready endpoints on this node; terminating ones do not count (row 16.3)."""


class FrontendConflict(msgspec.Struct, frozen=True, kw_only=True):
    """Two Service ports claim one match; `winner` has it (by kind, then by name; never by arrival)."""

    match: Match
    kind: FrontendKind
    winner: ServicePortName
    loser: ServicePortName


class Lineage:
    """Which plan this one was made from and which Service ports differ from it, so that later stages skip the rest.

    Only ever a short cut: two plans with different lineage are equal when their content is.
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
    """What a later stage keeps of one Service port."""

    @property
    def service(self) -> ServicePlan: ...


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All decisions of one node for one IP family."""

    family: IPFamily
    node_name: str = ""
    services: Mapping[ServicePortName, ServicePlan]
    pods: PodDetector = PodDetector()
    node_ports: NodePorts = NodePorts()
    node_addresses: tuple[str, ...] = ()
    """This node's own addresses of the family as they were when the plan was made, without loopback and without those
    that only Services have. For dataplanes that cannot ask the kernel at the moment of the packet."""
    service_cidrs: tuple[str, ...] = ()
    """Known ServiceCIDRs of this family: an address in them that no Service has is dropped (row 5.9)."""
    masquerade_mark: int = 0x4000
    """The one bit of the packet mark that may be touched."""
    drop_invalid: bool = True
    """What connection tracking calls invalid must not end a connection (rows 19.7, 30.9). Off where the kernel is told
    to be liberal: then such packets are none of ours to judge."""
    conflicts: tuple[FrontendConflict, ...] = ()
    health_checks: Mapping[NamespacedName, ServiceHealthCheck] = {}
    """LoadBalancer Services with Local policy that have a health check port."""
    lineage: Lineage = msgspec.field(default_factory=Lineage)

    def differing(self, number: int, known: Mapping[ServicePortName, RenderedService]) -> Iterable[ServicePortName]:
        """Service ports that may differ from what was rendered of the plan with this lineage number (0: nobody knows
        which), when `known` is what was rendered of each."""
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
    """A cell of the table that a backend cannot, or on purpose does not, express as the plan says.

    A backend lists its deviations as data; `evaluate` takes them into account, and the tests demand exactly them. Each
    has a name and a sentence for people, which says what happens where the backend deviates.
    """

    words: str

    def __new__(cls, value: str, words: str) -> Deviation:
        """A member with its sentence."""
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
    # Row 25.1; userspace.
    RELAYED = (
        "relayed",
        "the node itself connects to the endpoint, which never sees the client's address",
    )
    # Row 25.8; userspace.
    NO_SCTP = (
        "no-sctp",
        "SCTP is refused where it would be forwarded",
    )
    # Row 7.9; ipvs.
    ONE_POOL_PER_ADDRESS = (
        "one-pool-per-address",
        "pods and this node get the endpoints that others get: this node's own, under a Local policy",
    )
    # Rows 5.8, 24.3; ipvs.
    BOUND_ADDRESS_GUARD = (
        "bound-address-guard",
        "an unknown port of any address that only Services have is rejected, health check ports aside",
    )
    # Row 5.5; ipvs.
    CLUSTER_IP_SOURCE = (
        "cluster-ip-source",
        "a connection from a cluster IP to a cluster IP is masqueraded, even where pods cannot be told",
    )
    # Rows 14.2, 14.6; ipvs.
    AFFINITY_PER_ADDRESS = (
        "affinity-per-address",
        "each address and port of a Service remembers its clients for itself",
    )
