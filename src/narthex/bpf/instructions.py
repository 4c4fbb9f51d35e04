"""BPF instructions as typed data, and their binary form (RFC 9669).

A program is written as a list of these statements. Jumps name labels, and maps are named, so that a program is a constant
that can be compared. `assemble` resolves both.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence

import msgspec


class Register(enum.IntEnum):
    """Registers of 64 bits. A call takes R1 to R5, returns R0, and destroys R0 to R5; R10 points to the end of the stack."""

    R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10 = range(11)


class Width(enum.IntEnum):
    """Size of a memory access; the value is the bit field of the instruction."""

    BYTE = 0x10
    HALF = 0x08
    WORD = 0x00
    DOUBLE = 0x18

    @property
    def size(self) -> int:
        """Number of bytes."""
        return {Width.BYTE: 1, Width.HALF: 2, Width.WORD: 4, Width.DOUBLE: 8}[self]


class Operation(enum.IntEnum):
    """Arithmetic; the value is the operation's bit field."""

    ADD = 0x00
    SUB = 0x10
    MUL = 0x20
    DIV = 0x30
    OR = 0x40
    AND = 0x50
    LSH = 0x60
    RSH = 0x70
    NEG = 0x80
    MOD = 0x90
    XOR = 0xA0
    MOV = 0xB0
    ARSH = 0xC0


class Condition(enum.IntEnum):
    """Comparison of a jump; the value is its bit field."""

    EQ = 0x10
    GT = 0x20
    GE = 0x30
    SET = 0x40
    NE = 0x50
    SGT = 0x60
    SGE = 0x70
    LT = 0xA0
    LE = 0xB0
    SLT = 0xC0
    SLE = 0xD0


class Helper(enum.IntEnum):
    """Kernel functions that programs call, by their number in linux/bpf.h."""

    MAP_LOOKUP = 1
    MAP_UPDATE = 2
    MAP_DELETE = 3
    KTIME_NS = 5
    RANDOM = 7
    SKB_LOAD_BYTES = 26
    SK_REDIRECT_MAP = 52
    SOCK_MAP_UPDATE = 53
    SOCKET_COOKIE = 46
    SOCK_OPS_CB_FLAGS = 59
    MSG_REDIRECT_MAP = 60
    SOCK_HASH_UPDATE = 70
    MSG_REDIRECT_HASH = 71
    SK_REDIRECT_HASH = 72
    NETNS_COOKIE = 122
    RINGBUF_OUTPUT = 130
    SET_RETVAL = 187


Operand = Register | int
"""A register, or a constant that fits 32 bits with sign."""


class Compute(msgspec.Struct, frozen=True, tag=True):
    """`target = target OPERATION operand`, in 64 bits, or in 32 bits with the upper half cleared."""

    operation: Operation
    target: Register
    operand: Operand
    wide: bool = True


class ToBigEndian(msgspec.Struct, frozen=True, tag=True):
    """Convert the low 16, 32, or 64 bits between the byte order of this machine and of the network."""

    target: Register
    bits: int


class LoadMemory(msgspec.Struct, frozen=True, tag=True):
    """`target = *(base + offset)`, extended with zeros."""

    width: Width
    target: Register
    base: Register
    offset: int


class StoreMemory(msgspec.Struct, frozen=True, tag=True):
    """`*(base + offset) = operand`."""

    width: Width
    base: Register
    offset: int
    operand: Operand


class AtomicAdd(msgspec.Struct, frozen=True, tag=True):
    """`*(base + offset) += operand`, atomically; the width is WORD or DOUBLE."""

    width: Width
    base: Register
    offset: int
    operand: Register


class LoadConstant(msgspec.Struct, frozen=True, tag=True):
    """`target = value`, all 64 bits."""

    target: Register
    value: int


class LoadMap(msgspec.Struct, frozen=True, tag=True):
    """`target =` the map with this name, as helpers expect it."""

    target: Register
    map: str


class Label(msgspec.Struct, frozen=True, tag=True):
    """A place to which jumps lead."""

    name: str


class JumpAlways(msgspec.Struct, frozen=True, tag=True):
    """Continue at a label."""

    label: str


class JumpIf(msgspec.Struct, frozen=True, tag=True):
    """Continue at a label if the comparison holds, of 64 bits or of the low 32."""

    condition: Condition
    target: Register
    operand: Operand
    label: str
    wide: bool = True


class CallHelper(msgspec.Struct, frozen=True, tag=True):
    """Call a kernel function."""

    helper: Helper


class Exit(msgspec.Struct, frozen=True, tag=True):
    """End the program; R0 is its verdict."""


Statement = (
    Compute
    | ToBigEndian
    | LoadMemory
    | StoreMemory
    | AtomicAdd
    | LoadConstant
    | LoadMap
    | Label
    | JumpAlways
    | JumpIf
    | CallHelper
    | Exit
)

