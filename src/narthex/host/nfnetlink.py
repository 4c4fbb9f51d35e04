"""nf_tables over netlink, for what is not nft text: one batch is one kernel transaction; dumps are read as they come.

Message and attribute numbers are those of linux/netfilter/nfnetlink.h and nf_tables.h. All else about tables is left
to libnftables (`narthex.host.nft`).
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
from collections.abc import Iterator, Sequence

from narthex.host import netns

_NETLINK_NETFILTER = 12
_SOL_NETLINK, _NETLINK_CAP_ACK, _NETLINK_EXT_ACK = 270, 10, 11
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_DUMP, _NLM_F_CREATE, _NLM_F_APPEND = 0x1, 0x4, 0x300, 0x400, 0x800
_NLM_F_DUMP_INTR, _NLM_F_ACK_TLVS = 0x10, 0x200
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_BATCH_BEGIN, _BATCH_END = 16, 17
_SUBSYSTEM = 10
_ERR_MESSAGE, _ERR_OFFSET = 1, 2

DELETE_TABLE = 2
NEW_RULE, DELETE_RULE = 6, 8
NEW_ELEMENTS, GET_ELEMENTS, DELETE_ELEMENTS = 12, 13, 14
_GET_TABLE, _GET_CHAIN, _GET_GENERATION = 1, 4, 16
_CHAIN_NAME = 3

_FLAGS = {
    NEW_RULE: _NLM_F_REQUEST | _NLM_F_CREATE | _NLM_F_APPEND,
    NEW_ELEMENTS: _NLM_F_REQUEST | _NLM_F_CREATE,
}

FAMILY_NUMBERS = {4: socket.AF_INET, 6: socket.AF_INET6}
_HEADER = struct.Struct("=IHHII")
_OVERHEAD = _HEADER.size + 4
_MOST_PAYLOAD = 0xFFFF - 4
"""An attribute's length has 16 bits."""
_RECEIVE = 1 << 18
_WAIT_SECONDS = 30.0
_AT_ONCE = 256
"""Requests whose answers fit the receive buffer with ease."""


PORTS, PORTS_MASK = 1 << 31 | int.from_bytes(os.urandom(4)) & 0x7FFFFE00, 0xFFFFFE00
"""All sockets of ours in this process have netlink ports that are `PORTS` under the mask, so that a notification tells
whether a transaction was ours. Others have process numbers as ports, or random ones when those are taken."""
_next_port = itertools.count()


class NetlinkError(OSError):
    """The kernel refused. `message` is the number of the message in the batch that it named, `offset` the place in
    that message of the attribute that it complained about; each is None when it named none."""

    def __init__(self, number: int, said: str, message: int | None = None, offset: int | None = None) -> None:
        super().__init__(number, said or os.strerror(number))
        self.message = message
        self.offset = offset


class Interrupted(Exception):
    """The rules changed while they were read."""


def attribute(kind: int, payload: bytes) -> bytes:
    """One netlink attribute, padded to four bytes."""
    length = 4 + len(payload)
    return struct.pack("=HH", length, kind) + payload + bytes(-length % 4)


def bind_own_port(sock: socket.socket, groups: int = 0) -> None:
    """Bind to a port of this process's own range, and to multicast groups (a bit for each)."""
    for _ in range(~PORTS_MASK & 0xFFFFFFFF):
        try:
            sock.bind((PORTS | next(_next_port) & ~PORTS_MASK, groups))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise NetlinkError(errno.EADDRINUSE, "all netlink ports of this process are taken")


