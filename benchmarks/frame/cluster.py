"""A cluster of any size as objects, and a proxy's way from them to a kernel, in each mode that this machine's kernel has.

Services are spread over nothing (all in namespace `shop`), endpoints over 100 nodes, one of which is ours, as in a cluster
where this would be felt.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from narthex.linux.clock import SystemClock
from narthex.linux.namespaces import create_namespace, delete_namespace
from narthex.model import EndpointSlice, IPFamily, Store, Synced, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.kernel.iptables import IptablesTarget
from narthex.proxy.kernel.ipvs import IpvsTarget
from narthex.proxy.kernel.nftables import NftablesTarget
from narthex.proxy.kernel.userspace import UserspaceTarget
from narthex.proxy.kernel.virtual_servers import NoIpvsError, connect
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.sync import FamilySync
from narthex.testing.build import CONFIG, NODE, endpoint, endpoint_slice, node, service

FAMILY = IPFamily.IPV4
NODES = 100
TARGETS: dict[str, Callable[[str], Any]] = {
    "nftables": lambda namespace: NftablesTarget(FAMILY, namespace),
    "iptables-nft": lambda namespace: IptablesTarget(FAMILY, namespace),
    "iptables-legacy": lambda namespace: IptablesTarget(FAMILY, namespace, legacy=True),
    "userspace": lambda namespace: UserspaceTarget(FAMILY, namespace),
    "ipvs": lambda namespace: IpvsTarget(FAMILY, namespace),
}
"""By mode, and flavour where there are two."""
WITHOUT_TOOL = ("userspace", "ipvs")
"""Modes whose state no one program of the kernel's takes in: there is no floor."""


def here() -> list[str]:
    """Those that this machine's kernel has; what it lacks is said."""
    try:
        connect().close()
    except NoIpvsError as error:
        print(f"mode ipvs is left out: {error}")
        return [mode for mode in TARGETS if mode != "ipvs"]
    return list(TARGETS)


def slice_of(number: int, endpoints: int) -> EndpointSlice:
    """The endpoints of one Service; no two Services share one."""
    first = number * 128
    ends = (first + index for index in range(endpoints))
    made = [
        endpoint(
            f"10.{64 + (end >> 16)}.{end >> 8 & 255}.{end & 255}",
            node=NODE if end % NODES == 0 else f"worker-{end % NODES}",
        )
        for end in ends
    ]
    return endpoint_slice(f"shop/service-{number}", *made, port=8080)


def events(services: int, endpoints: int) -> Iterator[Upsert | Synced]:
    """What a source tells at its start. `services` up to 65,536, `endpoints` of each up to 128 (16 with all of those)."""
    yield Upsert(node())
    for number in range(services):
        yield Upsert(service(f"shop/service-{number}", f"10.110.{number >> 8}.{number & 255}"))
        yield Upsert(slice_of(number, endpoints))
    yield Synced()


def store_of(services: int, endpoints: int) -> Store:
    """A Store that holds them."""
    store = Store()
    for event in events(services, endpoints):
        store.apply(event)
    return store


LAST = "10.111.0.1"
"""Cluster IP of the Service `shop/last`, port 80."""


def store_with_last(services: int, address: str, port: int) -> Store:
    """A Store of so many Services, of which the last leads to this one endpoint on another node."""
    store = Store()
    for event in events(services - 1, 1):
        if isinstance(event, Upsert):
            store.apply(event)
    store.apply(Upsert(service("shop/last", LAST)))
    store.apply(Upsert(endpoint_slice("shop/last", endpoint(address, node="worker-1"), port=port)))
    store.apply(Synced())
    return store


def sync_of(mode: str, namespace: str) -> tuple[FamilySync[Any, Any], Any]:
    """A family's sync from snapshot to kernel, and its Target."""
    target = TARGETS[mode](namespace)
    backend = BACKENDS[mode.partition("-")[0]]
    return FamilySync(FAMILY, Planner(CONFIG, FAMILY), backend, target, SystemClock()), target


@contextmanager
def fresh(label: str) -> Iterator[str]:
    """A network namespace for one measurement."""
    name = f"nxbench-{os.getpid()}-{label}"
    create_namespace(name)
    try:
        yield name
    finally:
        delete_namespace(name)


@contextmanager
def quiet() -> Iterator[None]:
    """As in a proxy before its first sync: no search for garbage. Afterwards what is there now is not looked through."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
