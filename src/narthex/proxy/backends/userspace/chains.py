"""The rules of one Service port that redirect to the relay.

A frontend with the same decision for all senders is one rule. Others have a KUBE-PORTAL- chain that distinguishes the
senders, and one more before it if only some networks may connect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from narthex.netfilter.ast import Expression, Field, Jump, Redirect, Return, Rule
from narthex.proxy.backends.iptables.frame import FROM_SELF, Frame, Match, Rules, address_match, rule
from narthex.proxy.backends.iptables.refusals import (
    PROTOCOLS,
    RefusalRules,
    Row,
    comment_text,
    destination,
    refused,
    row_of,
)
from narthex.proxy.backends.userspace.names import portal
from narthex.proxy.plan.ir import Decision, Forward, Frontend, FrontendKind, Reject, Scope, ServicePlan

_KIND_WORDS = {kind: f" {kind.value}" for kind in FrontendKind}

Ports = Mapping[Scope, int]
"""The relay's ports of a Service port, by endpoint set. A set without port cannot be relayed."""
_Cells = tuple[int, int, int]
"""Listen ports for pods, this node, and others; 0: not redirected."""


class UserspaceFragment(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one Service port: its own chains, and its lines in shared chains."""

    service: ServicePlan
    ports: Ports
    chains: Mapping[str, Rules]
    """In the nat table."""
    portals: Rules = ()
    """Exact addresses; the same in both chains, for packets that arrive and for packets of this node."""
    node_ports: Rules = ()
    """Node ports, likewise."""
    refused: RefusalRules = RefusalRules()
    """The filter table."""


def fragment(service: ServicePlan, frame: Frame, ports: Ports) -> UserspaceFragment:
    """Return the rules of one Service port. A Forward to endpoints without a listen port becomes a Reject."""
    possible = _possible(service, ports)
    return _Writer(possible, frame, ports).fragment(service)


def scopes_of(service: ServicePlan) -> frozenset[Scope]:
    """Return the endpoint sets to which some sender is forwarded."""
    cells = (cell for frontend in service.frontends for cell in (frontend.pod, frontend.node, frontend.other))
    return frozenset(cell.scope for cell in cells if isinstance(cell, Forward))


def _possible(service: ServicePlan, ports: Ports) -> ServicePlan:
    if all(scope in ports for scope in scopes_of(service)):
        return service

    def cell(decision: Decision) -> Decision:
        """Return the decision, or a rejection if no relay listens for the Service in this scope."""
        return Reject() if isinstance(decision, Forward) and decision.scope not in ports else decision

    return msgspec.structs.replace(
        service,
        frontends=tuple(
            msgspec.structs.replace(each, pod=cell(each.pod), node=cell(each.node), other=cell(each.other))
            for each in service.frontends
        ),
    )


class _Writer:
    def __init__(self, service: ServicePlan, frame: Frame, ports: Ports) -> None:
        self._service = service
        self._name = service.name
        self._frame = frame
        self._ports = ports
        self._protocol = PROTOCOLS[service.name.protocol]
        self._chains: dict[str, Rules] = {}

    def fragment(self, service: ServicePlan) -> UserspaceFragment:
        """Return the rules that lead a Service's packets to the ports of its relays."""
        lines: dict[FrontendKind, list[Rule]] = {kind: [] for kind in FrontendKind}
        for frontend in self._service.frontends:
            cells = self._cells(row_of(frontend, self._frame))
            if any(cells):
                text = self._text(_KIND_WORDS[frontend.kind])
                then = self._entry(frontend, cells)
                lines[frontend.kind].append(rule(*destination(frontend), then, comment=text))
        exact = [kind for kind in FrontendKind if kind is not FrontendKind.NODE_PORT]
        return UserspaceFragment(
            service=service,
            ports=self._ports,
            chains=self._chains,
            portals=tuple(line for kind in exact for line in lines[kind]),
            node_ports=tuple(lines[FrontendKind.NODE_PORT]),
            refused=refused(self._service, self._frame, self._allowing),
        )

    def _cells(self, row: Row) -> _Cells:
        pod, node, other = (self._ports[cell.scope] if isinstance(cell, Forward) else 0 for cell in row)
        return pod, node, other

    def _entry(self, frontend: Frontend, cells: _Cells) -> Expression:
        then = Redirect(cells[0]) if len(set(cells)) == 1 else self._by_sender(cells)
        return then if frontend.allow_from is None else self._within_ranges(frontend.allow_from, cells, then)

    def _by_sender(self, cells: _Cells) -> Jump:
        """Return a jump to a chain that distinguishes senders."""
        chain = portal(self._name, f" senders {self._said(cells)}")
        self._chains[chain] = tuple(self._sender_rules(cells))
        return Jump(chain)

    def _sender_rules(self, cells: _Cells) -> Iterator[Rule]:
        pod, node, other = cells
        classes: list[tuple[tuple[Match, ...], int]] = [(((),), other)]
        if node != other:
            classes.insert(0, (((FROM_SELF,),), node))
        # Also when it equals the next: most pods are no own addresses, some are.
        classes.insert(0, (self._frame.pods, pod))
        for matches, port in classes:
            for match in matches:
                if port:
                    yield rule(*match, self._protocol, Redirect(port), comment=self._text())
                elif match:
                    yield rule(*match, Return(), comment=self._text())

    def _within_ranges(self, allow_from: tuple[str, ...], cells: _Cells, then: Redirect | Jump) -> Jump:
        """Return a jump to a chain that accepts some networks only."""
        chain = self._ranges(allow_from, cells)
        text = self._text(" source ranges")
        self._chains[chain] = tuple(
            rule(*address_match(Field.SADDR, cidr), self._protocol, then, comment=text) for cidr in allow_from
        )
        return Jump(chain)

    def _allowing(self, frontend: Frontend, row: Row) -> str:
        assert frontend.allow_from is not None
        return self._ranges(frontend.allow_from, self._cells(row))

    def _ranges(self, allow_from: tuple[str, ...], cells: _Cells) -> str:
        return portal(self._name, f" ranges {','.join(allow_from)} {self._said(cells)}")

    def _said(self, cells: _Cells) -> str:
        """Return the cells without port numbers, so that the name of a chain does not depend on the relay's ports."""
        scopes = {port: scope.value for scope, port in self._ports.items()}
        return " ".join(scopes.get(port, "none") for port in cells)

    def _text(self, suffix: str = "") -> str:
        return comment_text(f"{self._name}{suffix}")
