"""Plugin `errors`: logs failed queries, and optionally consolidates similar messages."""

from __future__ import annotations

from collections.abc import Callable

from narthex.dns.corefile.pattern import compile_pattern
from narthex.dns.corefile.settings import ConsolidateRule, ErrorsSettings
from narthex.model import quoted
from narthex.model.duration import duration_text


class ErrorLog:
    """The error log of one server block."""

    def __init__(
        self,
        settings: ErrorsSettings,
        schedule: Callable[[float, Callable[[], None]], None],
        write: Callable[[str], None],
    ) -> None:
        """`schedule` calls back after a number of seconds. `write` gets each line."""
        self._rules = [(compile_pattern(each.pattern), each) for each in settings.consolidate]
        self._schedule = schedule
        self._write = write
        self._counts: dict[str, int] = {}
        """Messages of the current period, by the pattern that they match."""

    def error(self, message: str) -> None:
        """Log an error, or count it if a rule matches."""
        for pattern, rule in self._rules:
            if pattern.search(message) is not None:
                if rule.pattern not in self._counts:
                    self._schedule(rule.interval, lambda rule=rule: self._summarize(rule))  # type: ignore[misc]
                self._counts[rule.pattern] = self._counts.get(rule.pattern, 0) + 1
                return
        self._write(message)

    def _summarize(self, rule: ConsolidateRule) -> None:
        count = self._counts.pop(rule.pattern, 0)
        self._write(
            f"{rule.level}: {count} errors like {quoted(rule.pattern)} in the last {duration_text(rule.interval)}"
        )
