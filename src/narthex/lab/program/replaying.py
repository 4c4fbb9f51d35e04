"""Goes through a recorded history, as fast as it can or in its own pace."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from narthex.lab.admission import admission
from narthex.lab.history import BadHistory, read
from narthex.lab.program.state import LabError
from narthex.lab.replay import Differs, Replay


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A history that was gone through."""

    lab: str
    begin: datetime
    end: datetime
    written: int
    """Changes that people and nodes had made."""
    decided: int
    """Changes that the controllers decided again, each as then."""
    turns: int
    objects: list[dict[str, Any]]
    """At the end, by kind, namespace and name."""


def replay(
    path: Path, speed: float | None = None, seen: Callable[[datetime, Replay], object] | None = None
) -> Replayed:
    """Go through the history in a file. `speed`: 2 takes half the time that it took then; None waits for nothing. `seen` is
    told after each step. Raises LabError when it is no history, and when the controllers decide otherwise."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from None
    try:
        with file:
            again = Replay(read(file), admission())
            last = begin = again.begin.at
            started = time.monotonic()
            while (moment := again.step()) is not None:
                last = max(last, moment)
                if speed is not None:
                    time.sleep(max(0.0, (last - begin).total_seconds() / speed - (time.monotonic() - started)))
                if seen is not None:
                    seen(last, again)
    except BadHistory as error:
        raise LabError(f"{path} is no history of a lab: {error}") from None
    except Differs as error:
        raise LabError(f"{path}: the controllers of this version decide otherwise: {error}") from None
    return Replayed(
        lab=again.begin.lab,
        begin=begin,
        end=last,
        written=again.written,
        decided=again.decided,
        turns=again.turns,
        objects=again.objects(),
    )
