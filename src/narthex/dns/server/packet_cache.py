"""Responses that are found by the bytes of the query packet, without parsing it. Most queries are answered here.

The key is the whole packet after its ID, so that any difference (case, EDNS options, flags) makes another query. All
entries are dropped when a zone changes; a miss costs only a few microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from narthex.dns.message import names, wire
from narthex.dns.message.response import AnswerRotation, EncodedResponse
from narthex.dns.zone.zone import NxdomainScope, Zone

MAX_BYTES = 6_000_000
_ENTRY_BYTES = 320
"""Memory of an entry in addition to its key and response."""
_SLOTS = 4096
_MAX_SUFFIXES = 2048
_HEADER = wire.HEADER.size - 2
"""Size of the header after the ID."""

PacketCounter = list[int]
"""A single number that counts; shared by all entries with the same labels."""


class CachedPacket(msgspec.Struct, gc=False):
    """The response to a known query.

    It is part of no reference cycle, so the garbage collector, which would pause the server to traverse thousands of
    entries, does not track it.
    """

    tail: bytes
    """The response after its ID."""
    counter: PacketCounter
    rotation: AnswerRotation | None
    """Set if each response has an order of its own."""
    zone: str = ""
    """Zone of the server block, if its queries are logged."""


class PacketCache:
    """Packet cache of one listener, bounded in bytes. The hot path calls `entries.get` directly."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.entries: dict[bytes, CachedPacket] = {}
        self._room = self._max_bytes = max_bytes
        self._seen = [0] * _SLOTS
        """Hashes of the negative queries that were seen last."""

    def store(self, key: bytes, response: EncodedResponse, counter: PacketCounter, zone: str = "") -> None:
        """Add an entry. A full cache is cleared instead."""
        self._room -= len(key) + len(response.tail) * (3 if response.rotation else 1) + _ENTRY_BYTES
        if self._room < 0:
            self.clear()
        else:
            self.entries[key] = CachedPacket(response.tail, counter, response.rotation, zone)

    def store_negative(self, key: bytes, tail: bytes, counter: PacketCounter) -> None:
        """Add an entry for an error or a name that does not exist on its second query: there is no end of such names."""
        mark = hash(key)
        slot = mark % _SLOTS
        if self._seen[slot] == mark:
            self.store(key, EncodedResponse(tail, wire.NXDOMAIN), counter)
        else:
            self._seen[slot] = mark

    def clear(self) -> None:
        """Remove all entries."""
        self.entries.clear()
        self._room = self._max_bytes


class NxdomainTemplate(msgspec.Struct, frozen=True):
    """The NXDOMAIN response to any name with a first label of one length: everything but the question."""

    head: bytes
    after: bytes
    counter: PacketCounter


class _MissingBelow(msgspec.Struct, frozen=True):
    """Templates for names with one label before the same suffix."""

    tail: bytes
    scope: NxdomainScope
    services: Mapping[bytes, object]
    extra: int
    """Number of bytes after the question."""
    templates: dict[int, NxdomainTemplate] = {}
    """By the length of the first label."""


class NxdomainTemplates:
    """Builds NXDOMAIN responses over UDP from templates, without parsing the packet.

    In many clusters most queries are for names that do not exist, because of search lists, and hardly one repeats.
    """

    def __init__(self, closed: Mapping[bytes, Zone]) -> None:
        """Create templates for `closed` zones, whose names no other plugin or server block can answer."""
        self._closed = closed
        self._below: dict[bytes, dict[bytes, _MissingBelow]] = {}
        """By the header after the ID, then by everything after the first label."""
        self._suffixes = 0

    def clear(self) -> None:
        """Drop all templates: a zone has changed, or the counters are no longer valid."""
        self._below.clear()
        self._suffixes = 0

    def lookup(self, key: bytes) -> tuple[bytes, NxdomainTemplate] | None:
        """Return the response after its ID to a packet after its ID, equal to that of `Dispatcher.handle`, or None."""
        suffixes = self._below.get(key[:_HEADER])
        if suffixes is None or len(key) == _HEADER:
            return None
        length = key[_HEADER]
        at = _HEADER + 1 + length
        below = suffixes.get(key[at:])
        if below is None:
            return None
        template = below.templates.get(length)
        if template is None:
            return None
        if below.scope == "unless a service" and key[_HEADER:at].lower() + below.tail in below.services:
            return None
        return template.head + key[_HEADER : len(key) - below.extra] + template.after, template

    def learn(self, key: bytes, response: EncodedResponse, counter: PacketCounter) -> None:
        """Derive a template from an NXDOMAIN response of plugin `kubernetes`. `counter` counts its uses."""
        if response.rcode != wire.NXDOMAIN:
            return
        length = key[_HEADER]
        at = _HEADER + 1 + length
        end = at
        while key[end]:
            end += 1 + key[end]
        end += 1
        name = key[at:end].lower()
        apex = next((suffix for suffix in names.suffixes(name) if suffix in self._closed), None)
        if apex is None:
            return
        zone = self._closed[apex]
        tail = name[: -len(apex)]
        scope = zone.nxdomain_scope(tail)
        if scope is None:
            return
        if self._suffixes >= _MAX_SUFFIXES:
            self.clear()
        suffixes = self._below.setdefault(key[:_HEADER], {})
        question_end = end + wire.QUESTION_TAIL.size
        below = suffixes.get(key[at:])
        if below is None:
            below = suffixes[key[at:]] = _MissingBelow(tail, scope, zone.services, len(key) - question_end)
            self._suffixes += 1
        below.templates[length] = NxdomainTemplate(response.tail[:_HEADER], response.tail[question_end:], counter)
