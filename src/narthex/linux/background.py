"""Work in a thread while a block of code runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_background(
    name: str, work: Callable[[], None], stop: Callable[[], object], *, patience: float | None = None
) -> Iterator[None]:
    """Run `work` in a thread while the block runs, then call `stop` and wait for the thread.

    `patience` limits that wait in seconds; a thread that is late ends with the process.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join(patience)
