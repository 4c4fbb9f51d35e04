"""Selection of endpoints for clients: round robin, remembered endpoints first, unreachable ones last.

Pure: times and the shuffle function are passed in. All objects belong to one event loop, so there are no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

Place = tuple[str, int]
"""Address and port of an endpoint."""

AVOIDED_SECONDS = 1.0
"""For this long after a failure an endpoint is tried last, so that not every client waits for it."""
TIMEOUTS = (0.25, 0.5, 1.0, 2.0)
"""Connect timeouts in seconds, by round (row 25.4)."""


class Turns:
    """Round robin over one set of endpoints, shuffled again whenever the set changes (row 25.3)."""

    def __init__(self, places: Sequence[Place], shuffle: Callable[[list[Place]], object]) -> None:
        self._shuffle = shuffle
        self._order: list[Place] = []
        self._next = 0
        self._avoided: dict[Place, float] = {}
        self.use(places)

    @property
    def places(self) -> frozenset[Place]:
        """The current endpoints."""
        return frozenset(self._order)

    def use(self, places: Sequence[Place]) -> None:
        """Select among these endpoints from now on."""
        if set(places) == set(self._order):
            return
        self._order = list(places)
        self._shuffle(self._order)
        self._next = 0
        self._avoided = {place: until for place, until in self._avoided.items() if place in self._order}

    def candidates(self, now: float, first: Place | None = None) -> Iterator[Place]:
        """Yield all endpoints in the order in which to try them for one client.

        `first`, the remembered endpoint, comes first, then the others in turn, and recently failed ones last. Each call
        takes one turn. Endpoints that are removed during the iteration are skipped.
        """
        order = self._order
        turn = self._next
        if first is None and order:
            self._next = (turn + 1) % len(order)
        ahead = [order[(turn + step) % len(order)] for step in range(len(order))]
        ahead.sort(key=lambda place: (place != first, self._avoided.get(place, now) > now))
        for place in ahead:
            if place in self._order:
                yield place

    def failed(self, place: Place, now: float) -> None:
        """Record that the endpoint could not be reached."""
        if place in self._order:
            self._avoided[place] = now + AVOIDED_SECONDS

    def reached(self, place: Place) -> None:
        """Record that the endpoint could be reached."""
        self._avoided.pop(place, None)


class Affinity:
    """Session affinity of one Service port (row 25.5). In memory: a new relay knows no clients.

    It serves several endpoint sets, so a client may have one endpoint in each of them.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last: dict[str, dict[Place, float]] = {}

    def __len__(self) -> int:
        return len(self._last)

    def remembered(self, client: str, places: Sequence[Place], now: float) -> Place | None:
        """Return the first of these endpoints that the client used within the time; None for a new client."""
        had = self._last.get(client)
        if had is None:
            return None
        return next((place for place in places if place in had and now - had[place] < self.seconds), None)

    def touch(self, client: str, place: Place, now: float) -> None:
        """Record that the client uses this endpoint."""
        self._last.setdefault(client, {})[place] = now

    def forget(self, client: str, place: Place) -> None:
        """Release the client from an endpoint that failed."""
        had = self._last.get(client, {})
        had.pop(place, None)
        if not had:
            self._last.pop(client, None)

    def sweep(self, now: float) -> None:
        """Remove expired records."""
        for client, had in list(self._last.items()):
            for place, at in list(had.items()):
                if now - at >= self.seconds:
                    self.forget(client, place)
