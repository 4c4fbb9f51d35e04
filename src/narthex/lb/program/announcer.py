"""The announcer as a part of a node: sockets, the loop around `Announcer`, status, and metrics.

Works in the network namespace of the thread that calls `run`.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from narthex.kube.resources import of_an_announcer
from narthex.kube.source import KubeSource, Origin
from narthex.lb.heartbeat import Membership, PeerState
from narthex.lb.kernel.heartbeats import HeartbeatSockets
from narthex.lb.kernel.packets import LinkChanges, RawLinkTransport
from narthex.lb.l2 import mac_text
from narthex.lb.program.announcing import AddressRecord, Announcer
from narthex.lb.program.files import HeartbeatKeyError, PoolsFile, read_keys
from narthex.lb.program.status_writes import ConditionWriter
from narthex.lb.why import (
    AnnouncerAddress,
    AnnouncerLink,
    AnnouncerPeer,
    AnnouncerRequest,
    AnnouncerRival,
    AnnouncerStatus,
)
from narthex.linux.clock import SystemClock
from narthex.runtime.configuration.values import AnnouncerConfiguration
from narthex.runtime.http import HttpResponse
from narthex.runtime.logs import LOGGER, ProblemLog
from narthex.runtime.metrics import counter, gauge, untyped
from narthex.runtime.process import StartError
from narthex.runtime.reconciler import EventFeed, Reconciler
from narthex.runtime.status import StatusPaths

if TYPE_CHECKING:
    from prometheus_client.core import Metric

if TYPE_CHECKING:
    from prometheus_client.core import Metric

RESCAN_SECONDS = 10.0
"""Interval at which links, pools, and keys are read again without a notification."""

_LINK_PAUSE = 0.1
"""Debounce delay: link changes come in bursts."""

_SAY_EVERY = 0.5
"""Seconds between two updates of Service conditions."""

LEAVE_SECONDS = 4.0
"""Time for other nodes to take over during shutdown."""

PATH = "/announcer"
_LATE = 3 * RESCAN_SECONDS
"""Seconds without an iteration after which the part is unhealthy."""


def origin_of(origin: Origin, *, pools: bool) -> Origin:
    """Return the source of an announcer's objects: the proxy's directory, or separate watches on the same API server.

    `pools` is True if the pools are custom resources.
    """
    if origin.access is None:
        return origin
    return origin._replace(source=KubeSource(origin.access, of_an_announcer(pools=pools)))


class AnnouncerPart:
    """One run of the announcer."""

    def __init__(
        self, node_name: str, configuration: AnnouncerConfiguration, origin: Origin, status: StatusPaths
    ) -> None:
        """Configure the announcer.

        `origin` has the objects, and the API server for conditions; `status` the ports that expose its state.
        """
        self._node = node_name
        self._configuration = configuration
        self._origin = origin
        self._status = status
        self._clock = SystemClock()
        self._reconciler = Reconciler(self._clock)
        self._lock = threading.Lock()
        self._loop: _AnnouncerLoop | None = None

    @property
    def healthy(self) -> bool:
        """True if the loop is running and the objects are synced."""
        loop = self._loop
        return loop is not None and loop.announcing.snapshot.synced and self._clock.now() - loop.turned < _LATE

    def stop(self) -> None:
        """End `run` after other nodes have taken over its addresses."""
        self._reconciler.stop()

    def state(self) -> dict[str, Any]:
        """Return the current state as data (`docs/reference/announcer.md`)."""
        with self._lock:
            if self._loop is None:
                return {"node": self._node, "running": False}
            state: dict[str, Any] = msgspec.to_builtins(status(self._loop.announcing, self._clock.now()))
        return state

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus-client."""
        with self._lock:
            return tuple(metrics(self._loop.announcing)) if self._loop is not None else ()

    def run(self) -> None:
        """Announce addresses until `stop`. Raises StartError."""
        with ExitStack() as stack:
            loop = _AnnouncerLoop(self._node, self._configuration, self._origin, self._clock, self._lock, stack)
            self._status.offer(PATH, lambda: HttpResponse(200, msgspec.json.encode(self.state()), "application/json"))
            stack.callback(self._status.withdraw, PATH)
            stack.enter_context(loop.feed.running(self._reconciler.wake))
            with self._lock:
                self._loop = loop
            stack.callback(self._forget)
            loop.run(self._reconciler)

    def _forget(self) -> None:
        with self._lock:
            self._loop = None


