"""The plugin chain of a server block for names that no zone of the cluster has: loop, hosts, cache, and forward.

It runs within one worker. `PluginChain.resolve` is the entry; `_resolve_cached` decides between the cache and `_forward`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

from narthex.dns.corefile.settings import DEFAULT_PORT, ErrorsSettings, ForwardSettings, ServerBlock, Upstream
from narthex.dns.message import names, wire
from narthex.dns.message.query import DnsClient, Query, upstream_query
from narthex.dns.message.response import Shuffle, UpstreamResponse, local_response
from narthex.dns.plugins import Reply
from narthex.dns.plugins import loop as loop_plugin
from narthex.dns.plugins.cache import CACHE_HALVES, CacheCounters, CacheHalf, ResponseCache, cache_key
from narthex.dns.plugins.errors import ErrorLog
from narthex.dns.plugins.hosts import HostsPlugin
from narthex.dns.server.counters import CacheCounts, ResolverCounts, UpstreamCounter, UpstreamCounts
from narthex.dns.server.event_loop import RESOLV_CONF_INTERVAL, EventLoop, EventTimer, FollowedFile
from narthex.dns.server.queries_in_flight import Forwarder, ForwardOutcome, tls_context
from narthex.dns.server.resolv_conf import upstreams_of_file
from narthex.model.lines import without_long_lines_of
from narthex.runtime.logs import LimitedLog

Warn = Callable[[str], None]
_ERROR_LINES, _ERROR_SECONDS = 100, 60.0
"""Lines of `errors` in a period: any client can make queries fail, as many and as long as it likes."""


def tls_file_error(block: ServerBlock) -> str | None:
    """Return why the TLS files of a server block cannot be used, or None."""
    for forward in block.forwards:
        if not any(isinstance(each, Upstream) and each.transport == "tls" for each in forward.to):
            continue
        try:
            tls_context(forward.tls)
        except OSError as error:
            return f"{block.where}: forward {forward.zone}: tls: {error.strerror or error}"
    if block.tls is not None and block.transport != "dns":
        try:
            # OpenSSL takes megabytes of each worker.
            from narthex.dns.server.tls import server_tls_context

            server_tls_context(block.tls)
        except OSError as error:
            return f"{block.where}: tls: {block.tls.certificate}, {block.tls.key}: {error.strerror or error}"
    return None


class PluginChain:
    """The `Resolver` of one server block."""

    def __init__(
        self,
        block: ServerBlock,
        loop: EventLoop,
        probes: loop_plugin.LoopProbeSecrets,
        ours: tuple[str, ...],
        warn: Warn,
        *,
        reports_files: bool = True,
    ) -> None:
        """Create the plugins. `ours` are the addresses on which this server listens.

        All workers follow the same files, so only the one with `reports_files` logs warnings about them. Raises OSError if
        TLS files cannot be used.
        """
        self._block = block
        self._loop = loop
        self._probes = probes
        # Servers of a resolv.conf are asked on port 53. On another port, this server is not among them.
        self._ours = ours if block.port == DEFAULT_PORT else ()
        self._warn = warn
        self._warn_of_files: Warn = warn if reports_files else lambda _: None
        self._counter = UpstreamCounter()
        self._cache = None if block.cache is None else ResponseCache(block.cache)
        self._hosts = None if block.hosts is None else HostsPlugin(block.hosts)
        self._errors = None if block.errors is None else self._error_log(block.errors)
        self._forwarders = [Forwarder(loop, each, _fixed(each), self._counter) for each in block.forwards]
        self._shuffle: Shuffle | None = None if block.loadbalance is None else random.Random().shuffle
        self._followed: list[FollowedFile] = []
        self._upstreams_of_files: list[dict[str, tuple[Upstream, ...]]] = [{} for _ in self._forwarders]
        """Upstreams by path, for each forward."""
        self._probe_timers: list[EventTimer] = []
        self._reported_entries: dict[CacheHalf, int] = {}
        """Entries of the cache at the last call of `take`."""
        self._opened = False
        self._closed = False

    def open(self) -> None:
        """Read and follow files, and start loop detection."""
        if self._hosts is not None:
            hosts = self._hosts
            settings = hosts.settings
            self._follow(settings.path, settings.reload, functools.partial(self._take_hosts, hosts))
        for number, forwarder in enumerate(self._forwarders):
            for path in dict.fromkeys(each for each in forwarder.settings.to if isinstance(each, str)):
                self._follow(path, RESOLV_CONF_INTERVAL, functools.partial(self._take_upstreams, number, path))
            self._probe_all(number, forwarder.pool.upstreams)
        self._opened = True

    def _take_hosts(self, hosts: HostsPlugin, text: str | None) -> None:
        short, message = without_long_lines_of(text or "")
        if message:
            self._warn_of_files(f"{hosts.settings.path}: {message}")
        hosts.load(short.splitlines())

    def close(self) -> None:
        """Stop everything; waiting clients get SERVFAIL."""
        self._closed = True
        for followed in self._followed:
            followed.close()
        for timer in self._probe_timers:
            timer.cancel()
        for forwarder in self._forwarders:
            forwarder.close()

    def resolve(self, query: Query, client: DnsClient, reply: Reply, now: float) -> None:
        """Answer a query, now or later; see `Resolver`."""
        if query.qtype in (wire.AXFR, wire.IXFR):
            reply(local_response(query, wire.REFUSED))
            return
        number = loop_plugin.probe_number(self._probes, query) if self._block.loop else None
        if number is not None:
            self._probe_received(number)
            reply(loop_plugin.probe_response(self._probes, query))
            return
        if self._hosts is not None:
            answer = self._hosts.answer(query)
            if answer is not None:
                reply(answer)
                return
        if self._cache is not None and self._cache.covers(query.name):
            self._resolve_cached(self._cache, query, client, reply, now)
            return

        def answer_client(outcome: ForwardOutcome) -> None:
            """Reply with the upstream's response, or with SERVFAIL and its reason."""
            response = outcome.response
            reply(
                self._failure(query, outcome) if response is None else response.for_client(query, None, self._shuffle)
            )

        self._forward(query, client, answer_client)

    def count_autopath(self) -> None:
        """Count a search list that led to an answer."""
        self._counter.counts.autopaths += 1

    def take(self) -> ResolverCounts:
        """Return the sums since the last call; of the cache's entries, the difference."""
        counts, self._counter.counts = self._counter.counts, UpstreamCounts()
        counts.rejects = sum(each.pool.take_rejected() for each in self._forwarders)
        counts.broken = sum(each.pool.take_broken() for each in self._forwarders)
        taken = ResolverCounts(upstreams=counts)
        if self._cache is not None:
            entries: dict[CacheHalf, int] = {half: self._cache.entries(half) for half in CACHE_HALVES}
            growth = {half: entries[half] - self._reported_entries.get(half, 0) for half in CACHE_HALVES}
            self._reported_entries = entries
            counters, self._cache.counters = self._cache.counters, CacheCounters()
            taken.cache = CacheCounts(counters=counters, entries=growth)
        if self._hosts is not None:
            taken.hosts = len(self._hosts)
        return taken

    def _resolve_cached(self, cache: ResponseCache, query: Query, client: DnsClient, reply: Reply, now: float) -> None:
        """Answer from the cache, from upstreams, or both: a prefetch, or a stale answer that is refreshed (RFC 8767)."""
        key = cache_key(query)
        hit = cache.find(key, now)
        waits = hit is None or (hit.stale and hit.refresh and cache.verifies)
        if hit is not None and not waits:
            reply(hit.for_client(query, self._shuffle))
            if not hit.refresh:
                return

        def store(outcome: ForwardOutcome) -> None:
            """Store the outcome; reply if the client still waits, with the stale entry if no upstream answered."""
            later = self._loop.now()
            if outcome.response is None:
                cache.failed(key, later)
                answer = self._failure(query, outcome)
            else:
                ttl = cache.store(key, outcome.response, later)
                answer = outcome.response.for_client(query, ttl, self._shuffle)
            if waits:
                reply(answer if hit is None or _replaces_stale(outcome) else hit.for_client(query, self._shuffle))

        self._forward(query, client, store)

    def _forward(
        self, query: Query, client: DnsClient, report: Callable[[ForwardOutcome], None], start: int = 0
    ) -> None:
        for number in range(start, len(self._forwarders)):
            forwarder = self._forwarders[number]
            if forwarder.takes(query.name):
                break
        else:
            report(ForwardOutcome(None, wire.REFUSED, "no forward takes this name"))
            return

        def finish(outcome: ForwardOutcome) -> None:
            """Report the outcome, or try the next forwarder that takes this name."""
            later = any(each.takes(query.name) for each in self._forwarders[number + 1 :])
            if outcome.try_next and later:
                self._forward(query, client, report, number + 1)
            else:
                report(outcome)

        forwarder.forward(upstream_query(query), client.transport, finish)

    def _failure(self, query: Query, outcome: ForwardOutcome) -> bytes:
        if self._errors is not None and outcome.rcode == wire.SERVFAIL and not outcome.repeated:
            self._errors.error(f"{names.text(query.name)} (type {query.qtype}): {outcome.reason}")
        return local_response(query, outcome.rcode)

    def _error_log(self, settings: ErrorsSettings) -> ErrorLog:
        limited = LimitedLog(self._warn, self._schedule, _ERROR_LINES, _ERROR_SECONDS)
        return ErrorLog(settings, self._schedule, limited.write)

    def _schedule(self, seconds: float, callback: Callable[[], None]) -> None:
        self._loop.at(self._loop.now() + seconds, callback)

    def _follow(self, path: str, interval: float, take: Callable[[str | None], None]) -> None:
        followed = FollowedFile(self._loop, path, interval, take, self._warn_of_files)
        self._followed.append(followed)
        followed.open()

    def _take_upstreams(self, number: int, path: str, text: str | None) -> None:
        """Use the upstreams of a resolv.conf that has been read. If it has vanished, its last upstreams stay."""
        known = self._upstreams_of_files[number]
        if text is None and path in known:
            return
        forwarder = self._forwarders[number]
        known[path] = upstreams_of_file(path, text, self._ours, self._warn_of_files)
        if not known[path]:
            self._warn_of_files(f"forward {forwarder.settings.zone}: {path} names no server that can be used")
        found = [
            each for one in forwarder.settings.to for each in (known.get(one, ()) if isinstance(one, str) else (one,))
        ]
        before = forwarder.pool.upstreams
        forwarder.pool.replace(tuple(found))
        if self._opened:
            self._probe_all(number, tuple(each for each in found if each not in before))

    def _probe_all(self, number: int, upstreams: tuple[Upstream, ...]) -> None:
        for upstream in upstreams if self._block.loop else ():
            self._probe(number, upstream, self._loop.now() + loop_plugin.PROBE_TIME)

    def _probe(self, number: int, upstream: Upstream, until: float) -> None:
        """Send a loop probe to one upstream, again until it answers at all."""
        current = self._forwarders[number].pool.upstreams
        if self._closed or upstream not in current:
            return
        probe_id = number * 100 + current.index(upstream)
        probe = loop_plugin.probe_query(self._probes, probe_id, self._probe_zone(number))
        if probe is None:
            return

        def report(outcome: UpstreamResponse | str) -> None:
            """Stop the server on a forwarding loop; repeat the probe until `until` if the upstream does not respond."""
            if isinstance(outcome, UpstreamResponse):
                if loop_plugin.is_own_response(self._probes, outcome):
                    self._stop_loop(self._forwarders[number], upstream)
            elif self._loop.now() < until:
                when = self._loop.now() + loop_plugin.PROBE_INTERVAL
                self._probe_timers.append(self._loop.at(when, lambda: self._probe(number, upstream, until)))

        self._forwarders[number].query_once(upstream, probe, report)

    def _probe_zone(self, number: int) -> bytes:
        """Return the narrower of the forward's and the server block's zone: looping queries must match both."""
        zone = names.wire(self._forwarders[number].settings.zone).lower()
        return max((zone, names.wire(self._block.zones[0]).lower()), key=len)

    def _probe_received(self, probe_id: int) -> None:
        number, index = divmod(probe_id, 100)
        if number < len(self._forwarders) and index < len(self._forwarders[number].pool.upstreams):
            forwarder = self._forwarders[number]
            self._stop_loop(forwarder, forwarder.pool.upstreams[index])

    def _stop_loop(self, forwarder: Forwarder, upstream: Upstream) -> None:
        if forwarder.pool.mark_looping(upstream):
            self._warn(loop_plugin.loop_warning(upstream, f"{self._block.zones[0]}:{self._block.port}"))


def _fixed(settings: ForwardSettings) -> tuple[Upstream, ...]:
    return tuple(each for each in settings.to if isinstance(each, Upstream))


def _replaces_stale(outcome: ForwardOutcome) -> bool:
    """Return True if an answer may replace a stale one (RFC 8767 section 4)."""
    return outcome.response is not None and outcome.rcode in (wire.NOERROR, wire.NXDOMAIN)
