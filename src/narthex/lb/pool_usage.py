"""Reserved addresses of a cluster, and the usage of its pools after allocation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from narthex.lb.pools import Pools, ReservedAddresses
from narthex.lb.resources import selects_pool
from narthex.lb.service_status import AllocationDecision, status_addresses
from narthex.model.net import host_network
from narthex.model.objects import L2Advertisement, Labels, NamespacedName, Service
from narthex.model.store import Snapshot


class PoolUse(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of one pool, for output and metrics."""

    name: str
    addresses: tuple[str, ...]
    """As written by the user."""
    total: int = 0
    """Number of addresses that it can assign."""
    in_use: int = 0
    """Number of its addresses that Services have, whichever controller assigned them."""
    services: tuple[str, ...] = ()
    """Services that have an address of the pool."""
    auto_assign: bool = True
    advertisements: tuple[str, ...] = ()
    refused: str = ""
    """Why the pool cannot be used; empty if it can."""


def reserved_addresses(snapshot: Snapshot, cluster_cidrs: Iterable[str] = ()) -> ReservedAddresses:
    """Return the addresses that no pool may contain: those of Pods, Services, and nodes.

    `cluster_cidrs` are the Pod networks, if configured.
    """
    networks = dict.fromkeys(cluster_cidrs, "where pods are (--cluster-cidr)")
    addresses: dict[str, str] = {}
    for _, node in sorted(snapshot.nodes.items()):
        for cidr in node.pod_cidrs:
            networks.setdefault(cidr, f"the pods of node {node.name}")
        for address in (*node.internal_ips, *node.external_ips):
            addresses.setdefault(address, f"an address of node {node.name}")
    for _, each in sorted(snapshot.service_cidrs.items()):
        for cidr in each.cidrs:
            networks.setdefault(cidr, f"the Services' range (ServiceCIDR {each.name})")
    if not snapshot.service_cidrs:
        # API servers before 1.31 do not expose the range; the cluster IPs show it.
        for _, service in sorted(snapshot.services.items()):
            for address in service.cluster_ips:
                if address != "None":
                    networks.setdefault(host_network(address), f"the cluster IP of {service.key}")
    return ReservedAddresses(networks=networks, addresses=addresses)


def namespace_labels(snapshot: Snapshot) -> Mapping[str, Labels]:
    """Return the labels of each namespace by name."""
    return {key.name: namespace.labels for key, namespace in snapshot.namespaces.items()}


def usage(
    pools: Pools,
    services: Iterable[Service],
    decisions: Mapping[NamespacedName, AllocationDecision],
    advertisements: Iterable[L2Advertisement] = (),
) -> tuple[PoolUse, ...]:
    """Return the usage of all pools by name. An address counts from the decision until no status contains it."""
    users: dict[str, set[str]] = {}
    for service in services:
        decision = decisions.get(service.key)
        for address in {*status_addresses(service), *(decision.addresses if decision is not None else ())}:
            users.setdefault(address, set()).add(str(service.key))
    by_pool: dict[str, list[str]] = {}
    for address in users:
        if (pool := pools.of(address)) is not None:
            by_pool.setdefault(pool.name, []).append(address)
    ads = sorted(advertisements, key=lambda each: each.key)
    found = [
        PoolUse(
            name=pool.name,
            addresses=pool.object.addresses,
            total=pool.size,
            in_use=len(by_pool.get(pool.name, ())),
            services=tuple(sorted({user for address in by_pool.get(pool.name, ()) for user in users[address]})),
            auto_assign=pool.object.auto_assign,
            advertisements=tuple(each.name for each in ads if selects_pool(each, pool.object)),
        )
        for pool in pools.accepted
    ]
    found += [
        PoolUse(
            name=each.object.name,
            addresses=each.object.addresses,
            auto_assign=each.object.auto_assign,
            refused=each.reason,
        )
        for each in pools.refused
    ]
    return tuple(sorted(found, key=lambda use: use.name))
