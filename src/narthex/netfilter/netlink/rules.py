"""Encoder for rules that rewrite the destination by a map, as expressions of nf_tables netlink messages.

All other rules are written as nft text. These cannot be: nft 1.0.6 accepts `dnat to … map @endpoints` only in the
transaction that declares the map. For a map read from the kernel it does not know that `th dport` is a raw field, expects a
protocol before it, and fails ("conflicting protocols specified: ip vs. th"). The expressions here are those that nft itself
generates, so nft lists and reads them like its own.

Numbers are those of linux/netfilter/nf_tables.h. Registers are the 32-bit ones.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from narthex.model import IPFamily
from narthex.netfilter.ast import (
    Chain,
    Compare,
    DnatMap,
    Expression,
    Field,
    HashedFields,
    InSet,
    Key,
    Rule,
    Slot,
    Unprintable,
)
from narthex.netfilter.netlink.attributes import NESTED, attribute
from narthex.netfilter.netlink.elements import LIST_ELEM, PROTOCOL_NUMBERS, size_of

_RULE_TABLE, _RULE_CHAIN, _RULE_EXPRESSIONS = 1, 2, 4
_EXPR_NAME, _EXPR_DATA = 1, 2
_REGISTER = 8
_META_L4PROTO = 16
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_RANDOM = 1
_JENKINS = 0
_EQUAL = 0
_DATA_VALUE = 1
_DNAT = 1
_FAMILY_NUMBERS = {IPFamily.IPV4: 2, IPFamily.IPV6: 10}
_ADDRESS_OFFSETS = {
    (IPFamily.IPV4, Field.SADDR): 12,
    (IPFamily.IPV4, Field.DADDR): 16,
    (IPFamily.IPV6, Field.SADDR): 8,
    (IPFamily.IPV6, Field.DADDR): 24,
}
_PORT_OFFSETS = {Field.SPORT: 0, Field.DPORT: 2}


def needs_bytecode(chain: Chain) -> bool:
    """Return True if the chain has rules that cannot be written as nft text."""
    return any(isinstance(expression, DnatMap) for rule in chain.rules for expression in rule.expressions)


def chain_payload(table: str, chain: str) -> bytes:
    """Return the payload of a DELRULE message that empties a chain."""
    return attribute(_RULE_TABLE, table.encode("ascii") + b"\0") + attribute(_RULE_CHAIN, chain.encode("ascii") + b"\0")


def rule_payload(table: str, chain: str, rule: Rule, family: IPFamily) -> bytes:
    """Return the payload of a NEWRULE message. Raises Unprintable for any other kind of rule."""
    expressions = b"".join(
        attribute(LIST_ELEM | NESTED, one) for expression in rule.expressions for one in _encoded(expression, family)
    )
    return chain_payload(table, chain) + attribute(_RULE_EXPRESSIONS | NESTED, expressions)


def _encoded(one: Expression, family: IPFamily) -> Iterator[bytes]:
    match one:
        case Compare(Field.L4PROTO, (str() as protocol,), False) if protocol in PROTOCOL_NUMBERS:
            yield _load(Field.L4PROTO, _REGISTER, family)
            value = attribute(_DATA_VALUE, bytes([PROTOCOL_NUMBERS[protocol]]))
            operands = _number(1, _REGISTER) + _number(2, _EQUAL) + attribute(3 | NESTED, value)
            yield _named("cmp", operands)
        case InSet(key, name, negate):
            yield from _loaded(key, family)
            inverted = ((5, 1),) if negate else ()
            yield _expression("lookup", (1, name), (2, _REGISTER), *inverted)
        case DnatMap(key, name):
            yield from _loaded(key, family)
            words = family.host_bits // 32
            # The lookup stores address and port where the key started.
            yield _expression("lookup", (1, name), (2, _REGISTER), (3, _REGISTER))
            where = (3, _REGISTER), (5, _REGISTER + words)
            yield _expression("nat", (1, _DNAT), (2, _FAMILY_NUMBERS[family]), *where)
        case _:
            raise Unprintable(f"{type(one).__name__} in a rule that rewrites the destination by a map")


def _loaded(key: Key, family: IPFamily) -> Iterator[bytes]:
    """Yield expressions that load the parts of a key into consecutive registers."""
    register = _REGISTER
    for part in key:
        if isinstance(part, HashedFields):
            yield from _hashed(part, register, family)
        else:
            yield _load(part, register, family)
        register += family.host_bits // 32 if part in (Field.SADDR, Field.DADDR) else 1


def _hashed(part: HashedFields, register: int, family: IPFamily) -> Iterator[bytes]:
    """Yield expressions that load the fields, and replace them by their hash."""
    if part.seed is None or part.fields not in ((Field.SADDR,), (Field.DADDR,)):
        raise Unprintable(f"a hash of {part.fields!r} in a key of a map to endpoints")
    yield _load(part.fields[0], register, family)
    length, seed = size_of(part.fields, family), part.seed
    numbers = (1, register), (2, register), (3, length), (4, part.mod), (5, seed), (6, part.offset), (7, _JENKINS)
    yield _expression("hash", *numbers)


def _load(part: Field | Slot, register: int, family: IPFamily) -> bytes:
    if isinstance(part, Slot):
        return _expression("numgen", (1, register), (2, part.mod), (3, _RANDOM))
    if part is Field.L4PROTO:
        return _expression("meta", (2, _META_L4PROTO), (1, register))
    if part in _PORT_OFFSETS:
        return _expression("payload", (1, register), (2, _TRANSPORT_HEADER), (3, _PORT_OFFSETS[part]), (4, 2))
    if (family, part) in _ADDRESS_OFFSETS:
        offset = _ADDRESS_OFFSETS[family, part]
        return _expression("payload", (1, register), (2, _NETWORK_HEADER), (3, offset), (4, family.host_bits // 8))
    raise Unprintable(f"{part.value} in a key of a map to endpoints")


def _expression(name: str, *values: tuple[int, int | str]) -> bytes:
    return _named(name, b"".join(_number(kind, value) for kind, value in values))


def _number(kind: int, value: int | str) -> bytes:
    return attribute(kind, value.encode("ascii") + b"\0" if isinstance(value, str) else struct.pack(">I", value))


def _named(name: str, data: bytes) -> bytes:
    return attribute(_EXPR_NAME, name.encode("ascii") + b"\0") + attribute(_EXPR_DATA | NESTED, data)
