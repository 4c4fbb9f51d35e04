"""Address reservations on disk, in the format of the reference host-local plugin, so that a node can switch between both.

`DIRECTORY/ADDRESS` has container ID and interface, `last_reserved_ip.N` the last address of range set N, and `lock` is
locked by readers and writers.
"""

from __future__ import annotations

from narthex.cni.kernel import files
from narthex.model import packed_addresses as address
from narthex.model.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_LAST = "last_reserved_ip."
_UNFINISHED = ".unfinished"
"""One name suffices: writers hold the lock."""


class LeaseOwner(Value):
    """The attachment that holds an address."""

    container: str
    interface: str
    """Empty in files of plugins before 2019."""

    def is_of(self, container: str, interface: str) -> bool:
        """Return True if this is the attachment."""
        return self.container == container and self.interface in ("", interface)


_FEW = 16


class ReservedAddressSet:
    """Membership test for reserved addresses.

    The next address is nearly always free, so the first lookups check single files; further ones use a list that is read once.
    """

    def __init__(self, leases: IpamLeases) -> None:
        self._leases = leases
        self._asked = 0
        self._all: set[bytes] = set()

    def __contains__(self, one: object) -> bool:
        """Return True if the address is reserved. Raises OSError."""
        self._asked += 1
        if self._asked <= _FEW:
            return isinstance(one, bytes) and self._leases.has(one)
        if self._asked == _FEW + 1:
            self._all = self._leases.all()
        return one in self._all


class IpamLeases:
    """Reservations of one network. Except where noted, methods require the lock."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def lock(self) -> files.Lock:
        """Return the lock, creating the directory if needed. Raises OSError."""
        files.make_directory(self._directory)
        return files.Lock(f"{self._directory}/lock")

    def taken(self) -> ReservedAddressSet:
        """Return the reserved addresses, for membership tests."""
        return ReservedAddressSet(self)

    def all(self) -> set[bytes]:
        """Return all reserved addresses. Raises OSError."""
        found = set()
        for name in files.names(self._directory):
            try:
                found.add(address.packed(name))
            except ValueError:
                continue
        return found

    def held(self) -> dict[bytes, LeaseOwner]:
        """Return all reservations with their owners. Raises OSError."""
        every = ((one, self.owner(one)) for one in self.all())
        return {one: owner for one, owner in every if owner is not None}

    def owner(self, one: bytes) -> LeaseOwner | None:
        """Return the owner of an address, or None; an empty file was never completed. Raises OSError."""
        data = files.read(f"{self._directory}/{address.text(one)}")
        if not data or not data.strip():
            return None
        container, _, interface = data.decode("utf-8", "replace").strip().partition("\r\n")
        return LeaseOwner(container, interface)

    def those_of(self, container: str, interface: str, among: Iterable[bytes] | None = None) -> list[bytes]:
        """Return the addresses of an attachment, searching `among` or all reservations. Raises OSError."""
        every = self.all() if among is None else among
        owners = ((one, self.owner(one)) for one in every)
        return [one for one, owner in owners if owner is not None and owner.is_of(container, interface)]

    def last(self, sets: int) -> dict[int, bytes]:
        """Return the last assigned address of each range set. Raises OSError."""
        found = {}
        for number in range(sets):
            data = files.read(f"{self._directory}/{_LAST}{number}")
            try:
                found[number] = address.packed((data or b"").decode("ascii", "replace").strip())
            except ValueError:
                continue
        return found

    def reserve(self, one: bytes, container: str, interface: str) -> None:
        """Reserve an address for an attachment. Raises OSError."""
        files.write(self._directory, address.text(one), f"{container}\r\n{interface}".encode(), _UNFINISHED)

    def remember(self, number: int, one: bytes) -> None:
        """Store the last assigned address of a range set. Raises OSError."""
        files.write(self._directory, f"{_LAST}{number}", address.text(one).encode(), _UNFINISHED)

    def free(self, addresses: Iterable[bytes]) -> None:
        """Release addresses; they may be free already. Raises OSError."""
        for one in addresses:
            files.remove(f"{self._directory}/{address.text(one)}")

    def has(self, one: bytes) -> bool:
        """Return True if an address is reserved. Raises OSError."""
        return files.read(f"{self._directory}/{address.text(one)}") is not None

    def exists(self) -> bool:
        """Return True if the network ever assigned an address. Needs no lock. Raises OSError."""
        return files.read(f"{self._directory}/lock") is not None
