"""Writing small BPF programs in tests."""

from narthex.bpf import (
    AttachKind,
    Compute,
    Condition,
    Exit,
    JumpIf,
    Label,
    Load,
    Node,
    Operation,
    ProgramKind,
    ProgramSpec,
    Register,
    Width,
)

R0, R1, R2, R3, R4, R5, R6 = list(Register)[:7]


def move(target: Register, operand: Register | int) -> Node:
    return Compute(Operation.MOV, target, operand)


def socket_program(*nodes: Node, name: str = "nx_test", attach: AttachKind = AttachKind.CONNECT4) -> ProgramSpec:
    return ProgramSpec(name=name, kind=ProgramKind.CGROUP_SOCK_ADDR, attach=attach, nodes=nodes)


def refuse_port(port: int) -> ProgramSpec:
    """A program that forbids connections to one port."""
    return socket_program(
        Load(Width.WORD, R2, R1, 24),
        move(R0, 1),
        JumpIf(Condition.NE, R2, (port & 0xFF) << 8 | port >> 8, "end"),
        move(R0, 0),
        Label("end"),
        Exit(),
    )
