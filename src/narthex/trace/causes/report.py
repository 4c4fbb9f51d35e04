"""Findings for people and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import msgspec

from narthex.proxy.plan.show import visible
from narthex.trace.causes.finding import CauseFinding

_WIDTH = 120
_MOST = 8


def text(findings: Sequence[CauseFinding]) -> str:
    """The first cause, then what else was met; ends with a newline. Empty without findings."""
    lines: list[str] = []
    for number, finding in enumerate(findings[:_MOST]):
        lines += _told(finding, "Why not" if not number and finding.explains else "Also")
    if len(findings) > _MOST:
        lines.append(f"Also: {len(findings) - _MOST} more; -o json has them all")
    return "".join(f"{visible(line)}\n" for line in lines)


def _told(finding: CauseFinding, word: str) -> Iterator[str]:
    likely = "" if finding.certain else " (likely)"
    yield from _wrapped(f"{word}{likely}: {finding.sentence}", "", "   ")
    for line in finding.evidence:
        yield from _wrapped(f"seen: {line}", "   ", "         ")
    if finding.advice:
        yield from _wrapped(f"do: {finding.advice}", "   ", "       ")
    yield f"   more: {finding.cause.page}"


def _wrapped(line: str, first: str, further: str) -> list[str]:
    return textwrap.wrap(
        line, _WIDTH, initial_indent=first, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )


class FindingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A finding in a document."""

    cause: str
    """Id of the cause."""
    title: str
    page: str
    certain: bool
    explains: bool
    """False: it does not affect this path, but was noticed."""
    sentence: str
    evidence: tuple[str, ...] = ()
    advice: str = ""
    node: str = ""


def records(findings: Sequence[CauseFinding]) -> tuple[FindingRecord, ...]:
    """Return the findings as parts of a document."""
    return tuple(
        FindingRecord(
            cause=each.cause.id,
            title=each.cause.title,
            page=each.cause.page,
            certain=each.certain,
            explains=each.explains,
            sentence=each.sentence,
            evidence=each.evidence,
            advice=each.advice,
            node=each.node,
        )
        for each in findings
    )
