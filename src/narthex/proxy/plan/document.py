"""A plan as a document for programs: what `narthex plan -o json` prints."""

from __future__ import annotations

from typing import Literal

import msgspec

from narthex.proxy.plan.ir import Decision, Forward, Frontend, Plan, Reject, ServicePlan
from narthex.proxy.plan.show import match_text


class _Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of the document."""


class ForwardRecord(_Record, frozen=True, kw_only=True, tag_field="action", tag="forward"):
    """The packet goes to an endpoint."""

    scope: str
    """The pool that the endpoint is from: `cluster` or `local`."""
    masquerade: bool


class RejectRecord(_Record, frozen=True, kw_only=True, tag_field="action", tag="reject"):
    """The packet is rejected."""


class DropRecord(_Record, frozen=True, kw_only=True, tag_field="action", tag="drop"):
    """The packet is dropped."""


DecisionRecord = ForwardRecord | RejectRecord | DropRecord


class PlanEndpointRecord(_Record, frozen=True, kw_only=True):
    """An endpoint of a pool."""

    address: str
    port: int
    local: bool
    """It is on this node."""


class PoolRecord(_Record, frozen=True, kw_only=True):
    """The endpoints for one traffic policy."""

    reason: str
    endpoints: tuple[PlanEndpointRecord, ...]


class FrontendRecord(_Record, frozen=True, kw_only=True):
    """An address and port of a Service, with the decision for each class of sender."""

    kind: str
    address: str | None
    """None for a node port."""
    protocol: str
    port: int
    allow_from: tuple[str, ...] | None
    """Source ranges; None if every source is allowed."""
    pod: DecisionRecord
    node: DecisionRecord
    other: DecisionRecord


class ServicePortRecord(_Record, frozen=True, kw_only=True):
    """One port of a Service."""

    namespace: str
    name: str
    port: str
    protocol: str
    frontends: tuple[FrontendRecord, ...]
    cluster: PoolRecord | None
    local: PoolRecord | None
    affinity_seconds: int | None
    load_balancing: str
    """How an endpoint of a pool is selected: `random`, `least-connections`, or `maglev`."""


class PodDetectionRecord(_Record, frozen=True, kw_only=True):
    """How packets of pods are recognized."""

    cidrs: tuple[str, ...]
    interface: str
    interface_prefix: str


class NodePortsRecord(_Record, frozen=True, kw_only=True):
    """The addresses on which node ports are open."""

    cidrs: tuple[str, ...] | None
    """None: all addresses of the node."""
    localhost: bool


class HealthCheckRecord(_Record, frozen=True, kw_only=True):
    """A health check node port."""

    namespace: str
    name: str
    port: int
    local_ready: int


class ConflictRecord(_Record, frozen=True, kw_only=True):
    """Two Services that claim the same frontend."""

    match: str
    kind: str
    winner: str
    loser: str


class PlanRecord(_Record, frozen=True, kw_only=True):
    """The plan of one IP family."""

    family: str
    node: str
    pods: PodDetectionRecord
    node_ports: NodePortsRecord
    service_cidrs: tuple[str, ...] = msgspec.field(name="serviceCIDRs")
    masquerade_mark: int
    services: tuple[ServicePortRecord, ...]
    health_checks: tuple[HealthCheckRecord, ...]
    conflicts: tuple[ConflictRecord, ...]


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="plan"):
    """What `narthex plan -o json` prints."""

    version: Literal[1] = 1
    node: str
    mode: str
    plans: tuple[PlanRecord, ...]


def plan_record(plan: Plan) -> PlanRecord:
    """Return a plan as part of a document, in the order of the table."""
    return PlanRecord(
        family=plan.family.label,
        node=plan.node_name,
        pods=msgspec.convert(plan.pods, PodDetectionRecord, from_attributes=True),
        node_ports=msgspec.convert(plan.node_ports, NodePortsRecord, from_attributes=True),
        service_cidrs=tuple(plan.service_cidrs),
        masquerade_mark=plan.masquerade_mark,
        services=tuple(_service(plan.services[name]) for name in sorted(plan.services, key=lambda name: name.sort_key)),
        health_checks=tuple(
            HealthCheckRecord(namespace=name.namespace, name=name.name, port=check.port, local_ready=check.local_ready)
            for name, check in sorted(plan.health_checks.items())
        ),
        conflicts=tuple(
            ConflictRecord(
                match=match_text(each.match), kind=each.kind.value, winner=str(each.winner), loser=str(each.loser)
            )
            for each in plan.conflicts
        ),
    )


def _service(service: ServicePlan) -> ServicePortRecord:
    return ServicePortRecord(
        namespace=service.name.service.namespace,
        name=service.name.service.name,
        port=service.name.port,
        protocol=service.name.protocol.value,
        frontends=tuple(map(_frontend, service.frontends)),
        cluster=msgspec.convert(service.cluster, PoolRecord | None, from_attributes=True),
        local=msgspec.convert(service.local, PoolRecord | None, from_attributes=True),
        affinity_seconds=service.affinity_seconds,
        load_balancing=service.balancing.value,
    )


def _frontend(frontend: Frontend) -> FrontendRecord:
    return FrontendRecord(
        kind=frontend.kind.value,
        address=frontend.address,
        protocol=frontend.protocol.value,
        port=frontend.port,
        allow_from=frontend.allow_from,
        pod=_decision(frontend.pod),
        node=_decision(frontend.node),
        other=_decision(frontend.other),
    )


def _decision(decision: Decision) -> DecisionRecord:
    if isinstance(decision, Forward):
        return ForwardRecord(scope=decision.scope.value, masquerade=decision.masquerade)
    return RejectRecord() if isinstance(decision, Reject) else DropRecord()
