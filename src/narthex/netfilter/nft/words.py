"""The words of one nft statement, and the parts that rules and sets share: keys and durations."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Protocol

from narthex.netfilter.ast import Field, Key, KeyPart, Slot


class NotUnderstood(Exception):
    """The words are not of the form that was tried."""


class _Placed(Protocol):
    @property
    def text(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


_PLAIN_FIELDS = {
    "iifname": Field.IIFNAME,
    "oifname": Field.OIFNAME,
    "iif": Field.IIFNAME,
    "oif": Field.OIFNAME,
}
_ORIGINAL = {
    "saddr": Field.ORIG_SADDR,
    "daddr": Field.ORIG_DADDR,
    "proto-src": Field.ORIG_SPORT,
    "proto-dst": Field.ORIG_DPORT,
}
_FIELDS = {
    ("ip", "saddr"): Field.SADDR,
    ("ip", "daddr"): Field.DADDR,
    ("ip6", "saddr"): Field.SADDR,
    ("ip6", "daddr"): Field.DADDR,
    ("ip", "protocol"): Field.L4PROTO,
    ("meta", "l4proto"): Field.L4PROTO,
    ("meta", "nfproto"): Field.NFPROTO,
    ("tcp", "sport"): Field.SPORT,
    ("tcp", "dport"): Field.DPORT,
    ("udp", "sport"): Field.SPORT,
    ("udp", "dport"): Field.DPORT,
    ("meta", "iif"): Field.IIFNAME,
    ("meta", "oif"): Field.OIFNAME,
    ("meta", "iifname"): Field.IIFNAME,
    ("meta", "oifname"): Field.OIFNAME,
    ("th", "sport"): Field.SPORT,
    ("th", "dport"): Field.DPORT,
}


class Words:
    """A cursor over the words of one statement. Reading past the end raises NotUnderstood."""

    def __init__(self, source: str, words: Sequence[_Placed]) -> None:
        self._source = source
        self._words = words
        self.position = 0

    @property
    def done(self) -> bool:
        """Whether all words are read."""
        return self.position >= len(self._words)

    @property
    def length(self) -> int:
        """How many words there are."""
        return len(self._words)

    def peek(self, ahead: int = 0) -> str:
        """A word ahead, "" past the end."""
        at = self.position + ahead
        return self._words[at].text if at < len(self._words) else ""

    def at(self, index: int) -> str:
        """The word at a place of the statement, "" past the end."""
        return self._words[index].text if index < len(self._words) else ""

    def take(self) -> str:
        """The next word, read."""
        word = self.peek()
        if not word:
            raise NotUnderstood
        self.position += 1
        return word

    def expect(self, word: str) -> None:
        """Read just this word."""
        if self.take() != word:
            raise NotUnderstood

    def texts(self) -> list[str]:
        """All words of the statement."""
        return [word.text for word in self._words]

    def slice(self, start: int, end: int) -> str:
        """The text as it stood between two positions."""
        return self._source[self._words[start].start : self._words[end - 1].end]

    def key(self) -> Key:
        """`ip daddr . meta l4proto . th dport`, as far as it goes."""
        parts = [self._part()]
        while self.peek() == ".":
            self.take()
            parts.append(self._part())
        return tuple(parts)

    def _part(self) -> KeyPart:
        first = self.take()
        if first in _PLAIN_FIELDS:
            return _PLAIN_FIELDS[first]
        if first == "numgen":
            self.expect("random")
            self.expect("mod")
            mod = self.number()
            if self.peek() == "offset":
                raise NotUnderstood
            return Slot(mod)
        if first == "ct":
            self.expect("original")
            if self.peek() in ("ip", "ip6"):
                self.take()
            original = _ORIGINAL.get(self.take())
            if original is None:
                raise NotUnderstood
            return original
        field = _FIELDS.get((first, self.take()))
        if field is None:
            raise NotUnderstood
        return field

    def key_or_none(self) -> Key | None:
        """As `key`, None for words that are no key."""
        try:
            return self.key()
        except NotUnderstood:
            return None

    def number(self) -> int:
        """A number, decimal or 0x…"""
        word = self.take()
        try:
            return int(word, 16 if word.startswith("0x") else 10)
        except ValueError:
            raise NotUnderstood from None


_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 0}
_DURATION = re.compile(r"(\d+)(ms|[dhms])")


def duration(text: str) -> int:
    """`1d3h10m5s` in seconds; parts of a second are cut off."""
    return sum(int(count) * _UNITS[unit] for count, unit in _DURATION.findall(text))


def canonical(text: str) -> str:
    """nft writes some IPv6 addresses with dots (`::ffff:10.0.0.1`); `narthex.model.net` never does."""
    if ":" not in text or "." not in text:
        return text
    host, slash, length = text.partition("/")
    try:
        return f"{ipaddress.IPv6Address(host)}{slash}{length}"
    except ValueError:
        raise NotUnderstood from None
