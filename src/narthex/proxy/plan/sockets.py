"""What sockets do with a plan: which connections are sent to an endpoint when a socket connects, before any packet.

A program at `connect` sees no packet: it cannot masquerade, and it knows the sender only by its network namespace. So it
takes what the plan decides for this node and for pods where it can express that exactly, and leaves the rest to the
rules of the mode. `LeftToRules` has the reasons. ADR 0017 explains the cut.
"""

from __future__ import annotations

import enum

import msgspec

from narthex.model import Protocol, in_any
from narthex.proxy.plan.ir import Balancing, Decision, Drop, Frontend, Plan, Reject, Scope, Sender, ServicePlan


class _Explained(enum.Enum):
    """Members with a name and a sentence for people."""

    words: str

    def __new__(cls, value: str, words: str) -> _Explained:
        """Create a member with its sentence."""
        member = object.__new__(cls)
        member._value_ = value
        member.words = words
        return member


class LeftToRules(_Explained):
    """Why sockets leave a connection to the rules, which then decide as without socket load balancing."""

    HASHING = "hashing", "the source address, by which consistent hashing selects, is known only when a packet is sent"
    AFFINITY = "affinity", "session affinity is remembered by the rules, for clients of all kinds"
    SOURCE_RANGES = "source-ranges", "the source address is known only when a packet is sent"
    MASQUERADE = "masquerade", "the source address must be rewritten"
    DROP = "drop", "a dropped connection ends by a time-out, which the rules cause"
    PROTOCOL = "protocol", "the kernel runs no program when an SCTP socket connects"
    NODE_PORT = "node-port", "the rules ask the kernel at each packet which addresses are the node's own"
    NO_FRONTEND = "no-frontend", "no Service port has this address, protocol, and port"


class SocketDeviation(_Explained):
    """What sockets deliberately do differently from the plan. Tests demand exactly these differences."""

    NAMESPACE_IS_SENDER = (
        "namespace-is-sender",
        "a sender is this node if its socket is in the node's network namespace, and otherwise a pod, whatever its source",
    )
    HAIRPIN_KEPT = "hairpin-kept", "a pod that reaches itself through a Service keeps its own address as the source"


class SocketForward(msgspec.Struct, frozen=True, tag=True):
    """Connect to an endpoint of the pool with this scope."""

    scope: Scope
    unbound_only: bool = False
    """Only if the socket has no source address yet: the kernel then chooses one of the node for the endpoint, as
    masquerading would."""
    least_connections: bool = False
    """Of two endpoints that are drawn at random, to the one with fewer open connections from this node. Datagrams of sockets that
    do not connect go to any."""


SocketDecision = SocketForward | Reject | LeftToRules


def socket_decision(plan: Plan, service: ServicePlan, frontend: Frontend, sender: Sender) -> SocketDecision:
    """Return what a socket of the node or of a pod does when it connects to a frontend.

    `sender` is NODE or POD: sockets of others are not on this machine.
    """
    if frontend.protocol is Protocol.SCTP:
        return LeftToRules.PROTOCOL
    if frontend.address is None:
        return LeftToRules.NODE_PORT
    if frontend.allow_from is not None:
        return LeftToRules.SOURCE_RANGES
    return _expressible(_column(plan, frontend, sender), service, sender)


def _column(plan: Plan, frontend: Frontend, sender: Sender) -> Decision:
    """Return the decision for a sender. Where pods cannot be recognized, the rules treat them as any other sender."""
    if sender is Sender.NODE:
        return frontend.node
    return frontend.pod if plan.pods.enabled else frontend.other


def _expressible(decision: Decision, service: ServicePlan, sender: Sender) -> SocketDecision:
    if isinstance(decision, Reject):
        return decision
    if isinstance(decision, Drop):
        return LeftToRules.DROP
    if service.affinity_seconds is not None:
        return LeftToRules.AFFINITY
    if service.balancing is Balancing.MAGLEV:
        return LeftToRules.HASHING
    if decision.masquerade and sender is not Sender.NODE:
        return LeftToRules.MASQUERADE
    least = service.balancing is Balancing.LEAST_CONNECTIONS
    return SocketForward(decision.scope, unbound_only=decision.masquerade, least_connections=least)


def deviation(
    plan: Plan, decision: SocketDecision, sender: Sender, source: str, endpoint: str
) -> SocketDeviation | None:
    """Return how a connection to an endpoint differs from what the plan says of its packets; None if it does not.

    Args:
        plan: The plan.
        decision: What the socket does.
        sender: NODE or POD, by the namespace of the socket.
        source: Address of the connection.
        endpoint: Address of the endpoint that was selected.
    """
    if not isinstance(decision, SocketForward):
        return None
    cidrs = plan.pods.cidrs
    if sender is Sender.POD and cidrs and not in_any(cidrs, source):
        return SocketDeviation.NAMESPACE_IS_SENDER
    return SocketDeviation.HAIRPIN_KEPT if source == endpoint else None
