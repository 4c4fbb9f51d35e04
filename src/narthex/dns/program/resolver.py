"""What answers the names that no zone of the cluster has: hosts, cache and forward of one server block, in one worker."""

from __future__ import annotations

import functools
import random
import secrets
from collections.abc import Callable

from narthex.dns.corefile.settings import DEFAULT_PORT, Forward, ServerBlock, Upstream
from narthex.dns.interfaces import Client, Loop, Query, Reply, Timer
from narthex.dns.message import names, question, wire
from narthex.dns.message.response import Answer, Shuffle, made
from narthex.dns.plugins import loop as loops
from narthex.dns.plugins.cache import HALVES, Cache, Counters, Half, key
from narthex.dns.plugins.hosts_file import Hosts
from narthex.dns.program.error_log import ErrorLog
from narthex.dns.server.files import LOOK, Followed, servers
from narthex.dns.server.meter import CacheCounts, Meter, MeterCounts, ResolverCounts
from narthex.dns.server.upstream import Forwarded, Forwarder, context

Say = Callable[[str], None]


def shared_secrets() -> loops.Secrets:
    """For all workers of one process, drawn once."""
    return loops.Secrets(secrets.token_hex(16), secrets.token_hex(16))


def trouble(block: ServerBlock) -> str | None:
    """Why a server block cannot be served, as far as its text does not tell: files of TLS settings. None: it can."""
    for forward in block.forwards:
        if not any(isinstance(each, Upstream) and each.transport == "tls" for each in forward.to):
            continue
        try:
            context(forward.tls)
        except OSError as error:
            return f"{block.where}: forward {forward.zone}: tls: {error.strerror or error}"
    return None


