"""Which upstream is asked, when the next one is, and when it is given up (row S7). No clock, no chance, no sockets.

`Pool` knows the upstreams of one `forward` and how they are; `Ask` is one question's way through them. Whoever drives
them tells what happened and does what they say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from narthex.dns.corefile.settings import Forward, Upstream
from narthex.dns.interfaces import Transport
from narthex.dns.message import wire

READ_TIMEOUT = 2.0
"""Seconds that an upstream has for one answer."""
TOTAL_TIMEOUT = 5.0
"""Seconds for all attempts together."""
_ROUNDS = 2
"""How often one question comes to the same upstream, at most."""

Via = Literal["udp", "tcp"]


@dataclass(slots=True)
class Health:
    """How an upstream is."""

    fails: int = 0
    """Checks that failed in a row."""
    checking: bool = False
    looping: bool = False
    """Questions to it come back; it is not asked any more (row S11)."""


@dataclass(frozen=True, slots=True)
class Send:
    """Ask this upstream now, and report by `deadline`."""

    upstream: Upstream
    via: Via
    deadline: float


@dataclass(frozen=True, slots=True)
class Done:
    """The answer that was reported last is the answer."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The answer that was reported last is not it, if another `forward` comes after this one (option `next`)."""


@dataclass(frozen=True, slots=True)
class Fail:
    """There is no answer; the client gets this response code."""

    rcode: int
    reason: str


Verdict = Send | Done | Pass | Fail


class Pool:
    """The upstreams of one `forward`.

    `draw(n)` gives a random number below n.
    """

    def __init__(self, settings: Forward, upstreams: tuple[Upstream, ...], draw: Callable[[int], int]) -> None:
        self.settings = settings
        self._draw = draw
        self._turn = 0
        self._health: dict[Upstream, Health] = {}
        self.upstreams: tuple[Upstream, ...] = ()
        self.in_flight = 0
        self.rejected = 0
        """Questions beyond max_concurrent, since they were taken last."""
        self.broken = 0
        """Times that all upstreams were down, likewise."""
        self.replace(upstreams)

    def replace(self, upstreams: tuple[Upstream, ...]) -> None:
        """Take other upstreams; what is known of those that stay is kept."""
        self.upstreams = tuple(dict.fromkeys(upstreams))
        self._health = {upstream: self._health.get(upstream, Health()) for upstream in self.upstreams}

    def health(self, upstream: Upstream) -> Health:
        """How one is; a new, healthy one for those that are gone."""
        return self._health.get(upstream) or Health()

    def down(self, upstream: Upstream) -> bool:
        """Whether it is left alone for now."""
        health = self.health(upstream)
        return health.looping or 0 < self.settings.max_fails <= health.fails

    def failed(self, upstream: Upstream) -> bool:
        """An attempt failed. Whether checks of it must begin now; they end with `checked`."""
        health = self._health.get(upstream)
        if health is None or health.checking or not self.settings.max_fails:
            return False
        health.checking = True
        return True

    def checked(self, upstream: Upstream, well: bool) -> bool:
        """A check has an outcome. Whether another one must follow after `health_check.every` seconds."""
        health = self._health.get(upstream)
        if health is None:
            return False
        health.fails = 0 if well else health.fails + 1
        health.checking = not well
        return health.checking

    def loops(self, upstream: Upstream) -> bool:
        """Questions to this upstream come back. Whether that is news."""
        health = self._health.get(upstream)
        if health is None or health.looping:
            return False
        health.looping = True
        return True

    def take_rejected(self) -> int:
        """The number of questions beyond max_concurrent; it begins anew."""
        count, self.rejected = self.rejected, 0
        return count

    def take_broken(self) -> int:
        """How often all upstreams were down; it begins anew."""
        count, self.broken = self.broken, 0
        return count

    def order(self) -> tuple[Upstream, ...]:
        """The upstreams as one question goes through them."""
        found = list(self.upstreams)
        if self.settings.policy == "round_robin" and found:
            first = self._turn % len(found)
            self._turn += 1
            return tuple(found[first:] + found[:first])
        if self.settings.policy == "random":
            for last in range(len(found) - 1, 0, -1):
                other = self._draw(last + 1)
                found[last], found[other] = found[other], found[last]
        return tuple(found)

    def any(self) -> Upstream | None:
        """One of those that do not loop, whether it is down or not."""
        candidates = [upstream for upstream in self.upstreams if not self.health(upstream).looping]
        return candidates[self._draw(len(candidates))] if candidates else None


