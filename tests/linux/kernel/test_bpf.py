import errno
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.bpf_programs import R0, R1, R2, move, refuse_port, socket_program

from narthex.bpf import (
    NO_PREALLOCATION,
    AttachKind,
    Compute,
    Condition,
    Exit,
    JumpIf,
    Label,
    LoadMemory,
    MapKind,
    MapSpec,
    Operation,
    ProgramKind,
    Width,
)
from narthex.linux.bpf import (
    BpfError,
    BpfLink,
    BpfMap,
    BpfProgram,
    VerifierError,
    attached_links,
    can_load,
    mount_bpf_file_system,
    pinned_names,
    unmount,
)
from narthex.linux.cgroups import cgroup_mount, cgroup_of, create_cgroup, move_process, processes_in, remove_cgroup

pytestmark = pytest.mark.kernel

HASH = MapSpec(name="nx_test", kind=MapKind.HASH, key_size=4, value_size=8, max_entries=50_000, flags=NO_PREALLOCATION)


def number(value, size=4):
    return value.to_bytes(size, "little")


@pytest.fixture
def table():
    made = BpfMap.create(HASH)
    yield made
    made.close()


@pytest.fixture
def pins(tmp_path):
    mount_bpf_file_system(tmp_path / "bpf")
    (tmp_path / "bpf" / "narthex").mkdir()
    yield tmp_path / "bpf" / "narthex"
    unmount(tmp_path / "bpf")


@pytest.fixture
def cgroup():
    """A cgroup of its own below the hierarchy; the machine's root never gets a program."""
    path = cgroup_mount() / f"nx-test-{os.getpid()}"
    create_cgroup(path)
    yield path
    remove_cgroup(path)


