import pytest
from tests.bpf_programs import R0, R1, R2, R6, move, refuse_port

from narthex.bpf import (
    AssemblyError,
    AtomicAdd,
    CallHelper,
    Condition,
    Exit,
    Helper,
    JumpAlways,
    JumpIf,
    Label,
    LoadConstant,
    LoadMap,
    LoadMemory,
    MapKind,
    MapSpec,
    StoreMemory,
    ToBigEndian,
    Width,
    assemble,
    listing,
    maps_of,
)

EVERYTHING = (
    move(R6, R1),
    LoadMap(R1, "peers"),
    LoadConstant(R2, 0x1122334455667788),
    JumpIf(Condition.EQ, R2, 0, "end"),
    LoadMemory(Width.HALF, R0, R6, 24),
    ToBigEndian(R0, 16),
    StoreMemory(Width.WORD, R6, 4, R0),
    StoreMemory(Width.BYTE, R6, 8, 7),
    AtomicAdd(Width.DOUBLE, R6, 0, R2),
    CallHelper(Helper.RANDOM),
    JumpAlways("end"),
    Label("end"),
    Exit(),
)


def test_text_of_every_kind_of_instruction():
    text = listing(assemble(EVERYTHING, {"peers": 0}), ["peers"])

    assert text.splitlines() == [
        "0: r6 = r1",
        "1: r1 = map peers",
        "3: r2 = 0x1122334455667788 ll",
        "5: if r2 == 0 goto 13",
        "6: r0 = *(u16 *)(r6 +24)",
        "7: r0 = be16 r0",
        "8: *(u32 *)(r6 +4) = r0",
        "9: *(u8 *)(r6 +8) = 7",
        "10: lock *(u64 *)(r6 +0) += r2",
        "11: call random",
        "12: goto 13",
        "13: exit",
    ]
    assert maps_of(EVERYTHING) == ("peers",)


def test_bytes_of_rfc_9669():
    assert assemble((move(R0, 1), Exit()), {}).hex(" ", 8) == "b700000001000000 9500000000000000"


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ((JumpAlways("nowhere"),), "label nowhere is not defined"),
        ((Label("a"), Label("a")), "label a is defined twice"),
        ((LoadMap(R1, "peers"),), "map peers is not known"),
        ((move(R0, 1 << 40),), "does not fit"),
        ((ToBigEndian(R0, 12),), "12 bits cannot be swapped"),
        ((AtomicAdd(Width.BYTE, R1, 0, R0),), "cannot have the width BYTE"),
    ],
)
def test_programs_without_binary_form(statements, message):
    with pytest.raises(AssemblyError, match=message):
        assemble(statements, {})


def test_digests_name_layouts_and_programs():
    one = MapSpec(name="a", kind=MapKind.HASH, key_size=4, value_size=8, max_entries=16)
    same = MapSpec(name="b", kind=MapKind.HASH, key_size=4, value_size=8, max_entries=16)
    larger = MapSpec(name="a", kind=MapKind.HASH, key_size=4, value_size=8, max_entries=32)

    assert one.layout == same.layout != larger.layout
    assert refuse_port(80).digest == refuse_port(80).digest != refuse_port(81).digest