class NfNetlink:
    """A netlink socket of one network namespace. Not for several threads at once."""

    def __init__(self, namespace: str | None = None) -> None:
        with netns.entered(namespace):
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
        bind_own_port(self._socket)
        self._socket.settimeout(_WAIT_SECONDS)
        # Errors come without the failed request (it can be megabytes), but with the kernel's own words.
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        self._force(getattr(socket, "SO_RCVBUFFORCE", 33), 1 << 22)
        self._send_room = 0
        self._sequence = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close()

    def commit(self, family: int, messages: Sequence[tuple[int, bytes]]) -> None:
        """Send (message type, payload) as one batch: all or nothing. Raises NetlinkError, with the first message that
        failed. `family` is AF_INET or AF_INET6."""
        first = self._sequence + 1
        header = struct.pack(">BBH", socket.AF_UNSPEC, 0, _SUBSYSTEM)
        parts = [_HEADER.pack(_OVERHEAD, _BATCH_BEGIN, _NLM_F_REQUEST, first, 0), header]
        body = struct.pack(">BBH", family, 0, 0)
        for number, (kind, payload) in enumerate(messages, first + 1):
            # Only the last asks for an answer: a batch that fails names the message anyway.
            flags = _FLAGS.get(kind, _NLM_F_REQUEST) | (_NLM_F_ACK if number == first + len(messages) else 0)
            parts += [_HEADER.pack(_OVERHEAD + len(payload), _SUBSYSTEM << 8 | kind, flags, number, 0), body, payload]
        end = first + len(messages) + 1
        parts += [_HEADER.pack(_OVERHEAD, _BATCH_END, _NLM_F_REQUEST, end, 0), header]
        self._sequence = end
        self._send(b"".join(parts))
        self._await_commit(first, first + len(messages))

    def _await_commit(self, first: int, last: int) -> None:
        while True:
            for kind, flags, sequence, data in self._receive():
                if kind != _NLMSG_ERROR or not first <= sequence <= last + 1:
                    continue
                error = _error(flags, data, sequence - first - 1)
                if error is not None:
                    raise error
                if sequence == last:
                    return

    def dump_elements(self, family: int, table: str, name: str) -> Iterator[tuple[bytes, int, int]]:
        """All elements of a set, as (buffer, start, end) of each NFTA_SET_ELEM_LIST_ELEMENTS payload.

        Raises NetlinkError (ENOENT when there is no such set) and Interrupted.
        """
        payload = attribute(1, table.encode() + b"\0") + attribute(2, name.encode() + b"\0")
        sequence = self._request(GET_ELEMENTS, family, payload, _NLM_F_DUMP)
        interrupted = False
        while True:
            for kind, flags, number, data in self._receive():
                if number != sequence:
                    continue
                interrupted = interrupted or bool(flags & _NLM_F_DUMP_INTR)
                if kind == _NLMSG_ERROR:
                    error = _error(flags, data, None)
                    if error is not None and error.errno == errno.EINTR:
                        raise Interrupted
                    if error is not None:
                        raise error
                elif kind == _NLMSG_DONE:
                    if interrupted:
                        raise Interrupted
                    return
                else:
                    yield from _lists(data)

    def generation(self) -> int:
        """The number of the ruleset; every transaction of anybody in the namespace raises it."""
        sequence = self._request(_GET_GENERATION, socket.AF_UNSPEC, b"", 0)
        for data in self._answers(sequence):
            return int(struct.unpack_from(">I", data, 4 + 4)[0])
        raise NetlinkError(errno.EPROTO, "no generation in the answer")

    def has_table(self, family: int, table: str) -> bool:
        """Whether the table is there."""
        sequence = self._request(_GET_TABLE, family, attribute(1, table.encode() + b"\0"), 0)
        try:
            for _ in self._answers(sequence):
                return True
        except NetlinkError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return False

    def tables(self, family: int) -> list[str]:
        """Names of the family's tables."""
        sequence = self._request(_GET_TABLE, family, b"", _NLM_F_DUMP)
        return [text_attribute(data, 4, 1) for data in self._answers(sequence)]

    def chains(self, family: int) -> list[tuple[str, str]]:
        """Table and name of each chain of the family; it may be a look at two moments when somebody writes."""
        sequence = self._request(_GET_CHAIN, family, b"", _NLM_F_DUMP)
        return [(text_attribute(data, 4, 1), text_attribute(data, 4, _CHAIN_NAME)) for data in self._answers(sequence)]

    def _answers(self, sequence: int) -> Iterator[bytes]:
        while True:
            for kind, flags, number, data in self._receive():
                if number != sequence:
                    continue
                if kind == _NLMSG_ERROR:
                    error = _error(flags, data, None)
                    if error is not None:
                        raise error
                    return
                if kind == _NLMSG_DONE:
                    return
                yield data

    def dump(self, subsystem: int, kind: int, family: int, payload: bytes = b"") -> Iterator[bytes]:
        """The attributes of each message of a dump, of any subsystem of netfilter. `payload` may narrow it.

        Raises NetlinkError, and Interrupted at the end of what could be had.
        """
        sequence = self._request(kind, family, payload, _NLM_F_DUMP, subsystem)
        interrupted = False
        while True:
            for found, flags, number, data in self._receive():
                if number != sequence:
                    continue
                interrupted = interrupted or bool(flags & _NLM_F_DUMP_INTR)
                if found not in (_NLMSG_ERROR, _NLMSG_DONE):
                    yield data[4:]
                    continue
                error = _error(flags, data, None)
                if error is not None and error.errno != errno.EINTR:
                    raise error
                if error is not None or interrupted:
                    raise Interrupted
                return

    def each(self, subsystem: int, kind: int, family: int, payloads: Sequence[bytes]) -> list[NetlinkError | None]:
        """Send one request for each payload; what the kernel said to each, None for yes."""
        answers: list[NetlinkError | None] = []
        for start in range(0, len(payloads), _AT_ONCE):
            some = payloads[start : start + _AT_ONCE]
            first = self._sequence + 1
            self._sequence += len(some)
            parts = []
            for number, payload in enumerate(some, first):
                flags = _NLM_F_REQUEST | _NLM_F_ACK
                parts.append(_HEADER.pack(_OVERHEAD + len(payload), subsystem << 8 | kind, flags, number, 0))
                parts += [struct.pack(">BBH", family, 0, 0), payload]
            self._send(b"".join(parts))
            said: dict[int, NetlinkError | None] = {}
            while len(said) < len(some):
                for found, flags, number, data in self._receive():
                    if found == _NLMSG_ERROR and first <= number <= self._sequence:
                        said[number] = _error(flags, data, None)
            answers += [said[number] for number in range(first, self._sequence + 1)]
        return answers

    def _request(self, kind: int, family: int, payload: bytes, flags: int, subsystem: int = _SUBSYSTEM) -> int:
        self._sequence += 1
        header = _HEADER.pack(
            _OVERHEAD + len(payload), subsystem << 8 | kind, _NLM_F_REQUEST | flags, self._sequence, 0
        )
        self._send(header + struct.pack(">BBH", family, 0, 0) + payload)
        return self._sequence

    def _send(self, data: bytes) -> None:
        """A batch has to be one datagram: what is sent in two is two transactions."""
        if len(data) + 4096 > self._send_room:
            self._send_room = max(1 << 20, len(data) + (len(data) >> 2) + 4096)
            self._force(getattr(socket, "SO_SNDBUFFORCE", 32), self._send_room)
        self._socket.sendto(data, (0, 0))

    def _force(self, option: int, size: int) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, option, size)

    def _receive(self) -> Iterator[tuple[int, int, int, bytes]]:
        """The messages of one datagram: type, flags, sequence number, payload."""
        try:
            data = self._socket.recv(_RECEIVE)
        except TimeoutError:
            raise NetlinkError(errno.ETIMEDOUT, f"the kernel did not answer within {_WAIT_SECONDS:.0f} s") from None
        offset = 0
        while offset + _HEADER.size <= len(data):
            length, kind, flags, sequence, _ = _HEADER.unpack_from(data, offset)
            if length < _HEADER.size:
                break
            yield kind, flags, sequence, data[offset + _HEADER.size : offset + length]
            offset += (length + 3) & ~3


