"""The system call bpf(2), without a library."""

from __future__ import annotations

import ctypes
import enum
import os
import platform
import struct

_NUMBERS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_NAME_SIZE = 16

_libc = ctypes.CDLL(None, use_errno=True)


class Command(enum.IntEnum):
    """Commands of linux/bpf.h that Narthex uses."""

    MAP_CREATE = 0
    MAP_LOOKUP_ELEM = 1
    MAP_UPDATE_ELEM = 2
    MAP_DELETE_ELEM = 3
    MAP_GET_NEXT_KEY = 4
    PROG_LOAD = 5
    OBJ_PIN = 6
    OBJ_GET = 7
    PROG_ATTACH = 8
    PROG_DETACH = 9
    OBJ_GET_INFO_BY_FD = 15
    PROG_GET_FD_BY_ID = 13
    MAP_GET_FD_BY_ID = 14
    MAP_LOOKUP_BATCH = 24
    MAP_UPDATE_BATCH = 26
    MAP_DELETE_BATCH = 27
    LINK_CREATE = 28
    LINK_UPDATE = 29
    LINK_GET_FD_BY_ID = 30
    LINK_GET_NEXT_ID = 31
    LINK_DETACH = 34


class BpfError(OSError):
    """The kernel refused an operation; the message names the object."""


def bpf(command: Command, attributes: ctypes.Array[ctypes.c_char] | bytes, what: str) -> int:
    """Run one command and return its result.

    `attributes` is the command's part of `union bpf_attr`; pass a buffer to read what the kernel writes into it. `what`
    names the operation and its object for the error. Raises BpfError.
    """
    buffer = attributes if isinstance(attributes, ctypes.Array) else ctypes.create_string_buffer(attributes)
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise BpfError(38, f"{what}: the number of bpf(2) on {platform.machine()} is not known")
    size = len(attributes)
    result = int(_libc.syscall(number, int(command), ctypes.byref(buffer), size))
    if result < 0:
        error = ctypes.get_errno()
        raise BpfError(error, f"{what}: {os.strerror(error)}")
    return result


def address_of(buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Return the address of a buffer, which must outlive the call."""
    return ctypes.addressof(buffer)


def object_name(name: str) -> bytes:
    """Return a name as the kernel takes it: 15 letters, digits, underscores, and dots."""
    return name.encode()[: _NAME_SIZE - 1].ljust(_NAME_SIZE, b"\0")


def object_information(descriptor: int, size: int, what: str, filled: bytes = b"") -> bytes:
    """Return the information that the kernel has of an object, of the given size. Raises BpfError."""
    information = ctypes.create_string_buffer(filled, size)
    request = struct.pack("=IIQ", descriptor, size, address_of(information))
    bpf(Command.OBJ_GET_INFO_BY_FD, request, what)
    return information.raw


class BpfObject:
    """A file descriptor of a map, a program, or a link. The kernel's object lives as long as something refers to it."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self.name = name

    @property
    def id(self) -> int:
        """The kernel's number of the object."""
        number: int = struct.unpack_from("=I", object_information(self.descriptor, 8, f"read {self.name}"), 4)[0]
        return number

    def pin(self, path: str) -> None:
        """Give the object a name in a BPF file system, which keeps it alive. Raises BpfError."""
        name = ctypes.create_string_buffer(os.fsencode(path))
        request = struct.pack("=QII", address_of(name), self.descriptor, 0)
        bpf(Command.OBJ_PIN, request, f"pin {self.name} to {path}")

    def close(self) -> None:
        """Close the descriptor; pins and other references keep the object."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def open_pin(path: str) -> int:
    """Return a new descriptor of a pinned object. Raises BpfError."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    return bpf(Command.OBJ_GET, struct.pack("=QII", address_of(name), 0, 0), f"open {path}")
