"""nf_tables over netlink: batches as one kernel transaction, and dumps read as they arrive.

Message and attribute numbers are those of linux/netfilter/nfnetlink.h and nf_tables.h. nft text is run by libnftables
(`narthex.proxy.kernel.nftables`).
"""

from __future__ import annotations

import _socket as socket
import errno
import struct

from narthex.linux.netlink import (
    HEADER,
    NLM_F_ACK,
    NLM_F_DUMP,
    NLM_F_REQUEST,
    NLMSG_ERROR,
    Netlink,
    NetlinkError,
    attribute,
    error_of,
    text_attribute,
)
from narthex.netfilter.netlink.attributes import NESTED, attributes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NETLINK_NETFILTER = 12
NLM_F_EXCL, NLM_F_CREATE, _NLM_F_APPEND = 0x200, 0x400, 0x800
_BATCH_BEGIN, _BATCH_END = 16, 17
_SUBSYSTEM = 10

DELETE_TABLE = 2
NEW_RULE, DELETE_RULE = 6, 8
NEW_ELEMENTS, GET_ELEMENTS, DELETE_ELEMENTS = 12, 13, 14
NEW_UNTAKEN_ELEMENTS = 1 << 8 | NEW_ELEMENTS
"""For `commit`: as NEW_ELEMENTS, but an existing element is an error (EEXIST)."""
_GET_TABLE, _GET_CHAIN, _GET_RULE, _GET_SET, _GET_GENERATION = 1, 4, 7, 10, 16
_CHAIN_NAME = 3
_ELEMENTS = 3
"""NFTA_SET_ELEM_LIST_ELEMENTS."""

_FLAGS = {
    NEW_RULE: NLM_F_REQUEST | NLM_F_CREATE | _NLM_F_APPEND,
    NEW_ELEMENTS: NLM_F_REQUEST | NLM_F_CREATE,
    NEW_UNTAKEN_ELEMENTS: NLM_F_REQUEST | NLM_F_CREATE | NLM_F_EXCL,
}

FAMILY_NUMBERS = {4: socket.AF_INET, 6: socket.AF_INET6}
INET = 1
"""The family of tables for both IP families."""
_OVERHEAD = HEADER.size + 4
_MOST_PAYLOAD = 0xFFFF - 4
"""An attribute's length has 16 bits."""


