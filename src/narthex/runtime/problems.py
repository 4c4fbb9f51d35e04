"""What is wrong with the objects of a source, said once when it comes and once when it is gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narthex.runtime.logs import LOGGER, data


class ProblemLog:
    """Remembers what was said already. Not safe for threads; one loop owns it."""

    def __init__(self) -> None:
        self._said: dict[Any, None] = {}

    def tell(self, present: Sequence[Any]) -> None:
        """What is wrong now: `Problem`s."""
        now = dict.fromkeys(present)
        for problem in now:
            if problem not in self._said:
                log = LOGGER.warning if problem.severity == "warning" else LOGGER.error
                log("%s", problem, extra=data(origin=problem.origin, object=problem.object, field=problem.field))
        for problem in self._said:
            if problem not in now:
                LOGGER.info("mended: %s", problem, extra=data(origin=problem.origin, object=problem.object))
        self._said = now
