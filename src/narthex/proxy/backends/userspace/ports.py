"""Which port the relay listens on for what: drawn from the names alone, so that the next process draws the same.

A listener keeps the port that it has. A new one gets the first free port behind a hash of its name; a port that was
just given up stays empty for one rendering, so that no connection on its way there meets another Service.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from narthex.model.names import ServicePortName
from narthex.proxy.plan.ir import Scope

FIRST, LAST = 61000, 65535
"""Where ports are taken from unless `portRange` says otherwise: above what Linux gives to outgoing connections
(net.ipv4.ip_local_port_range ends at 60999) and above the node ports of every cluster."""

Whose = tuple[ServicePortName, Scope]


def assign(
    wanted: Iterable[Whose], held: Mapping[Whose, int], taken: Collection[tuple[object, int]], first: int, last: int
) -> dict[Whose, int]:
    """Ports for all that want one, as far as there are enough. `held` are the ports that some have now; `taken` are
    (protocol, port)s that others have. The ports of different protocols are different ports."""
    asking = sorted(set(wanted), key=_order)
    given: dict[Whose, int] = {}
    used = set(taken)
    for whose in asking:
        port = held.get(whose, 0)
        key = whose[0].protocol, port
        if first <= port <= last and key not in used:
            given[whose] = port
            used.add(key)
    avoided = used | {(whose[0].protocol, port) for whose, port in held.items() if whose not in given}
    for whose in asking:
        if whose in given:
            continue
        port = _free(whose, avoided, first, last) or _free(whose, used, first, last)
        if port:
            given[whose] = port
            used.add((whose[0].protocol, port))
            avoided.add((whose[0].protocol, port))
    return given


def _free(whose: Whose, used: Collection[tuple[object, int]], first: int, last: int) -> int:
    """The first free port behind the hash; 0: there is none."""
    size = last - first + 1
    text = f"{whose[0]}/{whose[0].protocol.value} {whose[1].value}"
    start = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    for step in range(size):
        port = first + (start + step) % size
        if (whose[0].protocol, port) not in used:
            return port
    return 0


def _order(whose: Whose) -> tuple[object, ...]:
    return *whose[0].sort_key, whose[1].value
