"""The userspace backend: rules that redirect each frontend to a port of the relay, and the relay's table.

The chains are those of kube-proxy's old mode (row 25.2). In addition (row 25.8), the rules implement both traffic
policies and source ranges, and refuse Services without endpoints at once, since the plan says what each sender may
reach: a Service port has one listener for each endpoint set. See docs/explanation/userspace.md and ADR 0006.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import cast

import msgspec
from immutables import Map

from narthex.model import (
    Disposition,
    Host,
    Memory,
    Outcome,
    Packet,
    Protocol,
    ServicePortName,
    Trace,
    WalkStep,
    join_port,
)
from narthex.netfilter.ast import (
    Accept,
    Compare,
    CtState,
    Field,
    IgnoredStatement,
    Jump,
    MarkIs,
    PortRange,
    RejectPacket,
    Return,
    Rule,
)
from narthex.netfilter.walk.walk import walk
from narthex.netfilter.xtables.print import save_text
from narthex.proxy.backends.base import Backend
from narthex.proxy.backends.iptables.frame import NEW, SENT_ON, Frame, Rules, rule
from narthex.proxy.backends.iptables.refusals import (
    PROTOCOLS,
    comment_text,
    exact_lines,
    external_lines,
    firewall_lines,
    health_check_lines,
    unless_sent,
)
from narthex.proxy.backends.iptables.rules import XtablesRules
from narthex.proxy.backends.traits import USERSPACE
from narthex.proxy.backends.userspace import names
from narthex.proxy.backends.userspace.chains import Ports, UserspaceFragment, fragment, scopes_of
from narthex.proxy.backends.userspace.rules import (
    RelayListener,
    RelayListeners,
    UserspaceChanges,
    UserspaceRules,
    diff,
    patch,
    relay_record,
    table_text,
)
from narthex.proxy.plan.ir import Deviation, Plan, Scope, ServicePlan

FIRST, LAST = 61000, 65535
"""The default range: above the ephemeral ports of Linux (net.ipv4.ip_local_port_range ends at 60999) and above the node
ports of every cluster.
"""

ESTABLISHED = CtState(("established",))

RELAYED = (Protocol.TCP, Protocol.UDP)
"""Protocols that the relay supports."""


class _Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """What a rendering keeps for the next one."""

    frame: Frame
    fragments: Mapping[ServicePortName, UserspaceFragment]


class UserspaceBackend(Backend[UserspaceRules, UserspaceChanges]):
    """Renders plans as redirecting rules and a relay table."""

    name = "userspace"
    deviations = frozenset(
        {
            Deviation.NO_CLUSTER_IP_GUARD,
            Deviation.REJECT_BEFORE_RANGES,
            Deviation.RELAYED,
            Deviation.NO_SCTP,
            Deviation.NO_CONSISTENT_HASHING,
            Deviation.NO_LEAST_CONNECTIONS,
        }
    )
    traits = USERSPACE

    def __init__(self, ports: tuple[int, int] = (FIRST, LAST), *, plain_tcp: bool = True) -> None:
        """Create the backend.

        Args:
            ports: The relay listens on ports between these two, both included (`portRange`).
            plain_tcp: Rules keep connections through the relay free of TCP timestamps, so that the relay can hand them
                over. Needs the iptables target TCPOPTSTRIP.
        """
        self._first, self._last = ports
        self._plain_tcp = plain_tcp

    def advance(self, previous: UserspaceRules | None, plan: Plan) -> tuple[UserspaceRules, UserspaceChanges]:
        """Return the rules for a plan and the changes. Listeners keep the ports that they have in `previous`."""
        frame = Frame.of(plan, commented=True)
        last = cast("_Rendering | None", previous.rendering) if previous else None
        known = last.fragments if last is not None and last.frame == frame else {}
        ports = self._ports(plan, previous)
        fragments = {
            name: _fragment(service, frame, ports.get(name, {}), known.get(name))
            for name, service in sorted(plan.services.items(), key=lambda item: item[0].sort_key)
        }
        rules = UserspaceRules(
            tables=_tables(
                plan,
                frame,
                list(fragments.values()),
                self._plain_tcp_rules(frame),
                previous.tables if previous else None,
            ),
            listeners=_listeners(plan, ports, previous.listeners if previous else Map()),
            mark=frame.mark,
            taken=previous.taken if previous else frozenset(),
            unserved=_unserved(plan, ports, self._last - self._first + 1),
            rendering=_Rendering(frame=frame, fragments=fragments),
        )
        return rules, diff(previous, rules)

    def _plain_tcp_rules(self, frame: Frame) -> Rules:
        """Return the rules for the first packets of clients, after they were redirected, and of the relay itself."""
        if not self._plain_tcp:
            return ()
        # Timestamps are option 8 (RFC 7323), which iptables prints as a number.
        strip = IgnoredStatement("-j TCPOPTSTRIP --strip-options 8")
        tcp = PROTOCOLS[Protocol.TCP]
        one = self._first == self._last
        relay = Compare(Field.DPORT, (self._first,)) if one else PortRange(Field.DPORT, self._first, self._last)
        return (
            rule(tcp, relay, SENT_ON, strip, comment="connections to the relay"),
            rule(tcp, MarkIs(frame.mark, frame.mark), strip, comment="connections of the relay itself"),
        )

    def _ports(self, plan: Plan, previous: UserspaceRules | None) -> dict[ServicePortName, dict[Scope, int]]:
        held = {(one.name, one.scope): one.port for one in previous.listeners.values()} if previous else {}
        desired: list[ListenerName] = [
            (name, scope)
            for name, service in plan.services.items()
            if name.protocol in RELAYED
            for scope in scopes_of(service)
        ]
        found: dict[ServicePortName, dict[Scope, int]] = {}
        for (name, scope), port in assign(
            desired, held, previous.taken if previous else (), self._first, self._last
        ).items():
            found.setdefault(name, {})[scope] = port
        return found

    diff = staticmethod(diff)
    patch = staticmethod(patch)

    def contents(self, rules: UserspaceRules) -> Mapping[str, object]:
        """Return chains, jumps, and listeners."""
        return {"chains": rules.tables.chains, "jumps": rules.tables.jumps, "listeners": rules.listeners}

    def walk(
        self, rules: UserspaceRules, packet: Packet, host: Host, memory: Memory | None = None, now: float = 0.0
    ) -> Trace:
        """Return the path of a packet through the rules to the relay, and from there to an endpoint."""
        return self.onwards(walk(rules.tables.ruleset, packet, host, memory, now), rules.listeners, memory, now)

    @staticmethod
    def onwards(redirected: Trace, listeners: RelayListeners, memory: Memory | None = None, now: float = 0.0) -> Trace:
        """Return the path from the relay for a packet that was redirected to one of these listeners."""
        packet = redirected.packet
        outcomes: list[Outcome] = []
        for outcome in redirected.outcomes:
            if outcome.disposition is Disposition.DELIVERED and outcome.endpoint is not None:
                listener = listeners.get((packet.protocol, outcome.endpoint[1]))
                outcomes += _relayed(listener, outcome, packet, memory, now)
            else:
                outcomes.append(outcome)
        return Trace(packet=packet, outcomes=tuple(outcomes))

    def unserved(self, rules: UserspaceRules) -> Mapping[ServicePortName, str]:
        """Return the Service ports that the relay cannot serve."""
        return rules.unserved

    def text(self, rules: UserspaceRules) -> str:
        """Return the relay's table as comments, then the rules as iptables-save prints them."""
        return table_text(rules.listeners.values()) + save_text(rules.tables.ruleset)


