"""The link kube-ipvs0, whose addresses make the node accept packets to Services, so that IPVS receives them.

It is a dummy link and stays down: an address is local as soon as a link has it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from narthex.linux.addresses import addresses_on
from narthex.linux.links import LinkError, ip_batch
from narthex.linux.namespaces import in_namespace
from narthex.model import IPFamily, host_network
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.ipvs.names import LINK


def exists(namespace: str | None = None) -> bool:
    """Return True if the link exists."""
    with in_namespace(namespace):
        return any(name == LINK for _, name in socket.if_nameindex())


def addresses(family: IPFamily | None = None, namespace: str | None = None) -> frozenset[str]:
    """Return the addresses of the link, of one family or both; empty if the link does not exist."""
    with in_namespace(namespace):
        return frozenset(own.address for own in addresses_on(LINK) if family in (None, own.family))


def bind(desired: Iterable[str], namespace: str | None = None) -> None:
    """Add addresses; create the link if necessary. Raises ApplyError."""
    commands = [f"address replace {host_network(each)} dev {LINK}{_options(each)}" for each in sorted(desired)]
    if commands and not exists(namespace):
        commands.insert(0, f"link add name {LINK} type dummy")
    _batch(namespace, commands)


def unbind(undesired: Iterable[str], namespace: str | None = None) -> None:
    """Remove addresses. Raises ApplyError, also if one does not exist."""
    _batch(namespace, [f"address del {host_network(each)} dev {LINK}" for each in sorted(undesired)])


def remove(namespace: str | None = None) -> None:
    """Remove the link with all its addresses, if it exists. Raises ApplyError."""
    if exists(namespace):
        _batch(namespace, [f"link del dev {LINK}"])


def _options(address: str) -> str:
    # No neighbour is asked whether it has a Service's address.
    return " nodad" if ":" in address else ""


def _batch(namespace: str | None, commands: list[str]) -> None:
    try:
        ip_batch(namespace, commands)
    except (LinkError, FileNotFoundError) as error:
        raise ApplyError(f"addresses of Services: {error}") from error
