"""Codec for the set elements of nf_tables netlink messages.

The key of a set determines the length of each part. A layout is therefore built once per set and then filled for every
element with a single `struct` call. Parts of a concatenated key are padded to four bytes. Ports are big-endian, a slot is a
32-bit number in host byte order, as `numgen` leaves it in its register.

Attribute numbers are those of linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import ipaddress
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import islice, repeat
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import Any

from narthex.model import IPFamily, Protocol, ipv6_text, networks_between
from narthex.netfilter import ast
from narthex.netfilter.netlink.attributes import NESTED, attribute, attributes

LIST_ELEM = 1
ELEM_KEY, ELEM_DATA, ELEM_FLAGS, ELEM_EXPR, ELEM_KEY_END, ELEM_EXPRESSIONS = 1, 2, 3, 7, 10, 11
DATA_VALUE, DATA_VERDICT = 1, 2
VERDICT_CODE, VERDICT_CHAIN = 1, 2
EXPR_NAME, EXPR_DATA = 1, 2
COUNTER_BYTES, COUNTER_PACKETS = 1, 2

_CODES: dict[type, int] = {ast.DropPacket: 0, ast.Accept: 1, ast.Jump: -3, ast.Goto: -4, ast.Return: -5}
PROTOCOL_NUMBERS = {protocol.lower: protocol.number for protocol in Protocol}

MISFITS = (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error)
"""Exceptions raised by atoms of the wrong type or size."""

ENDPOINT: ast.Key = (ast.Field.DADDR, ast.Field.DPORT)
"""The value of a map to endpoints."""

Encoder = Callable[[Iterable[tuple[ast.ElementKey, ast.ElementData]]], Iterator[bytes]]


def is_config_set(one: ast.Set) -> bool:
    """Return True for a plain set of networks, which is read and written as nft text.

    The kernel encodes an interval of a single field in a form that depends on its version, and nft knows all of them.
    """
    return one.interval and len(one.key) == 1


def encoder(one: ast.Set, family: IPFamily) -> Encoder:
    """Return a function that encodes (key, data) pairs as NFTA_LIST_ELEM attributes, with data if the set is a map.

    The function raises Unprintable for an element that does not fit the set.
    """
    return _encoder(one.name, one.key, one.data, one.interval, family)


def key_encoder(one: ast.Set, family: IPFamily) -> Encoder:
    """Return a function like that of `encoder` that encodes only the keys, for deletions."""
    encode = _encoder(one.name, one.key, "", one.interval, family)
    return lambda pairs: encode((key, None) for key, _ in pairs)


@lru_cache(maxsize=256)
def _encoder(name: str, key: ast.Key, data: str, interval: bool, family: IPFamily) -> Encoder:
    """Return an encoder. Layouts are cached, so that changing one element does not need to build one."""
    if interval:
        return _interval_encoder(name, key, data, family)
    if data == "verdict":
        return _verdict_encoder(name, key, family)
    return plain_encoder(name, key, ENDPOINT if data == "endpoint" else (), family)


def plain_encoder(name: str, key_parts: ast.Key, data_parts: ast.Key, family: IPFamily) -> Encoder:
    """Return an encoder for sets, and for maps to an address and a port, which have one fixed layout."""
    key_size, data_size = size_of(key_parts, family), size_of(data_parts, family)
    headers = list(nested_headers(key_size, data_size))
    first, second = headers[:6], headers[6:]
    layout = struct.Struct(
        "=" + "H" * len(first) + layout_of(key_parts, family) + "H" * len(second) + layout_of(data_parts, family)
    )
    fill, aim = fillers(key_parts, family), fillers(data_parts, family)
    before, between = [repeat(each) for each in first], [repeat(each) for each in second]

    def rows(pairs: Sequence[tuple[ast.ElementKey, ast.ElementData]]) -> list[bytes]:
        """Return one netlink attribute for each element; all keys and data have a fixed size."""
        keys, data = zip(*pairs, strict=True)
        return list(map(layout.pack, *before, *columns(fill, keys), *between, *columns(aim, data if aim else ())))

    return partial(_encode, name, rows)


Rows = Callable[[Sequence[tuple[ast.ElementKey, ast.ElementData]]], list[bytes]]
"""Encodes elements; raises one of MISFITS if one of them does not fit."""


def _encode(name: str, rows: Rows, pairs: Iterable[tuple[ast.ElementKey, ast.ElementData]]) -> Iterator[bytes]:
    """Encode elements in batches. An initial load has a hundred thousand, and C code handles whole columns of them."""
    rest = iter(pairs)
    while some := list(islice(rest, _BATCH)):
        try:
            made = rows(some)
        except MISFITS:
            # One by one, to find the element that does not fit.
            made = [_encode_one(name, rows, pair) for pair in some]
        yield from made


_BATCH = 1024


def _encode_one(name: str, rows: Rows, pair: tuple[ast.ElementKey, ast.ElementData]) -> bytes:
    try:
        return rows([pair])[0]
    except MISFITS as error:
        raise ast.Unprintable(f"element {pair[0]!r} does not fit the set {name}: {error}") from None


def columns(put_of: list[Filler], rows: Sequence[Any]) -> list[Iterable[bytes | int]]:
    """Convert the atoms of the rows, column by column, to arguments of `struct`. Raises ValueError for a row of another length."""
    if not put_of:
        return []
    return [put(column) for put, column in zip(put_of, list(zip(*rows, strict=True)), strict=True)]


def nested_headers(key_size: int, data_size: int) -> Iterator[int]:
    """Yield lengths and types of the attributes around a key and its data, in the order of the message."""
    total = 4 + 4 + 4 + key_size + (4 + 4 + data_size if data_size else 0)
    yield from (total, LIST_ELEM | NESTED, 8 + key_size, ELEM_KEY | NESTED, 4 + key_size, DATA_VALUE)
    if data_size:
        yield from (8 + data_size, ELEM_DATA | NESTED, 4 + data_size, DATA_VALUE)


def _verdict_encoder(name: str, key_parts: ast.Key, family: IPFamily) -> Encoder:
    size = size_of(key_parts, family)
    layout = struct.Struct("=6H" + layout_of(key_parts, family))
    fill = fillers(key_parts, family)
    tail_of = cache(_verdict_attribute)

    def rows(pairs: Sequence[tuple[ast.ElementKey, ast.ElementData]]) -> list[bytes]:
        """Return one netlink attribute for each element; its length depends on the name in its verdict."""
        keys, data = zip(*pairs, strict=True)
        tails = list(map(tail_of, data))
        heads = map(
            layout.pack,
            [12 + size + len(tail) for tail in tails],
            repeat(LIST_ELEM | NESTED),
            repeat(8 + size),
            repeat(ELEM_KEY | NESTED),
            repeat(4 + size),
            repeat(DATA_VALUE),
            *columns(fill, keys),
        )
        return list(map(operator.add, heads, tails))

    return partial(_encode, name, rows)


def _verdict_attribute(verdict: ast.ElementData) -> bytes:
    code = _CODES.get(type(verdict))
    if code is None:
        raise ast.Unprintable(f"{verdict!r} is not valid in a verdict map")
    payload = attribute(VERDICT_CODE, struct.pack(">i", code))
    if isinstance(verdict, ast.Jump | ast.Goto):
        payload += attribute(VERDICT_CHAIN, verdict.chain.encode("ascii") + b"\0")
    return attribute(ELEM_DATA | NESTED, attribute(DATA_VERDICT | NESTED, payload))


def _interval_encoder(name: str, key_parts: ast.Key, data: str, family: IPFamily) -> Encoder:
    """Return an encoder for concatenations with networks, which have a first and a last key, both included."""
    layout = struct.Struct("=" + layout_of(key_parts, family))
    fill = fillers(key_parts, family)
    if data or len(key_parts) == 1:
        raise ast.Unprintable(f"set {name}: only concatenated sets of networks are supported")

    def packed(keys: Sequence[ast.ElementKey]) -> list[bytes]:
        """Return the bytes of each key."""
        return list(map(layout.pack, *columns(fill, keys)))

    def rows(pairs: Sequence[tuple[ast.ElementKey, ast.ElementData]]) -> list[bytes]:
        """Return one netlink attribute with the first and last key for each interval."""
        ends = [[_ends(atom) for atom in key] for key, _ in pairs]
        low, high = (packed([tuple([end[side] for end in key]) for key in ends]) for side in (0, 1))
        return [
            attribute(
                LIST_ELEM | NESTED,
                attribute(ELEM_KEY | NESTED, attribute(DATA_VALUE, first))
                + attribute(ELEM_KEY_END | NESTED, attribute(DATA_VALUE, last)),
            )
            for first, last in zip(low, high, strict=True)
        ]

    return partial(_encode, name, rows)


def _ends(atom: ast.Atom) -> tuple[ast.Atom, ast.Atom]:
    if isinstance(atom, str) and "/" in atom:
        net = ipaddress.ip_network(atom)
        return str(net.network_address), str(net.broadcast_address)
    return atom, atom


def _part_size(part: ast.KeyPart, family: IPFamily) -> int:
    return family.host_bits // 8 if part in (ast.Field.SADDR, ast.Field.DADDR) else 4


def size_of(key: tuple[ast.KeyPart, ...], family: IPFamily) -> int:
    """Return the size of a key in bytes."""
    return sum(_part_size(part, family) for part in key)


def layout_of(key: tuple[ast.KeyPart, ...], family: IPFamily) -> str:
    """Return the `struct` format of a key. Ports are two bytes, so that one struct can contain both byte orders."""
    letters = {ast.Field.L4PROTO: "B3x", ast.Field.SPORT: "2s2x", ast.Field.DPORT: "2s2x"}
    text = ""
    for part in key:
        if isinstance(part, ast.Slot | ast.HashedFields):
            text += "I"
        elif part in (ast.Field.SADDR, ast.Field.DADDR):
            text += f"{family.host_bits // 8}s"
        elif part in letters:
            text += letters[part]
        else:
            raise ast.Unprintable(f"{part.value} has is not supported in elements")
    return text


_PORT = struct.Struct(">H")

Filler = Callable[[Iterable[Any]], Iterable[bytes | int]]
"""Converts the atoms of one column of keys to arguments of `struct`."""


def fillers(key: tuple[ast.KeyPart, ...], family: IPFamily) -> list[Filler]:
    """Return a filler for each part of a key. Per atom, only C code runs."""
    af = AF_INET if family is IPFamily.IPV4 else AF_INET6

    def filler(part: ast.KeyPart) -> Filler:
        """Return the function that converts values of one key part to what `struct.pack` takes."""
        if isinstance(part, ast.Slot | ast.HashedFields):
            return partial(map, int)
        if part in (ast.Field.SADDR, ast.Field.DADDR):
            return partial(map, inet_pton, repeat(af))
        if part is ast.Field.L4PROTO:
            return partial(map, PROTOCOL_NUMBERS.__getitem__)
        return partial(map, _PORT.pack)

    return [filler(part) for part in key]


_VERDICTS: dict[int, Callable[[str], ast.Verdict]] = {
    0: lambda _: ast.DropPacket(),
    1: lambda _: ast.Accept(),
    -3: ast.Jump,
    -4: ast.Goto,
    -5: lambda _: ast.Return(),
}
_PROTOCOL_NAMES = {number: name for name, number in PROTOCOL_NUMBERS.items()}


def decode_list(
    one: ast.Set, family: IPFamily, data: bytes | memoryview, start: int, end: int
) -> Iterator[tuple[ast.ElementKey, ast.ElementData, int]]:
    """Decode the payload of NFTA_SET_ELEM_LIST_ELEMENTS into key, data, and packet count (0 without a counter).

    A range of addresses that is not a single network yields several elements. Raises ValueError for data that does not fit the
    set.
    """
    read_key = _reader(one.key, family)
    read_data = _reader(ENDPOINT, family)
    key_size, data_size = size_of(one.key, family), size_of(ENDPOINT, family)
    for _, first, last in attributes(data, start, end):
        low: ast.ElementKey = ()
        high: ast.ElementKey | None = None
        value: ast.ElementData = None
        packets = 0
        for kind, at, stop in attributes(data, first, last):
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
    """Return the offset of the data in an attribute that contains one NFTA_DATA_VALUE."""
    if stop - at != 4 + size:
        raise ValueError(f"element of {stop - at - 4} bytes where {size} belong")
    return at + 4


@lru_cache(maxsize=256)
def _reader(key: tuple[ast.KeyPart, ...], family: IPFamily) -> Callable[[bytes | memoryview, int], ast.ElementKey]:
    layout = struct.Struct("=" + layout_of(key, family))

    def part_reader(part: ast.KeyPart) -> Callable[[bytes | int], ast.Atom]:
        """Return the function that converts one unpacked key part to its value."""
        if isinstance(part, ast.Slot | ast.HashedFields):
            return lambda raw: raw  # type: ignore[return-value]
        if part in (ast.Field.SADDR, ast.Field.DADDR):
            return _address_text if family is IPFamily.IPV6 else lambda raw: inet_ntop(AF_INET, raw)  # type: ignore[arg-type]
        if part is ast.Field.L4PROTO:
            return lambda raw: _PROTOCOL_NAMES.get(raw, raw)  # type: ignore[arg-type]
        return lambda raw: int.from_bytes(raw, "big")  # type: ignore[arg-type]

    readers = [part_reader(part) for part in key]

    def read(data: bytes | memoryview, offset: int) -> ast.ElementKey:
        """Return the key at an offset of the kernel's data."""
        return tuple([reader(raw) for reader, raw in zip(readers, layout.unpack_from(data, offset), strict=True)])

    return read


