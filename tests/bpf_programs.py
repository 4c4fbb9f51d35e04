"""Writing small BPF programs in tests."""

from narthex.bpf import (
    AttachKind,
    BpfProgramSpec,
    Compute,
    Condition,
    Exit,
    JumpIf,
    Label,
    LoadMemory,
    Operation,
    ProgramKind,
    Register,
    Statement,
    Width,
)

R0, R1, R2, R3, R4, R5, R6 = list(Register)[:7]


def move(target: Register, operand: Register | int) -> Statement:
    return Compute(Operation.MOV, target, operand)


def socket_program(
    *statements: Statement, name: str = "nx_test", attach: AttachKind = AttachKind.CONNECT4
) -> BpfProgramSpec:
    return BpfProgramSpec(name=name, kind=ProgramKind.CGROUP_SOCK_ADDR, attach=attach, statements=statements)


def refuse_port(port: int) -> BpfProgramSpec:
    """A program that forbids connections to one port."""
    return socket_program(
        LoadMemory(Width.WORD, R2, R1, 24),
        move(R0, 1),
        JumpIf(Condition.NE, R2, (port & 0xFF) << 8 | port >> 8, "end"),
        move(R0, 0),
        Label("end"),
        Exit(),
    )