def element_messages(table: str, name: str, elements: Iterator[bytes]) -> Iterator[tuple[bytes, int]]:
    """Payloads of NEWSETELEM or DELSETELEM messages, none longer than an attribute may be, and how many elements each
    holds. `elements` are NFTA_LIST_ELEM attributes."""
    head = attribute(1, table.encode() + b"\0") + attribute(2, name.encode() + b"\0")
    held: list[bytes] = []
    size = 0
    for one in elements:
        if size + len(one) > _MOST_PAYLOAD:
            yield head + attribute(3 | 0x8000, b"".join(held)), len(held)
            held, size = [], 0
        held.append(one)
        size += len(one)
    if held:
        yield head + attribute(3 | 0x8000, b"".join(held)), len(held)


def failed_element(payload: bytes, offset: int) -> int | None:
    """The number of the element in a payload of `element_messages` that holds the byte `offset` of its message."""
    offset -= _OVERHEAD
    at = 0
    while at + 4 <= len(payload):
        length, kind = struct.unpack_from("=HH", payload, at)
        if kind & 0x3FFF == 3:
            number, inner = 0, at + 4
            while inner + 4 <= at + length:
                size = (struct.unpack_from("=H", payload, inner)[0] + 3) & ~3
                if inner <= offset < inner + size:
                    return number
                number, inner = number + 1, inner + size
            return None
        at += (length + 3) & ~3
    return None


def text_attribute(data: bytes, at: int, wanted: int) -> str:
    """The text of the first attribute of a kind among those that begin at `at`; empty when there is none."""
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if kind & 0x3FFF == wanted:
            return data[at + 4 : at + length].rstrip(b"\0").decode("utf-8", "replace")
        at += max(4, (length + 3) & ~3)
    return ""


def _lists(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    at = 4
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if kind & 0x3FFF == 3:
            yield data, at + 4, at + length
        at += max(4, (length + 3) & ~3)


def _error(flags: int, data: bytes, message: int | None) -> NetlinkError | None:
    """What an NLMSG_ERROR says; None for an acknowledgement."""
    number = -struct.unpack_from("=i", data, 0)[0]
    if number == 0:
        return None
    said, offset = "", None
    if flags & _NLM_F_ACK_TLVS:
        at = 4 + _HEADER.size
        while at + 4 <= len(data):
            length, kind = struct.unpack_from("=HH", data, at)
            if kind == _ERR_MESSAGE:
                said = data[at + 4 : at + length].rstrip(b"\0").decode("utf-8", "replace")
            elif kind == _ERR_OFFSET:
                offset = struct.unpack_from("=I", data, at + 4)[0]
            at += max(4, (length + 3) & ~3)
    words = f"{os.strerror(number)} ({said})" if said else os.strerror(number)
    return NetlinkError(number, words, message, offset)
