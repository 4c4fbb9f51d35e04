"""BPF programs and links of the kernel."""

from __future__ import annotations

import ctypes
import errno
import re
import struct
from collections.abc import Iterator, Mapping

import msgspec

from narthex.bpf import AttachKind, BpfProgramSpec, Compute, Exit, Operation, ProgramKind, Register, assemble, listing
from narthex.linux.bpf.maps import BpfMap
from narthex.linux.bpf.syscall import (
    BpfError,
    BpfObject,
    Command,
    address_of,
    bpf,
    object_information,
    object_name,
    open_pin,
)

_LOG_SIZE = 1 << 20
_INSTRUCTION_LINE = re.compile(r"^(\d+): \([0-9a-f]{2}\) ")
_NOT_A_REASON = re.compile(
    r"^(processed \d+ insns|\d+: |;|R\d|from \d+ to|verification time|stack depth|mark_precise|func#)"
)
_LINK_SIZE = 32
_PROGRAM_SIZE = 80
_MAX_MAPS = 64


class VerifierError(BpfError):
    """The verifier refused a program; the message has the instruction and the reason."""


class BpfProgram(BpfObject):
    """One loaded program."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, f"program {name}")

    @classmethod
    def load(cls, spec: BpfProgramSpec, maps: Mapping[str, BpfMap]) -> BpfProgram:
        """Load a program with its maps by name.

        Raises VerifierError if the kernel's verifier refuses it, and BpfError if the kernel lacks something.
        """
        code = assemble(spec.statements, {name: maps[name].descriptor for name in spec.maps})
        instructions = ctypes.create_string_buffer(code, len(code))
        license_name = ctypes.create_string_buffer(b"GPL")

        def request(log: ctypes.Array[ctypes.c_char] | None) -> bytes:
            """Return the attributes of the command, with a log or without."""
            return (
                struct.pack("=IIQQ", int(spec.kind), len(code) // 8, address_of(instructions), address_of(license_name))
                + struct.pack("=IIQ", int(log is not None), len(log or b""), address_of(log) if log is not None else 0)
                + struct.pack("=II", 0, 0)
                + object_name(spec.name)
                + struct.pack("=II", 0, int(spec.attach))
            )

        what = f"load program {spec.name}"
        try:
            return cls(bpf(Command.PROG_LOAD, request(None), what), spec.name)
        except BpfError as error:
            if error.errno not in (errno.EACCES, errno.EINVAL, errno.EPERM, errno.E2BIG):
                raise
            refusal = error
        # Written only now: a log makes loading several times slower.
        log = ctypes.create_string_buffer(_LOG_SIZE)
        try:
            return cls(bpf(Command.PROG_LOAD, request(log), what), spec.name)
        except BpfError:
            reason = explain_log(log.value.decode(errors="replace"), listing(code))
        if not reason:
            raise refusal
        raise VerifierError(refusal.errno, f"the kernel refused program {spec.name}: {reason}") from refusal

    @classmethod
    def open(cls, path: str, name: str) -> BpfProgram:
        """Return the program that is pinned at a path. Raises BpfError."""
        return cls(open_pin(path), name)

    @property
    def map_ids(self) -> frozenset[int]:
        """The kernel's numbers of the maps that the program uses."""
        numbers = ctypes.create_string_buffer(4 * _MAX_MAPS)
        asked = bytearray(_PROGRAM_SIZE)
        struct.pack_into("=IQ", asked, 52, _MAX_MAPS, address_of(numbers))
        found = object_information(self.descriptor, _PROGRAM_SIZE, f"read {self.name}", bytes(asked))
        (count,) = struct.unpack_from("=I", found, 52)
        return frozenset(struct.unpack_from(f"={min(count, _MAX_MAPS)}I", numbers))


