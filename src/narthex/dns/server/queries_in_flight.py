"""Forwards queries to the upstreams of one `forward`: plugins/forward.py decides, upstream_exchange.py sends.

Of equal queries in flight only one is sent. After a failure, an upstream is checked until it answers again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from narthex.dns.corefile.settings import ForwardSettings, Upstream, UpstreamTlsSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import Transport, UpstreamQuery, health_check_query
from narthex.dns.message.response import UpstreamResponse
from narthex.dns.plugins.forward import (
    ForwardDecision,
    ForwardedQuery,
    GiveUp,
    NextForward,
    QueryUpstream,
    UpstreamPool,
    UseResponse,
)
from narthex.dns.server.counters import UpstreamCounter
from narthex.dns.server.event_loop import EventLoop
from narthex.dns.server.upstream_exchange import NOT_UNDERSTOOD, RANDOM, ExchangeOutcome, UpstreamExchange

if TYPE_CHECKING:
    import ssl

CHECK_TIMEOUT = 1.0
"""Seconds that an upstream has to answer a health check."""


class ForwardOutcome(msgspec.Struct, frozen=True):
    """A response, or the response code and reason of a failure; and whether the next `forward` is to be tried."""

    response: UpstreamResponse | None
    rcode: int
    reason: str = ""
    try_next: bool = False
    repeated: bool = False
    """True for a query that waited for an equal one, which has the same outcome."""


OutcomeCallback = Callable[[ForwardOutcome], None]
FlightKey = tuple[UpstreamQuery, Transport]


class Forwarder:
    """One `forward` of one worker."""

    def __init__(
        self, loop: EventLoop, settings: ForwardSettings, upstreams: tuple[Upstream, ...], counter: UpstreamCounter
    ) -> None:
        """Create the forwarder. Raises OSError (or ssl.SSLError, a subclass) if the TLS files cannot be used."""
        self.settings = settings
        self.pool = UpstreamPool(settings, upstreams, RANDOM.randrange)
        self._zone = names.wire(settings.zone).lower()
        self._excluded = names.lower_zones(settings.excluded)
        self._loop = loop
        self._counter = counter
        tls = tls_context(settings.tls) if any(each.transport == "tls" for each in upstreams) else None
        self._exchange = UpstreamExchange(loop, counter, settings.expire, tls, settings.tls.server_name)
        check = settings.health_check
        self._check_query = health_check_query(names.wire(check.domain).lower(), check.recursion)
        self._in_flight: dict[FlightKey, list[OutcomeCallback]] = {}
        self._closed = False

    def takes(self, name: bytes) -> bool:
        """Return True if a name (in lower case) is to be forwarded here."""
        if not names.within(name, self._zone):
            return False
        return name == self._zone or not names.within_any(name, self._excluded)

    def forward(self, query: UpstreamQuery, transport: Transport, report: OutcomeCallback) -> None:
        """Forward a query and call `report` once, possibly before this returns."""
        key = query, transport
        waiting = self._in_flight.get(key)
        if waiting is not None:
            rejected = self.pool.acquire()
            if rejected is not None:
                report(ForwardOutcome(None, rejected.rcode, rejected.reason))
                return
            self._counter.counts.coalesced += 1
            waiting.append(report)
            return
        self._in_flight[key] = [report]
        forwarded = ForwardedQuery(self.pool, transport)
        self._act(key, forwarded, None, forwarded.begin(self._loop.now()))

    def query_once(self, upstream: Upstream, query: UpstreamQuery, report: Callable[[ExchangeOutcome], None]) -> None:
        """Send a query of our own to one upstream, whatever its health."""
        via: Transport = "tcp" if self.settings.force_tcp or upstream.transport == "tls" else "udp"
        self._exchange.send(upstream, via, query, self._loop.now() + CHECK_TIMEOUT, report)

    def close(self) -> None:
        """Close all connections; waiting clients get SERVFAIL."""
        self._closed = True
        self._exchange.close()
        for key in list(self._in_flight):
            self._finish(key, ForwardOutcome(None, wire.SERVFAIL, "the server is shutting down"))

    def _act(
        self, key: FlightKey, forwarded: ForwardedQuery, response: UpstreamResponse | None, decision: ForwardDecision
    ) -> None:
        """Carry out a decision; `response` is the last one."""
        match decision:
            case QueryUpstream():
                self._attempt(key, forwarded, response, decision)
            case UseResponse() | NextForward():
                assert response is not None
                try_next = isinstance(decision, NextForward)
                self._finish(key, ForwardOutcome(response, response.rcode, try_next=try_next))
            case GiveUp():
                self._finish(key, ForwardOutcome(None, decision.rcode, decision.reason))

    def _attempt(
        self, key: FlightKey, forwarded: ForwardedQuery, response: UpstreamResponse | None, send: QueryUpstream
    ) -> None:
        """Send a query to one upstream, count the response, and start health checks after a failure."""
        started = self._loop.now()

        def report(outcome: ExchangeOutcome) -> None:
            """Measure the attempt, note a failure of the upstream, and begin what the forwarding logic decides next."""
            now = self._loop.now()
            if isinstance(outcome, UpstreamResponse):
                rcode = wire.RCODES[outcome.rcode] if outcome.rcode < len(wire.RCODES) else str(outcome.rcode)
                self._counter.duration(str(send.upstream), rcode, max(0.0, now - started))
                self._act(key, forwarded, outcome, forwarded.answered(outcome.rcode, outcome.truncated, now))
                return
            if outcome != NOT_UNDERSTOOD and self.pool.failed(send.upstream):
                self._check_health(send.upstream)
            self._act(key, forwarded, response, forwarded.failed(outcome, now))

        self._exchange.send(send.upstream, send.via, key[0], send.deadline, report)

    def _finish(self, key: FlightKey, outcome: ForwardOutcome) -> None:
        first, others = (waiting := self._in_flight.pop(key, []))[:1], waiting[1:]
        self.pool.release(len(others))
        for report in first:
            report(outcome)
        repeated = msgspec.structs.replace(outcome, repeated=True)
        for report in others:
            report(repeated)

    def _check_health(self, upstream: Upstream) -> None:
        if self._closed:
            return

        def report(outcome: ExchangeOutcome) -> None:
            """Note the result of a health check and schedule the next one until the upstream is healthy."""
            healthy = isinstance(outcome, UpstreamResponse) or outcome == NOT_UNDERSTOOD
            if not healthy:
                self._counter.failed_check(str(upstream))
            if self.pool.checked(upstream, healthy):
                when = self._loop.now() + self.settings.health_check.interval
                self._loop.at(when, lambda: self._check_health(upstream))

        self.query_once(upstream, self._check_query, report)


def tls_context(tls: UpstreamTlsSettings) -> ssl.SSLContext:
    """Return the TLS settings of a client. Raises OSError if a file cannot be read or has invalid content."""
    # Only upstreams over TLS need it, and OpenSSL takes five megabytes of a worker.
    import ssl

    context = ssl.create_default_context(cafile=tls.authority or None)
    if tls.certificate:
        context.load_cert_chain(tls.certificate, tls.key)
    return context