class BlockResolver:
    """The `Resolver` of one server block."""

    def __init__(
        self,
        block: ServerBlock,
        loop: Loop,
        probes: loops.Secrets,
        ours: tuple[str, ...],
        say: Say,
        *,
        tells_of_files: bool = True,
    ) -> None:
        """`ours`: addresses where this server listens. `say` writes a warning; of files, which all workers read alike, it
        is one worker's to tell. Raises OSError as `trouble` says."""
        self._block = block
        self._loop = loop
        self._probes = probes
        # A resolv.conf knows no ports: what it names is asked at 53, and elsewhere on this machine that is somebody else.
        self._ours = ours if block.port == DEFAULT_PORT else ()
        self._say = say
        self._say_of_files: Say = say if tells_of_files else _nothing
        self._meter = Meter()
        self._cache = None if block.cache is None else Cache(block.cache)
        self._hosts = None if block.hosts is None else Hosts(block.hosts)
        self._errors = None if block.errors is None else ErrorLog(block.errors, loop, say)
        self._forwarders = [Forwarder(loop, each, _fixed(each), self._meter) for each in block.forwards]
        self._shuffle: Shuffle | None = None if block.loadbalance is None else random.Random().shuffle
        self._followed: list[Followed] = []
        self._read_servers: list[dict[str, tuple[Upstream, ...]]] = [{} for _ in self._forwarders]
        """Servers of each forward's files, by path."""
        self._probing: list[Timer] = []
        self._held: dict[Half, int] = {}
        """Entries of the cache when `take` was called last."""
        self._opened = False
        self._closed = False

    def open(self) -> None:
        """Read the files it follows, and look for loops."""
        if self._hosts is not None:
            hosts = self._hosts
            settings = hosts.settings
            self._follow(settings.path, settings.reload, lambda text: hosts.load((text or "").splitlines()))
        for number, forwarder in enumerate(self._forwarders):
            for path in dict.fromkeys(each for each in forwarder.settings.to if isinstance(each, str)):
                self._follow(path, LOOK, functools.partial(self._take_servers, number, path))
            self._probe_all(number, forwarder.pool.upstreams)
        self._opened = True

    def close(self) -> None:
        """Give everything up; who waits gets SERVFAIL."""
        self._closed = True
        for followed in self._followed:
            followed.close()
        for timer in self._probing:
            timer.cancel()
        for forwarder in self._forwarders:
            forwarder.close()

    def ask(self, query: Query, client: Client, reply: Reply, now: float) -> None:
        """Answer a question, now or later; see `seam.Resolver`."""
        if query.qtype in (wire.AXFR, wire.IXFR):
            reply(made(query, wire.REFUSED))
            return
        number = loops.seen(self._probes, query) if self._block.loop else None
        if number is not None:
            self._came_back(number)
            reply(loops.reply(self._probes, query))
            return
        if self._hosts is not None:
            answer = self._hosts.answer(query)
            if answer is not None:
                reply(answer)
                return
        if self._cache is not None and self._cache.covers(query.name):
            self._ask_cached(self._cache, query, client, reply, now)
            return

        def give(how: Forwarded) -> None:
            reply(self._failure(query, how) if how.answer is None else how.answer.to(query, None, self._shuffle))

        self._forward(query, client, give)

    def walked(self) -> None:
        """Count a search list that led to an answer: the cluster's names are asked elsewhere, and counted here."""
        self._meter.counts.autopaths += 1

    def take(self) -> ResolverCounts:
        """What has happened, and by how much what is held has grown, since this was called last."""
        meter, self._meter.counts = self._meter.counts, MeterCounts()
        meter.rejects = sum(each.pool.take_rejected() for each in self._forwarders)
        meter.broken = sum(each.pool.take_broken() for each in self._forwarders)
        taken = ResolverCounts(meter=meter)
        if self._cache is not None:
            held: dict[Half, int] = {half: self._cache.entries(half) for half in HALVES}
            grown = {half: held[half] - self._held.get(half, 0) for half in HALVES}
            self._held = held
            counters, self._cache.counters = self._cache.counters, Counters()
            taken.cache = CacheCounts(counters=counters, entries=grown)
        if self._hosts is not None:
            taken.hosts = len(self._hosts)
        return taken

    def _ask_cached(self, cache: Cache, query: Query, client: Client, reply: Reply, now: float) -> None:
        wanted = key(query)
        found = cache.find(wanted, now)
        waits = found is None or (found.stale and found.refresh and cache.verifies)
        if found is not None and not waits:
            reply(found.to(query, self._shuffle))
            if not found.refresh:
                return

        def take(how: Forwarded) -> None:
            later = self._loop.now()
            if how.answer is None:
                cache.failed(wanted, later)
                answer = self._failure(query, how)
            else:
                answer = how.answer.to(query, cache.keep(wanted, how.answer, later), self._shuffle)
            if waits:
                reply(answer if found is None or _settles(how) else found.to(query, self._shuffle))

        self._forward(query, client, take)

    def _forward(self, query: Query, client: Client, take: Callable[[Forwarded], None], start: int = 0) -> None:
        for number in range(start, len(self._forwarders)):
            forwarder = self._forwarders[number]
            if forwarder.takes(query.name):
                break
        else:
            take(Forwarded(None, wire.REFUSED, "no forward takes this name"))
            return

        def tell(how: Forwarded) -> None:
            later = any(each.takes(query.name) for each in self._forwarders[number + 1 :])
            if how.goes_on and later:
                self._forward(query, client, take, number + 1)
            else:
                take(how)

        forwarder.ask(question.of(query), client.transport, tell)

    def _failure(self, query: Query, how: Forwarded) -> bytes:
        if self._errors is not None and how.rcode == wire.SERVFAIL:
            self._errors.note(f"{names.text(query.name)} (type {query.qtype}): {how.reason}")
        return made(query, how.rcode)

    def _follow(self, path: str, every: float, take: Callable[[str | None], None]) -> None:
        followed = Followed(self._loop, path, every, take, self._say_of_files)
        self._followed.append(followed)
        followed.open()

    def _take_servers(self, number: int, path: str, text: str | None) -> None:
        """A resolv.conf has been read. Those known before stay when it is gone."""
        known = self._read_servers[number]
        if text is None and path in known:
            return
        known[path] = servers(path, text, self._ours, self._say_of_files)
        if not known[path]:
            self._say_of_files(
                f"forward {self._forwarders[number].settings.zone}: {path} names no server that can be asked"
            )
        to = self._forwarders[number].settings.to
        found = [each for one in to for each in (known.get(one, ()) if isinstance(one, str) else (one,))]
        before = self._forwarders[number].pool.upstreams
        self._forwarders[number].replace(tuple(found))
        if self._opened:
            self._probe_all(number, tuple(each for each in found if each not in before))

    def _probe_all(self, number: int, upstreams: tuple[Upstream, ...]) -> None:
        for upstream in upstreams if self._block.loop else ():
            self._probe(number, upstream, self._loop.now() + loops.PROBE_TIME)

    def _probe(self, number: int, upstream: Upstream, until: float) -> None:
        """Ask one upstream for what only a loop can answer, until it says anything at all."""
        current = self._forwarders[number].pool.upstreams
        if self._closed or upstream not in current:
            return
        asked = loops.question(self._probes, number * 100 + current.index(upstream), self._probe_zone(number))
        if asked is None:
            return

        def told(outcome: Answer | str) -> None:
            if isinstance(outcome, Answer):
                if loops.came_back(self._probes, outcome):
                    self._loops(self._forwarders[number], upstream)
            elif self._loop.now() < until:
                when = self._loop.now() + loops.PROBE_INTERVAL
                self._probing.append(self._loop.at(when, lambda: self._probe(number, upstream, until)))

        self._forwarders[number].probe(upstream, asked, told)

    def _probe_zone(self, number: int) -> bytes:
        """The narrower one of where questions come from and where they go: what comes back must come in here."""
        zone = names.wire(self._forwarders[number].settings.zone).lower()
        return max((zone, names.wire(self._block.zones[0]).lower()), key=len)

    def _came_back(self, number: int) -> None:
        which, place = divmod(number, 100)
        if which < len(self._forwarders) and place < len(self._forwarders[which].pool.upstreams):
            forwarder = self._forwarders[which]
            self._loops(forwarder, forwarder.pool.upstreams[place])

    def _loops(self, forwarder: Forwarder, upstream: Upstream) -> None:
        if forwarder.pool.loops(upstream):
            self._say(loops.message(upstream, f"{self._block.zones[0]}:{self._block.port}"))


def _nothing(_message: str) -> None:
    """Says nothing."""


def _fixed(settings: Forward) -> tuple[Upstream, ...]:
    return tuple(each for each in settings.to if isinstance(each, Upstream))


def _settles(how: Forwarded) -> bool:
    """Whether an answer may take a stale one's place (RFC 8767 4)."""
    return how.answer is not None and how.rcode in (wire.NOERROR, wire.NXDOMAIN)
