"""Which endpoint a client gets: in turn, remembered clients first, around those that could not be reached.

Pure: times are given, and so is what shuffles. All of it belongs to one loop, so nothing is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

Place = tuple[str, int]
"""Address and port of an endpoint."""

RESTING_SECONDS = 1.0
"""An endpoint that could not be reached is asked last for so long, so that not every client waits for it anew."""
TIMEOUTS = (0.25, 0.5, 1.0, 2.0)
"""Seconds to wait for an endpoint that is silent, round by round (row 25.4)."""


class Turns:
    """Round robin over one set of endpoints, in an order that is drawn anew when the set changes (row 25.3)."""

    def __init__(self, places: Sequence[Place], shuffle: Callable[[list[Place]], object]) -> None:
        self._shuffle = shuffle
        self._order: list[Place] = []
        self._next = 0
        self._resting: dict[Place, float] = {}
        self.use(places)

    @property
    def places(self) -> frozenset[Place]:
        """The set at present."""
        return frozenset(self._order)

    def use(self, places: Sequence[Place]) -> None:
        """Choose among these from now on."""
        if set(places) == set(self._order):
            return
        self._order = list(places)
        self._shuffle(self._order)
        self._next = 0
        self._resting = {place: until for place, until in self._resting.items() if place in self._order}

    def candidates(self, now: float, first: Place | None = None) -> Iterator[Place]:
        """All endpoints in the order in which to try them for one client: `first`, which is remembered, then in turn,
        and those that rest at the end. Taking the turn counts for one, however many are asked for.

        An endpoint that leaves the set meanwhile is left out, as far as it was not asked for yet.
        """
        order = self._order
        turn = self._next
        if first is None and order:
            self._next = (turn + 1) % len(order)
        ahead = [order[(turn + step) % len(order)] for step in range(len(order))]
        ahead.sort(key=lambda place: (place != first, self._rests(place, now)))
        for place in ahead:
            if place in self._order:
                yield place

    def failed(self, place: Place, now: float) -> None:
        """It could not be reached."""
        if place in self._order:
            self._resting[place] = now + RESTING_SECONDS

    def reached(self, place: Place) -> None:
        """It could."""
        self._resting.pop(place, None)

    def _rests(self, place: Place, now: float) -> bool:
        return self._resting.get(place, now) > now


class Affinity:
    """Which endpoints the clients of one Service port have had (row 25.5). In memory: a new relay knows nobody.

    It serves several sets of endpoints, so a client may have one endpoint here and another there.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last: dict[str, dict[Place, float]] = {}

    def __len__(self) -> int:
        return len(self._last)

    def remembered(self, client: str, places: Sequence[Place], now: float) -> Place | None:
        """The first endpoint among these that the client has had within the time, None for a new client."""
        had = self._last.get(client)
        if had is None:
            return None
        return next((place for place in places if place in had and now - had[place] < self.seconds), None)

    def touch(self, client: str, place: Place, now: float) -> None:
        """The client has got this endpoint (again)."""
        self._last.setdefault(client, {})[place] = now

    def forget(self, client: str, place: Place) -> None:
        """The endpoint failed the client, which is free to have another."""
        had = self._last.get(client, {})
        had.pop(place, None)
        if not had:
            self._last.pop(client, None)

    def sweep(self, now: float) -> None:
        """Forget what is too old to count."""
        for client, had in list(self._last.items()):
            for place, at in list(had.items()):
                if now - at >= self.seconds:
                    self.forget(client, place)
