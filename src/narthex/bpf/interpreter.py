"""An interpreter of BPF programs in their binary form: what a program does to its context and to its maps.

It is stricter than the kernel at run time, and reports what the verifier refuses: access outside of an object, use of a
register that was never set, and programs without end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from narthex.bpf.instructions import (
    CALL_OPCODE,
    CLASS_ALU,
    CLASS_ALU64,
    CLASS_JMP,
    CLASS_LDX,
    CLASS_ST,
    EXIT_OPCODE,
    JUMP_OPCODE,
    MAP_BY_DESCRIPTOR,
    MODE_ATOMIC,
    SLOT,
    SOURCE_REGISTER,
    TO_BIG_ENDIAN,
    WIDE_OPCODE,
    Condition,
    Helper,
    Operation,
)
from narthex.bpf.maps import MapModel

STACK_SIZE = 512
MAX_STEPS = 100_000
_MASK = (1 << 64) - 1
_HALF = (1 << 32) - 1
_REGION_BITS = 32
_SIZES = {0x10: 1, 0x08: 2, 0x00: 4, 0x18: 8}


class BpfFault(Exception):
    """The program did what the verifier of the kernel does not allow."""


class Environment(msgspec.Struct):
    """What a program can learn besides its context and maps, and what it can tell."""

    netns_cookie: int = 1
    socket_cookie: int = 1
    now_ns: int = 0
    random: Callable[[], int] = lambda: 0
    retval: int = 0
    """Set by `Helper.SET_RETVAL`: the negative error number of the system call."""
    messages: list[bytes] = []
    """Written to ring buffers."""
    other_helpers: Mapping[int, Callable[[int, int, int, int, int], int]] = {}
    """More helpers by number: R1 to R5 to R0."""


class Execution:
    """One run of a program."""

    def __init__(
        self,
        code: bytes,
        context: bytearray,
        maps: Sequence[MapModel],
        environment: Environment,
        pointers: Mapping[int, bytearray],
    ) -> None:
        self._slots = list(SLOT.iter_unpack(code))
        self._maps = maps
        self._environment = environment
        self._regions: list[bytearray | MapModel | None] = [None]
        self._registers: list[int | None] = [None] * 11
        self._registers[1] = self._address(context)
        for offset, pointed in pointers.items():
            context[offset : offset + 8] = self._address(pointed).to_bytes(8, "little")
        self._registers[10] = self._address(bytearray(STACK_SIZE)) + STACK_SIZE
        self._map_addresses = [self._address(each) for each in maps]

    def run(self) -> int:
        """Run to the end. Return the verdict, 32 bits. Raises BpfFault."""
        position = 0
        for _ in range(MAX_STEPS):
            if not 0 <= position < len(self._slots):
                raise BpfFault(f"jump to {position}, outside of the program")
            opcode, registers, offset, constant = self._slots[position]
            if opcode == EXIT_OPCODE:
                return self._get(0) & _HALF
            try:
                position = self._step(position, opcode, registers & 15, registers >> 4, offset, constant)
            except BpfFault as fault:
                raise BpfFault(f"instruction {position}: {fault}") from fault
        raise BpfFault(f"no end after {MAX_STEPS} instructions")

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _address(self, region: bytearray | MapModel) -> int:
        """Return the address of an object: the same one as long as the program runs."""
        for number, known in enumerate(self._regions):
            if known is region:
                return number << _REGION_BITS
        self._regions.append(region)
        return (len(self._regions) - 1) << _REGION_BITS

    def _bytes(self, address: int, size: int) -> tuple[bytearray, int]:
        region, start = address >> _REGION_BITS, address & _HALF
        memory = self._regions[region] if region < len(self._regions) else None
        if not isinstance(memory, bytearray) or start + size > len(memory):
            raise BpfFault(f"access to {size} bytes at {address:#x}, outside of any object")
        return memory, start

    def _read(self, address: int, size: int) -> bytes:
        memory, start = self._bytes(address, size)
        return bytes(memory[start : start + size])

    def _write(self, address: int, data: bytes) -> None:
        memory, start = self._bytes(address, len(data))
        memory[start : start + len(data)] = data

    def _map(self, address: int) -> MapModel:
        found = self._regions[address >> _REGION_BITS] if address >> _REGION_BITS < len(self._regions) else None
        if not isinstance(found, MapModel):
            raise BpfFault("the first argument is no map")
        return found

    def _get(self, register: int) -> int:
        value = self._registers[register]
        if value is None:
            raise BpfFault(f"r{register} is used before it is set")
        return value

    # ---- instructions ----------------------------------------------------------------------------------------------

    def _step(self, position: int, opcode: int, target: int, source: int, offset: int, constant: int) -> int:
        kind = opcode & 7
        if opcode == WIDE_OPCODE:
            high = self._slots[position + 1][3] & _HALF
            is_map = source == MAP_BY_DESCRIPTOR
            value = self._map_addresses[constant] if is_map else (constant & _HALF) | high << 32
            self._registers[target] = value
            return position + 2
        if opcode == CALL_OPCODE:
            result = self._call(constant)
            self._registers[0:6] = [result & _MASK, None, None, None, None, None]
            return position + 1
        if opcode == JUMP_OPCODE:
            return position + 1 + offset
        if kind in (CLASS_ALU, CLASS_ALU64):
            self._compute(opcode, target, source, constant)
            return position + 1
        size = _SIZES[opcode & 0x18]
        if kind == CLASS_LDX:
            self._registers[target] = int.from_bytes(self._read(self._get(source) + offset, size), "little")
        elif kind in (CLASS_ST, CLASS_ST + 1):
            self._store(opcode, self._get(target) + offset, size, constant if kind == CLASS_ST else self._get(source))
        else:
            return position + 1 + (offset if self._holds(opcode, target, source, constant) else 0)
        return position + 1

    def _store(self, opcode: int, address: int, size: int, value: int) -> None:
        if opcode & 0xE0 == MODE_ATOMIC:
            value += int.from_bytes(self._read(address, size), "little")
        self._write(address, (value & ((1 << 8 * size) - 1)).to_bytes(size, "little"))

    def _compute(self, opcode: int, target: int, source: int, constant: int) -> None:
        if opcode == TO_BIG_ENDIAN:
            size = constant // 8
            low = self._get(target) & ((1 << constant) - 1)
            self._registers[target] = int.from_bytes(low.to_bytes(size, "little"), "big")
            return
        wide = opcode & 7 == CLASS_ALU64
        mask = _MASK if wide else _HALF
        operation = Operation(opcode & 0xF0)
        right = (self._get(source) if opcode & SOURCE_REGISTER else constant) & mask
        left = 0 if operation is Operation.MOV else self._get(target) & mask
        self._registers[target] = _arithmetic(operation, left, right, 64 if wide else 32) & mask

    def _holds(self, opcode: int, target: int, source: int, constant: int) -> bool:
        bits = 64 if opcode & 7 == CLASS_JMP else 32
        mask = (1 << bits) - 1
        left = self._get(target) & mask
        right = (self._get(source) if opcode & SOURCE_REGISTER else constant) & mask
        condition = Condition(opcode & 0xF0)
        if condition in (Condition.SGT, Condition.SGE, Condition.SLT, Condition.SLE):
            left, right = _signed(left, bits), _signed(right, bits)
        match condition:
            case Condition.EQ:
                return left == right
            case Condition.NE:
                return left != right
            case Condition.GT | Condition.SGT:
                return left > right
            case Condition.GE | Condition.SGE:
                return left >= right
            case Condition.LT | Condition.SLT:
                return left < right
            case Condition.LE | Condition.SLE:
                return left <= right
        return bool(left & right)

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _call(self, number: int) -> int:
        environment = self._environment
        match number:
            case Helper.MAP_LOOKUP:
                found = self._map(self._get(1))
                value = found.find(self._read(self._get(2), found.spec.key_size))
                return 0 if value is None else self._address(value)
            case Helper.MAP_UPDATE:
                found = self._map(self._get(1))
                key = self._read(self._get(2), found.spec.key_size)
                return found.update(key, self._read(self._get(3), found.spec.value_size), self._get(4))
            case Helper.MAP_DELETE:
                found = self._map(self._get(1))
                return found.delete(self._read(self._get(2), found.spec.key_size))
            case Helper.KTIME_NS:
                return environment.now_ns
            case Helper.RANDOM:
                return environment.random() & _HALF
            case Helper.SOCKET_COOKIE:
                return environment.socket_cookie
            case Helper.NETNS_COOKIE:
                return environment.netns_cookie
            case Helper.SET_RETVAL:
                environment.retval = _signed(self._get(1) & _HALF, 32)
                return 0
            case Helper.RINGBUF_OUTPUT:
                self._map(self._get(1))
                environment.messages.append(self._read(self._get(2), self._get(3)))
                return 0
        helper = environment.other_helpers.get(number)
        if helper is None:
            raise BpfFault(f"helper {number} is not known")
        arguments = [0 if value is None else value for value in self._registers[1:6]]
        return helper(*arguments)


def run_program(
    code: bytes,
    context: bytearray,
    maps: Sequence[MapModel],
    environment: Environment | None = None,
    pointers: Mapping[int, bytearray] | None = None,
) -> int:
    """Run a program that was assembled with the indexes of `maps`, and return its verdict.

    `pointers` has objects that the context points to, by offset. The context, the maps, and the environment change as
    the program changes them. Raises BpfFault.
    """
    return Execution(code, context, maps, environment or Environment(), pointers or {}).run()


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _arithmetic(operation: Operation, left: int, right: int, bits: int) -> int:
    """Return the result, which may need more bits. A division by zero gives 0, its remainder the dividend."""
    shift = right & (bits - 1)
    match operation:
        case Operation.MOV:
            return right
        case Operation.ADD:
            return left + right
        case Operation.SUB:
            return left - right
        case Operation.MUL:
            return left * right
        case Operation.DIV:
            return left // right if right else 0
        case Operation.MOD:
            return left % right if right else left
        case Operation.OR:
            return left | right
        case Operation.AND:
            return left & right
        case Operation.XOR:
            return left ^ right
        case Operation.LSH:
            return left << shift
        case Operation.RSH:
            return left >> shift
        case Operation.ARSH:
            return _signed(left, bits) >> shift
    return -left
