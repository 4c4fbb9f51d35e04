"""ipMasq: packets of pods that leave their subnet get the node's address.

With our nftables table, whose rules are constant and whose sets have the pods, or the reference plugins' iptables chains.
"""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import NOT_AS_ADDED, CniError
from narthex.cni.kernel import locks, records
from narthex.cni.kernel.tables import owner_of
from narthex.cni.plugins import masquerade
from narthex.cni.program.elements import ElementKind, remove_orphans, remove_unused, restore
from narthex.cni.result import IPConfig
from narthex.model.values import packed_network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from narthex.cni.plan import SetElement
    from narthex.cni.program.node import NodeContext
    from narthex.cni.request import CniRequest


def add(node: NodeContext, request: CniRequest, backend: str, ips: tuple[IPConfig, ...]) -> None:
    """Masquerade a pod. Raises OSError, CniError."""
    before = node.records.get(records.MASQUERADE, request.attachment)
    if before is not None:
        # Of a namespace that is gone, with other addresses.
        _close(node, request.attachment, before)
    record = {"backend": backend, "ips": [str(ip.network) for ip in ips]}
    if backend == "nftables":
        with node.shared():
            node.records.put(records.MASQUERADE, request.attachment, record)
            node.masquerade.add(masquerade.elements(ips), owner_of(request.attachment), masquerade.subnets(ips))
    else:
        node.records.put(records.MASQUERADE, request.attachment, record)
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


def close(node: NodeContext, attachment: str) -> None:
    """Remove the rules of an attachment according to its record, if it has one. Raises OSError, CniError."""
    record = node.records.get(records.MASQUERADE, attachment)
    if record is not None:
        _close(node, attachment, record)
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
    """Remove the rules of all attachments that are not valid, and elements without a record (GC). Raises OSError, CniError."""
    for attachment in node.records.invalid(records.MASQUERADE, request.network, valid):
        with node.exclusive(locks.PODS, attachment):
            close(node, attachment)
    remove_orphans(node, node.masquerade, ELEMENTS, request.network)
    remove_unused(node, node.masquerade, ELEMENTS)


def _describe(record: Mapping[str, object]) -> tuple[tuple[SetElement, ...], tuple[SetElement, ...]]:
    ips = _ips_of(record)
    return masquerade.elements(ips), masquerade.subnets(ips)


ELEMENTS = ElementKind(records.MASQUERADE, locks.PODS, ("pods4", "pods6"), ("near4", "near6"), _describe)


def resync(node: NodeContext) -> int:
    """Restore removed elements and remove those that no attachment uses; return their number. Raises OSError, CniError."""
    changed = restore(node, node.masquerade, ELEMENTS, node.lasting(records.MASQUERADE, locks.PODS, _close))
    changed += len(remove_orphans(node, node.masquerade, ELEMENTS))
    return changed + len(remove_unused(node, node.masquerade, ELEMENTS))
