"""Pieces of programs: a move, and calls that find, store, and delete elements of maps. Keys and values are on the stack."""

from __future__ import annotations

from collections.abc import Iterator

from narthex.bpf import (
    CallHelper,
    Compute,
    Helper,
    LoadMap,
    MapSpec,
    Operand,
    Operation,
    Register,
    Statement,
    StoreMemory,
    Width,
)

R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10 = Register


def move(target: Register, operand: Operand) -> Statement:
    """Set a register."""
    return Compute(Operation.MOV, target, operand)


def lookup(table: MapSpec, key: int) -> Iterator[Statement]:
    """R0 = the value of the key at an offset of the stack, or 0."""
    yield LoadMap(R1, table.name)
    yield move(R2, R10)
    yield Compute(Operation.ADD, R2, key)
    yield CallHelper(Helper.MAP_LOOKUP)


def update(table: MapSpec, key: int, value: int, flags: int = 0) -> Iterator[Statement]:
    """Store the value at an offset of the stack under the key at another one."""
    yield LoadMap(R1, table.name)
    yield move(R2, R10)
    yield Compute(Operation.ADD, R2, key)
    yield move(R3, R10)
    yield Compute(Operation.ADD, R3, value)
    yield move(R4, flags)
    yield CallHelper(Helper.MAP_UPDATE)


def delete(table: MapSpec, key: int) -> Iterator[Statement]:
    """Delete the element with the key at an offset of the stack; R0 is 0 if there was one."""
    yield LoadMap(R1, table.name)
    yield move(R2, R10)
    yield Compute(Operation.ADD, R2, key)
    yield CallHelper(Helper.MAP_DELETE)


def find_peer(peers: MapSpec, key: int, cookie: Register) -> Iterator[Statement]:
    """R0 = the place of a TCP socket. `key` is an offset of the stack where the number of the place is written."""
    yield move(R2, cookie)
    yield Compute(Operation.AND, R2, peers.max_entries - 1)
    yield StoreMemory(Width.WORD, R10, key, R2)
    yield from lookup(peers, key)
