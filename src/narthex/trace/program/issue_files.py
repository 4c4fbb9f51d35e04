"""Files with issue texts, which a person saved from an issue tracker or a mail."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from narthex.trace.issue.text import IssueText, IssueTextError, is_issue_text, read_issue_text
from narthex.trace.program.bundle import Bundle, BundleError

_MOST = 64 << 20
"""Bytes of a file that may be an issue text. A tracker takes far fewer."""


def read_issue(path: Path) -> IssueText | None:
    """Return the issue text in a file; None for a directory and for a file without one. Raises BundleError."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST:
            return None
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise BundleError(f"{path.name}: cannot be read: {error.strerror}") from error
    if not is_issue_text(text):
        return None
    try:
        return read_issue_text(text)
    except IssueTextError as error:
        raise BundleError(f"{path.name}: {error}") from error


def first_issue(paths: Iterable[Path]) -> IssueText | None:
    """Return the first issue text in some files. Raises BundleError."""
    return next((found for path in paths if (found := read_issue(path)) is not None), None)


def bundles_of(issue: IssueText, origin: str) -> tuple[Bundle, ...]:
    """Return the bundles in an issue text."""
    return tuple(Bundle(origin=origin, table=node.manifest(), parts=node.parts) for node in issue.nodes)
