"""Our nftables tables for pods: set elements change in one transaction, the rules around them are created once.

An element has the name of its attachment as a comment, so that its owner is known, also to readers of `nft list`.
"""

from __future__ import annotations

import errno
import sys

from narthex.cni.kernel import files
from narthex.cni.plan import SetElement
from narthex.linux.failpoints import CNI_ELEMENTS, CNI_TABLE, failpoint
from narthex.linux.netlink import DumpInterrupted, NetlinkError
from narthex.linux.netlink import attribute as attr
from narthex.linux.nfnetlink import DELETE_ELEMENTS, INET, NEW_ELEMENTS, NEW_UNTAKEN_ELEMENTS, NfNetlink
from narthex.model.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_NESTED = 0x8000
_LIST_ELEM, _KEY, _DATA, _USERDATA, _KEY_END, _VALUE = 1, 1, 2, 6, 10, 1
_MOST_COMMENT = 120
"""The kernel's limit is 128 bytes with the terminating zero."""
_ATTEMPTS = 10


class ElementExistsError(Exception):
    """An exclusive element exists already."""

    def __init__(self, element: SetElement, owner: str) -> None:
        super().__init__(owner)
        self.element = element
        self.owner = owner
        """In the form of `owner_of`."""


class InstalledElement(Value):
    """An existing element and its owner."""

    element: SetElement
    owner: str


class PodTable:
    """One table of family inet in the calling thread's network namespace. Not thread-safe."""

    def __init__(self, name: str, frame: Callable[[], str], lock: str) -> None:
        """Set the table. `frame` returns it without elements in nft syntax; `lock` is a file to lock during its creation."""
        self._name = name
        self._frame = frame
        self._lock = lock
        self._netlink = NfNetlink()

    def close(self) -> None:
        """Close the socket."""
        self._netlink.close()

    def add(self, elements: Sequence[SetElement], owner: str, shared: Sequence[SetElement] = ()) -> None:
        """Add elements in one transaction; `shared` ones have no owner and may exist.

        Raises ElementExistsError, and OSError if the kernel refuses.
        """
        messages = [
            (NEW_UNTAKEN_ELEMENTS if one.exclusive else NEW_ELEMENTS, self._payload([one], owner)) for one in elements
        ]
        messages += [(NEW_ELEMENTS, self._payload([one], "")) for one in shared]
        if not messages:
            return
        try:
            self._commit(messages)
        except NetlinkError as error:
            if error.errno != errno.EEXIST or error.message is None or error.message >= len(elements):
                raise OSError(error.errno, f"table {self._name}: {error.strerror}") from None
            expected = elements[error.message]
            there = self._netlink.element(INET, self._name, expected.set, _encoded(expected, "", key_only=True))
            raise ElementExistsError(expected, _owner(there) if there is not None else "") from None

    def _commit(self, messages: Sequence[tuple[int, bytes]]) -> None:
        try:
            self._netlink.commit(INET, messages)
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise
            self._make()
            self._netlink.commit(INET, messages)
        failpoint(CNI_ELEMENTS)

    def _make(self) -> None:
        """Create the missing table, or complete one of an older version, whose elements stay."""
        from narthex.linux.libnftables import NftError, NftMissingError, run_nft

        files.make_directory(self._lock.rpartition("/")[0])
        with files.Lock(self._lock):
            if self.is_whole():
                return
            # nft 1.0.6 accepts rules with a map only in the transaction that declares the map.
            before = [each for name in self._names("set", "map") for each in self.held([name])]
            try:
                run_nft(f"table inet {self._name}\ndelete table inet {self._name}\n{self._frame()}")
            except (NftError, NftMissingError) as error:
                raise OSError(errno.EOPNOTSUPP, f"table {self._name} cannot be made: {error}") from None
            if before:
                self._netlink.commit(
                    INET, [(NEW_ELEMENTS, self._payload([each.element], each.owner)) for each in before]
                )
            failpoint(CNI_TABLE)

    def is_whole(self) -> bool:
        """Return True if the table exists with all its chains and sets. Raises OSError."""
        there = {chain for table, chain in self._netlink.chains(INET) if table == self._name}
        sets = self._names("set", "map")
        return there.issuperset(self._names("chain")) and all(
            self._netlink.has_set(INET, self._name, each) for each in sets
        )

    def _names(self, *kinds: str) -> list[str]:
        """Return the names of the frame's objects of some kinds."""
        lines = [line.split() for line in self._frame().splitlines() if line.startswith("\t")]
        return [words[1] for words in lines if words[0] in kinds]

    def restore(self) -> bool:
        """Create the table if it is missing or incomplete; return True if it was. Raises OSError."""
        if self.is_whole():
            return False
        self._make()
        return True

    def remove(self, elements: Sequence[SetElement], owner: str) -> None:
        """Remove existing elements of an owner in one transaction. Raises OSError."""
        ours = []
        for one in elements:
            try:
                there = self._netlink.element(INET, self._name, one.set, _encoded(one, "", key_only=True))
            except NetlinkError as error:
                if error.errno == errno.ENOENT:
                    return
                raise
            if there is not None and _owner(there) == owner:
                ours.append(one)
        if ours:
            self._netlink.commit(INET, [(DELETE_ELEMENTS, self._payload([one], "", key_only=True)) for one in ours])
            failpoint(CNI_ELEMENTS)

    def has(self, element: SetElement, owner: str) -> bool:
        """Return True if an element exists with this data and owner. Raises OSError."""
        try:
            there = self._netlink.element(INET, self._name, element.set, _encoded(element, "", key_only=True))
        except NetlinkError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return there is not None and _owner(there) == owner and _read(element.set, there).data == element.data

    def held(self, names: Iterable[str]) -> list[InstalledElement]:
        """Return all elements of some sets. Raises OSError."""
        found: list[InstalledElement] = []
        for name in names:
            for _ in range(_ATTEMPTS):
                try:
                    some = [
                        InstalledElement(_read(name, one), _owner(one))
                        for data, start, end in self._netlink.dump_elements(INET, self._name, name)
                        for one in _split(data[start:end])
                    ]
                except DumpInterrupted:
                    continue
                except NetlinkError as error:
                    if error.errno == errno.ENOENT:
                        return []
                    raise
                found += some
                break
        return found

    def _payload(self, elements: Sequence[SetElement], owner: str, key_only: bool = False) -> bytes:
        head = attr(1, self._name.encode() + b"\0") + attr(2, elements[0].set.encode() + b"\0")
        return head + attr(3 | _NESTED, b"".join(_encoded(one, owner, key_only) for one in elements))


