"""ipMasq: packets of pods that leave their subnet get the node's address.

With our nftables table, whose rules are constant and whose sets have the pods, or the reference plugins' iptables chains.
"""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import NOT_AS_ADDED, CniError
from narthex.cni.kernel import records
from narthex.cni.kernel.tables import owner_of
from narthex.cni.plugins import masquerade
from narthex.cni.result import IPConfig
from narthex.model.values import packed_network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from narthex.cni.program.node import NodeContext
    from narthex.cni.request import CniRequest


_PODS, _NEAR = ("pods4", "pods6"), ("near4", "near6")


def add(node: NodeContext, request: CniRequest, backend: str, ips: tuple[IPConfig, ...]) -> None:
    """Masquerade a pod. Raises OSError, CniError."""
    record = {"backend": backend, "ips": [str(ip.network) for ip in ips]}
    node.records.put(records.MASQUERADE, request.attachment, record)
    if backend == "nftables":
        node.masquerade.add(masquerade.elements(ips), owner_of(request.attachment), masquerade.subnets(ips))
    else:
        from narthex.cni.program import iptables as chains

        chains.masquerade(request, ips)


def remove(node: NodeContext, request: CniRequest, configured: bool) -> None:
    """Stop masquerading a pod. `configured`: without a record, it may have the reference plugins' chains."""
    record = node.records.get(records.MASQUERADE, request.attachment)
    if record is not None or configured:
        _close(node, request.attachment, record or {})
    else:
        node.records.drop(records.MASQUERADE, request.attachment)


def _close(node: NodeContext, attachment: str, record: Mapping[str, object]) -> None:
    if record.get("backend") == "nftables":
        node.masquerade.remove(masquerade.elements(_ips_of(record)), owner_of(attachment))
    else:
        from narthex.cni.program import iptables as chains

        network, container, _ = attachment.split(":")
        chains.unmasquerade(network, container)
    node.records.drop(records.MASQUERADE, attachment)


def _ips_of(record: Mapping[str, object]) -> tuple[IPConfig, ...]:
    found = []
    for text in fields.items(record, "ips"):
        try:
            found.append(IPConfig(packed_network(str(text))))
        except ValueError:
            continue
    return tuple(found)


def check(node: NodeContext, request: CniRequest, backend: str, ips: tuple[IPConfig, ...]) -> None:
    """Check that a pod is masqueraded. Raises CniError."""
    if backend == "nftables":
        owner = owner_of(request.attachment)
        good = all(node.masquerade.has(one, owner) for one in masquerade.elements(ips))
    else:
        from narthex.cni.program import iptables as chains

        good = chains.masquerades(request, ips)
    if not good:
        raise CniError(NOT_AS_ADDED, f"container {request.container} is no longer masqueraded ({backend})")


def collect(node: NodeContext, request: CniRequest, valid: frozenset[tuple[str, str]]) -> None:
    """Remove the rules of all attachments that are not valid (GC)."""
    for attachment, record in node.records.invalid(records.MASQUERADE, request.network, valid):
        _close(node, attachment, record)


def resync(node: NodeContext) -> int:
    """Restore removed elements and remove those that no attachment uses; return their number. Raises OSError."""
    ips_of = {attachment: _ips_of(record) for attachment, record in node.lasting(records.MASQUERADE, _close)}
    expected = {owner_of(name): (masquerade.elements(ips), masquerade.subnets(ips)) for name, ips in ips_of.items()}
    changed = node.masquerade.reconcile(expected, (*_PODS, *_NEAR))
    changed += node.masquerade.remove_orphans(_PODS, node.records.all(records.MASQUERADE))
    for held in node.masquerade.held(_NEAR):
        # Of all records, read again: attachments may have been added meanwhile.
        used = (
            one.key for _, record in node.records.all(records.MASQUERADE) for one in masquerade.subnets(_ips_of(record))
        )
        if held.element.key not in used:
            node.masquerade.remove([held.element], "")
            changed += 1
    return changed
