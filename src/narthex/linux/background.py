"""Work beside a block of code, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_background(
    name: str, work: Callable[[], None], stop: Callable[[], object], *, patience: float | None = None
) -> Iterator[None]:
    """Let `work` run while the block lasts. At its end `stop` tells the thread to end, and it is waited for, for `patience`
    seconds at most; None: for as long as it takes. One that is late ends with the process."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join(patience)
