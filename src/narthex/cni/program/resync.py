"""Puts the rules of pods back that somebody removed, from the node's records, and removes those that are nobody's."""

from __future__ import annotations

from narthex.cni.kernel import records
from narthex.cni.kernel.tables import owner_of
from narthex.cni.plugins.masquerade import subnets
from narthex.cni.program import ports
from narthex.cni.program.masquerade import ips_of, put, take
from narthex.cni.program.node import Node


def resync(state: str) -> int:
    """Compare tables and records; how many elements were missing or too many. Raises OSError."""
    node = Node(state)
    try:
        return ports.resync(node) + _masquerade(node)
    finally:
        node.close()


def _masquerade(node: Node) -> int:
    names = node.names()
    wanted = {}
    for attachment, record in list(node.records.all(records.MASQUERADE)):
        pod = node.records.get(records.PODS, attachment)
        if record.get("backend") != "nftables":
            continue
        if pod is not None and records.is_gone(pod, names):
            take(node, attachment, record)
            node.records.drop(records.MASQUERADE, attachment)
            continue
        wanted[attachment] = ips_of(record)
    if not wanted and not node.masquerade.is_whole():
        return 0
    node.masquerade.mend()
    changed = 0
    there = {held.element.key for held in node.masquerade.held(("pods4", "pods6"))}
    for attachment, ips in wanted.items():
        if any(ip.network.address not in there for ip in ips):
            put(node, attachment, ips)
            changed += len(ips)
    owners = {owner_of(attachment) for attachment, _ in node.records.all(records.MASQUERADE)}
    for held in node.masquerade.held(("pods4", "pods6")):
        if held.owner not in owners:
            node.masquerade.remove([held.element], held.owner)
            changed += 1
    used = {one for ips in wanted.values() for one in subnets(ips)}
    for held in node.masquerade.held(("near4", "near6")):
        if held.element not in used and not _is_used(node, held.element.key):
            node.masquerade.remove([held.element], "")
            changed += 1
    return changed


def _is_used(node: Node, key: bytes) -> bool:
    """Whether an attachment of just now has brought its network."""
    first = key[: len(key) // 2]
    return any(ip.network.first == first for _, record in node.records.all(records.MASQUERADE) for ip in ips_of(record))