def owner_of(attachment: str) -> str:
    """Return an attachment's name in the form used for comments."""
    plain = attachment.replace("-", "").replace("_", "").replace(".", "").replace(":", "")
    if len(attachment) <= _MOST_COMMENT and plain.isascii() and plain.isalnum():
        return attachment
    from hashlib import sha256

    network = attachment.partition(":")[0]
    return f"{network[:40]}:sha256:{sha256(attachment.encode('utf-8', 'surrogateescape')).hexdigest()}"


def _encoded(one: SetElement, owner: str, key_only: bool = False) -> bytes:
    parts = attr(_KEY | _NESTED, attr(_VALUE, one.key))
    if one.end:
        parts += attr(_KEY_END | _NESTED, attr(_VALUE, one.end))
    if one.data and not key_only:
        parts += attr(_DATA | _NESTED, attr(_VALUE, one.data))
    if owner and not key_only:
        text = owner.encode() + b"\0"
        parts += attr(_USERDATA, bytes((0, len(text))) + text)
    return attr(_LIST_ELEM | _NESTED, parts)


def _split(data: bytes) -> list[bytes]:
    return [data[start - 4 : end] for kind, start, end in _attributes(data, 0, len(data)) if kind == _LIST_ELEM]


def _attributes(data: bytes, at: int, end: int) -> list[tuple[int, int, int]]:
    found = []
    while at + 4 <= end:
        length = int.from_bytes(data[at : at + 2], sys.byteorder)
        kind = int.from_bytes(data[at + 2 : at + 4], sys.byteorder) & 0x3FFF
        if length < 4:
            break
        found.append((kind, at + 4, at + length))
        at += (length + 3) & ~3
    return found


def _read(name: str, element: bytes) -> SetElement:
    """Decode a NFTA_LIST_ELEM attribute."""
    values = {}
    for kind, start, end in _attributes(element, 4, len(element)):
        inner = _attributes(element, start, end) if kind in (_KEY, _DATA, _KEY_END) else ()
        values[kind] = next((element[first:last] for which, first, last in inner if which == _VALUE), b"")
    return SetElement(name, values.get(_KEY, b""), values.get(_DATA, b""), values.get(_KEY_END, b""))


def _owner(element: bytes) -> str:
    for kind, start, end in _attributes(element, 4, len(element)):
        if kind == _USERDATA:
            return _comment(element[start:end])
    return ""


def _comment(userdata: bytes) -> str:
    at = 0
    while at + 2 <= len(userdata):
        kind, length = userdata[at], userdata[at + 1]
        if kind == 0:
            return userdata[at + 2 : at + 2 + length].rstrip(b"\0").decode("utf-8", "replace")
        at += 2 + length
    return ""
