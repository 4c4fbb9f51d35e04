"""Drives one `forward` of a server block: `dns/plugins/forward.py` decides, `exchange.py` asks, this has them meet.

Equal questions on their way at one time go out once. After an error an upstream is checked until it answers again.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable

from narthex.dns.corefile.settings import Forward, Tls, Upstream
from narthex.dns.corefile.values import RCODES
from narthex.dns.interfaces import Loop, Transport
from narthex.dns.message import names
from narthex.dns.message import question as questions
from narthex.dns.message.question import Question
from narthex.dns.message.response import Answer
from narthex.dns.plugins.forward import Ask, Done, Fail, Pass, Pool, Send, Verdict
from narthex.dns.server.exchange import BARE, Exchange, Outcome
from narthex.dns.server.meter import Meter

CHECK_TIMEOUT = 1.0
"""Seconds that an upstream has for the answer to a check."""


class Forwarded:
    """How a question ended: an answer, or a response code and why; and whether a next `forward` is to be asked."""

    __slots__ = ("answer", "goes_on", "rcode", "reason")

    def __init__(self, answer: Answer | None, rcode: int, reason: str = "", goes_on: bool = False) -> None:
        self.answer = answer
        self.rcode = rcode
        self.reason = reason
        self.goes_on = goes_on


Tell = Callable[[Forwarded], None]
Key = tuple[Question, Transport]


class Forwarder:
    """One `forward`, for one worker."""

    def __init__(self, loop: Loop, settings: Forward, upstreams: tuple[Upstream, ...], meter: Meter) -> None:
        """Raises OSError (ssl.SSLError among them) when the files of its TLS settings cannot be used."""
        self.settings = settings
        self.pool = Pool(settings, upstreams, secrets.randbelow)
        self._zone = names.wire(settings.zone).lower()
        self._excluded = tuple(names.wire(zone).lower() for zone in settings.excluded)
        self._loop = loop
        self._meter = meter
        tls = context(settings.tls) if any(each.transport == "tls" for each in upstreams) else None
        self._exchange = Exchange(loop, meter, settings.expire, tls, settings.tls.server_name)
        self._check = questions.check(names.wire(settings.health_check.domain).lower(), settings.health_check.recursion)
        self._waiting: dict[Key, list[Tell]] = {}
        self._closed = False

    def takes(self, name: bytes) -> bool:
        """Whether a name (lower case) is this one's to forward."""
        if not names.within(name, self._zone):
            return False
        return name == self._zone or not any(names.within(name, zone) for zone in self._excluded)

    def ask(self, question: Question, transport: Transport, tell: Tell) -> None:
        """Ask, and tell once; maybe before this returns."""
        key = question, transport
        waiting = self._waiting.get(key)
        if waiting is not None:
            self._meter.coalesced()
            waiting.append(tell)
            return
        self._waiting[key] = [tell]
        _Way(self, key).begin()

    def probe(self, upstream: Upstream, question: Question, tell: Callable[[Outcome], None]) -> None:
        """Ask one upstream a question of our own, whatever its health."""
        via = "tcp" if self.settings.force_tcp or upstream.transport == "tls" else "udp"
        self._exchange.ask(upstream, "tcp" if via == "tcp" else "udp", question, self._loop.now() + CHECK_TIMEOUT, tell)

    def replace(self, upstreams: tuple[Upstream, ...]) -> None:
        """From now on, ask these."""
        self.pool.replace(upstreams)

    def close(self) -> None:
        """Give everything up; who waits gets SERVFAIL."""
        self._closed = True
        self._exchange.close()
        for key in list(self._waiting):
            self.over(key, Forwarded(None, 2, "the server ends"))

    def exchange(self, send: Send, question: Question, report: Callable[[Outcome], None]) -> None:
        """One attempt."""
        started = self._loop.now()

        def told(outcome: Outcome) -> None:
            if isinstance(outcome, Answer):
                code = RCODES[outcome.rcode] if outcome.rcode < len(RCODES) else str(outcome.rcode)
                self._meter.duration(str(send.upstream), code, max(0.0, self._loop.now() - started))
            elif outcome != BARE and self.pool.failed(send.upstream):
                self._checks(send.upstream)
            report(outcome)

        self._exchange.ask(send.upstream, send.via, question, send.deadline, told)

    def now(self) -> float:
        """The loop's clock."""
        return self._loop.now()

    def over(self, key: Key, how: Forwarded) -> None:
        """Tell all who wait for this question."""
        for tell in self._waiting.pop(key, ()):
            tell(how)

    def _checks(self, upstream: Upstream) -> None:
        if self._closed:
            return

        def told(outcome: Outcome) -> None:
            well = isinstance(outcome, Answer) or outcome == BARE
            if not well:
                self._meter.failed_check(str(upstream))
            if self.pool.checked(upstream, well):
                self._loop.at(self._loop.now() + self.settings.health_check.every, lambda: self._checks(upstream))

        self.probe(upstream, self._check, told)


class _Way:
    """One question on its way."""

    def __init__(self, forwarder: Forwarder, key: Key) -> None:
        self._forwarder = forwarder
        self._key = key
        self._ask = Ask(forwarder.pool, key[1])
        self._answer: Answer | None = None

    def begin(self) -> None:
        self._do(self._ask.begin(self._forwarder.now()))

    def _do(self, verdict: Verdict) -> None:
        match verdict:
            case Send():
                self._forwarder.exchange(verdict, self._key[0], self._report)
            case Done() | Pass():
                assert self._answer is not None
                goes_on = isinstance(verdict, Pass)
                self._forwarder.over(self._key, Forwarded(self._answer, self._answer.rcode, goes_on=goes_on))
            case Fail():
                self._forwarder.over(self._key, Forwarded(None, verdict.rcode, verdict.reason))

    def _report(self, outcome: Outcome) -> None:
        now = self._forwarder.now()
        if isinstance(outcome, Answer):
            self._answer = outcome
            self._do(self._ask.answered(outcome.rcode, outcome.truncated, now))
        else:
            self._do(self._ask.failed(outcome, now))


def context(tls: Tls) -> ssl.SSLContext:
    """TLS as a client. Raises OSError when a file cannot be read or holds nothing usable."""
    made = ssl.create_default_context(cafile=tls.authority or None)
    if tls.certificate:
        made.load_cert_chain(tls.certificate, tls.key)
    return made
