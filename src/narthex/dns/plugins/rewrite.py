"""Plugin `rewrite`: changes the question before other plugins see it, and the response before the client does.

Rules apply in the order of the Corefile, each to the question as the rules before it left it. What they do to a response
applies in the reverse order, and the response always has the client's question.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import msgspec

from narthex.dns.corefile.pattern import compile_pattern
from narthex.dns.corefile.settings import RewriteMatch, RewriteRule
from narthex.dns.message import names, wire
from narthex.dns.message.query import Query
from narthex.dns.message.records import Message, Record

_NAMES_IN_DATA = (wire.SRV, wire.MX, wire.CNAME, wire.NS, wire.DNAME, wire.SOA, wire.PTR)
NameChange = Callable[[bytes], bytes | None]
"""Returns the new name, or None if a name stays. Names are in wire form."""


class InvalidNameError(ValueError):
    """A rule made a name that is not valid."""


class TtlBounds(msgspec.Struct, frozen=True):
    """Bounds of the TTLs of a response."""

    low: int
    high: int


class RcodeChange(msgspec.Struct, frozen=True):
    """Another response code."""

    old: int
    new: int


class OwnerChange(msgspec.Struct, frozen=True):
    """Other owner names."""

    change: NameChange


class TargetChange(msgspec.Struct, frozen=True):
    """Other names in the data of records."""

    change: NameChange


class CnameChange(msgspec.Struct, frozen=True):
    """Another target of a CNAME record, whose records replace the rest of the answer."""

    change: NameChange


ResponseChange = TtlBounds | RcodeChange | OwnerChange | TargetChange | CnameChange


class RewrittenQuery(msgspec.Struct, frozen=True):
    """The question for the next plugins, and what to do with the response, in the order of the rules."""

    query: Query
    changes: tuple[ResponseChange, ...]


class RewritePlugin:
    """The rules of one server block."""

    def __init__(self, rules: Sequence[RewriteRule]) -> None:
        self._rules = [(rule, _matcher(rule.match), _static_changes(rule)) for rule in rules]

    def rewrite(self, query: Query) -> RewrittenQuery | None:
        """Apply the rules to a question; None if none matches. Raises InvalidNameError."""
        changes: list[ResponseChange] = []
        now, matched = query, False
        for rule, matches, static in self._rules:
            after = _apply(rule, matches, now)
            if after is None:
                continue
            matched = True
            if rule.field == "name" and rule.auto and rule.match.how != "suffix":
                remap = _remapped(after.name, now.qname)
                changes += (OwnerChange(remap), TargetChange(remap))
            changes += static
            now = after
            if rule.stop:
                break
        return RewrittenQuery(now, tuple(changes)) if matched else None


def apply_changes(message: Message, query: Query, changes: Sequence[ResponseChange]) -> None:
    """Change a response, and give it the question of the client. Changes of CNAME targets need a lookup: `cname_change`."""
    message.question = query.qname + wire.QUESTION_TAIL.pack(query.qtype, query.qclass)
    for change in reversed(changes):
        if isinstance(change, RcodeChange):
            if message.rcode == change.old:
                message.rcode = change.new
        elif not isinstance(change, CnameChange):
            for section in message.sections:
                section[:] = [_changed(record, change) for record in section]


def cname_change(message: Message, changes: Sequence[ResponseChange]) -> tuple[int, bytes] | None:
    """Return the index and the new target of the first CNAME record that a rule concerns."""
    for change in reversed(changes):
        for index, record in enumerate(message.answers):
            if isinstance(change, CnameChange) and record.type == wire.CNAME:
                target = change.change(record.target)
                if target is not None:
                    return index, target
    return None


def _changed(record: Record, change: TtlBounds | OwnerChange | TargetChange) -> Record:
    if isinstance(change, TtlBounds):
        return msgspec.structs.replace(record, ttl=min(max(record.ttl, change.low), change.high))
    if isinstance(change, OwnerChange):
        owner = change.change(record.owner)
        return record if owner is None else msgspec.structs.replace(record, owner=owner)
    target = change.change(record.target) if record.type in _NAMES_IN_DATA else None
    return record if target is None else record.with_target(target)


def _matcher(match: RewriteMatch) -> Callable[[str], tuple[str, ...] | None]:
    """Return a function that returns the groups of a matching name (the whole match alone for plain text), or None."""
    text = match.text
    if match.how == "regex":
        return compile_pattern(text).search
    tests: dict[str, Callable[[str], bool]] = {
        "exact": text.__eq__,
        "prefix": lambda name: name.startswith(text),
        "suffix": lambda name: name.endswith(text),
        "substring": lambda name: text in name,
    }
    test = tests[match.how]
    return lambda name: (text,) if test(name) else None


def _apply(rule: RewriteRule, matches: Callable[[str], tuple[str, ...] | None], query: Query) -> Query | None:
    """Return the question after a rule, or None if it does not match."""
    if rule.field == "cname":
        return query
    if rule.field == "type":
        return with_question(query, query.qname, rule.new, query.qclass) if query.qtype == rule.old else None
    if rule.field == "class":
        return with_question(query, query.qname, query.qtype, rule.new) if query.qclass == rule.old else None
    name = names.text(query.name)
    groups = matches(name)
    if groups is None:
        return None
    if rule.field != "name":
        return query
    try:
        found = names.wire(_replaced(rule.match, rule.replacement, name, groups))
    except ValueError as error:
        raise InvalidNameError(f"the name after rewriting {name} {error}") from error
    return with_question(query, found, query.qtype, query.qclass)


def _replaced(match: RewriteMatch, replacement: str, name: str, groups: tuple[str, ...]) -> str:
    if match.how == "regex":
        return _filled(replacement, groups)
    if match.how == "prefix":
        return replacement + name[len(match.text) :]
    if match.how == "suffix":
        return name[: len(name) - len(match.text)] + replacement
    return name.replace(match.text, replacement) if match.how == "substring" else replacement


def _filled(replacement: str, groups: tuple[str, ...]) -> str:
    for number, group in enumerate(groups):
        replacement = replacement.replace(f"{{{number}}}", group)
    return replacement


def with_question(query: Query, name: bytes, qtype: int, qclass: int) -> Query:
    """Return the query with another question, and the client's ID, flags, and EDNS options."""
    question = name + wire.QUESTION_TAIL.pack(qtype, qclass)
    return msgspec.structs.replace(
        query,
        packet=query.packet[: wire.HEADER.size] + question + query.packet[query.question_end :],
        name=name.lower(),
        qname=name,
        qtype=qtype,
        qclass=qclass,
        question_end=wire.HEADER.size + len(question),
    )


