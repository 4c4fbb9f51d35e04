"""What `narthex lab` prints for people."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from narthex.lab.cluster import DNS_SERVICE
from narthex.lab.program.labs import DEFAULT_NAME, LabNodeStatus, LabStatus, StartedLab
from narthex.lab.program.state import LabState, ServiceRecord
from narthex.model.net import join_port
from narthex.runtime.logs import printable


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they must be, two blanks apart."""
    lines = [tuple(map(printable, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def started(result: StartedLab) -> str:
    """After `lab up`: what there is and what to do with it."""
    state = result.state
    option = _option(state)
    count = f"{len(state.nodes)} node{'s' if len(state.nodes) > 1 else ''}"
    parts = [
        f"Lab {state.name!r} is up after {result.seconds:.1f} s: {count}, {state.mode} mode, following {state.source}"
    ]
    if result.cleared:
        parts.insert(0, f"Removed what a crash had left of lab {state.name!r}.")
    parts += [problems(state), _nodes(state), pods(state), _services(state), _next_steps(state, option)]
    return "\n\n".join(part for part in parts if part)


def status(found: LabStatus) -> str:
    """`lab status`."""
    state = found.state
    running = "runs" if found.running else "has CRASHED: its process is gone; only `narthex lab down` helps"
    head = f"Lab {state.name!r} {running} ({state.mode} mode, since {state.since}, following {state.source})"
    health = [(node.node, "DEAD, killed" if node.killed else _health(node)) for node in found.nodes]
    scales = "\n".join(
        f"Deployment {scale.namespace}/{scale.name} is scaled to {scale.replicas}" for scale in state.scales
    )
    now = time.time()
    faults = "\n".join(printable(f"Fault {each.number}: {each.text(now)}") for each in state.faults)
    parts = [head, problems(state), faults, _nodes(state, dict(health)), pods(state), _services(state), scales]
    return "\n\n".join(part for part in parts if part)


def _health(node: LabNodeStatus) -> str:
    return "healthy" if node.healthy else "running, NOT healthy" if node.running else "NOT RUNNING"


def labs(found: Sequence[LabStatus]) -> str:
    """`lab list`."""
    if not found:
        return "There is no lab; `narthex lab up DIRECTORY` makes one."
    rows = [
        (
            each.state.name,
            "running" if each.running else "crashed",
            str(len(each.state.nodes)),
            each.state.mode,
            str(len(each.state.pods)),
            each.state.source,
        )
        for each in found
    ]
    return table(("LAB", "STATE", "NODES", "MODE", "PODS", "MANIFESTS"), rows)


def problems(state: LabState) -> str:
    """What of the manifests cannot be had, one line each; empty when all can."""
    lines = [printable(str(problem)) for problem in state.problems]
    lines += [printable(f"Pod {pod.namespace}/{pod.name}: {pod.problem}") for pod in state.pods if pod.problem]
    return "\n".join(lines)


def pods(state: LabState) -> str:
    """All pods."""
    if not state.pods:
        return "There are no pods."
    rows = [
        (
            f"{pod.namespace}/{pod.name}",
            "terminating" if pod.terminating else "ready" if pod.ready else "NOT READY",
            pod.node or "-",
            ", ".join(pod.addresses) or "-",
        )
        for pod in state.pods
    ]
    return table(("POD", "STATE", "NODE", "ADDRESS"), rows)


def _nodes(state: LabState, health: dict[str, str] | None = None) -> str:
    rows = [
        (
            node.name,
            ", ".join(node.addresses),
            node.pod_cidrs[0],
            str(sum(pod.node == node.name for pod in state.pods)),
            *([health.get(node.name, "NOT RUNNING")] if health is not None else []),
        )
        for node in state.nodes
    ]
    head = ("NODE", "ADDRESS", "POD RANGE", "PODS", *(["STATE"] if health is not None else []))
    return table(head, rows)


def _services(state: LabState) -> str:
    if not state.services:
        return "There are no Services."
    rows = [
        (f"{service.namespace}/{service.name}", service.type, str(service.endpoints), frontend)
        for service in state.services
        for frontend in _frontends(service) or ["-"]
    ]
    previous = ""
    shown = []
    for row in rows:
        shown.append(("", "", "", row[3]) if row[0] == previous else row)
        previous = row[0]
    return table(("SERVICE", "TYPE", "ENDPOINTS", "ANSWERS ON"), shown)


def _frontends(service: ServiceRecord) -> list[str]:
    """One line per frontend; a node port once, since it is the same on every node."""
    lines = []
    for frontend in service.frontends:
        if frontend.kind == "node port":
            lines.append(f"every node, port {frontend.port}/{frontend.protocol} (node port)")
        else:
            place = join_port(frontend.address, frontend.port)
            lines.append(f"{place}/{frontend.protocol} ({frontend.kind})")
    return list(dict.fromkeys(lines))


def _next_steps(state: LabState, option: str) -> str:
    """Commands that work as printed."""
    lab = f"narthex lab{{}}{option}"
    steps = []
    node_port = _first(state, "node port")
    balancer = _first(state, "load balancer IP") if state.balancing else None
    cluster_ip = _first(state, "cluster IP")
    pod = next((f"{pod.namespace}/{pod.name}" for pod in state.pods if pod.ready), None)
    outside = f"{lab.format(' exec')} outside -- curl -s"
    if node_port:
        steps.append((f"{outside} http://{node_port.place}/", "a client beyond the cluster"))
    if balancer:
        steps.append((f"{outside} http://{balancer.place}/", "the same, by load balancer IP"))
        steps.append((f"narthex lb why {balancer.service} --lab {state.name}", "who answers for it"))
    if cluster_ip and pod:
        steps.append((f"{lab.format(' exec')} {pod} -- curl -s http://{cluster_ip.place}/", "a pod, by cluster IP"))
        steps.append((f"narthex trace {pod} {cluster_ip.place} --lab {state.name}", "why it went where it went"))
    if not _own_services(state):
        steps.append((f"cp -r examples/hello-world/. {state.source}", "manifests take effect at once"))
    steps += [(lab.format(" status"), "all there is"), (lab.format(" down"), "leaves nothing behind")]
    width = max(len(step) for step, _ in steps)
    return "Try:\n" + "\n".join(f"  {printable(step).ljust(width)}   # {why}" for step, why in steps)


class _Way(NamedTuple):
    service: str
    place: str
    """Address and port."""


def _first(state: LabState, kind: str) -> _Way | None:
    return next(
        (
            _Way(f"{service.namespace}/{service.name}", join_port(frontend.address, frontend.port))
            for service in _own_services(state)
            for frontend in service.frontends
            if service.endpoints and frontend.kind == kind and frontend.protocol == "TCP"
        ),
        None,
    )


def _own_services(state: LabState) -> list[ServiceRecord]:
    """The user's, without the lab's DNS."""
    return [service for service in state.services if (service.namespace, service.name) != DNS_SERVICE]


def _option(state: LabState) -> str:
    return "" if state.name == DEFAULT_NAME else f" --name {state.name}"
