"""Assigns ports of the relay to listeners, by their names alone, so that the next process assigns the same.

A listener keeps its port. A new listener gets the first free port after a hash of its name. A released port stays
unused for one rendering, so that no connection on its way there reaches another Service.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from narthex.model.names import ServicePortName
from narthex.proxy.plan.ir import Scope

FIRST, LAST = 61000, 65535
"""The default range: above the ephemeral ports of Linux (net.ipv4.ip_local_port_range ends at 60999) and above the node
ports of every cluster.
"""

ListenerName = tuple[ServicePortName, Scope]


def assign(
    wanted: Iterable[ListenerName],
    held: Mapping[ListenerName, int],
    taken: Collection[tuple[object, int]],
    first: int,
    last: int,
) -> dict[ListenerName, int]:
    """Return ports for as many listeners as there are free ports.

    Args:
        wanted: The listeners that need a port.
        held: Ports of listeners that have one.
        taken: Protocol and port of other programs. The same port of another protocol is another port.
        first: First port of the range.
        last: Last port of the range.
    """
    asking = sorted(set(wanted), key=_order)
    given: dict[ListenerName, int] = {}
    used = set(taken)
    for listener in asking:
        port = held.get(listener, 0)
        key = listener[0].protocol, port
        if first <= port <= last and key not in used:
            given[listener] = port
            used.add(key)
    avoided = used | {(listener[0].protocol, port) for listener, port in held.items() if listener not in given}
    for listener in asking:
        if listener in given:
            continue
        port = _free(listener, avoided, first, last) or _free(listener, used, first, last)
        if port:
            given[listener] = port
            used.add((listener[0].protocol, port))
            avoided.add((listener[0].protocol, port))
    return given


def _free(listener: ListenerName, used: Collection[tuple[object, int]], first: int, last: int) -> int:
    """Return the first free port after the hash; 0 if there is none."""
    size = last - first + 1
    text = f"{listener[0]}/{listener[0].protocol.value} {listener[1].value}"
    start = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    for step in range(size):
        port = first + (start + step) % size
        if (listener[0].protocol, port) not in used:
            return port
    return 0


def _order(listener: ListenerName) -> tuple[object, ...]:
    return *listener[0].sort_key, listener[1].value