# Instruction classes and modes of RFC 9669.
CLASS_LD, CLASS_LDX, CLASS_ST, CLASS_STX, CLASS_ALU, CLASS_JMP, CLASS_JMP32, CLASS_ALU64 = range(8)
MODE_MEM, MODE_ATOMIC = 0x60, 0xC0
SOURCE_REGISTER = 0x08
CALL_OPCODE, EXIT_OPCODE, JUMP_OPCODE, WIDE_OPCODE = 0x85, 0x95, 0x05, 0x18
MAP_BY_DESCRIPTOR = 1
"""Source field of a wide load whose constant is a map's file descriptor."""
TO_BIG_ENDIAN = 0xDC

SLOT = struct.Struct("<BBhi")
"""One instruction slot: operation, registers, offset, constant."""


class AssemblyError(ValueError):
    """A program that has no binary form: an unknown or repeated label or map, or a number out of range."""


def assemble(statements: Sequence[Statement], maps: Mapping[str, int]) -> bytes:
    """Return the binary form of a program.

    `maps` has a number for each map that the program names: a file descriptor for the kernel, an index for the
    interpreter. Raises AssemblyError.
    """
    labels: dict[str, int] = {}
    position = 0
    for statement in statements:
        if isinstance(statement, Label):
            if statement.name in labels:
                raise AssemblyError(f"label {statement.name} is defined twice")
            labels[statement.name] = position
        else:
            position += 2 if isinstance(statement, LoadConstant | LoadMap) else 1
    encoded: list[bytes] = []
    position = 0
    for statement in statements:
        if isinstance(statement, Label):
            continue
        data = _encode(statement, position, labels, maps)
        position += len(data) // SLOT.size
        encoded.append(data)
    return b"".join(encoded)


def maps_of(statements: Sequence[Statement]) -> tuple[str, ...]:
    """Return the names of the maps that a program uses, in order of appearance."""
    return tuple(dict.fromkeys(statement.map for statement in statements if isinstance(statement, LoadMap)))


def _encode(statement: Statement, position: int, labels: Mapping[str, int], maps: Mapping[str, int]) -> bytes:
    def distance(label: str) -> int:
        """Return how many instructions a jump skips."""
        if label not in labels:
            raise AssemblyError(f"label {label} is not defined")
        return labels[label] - position - 1

    match statement:
        case Compute(operation, target, operand, wide):
            kind = CLASS_ALU64 if wide else CLASS_ALU
            return _slot(kind | operation | _source(operand), target, operand)
        case ToBigEndian(target, bits):
            if bits not in (16, 32, 64):
                raise AssemblyError(f"{bits} bits cannot be swapped: use 16, 32, or 64")
            return _slot(TO_BIG_ENDIAN, target, bits)
        case LoadMemory(width, target, base, offset):
            return _slot(CLASS_LDX | MODE_MEM | width, target, base, offset)
        case StoreMemory(width, base, offset, operand):
            kind = CLASS_STX if isinstance(operand, Register) else CLASS_ST
            return _slot(kind | MODE_MEM | width, base, operand, offset)
        case AtomicAdd(width, base, offset, operand):
            if width not in (Width.WORD, Width.DOUBLE):
                raise AssemblyError(f"an atomic addition cannot have the width {width.name}")
            return _slot(CLASS_STX | MODE_ATOMIC | width, base, operand, offset)
        case LoadConstant(target, value):
            value &= (1 << 64) - 1
            return _wide(target, 0, value & 0xFFFFFFFF, value >> 32)
        case LoadMap(target, name):
            if name not in maps:
                raise AssemblyError(f"map {name} is not known")
            return _wide(target, MAP_BY_DESCRIPTOR, maps[name], 0)
        case JumpAlways(label):
            return _slot(JUMP_OPCODE, Register.R0, 0, distance(label))
        case JumpIf(condition, target, operand, label, wide):
            kind = CLASS_JMP if wide else CLASS_JMP32
            return _slot(kind | condition | _source(operand), target, operand, distance(label))
        case CallHelper(helper):
            return _slot(CALL_OPCODE, Register.R0, int(helper))
        case Exit():
            return _slot(EXIT_OPCODE, Register.R0, 0)
        case _:
            raise AssemblyError(f"{statement!r} is no instruction")


def _source(operand: Operand) -> int:
    return SOURCE_REGISTER if isinstance(operand, Register) else 0


def _slot(opcode: int, target: Register, operand: Operand, offset: int = 0) -> bytes:
    source, constant = (int(operand), 0) if isinstance(operand, Register) else (0, operand)
    try:
        return SLOT.pack(opcode, target | source << 4, offset, constant)
    except struct.error as error:
        raise AssemblyError(f"constant {constant} or offset {offset} does not fit: {error}") from error


def _wide(target: Register, source: int, low: int, high: int) -> bytes:
    first = struct.pack("<BBhI", WIDE_OPCODE, target | source << 4, 0, low)
    return first + struct.pack("<BBhI", 0, 0, 0, high)
