"""The node's records of each attachment: its namespace and its rules.

One small file per attachment and kind, `STATE/KIND/NETWORK:CONTAINER:INTERFACE`. It is written before and removed after what
it describes, so nothing ever exists without a record.
"""

from __future__ import annotations

import posix

from narthex.cni.json import parse_object, write
from narthex.cni.kernel import files
from narthex.cni.request import is_attachment, is_name
from narthex.linux.setns import namespace_identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STATE = "/var/lib/cni/narthex"
_BOOT = "/proc/sys/kernel/random/boot_id"
PODS, MASQUERADE, PORTS = "pods", "masquerade", "ports"
"""The kinds: namespace and link of the attachment; masqueraded addresses; host ports."""


class Records:
    """The records of a node. Safe for concurrent threads and processes: each writes files of its own attachments."""

    def __init__(self, directory: str = STATE) -> None:
        self.directory = directory

    def put(self, kind: str, attachment: str, record: Mapping[str, object]) -> None:
        """Write a record. Raises OSError."""
        files.write(f"{self.directory}/{kind}", attachment, write(dict(record)).encode())

    def get(self, kind: str, attachment: str) -> dict[str, object] | None:
        """Return a record; None if it is missing or invalid. Raises OSError."""
        return parse_object(files.read(f"{self.directory}/{kind}/{attachment}"))

    def drop(self, kind: str, attachment: str) -> None:
        """Remove a record; it may be missing. Raises OSError."""
        self.drop_unfinished(kind, attachment)
        files.remove(f"{self.directory}/{kind}/{attachment}")

    def all(self, kind: str) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield attachments and records of a kind. Raises OSError."""
        for name in files.names(f"{self.directory}/{kind}"):
            if split(name) is not None and (found := self.get(kind, name)) is not None:
                yield name, found

    def unfinished(self, kind: str) -> list[str]:
        """Return the attachments with a record that is not completely written. Raises OSError."""
        return [name for name in files.unfinished(f"{self.directory}/{kind}") if split(name) is not None]

    def drop_unfinished(self, kind: str, attachment: str) -> bool:
        """Remove a record that is not completely written; return True if there was one. Raises OSError."""
        return files.remove(f"{self.directory}/{kind}/.{attachment}")

    def invalid(self, kind: str, network: str, valid: frozenset[tuple[str, str]]) -> list[str]:
        """Return the attachments of a network without those in `valid` (container ID, interface). Raises OSError.

        Also those whose record is invalid, or was not completely written.
        """
        directory = f"{self.directory}/{kind}"
        every = {name: split(name) for name in (*files.names(directory), *files.unfinished(directory))}
        return [name for name, parts in every.items() if parts and parts[0] == network and parts[1:] not in valid]


def split(attachment: str) -> tuple[str, str, str] | None:
    """Return network, container ID, and interface of an attachment's name; None if it is invalid."""
    parts = attachment.split(":")
    if len(parts) != 3 or not is_name(parts[0]) or not is_attachment(parts[1], parts[2]):
        return None
    return parts[0], parts[1], parts[2]


def boot() -> str:
    """Return the boot ID of the kernel: no namespace outlives it."""
    with open(_BOOT) as file:  # noqa: PTH123
        return file.read().strip()


def of_namespace(descriptor: int, path: str, link: str) -> dict[str, object]:
    """Return the record of a namespace. `link` is the node's end of the veth pair, or empty."""
    device, inode = namespace_identity(descriptor)
    return {"path": path, "device": device, "inode": inode, "boot": boot(), "link": link}


def is_gone(record: Mapping[str, object], links: frozenset[str]) -> bool:
    """Return True if a namespace certainly does not exist any more. `links` are the interface names of the node.

    An inaccessible path proves nothing: its directory must exist, and the veth pair must be gone.
    """
    if record.get("boot") != boot():
        return True
    if record.get("link") in links:
        return False
    path = str(record.get("path", ""))
    try:
        found = posix.stat(path)
    except FileNotFoundError:
        top = "/proc" if path.startswith("/proc/") else path.rpartition("/")[0]
        return files.is_directory(top)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) != (record.get("device"), record.get("inode"))
