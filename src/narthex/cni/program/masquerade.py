"""ipMasq: pods leave their network with the node's address. With our nftables table, or the reference plugins' iptables chains."""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import NOT_AS_ADDED, CniError
from narthex.cni.kernel import records
from narthex.cni.kernel.tables import owner_of
from narthex.cni.plugins import masquerade
from narthex.cni.result import IPConfig
from narthex.model import packed_addresses as address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from narthex.cni.program.node import NodeContext
    from narthex.cni.request import CniRequest


def add(node: NodeContext, request: CniRequest, backend: str, ips: tuple[IPConfig, ...]) -> None:
    """Masquerade a pod. Raises OSError, CniError."""
    record = {"backend": backend, "ips": [str(ip.network) for ip in ips]}
    node.records.put(records.MASQUERADE, request.attachment, record)
    if backend == "nftables":
        put(node, request.attachment, ips)
    else:
        from narthex.cni.program import iptables as chains

        chains.masquerade(request, ips)


def put(node: NodeContext, attachment: str, ips: tuple[IPConfig, ...]) -> None:
    """Add the elements of a pod to the table; they may exist. Raises OSError."""
    node.masquerade.add(masquerade.elements(ips), owner_of(attachment), masquerade.subnets(ips))


def remove(node: NodeContext, request: CniRequest, configured: bool) -> None:
    """Stop masquerading a pod. `configured`: without a record, it may have the reference plugins' chains."""
    record = node.records.get(records.MASQUERADE, request.attachment)
    if record is not None and record.get("backend") == "nftables":
        take(node, request.attachment, record)
    elif record is not None or configured:
        from narthex.cni.program import iptables as chains

        chains.unmasquerade(request.network, request.container)
    node.records.drop(records.MASQUERADE, request.attachment)


def take(node: NodeContext, attachment: str, record: Mapping[str, object]) -> None:
    """Remove the elements of a record from the table. Raises OSError."""
    node.masquerade.remove(masquerade.elements(ips_of(record)), owner_of(attachment))


def ips_of(record: Mapping[str, object]) -> tuple[IPConfig, ...]:
    """Return the addresses in a record."""
    found = []
    for text in fields.items(record, "ips"):
        try:
            found.append(IPConfig(address.network(str(text))))
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
    for attachment, record in list(node.records.all(records.MASQUERADE, request.network)):
        network, container, interface = attachment.split(":")
        if (container, interface) in valid:
            continue
        if record.get("backend") == "nftables":
            take(node, attachment, record)
        else:
            from narthex.cni.program import iptables as chains

            chains.unmasquerade(network, container)
        node.records.drop(records.MASQUERADE, attachment)
