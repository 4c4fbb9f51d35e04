"""BPF maps of the kernel: elements one by one, and in batches (Linux 5.6)."""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from narthex.bpf import MapKind, MapSpec
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

_BATCH = 8192
_DELETE_BATCH = 8192
_BTF_FIELDS = struct.pack("=IIII", 0, 0, 0, 0)


class BpfMap(BpfObject):
    """One map. Keys and values are bytes of the sizes in `spec`; a per-CPU value has one part for each processor."""

    def __init__(self, descriptor: int, spec: MapSpec) -> None:
        super().__init__(descriptor, f"map {spec.name}")
        self.spec = spec
        self.value_size = spec.value_size
        if spec.kind.per_cpu:
            self.value_size = (spec.value_size + 7) // 8 * 8 * possible_processors()
        self.writes = 0
        """Elements that this object has written or deleted."""

    @classmethod
    def create(cls, spec: MapSpec) -> BpfMap:
        """Create a map. Raises BpfError."""
        request = struct.pack(
            "=IIIIIII", int(spec.kind), spec.key_size, spec.value_size, spec.max_entries, spec.flags, 0, 0
        )
        request += object_name(spec.name) + struct.pack("=I", 0) + _BTF_FIELDS[:12]
        return cls(bpf(Command.MAP_CREATE, request, f"create map {spec.name}"), spec)

    @classmethod
    def open(cls, path: str, spec: MapSpec) -> BpfMap:
        """Return the map that is pinned at a path. Raises BpfError if there is none, or if its layout differs."""
        found = cls(open_pin(path), spec)
        held = struct.unpack_from("=IIIII", object_information(found.descriptor, 24, f"read {path}"), 0)
        if (held[0], *held[2:]) != (int(spec.kind), spec.key_size, spec.value_size, spec.max_entries):
            found.close()
            raise BpfError(errno.EINVAL, f"{path} is not map {spec.name} of this layout")
        return found

    # ---- single elements -------------------------------------------------------------------------------------------

    def lookup(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if there is none. Raises BpfError."""
        value = ctypes.create_string_buffer(self.value_size)
        try:
            self._element(Command.MAP_LOOKUP_ELEM, key, value)
        except BpfError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return value.raw

    def update(self, key: bytes, value: bytes, flags: int = 0) -> None:
        """Create or replace an element. Raises BpfError."""
        if len(value) != self.value_size:
            raise ValueError(f"map {self.spec.name}: a value has {self.value_size} bytes, not {len(value)}")
        self._element(Command.MAP_UPDATE_ELEM, key, ctypes.create_string_buffer(value, len(value)), flags)
        self.writes += 1

    def delete(self, key: bytes) -> bool:
        """Delete an element; return False if there was none. Raises BpfError."""
        try:
            self._element(Command.MAP_DELETE_ELEM, key, None)
        except BpfError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        self.writes += 1
        return True

    def _element(self, command: Command, key: bytes, value: ctypes.Array[ctypes.c_char] | None, flags: int = 0) -> None:
        if len(key) != self.spec.key_size:
            raise ValueError(f"map {self.spec.name}: a key has {self.spec.key_size} bytes, not {len(key)}")
        name = ctypes.create_string_buffer(key, len(key))
        request = struct.pack(
            "=IIQQQ", self.descriptor, 0, address_of(name), address_of(value) if value is not None else 0, flags
        )
        bpf(command, request, f"{command.name.lower()} of map {self.spec.name}")

    # ---- many elements ---------------------------------------------------------------------------------------------

    def update_many(self, keys: bytes, values: bytes) -> None:
        """Create or replace elements whose keys and values are joined. Raises BpfError; some may then be written."""
        count = len(keys) // self.spec.key_size
        if count * self.spec.key_size != len(keys) or count * self.value_size != len(values):
            raise ValueError(f"map {self.spec.name}: {len(keys)} bytes of keys, {len(values)} bytes of values")
        if count == 1:
            self.update(keys, values)
        elif count:
            self._batch(Command.MAP_UPDATE_BATCH, keys, values, count)

    def delete_many(self, keys: Iterable[bytes]) -> None:
        """Delete elements; those that do not exist are skipped. Raises BpfError."""
        listed = list(keys)
        for start in range(0, len(listed), _DELETE_BATCH):
            part = listed[start : start + _DELETE_BATCH]
            try:
                if len(part) > 1:
                    self._batch(Command.MAP_DELETE_BATCH, b"".join(part), b"", len(part))
                else:
                    self.delete(part[0])
            except BpfError as error:
                if error.errno != errno.ENOENT:
                    raise
                # A batch ends at the first element that does not exist.
                for key in part:
                    self.delete(key)

    def _batch(self, command: Command, keys: bytes, values: bytes, count: int) -> None:
        # The kernel only reads these, so the bytes objects themselves are passed.
        held = ctypes.cast(ctypes.c_char_p(keys), ctypes.c_void_p).value
        given = ctypes.cast(ctypes.c_char_p(values), ctypes.c_void_p).value if values else 0
        request = struct.pack("=QQQQIIQQ", 0, 0, held, given, count, self.descriptor, 0, 0)
        bpf(command, request, f"{command.name.lower()} of map {self.spec.name}")
        self.writes += count

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values. Elements that change meanwhile may be missing or appear twice. Raises BpfError."""
        if self.spec.kind in (MapKind.LPM_TRIE, MapKind.ARRAY, MapKind.PERCPU_ARRAY, MapKind.SOCKHASH):
            yield from self._items_one_by_one()
            return
        key_size, value_size = self.spec.key_size, self.value_size
        size = _BATCH
        keys, values = ctypes.create_string_buffer(key_size * size), ctypes.create_string_buffer(value_size * size)
        position, following = (
            ctypes.create_string_buffer(max(key_size, 8)),
            ctypes.create_string_buffer(max(key_size, 8)),
        )
        first, more = True, True
        while more:
            request = ctypes.create_string_buffer(
                struct.pack(
                    "=QQQQIIQQ",
                    0 if first else address_of(position),
                    address_of(following),
                    address_of(keys),
                    address_of(values),
                    size,
                    self.descriptor,
                    0,
                    0,
                ),
                56,
            )
            try:
                bpf(Command.MAP_LOOKUP_BATCH, request, f"read map {self.spec.name}")
            except BpfError as error:
                if error.errno != errno.ENOENT:
                    raise
                more = False
            (count,) = struct.unpack_from("=I", request, 32)
            ctypes.memmove(position, following, len(following))
            first = False
            names, data = keys.raw[: count * key_size], values.raw[: count * value_size]
            for index in range(count):
                yield (
                    names[index * key_size : (index + 1) * key_size],
                    data[index * value_size : (index + 1) * value_size],
                )

    def _items_one_by_one(self) -> Iterator[tuple[bytes, bytes]]:
        key: bytes | None = None
        while (key := self._next_key(key)) is not None:
            value = self.lookup(key)
            if value is not None:
                yield key, value

    def _next_key(self, key: bytes | None) -> bytes | None:
        following = ctypes.create_string_buffer(self.spec.key_size)
        held = ctypes.create_string_buffer(key, len(key)) if key is not None else None
        request = struct.pack(
            "=IIQQQ", self.descriptor, 0, address_of(held) if held is not None else 0, address_of(following), 0
        )
        try:
            bpf(Command.MAP_GET_NEXT_KEY, request, f"read map {self.spec.name}")
        except BpfError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return following.raw


def possible_processors() -> int:
    """Return the number of processors that the machine can have, which sizes per-CPU values."""
    # "0-3", or "0-3,8-11".
    text = Path("/sys/devices/system/cpu/possible").read_text()
    return max(int(part.rpartition("-")[2]) for part in text.split(",")) + 1