def try_connect(cgroup, port):
    """Connect to a port from a process in a cgroup; return the error number."""
    code = (
        "import socket, sys\n"
        "sys.stdin.readline()\n"
        "try: socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)\n"
        "except OSError as error: print(error.errno)\n"
        "else: print(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        move_process(cgroup, process.pid)
        assert process.pid in processes_in(cgroup)
        return int(process.communicate("\n", timeout=60)[0])


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_elements(table):
    table.update(number(1), number(10, 8))

    assert table.lookup(number(1)) == number(10, 8)
    assert table.lookup(number(2)) is None
    assert table.delete(number(1)) and not table.delete(number(1))
    with pytest.raises(ValueError, match="a value has 8 bytes, not 4"):
        table.update(number(1), number(1))
    with pytest.raises(ValueError, match="a key has 4 bytes, not 8"):
        table.lookup(number(1, 8))


def test_batches(table):
    keys = [number(each) for each in range(20_000)]
    table.update_many(b"".join(keys), b"".join(number(each, 8) for each in range(20_000)))

    assert dict(table.items()) == {key: number(each, 8) for each, key in enumerate(keys)}
    table.delete_many([number(70_000), *keys[1:]])
    assert dict(table.items()) == {keys[0]: number(0, 8)}


def test_a_full_map_says_so():
    table = BpfMap.create(MapSpec(name="nx_small", kind=MapKind.HASH, key_size=4, value_size=4, max_entries=2))
    with pytest.raises(BpfError, match="map_update_batch of map nx_small: Argument list too long") as refusal:
        table.update_many(b"".join(map(number, range(3))), bytes(12))

    assert refusal.value.errno == errno.E2BIG
    table.close()


@pytest.mark.parametrize(
    ("kind", "key_size", "flags"),
    [
        (MapKind.LRU_HASH, 4, 0),
        (MapKind.ARRAY, 4, 0),
        (MapKind.PERCPU_HASH, 4, NO_PREALLOCATION),
        (MapKind.PERCPU_ARRAY, 4, 0),
        (MapKind.LPM_TRIE, 8, NO_PREALLOCATION),
    ],
)
def test_kinds_of_maps(kind, key_size, flags):
    spec = MapSpec(name="nx_kind", kind=kind, key_size=key_size, value_size=8, max_entries=4, flags=flags)
    table = BpfMap.create(spec)
    key = number(1) if key_size == 4 else number(32) + bytes([10, 0, 0, 1])
    table.update(key, bytes([7]) * table.value_size)

    assert dict(table.items())[key] == table.lookup(key) == bytes([7]) * table.value_size
    table.close()


def test_a_ring_buffer_can_be_created():
    BpfMap.create(MapSpec(name="nx_ring", kind=MapKind.RINGBUF, key_size=0, value_size=0, max_entries=4096)).close()


def test_pins_keep_maps_and_check_their_layout(table, pins):
    table.update(number(1), number(10, 8))
    table.pin(str(pins / "table"))
    table.close()

    opened = BpfMap.open(str(pins / "table"), HASH)
    assert opened.lookup(number(1)) == number(10, 8)
    opened.close()
    other = MapSpec(name="nx_test", kind=MapKind.HASH, key_size=4, value_size=4, max_entries=50_000)
    with pytest.raises(BpfError, match="is not map nx_test of this layout"):
        BpfMap.open(str(pins / "table"), other)
    with pytest.raises(BpfError, match="No such file"):
        BpfMap.open(str(pins / "missing"), HASH)
    assert pinned_names(pins) == {"table"} and pinned_names(pins / "none") == frozenset()


def test_programs_work_while_attached_and_are_replaced(cgroup, listener, pins):
    allow, refuse = (BpfProgram.load(refuse_port(port), {}) for port in (1, listener))
    folder = os.open(cgroup, os.O_RDONLY)
    link = BpfLink.create(allow, folder, AttachKind.CONNECT4)
    os.close(folder)
    link.pin(str(pins / "link"))
    assert try_connect(cgroup, listener) == 0
    link.replace(refuse)
    assert try_connect(cgroup, listener) == errno.EPERM
    link.close()
    assert try_connect(cgroup, listener) == errno.EPERM

    held = BpfLink.open(str(pins / "link"))
    state = held.state
    assert (state.program, state.cgroup, state.attach) == (refuse.id, cgroup.stat().st_ino, AttachKind.CONNECT4)
    assert list(attached_links(cgroup.stat().st_ino)) == [state]
    held.detach()
    held.close()
    assert try_connect(cgroup, listener) == 0
    for program in (allow, refuse):
        program.close()


def test_the_verifier_names_the_instruction():
    with pytest.raises(VerifierError) as refusal:
        BpfProgram.load(socket_program(move(R0, 1), LoadMemory(Width.WORD, R2, R1, 400), Exit(), name="nx_wrong"), {})

    assert "program nx_wrong: instruction 1: r2 = *(u32 *)(r1 +400): invalid bpf_context access off=400" in str(
        refusal.value
    )


def test_the_verifier_names_a_missing_end():
    statements = move(R0, 1), JumpIf(Condition.EQ, R0, 0, "on"), Compute(Operation.ADD, R0, 1), Label("on")
    with pytest.raises(VerifierError, match=r"program nx_test: .*jump out of range|last insn is not an exit or jmp"):
        BpfProgram.load(socket_program(*statements, Compute(Operation.MOV, R2, R0)), {})


def test_which_programs_the_kernel_loads():
    assert can_load(ProgramKind.CGROUP_SOCK_ADDR, AttachKind.CONNECT4) == ""
    assert can_load(ProgramKind.CGROUP_SOCK_ADDR, AttachKind.SK_MSG_VERDICT).startswith("sk_msg_verdict: ")


def test_where_the_hierarchy_is():
    assert cgroup_mount().joinpath("cgroup.procs").exists()
    assert cgroup_of() in ("/", cgroup_of(os.getpid()))
    assert processes_in(Path("/nowhere")) == []


def mounts_below(path):
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(path) in line]


def test_a_directory_for_pins_is_made_in_the_file_system_that_is_mounted(tmp_path):
    """A second one would hide in a container's mounts, and what is pinned in it would end with the container."""
    try:
        mount_bpf_file_system(tmp_path / "bpf")
        mount_bpf_file_system(tmp_path / "bpf" / "narthex" / "more")
        assert (tmp_path / "bpf" / "narthex" / "more").is_dir()
        assert mounts_below(tmp_path) == [str(tmp_path / "bpf")]
    finally:
        unmount(tmp_path / "bpf")
    assert mounts_below(tmp_path) == []


def test_processes_that_mount_at_the_same_time_mount_once(tmp_path):
    """A second mount would hide what the first process has pinned."""
    place = tmp_path / "bpf"
    place.mkdir()
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(mount_bpf_file_system, [place] * 8))
        assert mounts_below(tmp_path) == [str(place)]
        assert len(mounts_below(tmp_path)) <= 8
        mount_bpf_file_system(place)
    finally:
        for _ in mounts_below(tmp_path):
            unmount(place)
    assert mounts_below(tmp_path) == []
