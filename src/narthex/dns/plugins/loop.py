"""Plugin `loop`: detects upstreams whose queries come back to this server (row S11).

At the start every upstream gets a probe for a name that no other client can know: `SECRET.NUMBER.ZONE`, type HINFO. The number
identifies the upstream. If the probe arrives here, that upstream, or one behind it, forwards to this server: a loop, in which
every unknown name would circulate until it times out. A probe is not forwarded. Its response contains a second secret, so
that the worker that sent it learns of the loop if another worker has received it.
"""

from __future__ import annotations

import msgspec

from narthex.dns.corefile.settings import Upstream
from narthex.dns.message import names, wire
from narthex.dns.message.query import Query, UpstreamQuery
from narthex.dns.message.response import UpstreamResponse, local_response

PROBE_INTERVAL = 2.0
"""Seconds between two probes of an upstream that has not answered."""
PROBE_TIME = 30.0
"""Seconds after which an upstream that has not answered is no longer probed."""
_CPU = names.label("narthex")


class LoopProbeSecrets(msgspec.Struct, frozen=True):
    """Secrets of the workers of one server: 32 random hexadecimal digits each."""

    asked: str
    answered: str


def probe_query(secrets: LoopProbeSecrets, number: int, zone: bytes) -> UpstreamQuery | None:
    """Return the probe of one upstream, or None if the name would be too long."""
    name = names.label(secrets.asked) + names.label(str(number)) + zone
    return UpstreamQuery(name, wire.HINFO, wire.IN, wire.RD) if len(name) <= names.MAX_NAME else None


def probe_number(secrets: LoopProbeSecrets, query: Query) -> int | None:
    """Return the number of the upstream if a query is one of our probes."""
    if query.qtype != wire.HINFO or not query.name.startswith(names.label(secrets.asked)):
        return None
    number = list(names.labels(query.name))[1:2]
    return int(number[0]) if number and number[0].isdigit() and len(number[0]) < 6 else None


def probe_response(secrets: LoopProbeSecrets, query: Query) -> bytes:
    """Return the response to one of our probes."""
    data = _CPU + names.label(secrets.answered)
    return local_response(query, wire.NOERROR, [(wire.HINFO, 0, data)], authoritative=True)


def is_own_response(secrets: LoopProbeSecrets, response: UpstreamResponse) -> bool:
    """Return True if the response to a probe comes from this server."""
    return _CPU + names.label(secrets.answered) in response.packet[response.question_end :]


def loop_warning(upstream: Upstream, block: str) -> str:
    """Return the message that reports a loop."""
    cause = "it is probably this server itself, or forwards to it"
    if upstream.address.startswith("127.") or upstream.address == "::1":
        cause = (
            "a loopback address is this server itself, or a stub such as that of systemd-resolved; name real servers, or "
            "use the file /run/systemd/resolve/resolv.conf"
        )
    return f"server block {block}: queries forwarded to {upstream} come back: {cause}. It is no longer used"
