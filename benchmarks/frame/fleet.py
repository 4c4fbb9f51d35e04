"""Many nodes and one API server, on paper: what a change costs, and what happens when all come back after an outage.

Sizes of objects are measured from what `frame.server` serves; waits are Narthex's own (`kube/messages.py: WatchTimes`). What
a real API server can do is assumed, and stands in `Server` with its reason, to be changed by whoever knows better.

After an outage a node waits, asks, and is answered, refused (429, with Retry-After) or queued: the server answers so many at once, and
those share its link and its processors evenly. All answers are of one size, so they end in the order in which they began.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from random import Random

import msgspec

from narthex.kube.messages import WatchTimes

from .server import endpoint_slice, service


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """What an API server is taken to be able to do."""

    bytes_a_second: float = 1.25e9
    """Of its link: 10 Gbit/s."""
    at_once: int = 400
    """`--max-requests-inflight`, its default."""
    list_bytes_a_processor: float = 100e6
    """JSON that a processor encodes in a second (Go's encoding/json makes some 100 MB/s)."""
    send_seconds: float = 20e-6
    """Of a processor, to hand one event, encoded once, to one watcher (a write to a TLS connection)."""
    processors: int = 8
    retry_after: float = 1.0
    """Seconds that a 429 asks for; kube-apiserver's word."""
    history_kept: bool = False
    """Watches can go on from their version: the outage was short, or the server's cache still has the past."""
    client_jitter: bool = True
    """Clients wait with exponential backoff and jitter, as Narthex does; False: each waits one second."""
    outage: float = 30.0
    """Seconds that the server is away."""


PRESENT = Server()


class Steady(msgspec.Struct, frozen=True):
    """Of a rate of changes, a second."""

    events: float
    bytes: float
    processors: float
    most_rate: float
    """Changes a second that fill the link."""


class Seen(msgspec.Struct, frozen=True):
    """Of an outage."""

    half: float
    """Seconds from the server's return until half of the nodes know all."""
    last: float
    busiest: int
    """Requests that came in the busiest second."""
    refused: int
    bytes: float


def changes_a_second(server: Server, nodes: int, endpoints: int, rate: float) -> Steady:
    """So many changes of one endpoint, each a whole slice sent to each node."""
    event = len(msgspec.json.encode(endpoint_slice(0, endpoints))) + 60
    sent = rate * nodes
    return Steady(sent, sent * event, sent * server.send_seconds, server.bytes_a_second / (nodes * event))


def list_bytes(services: int, endpoints: int) -> int:
    """Of both lists."""
    one = len(msgspec.json.encode(service(0))) + len(msgspec.json.encode(endpoint_slice(0, endpoints)))
    return services * one


def outage(told: Server, nodes: int, services: int, endpoints: int, seed: int = 1) -> Seen:
    """All nodes lose the server at moment 0 and have it again after `told.outage` seconds."""
    chance = Random(seed)
    times = WatchTimes()
    size = 2000.0 if told.history_kept else float(list_bytes(services, endpoints))
    rate = min(told.bytes_a_second, told.processors * told.list_bytes_a_processor)
    asks: list[tuple[float, int, int]] = []
    for node in range(nodes):
        heapq.heappush(asks, (_rest(told, times, 0, chance), node, 1))
    came: Counter[int] = Counter()
    done: list[float] = []
    served = _Sharing(rate, size)
    refused = 0
    while asks:
        now, node, failures = heapq.heappop(asks)
        if now < told.outage:
            # Nobody answers: a refused connection costs nobody anything.
            heapq.heappush(asks, (now + _rest(told, times, failures, chance), node, failures + 1))
            continue
        came[int(now)] += 1
        done += served.until(now)
        if served.active >= told.at_once:
            refused += 1
            least = told.retry_after * (1 + 0.1 * chance.random() if told.client_jitter else 1)
            again = max(least, _rest(told, times, failures, chance))
            heapq.heappush(asks, (now + again, node, failures + 1))
        else:
            served.begin(now)
    done += served.until(math.inf)
    after = sorted(moment - told.outage for moment in done)
    return Seen(after[len(after) // 2], after[-1], max(came.values()), refused, size * nodes)


def _rest(server: Server, times: WatchTimes, failures: int, chance: Random) -> float:
    if not server.client_jitter:
        return 1.0
    return times.backoff.delay(failures + 1, chance.random())


class _Sharing:
    """Answers of one size that share a rate evenly: by the work that each has got, which grows alike for all."""

    def __init__(self, rate: float, size: float) -> None:
        self._rate = rate
        self._size = size
        self._now = 0.0
        self._got = 0.0
        self._ends: list[float] = []
        """Of those under way, the `_got` at which each is complete; in order."""

    @property
    def active(self) -> int:
        """How many are under way."""
        return len(self._ends)

    def begin(self, now: float) -> None:
        """One more. To be called after `until(now)`."""
        self._now = now
        self._ends.append(self._got + self._size)

    def until(self, moment: float) -> list[float]:
        """Moments at which answers became complete up to this one."""
        complete = []
        while self._ends:
            at = self._now + (self._ends[0] - self._got) * len(self._ends) / self._rate
            if at > moment:
                # All that are under way are done before infinity.
                self._got += (moment - self._now) * self._rate / len(self._ends)
                break
            self._now, self._got = at, self._ends.pop(0)
            complete.append(at)
        self._now = moment
        return complete
