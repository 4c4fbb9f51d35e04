"""An announcer's state as data for its status port, and as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from narthex.lb.heartbeat import PeerState
from narthex.lb.l2 import mac_text
from narthex.lb.program.announcing import AddressRecord, Announcer
from narthex.lb.why import (
    AnnouncerAddress,
    AnnouncerLink,
    AnnouncerPeer,
    AnnouncerRequest,
    AnnouncerRival,
    AnnouncerStatus,
)
from narthex.runtime.metrics import counter, gauge, untyped

if TYPE_CHECKING:
    from prometheus_client.core import Metric


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