class Ask:
    """One question's way. First `begin`, then after each Send exactly one of `answered` and `failed`, until the verdict
    is no Send; then it is over."""

    def __init__(self, pool: Pool, transport: Transport) -> None:
        self._pool = pool
        self._transport: Via = transport
        self._order: tuple[Upstream, ...] = ()
        self._next = 0
        self._ends = 0.0
        self._last_chance = False
        self._refused: set[Upstream] = set()
        self._current: Send | None = None
        self._over = False

    def begin(self, now: float) -> Verdict:
        """What to do first."""
        pool = self._pool
        if pool.settings.max_concurrent and pool.in_flight >= pool.settings.max_concurrent:
            pool.rejected += 1
            self._over = True
            return Fail(wire.REFUSED, f"{pool.in_flight} questions are on their way already (max_concurrent)")
        pool.in_flight += 1
        self._order = pool.order()
        self._ends = now + TOTAL_TIMEOUT
        return self._step(now, "" if self._order else "there is no upstream")

    def answered(self, rcode: int, truncated: bool, now: float) -> Verdict:
        """An answer came that belongs to the question."""
        sent = self._current
        if sent is None or self._over:
            raise RuntimeError("an answer was reported that nobody waits for")
        settings = self._pool.settings
        if truncated and sent.via == "udp" and settings.prefer_udp:
            return self._send(sent.upstream, "tcp", now)
        if rcode in settings.failover_on:
            self._refused.add(sent.upstream)
            if any(each not in self._refused and not self._pool.down(each) for each in self._order):
                return self._step(now, "")
        self._close()
        return Pass() if rcode in settings.next_on else Done()

    def failed(self, reason: str, now: float) -> Verdict:
        """No answer came, by then or at all."""
        if self._current is None or self._over:
            raise RuntimeError("a failure was reported that nobody waits for")
        if self._last_chance:
            return self._give_up(reason)
        return self._step(now, reason)

    def _step(self, now: float, reason: str) -> Verdict:
        """The next upstream that is not down."""
        pool, order = self._pool, self._order
        while self._next < _ROUNDS * len(order) and now < self._ends:
            upstream = order[self._next % len(order)]
            self._next += 1
            if upstream not in self._refused and not pool.down(upstream):
                return self._send(upstream, self._via(upstream), now)
        if now < self._ends and order and all(pool.down(upstream) for upstream in order):
            pool.broken += 1
            upstream_left = None if pool.settings.fail_fast else pool.any()
            if upstream_left is not None:
                self._last_chance = True
                return self._send(upstream_left, self._via(upstream_left), now)
            reason = reason or "all upstreams are down"
        return self._give_up(reason)

    def _via(self, upstream: Upstream) -> Via:
        if self._pool.settings.force_tcp or upstream.transport == "tls":
            return "tcp"
        return "udp" if self._pool.settings.prefer_udp else self._transport

    def _send(self, upstream: Upstream, via: Via, now: float) -> Send:
        self._current = Send(upstream, via, min(now + READ_TIMEOUT, max(self._ends, now)))
        return self._current

    def _give_up(self, reason: str) -> Fail:
        self._close()
        return Fail(wire.SERVFAIL, reason)

    def _close(self) -> None:
        self._over = True
        self._pool.in_flight -= 1