def _static_changes(rule: RewriteRule) -> tuple[ResponseChange, ...]:
    """Return the changes of responses that do not depend on the question."""
    if rule.field == "ttl":
        return (TtlBounds(rule.old, rule.new),)
    if rule.field == "rcode":
        return (RcodeChange(rule.old, rule.new),)
    if rule.field == "cname":
        return (CnameChange(_rewriter(rule.match, rule.replacement)),)
    if rule.field != "name":
        return ()
    changes: list[ResponseChange] = []
    if rule.auto and rule.match.how == "suffix":
        back = _rewriter(RewriteMatch(how="suffix", text=rule.replacement), rule.match.text)
        changes += (OwnerChange(back), TargetChange(back))
    for answer in rule.answers:
        change = _rewriter(RewriteMatch(how="regex", text=answer.pattern), answer.replacement)
        changes.append(OwnerChange(change) if answer.part == "name" else TargetChange(change))
    return tuple(changes)


def _rewriter(match: RewriteMatch, replacement: str) -> NameChange:
    """Return a function that replaces names that match. A result that is no valid name changes nothing."""
    matches = _matcher(match)

    @functools.lru_cache(maxsize=256)
    def change(name: bytes) -> bytes | None:
        """Return the rewritten name in wire format, or None if the rule does not match or the result is not a valid name."""
        text = names.text(name)
        groups = matches(text)
        if groups is None:
            groups = matches(text.lower())
            text = text.lower()
        if groups is None:
            return None
        try:
            return names.wire(_replaced(match, replacement, text, groups))
        except ValueError:
            return None

    return change


def _remapped(name: bytes, original: bytes) -> NameChange:
    """Return a function that replaces a name (in lower case), also as the suffix of another, by the original one."""

    def change(found: bytes) -> bytes | None:
        """Put the original name in place of the rewritten suffix; None if the name is elsewhere or would be too long."""
        if not names.within(found.lower(), name):
            return None
        changed = found[: len(found) - len(name)] + original
        return changed if len(changed) <= names.MAX_NAME else None

    return change
