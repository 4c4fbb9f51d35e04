"""Plans made by hand, for the tests of the nftables backend."""

from typing import Any

from immutables import Map

from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import NamespacedName, ServicePortName
from narthex.proxy.plan.ir import (
    Drop,
    Endpoint,
    Forward,
    Frontend,
    FrontendKind,
    Lineage,
    NodePorts,
    Plan,
    PodDetector,
    Pool,
    Reject,
    Scope,
    ServicePlan,
)

TCP = Protocol.TCP
CLUSTER, CLUSTER_MASQ = Forward(Scope.CLUSTER, False), Forward(Scope.CLUSTER, True)
LOCAL, LOCAL_MASQ = Forward(Scope.LOCAL, False), Forward(Scope.LOCAL, True)
DROP, REJECT = Drop(), Reject()
INTERNAL = CLUSTER, CLUSTER_MASQ, CLUSTER_MASQ
EXTERNAL_LOCAL = CLUSTER, CLUSTER_MASQ, LOCAL
NOTHING_LOCAL = CLUSTER, CLUSTER_MASQ, DROP
REFUSED = REJECT, REJECT, REJECT


def port_name(text: str, port: str = "http", protocol: Protocol = TCP) -> ServicePortName:
    return ServicePortName(NamespacedName("shop", text), port, protocol)


def pool(*numbers: int, local: tuple[int, ...] = ()) -> Pool:
    return Pool(endpoints=tuple(Endpoint(f"10.64.1.{number}", 8080, number in local) for number in numbers))


def frontend(
    address: str | None,
    port: int,
    row: Any,
    kind: FrontendKind = FrontendKind.CLUSTER_IP,
    protocol: Protocol = TCP,
    allow_from: Any = None,
) -> Frontend:
    pod, node, other = row
    return Frontend(
        kind=kind, address=address, protocol=protocol, port=port, pod=pod, node=node, other=other, allow_from=allow_from
    )


def node_port(port: int, row: Any, **fields: Any) -> Frontend:
    return frontend(None, port, row, kind=FrontendKind.NODE_PORT, **fields)


def balancer(address: str, port: int, row: Any, **fields: Any) -> Frontend:
    return frontend(address, port, row, kind=FrontendKind.LOAD_BALANCER, **fields)


def service(
    text: str, *frontends: Frontend, cluster: Any = None, local: Any = None, affinity: Any = None, port: str = "http"
) -> ServicePlan:
    return ServicePlan(
        name=port_name(text, port), frontends=frontends, cluster=cluster, local=local, affinity_seconds=affinity
    )


def plan(*services: ServicePlan, pods: Any = None, **fields: Any) -> Plan:
    return Plan(
        family=IPFamily.IPV4,
        services=Map({one.name: one for one in services}),
        pods=PodDetector(cidrs=("10.64.0.0/12",)) if pods is None else pods,
        service_cidrs=fields.pop("service_cidrs", ("10.96.0.0/16",)),
        node_ports=NodePorts(cidrs=fields.pop("node_port_cidrs", None)),
        **fields,
    )


def after(before: Plan, *services: ServicePlan, removed: Any = ()) -> Plan:
    """The next plan: these Services instead of, or beside, those of the plan before."""
    held: Any = before.services
    for name in removed:
        held = held.delete(name)
    for one in services:
        held = held.set(one.name, one)
    return Plan(
        family=before.family,
        services=held,
        pods=before.pods,
        service_cidrs=before.service_cidrs,
        node_ports=before.node_ports,
        masquerade_mark=before.masquerade_mark,
        lineage=Lineage(before.lineage, frozenset({*removed, *(one.name for one in services)})),
    )


def everything(affinity: Any = None) -> ServicePlan:
    """One Service with every kind of frontend, three endpoints, one of them here."""
    return service(
        "web",
        frontend("10.96.0.1", 80, INTERNAL),
        node_port(30080, EXTERNAL_LOCAL),
        balancer("203.0.113.10", 80, NOTHING_LOCAL, allow_from=("198.51.100.0/25", "198.51.100.200/32")),
        balancer("203.0.113.11", 80, REFUSED),
        cluster=pool(10, 11, 12, local=(10,)),
        local=pool(10, local=(10,)),
        affinity=affinity,
    )
