"""Detection of changes that other programs make to our rules (rows 21.8, 21.17, 29.9).

nf_tables notifies listeners of each transaction (multicast group NFNLGRP_NFTABLES), including those of iptables-nft.
iptables-legacy sends no notifications: its table sizes are polled.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import math
import os
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Protocol

import msgspec

from narthex.linux.background import in_background
from narthex.linux.iptables_variants import default_variant
from narthex.linux.namespaces import in_namespace
from narthex.linux.netlink import PORTS, PORTS_MASK, bind_own_port, text_attribute
from narthex.linux.nfnetlink import DELETE_ELEMENTS, FAMILY_NUMBERS, NEW_ELEMENTS, NfNetlink
from narthex.linux.socket_filter import attach_filter
from narthex.model import IPFamily
from narthex.netfilter.ast import TouchedPart

_LOGGER = logging.getLogger("narthex")

POLL_SECONDS = 0.5
"""Poll period where there are no notifications."""
_PAUSE = 0.02
"""Delay between two reads of the queue, so that a storm of notifications costs little."""
_MOST_DATAGRAMS = 256
"""Read without a delay. Faster notifications are lost, which is detected too."""
_QUEUE_DATAGRAMS = 4096
"""As many as the queue holds: what is left of a transaction when its beginning is looked at."""

_NETLINK_NETFILTER, _GROUP_NFTABLES = 12, 7
_SOL_NETLINK, _ADD_MEMBERSHIP, _DROP_MEMBERSHIP = 270, 1, 2
_SO_RCVBUFFORCE = 33
_QUEUE = 8 << 20
_NEW_CHAIN, _DELETE_CHAIN, _NEW_RULE, _DELETE_RULE, _NEW_GENERATION = 3, 5, 6, 8, 15
_SUBSYSTEM = 10 << 8
_HEADER = struct.Struct("=IHHII")
_CHAIN_ATTRIBUTE = {_NEW_CHAIN: 3, _DELETE_CHAIN: 3, _NEW_RULE: 2, _DELETE_RULE: 2}
_SET_ATTRIBUTE = {NEW_ELEMENTS: 2, DELETE_ELEMENTS: 2}
MOST_TOUCHED = 64
"""Chains and sets that are named after changes by others. With more, reading everything is as quick."""
_FAMILIES = {int(number): IPFamily(family) for family, number in FAMILY_NUMBERS.items()}


class OwnTransactions:
    """The transactions of this process."""

    def __init__(self) -> None:
        self.transactions = 0
        """Of nf_tables, counted by the writer."""


class ForeignChanges(Protocol):
    """Detects changes by others to the tables and chains that contain our rules."""

    interval: float
    """Period at which `look` must be called; infinite with notifications."""

    def look(self) -> Mapping[IPFamily, int]:
        """Return the number of foreign changes since the last call that may concern our rules, by family."""
        ...

    def touched(self, family: IPFamily) -> frozenset[TouchedPart] | None:
        """Return what others touched in the changes of the last `look`; None: they may have changed anything."""
        ...

    def writing(self) -> AbstractContextManager[OwnTransactions]:
        """Return a context for our own writes, including those of started programs.

        The writer counts its transactions.
        """
        ...

    def listening(self, notice: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which `notice` is called, from any thread, when `look` has changes."""
        ...

    def close(self) -> None:
        """Release resources. Not while `listening`."""
        ...


class RuleScope(msgspec.Struct, frozen=True):
    """The changes that may concern our rules: in these tables, of chains for which `chain(table, name)` holds."""

    tables: frozenset[str]
    chain: Callable[[str, str], bool] = lambda table, name: True  # noqa: ARG005


