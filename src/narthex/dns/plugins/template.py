"""Plugin `template`: responses from the text of records, for questions whose name matches a pattern."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from narthex.dns.corefile.pattern import compile_pattern
from narthex.dns.corefile.settings import TemplateSettings
from narthex.dns.corefile.template_text import ExpansionError, TemplateValues, compile_template
from narthex.dns.message import names, wire
from narthex.dns.message.query import DnsClient, Query
from narthex.dns.message.records import EXTENDED_ERROR, Message, Record, reply_to

DEFAULT_TTL = 3600
"""TTL of a record whose text has none, as in CoreDNS."""


class TemplateMatch(msgspec.Struct, frozen=True):
    """The template that answers a question; `settings` None: no response but SERVFAIL."""

    settings: TemplateSettings | None
    values: TemplateValues | None = None


class TemplatePlugin:
    """The templates of one server block."""

    def __init__(self, templates: Sequence[TemplateSettings]) -> None:
        self._templates = [
            (
                settings,
                sorted(names.lower_zones(settings.zones), key=len, reverse=True),
                [compile_pattern(text) for text in settings.patterns],
                names.lower_zones(settings.fallthrough or ()),
            )
            for settings in templates
        ]

    def match(self, query: Query, client: DnsClient | None = None) -> TemplateMatch | None:
        """Return the template that answers a question; None if the next plugin is to answer.

        Without a client, the values lack its address.
        """
        for settings, zones, patterns, through in self._templates:
            zone = next((each for each in zones if names.within(query.name, each)), None)
            if zone is None or not _fits(query.qclass, settings.qclass) or not _fits(query.qtype, settings.qtype):
                continue
            name = names.text(query.name)
            for pattern in patterns:
                groups = pattern.search(name)
                if groups is not None:
                    break
            else:
                if names.within_any(query.name, through):
                    continue
                return TemplateMatch(None)
            values = TemplateValues(
                name=name,
                zone=names.text(zone),
                class_=wire.class_name(settings.qclass if query.qclass == wire.ANY else query.qclass),
                type=wire.type_name(settings.qtype if query.qtype == wire.ANY else query.qtype),
                regex=pattern.text,
                remote="" if client is None else client.address,
                match=groups,
                groups={str(number): group for number, group in enumerate(groups)}
                | {key: group for key, group in zip(pattern.names, groups, strict=True) if key},
            )
            return TemplateMatch(settings, values)
        return None


def _fits(asked: int, desired: int) -> bool:
    return wire.ANY in (asked, desired) or asked == desired


def expand(query: Query, match: TemplateMatch) -> Message:
    """Return the response of a template. Raises ExpansionError."""
    settings, values = match.settings, match.values
    if settings is None or values is None or settings.rcode == wire.SERVFAIL:
        return reply_to(query, wire.SERVFAIL)
    message = reply_to(query, settings.rcode, authoritative=True)
    for section, texts in zip(
        message.sections, (settings.answers, settings.authorities, settings.additional), strict=True
    ):
        section += [parse_record(compile_template(text).expand(values)) for text in texts]
    if settings.extended_error is not None:
        code = settings.extended_error.to_bytes(2, "big")
        message.add_option(EXTENDED_ERROR, code + settings.extended_text.encode())
    return message


def parse_record(text: str) -> Record:
    """Return the first record of a text in the form of a zone file. Raises ExpansionError."""
    # Imported late: only servers with templates need it.
    import dns.exception
    import dns.name
    import dns.zonefile

    try:
        found = dns.zonefile.read_rrsets(
            text, default_ttl=DEFAULT_TTL, rdclass=None, default_rdclass="IN", origin=dns.name.root, relativize=False
        )
    except (dns.exception.DNSException, ValueError) as error:
        raise ExpansionError(f"{text[:80]!a} is not a record: {error}") from error
    if not found or not found[0]:
        raise ExpansionError(f"{text[:80]!a} is not a record")
    rrset = found[0]
    owner, data = rrset.name.to_wire() or names.ROOT, rrset[0].to_wire() or b""
    return Record(owner, int(rrset.rdtype), rrset.ttl, data, int(rrset.rdclass))
