"""Questions that no zone answers: who may have them answered, and what becomes of the answer."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence

from narthex.dns.dispatcher import KUBERNETES, Ask, Labels, code_text, type_text
from narthex.dns.interfaces import Client, limit
from narthex.dns.message import wire
from narthex.dns.server.tally import Tally
from narthex.dns.zone.compiled import cut, response
from narthex.dns.zone.external_name import asked_for, joined

PRIVATE = (
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "169.254.0.0/16",
    "::1/128",
    "fc00::/7",
    "fe80::/10",
)
"""Whose questions are handed on unless others are named: this machine, private networks and shared address space. An
open resolver is a weapon for others (RFC 5358), so the rest of the world gets REFUSED."""
_MOST_KNOWN = 4096
_FORWARD = "forward"


class Elsewhere:
    """Hands questions to resolvers. One worker's."""

    def __init__(self, networks: Sequence[str], tally: Tally, now: Callable[[], float]) -> None:
        self._networks = [ipaddress.ip_network(network) for network in networks]
        self._tally = tally
        self._now = now
        self._known: dict[str, bool] = {}

    def __call__(self, ask: Ask, client: Client, reply: Callable[[bytes | None], None]) -> None:
        """Answer by `reply`, which gets a message that the client takes, or None."""
        most = limit(ask.query, client.transport)
        began = time.perf_counter()

        def done(message: bytes | None) -> None:
            if message is not None:
                if ask.outside.links:
                    message = joined(ask.query, ask.outside, message, most)
                message = cut(message, ask.query, most)
                self._tally.took(ask.zone, time.perf_counter() - began, 1)
                self._count(ask, client, message, _FORWARD)
            reply(message)

        if not self.allowed(client.address):
            made = ask.alone or response(ask.query, wire.REFUSED, most)
            message = ask.query.packet[:2] + made.tail
            self._count(ask, client, message, "acl" if ask.alone is None else KUBERNETES)
            reply(message)
            return
        query = asked_for(ask.query, ask.outside) if ask.outside.links else ask.query
        ask.resolver.ask(query, client, done, self._now())

    def allowed(self, address: str) -> bool:
        """Whether a client's questions may be handed on."""
        known = self._known.get(address)
        if known is None:
            ip = ipaddress.ip_address(address)
            known = any(ip.version == network.version and ip in network for network in self._networks)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[address] = known
        return known

    def _count(self, ask: Ask, client: Client, message: bytes, plugin: str) -> None:
        code = wire.HEADER.unpack_from(message)[1] & 0xF
        labels = Labels(ask.zone, type_text(ask.query.qtype), code_text(code), plugin)
        family = 2 if ":" in client.address else 1
        self._tally.counter((client.transport, family, labels, len(ask.query.packet), len(message)))[0] += 1
