"""Peer nodes of the overlay: from Node objects to Pod subnets and the addresses that packets are sent to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from narthex.model import IPFamily, Node, family_of, parsed_network
from narthex.overlay.annotations import AnnotationKeys, derived_mac, given_public_ip, public_ip, vtep_mac
from narthex.overlay.net_conf import BACKENDS, VXLAN, NetConf


class OverlayPeer(msgspec.Struct, frozen=True, kw_only=True):
    """One peer node in one IP family."""

    node: str
    family: IPFamily
    subnet: str
    public_ip: str
    mac: str = ""
    """MAC address of its VXLAN device; empty if its backend is host-gw, which needs none."""


class PeerSelection(NamedTuple):
    """Usable peers, and the problems of others by node."""

    usable: tuple[OverlayPeer, ...]
    problems: tuple[str, ...]


class NodeNotReadyError(ValueError):
    """This node cannot join the overlay yet; the message says what is missing."""


def node_subnets(node: Node | None, name: str, conf: NetConf) -> dict[IPFamily, str]:
    """Return this node's subnet of each family. Raises NodeNotReadyError."""
    if node is None:
        raise NodeNotReadyError(
            f"node {name}: there is no such Node: check --node, or wait until its kubelet has registered it"
        )
    found = {}
    for network in conf.networks:
        family = family_of(network)
        subnet = next((cidr for cidr in node.pod_cidrs if family_of(cidr) is family), "")
        if not subnet:
            raise NodeNotReadyError(
                f"node {name}: spec.podCIDRs has no network of {family.label} (pod cidr not assigned): start the controller "
                f"manager with --allocate-node-cidrs and --cluster-cidr {network}, or write spec.podCIDR yourself"
            )
        if not within(subnet, network):
            raise NodeNotReadyError(
                f"node {name}: spec.podCIDR {subnet} is not within {network}, the Network of net-conf.json: "
                "give the controller manager and net-conf.json the same network"
            )
        found[family] = subnet
    return found


def overlay_peers(
    nodes: Iterable[Node], own_name: str, conf: NetConf, keys: AnnotationKeys, *, assumed: bool
) -> PeerSelection:
    """Return all peers.

    During a change of the backend, some nodes have the previous one: they are peers, with the backend that they published.
    `assumed`: Nodes without annotations are peers too, at their InternalIP with a derived MAC address; for directories of
    manifests.
    """
    usable: list[OverlayPeer] = []
    problems: list[str] = []
    for node in nodes:
        managed = node.annotation(keys.managed) == "true"
        if node.name == own_name or not (managed or assumed):
            continue
        type_ = node.annotation(keys.type) or (conf.backend.type if assumed else "")
        if type_ != conf.backend.type:
            what = f"node {node.name}: its backend is {type_ or 'unknown'}, not {conf.backend.type}"
            if type_ not in BACKENDS:
                problems.append(f"{what}: no route to it")
                continue
            problems.append(
                f"{what}: packets to it take {type_} where they can, until both have the same net-conf.json"
            )
        for network in conf.networks:
            try:
                usable.append(_peer(node, network, conf, keys, type_, assumed))
            except ValueError as error:
                problems.append(f"node {node.name}: {error}")
    return PeerSelection(tuple(usable), tuple(problems))


def _peer(node: Node, network: str, conf: NetConf, keys: AnnotationKeys, backend: str, assumed: bool) -> OverlayPeer:
    family = family_of(network)
    subnet = next((cidr for cidr in node.pod_cidrs if family_of(cidr) is family), "")
    if not subnet:
        raise ValueError(f"spec.podCIDRs has no network of {family.label} yet: no route to it")
    if not within(subnet, network):
        raise ValueError(f"spec.podCIDR {subnet} is not within {network}, the Network of net-conf.json: no route to it")
    there = public_ip(node, keys, family)
    if not there and assumed:
        ips = (*node.internal_ips, *node.external_ips)
        there = given_public_ip(node, keys, family) or next((ip for ip in ips if family_of(ip) is family), "")
    if not there:
        raise ValueError(
            f"it has published no address of {family.label} (annotation {keys.public_ip[family]}): no route to it"
        )
    mac = ""
    if backend == VXLAN:
        mac = vtep_mac(node, keys, family, conf.backend.vni if conf.backend.type == VXLAN else None)
        if not mac and assumed:
            mac = derived_mac(node.name, conf.backend.vni, family)
        if not mac:
            raise ValueError(f"it has published no MAC address (annotation {keys.data[family]}): no route to it")
    return OverlayPeer(node=node.name, family=family, subnet=subnet, public_ip=there, mac=mac)


def without_conflicts(
    found: Iterable[OverlayPeer], own_name: str, subnets: Mapping[IPFamily, str], own_ips: Mapping[IPFamily, str]
) -> PeerSelection:
    """Return the peers without conflicting addresses or subnets; of conflicting nodes, the first by name wins."""
    usable: list[OverlayPeer] = []
    problems: list[str] = []
    for family, group in itertools.groupby(
        sorted(found, key=lambda one: (one.family.value, one.node)), lambda one: one.family
    ):
        ips = {own_ips.get(family, ""): own_name}
        macs: dict[str, str] = {}
        good: list[OverlayPeer] = []
        for one in group:
            holder = ips.setdefault(one.public_ip, one.node)
            if holder != one.node:
                problems.append(
                    f"nodes {holder} and {one.node} both have the public address {one.public_ip}: packets for one reach the "
                    "other; give each its own with --iface, --iface-can-reach or --public-ip "
                    "(machines of Vagrant all have 10.0.2.15 on their first interface)"
                )
                if holder == own_name:
                    continue
            holder = macs.setdefault(one.mac, one.node) if one.mac else one.node
            if holder != one.node:
                problems.append(
                    f"nodes {holder} and {one.node} both have the MAC address {one.mac}: "
                    f"delete the vxlan device of {one.node} and its annotation; a new one is created then"
                )
                continue
            good.append(one)
        kept, overlaps = _apart(good, own_name, subnets.get(family, ""))
        usable += kept
        problems += overlaps
    return PeerSelection(tuple(usable), tuple(problems))


def _apart(found: list[OverlayPeer], own_name: str, own_subnet: str) -> tuple[list[OverlayPeer], list[str]]:
    """Return the peers whose subnets do not overlap, and the problems of the others."""
    claims = [(*_ends(one.subnet), one.node, one) for one in found]
    if own_subnet:
        # This node's own subnet wins ties.
        claims.append((*_ends(own_subnet), "", None))  # type: ignore[arg-type]
    claims.sort(key=lambda claim: claim[:3])
    kept: list[OverlayPeer] = []
    problems: list[str] = []
    last, holder, held = -1, "", ""
    for first, end, _, one in claims:
        name, subnet = (own_name, own_subnet) if one is None else (one.node, one.subnet)
        if first <= last:
            problems.append(
                f"nodes {holder} and {name} both have pods in {subnet} (spec.podCIDR {held} and {subnet}): fix one of the Nodes"
            )
            if one is not None:
                continue
        last, holder, held = end, name, subnet
        if one is not None:
            kept.append(one)
    return kept, problems


def _ends(cidr: str) -> tuple[int, int]:
    net = parsed_network(cidr)
    return int(net.network_address), int(net.broadcast_address)


def within(subnet: str, network: str) -> bool:
    """Return True if a network contains a whole subnet."""
    (first, last), (low, high) = _ends(subnet), _ends(network)
    return family_of(subnet) is family_of(network) and low <= first and last <= high
