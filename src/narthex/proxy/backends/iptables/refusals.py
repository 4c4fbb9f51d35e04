"""Drop, Reject, and source ranges as rules of the filter table, for packets that nat has not changed.

Packets that were forwarded to an endpoint or to a relay do not meet these rules: the chains begin with `unless_sent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain

import msgspec

from narthex.model import Protocol, ServicePortName
from narthex.netfilter.ast import Accept, Compare, DropPacket, Field, RejectPacket, Return, Rule
from narthex.netfilter.xtables.print import MAX_COMMENT
from narthex.proxy.backends.iptables.frame import FROM_SELF, SENT_ON, Frame, Match, Rules, address_match, rule
from narthex.proxy.plan.ir import Decision, Drop, Forward, Frontend, FrontendKind, Plan, Reject, ServicePlan

Row = tuple[Decision, Decision, Decision]
"""Decisions for pods, this node, and others; the same for the first two if pods cannot be recognized."""

PROTOCOLS = {protocol: Compare(Field.L4PROTO, (protocol.lower,)) for protocol in Protocol}


class RefusalRules(msgspec.Struct, frozen=True, kw_only=True):
    """What one Service port refuses: its rules in chains that all Service ports share."""

    cluster: Rules = ()
    """On cluster IPs."""
    external: Rules = ()
    """On other exact addresses."""
    node_port: Rules = ()
    """On node ports; after all exact addresses."""
    firewall: Rules = ()
    """Sources out of range, for exact addresses."""
    node_port_firewall: Rules = ()
    """Sources out of range, for node ports; after all exact addresses."""
    leaks: Mapping[tuple[Protocol, int], Rules] = {}
    """By protocol and port: rules that keep packets to an exact address of this port, which it does not forward, away
    from node ports. Only needed if the address is this node's own and a node port has the same number.
    """
    node_port_numbers: frozenset[tuple[Protocol, int]] = frozenset()


def refused(service: ServicePlan, frame: Frame, allowing: Callable[[Frontend, Row], str]) -> RefusalRules:
    """Return the refusals of one Service port. `allowing` names the chain that accepts the sources within range."""
    return _Writer(service.name, frame, allowing).refused(service)


def row_of(frontend: Frontend, frame: Frame) -> Row:
    """Return the decisions as far as rules can distinguish the senders."""
    if frame.everyone_is_pod:
        return frontend.pod, frontend.pod, frontend.pod
    pod = frontend.pod if frame.pods else frontend.node
    return pod, frontend.node, frontend.other


def destination(frontend: Frontend) -> Match:
    """Return matches of address, protocol, and port.

    Rules of node ports have no address: the jump to their chain matches it.
    """
    where = () if frontend.address is None else address_match(Field.DADDR, frontend.address)
    return (*where, PROTOCOLS[frontend.protocol], Compare(Field.DPORT, (frontend.port,)))


def comment_text(text: str) -> str:
    """Return text that a rule can carry as comment: no control characters, no longer than the kernel stores.

    Names that the API server accepts never change here.
    """
    if text.isprintable() and text.isascii() and len(text) <= MAX_COMMENT:
        return text
    plain = "".join(character if character.isprintable() else "?" for character in text)
    return plain.encode()[:MAX_COMMENT].decode(errors="ignore")


def unless_sent(lines: Iterable[Rule]) -> Rules:
    """Return the rules, limited to packets that nat has not forwarded."""
    rules = tuple(lines)
    return (rule(SENT_ON, Return()), *rules) if rules else ()


def leaks_to(numbers: Set[tuple[Protocol, int]], ordered: Sequence[RefusalRules]) -> Iterator[Rule]:
    """Yield returns for exact addresses with the number of one of these node ports."""
    for each in ordered if numbers else ():
        for number, lines in each.leaks.items():
            yield from lines if number in numbers else ()


def exact_lines(ordered: Iterable[tuple[Rules, RefusalRules]]) -> Rules:
    """Return the nat rules of Service ports for exact addresses, each with its returns that node ports call for."""
    ordered = list(ordered)
    taken = {number for _, refused in ordered for number in refused.node_port_numbers}
    return tuple(line for lines, refused in ordered for line in (*lines, *leaks_to(taken, [refused])))


def external_lines(ordered: Sequence[RefusalRules]) -> Rules:
    """Return the refusals on addresses other than cluster IPs, exact addresses first."""
    exact, node_port = (each.external for each in ordered), (each.node_port for each in ordered)
    return (*chain.from_iterable(exact), *chain.from_iterable(node_port))


def health_check_lines(plan: Plan) -> Iterator[Rule]:
    """Yield rules that accept health checks of load balancers, whatever firewall follows (row 16.9).

    There is one per Service; kube-proxy has one for each of its ports, equal but for the name.
    """
    for service, check in sorted(plan.health_checks.items()):
        text = comment_text(f"{service} health check node port")
        yield rule(PROTOCOLS[Protocol.TCP], Compare(Field.DPORT, (check.port,)), Accept(), comment=text)


def firewall_lines(ordered: Sequence[RefusalRules]) -> Iterator[Rule]:
    """Yield rules for sources out of range, exact addresses first.

    An own address of this node with the number of a restricted node port is not judged by the ranges of that node port.
    """
    for each in ordered:
        yield from each.firewall
    restricted = {number for each in ordered if each.node_port_firewall for number in each.node_port_numbers}
    yield from leaks_to(restricted, ordered)
    for each in ordered:
        yield from each.node_port_firewall


class _Writer:
    def __init__(self, name: ServicePortName, frame: Frame, allowing: Callable[[Frontend, Row], str]) -> None:
        self._name = name
        self._frame = frame
        self._allowing = allowing

    def refused(self, service: ServicePlan) -> RefusalRules:
        """Return the filter rules that reject or drop packets of a Service, by the shared chain that holds them."""
        refusals: dict[FrontendKind, list[Rule]] = {kind: [] for kind in FrontendKind}
        firewall: dict[bool, list[Rule]] = {True: [], False: []}
        leaks: dict[tuple[Protocol, int], Rules] = {}
        # External ways first, as in the nat table.
        for frontend in sorted(service.frontends, key=lambda each: each.kind is FrontendKind.CLUSTER_IP):
            row = row_of(frontend, self._frame)
            refusals[frontend.kind] += self._refusals(frontend, row)
            firewall[frontend.address is not None] += self._out_of_range(frontend, row)
            whole = frontend.allow_from is None and all(isinstance(cell, Forward) for cell in row)
            if frontend.address is not None and not whole:
                key = frontend.protocol, frontend.port
                leaks[key] = (*leaks.get(key, ()), rule(*destination(frontend), Return(), comment=self._text()))
        external = (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)
        return RefusalRules(
            cluster=tuple(refusals[FrontendKind.CLUSTER_IP]),
            external=tuple(line for kind in external for line in refusals[kind]),
            node_port=tuple(refusals[FrontendKind.NODE_PORT]),
            firewall=tuple(firewall[True]),
            node_port_firewall=tuple(firewall[False]),
            leaks=leaks,
            node_port_numbers=frozenset(
                (each.protocol, each.port) for each in service.frontends if each.address is None
            ),
        )

    def _refusals(self, frontend: Frontend, row: Row) -> Iterator[Rule]:
        """Yield rules for Reject, and for Drop where source ranges do not drop already.

        Ranges never apply to Reject (row 10.13).
        """
        verdicts = [
            None if isinstance(cell, Forward) or (isinstance(cell, Drop) and frontend.allow_from is not None) else cell
            for cell in row
        ]
        yield from self._by_sender(frontend, verdicts)

    def _by_sender(self, frontend: Frontend, verdicts: list[Drop | Reject | None]) -> Iterator[Rule]:
        """Yield rules per sender; one is enough unless verdicts differ, because forwarded packets do not get here."""
        given = {verdict for verdict in verdicts if verdict is not None}
        if not given:
            return
        senders: list[tuple[Match, ...]] = [self._frame.pods, ((FROM_SELF,),), ((),)]
        cells = [(((),), given.pop())] if len(given) == 1 else zip(senders, verdicts, strict=True)
        for matches, verdict in cells:
            for match in matches if verdict is not None else ():
                for where in self._places(frontend):
                    yield self._refusal(frontend, (*where, *match), verdict)

    def _places(self, frontend: Frontend) -> tuple[Match, ...]:
        """Return the destinations of a frontend; node ports only where they answer (row 29.5)."""
        if frontend.address is None:
            return self._frame.node_port_matches
        return (address_match(Field.DADDR, frontend.address),)

    def _refusal(self, frontend: Frontend, match: Match, verdict: Drop | Reject | None) -> Rule:
        rejected = isinstance(verdict, Reject)
        text = self._text(" has no endpoints" if rejected else " has no local endpoints")
        then = RejectPacket() if rejected else DropPacket()
        return rule(*match, PROTOCOLS[frontend.protocol], Compare(Field.DPORT, (frontend.port,)), then, comment=text)

    def _out_of_range(self, frontend: Frontend, row: Row) -> Iterator[Rule]:
        """Yield rules for sources that the KUBE-FW- chain has not accepted (row 10.14), unless all are rejected."""
        if frontend.allow_from is None or all(isinstance(cell, Reject) for cell in row):
            return
        text = self._text(f" traffic not accepted by {self._allowing(frontend, row)}")
        ports = (PROTOCOLS[frontend.protocol], Compare(Field.DPORT, (frontend.port,)))
        for place in self._places(frontend):
            match = (*place, *ports)
            if not any(isinstance(cell, Reject) for cell in row):
                yield rule(*match, DropPacket(), comment=text)
                continue
            for sender, cell in zip((self._frame.pods, ((FROM_SELF,),), ((),)), row, strict=True):
                for each in sender:
                    then = Return() if isinstance(cell, Reject) else DropPacket()
                    yield rule(*each, *match, then, comment=text)

    def _text(self, suffix: str = "") -> str:
        return comment_text(f"{self._name}{suffix}")
