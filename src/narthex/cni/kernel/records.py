"""What the node keeps of each attachment: which namespace it is, and which rules it has.

One small file for each attachment and kind, `STATE/KIND/NETWORK:CONTAINER:INTERFACE`. It is written before what it
speaks of is made and removed after that is gone, so that nothing is ever there that no record names.
"""

from __future__ import annotations

import posix

from narthex.cni.json import JsonError, parse, write
from narthex.cni.kernel import files, namespaces
from narthex.cni.request import is_attachment, is_name
from narthex.linux import setns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STATE = "/var/lib/cni/narthex"
PODS, MASQUERADE, PORTS = "pods", "masquerade", "ports"
"""The kinds: the attachment's namespace and link; addresses to masquerade; host ports."""


class Records:
    """The records of a node. For several threads and processes at once: each writes files of its own attachments."""

    def __init__(self, directory: str = STATE) -> None:
        self.directory = directory

    def put(self, kind: str, attachment: str, record: Mapping[str, object]) -> None:
        """Write a record. Raises OSError."""
        files.write(f"{self.directory}/{kind}", attachment, write(dict(record)).encode())

    def get(self, kind: str, attachment: str) -> dict[str, object] | None:
        """Read a record; None when there is none, or none that can be read. Raises OSError."""
        data = files.read(f"{self.directory}/{kind}/{attachment}")
        if not data:
            return None
        try:
            found = parse(data)
        except JsonError:
            return None
        return found if isinstance(found, dict) else None

    def drop(self, kind: str, attachment: str) -> None:
        """Remove a record; it may be gone. Raises OSError."""
        files.remove(f"{self.directory}/{kind}/.{attachment}")
        files.remove(f"{self.directory}/{kind}/{attachment}")

    def all(self, kind: str, network: str = "") -> Iterator[tuple[str, dict[str, object]]]:
        """Attachments with a record of a kind, of one network or of all. Raises OSError."""
        for name in files.names(f"{self.directory}/{kind}"):
            parts = split(name)
            if parts is not None and network in ("", parts[0]):
                found = self.get(kind, name)
                if found is not None:
                    yield name, found


def split(attachment: str) -> tuple[str, str, str] | None:
    """Network, container and interface of an attachment's name; None when it is none."""
    parts = attachment.split(":")
    if len(parts) != 3 or not is_name(parts[0]) or not is_attachment(parts[1], parts[2]):
        return None
    return parts[0], parts[1], parts[2]


def of_namespace(descriptor: int, path: str, link: str) -> dict[str, object]:
    """The record of a namespace. `link` is the node's end of the pair, empty when nothing is known of it."""
    device, inode = setns.identity(descriptor)
    return {"path": path, "device": device, "inode": inode, "boot": namespaces.boot(), "link": link}


def is_gone(record: Mapping[str, object], links: frozenset[str]) -> bool:
    """Whether a namespace is certainly gone. `links` are the names of the node's interfaces.

    A path that cannot be seen may be the fault of whoever looks: its folder has to be there, and the pair not.
    """
    if record.get("boot") != namespaces.boot():
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
