"""Selection of the interface between the nodes, with flannel's options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec

from narthex.model import IPFamily, family_of, quoted


class InterfaceNotFound(ValueError):
    """No interface matches the selection; the message lists the existing ones."""


class NodeInterface(msgspec.Struct, frozen=True, kw_only=True):
    """An interface that is up."""

    name: str
    index: int
    mtu: int
    addresses: tuple[str, ...]
    """Addresses of global scope, in the kernel's order."""

    def address(self, family: IPFamily) -> str:
        """Return the first address of a family, or empty."""
        return next((one for one in self.addresses if family_of(one) is family), "")


class InterfaceSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The selection options; the first match in this order wins."""

    names: tuple[str, ...] = ()
    """Names or addresses of interfaces (`--iface`)."""
    patterns: tuple[str, ...] = ()
    """Regular expressions for names or addresses (`--iface-regex`)."""
    can_reach: str = ""
    """Use the interface of the route to this address (`--iface-can-reach`)."""

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"--iface-regex {quoted(pattern)}: {error}") from None


def select_interface(
    choice: InterfaceSelection,
    links: Sequence[NodeInterface],
    families: Iterable[IPFamily],
    default: Callable[[], int],
    towards: Callable[[str], str],
) -> NodeInterface:
    """Return the interface. Raises InterfaceNotFound.

    `default` returns the interface index of the default route (0: none), `towards` the source address of packets to an
    address.
    """
    families = tuple(families)
    found = _selected(choice, links, default, towards)
    missing = [family.label for family in families if not found.address(family)]
    if missing:
        raise InterfaceNotFound(
            f"interface {found.name} has no address of {' and '.join(missing)}: give it one, or choose with --iface"
        )
    return found


def _selected(
    choice: InterfaceSelection,
    links: Sequence[NodeInterface],
    default: Callable[[], int],
    towards: Callable[[str], str],
) -> NodeInterface:
    there = ", ".join(f"{link.name} ({', '.join(link.addresses) or 'no address'})" for link in links) or "none"
    if choice.names or choice.patterns:
        for name in choice.names:
            for link in links:
                if name == link.name or name in link.addresses:
                    return link
        for pattern in choice.patterns:
            for link in links:
                # As flannel: an interface's addresses first.
                if any(re.search(pattern, text) for text in (*link.addresses, link.name)):
                    return link
        asked = ", ".join([*map(quoted, choice.names), *map(quoted, choice.patterns)])
        raise InterfaceNotFound(f"no interface is or has {asked}; there is {there}")
    if choice.can_reach:
        own = towards(choice.can_reach)
        for link in links:
            if own and own in link.addresses:
                return link
        raise InterfaceNotFound(f"no interface leads to {choice.can_reach} (--iface-can-reach); there is {there}")
    index = default()
    for link in links:
        if link.index == index:
            return link
    raise InterfaceNotFound(
        f"there is no default route to choose an interface by: choose one with --iface; there is {there}"
    )
