"""The plugins of a server block that change queries and responses, in the order of CoreDNS.

    nsid > dns64 > any > chaos > rewrite > acl > header > minimal > template > (the other plugins) > whoami

`QueryFilters.concerns` decides whether any of them changes a query at all. Others are answered as in a server block without
these plugins, also from the packet cache.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable

import msgspec

from narthex.dns.corefile.settings import ServerBlock
from narthex.dns.corefile.template_text import ExpansionError
from narthex.dns.message import names, wire
from narthex.dns.message.query import DnsClient, Query
from narthex.dns.message.records import NSID, Message, read_message, reply_to
from narthex.dns.message.response import MalformedResponseError
from narthex.dns.plugins import Reply, fixed
from narthex.dns.plugins.acl import AclPlugin, refusal
from narthex.dns.plugins.dns64 import Dns64Plugin
from narthex.dns.plugins.rewrite import (
    CnameChange,
    InvalidNameError,
    ResponseChange,
    RewritePlugin,
    apply_changes,
    cname_change,
    with_question,
)
from narthex.dns.plugins.template import TemplatePlugin, expand

Answer = Callable[[Query, DnsClient, Reply], None]
"""Has a query answered, now or later."""
MAX_LOOKUPS = 8
"""Lookups of other names that one query may cause; more are taken for a circle, as in CoreDNS."""
_FILTERS = (
    "rewrite", "templates", "acl", "dns64", "header", "nsid", "chaos", "minimal", "refuses_any", "whoami",
)  # fmt: skip
"""Fields of a server block that need these filters."""
_TRANSFERS = (wire.AXFR, wire.IXFR)


def has_filters(block: ServerBlock) -> bool:
    """Return True if a server block has one of the plugins."""
    return any(getattr(block, field) for field in _FILTERS) or block.nsid is not None


class QueryFilters:
    """The filters of one server block."""

    def __init__(self, block: ServerBlock, log: Callable[[str], None] = lambda _: None) -> None:
        """Create the plugins. `log` gets errors, such as a template whose text is no record."""
        self._block = block
        self._log = log
        self._rewrite = RewritePlugin(block.rewrite) if block.rewrite else None
        self._templates = TemplatePlugin(block.templates) if block.templates else None
        self._acl = AclPlugin(block.acl) if block.acl else None
        self._dns64 = Dns64Plugin(block.dns64) if block.dns64 is not None else None
        self._host = socket.gethostname() if block.nsid is not None or block.chaos is not None else ""
        self._forwards = names.lower_zones(forward.zone for forward in block.forwards)
        self._always = block.header is not None or block.minimal
        self.inner: Answer = _refuse
        """The other plugins of the server block."""
        self.lookup: Answer = _refuse
        """The whole server, for other names that an answer needs."""

    def concerns(self, query: Query) -> bool:
        """Return True if a filter may change the query or its response, or answer it."""
        block = self._block
        if self._always or query.qclass != wire.IN or (block.refuses_any and query.qtype == wire.ANY):
            return True
        if self._dns64 is not None and self._dns64.concerns(query):
            return True
        if self._acl is not None and self._acl.concerns(query):
            return True
        if block.nsid is not None and fixed.asks_for_nsid(query):
            return True
        if self._whoami_answers(query):
            return True
        try:
            rewritten = None if self._rewrite is None else self._rewrite.rewrite(query)
        except InvalidNameError:
            return True
        return rewritten is not None or (self._templates is not None and self._templates.match(query) is not None)

    def resolve(self, query: Query, client: DnsClient, reply: Reply, _now: float) -> None:
        """Answer a query; see `Resolver`."""
        if self._block.nsid is not None and fixed.asks_for_nsid(query):
            data = (self._block.nsid.data or self._host).encode()
            reply = _then(reply, lambda message: message.add_option(NSID, data))
        if self._dns64 is not None and self._dns64.applies(query, client):
            reply = self._with_ipv4(self._dns64, query, client, reply)
        if self._block.refuses_any and query.qtype == wire.ANY:
            reply(fixed.refuse_any(query))
            return
        if self._block.chaos is not None:
            answer = fixed.answer_chaos(query, self._block.chaos, self._host, random.shuffle)
            if answer is not None:
                reply(answer)
                return
        self._rewritten(query, client, reply)

    def _rewritten(self, query: Query, client: DnsClient, reply: Reply) -> None:
        try:
            rewritten = None if self._rewrite is None else self._rewrite.rewrite(query)
        except InvalidNameError as error:
            self._log(f"rewrite: {error}")
            reply(reply_to(query, wire.SERVFAIL).encode())
            return
        if rewritten is None:
            self._controlled(query, client, reply)
            return
        changes = rewritten.changes
        if any(isinstance(change, CnameChange) for change in changes):
            reply = self._with_other_target(rewritten.query, changes, client, reply, query)
        else:
            reply = _then(reply, lambda message: apply_changes(message, query, changes))
        self._controlled(rewritten.query, client, reply)

    def _controlled(self, query: Query, client: DnsClient, reply: Reply) -> None:
        action = "allow" if self._acl is None else self._acl.action(query, client)
        if action != "allow":
            reply(refusal(query, action))
            return
        header = self._block.header
        if header is not None:
            query = fixed.change_query(query, header)
            settings = header
            reply = _then(reply, lambda message: fixed.change_header(message, settings))
        if self._block.minimal:
            reply = _then(reply, fixed.clear_records)
        self._templated(query, client, reply)

    def _templated(self, query: Query, client: DnsClient, reply: Reply) -> None:
        match = None if self._templates is None else self._templates.match(query, client)
        if match is None:
            self._others(query, client, reply)
            return
        try:
            message = expand(query, match)
        except ExpansionError as error:
            self._log(f"template: {names.text(query.name)}: {error}")
            message = reply_to(query, wire.SERVFAIL)
        last = message.answers[-1] if message.answers else None
        if last is not None and last.type == wire.CNAME and query.qtype in wire.ADDRESS_SIZES:
            self._look_up(with_question(query, last.target, query.qtype, query.qclass), client, _joined(message, reply))
        else:
            reply(message.encode())

    def _others(self, query: Query, client: DnsClient, reply: Reply) -> None:
        if self._whoami_answers(query):
            reply(fixed.who_am_i(query, client))
        elif query.qclass != wire.IN:
            reply(reply_to(query, wire.REFUSED).encode())
        else:
            self.inner(query, client, reply)

    def _whoami_answers(self, query: Query) -> bool:
        """Return True for a name that no plugin before `whoami` takes."""
        block = self._block
        if not block.whoami or block.hosts is not None or query.qtype in _TRANSFERS:
            return False
        zones = [
            *(block.kubernetes.zones if block.kubernetes else ()),
            *(block.external.zones if block.external else ()),
        ]
        return not names.within_any(query.name, (*names.lower_zones(zones), *self._forwards))

    def _with_ipv4(self, plugin: Dns64Plugin, query: Query, client: DnsClient, reply: Reply) -> Reply:
        def take(answer: bytes | None) -> None:
            """Reply with the answer if it has usable AAAA records; otherwise, synthesize them from A records."""
            original = _readable(answer)
            if original is None or not plugin.needs_ipv4(original):
                reply(answer)
                return

            def join(ipv4: bytes | None) -> None:
                """Reply with the synthesized records, or with the original answer if the lookup of A records failed."""
                found = _readable(ipv4)
                reply(answer if found is None else plugin.synthesize(original, found).encode())

            self._look_up(with_question(query, query.qname, wire.A, query.qclass), client, join)

        return take

    def _with_other_target(
        self, asked: Query, changes: tuple[ResponseChange, ...], client: DnsClient, reply: Reply, query: Query
    ) -> Reply:
        """Return a reply that replaces the target of a CNAME record and the records after it (`rewrite cname`)."""

        def take(answer: bytes | None) -> None:
            """Look up the new target of the first CNAME record that a rule matches, or reply without a lookup."""
            message = _readable(answer)
            change = None if message is None else cname_change(message, changes)
            if message is None or change is None:
                _then(reply, lambda each: apply_changes(each, query, changes))(answer)
                return
            index, target = change
            message.answers[index:] = [message.answers[index].with_target(target)]
            apply_changes(message, query, changes)
            self._look_up(with_question(asked, target, asked.qtype, asked.qclass), client, _joined(message, reply))

        return take

    def _look_up(self, query: Query, client: DnsClient, reply: Reply) -> None:
        if client.lookups >= MAX_LOOKUPS:
            self._log(f"{names.text(query.name)}: rules and records lead round in a circle")
            reply(None)
            return
        self.lookup(query, msgspec.structs.replace(client, lookups=client.lookups + 1), reply)


def _refuse(query: Query, _client: DnsClient, reply: Reply) -> None:
    reply(reply_to(query, wire.REFUSED).encode())


def _readable(answer: bytes | None) -> Message | None:
    try:
        return None if answer is None else read_message(answer)
    except MalformedResponseError:
        return None


def _then(reply: Reply, change: Callable[[Message], None]) -> Reply:
    """Return a reply that changes the message first. What cannot be read is passed on unchanged."""

    def take(answer: bytes | None) -> None:
        """Reply with the changed message; pass on an unreadable message as it is."""
        message = _readable(answer)
        if message is None:
            reply(answer)
            return
        change(message)
        reply(message.encode())

    return take


def _joined(message: Message, reply: Reply) -> Reply:
    """Return a reply that appends the answers of a lookup to a message that ends with a CNAME record."""

    def take(answer: bytes | None) -> None:
        """Reply with the message, extended by the records and the truncation flag of the lookup of its target."""
        found = _readable(answer)
        if found is not None:
            message.answers += found.answers
            message.flags |= found.flags & wire.TC
        reply(message.encode())

    return take
