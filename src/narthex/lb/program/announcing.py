"""The announcer without I/O: objects and heartbeats in, elections and frames out.

    heartbeats ─> Membership ─┐
    objects ────> Store ──────┼─> AddressElector ─> AddressOwnership ─> replies, announcements, probes
    links ──────> Transport ──┘

`Announcer` never blocks and reads no clock; `program/announcer.py` runs it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
from immutables import Map

from narthex.lb import l2, why
from narthex.lb.election import AddressElection, AddressElector, ElectionInput, NodeAnnouncerState
from narthex.lb.handover import AddressOwnership, OwnershipChanges, PeerClaims
from narthex.lb.heartbeat import Datagram, HeartbeatPayload, Membership, PeerLink, PeerState, PortUnreachable
from narthex.lb.kernel.packets import HostLink, RawLinkTransport
from narthex.lb.schedule import AnnouncementSchedule
from narthex.lb.service_status import ServiceCondition
from narthex.linux.failpoints import (
    TAKEOVER_ANNOUNCED,
    TAKEOVER_LISTENING,
    TAKEOVER_OWNED,
    TAKEOVER_PUBLISHED,
    TAKEOVER_SENT,
    failpoint,
)
from narthex.model import Event, IPAddressPool, L2Advertisement, NamespacedName, Snapshot, Store
from narthex.runtime.logs import LOGGER

_DEFEND_SECONDS = 10.0
"""Minimum interval between announcements that defend an address against another host (RFC 5227 2.4)."""
_LOG_AGAIN_SECONDS = 60.0
_MAX_FOREIGN = 16
_FORGET_SECONDS = 300.0
_CLAIM_DELAY_SECONDS = 0.5
_MAX_PENDING_CLAIMS = 200


class Announcer:
    """One announcer. Owned by one thread; other threads read it under the lock of the loop."""

    def __init__(
        self,
        node: str,
        membership: Membership,
        transport: RawLinkTransport,
        send: Callable[[str, bytes], object],
        probe: Callable[[str], object] = lambda _: None,
        *,
        ignore_exclude_label: bool = False,
    ) -> None:
        """Set up the announcer; `send` sends a heartbeat to an address, and `probe` asks whether its kernel answers."""
        self.node = node
        self.membership = membership
        self.ownership = AddressOwnership(node)
        self.decisions: Mapping[str, AddressElection] = {}
        self.records: dict[str, AddressRecord] = {}
        self.failovers = 0
        self._transport = transport
        self._send = send
        self._send_probe = probe
        self._ignore_exclude_label = ignore_exclude_label
        self._store = Store()
        self._decider = AddressElector()
        self._repeats = AnnouncementSchedule()
        self._logged: dict[str, float] = {}
        self._refused = Counter[str]()
        self._had_links = True
        self._changes = 0
        self._elected_from: tuple[object, ...] = ()
        self._pending_claims: deque[tuple[float, HostLink, l2.NeighborMessage]] = deque()
        """Claims by known nodes, and when to process them."""
        self._given: tuple[IPAddressPool | L2Advertisement, ...] | None = None
        self._pools: tuple[Map[NamespacedName, IPAddressPool], Map[NamespacedName, L2Advertisement]] | None = None
        self._heard: tuple[frozenset[str], dict[str, frozenset[str]]] | None = None

    @property
    def snapshot(self) -> Snapshot:
        """The current objects, with the pools of the file if there is one."""
        snapshot = self._store.snapshot
        if self._pools is None:
            return snapshot
        pools, advertisements = self._pools
        return msgspec.structs.replace(snapshot, address_pools=pools, l2_advertisements=advertisements)

    @property
    def links(self) -> Mapping[str, HostLink]:
        """Links that can be answered on now."""
        return self._transport.links

    def apply_events(self, events: Sequence[Event]) -> None:
        """Apply object changes."""
        before = self._store.snapshot
        for event in events:
            self._store.apply(event)
        snapshot = self._store.snapshot
        self._changes += snapshot is not before
        if snapshot.nodes is not before.nodes:
            addresses = {
                key.name: (*node.internal_ips, *node.external_ips, "")[0] for key, node in snapshot.nodes.items()
            }
            self.membership.set_nodes(addresses)

    def use_pools(self, pools: Sequence[IPAddressPool], advertisements: Sequence[L2Advertisement]) -> None:
        """Use the pools of a file instead of those of the API."""
        if (*pools, *advertisements) != self._given:
            self._changes += 1
            self._given = (*pools, *advertisements)
            self._pools = Map((each.key, each) for each in pools), Map((each.key, each) for each in advertisements)

    def handle_heartbeats(self, datagrams: Sequence[bytes], refusals: Sequence[PortUnreachable], now: float) -> None:
        """Process received datagrams and ICMP errors."""
        before = self.membership.alive.keys()
        for data in datagrams:
            self._dispatch(self.membership.receive(data, now))
        for name in self.membership.alive.keys() - before:
            self._peer_appeared(name)
        for each in refusals:
            if each.probe:
                self.membership.answered(each.address, now)
            else:
                self.membership.refused(each.address, now)
        self._warn_about_rejected_heartbeats(now)

    def _peer_appeared(self, name: str) -> None:
        """Handle a peer that was not heard before: both nodes have answered for the addresses that both hold."""
        peer = self.membership.peers[name]
        both = (self.ownership.held.keys() - self.ownership.yielding) & (
            set(peer.payload.held) - set(peer.payload.yielding)
        )
        LOGGER.info("announcer: node %s is alive", name)
        self._duplicates((address, name) for address in sorted(both))

    def _duplicates(self, found: Iterable[tuple[str, str]]) -> None:
        for address, name in found:
            self.record(address).duplicates += 1
            LOGGER.warning("announcer: %s was also answered for by %s", address, name)

    def rescan_links(self, now: float) -> bool:
        """Read the links again; return True if they changed."""
        changed = self._transport.rescan()
        if changed:
            self._changes += 1
            names = ", ".join(f"{name} ({l2.mac_text(link.mac)})" for name, link in sorted(self.links.items()))
            LOGGER.info("announcer: answers on %s", names or "no link: no broadcast link is up")
            # No host on a new link has seen an announcement yet.
            self._repeats.begin(self.ownership.held, now)
            self.membership.publish(self._payload())
        if self.links and not self._had_links:
            self.membership.cut_off(now)
        self._had_links = bool(self.links)
        return changed

    def resume_after_stall(self, now: float, seconds: float) -> None:
        """Start over after a suspension during which other nodes have taken over; discard queued frames."""
        LOGGER.warning(
            "announcer: was suspended for %.1f s; it listens first, since other nodes have taken over", seconds
        )
        for _ in self._transport.frames():
            pass
        self._repeats.end(self.ownership.drop_all())
        self._elected_from = ()
        self.membership.publish(self._payload())
        self.membership.restart_listening(now)

    def turn(self, now: float) -> None:
        """Do everything that is due. All queued input must have been processed before."""
        lost = self.membership.tick(now)
        orphans = {address for name in lost for address in self.membership.peers[name].payload.held}
        for name in lost:
            peer = self.membership.peers[name]
            though = ", though its kernel answers" if max(peer.answered, peer.refused) > peer.heard else ""
            LOGGER.warning("announcer: node %s is lost: no heartbeat for %.2f s%s", name, now - peer.heard, though)
        if self._store.snapshot.synced and not self.membership.listening(now):
            inputs = self._inputs(now)
            if inputs != self._elected_from or now >= self.ownership.next_due():
                self._elect(now, orphans)
                self._elected_from = inputs
        self._dispatch(self.membership.due(now))
        for address in self.membership.probes(now):
            self._send_probe(address)
        for address in self._repeats.announcements(now):
            failpoint(TAKEOVER_SENT)
            self._announce(address, now)
            failpoint(TAKEOVER_ANNOUNCED)
        for address in self._repeats.probes(now):
            self._probe(address)

    def answer(self, now: float) -> None:
        """Read the queued frames and reply."""
        while self._pending_claims and self._pending_claims[0][0] <= now:
            _, link, message = self._pending_claims.popleft()
            self._handle_claim(link, message, now, delayed=True)
        for link, frame in self._transport.frames():
            for message in l2.read(frame):
                if message.kind is l2.NeighborMessageKind.ASKS:
                    self._answer_request(link, message, now)
                else:
                    self._handle_claim(link, message, now)

    def next_due(self, now: float) -> float:
        """Return when `turn` must be called even without input."""
        due = min(self.membership.next_due(), self.ownership.next_due(), self._repeats.next_due())
        if self._pending_claims:
            due = min(due, self._pending_claims[0][0])
        if self.membership.listening(now):
            due = min(due, now + self.membership.times.interval)
        if self.membership.standing_back(now):
            due = min(due, self.membership.stand_back_until)
        return due

    def leave(self) -> None:
        """Ask other nodes to take over; `finished` becomes True when they have."""
        self.membership.leave()

    @property
    def finished(self) -> bool:
        """True if this node answers for no address any more."""
        return not self.ownership.held

    def end(self, now: float) -> None:
        """Release all addresses and send the final heartbeats."""
        self._repeats.end(self.ownership.drop_all())
        self._dispatch(self.membership.farewell(now))

    def links_of(self, address: str) -> tuple[str, ...]:
        """Return the links on which an address is answered for."""
        decision = self.decisions.get(address)
        allowed = decision.interfaces if decision else None
        return tuple(name for name in sorted(self.links) if allowed is None or name in allowed)

    def holders(self, address: str) -> tuple[str, ...]:
        """Return the nodes that currently answer for an address; more than one only during a handover."""
        peers = self.membership.alive.items()
        found = [name for name, peer in peers if address in peer.payload.held and address not in peer.payload.yielding]
        held = self.ownership.held.get(address)
        return tuple(sorted([*found, self.node] if held is not None and not held.yielding else found))

    def conditions(self, now: float) -> dict[NamespacedName, ServiceCondition]:
        """Return the Service conditions that this node must write.

        These are the Services whose first address it answers for. The first live node also writes those of Services whose address
        no node can announce.
        """
        if self.membership.listening(now) or self.membership.leaving:
            return {}
        conditions = {}
        first_alive = self.node == min([self.node, *self.membership.alive])
        for key, addresses in self.sharers().items():
            decisions = [self.decisions[address] for address in addresses]
            holders = {address: self.holders(address) for address in addresses}
            first = holders[addresses[0]]
            no_holder = first_alive and not first and not decisions[0].holder
            if first[:1] == (self.node,) or no_holder:
                foreign = {
                    address: [each.mac for each in self.foreign_responders(address, now)] for address in addresses
                }
                conditions[key] = why.condition(decisions, holders, foreign)
        return conditions

    def announcers(self, now: float) -> dict[str, NodeAnnouncerState]:
        """Return the announcer state of all nodes."""
        gone = self.membership.lost(now)
        found = {
            name: NodeAnnouncerState(
                state=peer.state,
                leaving=peer.leaving,
                links=tuple(sorted(link.name for link in peer.payload.links))
                if peer.state is PeerState.ALIVE
                else None,
                standing_back=peer.standing_back,
                node_gone=name in gone,
            )
            for name, peer in self.membership.peers.items()
        }
        found[self.node] = NodeAnnouncerState(
            leaving=self.membership.leaving,
            links=tuple(sorted(self.links)),
            standing_back=self.membership.standing_back(now),
        )
        return found

    def _inputs(self, now: float) -> tuple[object, ...]:
        """Return a cheap fingerprint of the election input: `turn` runs for every heartbeat."""
        return (
            self._changes,
            self.membership.changes,
            self.membership.leaving,
            self.membership.standing_back(now),
            self.membership.lost(now),
        )

    def _elect(self, now: float, orphans: Collection[str]) -> None:
        view = ElectionInput(
            snapshot=self.snapshot, announcers=self.announcers(now), ignore_exclude_label=self._ignore_exclude_label
        )
        self.decisions = self._decider.elect(view)
        rivals = {
            name: PeerClaims(
                held=frozenset(peer.payload.held),
                yielding=frozenset(peer.payload.yielding),
                leaving=peer.leaving,
                standing_back=peer.standing_back,
            )
            for name, peer in self.membership.alive.items()
        }
        back = self.membership.standing_back(now)
        changes = self.ownership.update(self.decisions, rivals, now, standing_back=back)
        if changes:
            self._apply_changes(changes, orphans, now)
            self._passed_takeover(changes, TAKEOVER_OWNED)
        if changes.gained:
            self.membership.end_initial_stand_back()
        answered = {name: frozenset(a for a in self.ownership.held if name in self.links_of(a)) for name in self.links}
        heard = frozenset(self.decisions), answered
        if heard != self._heard:
            self._heard = heard
            self._transport.listen_for(*heard)
        self._passed_takeover(changes, TAKEOVER_LISTENING)
        self.membership.publish(self._payload())
        self._passed_takeover(changes, TAKEOVER_PUBLISHED)

    def _passed_takeover(self, changes: OwnershipChanges, point: str) -> None:
        if changes.gained:
            failpoint(point)

    def _apply_changes(self, changes: OwnershipChanges, orphans: Collection[str], now: float) -> None:
        for address in changes.gained:
            names = ", ".join(map(str, self.decisions[address].services))
            where = ", ".join(self.links_of(address)) or "no link"
            LOGGER.info("announcer: answers for %s (%s) on %s", address, names, where)
            self.failovers += address in orphans
        for address, reason in changes.lost:
            LOGGER.info("announcer: no longer answers for %s: %s", address, reason)
        self._duplicates(changes.duplicates)
        self._repeats.end(address for address, _ in changes.lost)
        self._repeats.begin((*changes.gained, *changes.settled), now)

    def record(self, address: str) -> AddressRecord:
        """Return the record of an address, creating it if needed."""
        return self.records.setdefault(address, AddressRecord())

    def _payload(self) -> HeartbeatPayload:
        links = tuple(PeerLink(name, link.mac) for name, link in sorted(self.links.items()))
        return HeartbeatPayload(links, tuple(sorted(self.ownership.held)), tuple(sorted(self.ownership.yielding)))

    def _announce(self, address: str, now: float) -> None:
        record = self.record(address)
        record.announced_at = now
        record.gratuitous += self._each_link(address, lambda link: l2.gratuitous(address, link.mac, link.link_local))

    def _probe(self, address: str) -> None:
        self._each_link(address, lambda link: _some(l2.probe(address, link.mac, link.link_local)))

    def _each_link(self, address: str, frames: Callable[[HostLink], Collection[bytes]]) -> int:
        return sum(self._transport.send(name, frames(self.links[name])) for name in self.links_of(address))

    def _answer_request(self, link: HostLink, message: l2.NeighborMessage, now: float) -> None:
        address = message.address
        if address not in self.ownership.held or link.name not in self.links_of(address):
            return
        if self._node_with(message.mac) == self.node:
            # Our own request, received on another link to the same segment.
            return
        frame = l2.answer(message, link.mac, link.link_local)
        if frame is None:
            return
        record = self.record(address)
        record.requests += 1
        record.last_request = LastRequest(at=now, sender=message.sender, mac=l2.mac_text(message.mac), link=link.name)
        record.answers += self._transport.send(link.name, (frame,))

    def _handle_claim(self, link: HostLink, message: l2.NeighborMessage, now: float, *, delayed: bool = False) -> None:
        """Handle another host's claim to an address. `delayed`: its heartbeat had time to arrive."""
        address = message.address
        held = self.ownership.held.get(address)
        node = self._node_with(message.mac)
        if held is None or held.yielding or node == self.node or link.name not in self.links_of(address):
            return
        if node and not delayed:
            # Its heartbeat may still be in flight.
            if len(self._pending_claims) < _MAX_PENDING_CLAIMS:
                self._pending_claims.append((now + _CLAIM_DELAY_SECONDS, link, message))
            return
        peer = self.membership.alive.get(node)
        if peer is not None and address in peer.payload.held:
            # Announcers that hear each other resolve it themselves.
            return
        record, mac = self.record(address), l2.mac_text(message.mac)
        record.foreign_seen += 1
        known = record.foreign.get(mac)
        if known is None:
            if len(record.foreign) >= _MAX_FOREIGN:
                del record.foreign[min(record.foreign, key=lambda each: record.foreign[each].last)]
            record.foreign[mac] = ForeignResponder(mac=mac, link=link.name, node=node, first=now, last=now)
        else:
            known.last, known.times, known.node, known.link = now, known.times + 1, node, link.name
        if self._may_log(f"{address} {mac}", now):
            LOGGER.warning("announcer: %s is also answered for by %s on %s", address, _who(mac, node), link.name)
        if now - record.defended_at >= _DEFEND_SECONDS:
            record.defended_at = now
            self._announce(address, now)

    def foreign_responders(self, address: str, now: float) -> list[ForeignResponder]:
        """Return the other hosts that recently answered for an address."""
        record = self.records.get(address)
        found = record.foreign.values() if record else ()
        return [each for each in found if now - each.last < _FORGET_SECONDS]

    def sharers(self) -> dict[NamespacedName, list[str]]:
        """Return the addresses of each Service, in order."""
        found: dict[NamespacedName, list[str]] = {}
        for address, decision in self.decisions.items():
            for key in decision.services:
                found.setdefault(key, []).append(address)
        return found

    def _node_with(self, mac: bytes) -> str:
        """Return the node that has a link with this MAC address; empty if unknown."""
        if any(link.mac == mac for link in self.links.values()):
            return self.node
        peers = self.membership.peers.values()
        return next((peer.name for peer in peers if any(link.mac == mac for link in peer.payload.links)), "")

    def _dispatch(self, datagrams: Sequence[Datagram]) -> None:
        for address, data in datagrams:
            self._send(address, data)

    def _may_log(self, what: str, now: float) -> bool:
        if now - self._logged.get(what, -1e9) < _LOG_AGAIN_SECONDS:
            return False
        if len(self._logged) > 1000:
            self._logged.clear()
        self._logged[what] = now
        return True

    def _warn_about_rejected_heartbeats(self, now: float) -> None:
        counts = self.membership.counts
        for what, number, hint in (
            ("are signed with another key", counts.wrong_key, "give all announcers the same key"),
            ("are malformed", counts.malformed, "does another program or version send to this port?"),
        ):
            if number > self._refused[what] and self._may_log(what, now):
                self._refused[what] = number
                LOGGER.warning("announcer: %d heartbeats %s: %s", number, what, hint)


def _some(frame: bytes | None) -> tuple[bytes, ...]:
    return () if frame is None else (frame,)


def _who(mac: str, node: str) -> str:
    if not node:
        return f"MAC address {mac}, which no announcer has"
    return f"node {node} ({mac}), whose announcer does not: another program there does, or heartbeats are lost"


class ForeignResponder(msgspec.Struct, kw_only=True):
    """Another host that answers for one of our addresses."""

    mac: str
    link: str
    node: str
    """Node that has this MAC address; empty if it is not an announcer's."""
    first: float
    last: float
    times: int = 1


class LastRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The last request for an address."""

    at: float
    sender: str
    mac: str
    link: str


class AddressRecord(msgspec.Struct, kw_only=True):
    """Statistics of one address in this process. Times are those of the loop's clock."""

    requests: int = 0
    answers: int = 0
    gratuitous: int = 0
    announced_at: float | None = None
    defended_at: float = -1e9
    last_request: LastRequest | None = None
    foreign: dict[str, ForeignResponder] = {}
    foreign_seen: int = 0
    duplicates: int = 0
