"""Heartbeats between announcers: who is alive, within a second, by UDP and a shared key.

Each announcer sends each other one a beat several times a second; one that is silent for a few beats is lost. A beat is
authenticated, and bound to the run of the process that it is sent to (`echo` repeats a number that this run made up), so
that nothing recorded earlier passes for a sign of life, and clocks need not agree. Both must hear each other: a peer
that does not repeat our number counts as silent.

Beats also carry what the others decide by: links, addresses that are answered for, whether the node is leaving or had
better stand back. All times are of one monotonic clock, in seconds.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence

import msgspec

from narthex.model.backoff import Backoff

MAGIC = b"NXH1"
_MAC_BYTES = 32
MAX_BYTES = 60_000
"""Longer datagrams are not read."""
_REFUSAL_COUNTS = 3.0
"""Seconds: nodes that say that nobody listens are asked again each second."""
_RUNS = 256
"""Ended runs of one peer that are remembered."""


class HeartbeatTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How fast and how patient."""

    interval: float = 0.15
    """Between two beats to one peer."""
    missed: int = 4
    """A peer is lost when so many of its intervals pass without a beat."""
    quiet_interval: float = 1.0
    """Between two beats to a node of which nothing was ever heard: it may have no announcer."""
    listen: float = 0.6
    """A run listens for so long before it decides anything."""
    stand_back: float = 3.0
    """A run that has just begun, or was cut off, lets others go first for so long, and for longer the more often it was
    lost lately."""
    most_stand_back: float = 60.0
    remembered: float = 600.0
    """Losses of a peer count for so long."""
    whole_every: int = 20
    """Each n-th beat tells all; those between only that all is as before."""

    @property
    def patience(self) -> float:
        """Seconds of silence after which a peer is lost."""
        return self.interval * self.missed


class PeerState(enum.Enum):
    """What is known of a peer."""

    UNHEARD = "unheard"
    """This run never heard it."""
    ALIVE = "alive"
    LOST = "lost"
    """It fell silent."""
    LEFT = "left"
    """It said that it ends."""


class PeerLink(msgspec.Struct, frozen=True, array_like=True):
    """A link on which an announcer can answer."""

    name: str
    mac: bytes


class HeartbeatPayload(msgspec.Struct, frozen=True, array_like=True):
    """What an announcer tells of itself."""

    links: tuple[PeerLink, ...] = ()
    held: tuple[str, ...] = ()
    """Addresses that it answers for."""
    yielding: tuple[str, ...] = ()
    """Those of them that it gives up as soon as another has them."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One message."""

    sender: str
    receiver: str
    run: int
    """A random number that the sender's run goes by."""
    echo: int
    """The receiver's run as the sender knows it; 0: not known, answer with yours."""
    sequence: int
    """Grows with each beat of a run to this receiver."""
    interval: float
    """The sender's next beat comes within so many seconds."""
    losses: int
    """How often the sender has lost the receiver lately."""
    leaving: bool
    """It wants to end: others take over, it answers until they do."""
    gone: bool
    """It has ended."""
    standing_back: bool
    version: int
    """Of `told`; grows with each change."""
    told: HeartbeatPayload | None
    """None: as the version says."""


class Peer(msgspec.Struct, kw_only=True):
    """What is known of one peer."""

    name: str
    address: str
    """Where beats go; empty when it has none."""
    state: PeerState = PeerState.UNHEARD
    run: int = 0
    sequence: int = -1
    ended_runs: list[int] = []
    heard: float = -math.inf
    """When the last good beat came."""
    patience: float = math.inf
    refused: float = -math.inf
    """When its node last said that nobody listens there: the node lives, its announcer does not."""
    losses: list[float] = []
    reported_losses: int = 0
    """How often it has lost us lately."""
    leaving: bool = False
    standing_back: bool = False
    version: int = -1
    told: HeartbeatPayload = HeartbeatPayload()
    sent: int = 0
    send_at: float = -math.inf
    whole: int = 0
    """So many more beats to it tell all."""


class HeartbeatCounts(msgspec.Struct):
    """What happened, for metrics."""

    received: int = 0
    wrong_key: int = 0
    garbled: int = 0
    replayed: int = 0
    """Out of order, of an ended run, or not meant for this one."""
    strangers: int = 0
    """Good beats of what is no node."""
    lost: int = 0
    """Peers that fell silent."""


Datagram = tuple[str, bytes]
"""Where to, and what."""


