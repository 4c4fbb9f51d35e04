"""Reservations of addresses on disk, as the reference's host-local keeps them, so that a node can change over.

`DIRECTORY/ADDRESS` holds container and interface, `last_reserved_ip.N` the address that range set N gave last, `lock`
is held by whoever reads or writes.
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
"""One is enough: whoever writes holds the lock."""


class LeaseOwner(Value):
    """Who holds an address."""

    container: str
    interface: str
    """Empty in files of plugins before 2019."""

    def is_of(self, container: str, interface: str) -> bool:
        """Whether this is the attachment."""
        return self.container == container and self.interface in ("", interface)


_FEW = 16


class ReservedAddressSet:
    """Addresses that have a reservation. The next one is nearly always free, so that to look for its file is enough; who
    asks for many gets the answer of a list, which is made once."""

    def __init__(self, leases: IpamLeases) -> None:
        self._leases = leases
        self._asked = 0
        self._all: set[bytes] = set()

    def __contains__(self, one: object) -> bool:
        """Raises OSError."""
        self._asked += 1
        if self._asked <= _FEW:
            return isinstance(one, bytes) and self._leases.has(one)
        if self._asked == _FEW + 1:
            self._all = self._leases.all()
        return one in self._all


class IpamLeases:
    """The reservations of one network. All methods want the lock."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def lock(self) -> files.Lock:
        """The lock, in a directory that is made if need be. Raises OSError."""
        files.make_directory(self._directory)
        return files.Lock(f"{self._directory}/lock")

    def taken(self) -> ReservedAddressSet:
        """Addresses that have a reservation, whoever's, to be asked for single ones."""
        return ReservedAddressSet(self)

    def all(self) -> set[bytes]:
        """Addresses that have a reservation. Raises OSError."""
        found = set()
        for name in files.names(self._directory):
            try:
                found.add(address.packed(name))
            except ValueError:
                continue
        return found

    def held(self) -> dict[bytes, LeaseOwner]:
        """All reservations and whose they are. Raises OSError."""
        every = ((one, self.owner(one)) for one in self.all())
        return {one: owner for one, owner in every if owner is not None}

    def owner(self, one: bytes) -> LeaseOwner | None:
        """Who holds an address; None when nobody does. An empty file was never finished. Raises OSError."""
        data = files.read(f"{self._directory}/{address.text(one)}")
        if not data or not data.strip():
            return None
        container, _, interface = data.decode("utf-8", "replace").strip().partition("\r\n")
        return LeaseOwner(container, interface)

    def those_of(self, container: str, interface: str, among: Iterable[bytes] | None = None) -> list[bytes]:
        """The addresses of an attachment, looked for among some or among all. Raises OSError."""
        every = self.all() if among is None else among
        owners = ((one, self.owner(one)) for one in every)
        return [one for one, owner in owners if owner is not None and owner.is_of(container, interface)]

    def last(self, sets: int) -> dict[int, bytes]:
        """The address that each range set gave last. Raises OSError."""
        found = {}
        for number in range(sets):
            data = files.read(f"{self._directory}/{_LAST}{number}")
            try:
                found[number] = address.packed((data or b"").decode("ascii", "replace").strip())
            except ValueError:
                continue
        return found

    def reserve(self, one: bytes, container: str, interface: str) -> None:
        """Give an address to an attachment. Raises OSError."""
        files.write(self._directory, address.text(one), f"{container}\r\n{interface}".encode(), _UNFINISHED)

    def remember(self, number: int, one: bytes) -> None:
        """Note the address that a range set gave last. Raises OSError."""
        files.write(self._directory, f"{_LAST}{number}", address.text(one).encode(), _UNFINISHED)

    def free(self, addresses: Iterable[bytes]) -> None:
        """Take addresses back; they may be free. Raises OSError."""
        for one in addresses:
            files.remove(f"{self._directory}/{address.text(one)}")

    def has(self, one: bytes) -> bool:
        """Whether an address has a reservation, whoever's. Raises OSError."""
        return files.read(f"{self._directory}/{address.text(one)}") is not None

    def exists(self) -> bool:
        """Whether the network ever gave an address. Needs no lock. Raises OSError."""
        return files.read(f"{self._directory}/lock") is not None
