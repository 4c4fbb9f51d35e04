"""Programs as text, decoded from their binary form, in the notation of the kernel's verifier."""

from __future__ import annotations

from collections.abc import Sequence

from narthex.bpf.instructions import (
    CALL_OPCODE,
    CLASS_ALU,
    CLASS_ALU64,
    CLASS_JMP,
    CLASS_JMP32,
    CLASS_LDX,
    CLASS_ST,
    CLASS_STX,
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

_SIGNS = {
    Operation.ADD: "+=", Operation.SUB: "-=", Operation.MUL: "*=", Operation.DIV: "/=", Operation.OR: "|=",
    Operation.AND: "&=", Operation.LSH: "<<=", Operation.RSH: ">>=", Operation.MOD: "%=", Operation.XOR: "^=",
    Operation.MOV: "=", Operation.ARSH: "s>>=",
}  # fmt: skip
_COMPARISONS = {
    Condition.EQ: "==", Condition.GT: ">", Condition.GE: ">=", Condition.SET: "&", Condition.NE: "!=",
    Condition.SGT: "s>", Condition.SGE: "s>=", Condition.LT: "<", Condition.LE: "<=", Condition.SLT: "s<",
    Condition.SLE: "s<=",
}  # fmt: skip
_TYPES = {0x10: "u8", 0x08: "u16", 0x00: "u32", 0x18: "u64"}


def listing(code: bytes, maps: Sequence[str] = ()) -> str:
    """Return one line for each instruction, with its position. `maps` has the names of maps by number."""
    lines = []
    slots = list(SLOT.iter_unpack(code))
    position = 0
    while position < len(slots):
        opcode, registers, offset, constant = slots[position]
        target, source = registers & 15, registers >> 4
        number = position
        if opcode == WIDE_OPCODE:
            position += 1
            if source == MAP_BY_DESCRIPTOR:
                text = f"r{target} = map {maps[constant] if constant < len(maps) else constant}"
            else:
                text = f"r{target} = {(constant & 0xFFFFFFFF) | (slots[position][3] & 0xFFFFFFFF) << 32:#x} ll"
        else:
            text = _line(number, opcode, target, source, offset, constant)
        lines.append(f"{number}: {text}")
        position += 1
    return "\n".join(lines)


def _line(position: int, opcode: int, target: int, source: int, offset: int, constant: int) -> str:
    kind = opcode & 7
    wide = kind in (CLASS_ALU64, CLASS_JMP)
    letter = "r" if wide else "w"
    operand = f"{letter}{source}" if opcode & SOURCE_REGISTER else str(constant)
    if opcode == CALL_OPCODE:
        return f"call {Helper(constant).name.lower()}"
    if opcode == EXIT_OPCODE:
        return "exit"
    if opcode == JUMP_OPCODE:
        return f"goto {position + 1 + offset}"
    if opcode == TO_BIG_ENDIAN:
        return f"r{target} = be{constant} r{target}"
    if kind in (CLASS_ALU, CLASS_ALU64):
        operation = Operation(opcode & 0xF0)
        if operation is Operation.NEG:
            return f"{letter}{target} = -{letter}{target}"
        return f"{letter}{target} {_SIGNS[operation]} {operand}"
    if kind in (CLASS_JMP, CLASS_JMP32):
        comparison = _COMPARISONS[Condition(opcode & 0xF0)]
        return f"if {letter}{target} {comparison} {operand} goto {position + 1 + offset}"
    place = _TYPES[opcode & 0x18]
    if kind == CLASS_LDX:
        return f"r{target} = *({place} *)(r{source} {offset:+})"
    if kind == CLASS_STX and opcode & 0xE0 == MODE_ATOMIC:
        return f"lock *({place} *)(r{target} {offset:+}) += r{source}"
    stored = {CLASS_STX: f"r{source}", CLASS_ST: str(constant)}[kind]
    return f"*({place} *)(r{target} {offset:+}) = {stored}"