def _fragment(service: ServicePlan, frame: Frame, ports: Ports, known: UserspaceFragment | None) -> UserspaceFragment:
    if known is not None and known.service is service and known.ports == ports:
        return known
    return fragment(service, frame, ports)


def _listeners(plan: Plan, ports: Mapping[ServicePortName, Ports], known: RelayListeners) -> RelayListeners:
    """Return the relay's table; equal entries stay the identical objects."""
    found: dict[tuple[Protocol, int], RelayListener] = {}
    for name, by_scope in ports.items():
        service = plan.services[name]
        for scope, port in by_scope.items():
            one = RelayListener(
                name=name,
                scope=scope,
                port=port,
                endpoints=tuple((each.address, each.port) for each in service.pool(scope).endpoints),
                affinity_seconds=service.affinity_seconds,
            )
            held = known.get(one.key)
            found[one.key] = held if held == one else one
    return Map(found)


def _unserved(plan: Plan, ports: Mapping[ServicePortName, Ports], count: int) -> dict[ServicePortName, str]:
    """Return the Service ports of which some sender cannot be relayed, with the reason."""
    found: dict[ServicePortName, str] = {}
    for name, service in plan.services.items():
        if name.protocol not in RELAYED and scopes_of(service):
            found[name] = f"mode userspace does not carry {name.protocol.value}; another mode does"
        elif len(ports.get(name, ())) < len(scopes_of(service)):
            found[name] = f"all {count} ports of the relay are taken; give it more with portRange"
    return found


