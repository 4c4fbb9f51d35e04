"""An announcer's state as data for its status port, and as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from narthex.lb.heartbeat import PeerState
from narthex.lb.l2 import mac_text
from narthex.lb.program.announcing import AddressRecord, Announcer

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def state(announcing: Announcer, now: float) -> dict[str, Any]:
    """Return the state as JSON data (docs/reference/announcer.md). `now` is the loop's clock."""
    membership = announcing.membership
    counts = membership.counts
    return {
        "node": announcing.node,
        "running": True,
        "listening": membership.listening(now),
        "standingBack": membership.standing_back(now),
        "leaving": membership.leaving,
        "links": [
            {"name": link.name, "mac": mac_text(link.mac), "linkLocal": link.link_local}
            for _, link in sorted(announcing.links.items())
        ],
        "peers": [
            {
                "node": peer.name,
                "address": peer.address,
                "state": peer.state.value,
                "heardSecondsAgo": _ago(now, peer.heard),
                "leaving": peer.leaving,
                "standingBack": peer.standing_back,
                "links": [link.name for link in peer.payload.links],
            }
            for _, peer in sorted(membership.peers.items())
        ],
        "addresses": [_address(announcing, address, now) for address in announcing.decisions],
        "failovers": announcing.failovers,
        "beats": {
            "received": counts.received,
            "wrongKey": counts.wrong_key,
            "garbled": counts.malformed,
            "replayed": counts.replayed,
            "strangers": counts.unknown_senders,
        },
    }


def _address(announcing: Announcer, address: str, now: float) -> dict[str, Any]:
    decision = announcing.decisions[address]
    held = announcing.holdings.held.get(address)
    record = announcing.records.get(address, AddressRecord())
    last_request = record.last_request
    return {
        "address": address,
        "services": [str(key) for key in decision.services],
        "pool": decision.pool,
        "turn": decision.holder,
        "holders": list(announcing.holders(address)),
        "answers": held is not None,
        "yielding": held is not None and held.yielding,
        "heldSeconds": _ago(now, held.since) if held else None,
        "links": list(announcing.links_of(address)),
        "requests": record.requests,
        "responses": record.answers,
        "gratuitous": record.gratuitous,
        "announcedSecondsAgo": _ago(now, record.announced_at),
        "lastRequest": {
            "sender": last_request.sender,
            "mac": last_request.mac,
            "link": last_request.link,
            "secondsAgo": _ago(now, last_request.at),
        }
        if last_request
        else None,
        "duplicates": record.duplicates,
        "foreign": [
            {
                "mac": each.mac,
                "node": each.node,
                "link": each.link,
                "times": each.times,
                "lastSecondsAgo": _ago(now, each.last),
            }
            for each in announcing.foreign_responders(address, now)
        ],
        "nodes": [{"node": each.node, "reason": each.reason.value, "text": each.text} for each in decision.verdicts],
        "notes": list(decision.notes),
    }


def _ago(now: float, then: float | None) -> float | None:
    return None if then is None or then == float("-inf") else round(now - then, 3)


def metrics(announcing: Announcer) -> Iterable[Metric]:
    """Yield the metrics. Where a MetalLB metric counts the same, its name is used (row A11)."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UnknownMetricFamily

    for name, text, number in (
        (
            "requests_received",
            "Requests received for addresses that this node answers for.",
            lambda each: each.requests,
        ),
        ("responses_sent", "Replies sent to them.", lambda each: each.answers),
        ("gratuitous_sent", "Gratuitous announcements sent.", lambda each: each.gratuitous),
    ):
        # MetalLB's counters lack the suffix `_total` that the library would add.
        family = UnknownMetricFamily(f"metallb_layer2_{name}", text, labels=["ip"])
        for address, record in sorted(announcing.records.items()):
            family.add_metric([address], number(record))  # type: ignore[no-untyped-call]
        yield family
    announced = GaugeMetricFamily(
        "metallb_speaker_announced",
        "1 if this node answers for the address.",
        labels=["service", "protocol", "node", "ip"],
    )
    for address in announcing.holdings.held:
        decision = announcing.decisions.get(address)
        for key in decision.services if decision else ():
            announced.add_metric([str(key), "layer2", announcing.node, address], 1)
    yield announced
    states = Counter(peer.state for peer in announcing.membership.peers.values())
    peers = GaugeMetricFamily("narthex_announcer_peers", "Peer nodes by state.", labels=["state"])
    for each in PeerState:
        peers.add_metric([each.value], states[each])
    yield peers
    yield CounterMetricFamily(
        "narthex_announcer_failovers", "Addresses taken over from lost nodes.", value=announcing.failovers
    )
    for name, text, number in (
        (
            "foreign_answers",
            "Claims to our addresses by hosts that are not announcers.",
            lambda each: each.foreign_seen,
        ),
        ("duplicates", "Times that another announcer answered as well.", lambda each: each.duplicates),
    ):
        counter = CounterMetricFamily(f"narthex_announcer_{name}", text, labels=["ip"])
        for address, record in sorted(announcing.records.items()):
            counter.add_metric([address], number(record))
        yield counter
    counts = announcing.membership.counts
    refused = CounterMetricFamily(
        "narthex_announcer_beats_refused", "Heartbeats that were rejected.", labels=["reason"]
    )
    for reason, number_ in (
        ("wrong_key", counts.wrong_key),
        ("garbled", counts.malformed),
        ("replayed", counts.replayed),
        ("stranger", counts.unknown_senders),
    ):
        refused.add_metric([reason], number_)
    yield refused
    yield GaugeMetricFamily(
        "narthex_announcer_links", "Links that this announcer answers on.", value=len(announcing.links)
    )
