"""Counters of iptables mode: the rule that sends to an endpoint counts the first packet of each connection, since chains of
the table nat see no other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from narthex.model.names import ServicePortName
from narthex.proxy.backends.counts import ConnectionCount
from narthex.proxy.backends.iptables import names
from narthex.proxy.plan.ir import Endpoint, Plan

_SENDS = re.compile(r"^\[(\d+):\d+\] -A (KUBE-SEP-[A-Z2-7]{16}) .*-j DNAT\b", re.MULTILINE)


_INVALID = re.compile(rf"^\[(\d+):\d+\] -A {names.FORWARD} .*--ctstate INVALID -j DROP$", re.MULTILINE)


def invalid_dropped(text: str) -> int:
    """Packets that the rule against invalid ones has dropped, in what `iptables-save --counters -t filter` printed; 0
    without such a rule."""
    return sum(int(match[1]) for match in _INVALID.finditer(text))


class XtablesCounterOwners:
    """Says what the chains of one plan's rules count for."""

    def __init__(self, plan: Plan) -> None:
        self._owners: dict[str, tuple[ServicePortName, Endpoint]] = {}
        for service in plan.services.values():
            for pool in (service.cluster, service.local):
                for endpoint in pool.endpoints if pool is not None else ():
                    self._owners[names.sep(service.name, endpoint)] = service.name, endpoint

    def counted(self, text: str) -> Iterator[ConnectionCount]:
        """Counters in what `iptables-save --counters -t nat` printed, of Service ports that the plan still has: one for
        each endpoint, and the same for the Service port as a whole."""
        for match in _SENDS.finditer(text):
            owner = self._owners.get(match[2])
            if owner is not None:
                name, endpoint = owner
                packets = int(match[1])
                yield ConnectionCount((match[2], "endpoint"), name, (endpoint.address, endpoint.port), packets)
                yield ConnectionCount((match[2], "service"), name, None, packets)
