"""The rules of one Service port, structured as in kube-proxy.

Forward decisions become chains of the nat table. Drop and Reject become rules of the filter table (`refusals`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat

import msgspec

from narthex.model import IPFamily, Protocol, ServicePortName, join_port
from narthex.netfilter.ast import (
    Compare,
    Dnat,
    Expression,
    Field,
    Jump,
    RandomMatch,
    RecentCheck,
    RecentSet,
    Return,
    Rule,
)
from narthex.netfilter.lazy import LazyRules
from narthex.netfilter.xtables.print import chain_words, comment_words, host_words, rule_text
from narthex.netfilter.xtables.values import equal_share
from narthex.proxy.backends.iptables import names
from narthex.proxy.backends.iptables.frame import FROM_SELF, JUMP_MARK, Frame, Match, Rules, address_match, rule
from narthex.proxy.backends.iptables.names import MARK_MASQ
from narthex.proxy.backends.iptables.refusals import (
    PROTOCOLS,
    RefusalRules,
    Row,
    comment_text,
    destination,
    refused,
    row_of,
)
from narthex.proxy.plan.ir import Decision, Endpoint, Forward, Frontend, FrontendKind, Scope, ServicePlan

_KIND_WORDS = {
    FrontendKind.CLUSTER_IP: " cluster IP",
    FrontendKind.EXTERNAL_IP: " external IP",
    FrontendKind.LOAD_BALANCER: " loadbalancer IP",
    FrontendKind.NODE_PORT: "",
}

_WORDS = {protocol: protocol.lower for protocol in Protocol}


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
        """Return the Service's chains and the rules that lead to them from the shared chains."""
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
            endpoints=self._service.endpoint_count,
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


# ---- compact rules, for the most frequent chains of a large cluster ----------------------------------------------


class EndpointRules(LazyRules):
    """Rules of a chain that sends to one endpoint and marks hairpin connections."""

    __slots__ = ("_comment", "_endpoint", "_protocol")

    def __init__(self, endpoint: Endpoint, protocol: Protocol, comment: str) -> None:
        self._endpoint = endpoint
        self._protocol = protocol
        self._comment = comment

    def build(self) -> Rules:
        """Return the rules, built without sorting, because nearly all rules are of this kind."""
        end = self._endpoint
        return (
            Rule((Compare(Field.SADDR, (end.address,)), JUMP_MARK), self._comment),
            Rule((PROTOCOLS[self._protocol], Dnat(end.address, end.port)), self._comment),
        )

    def lines(self, chain: str, family: IPFamily) -> list[str]:
        """Return the rules in the format of iptables-save, without creating them."""
        word = _WORDS[self._protocol]
        source, to = host_words(self._endpoint.address, self._endpoint.port, family)
        comment = comment_words(self._comment)
        return [
            f"-A {chain} -s {source}{comment} -j {MARK_MASQ}",
            f"-A {chain} -p {word}{comment} -m {word} -j DNAT --to-destination {to}",
        ]

    def __len__(self) -> int:
        return 2

    def __eq__(self, other: object) -> bool:
        if type(other) is EndpointRules:
            return (self._endpoint.address, self._endpoint.port, self._protocol, self._comment) == (
                other._endpoint.address,
                other._endpoint.port,
                other._protocol,
                other._comment,
            )
        return super().__eq__(other)

    __hash__ = LazyRules.__hash__


class DrawRules(LazyRules):
    """Rules of a chain that selects one of several chains with equal probability (row 3.9), after other rules."""

    __slots__ = ("_comments", "_first", "_targets")

    def __init__(self, first: Rules, targets: tuple[str, ...], comments: tuple[str, ...] = ()) -> None:
        """Create rules that jump to the chains `targets`, with one comment for each of them or none."""
        self._first = first
        self._targets = targets
        self._comments = comments

    def build(self) -> Rules:
        """Return the rules."""
        comments = self._comments or ("",) * len(self._targets)
        left = len(self._targets)
        drawn = [
            Rule((_share(left - place), Jump(target)) if left - place > 1 else (Jump(target),), comment)
            for place, (target, comment) in enumerate(zip(self._targets, comments, strict=True))
        ]
        return (*self._first, *drawn)

    def lines(self, chain: str, family: IPFamily) -> list[str]:
        """Return the rules in the format of iptables-save, without creating them."""
        head = f"-A {chain}"
        count = len(self._targets)
        comments = map(comment_words, self._comments) if self._comments else repeat("", count)
        shares = map(_share_words, range(count, 0, -1))
        drawn = zip(comments, shares, chain_words(self._targets), strict=True)
        return [
            *[head + rule_text(rule, family) for rule in self._first],
            *[f"{head}{comment}{share} -j {target}" for comment, share, target in drawn],
        ]

    def __len__(self) -> int:
        return len(self._first) + len(self._targets)

    def __eq__(self, other: object) -> bool:
        if type(other) is DrawRules:
            return (self._targets, self._comments, self._first) == (other._targets, other._comments, other._first)
        return super().__eq__(other)

    __hash__ = LazyRules.__hash__


@lru_cache(maxsize=4096)
def _share(left: int) -> RandomMatch:
    return RandomMatch(equal_share(left))


@lru_cache(maxsize=4096)
def _share_words(left: int) -> str:
    return rule_text(Rule((_share(left),)), IPFamily.IPV4) if left > 1 else ""
