import errno

import pytest
from tests.bpf_programs import R0, R1, R2, R3, R4, R6, move

from narthex.bpf import (
    AtomicAdd,
    BpfFault,
    CallHelper,
    Compute,
    Condition,
    Environment,
    Exit,
    Helper,
    JumpAlways,
    JumpIf,
    Label,
    LoadConstant,
    LoadMap,
    LoadMemory,
    MapKind,
    MapModel,
    MapSpec,
    Operation,
    Register,
    StoreMemory,
    ToBigEndian,
    Width,
    assemble,
    run_program,
)

R10 = Register.R10


def hash_map(kind=MapKind.HASH, **elements):
    spec = MapSpec(name="m", kind=kind, key_size=4, value_size=8, max_entries=2)
    return MapModel(spec, {name.encode(): number.to_bytes(8, "little") for name, number in elements.items()})


def run(*statements, maps=(), environment=None, context=b"\0" * 8):
    code = assemble(statements, {f"map{number}": number for number in range(len(maps))})
    return run_program(code, bytearray(context), maps, environment)


def on_map(helper, key=b"aaaa", value=0):
    """Call a map's helper with a key and a value on the stack."""
    return (
        StoreMemory(Width.WORD, R10, -4, int.from_bytes(key, "little")),
        StoreMemory(Width.DOUBLE, R10, -16, value),
        LoadMap(R1, "map0"),
        move(R2, R10),
        Compute(Operation.ADD, R2, -4),
        move(R3, R10),
        Compute(Operation.ADD, R3, -16),
        move(R4, 0),
        CallHelper(helper),
    )


@pytest.mark.parametrize(
    ("operation", "left", "right", "wide", "result"),
    [
        (Operation.ADD, -1, 2, True, 1),
        (Operation.ADD, -1, 2, False, 1),
        (Operation.SUB, 1, 2, False, 0xFFFFFFFF),
        (Operation.MUL, 3, -1, False, 0xFFFFFFFD),
        (Operation.DIV, 7, 0, True, 0),
        (Operation.MOD, 7, 0, True, 7),
        (Operation.MOD, 7, 4, True, 3),
        (Operation.RSH, -1, 60, True, 15),
        (Operation.ARSH, -8, 1, False, 0xFFFFFFFC),
        (Operation.LSH, 1, 33, False, 2),
        (Operation.XOR, 5, 1, True, 4),
        (Operation.OR, 5, 2, True, 7),
        (Operation.AND, -1, 6, True, 6),
        (Operation.NEG, 1, 0, False, 0xFFFFFFFF),
    ],
)
def test_arithmetic(operation, left, right, wide, result):
    assert run(move(R0, left), Compute(operation, R0, right, wide), Exit()) == result & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("condition", "left", "right", "holds"),
    [
        (Condition.GT, -1, 1, True),
        (Condition.SGT, -1, 1, False),
        (Condition.SLE, -1, 1, True),
        (Condition.LT, 1, 2, True),
        (Condition.LE, 2, 2, True),
        (Condition.GE, 2, 3, False),
        (Condition.SGE, 2, -3, True),
        (Condition.SLT, 2, -3, False),
        (Condition.SET, 6, 2, True),
        (Condition.NE, 6, 6, False),
    ],
)
@pytest.mark.parametrize("wide", [True, False])
def test_comparisons(condition, left, right, holds, wide):
    statements = (
        move(R1, left),
        move(R0, 1),
        JumpIf(condition, R1, right, "end", wide),
        move(R0, 0),
        Label("end"),
        Exit(),
    )

    assert run(*statements) == holds


def test_context_is_read_and_written_in_network_order():
    context = bytearray(bytes([0x1F, 0x90, 0, 0, 0, 0, 0, 0]))
    statements = LoadMemory(Width.HALF, R0, R1, 0), ToBigEndian(R0, 16), StoreMemory(Width.WORD, R1, 4, R0), Exit()

    assert run_program(assemble(statements, {}), context, ()) == 8080
    assert context[4:] == (8080).to_bytes(4, "little")


