"""All links of a node that can be answered on, as one thing to listen at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from narthex.lb.kernel.links import Link, links
from narthex.lb.kernel.packets import LinkSockets


class Station:
    """Raw sockets on links that come and go. For one thread."""

    def __init__(self, exclude: Sequence[str], say: Callable[[str], object]) -> None:
        """`exclude`: patterns of names of links that are left alone. `say` is told what cannot be opened."""
        self._exclude = tuple(exclude)
        self._say = say
        self._open: dict[str, LinkSockets] = {}
        self._heard: tuple[frozenset[str], dict[str, frozenset[str]]] = (frozenset(), {})

    @property
    def links(self) -> Mapping[str, Link]:
        """Where it can answer now, by name."""
        return {name: each.link for name, each in self._open.items()}

    @property
    def files(self) -> tuple[int, ...]:
        """For poll. Others after each `rescan` that finds a change."""
        return tuple(file for each in self._open.values() for file in each.files)

    def rescan(self) -> bool:
        """Look which links there are; True when some are others than before. Raises PermissionError."""
        found = {link.name: link for link in links(self._exclude)}
        before = self.links
        for name, each in list(self._open.items()):
            if found.get(name) != each.link:
                each.close()
                del self._open[name]
        for name in found.keys() - self._open.keys():
            try:
                self._open[name] = LinkSockets(found[name])
            except PermissionError as error:
                raise PermissionError(error.errno, f"raw sockets need CAP_NET_RAW: {error.strerror}") from error
            except OSError as error:
                # A link that has gone again is no fault; one that stays is tried again at the next look.
                self._say(f"link {name}: {error.strerror or error}")
        self.listen_for(*self._heard)
        return self.links != before

    def listen_for(self, addresses: frozenset[str], answered: dict[str, frozenset[str]]) -> None:
        """Hear what is about these addresses, and be reached where the `answered` ones of each link are asked for."""
        self._heard = addresses, answered
        for name, each in self._open.items():
            each.listen_for(addresses, answered.get(name, frozenset()))

    def frames(self) -> Iterator[tuple[Link, bytes]]:
        """What waits, and on which link."""
        for each in list(self._open.values()):
            for frame in each.frames():
                yield each.link, frame

    def send(self, name: str, frames: Collection[bytes]) -> int:
        """Send frames on a link; how many it took."""
        each = self._open.get(name)
        return sum(each.send(frame) for frame in frames) if each else 0

    def close(self) -> None:
        """Let go of everything."""
        for each in self._open.values():
            each.close()
        self._open.clear()
