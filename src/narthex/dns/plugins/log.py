"""Plugin `log`: a line for each query and its response, in the format of CoreDNS.

Names are escaped as in zone files, so that no client can forge the structure of the log. Each logged query is parsed again,
which makes a server block with this plugin slower.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from narthex.dns.corefile.settings import LogSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import DnsClient, Query, parse_query

COMMON = '{remote}:{port} - {>id} "{type} {class} {name} {proto} {size} {>do} {>bufsize}" {rcode} {>rflags} {rsize} {duration}'
COMBINED = COMMON + ' "{>opcode}"'
_FLAGS = ((wire.QR, "qr"), (wire.AA, "aa"), (wire.TC, "tc"), (wire.RD, "rd"), (wire.RA, "ra"), (wire.CD, "cd"))
_FIELD = re.compile(r"\{>?[A-Za-z]+\}")
_CLASSES = {1: "IN", 3: "CH", 4: "HS", 255: "ANY"}


class QueryLog:
    """Logs the queries of all server blocks of one port."""

    def __init__(self, logs: Mapping[str, tuple[LogSettings, ...]], write: Callable[[str], None]) -> None:
        """Create the log. `logs` are the settings by zone of the server block; `write` gets each line."""
        self._logs = logs
        self._write = write
        self._scopes = {id(log): names.lower_zones(log.zones) for settings in logs.values() for log in settings}

    def covers(self, zone: str) -> bool:
        """Return True if the server block with this zone logs queries."""
        return bool(self._logs.get(zone))

    def log_query(self, zone: str, packet: bytes, message: bytes, client: DnsClient, port: int, seconds: float) -> None:
        """Log a query and its response, both whole messages, if the settings of the server block select it."""
        query = parse_query(packet)
        if not isinstance(query, Query):
            return
        class_ = _response_class(message)
        for log in self._logs.get(zone, ()):
            if not names.within_any(query.name, self._scopes[id(log)]):
                continue
            slow = log.min_duration is not None and seconds >= log.min_duration
            if slow or "all" in log.classes or class_ in log.classes:
                self._write(format_line(log.format, query, message, client, port, seconds))


def format_line(format_: str, query: Query, message: bytes, client: DnsClient, port: int, seconds: float) -> str:
    """Return a line of the log. Fields that CoreDNS does not have stay as they are."""
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
        "{>do}": str(query.dnssec_ok).lower(),
        "{>bufsize}": str(query.edns_size or 512),
        "{rcode}": wire.rcode_label(flags & 0xF),
        "{>rflags}": ",".join(word for bit, word in _FLAGS if flags & bit),
        "{rsize}": str(len(message)),
        "{duration}": f"{seconds:.9f}s",
        "{>opcode}": str((query.flags & wire.OPCODE) >> 11),
    }
    return _FIELD.sub(lambda found: fields.get(found[0], found[0]), text)


def _response_class(message: bytes) -> str:
    """Return `success`, `denial` (NXDOMAIN or NODATA), or `error`."""
    _, flags, _, answers, _, _ = wire.HEADER.unpack_from(message)
    rcode = flags & 0xF
    if rcode == wire.NXDOMAIN or (rcode == wire.NOERROR and not answers):
        return "denial"
    return "success" if rcode == wire.NOERROR else "error"


def _type(qtype: int) -> str:
    text = wire.type_label(qtype)
    return text if text.isupper() else f"TYPE{qtype}"
