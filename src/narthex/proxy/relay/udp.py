"""UDP through the relay: each client has its own socket towards its endpoint until it has been idle for a while.

Datagrams of up to 64 KB pass whole (row 25.7 cut them at 4096 bytes). A datagram that cannot be delivered at once is
lost, as on any link.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections import OrderedDict
from collections.abc import Iterator

from narthex.proxy.relay.choice import Affinity, Place, Turns
from narthex.proxy.relay.tcp import SHORT, RelayShared, mark_as_own

LARGEST = 65536
DATAGRAMS = 64
"""Maximum datagrams to read before other sockets are served."""

_IP_PKTINFO = 8
_SO_RCVBUFFORCE = 33
_BUFFER = 4 << 20
_TELL_DESTINATION = {
    socket.AF_INET: (socket.IPPROTO_IP, _IP_PKTINFO),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO),
}
"""The option by which a datagram comes with the address that it was sent to."""
_PKTINFO4 = struct.Struct("=I4s4s")
_PKTINFO6 = struct.Struct("=16sI")

_Client = tuple[str, int, bytes]
"""Address and port of a client, and our address that it sent to: replies must come from there."""


class _Session:
    """One client and its endpoint."""

    __slots__ = ("answered", "candidates", "client", "last", "peer", "place", "socket", "waiting")

    def __init__(self, client: _Client, peer: tuple[object, ...], candidates: Iterator[Place], now: float) -> None:
        self.client = client
        self.peer = peer
        self.candidates = candidates
        """Endpoints that are left to try."""
        self.place: Place | None = None
        self.socket: socket.socket | None = None
        self.waiting: bytes | None = None
        """The last datagram as long as no answer came: if the endpoint refuses, another one gets it."""
        self.answered = False
        self.last = now


class UdpListener:
    """Receives datagrams on one port."""

    def __init__(self, shared: RelayShared, host: str, port: int, turns: Turns, idle_seconds: float) -> None:
        """Bind the port. Raises OSError if it is not available."""
        self._shared = shared
        self.turns = turns
        self.affinity: Affinity | None = None
        self._idle_seconds = idle_seconds
        self._sessions: OrderedDict[_Client, _Session] = OrderedDict()
        """The one that was idle for longest comes first."""
        self._socket = shared.bound(
            socket.SOCK_DGRAM, host, port, _TELL_DESTINATION[socket.AddressFamily(shared.family)]
        )
        _widen(self._socket)
        self.port: int = self._socket.getsockname()[1]
        shared.loop.add_reader(self._socket.fileno(), self._readable)

    def use(self, places: tuple[Place, ...]) -> None:
        """Send new clients to these endpoints. Clients of a removed endpoint get another one (row 18.2)."""
        self.turns.use(places)
        for session in [each for each in self._sessions.values() if each.place not in self.turns.places]:
            self._end(session)

    def close(self) -> None:
        """Close the port and forget all clients, whose replies could not be sent without it."""
        for session in list(self._sessions.values()):
            self._end(session)
        self._shared.loop.remove_reader(self._socket.fileno())
        self._socket.close()

    abort = close

    def sweep(self, now: float) -> None:
        """Forget clients whose idle time has expired."""
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if now - oldest.last < self._idle_seconds:
                return
            self._end(oldest)

    # ---- clients ---------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        for _ in range(DATAGRAMS):
            try:
                data, ancillary, _, peer = self._socket.recvmsg(LARGEST, 256)
            except BlockingIOError:
                return
            except OSError:
                # An ICMP error about an answer: that client is gone, others are not.
                continue
            self._take(data, (peer[0], peer[1], _arrived_at(self._shared.family, ancillary)), peer)

    def _take(self, data: bytes, client: _Client, peer: tuple[object, ...]) -> None:
        now = self._shared.now()
        session = self._sessions.get(client)
        if session is None:
            session = self._begin(client, peer, now)
            if session is None:
                return
        self._used(session, now)
        if not session.answered:
            session.waiting = data
        self._send(session, data)

    def _begin(self, client: _Client, peer: tuple[object, ...], now: float) -> _Session | None:
        if self._shared.full:
            self._shared.counts.short_of_files += 1
            if not self._sessions:
                return None
            self._end(next(iter(self._sessions.values())))
        who = client[0].partition("%")[0]
        first = self.affinity.remembered(who, sorted(self.turns.places), now) if self.affinity is not None else None
        session = _Session(client, peer, self.turns.candidates(now, first), now)
        self._shared.counts.clients += 1
        self._shared.counts.open += 1
        self._sessions[client] = session
        if not self._connect(session):
            return None
        return session

    def _used(self, session: _Session, now: float) -> None:
        session.last = now
        self._sessions.move_to_end(session.client)

    def _end(self, session: _Session) -> None:
        if self._sessions.pop(session.client, None) is None:
            return
        self._let_go(session)
        self._shared.release()

    # ---- endpoints -------------------------------------------------------------------------------------------------

    def _connect(self, session: _Session) -> bool:
        """Connect the session to the next endpoint. Returns False if there is none left; the session has then ended."""
        for place in session.candidates:
            try:
                sock = self._open(place)
            except OSError as error:
                if error.errno in SHORT:
                    self._shared.counts.short_of_files += 1
                    break
                self._missed(session, place)
                continue
            session.place, session.socket = place, sock
            self._shared.loop.add_reader(sock.fileno(), self._answered, session, sock)
            if self.affinity is not None:
                self.affinity.touch(session.client[0].partition("%")[0], place, self._shared.now())
            return True
        self._shared.counts.errors += 1
        self._end(session)
        return False

    def _open(self, place: Place) -> socket.socket:
        sock = socket.socket(self._shared.family, socket.SOCK_DGRAM)
        try:
            sock.setblocking(False)
            mark_as_own(sock, self._shared.mark)
            sock.connect(place)
        except OSError:
            sock.close()
            raise
        return sock

    def _send(self, session: _Session, data: bytes) -> None:
        """Send to the endpoint, or to the next one as long as none has replied."""
        while session.socket is not None:
            try:
                session.socket.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    return
                if not self._go_on(session):
                    return
                continue
            return

    def _answered(self, session: _Session, sock: socket.socket) -> None:
        for _ in range(DATAGRAMS):
            try:
                data = sock.recv(LARGEST)
            except BlockingIOError:
                return
            except OSError:
                # Refused: no socket is open there (ICMP port unreachable).
                if self._go_on(session) and session.waiting is not None:
                    self._send(session, session.waiting)
                return
            if not session.answered:
                session.answered, session.waiting = True, None
                if session.place is not None:
                    self.turns.reached(session.place)
            self._used(session, self._shared.now())
            self._reply(session, data)

    def _go_on(self, session: _Session) -> bool:
        """Handle a refusal. A client whose endpoint replied before starts over with its next datagram."""
        place = session.place
        self._let_go(session)
        if place is not None:
            self._missed(session, place)
        if session.answered:
            self._end(session)
            return False
        return self._connect(session)

    def _missed(self, session: _Session, place: Place) -> None:
        self._shared.counts.retries += 1
        self.turns.failed(place, self._shared.now())
        if self.affinity is not None:
            self.affinity.forget(session.client[0].partition("%")[0], place)

    def _let_go(self, session: _Session) -> None:
        if session.socket is not None:
            self._shared.loop.remove_reader(session.socket.fileno())
            session.socket.close()
            session.socket = None

    def _reply(self, session: _Session, data: bytes) -> None:
        """Reply from the address that the client sent to: connection tracking knows no other."""
        own = session.client[2]
        if self._shared.family == socket.AF_INET6:
            scope = session.peer[3] if own[:2] == b"\xfe\x80" else 0
            ancillary = [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, _PKTINFO6.pack(own, scope))]
        else:
            ancillary = [(socket.IPPROTO_IP, _IP_PKTINFO, _PKTINFO4.pack(0, own, own))]
        try:
            self._socket.sendmsg([data], ancillary, 0, session.peer)
        except OSError:
            # The buffer is full, or an earlier reply was refused: a datagram is lost, as on any link.
            return


def _arrived_at(family: int, ancillary: list[tuple[int, int, bytes]]) -> bytes:
    for level, kind, data in ancillary:
        if family == socket.AF_INET6 and level == socket.IPPROTO_IPV6 and kind == socket.IPV6_PKTINFO:
            return data[:16]
        if family == socket.AF_INET and level == socket.IPPROTO_IP and kind == _IP_PKTINFO:
            return data[8:12]
    return bytes(16 if family == socket.AF_INET6 else 4)


def _widen(sock: socket.socket) -> None:
    """Enlarge the receive buffer regardless of net.core.rmem_max; without permission, up to this limit."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
