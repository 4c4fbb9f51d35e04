"""Plugin `acl`: allows, refuses, empties, or drops queries by zone, type, and address of the client."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence
from typing import Literal

from narthex.dns.corefile.settings import AclSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import DnsClient, Query
from narthex.dns.message.records import EXTENDED_ERROR, reply_to

AclAction = Literal["allow", "block", "filter", "drop"]
BLOCKED, FILTERED = 15, 17
"""Extended DNS errors (RFC 8914)."""
_KNOWN_CLIENTS = 4096


class AclPlugin:
    """The rules of one server block."""

    def __init__(self, rules: Sequence[AclSettings]) -> None:
        self._rules = [
            (
                names.lower_zones(rule.zones),
                [
                    (each.action, each.types, [ipaddress.ip_network(net) for net in each.networks])
                    for each in rule.policies
                ],
            )
            for rule in rules
        ]
        self._covering = functools.lru_cache(_KNOWN_CLIENTS)(self._covers)

    def concerns(self, query: Query) -> bool:
        """Return True if a rule is about the name, so that the answer may depend on the client."""
        return any(names.within_any(query.name, zones) for zones, _ in self._rules)

    def action(self, query: Query, client: DnsClient) -> AclAction:
        """Return what the first matching policy says; queries that none matches are allowed."""
        covered = self._covering(client.address)
        for (zones, policies), covers in zip(self._rules, covered, strict=True):
            if not names.within_any(query.name, zones):
                continue
            for (action, types, _), holds in zip(policies, covers, strict=True):
                if holds and (not types or query.qtype in types):
                    return action
        return "allow"

    def _covers(self, address: str) -> tuple[tuple[bool, ...], ...]:
        """Return which policies of each rule are about a client."""
        ip = ipaddress.ip_address(address)
        return tuple(
            tuple(not nets or any(ip.version == net.version and ip in net for net in nets) for _, _, nets in policies)
            for _, policies in self._rules
        )


def refusal(query: Query, action: AclAction) -> bytes | None:
    """Return the response to a query that is blocked or filtered; None for one that is dropped."""
    if action == "drop":
        return None
    message = reply_to(query, wire.REFUSED if action == "block" else wire.NOERROR)
    message.add_option(EXTENDED_ERROR, (BLOCKED if action == "block" else FILTERED).to_bytes(2, "big"))
    return message.encode()
