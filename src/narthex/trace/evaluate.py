"""The outcomes of a packet according to the plan: the reference for rules and kernel."""

from __future__ import annotations

from fractions import Fraction

from narthex.model import (
    Disposition,
    Host,
    Memory,
    Outcome,
    Packet,
    Protocol,
    Trace,
    WalkStep,
    contains,
    family_of,
    in_any,
    join_port,
    single,
)
from narthex.netfilter.describe import one_of
from narthex.proxy.plan.ir import (
    Balancing,
    Decision,
    Deviation,
    Endpoint,
    Forward,
    Frontend,
    FrontendKind,
    OwnEndpoint,
    Plan,
    Reject,
    Sender,
    ServicePlan,
)
from narthex.proxy.plan.maglev import client_slot, lookup_table

_OTHER_HASHING = frozenset({Deviation.NO_CONSISTENT_HASHING, Deviation.HASH_OF_THE_KERNEL})
NO_DEVIATIONS: frozenset[Deviation] = frozenset()


def evaluate(
    plan: Plan,
    packet: Packet,
    host: Host,
    deviations: frozenset[Deviation] = NO_DEVIATIONS,
    memory: Memory | None = None,
    now: float = 0.0,
) -> Trace:
    """Return what the plan decides for a packet of the plan's IP family.

    `deviations` are those of the backend. `memory` holds the affinity records; `now` is the current time in seconds.
    """
    found = find_frontend(plan, packet, host)
    if found is None:
        return _guarded(plan, packet, host, deviations)
    service, frontend = found
    sender = sender_of(plan, packet, host)
    decision = _less(frontend.decision(sender), plan, frontend, packet, deviations)
    without_sctp = Deviation.NO_SCTP in deviations and packet.protocol is Protocol.SCTP
    if without_sctp and isinstance(decision, Forward):
        decision = Reject()
    steps = [WalkStep(where="frontend", what=f"{service.name} by its {frontend.kind.value}", why=_match_text(frontend))]
    refused = isinstance(decision, Reject) and Deviation.REJECT_BEFORE_RANGES in deviations
    if frontend.allow_from is not None and not in_any(frontend.allow_from, packet.source) and not refused:
        steps.append(
            WalkStep(where="source ranges", what="drop", why=f"{packet.source} is in none of the allowed ranges")
        )
        return single(packet, Disposition.DROPPED, steps)
    steps.append(WalkStep(where="sender", what=sender.value, why=sender_reason(plan, packet, sender)))
    if not isinstance(decision, Forward):
        why = Deviation.NO_SCTP.words if without_sctp else _nothing_reason(decision)
        steps.append(WalkStep(where="decision", what=type(decision).__name__.lower(), why=why))
        return single(packet, Disposition.REJECTED if isinstance(decision, Reject) else Disposition.DROPPED, steps)
    return _forwarded(plan, packet, host, service, decision, deviations, memory, now, steps)


def _less(
    decision: Decision, plan: Plan, frontend: Frontend, packet: Packet, deviations: frozenset[Deviation]
) -> Decision:
    """Return the decision as a backend with these deviations implements it."""
    if not isinstance(decision, Forward):
        return decision
    if Deviation.ONE_POOL_PER_ADDRESS in deviations and isinstance(frontend.other, Forward):
        decision = Forward(frontend.other.scope, decision.masquerade)
    inside = frontend.kind is FrontendKind.CLUSTER_IP and not plan.pods.enabled
    if Deviation.CLUSTER_IP_SOURCE in deviations and inside and _from_cluster_ip(plan, packet):
        decision = Forward(decision.scope, masquerade=True)
    return decision


def _from_cluster_ip(plan: Plan, packet: Packet) -> bool:
    """Return True if the source is a cluster IP that has the destination port: most likely the destination itself."""
    match = packet.source, packet.protocol, packet.port
    return any(
        front.match == match and front.kind is FrontendKind.CLUSTER_IP
        for service in plan.services.values()
        for front in service.frontends
    )


