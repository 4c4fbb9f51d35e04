"""What of a link's traffic reaches an announcer: programs of classic BPF, for the kernel to run on each frame.

A link's hosts ask for each other all day; only what is about an address of ours wakes the process.
"""

from __future__ import annotations

from collections.abc import Collection
from socket import AF_INET, AF_INET6, inet_pton

from narthex.lb.l2 import ADVERTISEMENT, SOLICITATION

_ICMPV6 = 58
_LD_WORD, _LD_BYTE, _JUMP_EQUAL, _RETURN = 0x20, 0x30, 0x15, 0x06
_WHOLE, _NONE = 0xFFFFFFFF, 0
_ARP_SENDER, _ARP_TARGET = 28, 38
_ND_NEXT, _ND_TYPE, _ND_TARGET_END = 20, 54, 74
_MOST_LISTED = 500
"""The kernel takes programs of 4096 steps; a long one costs each frame more than it saves."""

Step = tuple[int, int, int, int]
"""One step of classic BPF: code, jump if true, jump if false, operand."""


def arp_filter(addresses: Collection[str]) -> tuple[Step, ...]:
    """Classic BPF for a socket that gets ARP only: lets messages pass that are from or about one of the addresses."""
    wanted = sorted(_tail(each) for each in addresses if ":" not in each)
    if len(wanted) > _MOST_LISTED:
        return ((_RETURN, 0, 0, _WHOLE),)
    return (*_one_of(_ARP_TARGET, wanted), *_one_of(_ARP_SENDER, wanted), (_RETURN, 0, 0, _NONE))


def nd_filter(addresses: Collection[str]) -> tuple[Step, ...]:
    """The same for a socket that gets IPv6: solicitations and advertisements alone, of which the last four bytes of the
    target fit. Extension headers are not looked behind; Neighbour Discovery has none."""
    wanted = sorted({_tail(each) for each in addresses if ":" in each})
    picked = ((_RETURN, 0, 0, _WHOLE),) if len(wanted) > _MOST_LISTED else _one_of(_ND_TARGET_END, wanted)
    return (
        (_LD_BYTE, 0, 0, _ND_NEXT),
        (_JUMP_EQUAL, 1, 0, _ICMPV6),
        (_RETURN, 0, 0, _NONE),
        (_LD_BYTE, 0, 0, _ND_TYPE),
        (_JUMP_EQUAL, 2, 0, SOLICITATION),
        (_JUMP_EQUAL, 1, 0, ADVERTISEMENT),
        (_RETURN, 0, 0, _NONE),
        *picked,
        (_RETURN, 0, 0, _NONE),
    )


def _one_of(at: int, wanted: Collection[int]) -> tuple[Step, ...]:
    """Lets pass what has one of these words at a place."""
    steps: list[Step] = [(_LD_WORD, 0, 0, at)]
    for word in wanted:
        steps += [(_JUMP_EQUAL, 0, 1, word), (_RETURN, 0, 0, _WHOLE)]
    return tuple(steps)


def _tail(address: str) -> int:
    """The last four bytes, which is all of an IPv4 address."""
    return int.from_bytes(inet_pton(AF_INET6 if ":" in address else AF_INET, address)[-4:])
