"""Questions over UDP at one socket. The loop in `_readable` is where a busy server spends its time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from narthex.dns.dispatcher import Ask, Desk, Labels, Made
from narthex.dns.interfaces import Client, Loop
from narthex.dns.plugins.query_log import QueryLog
from narthex.dns.server.batch import SIZE, SLOTS, Batch
from narthex.dns.server.tally import Tally
from narthex.dns.zone.table import Kept, Table

_ROUNDS = 4
"""Batches in a row before other sockets have their turn."""

Elsewhere = Callable[[Ask, Client, Callable[[bytes | None], None]], None]
"""Gets an answer that the desk has not; calls back with the message, cut to what the client takes, or None."""


class UdpServer:
    """Serves one socket in the loop's thread."""

    def __init__(
        self,
        sock: socket.socket,
        desk: Desk,
        tally: Tally,
        loop: Loop,
        elsewhere: Elsewhere,
        most_bytes: int,
        log: QueryLog | None = None,
    ) -> None:
        """`most_bytes` bounds what known questions may take."""
        self._sock = sock
        self._fd = sock.fileno()
        self._desk = desk
        self._tally = tally
        self._loop = loop
        self._elsewhere = elsewhere
        self._family = 1 if sock.family == socket.AF_INET else 2
        self._table = Table(most_bytes)
        self._log = log
        self._logged = Table(most_bytes)
        """Known questions that are written down, which the others' quick way must not find."""
        self._batch = Batch(sock.family)
        self._places = [(slot * SIZE, slot * SIZE + 2) for slot in range(SLOTS)]

    def open(self) -> None:
        """Begin to answer."""
        self._loop.register(self._fd, self._readable)

    def close(self) -> None:
        """End; what waits in the socket is lost."""
        self._loop.unregister(self._fd)
        self._sock.close()

    def forget(self) -> None:
        """A zone has changed, or counters are taken away."""
        self._table.clear()
        self._logged.clear()

    def _readable(self) -> None:
        batch = self._batch
        for _ in range(_ROUNDS):
            count = batch.receive(self._fd)
            if not count:
                return
            began = time.perf_counter()
            self._answer(count)
            self._tally.took(self._desk.main_zone, time.perf_counter() - began, count)
            if count < SLOTS:
                return

    def _answer(self, count: int) -> None:
        batch = self._batch
        buffer, view = batch.buffer, batch.view
        get = self._table.held.get
        places = self._places
        first = 0
        sizes: list[int] = []
        add = sizes.append
        slot = 0
        for length in batch.lengths(count):
            begin, at = places[slot]
            key = view[at : begin + length].tobytes()
            kept = get(key)
            if kept is not None:
                kept.counter[0] += 1
                turn = kept.turn
                tail = kept.tail if turn is None else turn.next()
            else:
                made = self._other(slot, key)
                if made is None:
                    if sizes:
                        self._tally.lost += batch.send(self._fd, first, sizes)
                        sizes.clear()
                    slot += 1
                    first = slot
                    continue
                tail = made
            size = len(tail)
            buffer[at : at + size] = tail
            add(size + 2)
            slot += 1
        if sizes:
            self._tally.lost += batch.send(self._fd, first, sizes)

    def _other(self, slot: int, key: bytes) -> bytes | None:
        """The response behind its id to a question that is not in the table; None: nothing now."""
        kept = self._logged.held.get(key)
        if kept is not None:
            return self._note_kept(slot, key, kept)
        quick = self._desk.unknown(key)
        if quick is not None:
            tail, shape = quick
            shape.counter[0] += 1
            self._table.keep_unknown(key, tail, shape.counter)
            return tail
        if len(key) >= SIZE - 2:
            # Longer than any question; what did not fit is not even here.
            return None
        began = time.perf_counter()
        packet = self._packet(slot, key)
        made = self._desk.handle(packet, "udp")
        if isinstance(made, Made):
            tail = made.compiled.tail
            counter = self._count(made.labels, packet, len(tail) + 2)
            if self._log is not None and self._log.covers(made.labels.zone):
                self._logged.keep(key, made.compiled, counter, made.labels.zone)
                self._note(made.labels.zone, slot, packet, packet[:2] + tail, began)
            elif made.compiled.code:
                self._desk.learn(key, made, counter)
                self._table.keep_unknown(key, tail, counter)
            else:
                self._table.keep(key, made.compiled, counter)
            return tail
        if made is None:
            return None
        if isinstance(made, Ask):
            return self._ask(slot, made)
        self._count(made.labels, packet, len(made.message))
        return made.message[2:]

    def _packet(self, slot: int, key: bytes) -> bytes:
        begin = slot * SIZE
        return bytes(self._batch.view[begin : begin + 2]) + key

    def _note_kept(self, slot: int, key: bytes, kept: Kept) -> bytes:
        began = time.perf_counter()
        kept.counter[0] += 1
        tail = kept.tail if kept.turn is None else kept.turn.next()
        packet = self._packet(slot, key)
        self._note(kept.zone, slot, packet, packet[:2] + tail, began)
        return tail

    def _note(self, zone: str, slot: int, packet: bytes, message: bytes, began: float) -> None:
        address, port, _ = self._batch.client(slot)
        assert self._log is not None
        self._log.note(zone, packet, message, Client(address, "udp"), port, time.perf_counter() - began)

    def _count(self, labels: Labels, packet: bytes, size: int) -> list[int]:
        counter = self._tally.counter(("udp", self._family, labels, len(packet), size))
        counter[0] += 1
        return counter

    def _ask(self, slot: int, ask: Ask) -> bytes | None:
        """Have it answered elsewhere; at once when that is known at once."""
        address, port, scope = self._batch.client(slot)
        asked = self._batch.asked(slot)
        to = (address, port) if self._family == 1 else (address, port, 0, scope)
        now: list[bytes] = []
        waiting = False
        began, log = time.perf_counter(), self._log

        def reply(message: bytes | None) -> None:
            if message is None:
                return
            if log is not None and log.covers(ask.zone):
                seconds = time.perf_counter() - began
                log.note(ask.zone, ask.query.packet, message, Client(address, "udp"), port, seconds)
            if waiting:
                self._send_later(message, asked, to)
            else:
                now.append(message)

        self._elsewhere(ask, Client(address, "udp"), reply)
        waiting = True
        return now[0][2:] if now else None

    def _send_later(self, message: bytes, asked: list[tuple[int, int, bytes]], to: tuple[object, ...]) -> None:
        try:
            self._sock.sendmsg([message], asked, 0, to)
        except OSError:
            # The client is unreachable now, or the queue is full: it asks again.
            self._tally.lost += 1
