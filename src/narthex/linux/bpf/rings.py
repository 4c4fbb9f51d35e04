"""Ring buffers of BPF programs (Linux 5.8): reports that a program writes, and one process reads."""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

from narthex.bpf import MapSpec
from narthex.linux.bpf.maps import BpfMap
from narthex.linux.bpf.syscall import BpfError

_POSITION = struct.Struct("=Q")
_HEADER = struct.Struct("=II")
_BUSY, _DISCARDED = 1 << 31, 1 << 30


class RingReports(NamedTuple):
    """What a reading found."""

    reports: tuple[bytes, ...]
    complete: bool
    """False if the buffer was full, so that later reports may have been lost."""


class BpfRing:
    """The reading end of a ring buffer. Its file can be polled. Not thread-safe."""

    def __init__(self, spec: MapSpec) -> None:
        """Create the buffer; `spec.max_entries` is its size in bytes, a power of two. Raises BpfError."""
        self.map = BpfMap.create(spec)
        self._size = spec.max_entries
        page = mmap.PAGESIZE
        try:
            # The reader's position is on the first page, the writers' on the second one; the data is mapped twice in a row.
            self._own = mmap.mmap(self.map.descriptor, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            self._data = mmap.mmap(
                self.map.descriptor, page + 2 * self._size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
            )
        except OSError as error:
            self.map.close()
            raise BpfError(error.errno or 0, f"map {spec.name} of memory: {error.strerror}") from error

    def read(self) -> RingReports:
        """Return the reports since the last call, the oldest first."""
        page, size = mmap.PAGESIZE, self._size
        (position,) = _POSITION.unpack_from(self._own)
        (end,) = _POSITION.unpack_from(self._data)
        start, reports, longest = position, [], 0
        while position < end:
            offset = page + position % size
            length, _ = _HEADER.unpack_from(self._data, offset)
            if length & _BUSY:
                break
            if not length & _DISCARDED:
                begin = offset + _HEADER.size
                reports.append(self._data[begin : begin + length])
            step = _HEADER.size + ((length & ~_DISCARDED) + 7) // 8 * 8
            longest = max(longest, step)
            position += step
        # Only now, in one step: while the position stayed, a program found no room only if the writers' position came that far.
        _POSITION.pack_into(self._own, 0, position)
        (latest,) = _POSITION.unpack_from(self._data)
        return RingReports(tuple(reports), complete=latest - start + longest <= size)

    def close(self) -> None:
        """Release the buffer."""
        self._own.close()
        self._data.close()
        self.map.close()
