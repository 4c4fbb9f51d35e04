"""Regular expressions of Corefiles, in the syntax of Go's `regexp`, matched in linear time by RE2.

Python's `re` backtracks, so that one pattern and one name can occupy a worker for years.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import re2  # type: ignore[import-untyped]

MAX_PATTERN = 10_000
"""Characters of a pattern, as in CoreDNS."""
MAX_TEXT = 1100
"""Characters of a text that are looked at. A name has at most 1,004 with all its escapes."""
_MAX_MEMORY = 1 << 20
"""Bytes of a compiled pattern and of the states that its matches cache."""


class PatternError(ValueError):
    """Text that is no regular expression, or one that is too large; the message completes a sentence."""


class Pattern:
    """A compiled regular expression."""

    def __init__(self, text: str, compiled: re2._Regexp) -> None:
        self.text = text
        self.groups: int = compiled.groups
        """Number of groups, without the whole match."""
        number_of = {number: name for name, number in compiled.groupindex.items()}
        self.names = tuple(number_of.get(number, "") for number in range(self.groups + 1))
        """Names of the groups by number; empty for groups without a name, and for group 0."""
        self._compiled = compiled

    def search(self, text: str) -> tuple[str, ...] | None:
        """Return the whole match and its groups (leftmost-first, as Go and Perl), or None. Absent groups are empty."""
        found = self._compiled.search(text[:MAX_TEXT])
        return None if found is None else (found.group(), *found.groups(""))


@lru_cache(maxsize=1024)
def compile_pattern(text: str) -> Pattern:
    """Compile a pattern. Raises PatternError."""
    import re2  # Few Corefiles have patterns, and a worker without them saves this memory.

    if len(text) > MAX_PATTERN:
        raise PatternError(f"has {len(text)} characters; {MAX_PATTERN} are allowed")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_MEMORY
    try:
        return Pattern(text, re2.compile(text, options))
    except re2.error as error:
        raise PatternError(error.args[0].decode(errors="replace")) from None
