"""Plugin `forward`: which upstream a query goes to, when the next one is tried, and when it fails (row S7).

`UpstreamPool` holds the upstreams of one `forward` and their health; `ForwardedQuery` is the state machine of one query. The
caller does the I/O and provides time and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from narthex.dns.corefile.settings import ForwardSettings, Upstream
from narthex.dns.message import wire
from narthex.dns.message.query import Transport

READ_TIMEOUT = 2.0
"""Seconds that an upstream has to answer."""
TOTAL_TIMEOUT = 5.0
"""Seconds for all attempts together."""
MAX_IN_FLIGHT = 8192
"""Queries in flight of one `forward` and worker without `max_concurrent`. One that waits takes about 3 KB."""
_ROUNDS = 2
"""Limit of attempts of one query at the same upstream."""


class UpstreamHealth(msgspec.Struct):
    """Health of an upstream."""

    fails: int = 0
    """Consecutive failures of health checks."""
    checking: bool = False
    looping: bool = False
    """Its queries come back to this server, so it is no longer used (row S11)."""


class QueryUpstream(msgspec.Struct, frozen=True):
    """Decision to send the query to an upstream and report by `deadline`."""

    upstream: Upstream
    via: Transport
    deadline: float


class UseResponse(msgspec.Struct, frozen=True):
    """Decision to use the last response."""


class NextForward(msgspec.Struct, frozen=True):
    """Decision to try the next `forward`, or else to use the last response (option `next`)."""


class GiveUp(msgspec.Struct, frozen=True):
    """Decision to answer with an error."""

    rcode: int
    reason: str


ForwardDecision = QueryUpstream | UseResponse | NextForward | GiveUp


class UpstreamPool:
    """The upstreams of one `forward`."""

    def __init__(self, settings: ForwardSettings, upstreams: tuple[Upstream, ...], draw: Callable[[int], int]) -> None:
        """`draw(n)` returns a random number below n."""
        self.settings = settings
        self._draw = draw
        self._next_first = 0
        self._health: dict[Upstream, UpstreamHealth] = {}
        self.upstreams: tuple[Upstream, ...] = ()
        self.in_flight = 0
        """Queries that wait for a response, including those that wait for an equal one."""
        self.rejected = 0
        """Queries beyond max_concurrent since the last `take_rejected`."""
        self.broken = 0
        """Queries that found all upstreams down since the last `take_broken`."""
        self.replace(upstreams)

    def replace(self, upstreams: tuple[Upstream, ...]) -> None:
        """Replace the upstreams. Those that stay keep their health."""
        self.upstreams = tuple(dict.fromkeys(upstreams))
        self._health = {upstream: self._health.get(upstream, UpstreamHealth()) for upstream in self.upstreams}

    def health(self, upstream: Upstream) -> UpstreamHealth:
        """Return the health of an upstream; a removed one counts as healthy."""
        return self._health.get(upstream) or UpstreamHealth()

    def down(self, upstream: Upstream) -> bool:
        """Return True if an upstream is currently skipped."""
        health = self.health(upstream)
        return health.looping or 0 < self.settings.max_fails <= health.fails

    def failed(self, upstream: Upstream) -> bool:
        """Note a failed attempt. Return True if health checks must start now; `checked` reports their results."""
        health = self._health.get(upstream)
        if health is None or health.checking or not self.settings.max_fails:
            return False
        health.checking = True
        return True

    def checked(self, upstream: Upstream, healthy: bool) -> bool:
        """Note the result of a health check. Return True if another one must follow after the configured interval."""
        health = self._health.get(upstream)
        if health is None:
            return False
        health.fails = 0 if healthy else health.fails + 1
        health.checking = not healthy
        return health.checking

    def mark_looping(self, upstream: Upstream) -> bool:
        """Stop using an upstream whose queries come back. Return True if that was unknown."""
        health = self._health.get(upstream)
        if health is None or health.looping:
            return False
        health.looping = True
        return True

    def acquire(self) -> GiveUp | None:
        """Count one more query in flight, or return why there may not be more. Each takes memory, whichever of them is sent."""
        if self.in_flight >= (self.settings.max_concurrent or MAX_IN_FLIGHT):
            self.rejected += 1
            return GiveUp(wire.REFUSED, f"{self.in_flight} queries are in flight already (max_concurrent)")
        self.in_flight += 1
        return None

    def release(self, queries: int = 1) -> None:
        """Note that queries are no longer in flight."""
        self.in_flight -= queries

    def take_rejected(self) -> int:
        """Return and reset the number of rejected queries."""
        count, self.rejected = self.rejected, 0
        return count

    def take_broken(self) -> int:
        """Return and reset the number of queries that found all upstreams down."""
        count, self.broken = self.broken, 0
        return count

    def order(self) -> tuple[Upstream, ...]:
        """Return the upstreams in the order of the policy for one query."""
        found = list(self.upstreams)
        if self.settings.policy == "round_robin" and found:
            first = self._next_first % len(found)
            self._next_first += 1
            return tuple(found[first:] + found[:first])
        if self.settings.policy == "random":
            for last in range(len(found) - 1, 0, -1):
                other = self._draw(last + 1)
                found[last], found[other] = found[other], found[last]
        return tuple(found)

    def any(self) -> Upstream | None:
        """Return a random upstream that does not loop, whether it is down or not."""
        candidates = [upstream for upstream in self.upstreams if not self.health(upstream).looping]
        return candidates[self._draw(len(candidates))] if candidates else None


class ForwardedQuery:
    """The state machine of one query.

    Call `begin` first, then exactly one of `answered` and `failed` after each `QueryUpstream`. Any other decision is final.
    """

    def __init__(self, pool: UpstreamPool, transport: Transport) -> None:
        self._pool = pool
        self._transport: Transport = transport
        self._order: tuple[Upstream, ...] = ()
        self._next = 0
        self._deadline = 0.0
        self._last_attempt = False
        self._refused: set[Upstream] = set()
        self._current: QueryUpstream | None = None
        self._finished = False

    def begin(self, now: float) -> ForwardDecision:
        """Return the first decision."""
        pool = self._pool
        rejected = pool.acquire()
        if rejected is not None:
            self._finished = True
            return rejected
        self._order = pool.order()
        self._deadline = now + TOTAL_TIMEOUT
        return self._step(now, "" if self._order else "there is no upstream")

    def answered(self, rcode: int, truncated: bool, now: float) -> ForwardDecision:
        """Return the decision after a response."""
        sent = self._current
        if sent is None or self._finished:
            raise RuntimeError("a response was reported although no query is in flight")
        settings = self._pool.settings
        if truncated and sent.via == "udp" and settings.prefer_udp:
            return self._send(sent.upstream, "tcp", now)
        if rcode in settings.failover_on:
            self._refused.add(sent.upstream)
            if any(each not in self._refused and not self._pool.down(each) for each in self._order):
                return self._step(now, "")
        self._close()
        return NextForward() if rcode in settings.next_on else UseResponse()

    def failed(self, reason: str, now: float) -> ForwardDecision:
        """Return the decision after a failed attempt."""
        if self._current is None or self._finished:
            raise RuntimeError("a failure was reported although no query is in flight")
        if self._last_attempt:
            return self._give_up(reason)
        return self._step(now, reason)

    def _step(self, now: float, reason: str) -> ForwardDecision:
        """Query the next upstream that is not down."""
        pool, order = self._pool, self._order
        while self._next < _ROUNDS * len(order) and now < self._deadline:
            upstream = order[self._next % len(order)]
            self._next += 1
            if upstream not in self._refused and not pool.down(upstream):
                return self._send(upstream, self._via(upstream), now)
        if now < self._deadline and order and all(pool.down(upstream) for upstream in order):
            pool.broken += 1
            last_resort = None if pool.settings.fail_fast else pool.any()
            if last_resort is not None:
                self._last_attempt = True
                return self._send(last_resort, self._via(last_resort), now)
            reason = reason or "all upstreams are down"
        return self._give_up(reason)

    def _via(self, upstream: Upstream) -> Transport:
        if self._pool.settings.force_tcp or upstream.transport == "tls":
            return "tcp"
        return "udp" if self._pool.settings.prefer_udp else self._transport

    def _send(self, upstream: Upstream, via: Transport, now: float) -> QueryUpstream:
        self._current = QueryUpstream(upstream, via, min(now + READ_TIMEOUT, max(self._deadline, now)))
        return self._current

    def _give_up(self, reason: str) -> GiveUp:
        self._close()
        return GiveUp(wire.SERVFAIL, reason)

    def _close(self) -> None:
        self._finished = True
        self._pool.release()
