"""Plugin `errors`: questions that could not be answered go to the log, equal ones together if so wished."""

from __future__ import annotations

import re
from collections.abc import Callable

from narthex.dns.corefile.settings import Consolidate, Errors
from narthex.dns.interfaces import Loop
from narthex.model.duration import duration_text
from narthex.model.problem import quoted


class ErrorLog:
    """One server block's."""

    def __init__(self, settings: Errors, loop: Loop, write: Callable[[str], None]) -> None:
        self._rules = [(re.compile(each.pattern), each) for each in settings.consolidate]
        self._loop = loop
        self._write = write
        self._counts: dict[str, int] = {}
        """Messages since the first one, by the pattern they match."""

    def note(self, message: str) -> None:
        """An error. What a pattern matches is counted, and told after its time."""
        for pattern, rule in self._rules:
            if pattern.search(message):
                if rule.pattern not in self._counts:
                    self._loop.at(self._loop.now() + rule.every, lambda rule=rule: self._tell(rule))  # type: ignore[misc]
                self._counts[rule.pattern] = self._counts.get(rule.pattern, 0) + 1
                return
        self._write(message)

    def _tell(self, rule: Consolidate) -> None:
        count = self._counts.pop(rule.pattern, 0)
        self._write(f"{rule.level}: {count} errors like {quoted(rule.pattern)} in the last {duration_text(rule.every)}")
