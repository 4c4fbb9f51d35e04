"""Progress on a terminal: what a command does, and for how long, once that takes longer than a second."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

PATIENCE = 1.0
"""Seconds after which the line appears, and between its updates."""
_CLEAR = "\r\x1b[2K"
_busy = threading.Lock()


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show `what` and the elapsed seconds while the block runs, on stderr if it is a terminal. Nested blocks show nothing."""
    if not sys.stderr.isatty() or not _busy.acquire(blocking=False):
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(what, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _busy.release()


def _show(what: str, done: threading.Event) -> None:
    begin = time.monotonic()
    shown = False
    while not done.wait(PATIENCE):
        shown = True
        sys.stderr.write(f"{_CLEAR}{what} ... {time.monotonic() - begin:.0f} s")
        sys.stderr.flush()
    if shown:
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
