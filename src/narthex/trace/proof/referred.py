"""The way of sets of packets through the relay of mode userspace, from the port that rules redirect them to.

The relay takes the endpoints of a port in turn. How it chooses is its own matter: here, each endpoint gets an equal share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from immutables import Map

from narthex.model import Disposition
from narthex.netfilter.sets.branch import PacketEnd
from narthex.netfilter.sets.chains import THIS_NODE
from narthex.netfilter.sets.diagram import Choice, WeightedBox
from narthex.netfilter.sets.matches import choice_name
from narthex.netfilter.sets.probabilities import share
from narthex.netfilter.sets.space import PROTOCOL, PacketSpace
from narthex.netfilter.sets.values import union, values
from narthex.netfilter.walk.state import KernelObjects
from narthex.proxy.backends.userspace.rules import RelayListener, RelayListeners, relay_record

_REJECTED = PacketEnd(Disposition.REJECTED)


class ReferredObjects(NamedTuple):
    """What rules hand packets to, or ask, in addition to other rules."""

    objects: KernelObjects = KernelObjects()
    """Ipsets, and what IPVS has."""
    listeners: RelayListeners = Map()
    """The table of the relay; empty without one."""


def relayed(boxes: Iterable[WeightedBox], listeners: RelayListeners, space: PacketSpace) -> Iterator[WeightedBox]:
    """Yield the ends of packets behind the relay: what rules redirect to this node reaches endpoints, or is refused."""
    by_port: dict[int, list[RelayListener]] = {}
    for listener in listeners.values():
        by_port.setdefault(listener.port, []).append(listener)
    own = {space.address_text(value) for first, last in space.node.spans for value in range(first, last + 1)}
    here = own | {THIS_NODE, "127.0.0.1", "::1"}
    for each in boxes:
        end = each.end
        if isinstance(end, PacketEnd) and end.disposition is Disposition.DELIVERED and end.endpoint[0] in here:
            yield from _accepted(each, by_port.get(end.endpoint[1], []))
        else:
            yield each


def _accepted(box: WeightedBox, listeners: list[RelayListener]) -> Iterator[WeightedBox]:
    """Yield the ends of packets that are redirected to one port, which is a port of its own in each protocol."""
    header = box.box
    for listener in listeners:
        part = header[PROTOCOL] & values(listener.name.protocol.number)
        if part:
            yield from _connected(listener, box._replace(box=(*header[:PROTOCOL], part, *header[PROTOCOL + 1 :])))
    rest = header[PROTOCOL] - union(values(each.name.protocol.number) for each in listeners)
    if rest:
        yield box._replace(box=(*header[:PROTOCOL], rest, *header[PROTOCOL + 1 :]), end=_REJECTED)


def _connected(listener: RelayListener, box: WeightedBox) -> Iterator[WeightedBox]:
    """Yield the ends of packets that one listener accepts. The endpoint sees an address of this node as their source."""
    seconds = listener.affinity_seconds
    missed: frozenset[Choice] = box.choices
    if seconds is not None:
        for endpoint in listener.endpoints:
            choice = choice_name(relay_record(listener, endpoint), seconds)
            yield _to(listener, endpoint, box._replace(choices=missed | {(choice, True)}))
            missed |= {(choice, False)}
    each = share(1, len(listener.endpoints))
    for endpoint in listener.endpoints:
        yield _to(listener, endpoint, box._replace(choices=missed, probability=box.probability * each))


def _to(listener: RelayListener, endpoint: tuple[str, int], box: WeightedBox) -> WeightedBox:
    remembers = (relay_record(listener, endpoint),) if listener.affinity_seconds is not None else ()
    return box._replace(end=PacketEnd(Disposition.DELIVERED, endpoint, True, remembers))