class RulePoller:
    """Polls a value that differs after each change. Changes during our own writes count as ours."""

    interval = POLL_SECONDS

    def __init__(
        self, ask: Callable[[], object], families: Sequence[IPFamily], close: Callable[[], object] = lambda: None
    ) -> None:
        """Poll the value of `ask`; `close` releases its resources."""
        self._ask = ask
        self._close = close
        self._families = tuple(families)
        self._known: object = None

    def look(self) -> Mapping[IPFamily, int]:
        """Return one change per family if the value differs from the last one."""
        before, self._known = self._known, self._answer()
        return {} if before is None or before == self._known else dict.fromkeys(self._families, 1)

    def touched(self, family: IPFamily) -> frozenset[TouchedPart] | None:
        """Return None: a value that differs does not say what changed."""
        del family
        return None

    @contextmanager
    def writing(self) -> Iterator[OwnTransactions]:
        """Return a context for our own writes."""
        try:
            yield OwnTransactions()
        finally:
            self._known = self._answer()

    def listening(self, notice: Callable[[], None]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return an empty context: there are no notifications, so the caller has to poll."""
        return nullcontext()

    def close(self) -> None:
        """Release resources."""
        self._close()

    def _answer(self) -> object:
        try:
            return self._ask()
        except OSError:
            return None


class NotificationSocket:
    """A netlink socket in one network namespace (None: that of the calling thread) whose queue a thread empties."""

    def __init__(self, protocol: int, queue_bytes: int, namespace: str | None = None) -> None:
        """Open the socket, which is not bound yet. Raises OSError without permission."""
        with in_namespace(namespace):
            self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, queue_bytes)

    def datagrams(self) -> Iterator[bytes | None]:
        """Yield all queued datagrams, and None where the kernel had to drop some."""
        while True:
            try:
                data = self.socket.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                yield None
            else:
                yield data

    @contextmanager
    def listening(self, name: str, drain: Callable[[], bool], notice: Callable[[], None]) -> Iterator[None]:
        """While the block runs, a thread calls `drain` when datagrams are queued, and `notice` if it returns True."""
        stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            with in_background(name, partial(self._listen, stop, drain, notice), partial(os.eventfd_write, stop, 1)):
                yield
        finally:
            os.close(stop)

    def _listen(self, stop: int, drain: Callable[[], bool], notice: Callable[[], None]) -> None:
        poll, rest = select.poll(), select.poll()
        poll.register(self.socket, select.POLLIN)
        poll.register(stop, select.POLLIN)
        rest.register(stop, select.POLLIN)
        while not any(fd == stop for fd, _ in poll.poll()):
            if drain():
                notice()
            if rest.poll(_PAUSE * 1000):
                return


class NftablesMonitor:
    """Receives notifications of all transactions in one network namespace (None: that of the calling thread)."""

    interval = math.inf

    def __init__(self, concern: RuleScope, families: Sequence[IPFamily], namespace: str | None = None) -> None:
        """Subscribe to notifications. Raises OSError without nf_tables or without permission."""
        self._concern = concern
        self._marks = tuple(name.encode() + b"\0" for name in concern.tables)
        self._families = frozenset(families)
        self._notices = NotificationSocket(_NETLINK_NETFILTER, _QUEUE, namespace)
        self._pass_over_own()
        bind_own_port(self._notices.socket)
        self._member(True)
        self._netlink = NfNetlink(namespace)
        self._lock = threading.Lock()
        self._found: Counter[IPFamily] = Counter()
        self._counted: set[IPFamily] = set()
        """Families of the present transaction that count."""
        self._touched: dict[IPFamily, set[TouchedPart] | None] = {}
        """By the changes that were found; None: they may have changed anything."""
        self._looked_at: Mapping[IPFamily, set[TouchedPart] | None] = {}
        self._notice: Callable[[], None] = lambda: None

    def look(self) -> Mapping[IPFamily, int]:
        """Return the number of foreign changes since the last call, by family. Each transaction counts once."""
        with self._lock:
            if self._found:
                # The kernel notifies of a large transaction in many pieces, and the first ones wake the caller.
                with suppress(OSError):
                    self._netlink.wait_for_transaction()
                self._receive(_QUEUE_DATAGRAMS)
            found, self._found = self._found, Counter()
            self._looked_at, self._touched = self._touched, {}
            self._counted.clear()
        return found

    def touched(self, family: IPFamily) -> frozenset[TouchedPart] | None:
        """Return what others touched in the changes of the last `look`; None: they may have changed anything."""
        names = self._looked_at.get(family, set())
        return None if names is None else frozenset(names)

    def listening(self, notice: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which a thread listens and calls `notice` after changes."""
        self._notice = notice
        return self._notices.listening("nftables-monitor", self._drain, notice)

    def close(self) -> None:
        """Close the sockets. Not while `listening`."""
        self._notices.socket.close()
        self._netlink.close()

    @contextmanager
    def writing(self) -> Iterator[OwnTransactions]:
        """Return a context for our own writes, in which the subscription is suspended.

        With a listener, the kernel formats each element, which triples the time of a first sync. The generation of
        the ruleset reveals afterwards whether others wrote too.
        """
        own, before = OwnTransactions(), self._netlink.generation()
        # A change by others that is counted already must not notify after the subscription has ended.
        self._netlink.wait_for_transaction()
        self._member(False)
        try:
            yield own
        finally:
            self._member(True)
        # Who wrote what is not known, so it may have been to any family. After a failure all is read anyway.
        if self._netlink.generation() - before > own.transactions:
            with self._lock:
                self._lost_track()
            self._notice()

    def _drain(self) -> bool:
        """Process queued notifications; return True if `look` has changes to return."""
        with self._lock:
            self._receive(_MOST_DATAGRAMS)
            return bool(self._found)

    def _receive(self, most: int) -> None:
        for data in itertools.islice(self._notices.datagrams(), most):
            if data is None:
                self._lost_track()
            else:
                self._take(data)

    def _lost_track(self) -> None:
        """Note changes of which nothing is known."""
        self._found.update(self._families)
        self._touched.update(dict.fromkeys(self._families))

    def _take(self, data: bytes) -> None:
        length, kind, _, _, _ = _HEADER.unpack_from(data)
        if kind == _SUBSYSTEM | _NEW_GENERATION:
            # The end of a transaction.
            self._counted.clear()
        elif any(mark in data for mark in self._marks):
            offset = 0
            while offset + _HEADER.size + 4 <= len(data) and length >= _HEADER.size:
                self._see(data[offset + _HEADER.size : offset + length], kind & 0xFF)
                offset += (length + 3) & ~3
                if offset + _HEADER.size <= len(data):
                    length, kind, _, _, _ = _HEADER.unpack_from(data, offset)

    def _see(self, message: bytes, kind: int) -> None:
        """Process one message of another program."""
        family = _FAMILIES.get(message[0])
        if family not in self._families or (family in self._counted and self._touched.get(family, ()) is None):
            return
        table = text_attribute(message, 4, 1)
        if table not in self._concern.tables:
            return
        chain = text_attribute(message, 4, _CHAIN_ATTRIBUTE[kind]) if kind in _CHAIN_ATTRIBUTE else None
        if chain is not None and not self._concern.chain(table, chain):
            return
        if kind in _SET_ATTRIBUTE:
            self._touch(family, TouchedPart(table, set=text_attribute(message, 4, _SET_ATTRIBUTE[kind])))
        else:
            self._touch(family, None if chain is None else TouchedPart(table, chain))
        if family not in self._counted:
            self._counted.add(family)
            self._found[family] += 1

    def _touch(self, family: IPFamily, part: TouchedPart | None) -> None:
        """Note what others touched; None: it may be anything."""
        known = self._touched.setdefault(family, set())
        if known is None:
            return
        if part is None or (part not in known and len(known) >= MOST_TOUCHED):
            self._touched[family] = None
        else:
            known.add(part)

    def _member(self, join: bool) -> None:
        option = _ADD_MEMBERSHIP if join else _DROP_MEMBERSHIP
        self._notices.socket.setsockopt(_SOL_NETLINK, option, _GROUP_NFTABLES)

    def _pass_over_own(self) -> None:
        """Attach a filter that drops notifications of this process's own sockets."""
        # Words of a message are the machine's, a filter reads them as the network's.
        mask, ports = socket.htonl(PORTS_MASK), socket.htonl(PORTS)
        writer = 12
        code = (
            (0x20, 0, 0, writer),
            (0x54, 0, 0, mask),
            (0x15, 0, 1, ports),
            (0x06, 0, 0, 0),
            (0x06, 0, 0, 0xFFFFFFFF),
        )
        attach_filter(self._notices.socket, code)


class LegacyTableSizes:
    """The sizes of iptables-legacy's tables, which change when rules or chains are added or removed.

    A rule replaced by one of the same length is only found by the next read-back. Opens its sockets in the namespace
    of the calling thread.
    """

    _TABLES = ("nat", "filter", "mangle")
    _LEVELS = {IPFamily.IPV4: socket.IPPROTO_IP, IPFamily.IPV6: socket.IPPROTO_IPV6}
    _GET_INFO = 64
    _INFO = struct.Struct("=32s13I")

    def __init__(self, families: Sequence[IPFamily], namespace: str | None = None) -> None:
        """Open the sockets. Raises OSError without CAP_NET_RAW."""
        with in_namespace(namespace):
            self._sockets = {
                family: socket.socket(
                    int(FAMILY_NUMBERS[family.value]), socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW
                )
                for family in families
            }
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self) -> tuple[tuple[int, ...], ...]:
        """Return entries and bytes of each table. Raises OSError."""
        return tuple(self._ask(family, table) for family in self._sockets for table in self._TABLES)

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._sockets.values():
            sock.close()

    def _ask(self, family: IPFamily, table: str) -> tuple[int, ...]:
        # The name goes in and the answer comes out in one buffer, which Python's getsockopt cannot do.
        held = ctypes.create_string_buffer(self._INFO.pack(table.encode(), *[0] * 13), self._INFO.size)
        size = ctypes.c_uint32(self._INFO.size)
        level, sock = self._LEVELS[family], self._sockets[family]
        if self._libc.getsockopt(sock.fileno(), level, self._GET_INFO, held, ctypes.byref(size)):
            number = ctypes.get_errno()
            raise OSError(number, f"table {table} of iptables-legacy: {os.strerror(number)}")
        # Behind the name: hooks, their entries and defaults (5 each), number of entries, size.
        return tuple(self._INFO.unpack(held.raw)[-2:])


def watch_rules(concern: RuleScope, families: Sequence[IPFamily], *, iptables: bool) -> ForeignChanges:
    """Return the best available way to notice changes that others make to rules, for the calling thread's namespace.

    `iptables` says that the rules are written with iptables, whose legacy variant sends no notifications.
    """
    try:
        if iptables and default_variant(IPFamily.IPV4) == "legacy":
            sizes = LegacyTableSizes(families)
            return RulePoller(sizes, families, sizes.close)
        return NftablesMonitor(concern, families)
    except OSError as error:
        _LOGGER.warning("the kernel sends no notifications of changed rules (%s): the rules are polled instead", error)
        netlink = NfNetlink()
        return RulePoller(netlink.generation, families, netlink.close)
