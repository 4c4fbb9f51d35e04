"""The rules of one Service port, structured as in kube-proxy.

Forward decisions become chains of the nat table. Drop and Reject become rules of the filter table (`refusals`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from narthex.model.net import join_port
from narthex.model.objects import ServicePortName
from narthex.netfilter.ast import Expression, Field, Jump, RecentCheck, RecentSet, Return, Rule
from narthex.proxy.backends.iptables import names
from narthex.proxy.backends.iptables.frame import FROM_SELF, JUMP_MARK, Frame, Match, Rules, address_match, rule
from narthex.proxy.backends.iptables.lazy import DrawRules, EndpointRules
from narthex.proxy.backends.iptables.refusals import RefusalRules, Row, comment_text, destination, refused, row_of
from narthex.proxy.plan.ir import Decision, Endpoint, Forward, Frontend, FrontendKind, Pool, Scope, ServicePlan

_KIND_WORDS = {
    FrontendKind.CLUSTER_IP: " cluster IP",
    FrontendKind.EXTERNAL_IP: " external IP",
    FrontendKind.LOAD_BALANCER: " loadbalancer IP",
    FrontendKind.NODE_PORT: "",
}


class IptablesFragment(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one Service port: its own chains, and its lines in shared chains."""

    service: ServicePlan
    chains: Mapping[str, Sequence[Rule]]
    """In the nat table."""
    services: Rules = ()
    """nat KUBE-SERVICES."""
    node_ports: Rules = ()
    """nat KUBE-NODEPORTS."""
    refused: RefusalRules = RefusalRules()
    """The filter table."""
    endpoints: int = 0

    @property
    def shared(self) -> tuple[object, ...]:
        """All lines in shared chains."""
        return self.services, self.node_ports, self.refused


def count_endpoints(service: ServicePlan) -> int:
    """Return the number of endpoints of a Service port, in both sets."""
    if service.local is None:
        return len(_endpoints(service.cluster))
    return len({*_endpoints(service.cluster), *_endpoints(service.local)})


def _endpoints(pool: Pool | None) -> tuple[Endpoint, ...]:
    return pool.endpoints if pool else ()


def fragment(service: ServicePlan, frame: Frame) -> IptablesFragment:
    """Return the rules of one Service port."""
    return _Writer(service, frame).fragment()


class _Writer:
    def __init__(self, service: ServicePlan, frame: Frame) -> None:
        self._service = service
        self._frame = frame
        self._name: ServicePortName = service.name
        self._chains: dict[str, Sequence[Rule]] = {}
        self._marks: dict[Scope, Rules] = {}
        """Masquerade rules at the head of the two endpoint chains."""
        self._used: set[Scope] = set()
        self._policies: dict[Row, str] = {}
        self._firewalls: dict[tuple[Row, tuple[str, ...]], str] = {}

    def fragment(self) -> IptablesFragment:
        lines: dict[FrontendKind, list[Rule]] = {kind: [] for kind in FrontendKind}
        # External ways first: their policy has the plain KUBE-EXT- name.
        for frontend in sorted(self._service.frontends, key=lambda each: each.kind is FrontendKind.CLUSTER_IP):
            row = row_of(frontend, self._frame)
            chain = self._entry(frontend, row)
            if chain:
                lines[frontend.kind].append(self._arrival(frontend, Jump(chain)))
        self._endpoint_chains()
        exact = [kind for kind in FrontendKind if kind is not FrontendKind.NODE_PORT]
        return IptablesFragment(
            service=self._service,
            chains=self._chains,
            services=tuple(line for kind in exact for line in lines[kind]),
            node_ports=tuple(lines[FrontendKind.NODE_PORT]),
            refused=refused(self._service, self._frame, self._allowing),
            endpoints=count_endpoints(self._service),
        )

    # ---- nat: from a frontend to an endpoint chain -----------------------------------------------------------------

    def _allowing(self, frontend: Frontend, row: Row) -> str:
        assert frontend.allow_from is not None
        return self._firewalls.get((row, frontend.allow_from), names.fw(self._name))

    def _arrival(self, frontend: Frontend, *then: Expression) -> Rule:
        return rule(*destination(frontend), *then, comment=self._text(_KIND_WORDS[frontend.kind]))

    def _entry(self, frontend: Frontend, row: Row) -> str:
        """Return the chain that a frontend jumps to; empty if no sender is forwarded."""
        if not any(isinstance(cell, Forward) for cell in row):
            return ""
        if frontend.kind is FrontendKind.CLUSTER_IP and frontend.allow_from is None:
            chain = self._straight(frontend, row)
            if chain:
                return chain
        policy = self._policy(row)
        return policy if frontend.allow_from is None else self._ranges(row, frontend.allow_from, policy)

    def _straight(self, frontend: Frontend, row: Row) -> str:
        """Return the endpoint chain if the masquerade rules of the ClusterIP fit into it; else empty."""
        scopes = {cell.scope if isinstance(cell, Forward) else None for cell in row}
        scope = scopes.pop()
        if scopes or scope is None:
            return ""
        masquerade = tuple(isinstance(cell, Forward) and cell.masquerade for cell in row)
        text = self._text(_KIND_WORDS[frontend.kind])
        if all(masquerade):
            marks: Rules = (rule(*destination(frontend), JUMP_MARK, comment=text),)
        elif masquerade == (False, True, True):
            marks = self._frame.mark_strangers(*destination(frontend), comment=text)
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
        identity = names.service_id(self._name)
        for scope in Scope:
            if scope not in self._used:
                continue
            pool = self._service.pool(scope).endpoints
            for endpoint in pool:
                if endpoint not in drawn:
                    drawn[endpoint] = names.sep_of(identity, endpoint)
            ladder = [(endpoint, drawn[endpoint]) for endpoint in pool]
            self._chains[self._endpoint_chain(scope)] = DrawRules(
                (*self._marks.get(scope, ()), *self._remembered(ladder)),
                tuple([chain for _, chain in ladder]),
                tuple([self._arrow(endpoint) for endpoint in pool]) if self._frame.commented else (),
            )
        comment = self._text() if self._frame.commented else ""
        for endpoint, chain in drawn.items():
            self._chains[chain] = self._sep_rules(endpoint, chain, comment)

    def _remembered(self, pool: list[tuple[Endpoint, str]]) -> Iterator[Rule]:
        """Yield rules that send known clients back to their endpoint (row 14.6)."""
        seconds = self._service.affinity_seconds
        if seconds is not None:
            for endpoint, chain in pool:
                yield rule(RecentCheck(chain, seconds), Jump(chain), comment=self._arrow(endpoint))

    def _sep_rules(self, endpoint: Endpoint, chain: str, comment: str) -> Sequence[Rule]:
        made = EndpointRules(endpoint, self._name.protocol, comment)
        if self._service.affinity_seconds is None:
            return made
        hairpin, send = made
        protocol, to = send.expressions
        return hairpin, Rule((protocol, RecentSet(chain), to), comment)

    # ---- comments --------------------------------------------------------------------------------------------------

    def _text(self, suffix: str = "") -> str:
        return comment_text(f"{self._name}{suffix}")

    def _arrow(self, endpoint: Endpoint) -> str:
        if not self._frame.commented:
            return ""
        return comment_text(f"{self._name} -> {join_port(endpoint.address, endpoint.port)}")
