"""Heartbeats between announcers: failure detection within a second, over UDP with a shared key.

Each announcer sends heartbeats to every other one several times a second; a peer that misses a few is lost. Heartbeats are
authenticated and bound to the receiver's current process (`echo` repeats its random incarnation number), so recorded
heartbeats cannot be replayed and clocks need not agree. Both directions must work: a peer that does not repeat our
incarnation counts as silent.

Heartbeats also carry the data that elections depend on: links, announced addresses, whether the node is leaving or standing
back. All times are seconds of one monotonic clock.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from narthex.model.backoff import Backoff

MAGIC = b"NXH1"
_MAC_BYTES = 32
MAX_BYTES = 60_000
"""Longer datagrams are dropped."""
_REFUSAL_SECONDS = 3.0
"""Validity of an ICMP port unreachable; such nodes are probed every second."""
_MAX_INCARNATIONS = 256


class HeartbeatTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and timeouts, in seconds."""

    interval: float = 0.15
    """Between two heartbeats to one peer."""
    missed: int = 4
    """Number of missed heartbeats after which a peer is lost."""
    quiet_interval: float = 1.0
    """Between two heartbeats to a node that was never heard: it may have no announcer."""
    listen: float = 0.6
    """A new announcer listens for this long before its first election."""
    stand_back: float = 3.0
    """After a start or a disconnection, other nodes are preferred for this long; doubled with each recent loss."""
    most_stand_back: float = 60.0
    remembered: float = 600.0
    """Losses of a peer count for this long."""
    full_every: int = 20
    """Every n-th heartbeat carries the payload; the others only its version."""
    patience: int = 3
    """Number of timeouts that a silent peer has while its kernel answers probes: its process waits for a processor."""

    @property
    def timeout(self) -> float:
        """Silence after which a peer is lost."""
        return self.interval * self.missed


class PeerState(enum.Enum):
    """State of a peer."""

    UNHEARD = "unheard"
    ALIVE = "alive"
    LOST = "lost"
    LEFT = "left"


class PeerLink(msgspec.Struct, frozen=True, array_like=True):
    """A link on which an announcer can answer."""

    name: str
    mac: bytes


class HeartbeatPayload(msgspec.Struct, frozen=True, array_like=True):
    """Data that an announcer publishes."""

    links: tuple[PeerLink, ...] = ()
    held: tuple[str, ...] = ()
    yielding: tuple[str, ...] = ()
    """Those of them that it releases as soon as another node announces them."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One heartbeat message."""

    sender: str
    receiver: str
    incarnation: int
    """Random number that identifies the sender's process."""
    echo: int
    """The receiver's incarnation as the sender knows it; 0: unknown, a reply is requested."""
    sequence: int
    """Increases with each heartbeat of an incarnation to this receiver."""
    interval: float
    """Seconds until the sender's next heartbeat, at most."""
    losses: int
    """How often the sender recently lost the receiver."""
    leaving: bool
    """Shutting down: it announces its addresses until others take over."""
    gone: bool
    standing_back: bool
    version: int
    payload: HeartbeatPayload | None
    """None: unchanged since `version`."""


class PortUnreachable(NamedTuple):
    """An ICMP port unreachable that a node's kernel sent."""

    address: str
    probe: bool
    """True in reply to a probe, False in reply to a heartbeat: no announcer listens there."""


class Peer(msgspec.Struct, kw_only=True):
    """State of one peer."""

    name: str
    address: str
    """Destination of heartbeats; empty if the node has no address."""
    state: PeerState = PeerState.UNHEARD
    incarnation: int = 0
    sequence: int = -1
    ended_incarnations: list[int] = []
    heard: float = -math.inf
    timeout: float = math.inf
    refused: float = -math.inf
    """Time of the last ICMP port unreachable: the node is up, its announcer is not."""
    probed: float = -math.inf
    """Time of the first probe of the node's kernel since the last heartbeat."""
    probe_at: float = -math.inf
    answered: float = -math.inf
    """Time of the last answer to a probe."""
    reported_silence: float = -math.inf
    """When it last reported that it does not hear this node."""
    losses: list[float] = []
    reported_losses: int = 0
    """How often the peer recently lost this node."""
    leaving: bool = False
    standing_back: bool = False
    version: int = -1
    payload: HeartbeatPayload = HeartbeatPayload()
    sent: int = 0
    send_at: float = -math.inf
    full_sends: int = 0
    """Number of following heartbeats that carry the payload."""


