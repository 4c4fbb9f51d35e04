"""A source in a thread of its own, what it has told so far, and waiting for it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from narthex.kube.access import Access
from narthex.kube.messages import WatchTimes
from narthex.kube.resources import of_a_proxy
from narthex.kube.source import KubeSource
from narthex.model.backoff import Backoff
from narthex.model.store import Store, Synced
from narthex.runtime.configuration.values import ClientConnection
from narthex.testing.build import NODE

LIMIT = 30.0
"""Seconds that anything may take on a busy machine."""
QUICK = WatchTimes(
    backoff=Backoff(0.005, 0.05, jitter=1.0),
    steady=0.2,
    list_silence=0.5,
    stream_silence=0.5,
    watch=1.0,
    watch_grace=0.2,
    bookmark_silence=0.5,
    relist=0.7,
    doubt=0.5,
    doubt_relist=0.1,
)
"""Minutes as parts of a second."""
PATIENT = WatchTimes(backoff=Backoff(0.01, 0.1, jitter=1.0))
"""Hours for all but delays: what happens, happens because it was told."""
UNPACED = ClientConnection(qps=-1)


class Following:
    """Batches of events, folded into a Store."""

    def __init__(self, source: KubeSource) -> None:
        self.source = source
        self.store = Store()
        self.batches: list[Any] = []
        self.error: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            for events in self.source.changes(self._stop):
                self._take(events)
                del events
        except Exception as error:
            self.error = error

    def _take(self, events: Any) -> None:
        for event in events:
            self.store.apply(event)
        self.batches.append(events)

    @property
    def synced(self) -> bool:
        return any(isinstance(event, Synced) for batch in list(self.batches) for event in batch)

    @property
    def services(self) -> list[str]:
        return sorted(str(key) for key in self.store.snapshot.services)

    def wait(self, holds: Callable[[], Any], what: str = "it") -> None:
        end = time.monotonic() + LIMIT
        while not holds():
            assert self.error is None, repr(self.error)
            assert time.monotonic() < end, f"{what} did not come: {self.source.problems} {self.source.followed}"
            time.sleep(0.002)

    def start(self) -> "Following":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), "the source does not stop"
        assert self.error is None, repr(self.error)


@contextmanager
def following(
    access: Any, *, times: WatchTimes = PATIENT, resources: Any = None, **options: Any
) -> Iterator[Following]:
    """A source that is being followed."""
    if isinstance(access, str):
        access = Access(master=access, connection=UNPACED)
    source = KubeSource(access, resources or of_a_proxy(NODE), times=times, **options)
    following = Following(source).start()
    try:
        yield following
    finally:
        following.stop()
