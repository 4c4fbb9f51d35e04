"""The kernel's Jenkins hash, by which nftables selects (`jhash`). Source: include/linux/jhash.h, net/netfilter/nft_hash.c."""

from __future__ import annotations

import struct

_U32 = 0xFFFFFFFF
_INITIAL = 0xDEADBEEF


def jhash(data: bytes, seed: int) -> int:
    """Return the 32-bit hash of `data`, as `jhash()` on a little-endian machine.

    The kernel reads words in the byte order of its machine, so that one with another order computes other values.
    """
    a = b = c = (_INITIAL + len(data) + seed) & _U32
    at, left = 0, len(data)
    while left > 12:
        one, two, three = struct.unpack_from("<3I", data, at)
        a, b, c = _mixed((a + one) & _U32, (b + two) & _U32, (c + three) & _U32)
        at, left = at + 12, left - 12
    if not left:
        return c
    one, two, three = struct.unpack("<3I", data[at:].ljust(12, b"\0"))
    return _final((a + one) & _U32, (b + two) & _U32, (c + three) & _U32)


def scaled(hashed: int, mod: int) -> int:
    """Return a number below `mod` for a hash, in proportion: `reciprocal_scale()`, which nftables uses for `mod`."""
    return hashed * mod >> 32


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & _U32


def _mixed(a: int, b: int, c: int) -> tuple[int, int, int]:
    a, c = (a - c & _U32) ^ _rotated(c, 4), c + b & _U32
    b, a = (b - a & _U32) ^ _rotated(a, 6), a + c & _U32
    c, b = (c - b & _U32) ^ _rotated(b, 8), b + a & _U32
    a, c = (a - c & _U32) ^ _rotated(c, 16), c + b & _U32
    b, a = (b - a & _U32) ^ _rotated(a, 19), a + c & _U32
    c, b = (c - b & _U32) ^ _rotated(b, 4), b + a & _U32
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    c = (c ^ b) - _rotated(b, 14) & _U32
    a = (a ^ c) - _rotated(c, 11) & _U32
    b = (b ^ a) - _rotated(a, 25) & _U32
    c = (c ^ b) - _rotated(b, 16) & _U32
    a = (a ^ c) - _rotated(c, 4) & _U32
    b = (b ^ a) - _rotated(a, 14) & _U32
    return (c ^ b) - _rotated(b, 24) & _U32