def find_frontend(plan: Plan, packet: Packet, host: Host) -> tuple[ServicePlan, Frontend] | None:
    """Return the frontend that a packet matches: an exact address before a node port."""
    by_node: tuple[ServicePlan, Frontend] | None = None
    for service in plan.services.values():
        for frontend in service.frontends:
            if frontend.protocol is not packet.protocol or frontend.port != packet.port:
                continue
            if frontend.address == packet.destination:
                return service, frontend
            if frontend.address is None and answers_node_ports(plan, packet.destination, host):
                by_node = service, frontend
    return by_node


def answers_node_ports(plan: Plan, destination: str, host: Host) -> bool:
    """Return True if node ports are open on this address."""
    cidrs = plan.node_ports.cidrs
    if contains(plan.family.loopback, destination):
        return plan.node_ports.localhost and destination != "::1" and (cidrs is None or in_any(cidrs, destination))
    return destination in host.addresses and (cidrs is None or in_any(cidrs, destination))


def sender_of(plan: Plan, packet: Packet, host: Host) -> Sender:
    """Return the first class of sender that matches."""
    if plan.pods.matches(packet.source, packet.iif):
        return Sender.POD
    if packet.source in host.addresses or contains(family_of(packet.source).loopback, packet.source):
        return Sender.NODE
    return Sender.OTHER


def sender_reason(plan: Plan, packet: Packet, sender: Sender) -> str:
    """Return why the sender has its class, as a sentence."""
    pods = plan.pods
    if sender is Sender.POD:
        if pods.cidrs:
            cidr = next(cidr for cidr in pods.cidrs if contains(cidr, packet.source))
            return f"{packet.source} is a pod: it lies in {cidr}"
        return f"it came in on {packet.iif}, where pods are"
    if sender is Sender.NODE:
        return f"{packet.source} is an address of this node"
    if not pods.enabled:
        return "pods cannot be distinguished from other senders: pod detection is off"
    return f"{packet.source} is neither a pod nor an address of this node"


def _guarded(plan: Plan, packet: Packet, host: Host, deviations: frozenset[Deviation]) -> Trace:
    """Decide for packets without a frontend: the guard of cluster IPs and ServiceCIDRs (rows 5.8 to 5.10)."""
    own = packet.destination in host.addresses and not packet.from_host
    if Deviation.BOUND_ADDRESS_GUARD in deviations:
        own = packet.destination in host.addresses
        if not own and packet.destination in _exact_addresses(plan):
            return _guarded_bound(plan, packet)
    if own or Deviation.NO_CLUSTER_IP_GUARD in deviations:
        return single(packet, Disposition.NOT_OURS)
    if packet.destination in cluster_ips(plan):
        why = f"{packet.destination} is a cluster IP without this port"
        return single(packet, Disposition.REJECTED, [WalkStep(where="cluster IP guard", what="reject", why=why)])
    if in_any(plan.service_cidrs, packet.destination):
        why = f"{packet.destination} lies in a ServiceCIDR and belongs to no Service"
        return single(packet, Disposition.DROPPED, [WalkStep(where="cluster IP guard", what="drop", why=why)])
    return single(packet, Disposition.NOT_OURS)


def _guarded_bound(plan: Plan, packet: Packet) -> Trace:
    """Decide for an address that is bound on the node: its processes must not answer there, except health checks."""
    if packet.protocol is Protocol.TCP and packet.port in {check.port for check in plan.health_checks.values()}:
        return single(packet, Disposition.NOT_OURS)
    why = f"{packet.destination} is a Service's address without this port"
    return single(packet, Disposition.REJECTED, [WalkStep(where="bound address guard", what="reject", why=why)])


def _exact_addresses(plan: Plan) -> set[str]:
    return {front.address for service in plan.services.values() for front in service.frontends if front.address}


def cluster_ips(plan: Plan) -> set[str]:
    """Return all cluster IPs of the plan."""
    return {
        front.address
        for service in plan.services.values()
        for front in service.frontends
        if front.kind is FrontendKind.CLUSTER_IP and front.address
    }


