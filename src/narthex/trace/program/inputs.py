"""The inputs of plan, render, and trace: manifests or an API server, a node, and a configuration, read once.

What reads objects and plans is imported when it is needed: a trace of a dump alone needs neither.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from narthex.model import (
    FAMILIES,
    Host,
    InputError,
    IPFamily,
    NamespacedName,
    Node,
    Problem,
    Snapshot,
    Store,
    Synced,
    address,
    family_of,
    network,
)
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.planner import NodeConfig, plan_once
from narthex.runtime.configuration.file import ProxyConfiguration, read


class ClusterObjects(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of a cluster."""

    snapshot: Snapshot
    problems: tuple[Problem, ...] = ()


class NodeInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One node's view of a cluster."""

    snapshot: Snapshot
    config: NodeConfig
    mode: str
    problems: tuple[str, ...] = ()
    """Warnings: what is wrong without preventing a plan."""

    @property
    def node(self) -> Node:
        """The node, without addresses if they are unknown."""
        key = NamespacedName("", self.config.node_name)
        return self.snapshot.nodes.get(key) or Node(name=self.config.node_name)

    @property
    def host(self) -> Host:
        """The node's own addresses, by its Node object or `--node-ip`."""
        return Host(addresses=(*self.node.internal_ips, *self.node.external_ips))

    @property
    def families(self) -> tuple[IPFamily, ...]:
        """The IP families of Services and node; IPv4 if there is none."""
        addresses = [*self.host.addresses]
        for service in self.snapshot.services.values():
            addresses += [ip for ip in service.cluster_ips if ip != "None"]
        found = {family_of(ip) for ip in addresses}
        return tuple(family for family in FAMILIES if family in found) or (IPFamily.IPV4,)

    def plan(self, family: IPFamily) -> Plan:
        """Return the node's plan."""
        return plan_once(self.snapshot, self.config, family)


def read_cluster(manifests: Path) -> ClusterObjects:
    """Read all objects below a path. Raises InputError if none of them can be used."""
    from narthex.kube.manifests import ManifestSource

    source = ManifestSource(manifests)
    store = Store()
    for event in source.scan():
        store.apply(event)
    snapshot = store.snapshot
    if not snapshot.synced:
        raise InputError("; ".join(map(str, source.problems)) or f"{manifests} cannot be read")
    if not (snapshot.services or snapshot.nodes or snapshot.slices):
        details = "".join(f"\n  {problem}" for problem in source.problems)
        raise InputError(f"{manifests} holds no Service, EndpointSlice or Node that can be used{details}")
    return ClusterObjects(snapshot=snapshot, problems=source.problems)


def read_server(kubeconfig: str, master: str, *, pods: bool = False) -> ClusterObjects:
    """List all objects of a cluster once, with Pods if `pods`. Raises InputError.

    Without a kubeconfig and a URL, it connects as a pod does.
    """
    from narthex.kube.access import access_to
    from narthex.kube.client import Unreachable
    from narthex.kube.resources import of_a_cluster
    from narthex.kube.snapshot import read_once

    access = access_to(kubeconfig, master)
    store = Store()
    try:
        events, problems = read_once(access, of_a_cluster(pods=pods))
    except Unreachable as error:
        raise InputError(str(error)) from error
    for event in (*events, Synced()):
        store.apply(event)
    return ClusterObjects(snapshot=store.snapshot, problems=problems)


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the user; empty ones are taken from configuration or objects."""

    node: str = ""
    mode: str = ""
    config_file: Path | None = None
    cluster_cidr: str = ""
    """One CIDR for each IP family, separated by a comma; overrides the configuration."""
    node_ips: tuple[str, ...] = ()
    """The node's own addresses; override those of the Node object."""


def node_inputs(cluster: ClusterObjects, chosen: NodeOptions) -> NodeInputs:
    """Return a node's view of a cluster. Raises InputError."""
    from narthex.proxy.kernel.dataplanes import DATAPLANES, node_config

    try:
        configuration, warnings = read(chosen.config_file) if chosen.config_file else (ProxyConfiguration(), ())
        if chosen.cluster_cidr:
            cidrs = tuple(network(part.strip()) for part in chosen.cluster_cidr.split(","))
            configuration = msgspec.structs.replace(configuration, cluster_cidrs=cidrs)
        own = tuple(address(ip) for ip in chosen.node_ips)
    except ValueError as error:
        raise InputError(str(error)) from error
    mode = chosen.mode or configuration.mode
    if mode not in DATAPLANES:
        raise InputError(f"mode {mode!r} does not exist; choose {', '.join(DATAPLANES)}")
    name = chosen.node or configuration.hostname_override or _only_node(cluster.snapshot)
    inputs = NodeInputs(
        snapshot=_with_addresses(cluster.snapshot, name, own),
        config=node_config(configuration, mode, name),
        mode=mode,
        problems=(*map(str, cluster.problems), *map(str, warnings)),
    )
    if inputs.host.addresses:
        return inputs
    unknown = (
        f"no address of node {name} is known, so nothing answers on its node ports: "
        f"add a Node {name} with an InternalIP to the manifests, or give --node-ip"
    )
    return msgspec.structs.replace(inputs, problems=(*inputs.problems, unknown))


def _only_node(snapshot: Snapshot) -> str:
    names = sorted(key.name for key in snapshot.nodes)
    if len(names) == 1:
        return names[0]
    if not names:
        raise InputError("which node? The manifests hold no Node; name one with --node")
    raise InputError(f"which node? Choose one with --node: {', '.join(names)}")


def _with_addresses(snapshot: Snapshot, name: str, own: tuple[str, ...]) -> Snapshot:
    if not own:
        return snapshot
    key = NamespacedName("", name)
    node = msgspec.structs.replace(snapshot.nodes.get(key) or Node(name=name), internal_ips=own)
    return msgspec.structs.replace(snapshot, nodes=snapshot.nodes.set(key, node))