class Membership:
    """One announcer's view of the others. Owned by one thread."""

    def __init__(
        self, name: str, run: int, keys: Sequence[bytes], now: float, times: HeartbeatTimes | None = None
    ) -> None:
        """`run`: random, not 0, never used before. The first key signs, each may have signed what comes in."""
        self.name = name
        self.times = times or HeartbeatTimes()
        self.keys = tuple(keys)
        self.counts = HeartbeatCounts()
        self.peers: dict[str, Peer] = {}
        self.leaving = False
        self.changes = 0
        """Grows with each change of what is known of a peer that others decide by."""
        self._run = run
        self._begun = self._steady_since = now
        self._young = True
        """It stands back because it has just begun, not because it was cut off."""
        self._sent_at: float | None = None
        self._alone = False
        """All peers fell silent at one time."""
        self._told, self._version = HeartbeatPayload(), 0

    @property
    def alive(self) -> dict[str, Peer]:
        """Peers that are heard now."""
        return {name: peer for name, peer in self.peers.items() if peer.state is PeerState.ALIVE}

    def lost(self, now: float) -> frozenset[str]:
        """Peers that fell silent and whose nodes are silent, too: what runs there is gone with them."""
        return frozenset(
            name
            for name, peer in self.peers.items()
            if peer.state is PeerState.LOST and now - peer.refused > _REFUSAL_COUNTS
        )

    def listening(self, now: float) -> bool:
        """Whether it is too early to decide anything."""
        return now < self._begun + self.times.listen

    def standing_back(self, now: float) -> bool:
        """Whether others had better go first: this run is young, was cut off lately, or comes and goes."""
        return now < self.stand_back_until

    @property
    def stand_back_until(self) -> float:
        """When it ends to stand back."""
        losses = max((peer.reported_losses for peer in self.alive.values()), default=0)
        penalty = Backoff(self.times.stand_back, self.times.most_stand_back).delay(max(1, losses))
        return self._steady_since + penalty

    def know(self, addresses: Mapping[str, str]) -> None:
        """Which nodes there are, and where; those that are gone from it are forgotten."""
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

    def tell(self, told: HeartbeatPayload) -> bool:
        """What to tell of this announcer from now on; True when it differs, and beats are due at once."""
        if told == self._told:
            return False
        self._told = told
        self._version += 1
        self._hurry()
        return True

    def cut_off(self, now: float) -> None:
        """This run could not be heard for a while: it stood still, or had no link. It begins like a new one."""
        self._steady_since, self._young = now, False

    def restart_listening(self, now: float) -> None:
        """What was known is too old to act by: this process stood still for longer than the others' patience."""
        self._begun = self._steady_since = now
        self._young = True

    def settle(self) -> None:
        """It has an address. A run that has just begun only gets what nobody else has, so there is nobody to let go
        first."""
        if self._young:
            self._steady_since = -math.inf

    def leave(self) -> None:
        """Ask the others to take over."""
        self.leaving = True
        self._hurry()

    def farewell(self, now: float) -> list[Datagram]:
        """The last beats: this announcer has ended."""
        return [self._datagram(peer, now, gone=True) for peer in self.alive.values()]

    def due(self, now: float) -> list[Datagram]:
        """Beats to send now."""
        found = []
        for peer in self.peers.values():
            if peer.address and now >= peer.send_at:
                silent = peer.state is PeerState.UNHEARD or now - peer.heard > 10 * self.times.patience
                # The first beats of a run are for all, to be heard before it decides.
                early = self.listening(now)
                peer.send_at = now + (self.times.quiet_interval if silent and not early else self._pace)
                if peer.state is PeerState.ALIVE:
                    self._sent_at = now
                found.append(self._datagram(peer, now))
        return found

    def unsaid_for(self, now: float) -> float:
        """Seconds since a beat was last sent to a peer that is alive; 0 where there is none to miss it."""
        return now - self._sent_at if self._sent_at is not None and self.alive else 0.0

    def next_due(self) -> float:
        """When `due` or `tick` have something to do."""
        send = min((peer.send_at for peer in self.peers.values() if peer.address), default=math.inf)
        return min(send, *(peer.heard + peer.patience for peer in self.alive.values()), math.inf)

    def tick(self, now: float) -> tuple[str, ...]:
        """Peers that have fallen silent since the last call. What waits at the socket must have been received."""
        before = self.alive
        lost = tuple(name for name, peer in before.items() if now - peer.heard >= peer.patience)
        for name in lost:
            peer = self.peers[name]
            peer.state = PeerState.LOST
            peer.losses = [*(at for at in peer.losses if now - at < self.times.remembered), now][-64:]
            self.counts.lost += 1
            self.changes += 1
        # Of two that lose each other nobody knows who was cut off; of more, the one that loses all.
        self._alone = self._alone or (len(before) > 1 and len(lost) == len(before))
        return lost

    def refused(self, address: str, now: float) -> None:
        """A node's own kernel says that nobody listens there. Anybody could have sent that, so it loses nobody."""
        for peer in self.peers.values():
            if peer.address == address:
                peer.refused = now

    def receive(self, data: bytes, now: float) -> list[Datagram]:
        """Take a datagram in; returns what has to be answered at once."""
        self.counts.received += 1
        beat = self._opened(data)
        if beat is None:
            return []
        peer = self.peers.get(beat.sender)
        if beat.receiver != self.name:
            self.counts.replayed += 1
            return []
        if peer is None:
            self.counts.strangers += 1
            return []
        if beat.echo != self._run:
            return self._answer(peer, beat, now)
        past = beat.run == peer.run and (beat.sequence <= peer.sequence or peer.state is PeerState.LEFT)
        if past or beat.run in peer.ended_runs:
            self.counts.replayed += 1
            return []
        self._take(peer, beat, now)
        return []

    def _take(self, peer: Peer, beat: Heartbeat, now: float) -> None:
        before = peer.state, peer.told, peer.leaving, peer.standing_back
        if beat.run != peer.run:
            if peer.run:
                peer.ended_runs = [*peer.ended_runs, peer.run][-_RUNS:]
            peer.run, peer.version, peer.told = beat.run, -1, HeartbeatPayload()
        peer.sequence = beat.sequence
        if beat.told is not None:
            peer.told, peer.version = beat.told, beat.version
        elif peer.version != beat.version:
            # What it tells has not come; until it does, nothing is better than what was.
            peer.told, peer.version = HeartbeatPayload(links=peer.told.links), beat.version
        if peer.state is not PeerState.ALIVE:
            if self._alone:
                self._alone = False
                self.cut_off(now)
            # It, too, has to be told all, and soon.
            peer.whole, peer.send_at = 3, now
        peer.heard = now
        peer.patience = max(beat.interval, self.times.interval) * self.times.missed
        peer.leaving, peer.standing_back = beat.leaving, beat.standing_back
        peer.reported_losses = beat.losses
        peer.state = PeerState.LEFT if beat.gone else PeerState.ALIVE
        self.changes += (peer.state, peer.told, peer.leaving, peer.standing_back) != before

    def _answer(self, peer: Peer, beat: Heartbeat, now: float) -> list[Datagram]:
        """Make this run known to a peer that does not know it, or that has lost us. Nothing that it says is believed until
        it repeats our number; whoever replays it makes us send one datagram to the peer itself."""
        if beat.run in peer.ended_runs or beat.gone or not peer.address:
            self.counts.replayed += 1
            return []
        return [self._datagram(peer, now, echo=beat.run)]

    def _datagram(self, peer: Peer, now: float, *, echo: int | None = None, gone: bool = False) -> Datagram:
        peer.sent += 1
        whole = peer.whole > 0 or peer.sent % self.times.whole_every == 1 or gone or echo is not None
        peer.whole = max(0, peer.whole - 1)
        beat = Heartbeat(
            sender=self.name,
            receiver=peer.name,
            run=self._run,
            echo=self._known(peer) if echo is None else echo,
            sequence=peer.sent,
            interval=self._pace,
            losses=sum(now - at < self.times.remembered for at in peer.losses),
            leaving=self.leaving,
            gone=gone,
            standing_back=self.standing_back(now),
            version=self._version,
            told=self._told if whole else None,
        )
        return peer.address, sealed(beat, self.keys[0])

    def _known(self, peer: Peer) -> int:
        """The number that is repeated to a peer. One that is not heard is told so, that it does not count on us either."""
        return peer.run if peer.state is PeerState.ALIVE else 0

    @property
    def _pace(self) -> float:
        """A large cluster beats more slowly, or it would do nothing else."""
        return self.times.interval * max(1.0, len(self.peers) / 100)

    def _hurry(self) -> None:
        for peer in self.peers.values():
            peer.whole = 3
            if peer.state is PeerState.ALIVE:
                peer.send_at = -math.inf

    def _opened(self, data: bytes) -> Heartbeat | None:
        """The beat in a datagram; None when it is not one, or not signed by a key of ours."""
        body = data[len(MAGIC) + _MAC_BYTES :]
        if not data.startswith(MAGIC) or not body or len(data) > MAX_BYTES:
            self.counts.garbled += 1
            return None
        signature = data[len(MAGIC) : len(MAGIC) + _MAC_BYTES]
        if not any(hmac.compare_digest(signature, _signature(key, body)) for key in self.keys):
            self.counts.wrong_key += 1
            return None
        try:
            return msgspec.msgpack.decode(body, type=Heartbeat)
        except (msgspec.DecodeError, msgspec.ValidationError):
            # Signed by the key, so another version's.
            self.counts.garbled += 1
            return None


def sealed(beat: Heartbeat, key: bytes) -> bytes:
    """A beat as a datagram."""
    body = msgspec.msgpack.encode(beat)
    return MAGIC + _signature(key, body) + body


def _signature(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, MAGIC + body, hashlib.sha256)