def test_maps():
    table = hash_map(aaaa=5)
    found = run(*on_map(Helper.MAP_LOOKUP), LoadMemory(Width.DOUBLE, R0, R0, 0), Exit(), maps=[table])
    missing = run(*on_map(Helper.MAP_LOOKUP, b"bbbb"), Exit(), maps=[table])
    added = run(*on_map(Helper.MAP_UPDATE, b"bbbb", 7), Exit(), maps=[table])
    full = run(*on_map(Helper.MAP_UPDATE, b"cccc", 7), Exit(), maps=[table])
    deleted = run(*on_map(Helper.MAP_DELETE, b"bbbb"), Exit(), maps=[table])
    again = run(*on_map(Helper.MAP_DELETE, b"bbbb"), Exit(), maps=[table])

    assert (found, missing, added, deleted) == (5, 0, 0, 0)
    assert full == -errno.E2BIG & 0xFFFFFFFF and again == -errno.ENOENT & 0xFFFFFFFF
    assert dict(table.items()) == {b"aaaa": (5).to_bytes(8, "little")}


def test_counters_in_maps():
    table = hash_map(aaaa=5)
    run(*on_map(Helper.MAP_LOOKUP), move(R1, 1), AtomicAdd(Width.DOUBLE, R0, 0, R1), move(R0, 0), Exit(), maps=[table])

    assert table.find(b"aaaa") == (6).to_bytes(8, "little")


def test_least_recently_used_element_makes_room():
    table = hash_map(MapKind.LRU_HASH, aaaa=1, bbbb=2)
    table.find(b"aaaa")
    run(*on_map(Helper.MAP_UPDATE, b"cccc", 3), Exit(), maps=[table])

    assert [key for key, _ in table.items()] == [b"aaaa", b"cccc"]


def test_longest_prefix():
    spec = MapSpec(name="m", kind=MapKind.LPM_TRIE, key_size=8, value_size=1, max_entries=4)

    def key(length, *address):
        return length.to_bytes(4, "little") + bytes(address)

    table = MapModel(spec, {key(8, 10, 0, 0, 0): b"a", key(24, 10, 1, 2, 0): b"b"})

    assert table.find(key(32, 10, 1, 2, 3)) == b"b"
    assert table.find(key(32, 10, 9, 2, 3)) == b"a"
    assert table.find(key(32, 11, 9, 2, 3)) is None


def test_arrays_have_all_elements():
    table = MapModel(MapSpec(name="m", kind=MapKind.ARRAY, key_size=4, value_size=2, max_entries=2))

    assert table.find(bytes(4)) == bytes(2)
    assert table.update((2).to_bytes(4, "little"), b"ab") == -errno.E2BIG
    assert table.delete(bytes(4)) == -errno.EINVAL


def test_environment():
    environment = Environment(netns_cookie=3, socket_cookie=4, random=lambda: 5, now_ns=6)
    calls = [Helper.NETNS_COOKIE, Helper.SOCKET_COOKIE, Helper.RANDOM, Helper.KTIME_NS]

    assert [run(CallHelper(helper), Exit(), environment=environment) for helper in calls] == [3, 4, 5, 6]
    run(move(R1, -errno.ECONNREFUSED), CallHelper(Helper.SET_RETVAL), Exit(), environment=environment)
    assert environment.retval == -errno.ECONNREFUSED


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ((move(R0, R6), Exit()), "r6 is used before it is set"),
        ((LoadMemory(Width.DOUBLE, R0, R1, 4), Exit()), "outside of any object"),
        ((LoadMemory(Width.BYTE, R0, R10, 0), Exit()), "outside of any object"),
        ((LoadConstant(R2, 7), LoadMemory(Width.BYTE, R0, R2, 0), Exit()), "outside of any object"),
        ((Label("again"), JumpAlways("again")), "no end"),
        ((move(R0, 0),), "outside of the program"),
        ((CallHelper(Helper.MAP_LOOKUP), Exit()), "the first argument is no map"),
        ((CallHelper(Helper.RANDOM), move(R0, R1), Exit()), "r1 is used before it is set"),
        ((CallHelper(Helper.SK_REDIRECT_MAP), Exit()), "helper 52 is not known"),
    ],
)
def test_faults(statements, message):
    with pytest.raises(BpfFault, match=message):
        run(*statements)
