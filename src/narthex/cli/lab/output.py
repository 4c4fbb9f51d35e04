"""Output of `narthex lab`: JSON documents and text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

from narthex.cli.lab import name_argument
from narthex.kube.manifests import SUFFIXES
from narthex.lab.cluster import DNS_SERVICE
from narthex.lab.program.labs import LabNodeStatus, LabStatus, StartedLab
from narthex.lab.program.state import LabState, PodRecord, ServiceRecord
from narthex.model import join_port
from narthex.runtime.logs import printable

T = TypeVar("T")


class LabStateDocument(LabState, frozen=True, kw_only=True, tag_field="kind", tag="lab-state"):
    """What `narthex lab scale`, `kill`, and `wait` print with `-o json`."""

    version: Literal[1] = 1


class LabUpDocument(LabState, frozen=True, kw_only=True, tag_field="kind", tag="lab-up"):
    """What `narthex lab up -o json` prints."""

    version: Literal[1] = 1
    seconds: float
    """Duration of the start."""


class LabStatusDocument(LabStatus, frozen=True, kw_only=True, tag_field="kind", tag="lab-status"):
    """What `narthex lab status -o json` prints."""

    version: Literal[1] = 1


class LabListDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lab-list"):
    """What `narthex lab list -o json` prints."""

    version: Literal[1] = 1
    labs: Sequence[LabStatus]


class RemovedLab(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `narthex lab down` for one lab."""

    name: str
    removed: bool
    """False if there was none."""


class LabDownDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lab-down"):
    """What `narthex lab down -o json` prints."""

    version: Literal[1] = 1
    labs: tuple[RemovedLab, ...]


