"""The number that `jhash` in a rule selects for a packet."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from narthex.model import Protocol
from narthex.netfilter import ast
from narthex.netfilter.jhash import jhash, scaled

_ADDRESSES = (ast.Field.SADDR, ast.Field.DADDR)
_PORTS = (ast.Field.SPORT, ast.Field.DPORT)
_PROTOCOLS = {protocol.lower: protocol.number for protocol in Protocol}
_WORD = 4


def hashed_number(part: ast.HashedFields, values: Sequence[ast.Atom | None]) -> int | None:
    """Return the number for the values of the fields; None if it is not known."""
    if part.seed is None or not part.fields:
        return None
    packed = [_packed(field, value) for field, value in zip(part.fields, values, strict=True)]
    data = b""
    for one in packed:
        if one is None:
            return None
        # In a concatenation, each field begins with a register of its own.
        data += one if len(packed) == 1 else one.ljust(-(-len(one) // _WORD) * _WORD, b"\0")
    return part.offset + scaled(jhash(data, part.seed), part.mod)


def _packed(field: ast.Field, value: ast.Atom | None) -> bytes | None:
    """Return a field as it is in the kernel's register; None if that is not known."""
    if field in _ADDRESSES and isinstance(value, str):
        return ipaddress.ip_address(value).packed
    if field in _PORTS and isinstance(value, int):
        return value.to_bytes(2, "big")
    if field is ast.Field.L4PROTO and value in _PROTOCOLS:
        return bytes([_PROTOCOLS[str(value)]])
    return None
