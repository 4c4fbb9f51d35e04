"""Do our own questions come back to us? (Row S11.)

At the start every upstream is asked for a name that nobody else can know: `SECRET.NUMBER.ZONE`, type HINFO. The number
is the upstream's. When such a question comes in, that upstream, or one behind it, asks us: a loop, in which every
unknown name would go round until all time is up. The question is not forwarded again. It is answered with a second
secret, so that a worker whose probe came in at another worker learns of it, too.
"""

from __future__ import annotations

import msgspec

from narthex.dns.corefile.settings import Upstream
from narthex.dns.interfaces import Query
from narthex.dns.message import names, wire
from narthex.dns.message.question import Question
from narthex.dns.message.response import Answer, made

HINFO = 13
PROBE_INTERVAL = 2.0
"""Seconds between two probes of an upstream that has not answered."""
PROBE_TIME = 30.0
"""Seconds after which an upstream that has not answered is let be."""
_CPU = b"\x07narthex"


class Secrets(msgspec.Struct, frozen=True):
    """What the workers of one process share. Hexadecimal digits, 32 of each, drawn at the start."""

    asked: str
    answered: str


def question(secrets: Secrets, number: int, zone: bytes) -> Question | None:
    """The probe of one upstream; None when the zone's name leaves no room for it."""
    name = _label(secrets.asked) + _label(str(number)) + zone
    return Question(name, HINFO, wire.IN, wire.RD) if len(name) <= names.LONGEST else None


def seen(secrets: Secrets, query: Query) -> int | None:
    """The number of the upstream whose probe this question is."""
    if query.qtype != HINFO or not query.name.startswith(_label(secrets.asked)):
        return None
    number = list(names.labels(query.name))[1:2]
    return int(number[0]) if number and number[0].isdigit() and len(number[0]) < 6 else None


def reply(secrets: Secrets, query: Query) -> bytes:
    """The answer to a probe that has come back."""
    return made(query, wire.NOERROR, [(HINFO, 0, _CPU + _label(secrets.answered))], authoritative=True)


def came_back(secrets: Secrets, answer: Answer) -> bool:
    """Whether the answer to a probe is our own."""
    return _CPU + _label(secrets.answered) in answer.packet[answer.question_end :]


def message(upstream: Upstream, block: str) -> str:
    """What to say of a loop."""
    cause = "probably it is this server itself, or asks it"
    if upstream.address.startswith("127.") or upstream.address == "::1":
        cause = (
            "a loopback address is this server itself, or a stub such as systemd-resolved's; name real servers, or give "
            "the server the file /run/systemd/resolve/resolv.conf"
        )
    return f"server block {block}: what is forwarded to {upstream} comes back here: {cause}. It is not asked any more"


def _label(text: str) -> bytes:
    return bytes((len(text),)) + text.encode("ascii")
