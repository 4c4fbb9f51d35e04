"""IPv6 addresses as text, which Python's `socket` does not know in WebAssembly; `install` adds them to it.

The text is that of glibc: the first of the longest runs of zeros becomes `::`, and an address that holds an IPv4 address is
written with it.
"""

from __future__ import annotations

import _socket
import ipaddress
import socket

_GROUPS = 8
_MAPPED = 0xFFFF
_of_ipv4 = _socket.inet_pton, _socket.inet_ntop


def inet_pton(family: int, text: str) -> bytes:
    """Return the packed bytes of an address. Raises OSError."""
    if family != socket.AF_INET6:
        return _of_ipv4[0](family, text)
    try:
        if "%" in text:
            raise ValueError(text)
        return ipaddress.IPv6Address(text).packed
    except ValueError:
        raise OSError("illegal IP address string passed to inet_pton") from None


def inet_ntop(family: int, packed: bytes) -> str:
    """Return the text of a packed address. Raises ValueError."""
    if family != socket.AF_INET6:
        return _of_ipv4[1](family, packed)
    if len(packed) != 2 * _GROUPS:
        raise ValueError("invalid length of packed IP address string")
    groups = [int.from_bytes(packed[at : at + 2], "big") for at in range(0, len(packed), 2)]
    begin, length = _longest_zeros(groups)
    if begin == 0 and (length == 6 or (length == 5 and groups[5] == _MAPPED)):
        head = "::ffff:" if length == 5 else "::"
        return head + _of_ipv4[1](socket.AF_INET, packed[12:])
    words = [f"{group:x}" for group in groups]
    if length < 2:
        return ":".join(words)
    return f"{':'.join(words[:begin])}::{':'.join(words[begin + length :])}"


def _longest_zeros(groups: list[int]) -> tuple[int, int]:
    """Return where the first of the longest runs of zeros begins, and its length."""
    best = (0, 0)
    at = 0
    while at < len(groups):
        end = at
        while end < len(groups) and groups[end] == 0:
            end += 1
        if end - at > best[1]:
            best = (at, end - at)
        at = end + 1
    return best


def install() -> None:
    """Replace the functions of `socket`, before a module imports them from there."""
    for module in (_socket, socket):
        module.inet_pton, module.inet_ntop = inet_pton, inet_ntop  # type: ignore[assignment]


install()
