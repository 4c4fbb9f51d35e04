"""Maps and programs as data: what a loader creates in the kernel, and what the interpreter runs.

Numbers are those of linux/bpf.h.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec

from narthex.bpf.instructions import Statement, assemble, maps_of


class MapKind(enum.IntEnum):
    """Type of a map."""

    HASH = 1
    ARRAY = 2
    PERCPU_HASH = 5
    PERCPU_ARRAY = 6
    LRU_HASH = 9
    LPM_TRIE = 11
    SOCKMAP = 15
    SOCKHASH = 18
    RINGBUF = 27

    @property
    def per_cpu(self) -> bool:
        """True if each processor has a value of its own."""
        return self in (MapKind.PERCPU_HASH, MapKind.PERCPU_ARRAY)


NO_PREALLOCATION = 1
"""Flag of hash maps and tries: memory is allocated with each element."""


class MapSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a map."""

    name: str
    """At most 15 characters reach the kernel."""
    kind: MapKind
    key_size: int
    value_size: int
    max_entries: int
    flags: int = 0

    @property
    def layout(self) -> str:
        """A short digest that differs if anything but the name does."""
        return _digest(f"{int(self.kind)} {self.key_size} {self.value_size} {self.max_entries} {self.flags}".encode())


class ProgramKind(enum.IntEnum):
    """Type of a program."""

    CGROUP_SOCK = 9
    SOCK_OPS = 13
    SK_SKB = 14
    SK_MSG = 16
    CGROUP_SOCK_ADDR = 18


class AttachKind(enum.IntEnum):
    """The hook for which a program is loaded."""

    CGROUP_SOCK_OPS = 3
    SK_SKB_STREAM_PARSER = 4
    SK_SKB_STREAM_VERDICT = 5
    SK_MSG_VERDICT = 7
    CONNECT4 = 10
    CONNECT6 = 11
    SENDMSG4 = 14
    SENDMSG6 = 15
    RECVMSG4 = 19
    RECVMSG6 = 20
    GETPEERNAME4 = 29
    GETPEERNAME6 = 30
    SOCK_RELEASE = 34
    SK_SKB_VERDICT = 38


class BpfProgramSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A program that is ready to be loaded."""

    name: str
    kind: ProgramKind
    attach: AttachKind
    statements: tuple[Statement, ...]

    @property
    def maps(self) -> tuple[str, ...]:
        """Names of the maps that it uses."""
        return maps_of(self.statements)

    @property
    def digest(self) -> str:
        """A short digest of the instructions, independent of the numbers of maps."""
        code = assemble(self.statements, {name: number for number, name in enumerate(self.maps)})
        return _digest(b"%d %d " % (self.kind, self.attach) + " ".join(self.maps).encode() + b"\0" + code)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()
