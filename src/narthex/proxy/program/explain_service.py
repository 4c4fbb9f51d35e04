"""Logs every decision for one Service: for each endpoint, each frontend, and each class of sender.

It answers why a Service does not behave as expected, in a running proxy (row 29.11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from narthex.model import EndpointSlice, IPFamily, NamespacedName, Service, SliceEndpoint, Slices, Snapshot, join_port
from narthex.proxy.plan.ir import Endpoint, Frontend, Plan, ServicePlan
from narthex.proxy.plan.show import claim_text, decision_text, endpoint_text, frontend_text
from narthex.proxy.program.sync import SyncResult
from narthex.runtime.logs import LOGGER, data


class ServiceExplainer:
    """Explains the Service `name` after each sync. `name` may be changed at any time, from any thread; empty: none."""

    def __init__(self, name: str, snapshot: Callable[[], Snapshot]) -> None:
        self.name = name
        self._snapshot = snapshot
        self._said: dict[IPFamily, tuple[str, tuple[ServicePlan, ...]]] = {}

    def after(self, done: SyncResult) -> None:
        """Explain the decisions of this sync, unless they were explained last."""
        name = self.name
        if not name:
            self._said.clear()
            return
        key = NamespacedName(*name.split("/"))
        known = self._said.get(done.family)
        if known and known[0] == name and not any(port.service == key for port in done.changed):
            return
        # The ports of one Service are not indexed: a look at all names, and only when something changed.
        ports = tuple(plan for port, plan in done.plan.services.items() if port.service == key)
        if known == (name, ports):
            return
        self._said[done.family] = name, ports
        for line in lines(key, ports, done.plan, self._snapshot()):
            LOGGER.info("explain %s: %s", done.family.label, line, extra=data(family=done.family.label, service=name))


def lines(key: NamespacedName, ports: tuple[ServicePlan, ...], plan: Plan, snapshot: Snapshot) -> Iterator[str]:
    """Yield the explanation of one Service in one family."""
    service = snapshot.services.get(key)
    if service is None:
        yield f"there is no Service {key}"
        return
    if not ports:
        yield f"Service {key} has no way in: {_why_none(service, plan)}"
    slices = snapshot.slices.get(key, Slices())
    for one in sorted(ports, key=lambda port: port.name.sort_key):
        yield from (f"{one.name}: {line}" for line in _port_lines(one))
    for each in slices.ordered:
        yield from _slice_lines(each, plan.family, ports)
    for conflict in plan.conflicts:
        if key in (conflict.winner.service, conflict.loser.service):
            yield f"{claim_text(conflict)} is claimed by {conflict.winner} and {conflict.loser}: {conflict.winner} has it"
    if key in plan.health_checks:
        check = plan.health_checks[key]
        yield f"health check port {check.port}: {check.local_ready} ready on this node"


def _why_none(service: Service, plan: Plan) -> str:
    if service.type == "ExternalName":
        return "it is of type ExternalName, which is a matter of DNS"
    if service.headless:
        return "it is headless, which is a matter of DNS"
    if not service.cluster_ips:
        return "it has no cluster IP yet"
    return f"it has no {plan.family.label} address or no port, or another proxy is named by its labels"


def _port_lines(one: ServicePlan) -> Iterator[str]:
    for frontend in one.frontends:
        yield f"{frontend_text(frontend)}: {_fate(frontend)}"
    for scope, pool in one.pools.items():
        yield f"pool {scope.value}: {', '.join(map(endpoint_text, pool.endpoints))} ({pool.reason})"
    if one.affinity_seconds is not None:
        yield f"a client keeps its endpoint for {one.affinity_seconds} s"


def _fate(frontend: Frontend) -> str:
    senders = (("pods", frontend.pod), ("this node", frontend.node), ("others", frontend.other))
    said = "; ".join(f"{who}: {decision_text(decision)}" for who, decision in senders)
    if frontend.allow_from is None:
        return said
    return f"only from {', '.join(frontend.allow_from) or 'no source'}; {said}"


def _slice_lines(one: EndpointSlice, family: IPFamily, ports: tuple[ServicePlan, ...]) -> Iterator[str]:
    if one.family is not family:
        return
    for endpoint in one.endpoints:
        states = ", ".join(_states(endpoint))
        for port in one.ports:
            if port.port is None:
                continue
            pools = _pools_with(endpoint.address, port.port, ports)
            where = f"in the pools {' and '.join(pools)}" if pools else "in no pool"
            yield f"slice {one.name}: {join_port(endpoint.address, port.port)} is {states}: {where}"


def _states(endpoint: SliceEndpoint) -> Iterator[str]:
    yield "ready" if endpoint.ready else "not ready"
    if not endpoint.ready:
        yield "serving" if endpoint.serving else "not serving"
    if endpoint.terminating:
        yield "terminating"
    yield f"on node {endpoint.node_name}" if endpoint.node_name else "on no node"
    if endpoint.for_zones:
        yield f"hinted for zone {' and '.join(endpoint.for_zones)}"
    if endpoint.for_nodes:
        yield f"hinted for node {' and '.join(endpoint.for_nodes)}"


def _pools_with(address: str, port: int, ports: tuple[ServicePlan, ...]) -> list[str]:
    found = []
    for one in ports:
        for scope, pool in one.pools.items():
            if Endpoint(address, port, True) in pool.endpoints or Endpoint(address, port, False) in pool.endpoints:
                found.append(f"{scope.value} of {one.name.port or 'the port'}")
    return found