class BpfLink(BpfObject):
    """The attachment of a program to a cgroup. It ends with its last descriptor or pin."""

    @classmethod
    def create(cls, program: BpfProgram, cgroup: int, attach: AttachKind) -> BpfLink:
        """Attach a program to an open cgroup directory, in addition to others (Linux 5.7). Raises BpfError."""
        request = struct.pack("=IIII", program.descriptor, cgroup, int(attach), 0) + bytes(16)
        name = f"link {attach.name.lower()}"
        return cls(bpf(Command.LINK_CREATE, request, f"attach {program.name}"), name)

    @classmethod
    def open(cls, path: str) -> BpfLink:
        """Return the link that is pinned at a path. Raises BpfError."""
        return cls(open_pin(path), f"link {path}")

    @property
    def state(self) -> CgroupLink:
        """What the link attaches, and where."""
        data = object_information(self.descriptor, _LINK_SIZE, f"read {self.name}")
        number, program = struct.unpack_from("=II", data, 4)
        cgroup, attach = struct.unpack_from("=QI", data, 16)
        return CgroupLink(number, program, cgroup, attach)

    def replace(self, program: BpfProgram) -> None:
        """Replace the program atomically: each call of the hook runs the old one or the new one. Raises BpfError."""
        request = struct.pack("=IIII", self.descriptor, program.descriptor, 0, 0)
        bpf(Command.LINK_UPDATE, request, f"replace the program of {self.name}")

    def detach(self) -> None:
        """Detach the program, even if others hold the link. Raises BpfError."""
        bpf(Command.LINK_DETACH, struct.pack("=I", self.descriptor), f"detach {self.name}")


class CgroupLink(msgspec.Struct, frozen=True):
    """What the kernel reports of a link to a cgroup."""

    id: int
    program: int
    cgroup: int
    """Inode number of the cgroup's directory; 0 once the cgroup is removed."""
    attach: int
    """Number of the hook, as in AttachKind."""


def attached_links(cgroup: int) -> Iterator[CgroupLink]:
    """Yield the links of all programs at a cgroup, by the inode number of its directory. Raises BpfError."""
    number = 0
    while True:
        request = ctypes.create_string_buffer(struct.pack("=III", number, 0, 0), 12)
        try:
            bpf(Command.LINK_GET_NEXT_ID, request, "list links")
        except BpfError as error:
            if error.errno == errno.ENOENT:
                return
            raise
        (number,) = struct.unpack_from("=I", request, 4)
        try:
            link = BpfLink(bpf(Command.LINK_GET_FD_BY_ID, struct.pack("=III", number, 0, 0), "open a link"), "link")
        except BpfError as error:
            if error.errno == errno.ENOENT:
                continue
            raise
        try:
            state = link.state
        finally:
            link.close()
        if state.cgroup == cgroup:
            yield state


def attach_to_map(program: BpfProgram, target: BpfMap, attach: AttachKind) -> None:
    """Attach a program to a sockmap; it ends with the map. Raises BpfError."""
    request = struct.pack("=IIII", target.descriptor, program.descriptor, int(attach), 0)
    bpf(Command.PROG_ATTACH, request, f"attach {program.name} to {target.name}")


def can_load(kind: ProgramKind, attach: AttachKind) -> str:
    """Return why the kernel loads no program for a hook; empty if it does."""
    statements = (Compute(Operation.MOV, Register.R0, 1), Exit())
    try:
        BpfProgram.load(BpfProgramSpec(name="nx_probe", kind=kind, attach=attach, statements=statements), {}).close()
    except BpfError as error:
        return f"{attach.name.lower()}: {error.strerror}"
    return ""


def explain_log(log: str, text: str) -> str:
    """Return the refused instruction and the verifier's reason; empty if the log has none.

    Args:
        log: The verifier's log of level 1.
        text: The program as `listing` prints it.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reasons = [line for line in lines if not _NOT_A_REASON.match(line) and not line.startswith("arg#")]
    positions = [int(match[1]) for line in lines if (match := _INSTRUCTION_LINE.match(line))]
    if not reasons and not positions:
        return ""
    where = ""
    if positions:
        found = next((line for line in text.splitlines() if line.startswith(f"{positions[-1]}: ")), "")
        where = f"instruction {found or positions[-1]}: "
    return f"{where}{reasons[-1] if reasons else 'no reason is given'}"