class NfNetlink(Netlink):
    """A socket for netfilter. Not thread-safe."""

    def __init__(self, namespace: str | None = None) -> None:
        super().__init__(_NETLINK_NETFILTER, namespace)

    def commit(self, family: int, messages: Sequence[tuple[int, bytes]]) -> None:
        """Send (message type, payload) pairs as one atomic batch. `family` is AF_INET, AF_INET6, or INET.

        Raises NetlinkError with the first refused message.
        """
        first = self._sequence + 1
        header = struct.pack(">BBH", socket.AF_UNSPEC, 0, _SUBSYSTEM)
        parts = [HEADER.pack(_OVERHEAD, _BATCH_BEGIN, NLM_F_REQUEST, first, 0), header]
        body = struct.pack(">BBH", family, 0, 0)
        for number, (kind, payload) in enumerate(messages, first + 1):
            # Only the last asks for an answer: a batch that fails names the message anyway.
            flags = _FLAGS.get(kind, NLM_F_REQUEST) | (NLM_F_ACK if number == first + len(messages) else 0)
            parts += [
                HEADER.pack(_OVERHEAD + len(payload), _SUBSYSTEM << 8 | kind & 0xFF, flags, number, 0),
                body,
                payload,
            ]
        end = first + len(messages) + 1
        parts += [HEADER.pack(_OVERHEAD, _BATCH_END, NLM_F_REQUEST, end, 0), header]
        self._sequence = end
        self._send(b"".join(parts))
        self._await_commit(first, first + len(messages))

    def _await_commit(self, first: int, last: int) -> None:
        while True:
            for kind, flags, sequence, data in self._receive():
                if kind != NLMSG_ERROR or not first <= sequence <= last + 1:
                    continue
                error = error_of(flags, data, sequence - first - 1)
                if error is not None:
                    raise error
                if sequence == last:
                    return

    def wait_for_transaction(self) -> None:
        """Wait until listeners were notified of every transaction that `generation` counts.

        The kernel counts a transaction first and notifies of it last, and holds a lock meanwhile. An empty batch takes
        this lock, and has no other effect.
        """
        header = struct.pack(">BBH", socket.AF_UNSPEC, 0, _SUBSYSTEM)
        kinds = enumerate((_BATCH_BEGIN, _BATCH_END), self._sequence + 1)
        self._send(b"".join(HEADER.pack(_OVERHEAD, kind, NLM_F_REQUEST, number, 0) + header for number, kind in kinds))
        self._sequence += 2

    def dump_elements(self, family: int, table: str, name: str) -> Iterator[tuple[bytes, int, int]]:
        """Yield all elements of a set, as (buffer, start, end) of each NFTA_SET_ELEM_LIST_ELEMENTS payload.

        Raises NetlinkError (ENOENT without the set) and DumpInterrupted.
        """
        payload = _set_name(table, name)
        head = struct.pack(">BBH", family, 0, 0)
        for data in self.dump(_SUBSYSTEM << 8 | GET_ELEMENTS, head + payload):
            yield from _lists(data)

    def element(self, family: int, table: str, name: str, element: bytes) -> bytes | None:
        """Return one element of a set by its key (an NFTA_LIST_ELEM attribute); None if it is missing.

        The result is the payload of NFTA_SET_ELEM_LIST_ELEMENTS. Raises NetlinkError, also without the set.
        """
        payload = _set_name(table, name)
        sequence = self._request(GET_ELEMENTS, family, payload + attribute(_ELEMENTS | NESTED, element), NLM_F_ACK)
        found = None
        try:
            for data in self.answers(sequence):
                for held, start, end in _lists(data):
                    found = held[start:end]
        except NetlinkError as error:
            if error.errno != errno.ENOENT or not self.has_set(family, table, name):
                raise
        return found

    def has_set(self, family: int, table: str, name: str) -> bool:
        """Return True if the set and its table exist."""
        sequence = self._request(_GET_SET, family, _set_name(table, name), 0)
        try:
            for _ in self.answers(sequence):
                return True
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise
        return False

    def generation(self) -> int:
        """Return the generation of the ruleset, which every transaction in the namespace increases."""
        return int(struct.unpack_from(">I", self.first(_SUBSYSTEM, _GET_GENERATION), 4)[0])

    def tables(self, family: int) -> list[str]:
        """Return the names of the family's tables."""
        sequence = self._request(_GET_TABLE, family, b"", NLM_F_DUMP)
        return [text_attribute(data, 4, 1) for data in self.answers(sequence)]

    def chains(self, family: int) -> list[tuple[str, str]]:
        """Return table and name of each chain of the family; inconsistent if others write meanwhile."""
        sequence = self._request(_GET_CHAIN, family, b"", NLM_F_DUMP)
        return [(text_attribute(data, 4, 1), text_attribute(data, 4, _CHAIN_NAME)) for data in self.answers(sequence)]

    def rule_count(self, family: int, table: str, chain: str) -> int:
        """Return the number of rules of a chain; 0 if it does not exist. Raises NetlinkError and DumpInterrupted."""
        return sum(1 for _ in self.entries(_SUBSYSTEM, _GET_RULE, family, _set_name(table, chain)))

    def entries(self, subsystem: int, kind: int, family: int, payload: bytes = b"") -> Iterator[bytes]:
        """Yield the attributes of each message of a dump of any netfilter subsystem. `payload` may filter it.

        Raises NetlinkError, and DumpInterrupted at the end.
        """
        head = struct.pack(">BBH", family, 0, 0)
        for data in self.dump(subsystem << 8 | kind, head + payload):
            yield data[4:]

    def first(self, subsystem: int, kind: int) -> bytes:
        """Return the attributes of the one message that answers a request of any netfilter subsystem. Raises NetlinkError."""
        for data in self.answers(self.request(subsystem << 8 | kind, struct.pack(">BBH", socket.AF_UNSPEC, 0, 0))):
            return data[4:]
        raise NetlinkError(errno.EPROTO, "no message in the answer")

    def every(
        self, subsystem: int, kind: int, family: int, payloads: Sequence[bytes], flags: int = 0
    ) -> list[NetlinkError | None]:
        """Send one request for each payload; return the kernel's error for each, None for success."""
        head = struct.pack(">BBH", family, 0, 0)
        return self.each(subsystem << 8 | kind, [head + payload for payload in payloads], flags)

    def _request(self, kind: int, family: int, payload: bytes, flags: int) -> int:
        return self.request(_SUBSYSTEM << 8 | kind, struct.pack(">BBH", family, 0, 0) + payload, flags)


def _set_name(table: str, name: str) -> bytes:
    """Return the attributes that name a set of a table; those of a chain's rules have the same numbers."""
    return attribute(1, table.encode() + b"\0") + attribute(2, name.encode() + b"\0")


def element_messages(table: str, name: str, elements: Iterator[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield payloads of NEWSETELEM or DELSETELEM messages, each with its number of elements.

    `elements` are NFTA_LIST_ELEM attributes. A payload fits the 16-bit length of an attribute.
    """
    head = _set_name(table, name)
    held: list[bytes] = []
    size = 0
    for one in elements:
        if size + len(one) > _MOST_PAYLOAD:
            yield head + attribute(_ELEMENTS | NESTED, b"".join(held)), len(held)
            held, size = [], 0
        held.append(one)
        size += len(one)
    if held:
        yield head + attribute(_ELEMENTS | NESTED, b"".join(held)), len(held)


def failed_element(payload: bytes, offset: int) -> int | None:
    """Return the index of the element that contains byte `offset` of a message of `element_messages`."""
    offset -= _OVERHEAD
    for _, start, end in _lists(payload, 0):
        for number, (_, first, last) in enumerate(attributes(payload, start, end)):
            if first - 4 <= offset < last + -last % 4:
                return number
        return None
    return None


def _lists(data: bytes, at: int = 4) -> Iterator[tuple[bytes, int, int]]:
    """Yield (buffer, start, end) of each list of elements among the attributes from an offset on."""
    return ((data, start, end) for kind, start, end in attributes(data, at, strict=False) if kind == _ELEMENTS)