class _AnnouncerLoop:
    """The sockets and the event loop of one thread."""

    def __init__(
        self,
        node_name: str,
        configuration: AnnouncerConfiguration,
        origin: Origin,
        clock: SystemClock,
        lock: AbstractContextManager[object],
        stack: ExitStack,
    ) -> None:
        """Open the sockets, which `stack` closes. `lock` is held during each iteration. Raises StartError."""
        self._lock = lock
        self._clock = clock
        self._key_file = configuration.key_file
        self._key_fault = ""
        try:
            keys = read_keys(self._key_file)
            self._heartbeats = HeartbeatSockets(configuration.port)
            stack.callback(self._heartbeats.close)
            warn_once = lru_cache(maxsize=1000)(partial(LOGGER.warning, "announcer: %s"))
            self._transport = RawLinkTransport(configuration.exclude_interfaces, warn_once)
            stack.callback(self._transport.close)
            self._changes = LinkChanges()
            stack.callback(self._changes.close)
        except HeartbeatKeyError as error:
            raise StartError(str(error)) from error
        except OSError as error:
            why = f"the announcer cannot open its sockets: {error.strerror or error}"
            raise StartError(f"{why}; it needs root (CAP_NET_RAW), and its UDP port for itself") from error
        self.announcing = Announcer(
            node_name,
            Membership(node_name, int.from_bytes(os.urandom(8)) | 1, keys, clock.now()),
            self._transport,
            self._heartbeats.send,
            self._heartbeats.probe,
            ignore_exclude_label=configuration.ignore_exclude_label,
        )
        self.feed = EventFeed(origin.source)
        self._pools = PoolsFile(Path(configuration.pools_file)) if configuration.pools_file else None
        self._conditions = ConditionWriter(origin.access) if origin.access is not None else None
        if self._conditions is not None:
            stack.enter_context(self._conditions.running())
        self._look_at = 0.0
        """When to read links, pools, and keys again."""
        self._problems = ProblemLog()
        self._say_at = 0.0
        self.turned = clock.now()

    def run(self, reconciler: Reconciler) -> None:
        """Iterate until the reconciler stops, then until other nodes have taken over or LEAVE_SECONDS have passed."""
        self._watch()
        reconciler.run(self._turn)
        limit = self._clock.now() + LEAVE_SECONDS
        with self._lock:
            self.announcing.leave()
        if not self.announcing.finished:
            Reconciler(self._clock).run(
                lambda: min(self._turn(), limit - self._clock.now()),
                until=lambda: self.announcing.finished or self._clock.now() >= limit,
            )
        with self._lock:
            self.announcing.end(self._clock.now())

    def _turn(self) -> float:
        """Do everything that is due; return the seconds until the next iteration."""
        membership = self.announcing.membership
        now = self._clock.now()
        with self._lock:
            stood = membership.seconds_since_sent(now)
            self._take_in(now)
            if stood > membership.times.timeout and membership.taken_over(stood, now):
                self.announcing.resume_after_stall(now, stood)
            self.announcing.turn(now)
            self.announcing.answer(now)
            if self._conditions is not None and now >= self._say_at:
                self._say_at = now + _SAY_EVERY
                self._conditions.want(self.announcing.conditions(now), self.announcing.sharers().keys())
            self.turned = self._clock.now()
        return min(self.announcing.next_due(self.turned), self._look_at) - self.turned

    def _take_in(self, now: float) -> None:
        if self._changes.drain():
            self._look_at = min(self._look_at, now + _LINK_PAUSE)
        if now >= self._look_at:
            self._look_at = now + RESCAN_SECONDS
            self._look(now)
        self.announcing.apply_events(self.feed.take())
        self._problems.update(self.feed.problems)
        self.announcing.handle_heartbeats(list(self._heartbeats.received()), list(self._heartbeats.refusals()), now)

    def _look(self, now: float) -> None:
        if self.announcing.rescan_links(now):
            self._watch()
        if self._pools is not None:
            found = self._pools.current()
            self.announcing.use_pools(found.pools, found.advertisements)
        try:
            self.announcing.membership.keys = read_keys(self._key_file)
            self._key_fault = ""
        except HeartbeatKeyError as error:
            if str(error) != self._key_fault:
                self._key_fault = str(error)
                LOGGER.error("announcer: %s; the previous key stays in use", error)

    def _watch(self) -> None:
        self._clock.watch_files((self._changes.fileno(), *self._heartbeats.files, *self._transport.files))