# ---- tables --------------------------------------------------------------------------------------------------------


def _tables(
    plan: Plan, frame: Frame, ordered: list[UserspaceFragment], plain_tcp: Rules, known: XtablesRules | None
) -> XtablesRules:
    portals = exact_lines((each.portals, each.refused) for each in ordered)
    node_ports = tuple(line for each in ordered for line in each.node_ports)
    # The relay's own connections: an endpoint may have the address and port of a frontend, as host network pods do,
    # and without this the relay would be sent to itself for ever.
    own: Rules = (rule(MarkIs(frame.mark, frame.mark), Return(), comment="connections of the relay itself"),)
    nat = {
        names.CONTAINER: (*portals, *frame.jumps_to_node_ports(names.NODE_PORT_CONTAINER)),
        names.HOST: (*own, *portals, *frame.jumps_to_node_ports(names.NODE_PORT_HOST)),
        names.NODE_PORT_CONTAINER: node_ports,
        names.NODE_PORT_HOST: node_ports,
    }
    for each in ordered:
        nat.update(each.chains)
    refusals = [each.refused for each in ordered]
    refused = unless_sent((*(line for each in refusals for line in each.cluster), *external_lines(refusals)))
    firewall = unless_sent(firewall_lines(refusals))
    filter_ = {
        names.FIREWALL: (*own, *firewall) if firewall else (),
        names.REFUSED: (*own, *refused) if refused else (),
        names.NON_LOCAL: tuple(_doors(plan, ordered)),
    }
    if plain_tcp:
        filter_[names.FORWARD] = (rule(ESTABLISHED, SENT_ON, Accept(), comment="handed over by the relay"),)
    tables = {"nat": nat, "filter": filter_, "mangle": {names.PLAIN_TCP: plain_tcp} if plain_tcp else {}}
    return XtablesRules(
        plan.family,
        {name: _kept(chains, known, name) for name, chains in tables.items()},
        Map(_jumps(plain_tcp=bool(plain_tcp))),
    )


def _kept(chains: dict[str, Rules], known: XtablesRules | None, table: str) -> Map[str, Rules]:
    """Return the chains; equal ones are the identical objects of `known`, so that a comparison skips them."""
    if known is None:
        return Map(chains)
    held = known.chains[table]
    return Map({name: before if (before := held.get(name)) == rules else rules for name, rules in chains.items()})


def _doors(plan: Plan, ordered: list[UserspaceFragment]) -> Iterator[Rule]:
    """Yield rules that accept packets to listeners on this node.

    The relay is reachable through frontends only: a direct connection to its port would bypass policies and source
    ranges.
    """
    yield from health_check_lines(plan)
    for each in ordered:
        for _, port in sorted(each.ports.items(), key=lambda item: item[0].value):
            place = PROTOCOLS[each.service.name.protocol], Compare(Field.DPORT, (port,))
            text = comment_text(str(each.service.name))
            yield rule(*place, SENT_ON, Accept(), comment=text)
            yield rule(*place, NEW, RejectPacket(), comment=comment_text(f"{text} is reached by its own addresses"))


