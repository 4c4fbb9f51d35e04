"""Set elements out of the bytes of nf_tables netlink messages; the way in is `elements`. Pure."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_ntop

from narthex.model.net import IPFamily
from narthex.netfilter.ast.nodes import (
    Accept,
    Atom,
    DropPacket,
    ElementData,
    ElementKey,
    Field,
    Goto,
    Jump,
    KeyPart,
    Return,
    Set,
    Slot,
    Verdict,
)
from narthex.netfilter.binary.elements import (
    COUNTER_PACKETS,
    ELEM_DATA,
    ELEM_EXPR,
    ELEM_KEY,
    ELEM_KEY_END,
    ENDPOINT,
    EXPR_DATA,
    PROTOCOL_NUMBERS,
    VERDICT_CHAIN,
    VERDICT_CODE,
    attributes,
    layout_of,
    networks_between,
    size_of,
)

_VERDICTS: dict[int, Callable[[str], Verdict]] = {
    0: lambda _: DropPacket(),
    1: lambda _: Accept(),
    -3: Jump,
    -4: Goto,
    -5: lambda _: Return(),
}
_PROTOCOL_NAMES = {number: name for name, number in PROTOCOL_NUMBERS.items()}


def decode_list(
    one: Set, family: IPFamily, data: bytes | memoryview, start: int, end: int
) -> Iterator[tuple[ElementKey, ElementData, int]]:
    """The elements in the payload of NFTA_SET_ELEM_LIST_ELEMENTS: key, data and packets counted (0 without counter).

    A range of addresses that is no single network comes as several elements. Raises ValueError for bytes that do not
    fit the set.
    """
    read_key = _reader(one.key, family)
    read_data = _reader(ENDPOINT, family)
    key_size, data_size = size_of(one.key, family), size_of(ENDPOINT, family)
    for _, first, behind in attributes(data, start, end):
        low: ElementKey = ()
        high: ElementKey | None = None
        value: ElementData = None
        packets = 0
        for kind, at, stop in attributes(data, first, behind):
            if kind == ELEM_KEY:
                low = read_key(data, _value_offset(at, stop, key_size))
            elif kind == ELEM_KEY_END:
                high = read_key(data, _value_offset(at, stop, key_size))
            elif kind == ELEM_DATA and one.data == "verdict":
                value = _read_verdict(data, at, stop)
            elif kind == ELEM_DATA:
                value = read_data(data, _value_offset(at, stop, data_size))  # type: ignore[assignment]
            elif kind == ELEM_EXPR:
                packets = _read_counter(data, at, stop)
        if high is None or high == low:
            yield low, value, packets
        else:
            yield from ((key, value, packets) for key in _networks(low, high))


def _value_offset(at: int, stop: int, size: int) -> int:
    """Where the bytes begin inside an attribute that holds one NFTA_DATA_VALUE."""
    if stop - at != 4 + size:
        raise ValueError(f"element of {stop - at - 4} bytes where {size} belong")
    return at + 4


@lru_cache(maxsize=256)
def _reader(key: tuple[KeyPart, ...], family: IPFamily) -> Callable[[bytes | memoryview, int], ElementKey]:
    layout = struct.Struct("=" + layout_of(key, family))

    def part_reader(part: KeyPart) -> Callable[[bytes | int], Atom]:
        if isinstance(part, Slot):
            return lambda raw: raw  # type: ignore[return-value]
        if part in (Field.SADDR, Field.DADDR):
            return _address_text if family is IPFamily.IPV6 else lambda raw: inet_ntop(AF_INET, raw)  # type: ignore[arg-type]
        if part is Field.L4PROTO:
            return lambda raw: _PROTOCOL_NAMES.get(raw, raw)  # type: ignore[arg-type]
        return lambda raw: int.from_bytes(raw, "big")  # type: ignore[arg-type]

    readers = [part_reader(part) for part in key]

    def read(data: bytes | memoryview, offset: int) -> ElementKey:
        return tuple([reader(raw) for reader, raw in zip(readers, layout.unpack_from(data, offset), strict=True)])

    return read


def _read_verdict(data: bytes | memoryview, start: int, end: int) -> Verdict:
    code, chain = 0, ""
    for _, first, behind in attributes(data, start, end):
        for kind, at, stop in attributes(data, first, behind):
            if kind == VERDICT_CODE:
                code = struct.unpack_from(">i", data, at)[0]
            elif kind == VERDICT_CHAIN:
                chain = bytes(data[at:stop]).rstrip(b"\0").decode("ascii", "replace")
    if code not in _VERDICTS:
        raise ValueError(f"verdict {code}")
    return _VERDICTS[code](chain)


def _read_counter(data: bytes | memoryview, start: int, end: int) -> int:
    """Packets of a counter expression, 0 for another expression."""
    for kind, first, behind in attributes(data, start, end):
        if kind == EXPR_DATA:
            for inner, at, stop in attributes(data, first, behind):
                if inner == COUNTER_PACKETS and stop - at == 8:
                    return int(struct.unpack_from(">Q", data, at)[0])
    return 0


def _networks(low: ElementKey, high: ElementKey) -> Iterator[ElementKey]:
    """The keys between two ends when they differ in one part, an address."""
    apart = [index for index, (one, other) in enumerate(zip(low, high, strict=True)) if one != other]
    if len(apart) != 1 or not isinstance(low[apart[0]], str):
        raise ValueError(f"element {low!r} to {high!r} is no network")
    index = apart[0]
    for network in networks_between(str(low[index]), str(high[index])):
        yield (*low[:index], network, *low[index + 1 :])


def _address_text(raw: bytes | int) -> str:
    """IPv6 in the form of `narthex.model.net`, which never writes the last four bytes with dots."""
    assert isinstance(raw, bytes)
    text = inet_ntop(AF_INET6, raw)
    return str(ipaddress.IPv6Address(raw)) if "." in text else text
