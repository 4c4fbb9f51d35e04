"""One look at a cluster's load balancers, without writing: what a controller would do, and how its pools are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from immutables import Map

from narthex.kube.access import Access
from narthex.kube.client import Unreachable
from narthex.kube.manifests import ManifestSource
from narthex.kube.resources import (
    ADDRESS_POOLS,
    ALL_SERVICES,
    L2_ADVERTISEMENTS,
    LISTED_SLICES,
    NAMESPACES,
    NODES,
    SERVICE_CIDRS,
)
from narthex.lb.allocate import Situation, allocate
from narthex.lb.decision import Changes, Decision, changes
from narthex.lb.pools import Pools, settle
from narthex.lb.resources import Configuration, read
from narthex.lb.scene import PoolUse, namespace_labels, surroundings, usage
from narthex.lb.status import held_by
from narthex.model.names import NamespacedName
from narthex.model.objects import Service
from narthex.model.problem import Problem
from narthex.model.store import Event, Snapshot, Store, Synced


class LookError(ValueError):
    """There is nothing to look at; the message says why."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster at one moment, and what is decided of it."""

    snapshot: Snapshot
    """With the pools and advertisements that count."""
    pools: Pools
    uses: tuple[PoolUse, ...]
    decisions: dict[NamespacedName, Decision]
    problems: tuple[Problem, ...] = ()

    def planned(self) -> list[tuple[Service, Decision, Changes]]:
        """What would be written, by name."""
        found = []
        for key in sorted(self.decisions):
            service, decision = self.snapshot.services[key], self.decisions[key]
            found.append((service, decision, changes(service, decision)))
        return found


def look(
    *,
    manifests: Path | None = None,
    access: Access | None = None,
    config: Path | None = None,
    balancer_class: str = "",
    cluster_cidrs: tuple[str, ...] = (),
    endpoints: bool = False,
) -> Look:
    """Read manifests or an API server once, and decide. `endpoints`: EndpointSlices are wanted, too. Raises LookError."""
    if manifests is not None:
        events, problems = _scan(manifests)
    else:
        events, problems = _ask(access or Access(), pools=config is None, endpoints=endpoints)
    store = Store()
    for event in (*events, Synced()):
        store.apply(event)
    snapshot = store.snapshot
    own = _configuration(config) if config is not None else Configuration()
    objects = own.pools if config is not None else tuple(snapshot.address_pools.values())
    advertisements = own.advertisements if config is not None else tuple(snapshot.l2_advertisements.values())
    if config is not None:
        snapshot = msgspec.structs.replace(
            snapshot,
            address_pools=Map((each.key, each) for each in objects),
            l2_advertisements=Map((each.key, each) for each in advertisements),
        )
    pools = settle(objects, surroundings(snapshot, cluster_cidrs))
    decisions = allocate(
        Situation(
            services=snapshot.services.values(),
            pools=pools,
            namespaces=namespace_labels(snapshot),
            balancer_class=balancer_class,
        )
    )
    uses = usage(pools, snapshot.services.values(), decisions, advertisements)
    return Look(snapshot=snapshot, pools=pools, uses=uses, decisions=decisions, problems=(*own.problems, *problems))


def _scan(manifests: Path) -> tuple[list[Event], tuple[Problem, ...]]:
    source = ManifestSource(manifests)
    events = source.scan()
    if not any(isinstance(event, Synced) for event in events):
        raise LookError("; ".join(problem.message for problem in source.problems) or f"{manifests} cannot be read")
    return events, source.problems


def _ask(access: Access, *, pools: bool, endpoints: bool) -> tuple[list[Event], tuple[Problem, ...]]:
    from narthex.kube.snapshot import read_once

    kinds = [ALL_SERVICES, NAMESPACES, NODES, SERVICE_CIDRS, *([LISTED_SLICES] if endpoints else [])]
    try:
        return read_once(access, kinds + ([ADDRESS_POOLS, L2_ADVERTISEMENTS] if pools else []))
    except Unreachable as error:
        raise LookError(str(error)) from error


def _configuration(config: Path) -> Configuration:
    try:
        found = read(config.read_bytes(), str(config))
    except OSError as error:
        raise LookError(f"{config} cannot be read: {error.strerror or error}") from error
    if found.failed:
        raise LookError("\n".join(map(str, found.problems)))
    return found


def as_data(found: Look) -> list[dict[str, Any]]:
    """What would be written, for JSON."""
    return [
        {
            "service": str(service.key),
            "holds": held_by(service),
            "addresses": decision.addresses,
            "pool": decision.pool,
            "refusal": decision.refusal.text if decision.refusal else "",
            "advice": decision.refusal.advice if decision.refusal else "",
            "cause": decision.cause,
            "note": decision.note,
            "foreign": decision.foreign,
            "writesStatus": todo.status is not None,
            "writesAnnotation": todo.pool is not None,
        }
        for service, decision, todo in found.planned()
    ]
