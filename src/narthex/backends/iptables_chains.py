"""One Service port as iptables rules, in kube-proxy's shape.

Forward decisions become chains of the nat table. Drop and Reject become rules of the filter table on the address that
nat has left as it was: what was sent on to an endpoint does not meet them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import msgspec

from narthex.backends import iptables_names as names
from narthex.backends.iptables_frame import FROM_SELF, JUMP_MARK, Frame, Match, Rules, address_match, rule
from narthex.model.names import ServicePortName
from narthex.model.net import Protocol, join_port
from narthex.netfilter.ast import (
    Chance,
    Compare,
    Dnat,
    DropPacket,
    Expression,
    Field,
    Jump,
    Recent,
    RecentSet,
    RejectPacket,
    Return,
    Rule,
)
from narthex.netfilter.xtables_print import MAX_COMMENT
from narthex.netfilter.xtables_values import equal_share
from narthex.plan.ir import Decision, Drop, Endpoint, Forward, Frontend, FrontendKind, Pool, Reject, Scope, ServicePlan

Row = tuple[Decision, Decision, Decision]
"""Decisions for pods, this node and others; the same for the first two when pods cannot be told."""

_KIND_WORDS = {
    FrontendKind.CLUSTER_IP: " cluster IP",
    FrontendKind.EXTERNAL_IP: " external IP",
    FrontendKind.LOAD_BALANCER: " loadbalancer IP",
    FrontendKind.NODE_PORT: "",
}


class Fragment(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one Service port: chains of its own, and its lines in the chains that all share."""

    service: ServicePlan
    chains: Mapping[str, Rules]
    """In the nat table."""
    services: Rules = ()
    """nat KUBE-SERVICES."""
    node_ports: Rules = ()
    """nat KUBE-NODEPORTS."""
    cluster_refusals: Rules = ()
    """filter KUBE-SERVICES."""
    external_refusals: Rules = ()
    """filter KUBE-EXTERNAL-SERVICES, exact addresses."""
    node_port_refusals: Rules = ()
    """filter KUBE-EXTERNAL-SERVICES, node ports; behind all exact addresses."""
    firewall: Rules = ()
    """filter KUBE-PROXY-FIREWALL, exact addresses."""
    node_port_firewall: Rules = ()
    """filter KUBE-PROXY-FIREWALL, node ports; behind all exact addresses."""
    leaks: Mapping[tuple[Protocol, int], Rules] = {}
    """By protocol and port: rules that keep from the node ports what an exact address of this port does not forward.
    Only needed when the address is this node's own and a node port has the same number."""
    node_port_numbers: frozenset[tuple[Protocol, int]] = frozenset()
    endpoints: int = 0

    @property
    def shared(self) -> tuple[object, ...]:
        """All lines in shared chains."""
        return (
            self.services,
            self.node_ports,
            self.cluster_refusals,
            self.external_refusals,
            self.node_port_refusals,
            self.firewall,
            self.node_port_firewall,
            self.leaks,
            self.node_port_numbers,
        )


def comment_text(text: str) -> str:
    """Text as a rule can carry it: no control characters, and no longer than the kernel keeps.

    Names that the API server has let through never change here.
    """
    plain = "".join(character if character.isprintable() else "?" for character in text)
    return plain.encode()[:MAX_COMMENT].decode(errors="ignore")


def count_endpoints(service: ServicePlan) -> int:
    """How many endpoints a Service port has, in both sets."""
    return len({*_endpoints(service.cluster), *_endpoints(service.local)})


def _endpoints(pool: Pool | None) -> tuple[Endpoint, ...]:
    return pool.endpoints if pool else ()


def fragment(service: ServicePlan, frame: Frame) -> Fragment:
    """The rules of one Service port."""
    return _Writer(service, frame).fragment()


