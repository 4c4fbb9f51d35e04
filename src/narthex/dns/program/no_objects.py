"""The source of a server that serves no cluster: there is nothing, and nothing comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from narthex.model.store import Event, Synced


class NoObjects:
    """See `apps.proxy.feed.Watched`."""

    problems: Sequence[object] = ()

    def scan(self) -> Sequence[Event]:
        """That was all."""
        return [Synced()]

    def changes(self, stop: threading.Event) -> Iterator[Sequence[Event]]:
        """Wait until `stop`."""
        stop.wait()
        return iter(())
