"""Plugin `log`: a line for each question and its answer, in CoreDNS's words.

A server block with it is slower: each of its questions is read again for its line. Nothing a client sends is syntax in the
log; names are escaped as in zone files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from narthex.dns.corefile.settings import Log
from narthex.dns.dispatcher import code_text, type_text
from narthex.dns.interfaces import Client, Query
from narthex.dns.message import names, wire

COMMON = '{remote}:{port} - {>id} "{type} {class} {name} {proto} {size} {>do} {>bufsize}" {rcode} {>rflags} {rsize} {duration}'
COMBINED = COMMON + ' "{>opcode}"'
_FLAGS = ((wire.QR, "qr"), (wire.AA, "aa"), (wire.TC, "tc"), (wire.RD, "rd"), (wire.RA, "ra"), (wire.CD, "cd"))
_FIELD = re.compile(r"\{>?[A-Za-z]+\}")
_DO = 0x8000
_CLASSES = {1: "IN", 3: "CH", 4: "HS", 255: "ANY"}


class QueryLog:
    """Of all server blocks of one port."""

    def __init__(self, logs: Mapping[str, tuple[Log, ...]], write: Callable[[str], None]) -> None:
        """`logs` by zone, of all server blocks: a question is its block's alone. `write` takes a line."""
        self._logs = logs
        self._write = write
        self._scopes = {
            id(log): tuple(names.wire(zone).lower() for zone in log.zones) for all_ in logs.values() for log in all_
        }

    def covers(self, zone: str) -> bool:
        """Whether questions of a server block's zone are written down."""
        return bool(self._logs.get(zone))

    def note(self, zone: str, packet: bytes, message: bytes, client: Client, port: int, seconds: float) -> None:
        """A question and the response to it, both whole."""
        query = wire.read(packet)
        if not isinstance(query, Query):
            return
        kind = _kind(message)
        for log in self._logs.get(zone, ()):
            if not any(names.within(query.name, scope) for scope in self._scopes[id(log)]):
                continue
            slow = log.slower_than is not None and seconds >= log.slower_than
            if slow or "all" in log.classes or kind in log.classes:
                self._write(line(log.format, query, message, client, port, seconds))


def line(format_: str, query: Query, message: bytes, client: Client, port: int, seconds: float) -> str:
    """One line; what is in braces and no field of CoreDNS's stays as it is."""
    flags = wire.HEADER.unpack_from(message)[1]
    text = format_.replace("{combined}", COMBINED).replace("{common}", COMMON)
    fields = {
        "{remote}": f"[{client.address}]" if ":" in client.address else client.address,
        "{port}": str(port),
        "{>id}": str(query.id),
        "{type}": _type(query.qtype),
        "{class}": _CLASSES.get(query.qclass, f"CLASS{query.qclass}"),
        "{name}": names.text(query.qname),
        "{proto}": client.transport,
        "{size}": str(len(query.packet)),
        "{>do}": str(query.edns_size is not None and bool(_edns_flags(query) & _DO)).lower(),
        "{>bufsize}": str(query.edns_size or 512),
        "{rcode}": code_text(flags & 0xF),
        "{>rflags}": ",".join(word for bit, word in _FLAGS if flags & bit),
        "{rsize}": str(len(message)),
        "{duration}": f"{seconds:.9f}s",
        "{>opcode}": str((query.flags & wire.OPCODE) >> 11),
    }
    return _FIELD.sub(lambda found: fields.get(found[0], found[0]), text)


def _kind(message: bytes) -> str:
    """The class of a response: an answer, a denial (of the name, or of this type), or a failure."""
    _, flags, _, answers, _, _ = wire.HEADER.unpack_from(message)
    code = flags & 0xF
    if code == wire.NXDOMAIN or (code == wire.NOERROR and not answers):
        return "denial"
    return "success" if code == wire.NOERROR else "error"


def _type(qtype: int) -> str:
    text = type_text(qtype)
    return text if text.isupper() else f"TYPE{qtype}"


def _edns_flags(query: Query) -> int:
    """The low half of an OPT record's TTL, when it is the first record behind the question, where all put it."""
    at = query.question_end
    if query.packet[at : at + 3] != b"\0\0\x29":
        return 0
    return int.from_bytes(query.packet[at + 7 : at + 9], "big")
