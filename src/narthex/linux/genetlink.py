"""Generic netlink, whose families have names and get their numbers from the kernel."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from narthex.linux.netlink import Netlink, NetlinkError, attribute, payloads

_NETLINK_GENERIC = 16
_CONTROLLER, _GET_FAMILY = 16, 3
_FAMILY_NUMBER, _FAMILY_NAME = 1, 2
_HEAD = struct.Struct("=BBH")
"""Command, version, padding."""
_VERSION = 1

GenetlinkRequest = tuple[int, bytes]
"""Command and attributes."""


class Genetlink(Netlink):
    """A socket for one family in one network namespace. Not thread-safe."""

    def __init__(self, family: str, namespace: str | None = None) -> None:
        """Open the socket. Raises NetlinkError, with ENOENT if the kernel lacks the family and cannot load it."""
        super().__init__(_NETLINK_GENERIC, namespace)
        try:
            self._number = self._number_of(family)
        except NetlinkError:
            self.close()
            raise

    def _number_of(self, family: str) -> int:
        body = _HEAD.pack(_GET_FAMILY, _VERSION, 0) + attribute(_FAMILY_NAME, family.encode() + b"\0")
        for data in self.answers(self.request(_CONTROLLER, body)):
            if number := payloads(data, _HEAD.size).get(_FAMILY_NUMBER):
                return int(struct.unpack("=H", number)[0])
        raise NetlinkError(0, f"the kernel's answer about {family} has no number")

    def ask(self, command: int, payload: bytes = b"") -> bytes:
        """Return the attributes of the single message that answers. Raises NetlinkError."""
        sequence = self.request(self._number, _HEAD.pack(command, _VERSION, 0) + payload)
        for data in self.answers(sequence):
            return data[_HEAD.size :]
        raise NetlinkError(0, "the kernel's answer is empty")

    def listing(self, command: int, payload: bytes = b"") -> Iterator[bytes]:
        """Yield the attributes of each message of a dump. Raises NetlinkError, and DumpInterrupted at the end."""
        for data in self.dump(self._number, _HEAD.pack(command, _VERSION, 0) + payload):
            yield data[_HEAD.size :]

    def write(self, requests: Sequence[GenetlinkRequest]) -> list[NetlinkError | None]:
        """Send requests in order; return the kernel's error for each, None for success."""
        bodies = [_HEAD.pack(command, _VERSION, 0) + payload for command, payload in requests]
        return self.each(self._number, bodies)