def status(announcing: Announcer, now: float) -> AnnouncerStatus:
    """Return the state. `now` is the loop's clock."""
    membership = announcing.membership
    counts = membership.counts
    return AnnouncerStatus(
        node=announcing.node,
        listening=membership.listening(now),
        standing_back=membership.standing_back(now),
        leaving=membership.leaving,
        links=tuple(
            AnnouncerLink(name=link.name, mac=mac_text(link.mac), link_local=link.link_local)
            for _, link in sorted(announcing.links.items())
        ),
        peers=tuple(
            AnnouncerPeer(
                node=peer.name,
                address=peer.address,
                state=peer.state,
                heard_seconds_ago=_ago(now, peer.heard),
                leaving=peer.leaving,
                standing_back=peer.standing_back,
                links=tuple(link.name for link in peer.payload.links),
            )
            for _, peer in sorted(membership.peers.items())
        ),
        addresses=tuple(_address(announcing, address, now) for address in announcing.decisions),
        failovers=announcing.failovers,
        beats={  # codespell:ignore beats
            "received": counts.received,
            "wrongKey": counts.wrong_key,
            "garbled": counts.malformed,
            "replayed": counts.replayed,
            "strangers": counts.unknown_senders,
        },
    )


def _address(announcing: Announcer, address: str, now: float) -> AnnouncerAddress:
    decision = announcing.decisions[address]
    held = announcing.ownership.held.get(address)
    record = announcing.records.get(address, AddressRecord())
    last = record.last_request
    return AnnouncerAddress(
        address=address,
        services=tuple(map(str, decision.services)),
        pool=decision.pool,
        turn=decision.holder,
        holders=announcing.holders(address),
        answers=held is not None,
        yielding=held is not None and held.yielding,
        held_seconds=_ago(now, held.since) if held else None,
        links=announcing.links_of(address),
        requests=record.requests,
        responses=record.answers,
        gratuitous=record.gratuitous,
        announced_seconds_ago=_ago(now, record.announced_at),
        last_request=AnnouncerRequest(
            sender=last.sender, mac=last.mac, link=last.link, seconds_ago=round(now - last.at, 3)
        )
        if last
        else None,
        duplicates=record.duplicates,
        foreign=tuple(
            AnnouncerRival(
                mac=each.mac,
                node=each.node,
                link=each.link,
                times=each.times,
                last_seconds_ago=round(now - each.last, 3),
            )
            for each in announcing.foreign_responders(address, now)
        ),
        nodes=tuple({"node": each.node, "reason": each.reason.value, "text": each.text} for each in decision.verdicts),
        notes=decision.notes,
    )


def _ago(now: float, then: float | None) -> float | None:
    return None if then is None or then == float("-inf") else round(now - then, 3)


def metrics(announcing: Announcer) -> Iterable[Metric]:
    """Yield the metrics. Where a MetalLB metric counts the same, its name is used (row A11)."""
    records = sorted(announcing.records.items())

    def by_ip(number: Callable[[AddressRecord], int]) -> dict[str, float]:
        """Return a number of each announced address by that address."""
        return {address: number(record) for address, record in records}

    requests, replies = by_ip(lambda each: each.requests), by_ip(lambda each: each.answers)
    about = "Requests received for addresses that this node answers for."
    yield untyped("metallb_layer2_requests_received", about, requests, "ip")
    yield untyped("metallb_layer2_responses_sent", "Replies sent to them.", replies, "ip")
    gratuitous = by_ip(lambda each: each.gratuitous)
    yield untyped("metallb_layer2_gratuitous_sent", "Gratuitous announcements sent.", gratuitous, "ip")
    announced: dict[tuple[str, ...], float] = {}
    for address in announcing.ownership.held:
        decision = announcing.decisions.get(address)
        for key in decision.services if decision else ():
            announced[str(key), "layer2", announcing.node, address] = 1
    labels = ("service", "protocol", "node", "ip")
    yield gauge("metallb_speaker_announced", "1 if this node answers for the address.", announced, *labels)
    states = Counter(peer.state for peer in announcing.membership.peers.values())
    peers = {each.value: states[each] for each in PeerState}
    yield gauge("narthex_announcer_peers", "Peer nodes by state.", peers, "state")
    yield counter("narthex_announcer_failovers", "Addresses taken over from lost nodes.", announcing.failovers)
    about, foreign = "Claims to our addresses by hosts that are not announcers.", by_ip(lambda each: each.foreign_seen)
    yield counter("narthex_announcer_foreign_answers", about, foreign, "ip")
    duplicates = by_ip(lambda each: each.duplicates)
    yield counter("narthex_announcer_duplicates", "Times that another announcer answered as well.", duplicates, "ip")
    counts = announcing.membership.counts
    rejected = {
        "wrong_key": counts.wrong_key,
        "garbled": counts.malformed,
        "replayed": counts.replayed,
        "stranger": counts.unknown_senders,
    }
    name = "narthex_announcer_beats_refused"  # codespell:ignore beats
    yield counter(name, "Heartbeats that were rejected.", rejected, "reason")
    yield gauge("narthex_announcer_links", "Links that this announcer answers on.", len(announcing.links))
