"""A plan as a table for people; `document.py` has it as data for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from narthex.model import join_port, visible
from narthex.proxy.plan.ir import (
    Balancing,
    Decision,
    Drop,
    Endpoint,
    Forward,
    Frontend,
    FrontendConflict,
    Match,
    Plan,
    Pool,
    ServicePlan,
)

_HEAD = ("SERVICE PORT", "FRONTEND", "FROM POD", "FROM NODE", "FROM OTHERS", "ENDPOINTS")
_SHOWN_ENDPOINTS = 4

Row = tuple[str, ...]


def table(plan: Plan, all_endpoints: bool = False) -> str:
    """Return the plan as aligned text, ordered by Service port name; ends with a newline.

    A star marks endpoints of this node. Long lists are cut unless `all_endpoints` is set.
    """
    services = [plan.services[name] for name in sorted(plan.services, key=lambda name: name.sort_key)]
    rows: list[Row] = [_HEAD]
    for service in services:
        rows += _rows(service, None if all_endpoints else _SHOWN_ENDPOINTS)
    lines = _about(plan, services)
    if services:
        lines += ["", *_aligned(rows)]
    if plan.health_checks:
        lines += ["", *_health_lines(plan)]
    if plan.conflicts:
        lines += ["", *(conflict_text(conflict) for conflict in plan.conflicts)]
    return "\n".join(lines) + "\n"


def decision_text(decision: Decision) -> str:
    """Return the text of a decision: "cluster", "local, masquerade", "drop", or "reject"."""
    if isinstance(decision, Forward):
        return f"{decision.scope.value}, masquerade" if decision.masquerade else decision.scope.value
    return "drop" if isinstance(decision, Drop) else "reject"


def frontend_text(frontend: Frontend) -> str:
    """Return the text of a frontend: "cluster IP 10.0.0.5:80/TCP", "node port 30001/TCP"."""
    where = str(frontend.port) if frontend.address is None else join_port(frontend.address, frontend.port)
    return f"{frontend.kind.value} {where}/{frontend.protocol.value}"


def conflict_text(conflict: FrontendConflict) -> str:
    """Return which Service ports claim a match, and which one gets it."""
    return (
        f"conflict: {match_text(conflict.match)} is claimed by {conflict.winner} and {conflict.loser}; "
        f"{conflict.winner} has it"
    )


def claim_text(conflict: FrontendConflict) -> str:
    """Return the frontend that Service ports claim: "cluster IP 10.0.0.5:80/TCP", "node port 30001/TCP"."""
    address, protocol, port = conflict.match
    return f"{conflict.kind.value} {join_port(address, port) if address else port}/{protocol.value}"


def match_text(match: Match) -> str:
    """Return address, port, and protocol of a match as text."""
    address, protocol, port = match
    return f"{join_port(address, port) if address else f'node port {port}'}/{protocol.value}"


def _about(plan: Plan, services: Sequence[ServicePlan]) -> list[str]:
    frontends = sum(len(service.frontends) for service in services)
    return [
        f"node {plan.node_name or '(no name)'}, {plan.family.label}: "
        f"{counted(len(services), 'service port')}, {counted(frontends, 'frontend')}",
        f"pods: {_pods(plan)}",
        f"node ports: {_node_ports(plan)}",
        f"service CIDRs: {', '.join(plan.service_cidrs) or 'none known'}",
    ]


def _health_lines(plan: Plan) -> Iterable[str]:
    for name, check in sorted(plan.health_checks.items()):
        answer = "200" if check.local_ready else "503"
        ready = counted(check.local_ready, "ready endpoint")
        yield f"health check {name}: port {check.port} answers {answer}, {ready} on this node"


def _pods(plan: Plan) -> str:
    pods = plan.pods
    if pods.cidrs:
        return f"sources in {', '.join(pods.cidrs)}"
    if pods.interface:
        return f"what comes in on {pods.interface}"
    if pods.interface_prefix:
        return f"what comes in on {pods.interface_prefix}*"
    return "not distinguished from others (detection is off)"


def _node_ports(plan: Plan) -> str:
    ports = plan.node_ports
    if ports.cidrs is None:
        where = "on every address of the node"
    else:
        where = f"on the node's addresses in {', '.join(ports.cidrs)}" if ports.cidrs else "on no address"
    relayed = ", and through the relay on loopback" if ports.relayed else ""
    return f"{where}, and on loopback" if ports.localhost else f"{where}{relayed}"


def counted(number: int, thing: str, things: str = "") -> str:
    """Return a number with its noun: `1 chain`, `2 chains`."""
    return f"{number} {thing}" if number == 1 else f"{number} {things or thing + 's'}"


def _rows(service: ServicePlan, limit: int | None) -> Iterable[Row]:
    frontends: list[Row] = []
    for frontend in service.frontends:
        cells = (decision_text(cell) for cell in (frontend.pod, frontend.node, frontend.other))
        frontends.append((frontend_text(frontend), *cells))
        if frontend.allow_from is not None:
            frontends.append((f"  only from {', '.join(frontend.allow_from) or 'no source'}", "", "", ""))
    sides = list(_pool_lines(service, limit))
    for number, (front, side) in enumerate(zip_longest(frontends, sides)):
        name = f"{service.name}" if number == 0 else ""
        yield (name, *(front or ("", "", "", "")), side or "")


def _pool_lines(service: ServicePlan, limit: int | None) -> Iterable[str]:
    for scope, pool in service.pools.items():
        yield f"{scope.value}: {_pool_text(pool, limit)}"
    if service.affinity_seconds is not None:
        yield f"affinity: a client keeps its endpoint for {service.affinity_seconds} s"
    if service.balancing is not Balancing.RANDOM:
        yield f"load balancing: {service.balancing.value}"


def _pool_text(pool: Pool, limit: int | None) -> str:
    shown = pool.endpoints[:limit]
    text = " ".join(endpoint_text(endpoint) for endpoint in shown)
    if len(shown) < len(pool.endpoints):
        text += f" and {len(pool.endpoints) - len(shown)} more"
    return f"{text} ({pool.reason})" if pool.reason else text


def endpoint_text(endpoint: Endpoint) -> str:
    """Return address and port; a star marks an endpoint of this node."""
    return join_port(endpoint.address, endpoint.port) + ("*" if endpoint.local else "")


def _aligned(rows: Sequence[Row]) -> list[str]:
    rows = [tuple(map(visible, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
