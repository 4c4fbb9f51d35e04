"""Open connections by Service port and endpoint, for Service ports that ask for the least.

A connect counts its socket under an endpoint, and the end of the socket (hook `sock_release`, Linux 5.9) takes that back. Each
socket has at most one element in `held`, which only its own connect and its own end write, so that a count returns to zero
whatever ends a socket: a close, a refusal, a reset, or the end of its process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from narthex.bpf import (
    AtomicAdd,
    AttachKind,
    BpfProgramSpec,
    CallHelper,
    Compute,
    Condition,
    Exit,
    Helper,
    JumpIf,
    Label,
    LoadMemory,
    Operation,
    ProgramKind,
    Statement,
    StoreMemory,
    Width,
)
from narthex.model import IPFamily
from narthex.proxy.backends.sockets.layout import FamilyMaps
from narthex.proxy.backends.sockets.pieces import R0, R1, R2, R6, R7, R8, R9, R10, delete, lookup, move, update

_NO_EXIST = 1
"""Flag of an update: only if there is no such element."""


class ChoiceOfTwo:
    """The part of a connect program that draws two endpoints, chooses the one with fewer open connections, and counts the socket.

    It starts with the size of the pool in R7, the number of the pool in the key of the slot, the number of the Service port in
    R9, and the context in R6. It ends with the endpoint that was chosen at `endpoint`.
    """

    def __init__(
        self,
        maps: FamilyMaps,
        label: str,
        copy_endpoint: Callable[[str, str], Iterator[Statement]],
        *,
        slot: int,
        endpoint: int,
        cookie: int,
        first: int,
        chosen: int,
        value: int,
    ) -> None:
        """Place everything on the stack.

        Args:
            maps: The maps of the family.
            label: Start of the names of labels.
            copy_endpoint: Yields the copy of the slot's endpoint to `endpoint`; it continues at the first label of this program, or
                at the second one if there is none.
            slot: Offset of the key of a slot: index, number of the pool.
            endpoint: Offset of an endpoint.
            cookie: Offset of the cookie of the socket, 8 bytes.
            first: Offset of a key of `opens`.
            chosen: Offset of another key of `opens`.
            value: Offset of 8 bytes.
        """
        self._maps = maps
        self._label = label
        self._copy_endpoint = copy_endpoint
        self._slot, self._endpoint, self._cookie = slot, endpoint, cookie
        self._first, self._chosen, self._value = first, chosen, value
        self._words = maps.place_size // 4

    def _name(self, name: str) -> str:
        return f"{self._label}-{name}"

    def statements(self, otherwise: str) -> Iterator[Statement]:
        """Yield the instructions; they go to the label `otherwise` if an endpoint has no slot."""
        # A socket whose connection failed may connect again.
        yield move(R1, R6)
        yield CallHelper(Helper.SOCKET_COOKIE)
        yield StoreMemory(Width.DOUBLE, R10, self._cookie, R0)
        yield from release(self._maps, self._name("again"), self._cookie, self._chosen)
        yield from self._draw_first(otherwise)
        yield from self._draw_second()
        yield Label(self._name("first-fewer"))
        for word in range(self._words):
            yield LoadMemory(Width.WORD, R2, R10, self._first + 4 + 4 * word)
            yield StoreMemory(Width.WORD, R10, self._endpoint + 4 * word, R2)
        yield Label(self._name("chosen-of-two"))
        yield from self._count()

    def _draw_first(self, otherwise: str) -> Iterator[Statement]:
        """R8 = open connections of the first endpoint, whose key is at `first`."""
        yield CallHelper(Helper.RANDOM)
        yield Compute(Operation.MOD, R0, R7, wide=False)
        yield StoreMemory(Width.WORD, R10, self._slot, R0)
        yield from self._copy_endpoint("first-drawn", otherwise)
        yield from self._store_key(self._first)
        yield from self._read_count(self._first, "first-known")

    def _draw_second(self) -> Iterator[Statement]:
        """Go on at `chosen-of-two` if the second endpoint has fewer. It never is the first one."""
        yield JumpIf(Condition.EQ, R7, 1, self._name("first-fewer"))
        yield Compute(Operation.SUB, R7, 1)
        yield CallHelper(Helper.RANDOM)
        yield Compute(Operation.MOD, R0, R7, wide=False)
        yield LoadMemory(Width.WORD, R1, R10, self._slot)
        yield JumpIf(Condition.LT, R0, R1, self._name("before-first"))
        yield Compute(Operation.ADD, R0, 1)
        yield Label(self._name("before-first"))
        yield StoreMemory(Width.WORD, R10, self._slot, R0)
        yield move(R7, R8)
        yield from self._copy_endpoint("second-drawn", self._name("first-fewer"))
        yield from self._store_key(self._chosen)
        yield from self._read_count(self._chosen, "second-known")
        yield JumpIf(Condition.LT, R8, R7, self._name("chosen-of-two"))

    def _store_key(self, key: int) -> Iterator[Statement]:
        yield StoreMemory(Width.WORD, R10, key, R9)
        for word in range(self._words):
            yield LoadMemory(Width.WORD, R2, R10, self._endpoint + 4 * word)
            yield StoreMemory(Width.WORD, R10, key + 4 + 4 * word, R2)

    def _read_count(self, key: int, known: str) -> Iterator[Statement]:
        yield from lookup(self._maps.opens, key)
        yield move(R8, 0)
        yield JumpIf(Condition.EQ, R0, 0, self._name(known))
        yield LoadMemory(Width.DOUBLE, R8, R0, 0)
        yield Label(self._name(known))

    def _count(self) -> Iterator[Statement]:
        """Count the socket under the endpoint that was chosen. If a map is full, the socket is not counted."""
        yield from self._store_key(self._chosen)
        yield from lookup(self._maps.opens, self._chosen)
        yield JumpIf(Condition.NE, R0, 0, self._name("add-open"))
        yield StoreMemory(Width.DOUBLE, R10, self._value, 0)
        yield from update(self._maps.opens, self._chosen, self._value, _NO_EXIST)
        # Another processor may have been faster.
        yield from lookup(self._maps.opens, self._chosen)
        yield JumpIf(Condition.EQ, R0, 0, self._name("held"))
        yield Label(self._name("add-open"))
        yield move(R7, R0)
        yield move(R1, 1)
        yield AtomicAdd(Width.DOUBLE, R7, 0, R1)
        yield from update(self._maps.held, self._cookie, self._chosen)
        yield JumpIf(Condition.EQ, R0, 0, self._name("held"))
        yield move(R1, -1)
        yield AtomicAdd(Width.DOUBLE, R7, 0, R1)
        yield Label(self._name("held"))


def release(maps: FamilyMaps, label: str, cookie: int, key: int) -> Iterator[Statement]:
    """End the count of the socket whose cookie is on the stack, if it has one.

    Args:
        maps: The maps of the family.
        label: Start of the names of labels.
        cookie: Offset of the cookie.
        key: Offset of room for a key of `opens`.
    """
    end = f"{label}-released"
    yield from lookup(maps.held, cookie)
    yield JumpIf(Condition.EQ, R0, 0, end)
    for word in range(maps.place_size // 4 + 1):
        yield LoadMemory(Width.WORD, R2, R0, 4 * word)
        yield StoreMemory(Width.WORD, R10, key + 4 * word, R2)
    yield from delete(maps.held, cookie)
    yield JumpIf(Condition.NE, R0, 0, end)
    yield from lookup(maps.opens, key)
    yield JumpIf(Condition.EQ, R0, 0, end)
    # The element may have been deleted and made again meanwhile.
    yield LoadMemory(Width.DOUBLE, R1, R0, 0)
    yield JumpIf(Condition.EQ, R1, 0, end)
    yield move(R1, -1)
    yield AtomicAdd(Width.DOUBLE, R0, 0, R1)
    yield Label(end)


def release_program(maps: FamilyMaps) -> BpfProgramSpec:
    """Return the program that runs when a socket ends, for the maps of one family."""
    key = -8 - (maps.place_size + 11) // 8 * 8
    statements = (
        # The context is in R1.
        CallHelper(Helper.SOCKET_COOKIE),
        StoreMemory(Width.DOUBLE, R10, -8, R0),
        *release(maps, "end", -8, key),
        move(R0, 1),
        Exit(),
    )
    number = "4" if maps.family is IPFamily.IPV4 else "6"
    return BpfProgramSpec(
        name=f"nx_release{number}", kind=ProgramKind.CGROUP_SOCK, attach=AttachKind.SOCK_RELEASE, statements=statements
    )
