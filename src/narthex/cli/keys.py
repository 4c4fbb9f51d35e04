"""Single keys of a terminal, without waiting for a line's end."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType


class Keys:
    """Reads keys while it is open; without a terminal on the standard input there are none."""

    def __init__(self) -> None:
        self._before: list[object] | None = None

    def __enter__(self) -> Keys:
        if sys.stdin.isatty():
            self._before = list(termios.tcgetattr(sys.stdin))
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> str:
        """The next key within so many seconds, else nothing."""
        if self._before is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""