class HeartbeatCounts(msgspec.Struct):
    """Counters for metrics."""

    received: int = 0
    wrong_key: int = 0
    malformed: int = 0
    replayed: int = 0
    """Out of order, from an ended incarnation, or addressed to another node."""
    unknown_senders: int = 0
    """Valid heartbeats whose sender is not a node."""
    lost: int = 0


Datagram = tuple[str, bytes]


class Membership:
    """One announcer's view of its peers. Owned by one thread; does no I/O and reads no clock."""

    def __init__(
        self, name: str, incarnation: int, keys: Sequence[bytes], now: float, times: HeartbeatTimes | None = None
    ) -> None:
        """Start a new incarnation: a random number, not 0 and never used before.

        The first key signs; any of the keys verifies.
        """
        self.name = name
        self.times = times or HeartbeatTimes()
        self.keys = tuple(keys)
        self.counts = HeartbeatCounts()
        self.peers: dict[str, Peer] = {}
        self.leaving = False
        self.changes = 0
        """Increases with each peer change that affects elections."""
        self._incarnation = incarnation
        self._begun = self._steady_since = now
        self._initial = True
        """It stands back because it is new, not because it was disconnected."""
        self._sent_at: float | None = None
        self._isolated = False
        """All peers were lost at once."""
        self._payload, self._version = HeartbeatPayload(), 0

    @property
    def alive(self) -> dict[str, Peer]:
        """Peers that are currently heard."""
        return {name: peer for name, peer in self.peers.items() if peer.state is PeerState.ALIVE}

    def lost(self, now: float) -> frozenset[str]:
        """Return the lost peers whose nodes do not respond either: everything on them is gone."""
        return frozenset(
            name
            for name, peer in self.peers.items()
            if peer.state is PeerState.LOST and now - peer.refused > _REFUSAL_SECONDS
        )

    def listening(self, now: float) -> bool:
        """Return True while it is too early for an election."""
        return now < self._begun + self.times.listen

    def standing_back(self, now: float) -> bool:
        """Return True while other nodes are preferred: after a start, a disconnection, or repeated losses."""
        return now < self.stand_back_until

    @property
    def stand_back_until(self) -> float:
        """When this node stops standing back."""
        losses = max((peer.reported_losses for peer in self.alive.values()), default=0)
        penalty = Backoff(self.times.stand_back, self.times.most_stand_back).delay(max(1, losses))
        return self._steady_since + penalty

    def set_nodes(self, addresses: Mapping[str, str]) -> None:
        """Set the addresses of all nodes, by name; other peers are removed."""
        for name in self.peers.keys() - addresses.keys():
            del self.peers[name]
        self.changes += 1
        for name, address in addresses.items():
            if name == self.name:
                continue
            peer = self.peers.get(name)
            if peer is None:
                self.peers[name] = Peer(name=name, address=address)
            else:
                peer.address = address

    def publish(self, payload: HeartbeatPayload) -> bool:
        """Set the published payload; return True if it changed, in which case heartbeats are due immediately."""
        if payload == self._payload:
            return False
        self._payload = payload
        self._version += 1
        self._send_soon()
        return True

    def cut_off(self, now: float) -> None:
        """Handle a disconnection of this node: it was suspended or had no link. It stands back like a new announcer."""
        self._steady_since, self._initial = now, False

    def restart_listening(self, now: float) -> None:
        """Discard outdated knowledge after a suspension longer than the timeout of the peers."""
        self._begun = self._steady_since = now
        self._initial = True

    def end_initial_stand_back(self) -> None:
        """Stop standing back after the first acquired address.

        A new announcer only acquires addresses that no other node has, so there is no other node to prefer.
        """
        if self._initial:
            self._steady_since = -math.inf

    def leave(self) -> None:
        """Ask the peers to take over."""
        self.leaving = True
        self._send_soon()

    def farewell(self, now: float) -> list[Datagram]:
        """Return the final heartbeats, which report that this announcer has shut down."""
        return [self._datagram(peer, now, gone=True) for peer in self.alive.values()]

    def due(self, now: float) -> list[Datagram]:
        """Return the heartbeats to send now."""
        found = []
        for peer in self.peers.values():
            if peer.address and now >= peer.send_at:
                silent = peer.state is PeerState.UNHEARD or now - peer.heard > 10 * self.times.timeout
                # The first heartbeats go to all nodes, so that replies arrive before the first election.
                early = self.listening(now)
                peer.send_at = now + (self.times.quiet_interval if silent and not early else self._send_interval)
                if peer.state is PeerState.ALIVE:
                    self._sent_at = now
                found.append(self._datagram(peer, now))
        return found

    def seconds_since_sent(self, now: float) -> float:
        """Return the seconds since the last heartbeat to a live peer; 0 if there is none."""
        return now - self._sent_at if self._sent_at is not None and self.alive else 0.0

    def next_due(self) -> float:
        """Return when `due` or `tick` must be called."""
        send = min((peer.send_at for peer in self.peers.values() if peer.address), default=math.inf)
        return min(send, *map(self._deadline, self.alive.values()), math.inf)

    def _deadline(self, peer: Peer) -> float:
        """Return when a live peer is lost unless it is heard. No peer is lost before its kernel had time to answer a probe."""
        end = peer.heard + peer.timeout
        if peer.refused > peer.heard:
            return end
        if peer.probed <= peer.heard:
            return math.inf
        last = peer.heard + peer.timeout * self.times.patience
        return max(end, peer.probed + self.times.interval, min(peer.answered + peer.timeout, last))

    def probes(self, now: float) -> list[str]:
        """Return the addresses of nodes whose kernels must be probed: their announcers were silent for half a timeout."""
        found = []
        for peer in self.alive.values():
            if now - peer.heard >= peer.timeout / 2 and now >= peer.probe_at:
                peer.probed = now if peer.probed <= peer.heard else peer.probed
                peer.probe_at = now + peer.timeout / 2
                found.append(peer.address)
        return found

    def answered(self, address: str, now: float) -> None:
        """Record that a node's kernel answered a probe. The answer can be forged, so it only delays a loss, within a limit."""
        for peer in self.peers.values():
            if peer.address == address:
                peer.answered = now

    def taken_over(self, seconds: float, now: float) -> bool:
        """Return True if other nodes may have taken over during a suspension of this process that ended now.

        All queued datagrams must have been received. Peers that have lost this node say so in their heartbeats.
        """
        if seconds <= self.times.timeout * self.times.patience:
            return any(peer.reported_silence >= now for peer in self.peers.values())
        return True

    def tick(self, now: float) -> tuple[str, ...]:
        """Return the peers that timed out since the last call. Pending datagrams must have been received before."""
        before = self.alive
        lost = tuple(name for name, peer in before.items() if now >= self._deadline(peer))
        for name in lost:
            peer = self.peers[name]
            peer.state = PeerState.LOST
            peer.losses = [*(at for at in peer.losses if now - at < self.times.remembered), now][-64:]
            self.counts.lost += 1
            self.changes += 1
        # With two nodes it is unknown which one was disconnected; with more, it is the one that lost all others.
        self._isolated = self._isolated or (len(before) > 1 and len(lost) == len(before))
        return lost

    def refused(self, address: str, now: float) -> None:
        """Record an ICMP port unreachable from a node. It can be forged, so it never marks a peer as lost."""
        for peer in self.peers.values():
            if peer.address == address:
                peer.refused = now

    def receive(self, data: bytes, now: float) -> list[Datagram]:
        """Process a datagram; return the datagrams to send in reply."""
        self.counts.received += 1
        heartbeat = self._open(data)
        if heartbeat is None:
            return []
        peer = self.peers.get(heartbeat.sender)
        if heartbeat.receiver != self.name:
            self.counts.replayed += 1
            return []
        if peer is None:
            self.counts.unknown_senders += 1
            return []
        if heartbeat.echo != self._incarnation:
            return self._answer(peer, heartbeat, now)
        past = heartbeat.incarnation == peer.incarnation and (
            heartbeat.sequence <= peer.sequence or peer.state is PeerState.LEFT
        )
        if past or heartbeat.incarnation in peer.ended_incarnations:
            self.counts.replayed += 1
            return []
        self._take(peer, heartbeat, now)
        return []

    def _take(self, peer: Peer, heartbeat: Heartbeat, now: float) -> None:
        before = peer.state, peer.payload, peer.leaving, peer.standing_back
        if heartbeat.incarnation != peer.incarnation:
            if peer.incarnation:
                peer.ended_incarnations = [*peer.ended_incarnations, peer.incarnation][-_MAX_INCARNATIONS:]
            peer.incarnation, peer.version, peer.payload = heartbeat.incarnation, -1, HeartbeatPayload()
        peer.sequence = heartbeat.sequence
        if heartbeat.payload is not None:
            peer.payload, peer.version = heartbeat.payload, heartbeat.version
        elif peer.version != heartbeat.version:
            # The payload of this version is missing; until it arrives, assume no addresses instead of outdated ones.
            peer.payload, peer.version = HeartbeatPayload(links=peer.payload.links), heartbeat.version
        if peer.state is not PeerState.ALIVE:
            if self._isolated:
                self._isolated = False
                self.cut_off(now)
            # The peer needs our payload soon as well.
            peer.full_sends, peer.send_at = 3, now
        peer.heard = now
        peer.timeout = max(heartbeat.interval, self.times.interval) * self.times.missed
        peer.leaving, peer.standing_back = heartbeat.leaving, heartbeat.standing_back
        peer.reported_losses = heartbeat.losses
        peer.state = PeerState.LEFT if heartbeat.gone else PeerState.ALIVE
        self.changes += (peer.state, peer.payload, peer.leaving, peer.standing_back) != before

    def _answer(self, peer: Peer, heartbeat: Heartbeat, now: float) -> list[Datagram]:
        """Send our incarnation to a peer that does not know it or has lost us.

        Its data is ignored until it repeats our incarnation; a replay makes us send one datagram to the peer itself.
        """
        if heartbeat.incarnation in peer.ended_incarnations or heartbeat.gone or not peer.address:
            self.counts.replayed += 1
            return []
        if heartbeat.incarnation == peer.incarnation:
            peer.reported_silence = now
        return [self._datagram(peer, now, echo=heartbeat.incarnation)]

    def _datagram(self, peer: Peer, now: float, *, echo: int | None = None, gone: bool = False) -> Datagram:
        peer.sent += 1
        full = peer.full_sends > 0 or peer.sent % self.times.full_every == 1 or gone or echo is not None
        peer.full_sends = max(0, peer.full_sends - 1)
        heartbeat = Heartbeat(
            sender=self.name,
            receiver=peer.name,
            incarnation=self._incarnation,
            # A peer that we do not hear gets 0, so it does not rely on us either.
            echo=(peer.incarnation if peer.state is PeerState.ALIVE else 0) if echo is None else echo,
            sequence=peer.sent,
            interval=self._send_interval,
            losses=sum(now - at < self.times.remembered for at in peer.losses),
            leaving=self.leaving,
            gone=gone,
            standing_back=self.standing_back(now),
            version=self._version,
            payload=self._payload if full else None,
        )
        return peer.address, seal(heartbeat, self.keys[0])

    @property
    def _send_interval(self) -> float:
        """Interval between heartbeats, longer in clusters of more than 100 nodes to limit the load."""
        return self.times.interval * max(1.0, len(self.peers) / 100)

    def _send_soon(self) -> None:
        for peer in self.peers.values():
            peer.full_sends = 3
            if peer.state is PeerState.ALIVE:
                peer.send_at = -math.inf

    def _open(self, data: bytes) -> Heartbeat | None:
        """Verify and decode a datagram; None if it is malformed or not signed by one of our keys."""
        body = data[len(MAGIC) + _MAC_BYTES :]
        if not data.startswith(MAGIC) or not body or len(data) > MAX_BYTES:
            self.counts.malformed += 1
            return None
        signature = data[len(MAGIC) : len(MAGIC) + _MAC_BYTES]
        if not any(hmac.compare_digest(signature, _signature(key, body)) for key in self.keys):
            self.counts.wrong_key += 1
            return None
        try:
            return _HEARTBEATS.decode(body)
        except (msgspec.DecodeError, msgspec.ValidationError):
            # Signed with a valid key, so from another version.
            self.counts.malformed += 1
            return None


_HEARTBEATS = msgspec.msgpack.Decoder(Heartbeat)


def seal(heartbeat: Heartbeat, key: bytes) -> bytes:
    """Encode and sign a heartbeat."""
    body = msgspec.msgpack.encode(heartbeat)
    return MAGIC + _signature(key, body) + body


def _signature(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, MAGIC + body, hashlib.sha256)
