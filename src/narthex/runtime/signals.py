"""How a program is told to end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_signal(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop` while the block lasts; a second one is not needed and changes nothing. For the main
    thread."""

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stop()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
