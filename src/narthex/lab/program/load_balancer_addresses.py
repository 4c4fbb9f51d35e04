"""Allocation of load balancer addresses, with the decisions of `narthex lb controller`.

Only labs with a pool import this module.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from narthex.lab import topology
from narthex.lab.topology import LabNode
from narthex.lb.allocate import AllocationInput, allocate
from narthex.lb.election import announced_addresses
from narthex.lb.pools import (
    AddressRange,
    Pools,
    ReservedAddresses,
    address_text,
    namespace_labels,
    read_range,
    validate_pools,
)
from narthex.lb.service_status import (
    ALLOCATED_FROM,
    PREFIX,
    AllocationDecision,
    pool_of,
    pool_patch,
    service_path,
    status_patch,
)
from narthex.model import (
    IPAddressPool,
    IPFamily,
    LoadBalancerIngress,
    NamespacedName,
    Problem,
    Service,
    Snapshot,
    host_network,
)

_NAMESPACE = "metallb-system"


class AddressAllocation(NamedTuple):
    """The result of an allocation."""

    changed: dict[NamespacedName, Service]
    """Services whose addresses change, with their new values."""
    networks: tuple[str, ...]
    """Networks of the addresses that nodes answer for, sorted."""
    problems: tuple[Problem, ...]


def pools_of(ranges: Sequence[str], nodes: Sequence[LabNode]) -> tuple[IPAddressPool, ...]:
    """Return pools for ranges from the command line. Raises ValueError with the reason if a range is unusable.

    The first range of each IP family form one pool, so that a Service can have both families, the second ones another, etc.
    """
    read = [read_range(text) for text in ranges]
    four, six = ([each.text for each in read if each.family is family] for family in (IPFamily.IPV4, IPFamily.IPV6))
    made = tuple(
        IPAddressPool(
            name=f"lab-{number}",
            namespace=_NAMESPACE,
            addresses=tuple(filter(None, both)),
            # The first address of 192.168.15.0/28 would look like a network address.
            avoid_buggy=True,
        )
        for number, both in enumerate(zip_longest(four, six), 1)
    )
    for refused in _settled(made, nodes).refused:
        raise ValueError(refused.reason)
    return made


def allocate_addresses(
    snapshot: Snapshot, nodes: Sequence[LabNode], held_back: Mapping[str, NamespacedName] = MappingProxyType({})
) -> AddressAllocation:
    """Allocate addresses for the cluster's Services, which keep those that they have; `held_back` ones go to others last."""
    pools = _settled(snapshot.address_pools.values(), nodes, _own_ranges(snapshot))
    services = snapshot.services
    decisions = allocate(
        AllocationInput(
            services=services.values(), pools=pools, namespaces=namespace_labels(snapshot), held_back=held_back
        )
    )
    made = {key: _decided(services[key], decision) for key, decision in decisions.items()}
    given = [ip for each in decisions.values() if not each.foreign for ip in each.addresses]
    problems = [
        *_refusals(pools),
        *(each for key in sorted(decisions) for each in _said(services[key], decisions[key])),
    ]
    changed = {key: service for key, service in made.items() if service != services[key]}
    return AddressAllocation(changed, tuple(_networks(pools, given)), tuple(problems))


def patches(service: Service) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and merge patch of each write that a changed Service needs."""
    version = ""
    yield service_path(service.key), _unversioned(pool_patch(pool_of(service), version))
    addresses = tuple(entry.ip for entry in service.ingress)
    yield f"{service_path(service.key)}/status", _unversioned(status_patch(addresses, version))


def _unversioned(patch: dict[str, Any]) -> dict[str, Any]:
    """Remove the resourceVersion: the caller holds the lock, so no other write intervenes."""
    meta = {name: value for name, value in patch.get("metadata", {}).items() if name != "resourceVersion"}
    return {**patch, "metadata": meta}


def answered_addresses(services: Iterable[Service]) -> frozenset[str]:
    """Return all addresses that a node may answer for."""
    return frozenset(address for service in services for address in announced_addresses(service))


def _settled(
    objects: Iterable[IPAddressPool], nodes: Sequence[LabNode], more: Mapping[str, str] | None = None
) -> Pools:
    networks = {**(more or {}), **topology.taken_networks()}
    return validate_pools(objects, ReservedAddresses(networks=networks, addresses=topology.taken_addresses(nodes)))


def _own_ranges(snapshot: Snapshot) -> dict[str, str]:
    return {
        cidr: f"the Services' range (ServiceCIDR {each.name})"
        for _, each in sorted(snapshot.service_cidrs.items())
        for cidr in each.cidrs
    }


def _decided(service: Service, decision: AllocationDecision) -> Service:
    if decision.foreign:
        return service
    return _with(service, tuple(LoadBalancerIngress(ip=ip) for ip in decision.addresses), decision.pool)


def _with(service: Service, ingress: tuple[LoadBalancerIngress, ...], pool: str) -> Service:
    """Return the Service with this status and the annotation that a controller writes."""
    name = PREFIX + ALLOCATED_FROM
    others = [each for each in service.annotations if each[0] != name]
    annotations = tuple(sorted([*others, (name, pool)] if pool else others))
    return msgspec.structs.replace(service, ingress=ingress, ingress_names=(), annotations=annotations)


def _refusals(pools: Pools) -> Iterator[Problem]:
    for each in pools.refused:
        name = f"IPAddressPool {each.object.key}"
        yield Problem(origin=each.object.origin, object=name, message=f"is refused: {each.reason}")


def _said(service: Service, decision: AllocationDecision) -> Iterator[Problem]:
    for text in (str(decision.refusal) if decision.refusal is not None else "", decision.note):
        if text:
            yield Problem(origin=service.origin, object=f"Service {service.key}", message=text, severity="warning")


def _networks(pools: Pools, given: Iterable[str]) -> list[str]:
    """Return the networks to route to the nodes' link: all pools, and addresses from pools that are rejected by now."""
    found = {cidr for pool in pools.accepted for each in pool.ranges for cidr in _cidrs(each)}
    found |= {host_network(ip) for ip in given if pools.of(ip) is None}
    return sorted(found)


def _cidrs(range_: AddressRange) -> Iterator[str]:
    first, last = (ipaddress.ip_address(address_text(range_.family, number)) for number in (range_.first, range_.last))
    return map(str, ipaddress.summarize_address_range(first, last))