class _Writer:
    def __init__(self, service: ServicePlan, frame: Frame) -> None:
        self._service = service
        self._frame = frame
        self._name: ServicePortName = service.name
        self._chains: dict[str, Rules] = {}
        self._marks: dict[Scope, Rules] = {}
        """Masquerade rules at the head of the two endpoint chains."""
        self._used: set[Scope] = set()
        self._policies: dict[Row, str] = {}
        self._firewalls: dict[tuple[Row, tuple[str, ...]], str] = {}

    def fragment(self) -> Fragment:
        lines: dict[FrontendKind, list[Rule]] = {kind: [] for kind in FrontendKind}
        leaks: dict[tuple[Protocol, int], Rules] = {}
        refusals: dict[FrontendKind, list[Rule]] = {kind: [] for kind in FrontendKind}
        firewall: dict[bool, list[Rule]] = {True: [], False: []}
        # External ways first: their policy has the plain KUBE-EXT- name.
        for frontend in sorted(self._service.frontends, key=lambda each: each.kind is FrontendKind.CLUSTER_IP):
            row = self._row(frontend)
            chain = self._entry(frontend, row)
            if chain:
                lines[frontend.kind].append(self._arrival(frontend, Jump(chain)))
            refusals[frontend.kind] += self._refusals(frontend, row)
            firewall[frontend.address is not None] += self._out_of_range(frontend, row)
            whole = frontend.allow_from is None and all(isinstance(cell, Forward) for cell in row)
            if frontend.address is not None and not whole:
                key = frontend.protocol, frontend.port
                leaks[key] = (*leaks.get(key, ()), rule(*_destination(frontend), Return(), comment=self._text()))
        self._endpoint_chains()
        exact = [kind for kind in FrontendKind if kind is not FrontendKind.NODE_PORT]
        external = [kind for kind in exact if kind is not FrontendKind.CLUSTER_IP]
        return Fragment(
            service=self._service,
            chains=self._chains,
            services=tuple(line for kind in exact for line in lines[kind]),
            node_ports=tuple(lines[FrontendKind.NODE_PORT]),
            cluster_refusals=tuple(refusals[FrontendKind.CLUSTER_IP]),
            external_refusals=tuple(line for kind in external for line in refusals[kind]),
            node_port_refusals=tuple(refusals[FrontendKind.NODE_PORT]),
            firewall=tuple(firewall[True]),
            node_port_firewall=tuple(firewall[False]),
            leaks=leaks,
            node_port_numbers=frozenset(
                (each.protocol, each.port) for each in self._service.frontends if each.address is None
            ),
            endpoints=count_endpoints(self._service),
        )

    # ---- nat: from a frontend to an endpoint chain -----------------------------------------------------------------

    def _row(self, frontend: Frontend) -> Row:
        if self._frame.everyone_is_pod:
            return frontend.pod, frontend.pod, frontend.pod
        pod = frontend.pod if self._frame.pods else frontend.node
        return pod, frontend.node, frontend.other

    def _arrival(self, frontend: Frontend, *then: Expression) -> Rule:
        return rule(*_destination(frontend), *then, comment=self._text(_KIND_WORDS[frontend.kind]))

    def _entry(self, frontend: Frontend, row: Row) -> str:
        """The chain that a frontend jumps to; empty when nobody is forwarded."""
        if not any(isinstance(cell, Forward) for cell in row):
            return ""
        if frontend.kind is FrontendKind.CLUSTER_IP and frontend.allow_from is None:
            chain = self._straight(frontend, row)
            if chain:
                return chain
        policy = self._policy(row)
        return policy if frontend.allow_from is None else self._ranges(row, frontend.allow_from, policy)

    def _straight(self, frontend: Frontend, row: Row) -> str:
        """The endpoint chain itself, where the masquerade rules of one ClusterIP fit into it; else empty."""
        scopes = {cell.scope if isinstance(cell, Forward) else None for cell in row}
        scope = scopes.pop()
        if scopes or scope is None:
            return ""
        masquerade = tuple(isinstance(cell, Forward) and cell.masquerade for cell in row)
        text = self._text(_KIND_WORDS[frontend.kind])
        if all(masquerade):
            marks: Rules = (rule(*_destination(frontend), JUMP_MARK, comment=text),)
        elif masquerade == (False, True, True):
            marks = self._frame.mark_strangers(*_destination(frontend), comment=text)
        elif any(masquerade):
            return ""
        else:
            marks = ()
        self._marks[scope] = (*self._marks.get(scope, ()), *marks)
        return self._endpoint_chain(scope)

    def _endpoint_chain(self, scope: Scope) -> str:
        self._used.add(scope)
        return names.svc(self._name) if scope is Scope.CLUSTER else names.svl(self._name)

    def _policy(self, row: Row) -> str:
        """The KUBE-EXT- chain of a row."""
        if row not in self._policies:
            variant = f" {row}" if self._policies else ""
            self._policies[row] = chain = names.ext(self._name, variant)
            self._chains[chain] = tuple(self._policy_rules(row))
        return self._policies[row]

    def _policy_rules(self, row: Row) -> Iterator[Rule]:
        pod, node, other = row
        classes: list[tuple[str, tuple[Match, ...], Decision]] = [("", ((),), other)]
        if node != other:
            classes.insert(0, ("LOCAL", ((FROM_SELF,),), node))
        if not pod == node == other:
            # Also when it equals the next: most pods are not LOCAL, some are.
            classes.insert(0, ("pod", self._frame.pods, pod))
        for who, matches, decision in classes:
            for match in matches:
                if isinstance(decision, Forward):
                    yield from self._send(decision, who, match)
                elif match:
                    yield rule(*match, Return())

    def _send(self, decision: Forward, who: str, match: Match) -> Iterator[Rule]:
        where = f"traffic for {self._name} external destinations"
        who = f"{who} " if who else ""
        if decision.masquerade:
            yield rule(*match, JUMP_MARK, comment=comment_text(f"masquerade {who}{where}"))
        text = ""
        if match:
            text = f"{who}{where}" if who == "pod " else f"route {who}{where}"
        yield rule(*match, Jump(self._endpoint_chain(decision.scope)), comment=comment_text(text))

    def _ranges(self, row: Row, allow_from: tuple[str, ...], policy: str) -> str:
        """The KUBE-FW- chain of a row and its source ranges."""
        key = row, allow_from
        if key not in self._firewalls:
            variant = f" {allow_from} {row}" if self._firewalls else ""
            self._firewalls[key] = chain = names.fw(self._name, variant)
            text = self._text(_KIND_WORDS[FrontendKind.LOAD_BALANCER])
            dropped = comment_text(f"other traffic to {self._name} will be dropped by {names.PROXY_FIREWALL}")
            self._chains[chain] = (
                *(rule(*address_match(Field.SADDR, cidr), Jump(policy), comment=text) for cidr in allow_from),
                rule(comment=dropped),
            )
        return self._firewalls[key]

    # ---- nat: endpoint chains --------------------------------------------------------------------------------------

    def _endpoint_chains(self) -> None:
        drawn: dict[Endpoint, str] = {}
        for scope in Scope:
            if scope not in self._used:
                continue
            pool = self._service.pool(scope).endpoints
            for endpoint in pool:
                if endpoint not in drawn:
                    drawn[endpoint] = names.sep(self._name, endpoint)
            ladder = [(endpoint, drawn[endpoint]) for endpoint in pool]
            self._chains[self._endpoint_chain(scope)] = (
                *self._marks.get(scope, ()),
                *self._remembered(ladder),
                *self._ladder(ladder),
            )
        for endpoint, chain in drawn.items():
            self._chains[chain] = self._sep_rules(endpoint, chain)

    def _remembered(self, pool: list[tuple[Endpoint, str]]) -> Iterator[Rule]:
        """Clients of an endpoint go back to it (row 14.6)."""
        seconds = self._service.affinity_seconds
        if seconds is not None:
            for endpoint, chain in pool:
                yield rule(Recent(chain, seconds), Jump(chain), comment=self._arrow(endpoint))

    def _ladder(self, pool: list[tuple[Endpoint, str]]) -> Iterator[Rule]:
        """Each of the rest is drawn with the probability that makes all equally likely (row 3.9)."""
        for position, (endpoint, chain) in enumerate(pool):
            left = len(pool) - position
            chance = (_share(left),) if left > 1 else ()
            yield Rule((*chance, Jump(chain)), self._arrow(endpoint))

    def _sep_rules(self, endpoint: Endpoint, chain: str) -> Rules:
        comment = self._text() if self._frame.commented else ""
        remember = () if self._service.affinity_seconds is None else (RecentSet(chain),)
        to = Dnat(endpoint.address, endpoint.port)
        # Built without sorting: these are nearly all the rules there are.
        return (
            Rule((Compare(Field.SADDR, (endpoint.address,)), JUMP_MARK), comment),
            Rule((_PROTOCOLS[self._name.protocol], *remember, to), comment),
        )

    # ---- filter ----------------------------------------------------------------------------------------------------

    def _refusals(self, frontend: Frontend, row: Row) -> Iterator[Rule]:
        """Reject, and Drop where no ranges do it already. A range never matters to Reject (row 10.13)."""
        verdicts = [
            None if isinstance(cell, Forward) or (isinstance(cell, Drop) and frontend.allow_from is not None) else cell
            for cell in row
        ]
        yield from self._by_sender(frontend, verdicts)

    def _by_sender(self, frontend: Frontend, verdicts: list[Drop | Reject | None]) -> Iterator[Rule]:
        """What was sent on does not come by, so one rule for all will do unless verdicts differ."""
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
        """Destination addresses of a frontend, node ports only where they answer (row 29.5)."""
        if frontend.address is None:
            return self._frame.node_port_matches
        return (address_match(Field.DADDR, frontend.address),)

    def _refusal(self, frontend: Frontend, match: Match, verdict: Drop | Reject | None) -> Rule:
        rejected = isinstance(verdict, Reject)
        text = self._text(" has no endpoints" if rejected else " has no local endpoints")
        then = RejectPacket() if rejected else DropPacket()
        return rule(*match, _PROTOCOLS[frontend.protocol], Compare(Field.DPORT, (frontend.port,)), then, comment=text)

    def _out_of_range(self, frontend: Frontend, row: Row) -> Iterator[Rule]:
        """Sources that KUBE-FW- has not let in (row 10.14), unless they are to be rejected."""
        if frontend.allow_from is None or all(isinstance(cell, Reject) for cell in row):
            return
        chain = self._firewalls.get((row, frontend.allow_from), names.fw(self._name))
        text = self._text(f" traffic not accepted by {chain}")
        ports = (_PROTOCOLS[frontend.protocol], Compare(Field.DPORT, (frontend.port,)))
        for place in self._places(frontend):
            match = (*place, *ports)
            if not any(isinstance(cell, Reject) for cell in row):
                yield rule(*match, DropPacket(), comment=text)
                continue
            for sender, cell in zip((self._frame.pods, ((FROM_SELF,),), ((),)), row, strict=True):
                for each in sender:
                    then = Return() if isinstance(cell, Reject) else DropPacket()
                    yield rule(*each, *match, then, comment=text)

    # ---- comments --------------------------------------------------------------------------------------------------

    def _text(self, suffix: str = "") -> str:
        return comment_text(f"{self._name}{suffix}")

    def _arrow(self, endpoint: Endpoint) -> str:
        if not self._frame.commented:
            return ""
        return comment_text(f"{self._name} -> {join_port(endpoint.address, endpoint.port)}")


_PROTOCOLS = {protocol: Compare(Field.L4PROTO, (protocol.lower,)) for protocol in Protocol}


@lru_cache(maxsize=4096)
def _share(left: int) -> Chance:
    return Chance(equal_share(left))


def _destination(frontend: Frontend) -> Match:
    """Address, protocol and port; node ports get their address from the jump to KUBE-NODEPORTS."""
    where = () if frontend.address is None else address_match(Field.DADDR, frontend.address)
    return (*where, _PROTOCOLS[frontend.protocol], Compare(Field.DPORT, (frontend.port,)))
