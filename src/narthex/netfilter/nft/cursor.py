"""Lexer for nft's language, and a cursor over the tokens of one statement."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from narthex.model import ipv6_text
from narthex.netfilter.ast import Field, HashedFields, Key, KeyPart, Slot


class UnknownSyntax(Exception):
    """The tokens do not have the expected form."""


class Token(NamedTuple):
    """A token and its position in the source."""

    text: str
    start: int
    end: int


_TOKEN = re.compile(r'"[^"]*"|#[^\n]*|[{},;\n]|[^\s{},;"]+')
HASHES = ("jhash", "symhash")
_PLAIN_FIELDS = {"iifname": Field.IIFNAME, "oifname": Field.OIFNAME, "iif": Field.IIFNAME, "oif": Field.OIFNAME}
_ORIGINAL_FIELDS = {
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


class TokenCursor:
    """A cursor over the tokens of one statement. Reading past the end raises UnknownSyntax."""

    def __init__(self, source: str, tokens: Sequence[Token]) -> None:
        self._source = source
        self._tokens = tokens
        self.position = 0

    @property
    def done(self) -> bool:
        """True after the last token."""
        return self.position >= len(self._tokens)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def peek(self, ahead: int = 0) -> str:
        """Return a token ahead of the cursor, "" past the end."""
        at = self.position + ahead
        return self._tokens[at].text if at < len(self._tokens) else ""

    def at(self, index: int) -> str:
        """Return a token by its index in the statement, "" past the end."""
        return self._tokens[index].text if index < len(self._tokens) else ""

    def take(self) -> str:
        """Return the next token and move past it."""
        text = self.peek()
        if not text:
            raise UnknownSyntax
        self.position += 1
        return text

    def take_if(self, *texts: str) -> bool:
        """Move past the next token if it is one of these. Return True if it was."""
        found = self.peek() in texts
        self.position += found
        return found

    def expect(self, text: str) -> None:
        """Move past this token. Raises UnknownSyntax for another one."""
        if self.take() != text:
            raise UnknownSyntax

    def items(self) -> Iterator[None]:
        """Iterate over the items of `{ …, … }`. The caller reads each item up to the comma or brace."""
        self.expect("{")
        while self.peek() != "}":
            yield
            if not self.take_if(",") and self.peek() != "}":
                raise UnknownSyntax
        self.take()

    def texts(self) -> list[str]:
        """Return all tokens of the statement."""
        return [token.text for token in self._tokens]

    def slice(self, start: int, end: int) -> str:
        """Return the source text between two positions."""
        return self._source[self._tokens[start].start : self._tokens[end - 1].end]

    def key(self) -> Key:
        """Read a key such as `ip daddr . meta l4proto . th dport`."""
        parts = [self._key_part()]
        while self.take_if("."):
            parts.append(self._key_part())
        return tuple(parts)

    def _key_part(self) -> KeyPart:
        first = self.take()
        if first in _PLAIN_FIELDS:
            return _PLAIN_FIELDS[first]
        if first == "numgen":
            self.expect("random")
            self.expect("mod")
            mod = self.number()
            if self.peek() == "offset":
                raise UnknownSyntax
            return Slot(mod)
        if first in HASHES:
            self.position -= 1
            return self.hashed()
        if first == "ct":
            self.expect("original")
            self.take_if("ip", "ip6")
            field = _ORIGINAL_FIELDS.get(self.take())
        else:
            field = _FIELDS.get((first, self.take()))
        if field is None:
            raise UnknownSyntax
        return field

    def hashed(self) -> HashedFields:
        """Read `jhash ip saddr . th sport mod N [seed S] [offset M]`, or `symhash mod N [offset M]`."""
        fields: list[Field] = []
        if self.take() == "jhash":
            for part in self.key():
                if not isinstance(part, Field):
                    raise UnknownSyntax
                fields.append(part)
        self.expect("mod")
        mod = self.number()
        seed = self.number() if self.take_if("seed") else None
        return HashedFields(tuple(fields), mod, seed, self.number() if self.take_if("offset") else 0)

    def key_or_none(self) -> Key | None:
        """Read a key, or return None if there is none."""
        try:
            return self.key()
        except UnknownSyntax:
            return None

    def number(self) -> int:
        """Read a decimal or hexadecimal number."""
        text = self.take()
        try:
            return int(text, 16 if text.startswith("0x") else 10)
        except ValueError:
            raise UnknownSyntax from None


class Lexer:
    """The tokens of a text, read statement by statement."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens: Iterator[Token] = (
            Token(match.group(), match.start(), match.end())
            for match in _TOKEN.finditer(text)
            if not match.group().startswith("#")
        )
        self._pushed_back: Token | None = None

    def next(self) -> str | None:
        """Return the next token that does not end a line, or None at the end of the text."""
        while (token := self._take()) is not None:
            if token.text not in ("\n", ";"):
                return token.text
        return None

    def _take(self) -> Token | None:
        token, self._pushed_back = self._pushed_back, None
        return token if token is not None else next(self._tokens, None)

    def skip_block(self) -> None:
        """Skip the rest of a block whose opening brace was read."""
        depth = 1
        while (token := self._take()) is not None:
            depth += (token.text == "{") - (token.text == "}")
            if not depth:
                return

    def statement(self) -> TokenCursor | None:
        """Return the tokens up to the end of the line or `;`, including blocks in braces; None at the closing brace."""
        tokens: list[Token] = []
        depth = 0
        while (token := self._take()) is not None:
            if token.text in ("\n", ";") and not depth:
                if tokens:
                    break
                continue
            if token.text == "}" and not depth:
                if not tokens:
                    return None
                # `chain a { accept }` on one line: keep the brace for the next call.
                self._pushed_back = token
                break
            depth += (token.text == "{") - (token.text == "}")
            if token.text != "\n":
                tokens.append(token)
        if not tokens:
            return None
        return TokenCursor(self.text, tuple(tokens))


_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 0}
_DURATION = re.compile(r"(\d+)(ms|[dhms])")


def duration(text: str) -> int:
    """Return the seconds of a duration such as `1d3h10m5s`, rounded down."""
    return sum(int(count) * _UNITS[unit] for count, unit in _DURATION.findall(text))


def canonical(text: str) -> str:
    """Return an address in the form of `narthex.model.net`. nft writes some IPv6 addresses with dots (`::ffff:10.0.0.1`)."""
    if ":" not in text or "." not in text:
        return text
    host, slash, length = text.partition("/")
    try:
        return f"{ipv6_text(host)}{slash}{length}"
    except ValueError:
        raise UnknownSyntax from None
