"""The lists that programs follow at the API server, with kube-proxy's selectors (rows 1.1, 1.3, 2.2)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from narthex.model.decode.objects import Decoded

NOT_OURS = "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name"
"""Label selector that excludes slices of headless Services and Services of another proxy."""


class WatchedResource(msgspec.Struct, frozen=True, kw_only=True):
    """One list to follow."""

    kind: str
    """As in `model.store.Delete`."""
    paths: tuple[str, ...]
    """Paths by API version, the newest first. A server without that version answers 404."""
    labels: str = ""
    fields: str = ""
    """Field selector that every server knows."""
    fields_if_known: str = ""
    """Field selector that only saves traffic. If the server answers 400, the list is requested without it."""
    optional: bool = False
    """A list that the server lacks or forbids counts as empty."""
    decode: Callable[[msgspec.Raw], Decoded] | None = None
    """Reads one object in a form of the program's own; None: as an object of the model."""


SERVICES = WatchedResource(
    kind="Service",
    paths=("/api/v1/services",),
    labels=NOT_OURS,
    # Servers know it since 1.31. Headless Services get no rules in any case.
    fields_if_known="spec.clusterIP!=None",
)
ENDPOINT_SLICES = WatchedResource(
    kind="EndpointSlice", paths=("/apis/discovery.k8s.io/v1/endpointslices",), labels=NOT_OURS
)
NODES = WatchedResource(kind="Node", paths=("/api/v1/nodes",))
SERVICE_CIDRS = WatchedResource(
    kind="ServiceCIDR",
    # v1 since 1.33, v1beta1 where 1.31 and 1.32 have it switched on.
    paths=("/apis/networking.k8s.io/v1/servicecidrs", "/apis/networking.k8s.io/v1beta1/servicecidrs"),
    optional=True,
)
PODS = WatchedResource(kind="Pod", paths=("/api/v1/pods",), optional=True)
"""For commands that know pods by name; a proxy does not list them."""

ALL_SERVICES = WatchedResource(kind="Service", paths=SERVICES.paths)
"""Also those that no node proxy serves, since each may hold a load balancer address."""
LISTED_SLICES = WatchedResource(
    kind="EndpointSlice", paths=ENDPOINT_SLICES.paths, labels="!service.kubernetes.io/headless"
)
"""Of all Services that have an address."""
NAMESPACES = WatchedResource(kind="Namespace", paths=("/api/v1/namespaces",))
ADDRESS_POOLS = WatchedResource(kind="IPAddressPool", paths=("/apis/metallb.io/v1beta1/ipaddresspools",))
"""Not optional: a server that hides them for a moment must not look like one without pools."""
L2_ADVERTISEMENTS = WatchedResource(
    kind="L2Advertisement", paths=("/apis/metallb.io/v1beta1/l2advertisements",), optional=True
)


def own_node(name: str) -> WatchedResource:
    """Return the list that contains only the Node with this name."""
    return msgspec.structs.replace(NODES, fields=f"metadata.name={name}")


def of_a_proxy(node_name: str) -> tuple[WatchedResource, ...]:
    """Return the lists of a node proxy."""
    return SERVICES, ENDPOINT_SLICES, own_node(node_name), SERVICE_CIDRS


def of_names(*, endpoints: bool = True, pods: bool = False) -> tuple[WatchedResource, ...]:
    """Return the lists of a DNS server, including headless Services and those of other proxies.

    `pods` selects only pods that may have an address to keep (row D24).
    """
    slices = msgspec.structs.replace(ENDPOINT_SLICES, labels="")
    living = "status.phase!=Succeeded,status.phase!=Failed,status.phase!=Unknown"
    watched = msgspec.structs.replace(PODS, fields_if_known=living, optional=False)
    return ALL_SERVICES, *([slices] if endpoints else []), NAMESPACES, *([watched] if pods else [])


def of_an_announcer(*, pools: bool = True) -> tuple[WatchedResource, ...]:
    """Return the lists that determine the announcer of a load balancer address.

    Without `pools`, these come from a file.
    """
    return ALL_SERVICES, LISTED_SLICES, NODES, *([ADDRESS_POOLS, L2_ADVERTISEMENTS] if pools else [])


def of_an_allocator(*, pools: bool = True) -> tuple[WatchedResource, ...]:
    """Return the lists that determine the addresses of load balancers. Without `pools`, these come from a file."""
    return ALL_SERVICES, NAMESPACES, NODES, SERVICE_CIDRS, *([ADDRESS_POOLS] if pools else [])


def of_a_cluster(*, pods: bool = False) -> tuple[WatchedResource, ...]:
    """Return the lists for an inspection of a cluster from any of its nodes."""
    pools = msgspec.structs.replace(ADDRESS_POOLS, optional=True)
    return SERVICES, ENDPOINT_SLICES, NODES, SERVICE_CIDRS, pools, L2_ADVERTISEMENTS, *([PODS] if pods else [])