def _forwarded(
    plan: Plan,
    packet: Packet,
    host: Host,
    service: ServicePlan,
    decision: Forward,
    deviations: frozenset[Deviation],
    memory: Memory | None,
    now: float,
    steps: list[WalkStep],
) -> Trace:
    pool = service.pool(decision.scope)
    steps.append(WalkStep(where="decision", what=one_of(len(pool.endpoints), "endpoint"), why=pool.reason))
    via = join_port(packet.destination, packet.port) if Deviation.AFFINITY_PER_ADDRESS in deviations else ""
    candidates = pool.endpoints
    if service.affinity_seconds is not None and memory is not None:
        candidates = _remembered(packet, service, candidates, via, memory, now, steps)
    elif service.balancing is Balancing.MAGLEV and not deviations & _OTHER_HASHING:
        candidates = _hashed(packet, candidates, steps)
    probability = Fraction(1, len(candidates))
    outcomes = []
    for endpoint in candidates:
        draw = WalkStep(where="endpoint", what=join_port(endpoint.address, endpoint.port), probability=probability)
        joins = service.affinity_seconds is not None
        outcomes.append(
            Outcome(
                disposition=Disposition.DELIVERED,
                probability=probability,
                endpoint=(endpoint.address, endpoint.port),
                masquerade=_is_masqueraded(plan, packet, host, endpoint, decision, deviations),
                remembers=((affinity_record(service, endpoint, via), (packet.source,)),) if joins else (),
                steps=(*steps, draw),
            )
        )
    return Trace(packet=packet, outcomes=tuple(outcomes))


def _remembered(
    packet: Packet,
    service: ServicePlan,
    endpoints: tuple[Endpoint, ...],
    via: str,
    memory: Memory,
    now: float,
    steps: list[WalkStep],
) -> tuple[Endpoint, ...]:
    """Return the endpoint that the sender is assigned to by session affinity, or all if there is none."""
    assert service.affinity_seconds is not None
    for endpoint in endpoints:
        if memory.seen(affinity_record(service, endpoint, via), (packet.source,), now, service.affinity_seconds):
            why = f"{packet.source} is remembered"
            steps.append(WalkStep(where="affinity", what="the same endpoint again", why=why))
            return (endpoint,)
    return endpoints


def _hashed(packet: Packet, endpoints: tuple[Endpoint, ...], steps: list[WalkStep]) -> tuple[Endpoint, ...]:
    """Return the endpoint that consistent hashing selects for the sender."""
    table = lookup_table(endpoints)
    slot = client_slot(packet.source, len(table))
    what, why = f"slot {slot} of {len(table)}", f"the hash of {packet.source}"
    steps.append(WalkStep(where="consistent hashing", what=what, why=why))
    return (table[slot],)


def _is_masqueraded(
    plan: Plan, packet: Packet, host: Host, endpoint: Endpoint, decision: Forward, deviations: frozenset[Deviation]
) -> bool:
    """Return True if the endpoint sees an address of the node as the source.

    A packet from outside to a process on this node ends in INPUT: postrouting, where sources are rewritten, never sees it, and
    the answer leaves through this node in any case.
    """
    if Deviation.RELAYED in deviations:
        return True
    hairpin = endpoint.address == packet.source and (
        endpoint.local
        or Deviation.HAIRPIN_LOCAL_ONLY not in deviations
        or _is_own(plan, endpoint, packet.protocol, per_port=Deviation.HAIRPIN_PER_PORT in deviations)
    )
    leaves = packet.from_host or endpoint.address not in host.addresses
    return leaves and (decision.masquerade or hairpin)


def _is_own(plan: Plan, endpoint: Endpoint, protocol: Protocol, *, per_port: bool) -> bool:
    """Return True if a Service port says that an endpoint is on this node, or that its address is."""
    asked = OwnEndpoint(endpoint.address, protocol, endpoint.port)
    return any(each == asked if per_port else each.address == asked.address for each in plan.own_endpoints())


def affinity_record(service: ServicePlan, endpoint: Endpoint, via: str = "") -> str:
    """Return the name of the affinity list for an endpoint of a Service port, or of one address of the Service port."""
    return f"{service.name} {service.name.protocol.value} {via} {join_port(endpoint.address, endpoint.port)}"


def _match_text(frontend: Frontend) -> str:
    where = "an address of this node" if frontend.address is None else frontend.address
    return f"{where}, {frontend.protocol.value} port {frontend.port}"


def _nothing_reason(decision: Decision) -> str:
    if isinstance(decision, Reject):
        return "no endpoint can be used anywhere in the cluster"
    return "endpoints exist, but a Local traffic policy leaves none on this node"
