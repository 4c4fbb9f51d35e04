"""The link kube-ipvs0, which makes the addresses of Services this node's own, so that IPVS gets to see their packets.

It is a dummy and stays down: an address is local as soon as some link bears it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from narthex.linux import links
from narthex.linux import namespaces as netns
from narthex.linux.addresses import addresses_on
from narthex.linux.run import ApplyError
from narthex.model.net import IPFamily, host_network
from narthex.proxy.backends.ipvs.names import LINK


def exists(namespace: str | None = None) -> bool:
    """Whether the link is there."""
    with netns.entered(namespace):
        return any(name == LINK for _, name in socket.if_nameindex())


def addresses(family: IPFamily | None = None, namespace: str | None = None) -> frozenset[str]:
    """The addresses on it, of one family or both; none when it is not there."""
    with netns.entered(namespace):
        return frozenset(own.address for own in addresses_on(LINK) if family in (None, own.family))


def bind(wanted: Iterable[str], namespace: str | None = None) -> None:
    """Give it addresses, and make it when it is not there. Raises ApplyError."""
    commands = [f"address replace {host_network(each)} dev {LINK}{_options(each)}" for each in sorted(wanted)]
    if commands and not exists(namespace):
        commands.insert(0, f"link add name {LINK} type dummy")
    _batch(namespace, commands)


def unbind(unwanted: Iterable[str], namespace: str | None = None) -> None:
    """Take addresses away. Raises ApplyError, also when one is not there."""
    _batch(namespace, [f"address del {host_network(each)} dev {LINK}" for each in sorted(unwanted)])


def remove(namespace: str | None = None) -> None:
    """Remove the link, with all its addresses. Nothing happens when it is not there. Raises ApplyError."""
    if exists(namespace):
        _batch(namespace, [f"link del dev {LINK}"])


def _options(address: str) -> str:
    # No neighbour is asked whether it has a Service's address.
    return " nodad" if ":" in address else ""


def _batch(namespace: str | None, commands: list[str]) -> None:
    try:
        links.batch(namespace, commands)
    except (links.LinkError, FileNotFoundError) as error:
        raise ApplyError(f"addresses of Services: {error}") from error