def _jumps(*, plain_tcp: bool) -> dict[tuple[str, str], Rules]:
    firewall = rule(NEW, Jump(names.FIREWALL), comment="kubernetes load balancer firewall")
    refused = rule(NEW, Jump(names.REFUSED), comment="kubernetes service portals")
    before = "handle ClusterIPs; NOTE: this must be before the NodePort rules"
    doors = rule(Jump(names.NON_LOCAL), comment="Ensure that non-local NodePort traffic can flow")
    found = {
        ("nat", "PREROUTING"): (rule(Jump(names.CONTAINER), comment=before),),
        ("nat", "OUTPUT"): (rule(Jump(names.HOST), comment=before),),
        ("filter", "INPUT"): (firewall, doors, refused),
        ("filter", "FORWARD"): (firewall, refused),
        ("filter", "OUTPUT"): (firewall, refused),
    }
    if plain_tcp:
        opening = rule(NEW, Jump(names.PLAIN_TCP), comment="connections that a relay hands over")
        found["filter", "FORWARD"] = (
            rule(Jump(names.FORWARD), comment="kubernetes forwarding rules"),
            firewall,
            refused,
        )
        found["mangle", "INPUT"] = found["mangle", "OUTPUT"] = (opening,)
    return found


# ---- the relay -----------------------------------------------------------------------------------------------------


def _relayed(
    listener: RelayListener | None, outcome: Outcome, packet: Packet, memory: Memory | None, now: float
) -> Iterator[Outcome]:
    """Yield the endpoints to which the relay may connect."""
    assert outcome.endpoint is not None
    port = outcome.endpoint[1]
    if listener is None:
        refused = WalkStep(
            where="relay", what="refused", why=f"no relay listens on port {port}: has the node proxy stopped?"
        )
        yield msgspec.structs.replace(
            outcome, disposition=Disposition.REJECTED, endpoint=None, steps=(*outcome.steps, refused)
        )
        return
    arrived = WalkStep(
        where="relay",
        what=f"port {port}: one of {len(listener.endpoints)} endpoints ({listener.scope.value}) in turn",
        why=f"{listener.name}; the next one when it cannot be reached",
    )
    drawn, steps = listener.endpoints, [*outcome.steps, arrived]
    seconds = listener.affinity_seconds
    if seconds is not None and memory is not None:
        source = (packet.source,)
        known = (each for each in drawn if memory.seen(relay_record(listener, each), source, now, seconds))
        remembered = next(known, None)
        if remembered is not None:
            drawn = (remembered,)
            steps.append(WalkStep(where="relay", what="the same endpoint again", why=f"{packet.source} is remembered"))
    share = Fraction(1, len(drawn))
    for each in drawn:
        remembers = ((relay_record(listener, each), (packet.source,)),) if seconds is not None else ()
        yield msgspec.structs.replace(
            outcome,
            probability=outcome.probability * share,
            endpoint=each,
            masquerade=True,
            remembers=(*outcome.remembers, *remembers),
            steps=(*steps, WalkStep(where="relay", what=f"connects to {join_port(*each)}", probability=share)),
        )


ListenerName = tuple[ServicePortName, Scope]


def assign(
    desired: Iterable[ListenerName],
    held: Mapping[ListenerName, int],
    taken: Collection[tuple[object, int]],
    first: int,
    last: int,
) -> dict[ListenerName, int]:
    """Return ports for as many listeners as there are free ports.

    Args:
        desired: The listeners that need a port.
        held: Ports of listeners that have one.
        taken: Protocol and port of other programs. The same port of another protocol is another port.
        first: First port of the range.
        last: Last port of the range.
    """
    asking = sorted(set(desired), key=_order)
    given: dict[ListenerName, int] = {}
    used = set(taken)
    for listener in asking:
        port = held.get(listener, 0)
        key = listener[0].protocol, port
        if first <= port <= last and key not in used:
            given[listener] = port
            used.add(key)
    avoided = used | {(listener[0].protocol, port) for listener, port in held.items() if listener not in given}
    for listener in asking:
        if listener in given:
            continue
        port = _free(listener, avoided, first, last) or _free(listener, used, first, last)
        if port:
            given[listener] = port
            used.add((listener[0].protocol, port))
            avoided.add((listener[0].protocol, port))
    return given


def _free(listener: ListenerName, used: Collection[tuple[object, int]], first: int, last: int) -> int:
    """Return the first free port after the hash; 0 if there is none."""
    size = last - first + 1
    text = f"{listener[0]}/{listener[0].protocol.value} {listener[1].value}"
    start = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    for step in range(size):
        port = first + (start + step) % size
        if (listener[0].protocol, port) not in used:
            return port
    return 0


def _order(listener: ListenerName) -> tuple[object, ...]:
    return *listener[0].sort_key, listener[1].value