def _read_verdict(data: bytes | memoryview, start: int, end: int) -> ast.Verdict:
    code, chain = 0, ""
    for _, first, last in attributes(data, start, end):
        for kind, at, stop in attributes(data, first, last):
            if kind == VERDICT_CODE:
                code = struct.unpack_from(">i", data, at)[0]
            elif kind == VERDICT_CHAIN:
                chain = bytes(data[at:stop]).rstrip(b"\0").decode("ascii", "replace")
    if code not in _VERDICTS:
        raise ValueError(f"verdict {code}")
    return _VERDICTS[code](chain)


def _read_counter(data: bytes | memoryview, start: int, end: int) -> int:
    """Return the packet count of a counter expression, 0 for another expression."""
    for kind, first, last in attributes(data, start, end):
        if kind == EXPR_DATA:
            for inner, at, stop in attributes(data, first, last):
                if inner == COUNTER_PACKETS and stop - at == 8:
                    return int(struct.unpack_from(">Q", data, at)[0])
    return 0


def _networks(low: ast.ElementKey, high: ast.ElementKey) -> Iterator[ast.ElementKey]:
    """Yield the keys between two ends that differ in one part, an address."""
    apart = [index for index, (one, other) in enumerate(zip(low, high, strict=True)) if one != other]
    if len(apart) != 1 or not isinstance(low[apart[0]], str):
        raise ValueError(f"element {low!r} to {high!r} is no network")
    index = apart[0]
    for network in networks_between(str(low[index]), str(high[index])):
        yield (*low[:index], network, *low[index + 1 :])


def _address_text(raw: bytes | int) -> str:
    """Return an IPv6 address in the form of `narthex.model.net`, without dots in the last four bytes."""
    assert isinstance(raw, bytes)
    text = inet_ntop(AF_INET6, raw)
    return ipv6_text(raw) if "." in text else text