def as_document(kind: Callable[..., T], value: LabState | LabStatus, **more: object) -> T:
    """Return a document with the fields of a value."""
    return kind(**msgspec.structs.asdict(value), **more)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns, separated by two spaces."""
    lines = [tuple(map(printable, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def started(result: StartedLab) -> str:
    """Return the text of `lab up`: the lab, and commands to try."""
    state = result.state
    option = name_argument(state.name)
    count = f"{len(state.nodes)} node{'s' if len(state.nodes) > 1 else ''}"
    parts = [
        f"Lab {state.name!r} is up after {result.seconds:.1f} s: {count}, {state.mode} mode, following {state.source}"
    ]
    if result.cleared:
        parts.insert(0, f"Removed the remains of lab {state.name!r} after a crash.")
    parts += [
        _external(state),
        problems(state),
        _nodes(state),
        pods(state),
        _services(state),
        _next_steps(state, option),
    ]
    return "\n\n".join(part for part in parts if part)


def status(found: LabStatus) -> str:
    """Return the text of `lab status`."""
    state = found.state
    running = "runs" if found.running else "has CRASHED: its process is gone; `narthex lab down` removes its remains"
    head = f"Lab {state.name!r} {running} ({state.mode} mode, since {state.since}, following {state.source})"
    health = [(node.node, "DEAD, killed" if node.killed else _health(node)) for node in found.nodes]
    scales = "\n".join(
        f"Deployment {scale.namespace}/{scale.name} is scaled to {scale.replicas}" for scale in state.scales
    )
    now = time.time()
    faults = "\n".join(printable(f"Fault {each.number}: {each.text(now)}") for each in state.faults)
    parts = [
        head,
        _external(state),
        problems(state),
        faults,
        _nodes(state, dict(health)),
        pods(state),
        _services(state),
        scales,
    ]
    return "\n\n".join(part for part in parts if part)


def _external(state: LabState) -> str:
    """Return which official programs replace parts of the lab."""
    lines = [
        f"{part}: {printable(path)}, instead of the lab's own"
        for part, path in (("control plane", state.control_plane), ("proxy", state.kube_proxy))
        if path
    ]
    return "\n".join(lines)


def _health(node: LabNodeStatus) -> str:
    if not node.running:
        return "NOT RUNNING" if node.ready else "NOT RUNNING, NOT READY"
    if node.healthy:
        return "healthy"
    return "running, NOT healthy" if node.ready else "running, NOT READY"


def labs(found: Sequence[LabStatus]) -> str:
    """Return the text of `lab list`."""
    if not found:
        return "There is no lab; `narthex lab up DIRECTORY` starts one."
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
    """Return the errors of manifests and pods, one in each line."""
    lines = [printable(str(problem)) for problem in state.problems]
    lines += [printable(f"Pod {pod.namespace}/{pod.name}: {pod.problem}") for pod in state.pods if pod.problem]
    return "\n".join(lines)


def pods(state: LabState) -> str:
    """Return the table of pods."""
    if not state.pods:
        return "There are no pods."
    rows = [
        (f"{pod.namespace}/{pod.name}", _pod_state(pod), pod.node or "-", ", ".join(pod.addresses) or "-")
        for pod in state.pods
    ]
    return table(("POD", "STATE", "NODE", "ADDRESS"), rows)


def _pod_state(pod: PodRecord) -> str:
    if pod.terminating:
        return "terminating"
    return "ready" if pod.ready else "completed" if pod.completed else "NOT READY"


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
    """Return a line for each frontend; a node port has one line, since it is the same on every node."""
    lines = []
    for frontend in service.frontends:
        if frontend.kind == "node port":
            lines.append(f"every node, port {frontend.port}/{frontend.protocol} (node port)")
        else:
            place = join_port(frontend.address, frontend.port)
            lines.append(f"{place}/{frontend.protocol} ({frontend.kind})")
    return list(dict.fromkeys(lines))


def _next_steps(state: LabState, option: str) -> str:
    """Return commands to try."""
    lab = f"narthex lab{{}}{option}"
    steps = []
    node_port = _first(state, "node port")
    load_balancer = _first(state, "load balancer IP") if state.balancing else None
    cluster_ip = _first(state, "cluster IP")
    pod = next((f"{pod.namespace}/{pod.name}" for pod in state.pods if pod.ready), None)
    outside = f"{lab.format(' exec')} outside -- curl -s"
    if node_port:
        steps.append((f"{outside} http://{node_port.address}/", "a client outside the cluster"))
    if load_balancer:
        steps.append((f"{outside} http://{load_balancer.address}/", "the same, by load balancer IP"))
        steps.append((f"narthex lb why {load_balancer.service} --lab {state.name}", "which node answers for it"))
    if cluster_ip and pod:
        steps.append((f"{lab.format(' exec')} {pod} -- curl -s http://{cluster_ip.address}/", "a pod, by cluster IP"))
        steps.append((f"narthex trace {pod} {cluster_ip.address} --lab {state.name}", "explain the path"))
    if not _own_services(state):
        is_file = state.source.endswith(SUFFIXES)
        edit = "${EDITOR:-vi}" if is_file else "cp -r examples/hello-world/."
        steps.append((f"{edit} {state.source}", f"{'change the' if is_file else 'add'} manifests, applied at once"))
    steps += [(lab.format(" status"), "show everything"), (lab.format(" down"), "remove the lab")]
    width = max(len(step) for step, _ in steps)
    return "Try:\n" + "\n".join(f"  {printable(step).ljust(width)}   # {comment}" for step, comment in steps)


class _Example(NamedTuple):
    service: str
    address: str
    """With port."""


def _first(state: LabState, kind: str) -> _Example | None:
    return next(
        (
            _Example(f"{service.namespace}/{service.name}", join_port(frontend.address, frontend.port))
            for service in _own_services(state)
            for frontend in service.frontends
            if service.endpoints and frontend.kind == kind and frontend.protocol == "TCP"
        ),
        None,
    )


def _own_services(state: LabState) -> list[ServiceRecord]:
    """Return the user's Services, without the lab's DNS."""
    return [service for service in state.services if (service.namespace, service.name) != DNS_SERVICE]
