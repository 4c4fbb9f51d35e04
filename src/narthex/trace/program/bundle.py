"""Reading and writing bundles: a tar, or a directory with its files.

Bundles are untrusted input: reading writes nothing, follows no links, and limits size and number of files.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import re
import socket
import stat
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

import narthex
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import CommandError, TimeoutExpired, run
from narthex.model import InputError
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.sockets.document import socket_document
from narthex.proxy.kernel.sockets import PINS, pinned_sockets
from narthex.trace.node.layout import (
    ABSENT,
    CNI_DIRECTORY,
    CNI_FILE,
    FAILED,
    OBJECTS,
    PARTS,
    ROOT,
    SETTINGS,
    SOCKETS_FILE,
    TABLE_FILE,
    TAKEN,
    BundleManifest,
    BundlePart,
    PartStatus,
    read_table,
    table_text,
)

MAX_BYTES = 512 << 20
"""Limit for all files together, uncompressed."""
MAX_RATIO = 50
"""Limit for the files together, relative to the compressed bundle, from LEAST_LIMIT on. Output of tools compresses to a tenth;
what compresses to a thousandth was made to occupy the reader."""
LEAST_LIMIT = 64 << 20
"""Bytes of all files together that any bundle may have."""
MAX_FILES = 2000
_CHUNK = 1 << 16


class BundleError(InputError):
    """The bundle can't be read; the message names the file and the reason."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a bundle."""

    origin: str
    table: BundleManifest
    parts: dict[str, str]
    """Texts by path below the bundle's directory."""


def read_bundle(path: Path, max_bytes: int = MAX_BYTES) -> Bundle:
    """Read a bundle from a file, compressed or not, or from a directory. Raises BundleError."""
    try:
        if path.is_dir():
            files = _directory(path, max_bytes)
        else:
            with path.open("rb") as stream:
                allowed = max(LEAST_LIMIT, MAX_RATIO * os.fstat(stream.fileno()).st_size)
                files = _tar(stream, min(max_bytes, allowed))
    except BundleError as error:
        raise BundleError(f"{path.name}: {error}") from error
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        raise BundleError(f"{path.name}: is no bundle that can be read: {error}") from error
    if TABLE_FILE not in files:
        raise BundleError(f"{path.name}: is no bundle: it has no {ROOT}/{TABLE_FILE}")
    try:
        table = read_table(_text(files[TABLE_FILE]))
    except ValueError as error:
        raise BundleError(f"{path.name}: {error}") from error
    return Bundle(origin=path.name, table=table, parts={name: _text(data) for name, data in files.items()})


def _text(data: bytes) -> str:
    # What a tool printed may hold bytes that are no text, in a comment for instance.
    return data.decode(errors="replace")


class _Capped(io.RawIOBase):
    """A stream that raises an error after a number of bytes, before memory runs out."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream = stream
        self._left = limit

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read into a buffer. Raises BundleError beyond the limit."""
        data = self._stream.read(min(len(buffer), _CHUNK))
        self._left -= len(data)
        if self._left < 0:
            raise BundleError("holds more than can be a bundle; it is not read further")
        buffer[: len(data)] = data
        return len(data)


def _tar(stream: BinaryIO, limit: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    # Headers cost bytes, too: those of the largest number of files are allowed for.
    whole = io.BufferedReader(_Capped(_unpacked(stream), limit + MAX_FILES * 2048))
    left = limit
    with tarfile.open(fileobj=whole, mode="r|") as tar:
        for number, member in enumerate(tar):
            if number > MAX_FILES:
                raise BundleError(f"holds more than {MAX_FILES} files")
            if member.isdir():
                continue
            name = _name(member.name)
            if not member.isreg() or member.issparse():
                raise BundleError(f"{member.name[:80]!r} is a link or a device, which no bundle has")
            left -= member.size
            if left < 0:
                raise BundleError(f"holds more than {limit >> 20} MiB")
            if name in files:
                raise BundleError(f"{name!r} is in it twice")
            held = tar.extractfile(member)
            files[name] = held.read() if held is not None else b""
    return files


def _unpacked(stream: BinaryIO) -> BinaryIO:
    magic = stream.read(6)
    stream.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=stream, mode="rb")  # type: ignore[return-value]
    if magic == b"\xfd7zXZ\x00":
        return lzma.LZMAFile(stream, "rb")  # type: ignore[return-value]
    return stream


def _name(text: str) -> str:
    """Return the path below the bundle's directory. Raises BundleError for a path outside of it."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if text.startswith("/") or ".." in parts or "\\" in text or not text.isprintable() or len(text) > 200:
        raise BundleError(f"{text[:80]!r} is no path in a bundle")
    if len(parts) < 2 or parts[0] != ROOT:
        raise BundleError(f"{text[:80]!r} lies outside of {ROOT}/")
    return "/".join(parts[1:])


def _directory(path: Path, limit: int) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    root = path / ROOT if (path / ROOT).is_dir() else path
    left = limit
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            file = Path(folder) / name
            if len(files) >= MAX_FILES:
                raise BundleError(f"holds more than {MAX_FILES} files")
            if not stat.S_ISREG(file.lstat().st_mode):
                raise BundleError(f"{name[:80]!r} is a link or a device, which no bundle has")
            left -= file.stat().st_size
            if left < 0:
                raise BundleError(f"holds more than {limit >> 20} MiB")
            files[file.relative_to(root).as_posix()] = file.read_bytes()
    return files


def write(stream: BinaryIO, table: BundleManifest, parts: Mapping[str, str]) -> None:
    """Write a compressed bundle. Raises OSError."""
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for path, text in ((TABLE_FILE, table_text(table)), *parts.items()):
            data = text.encode(errors="replace")
            member = tarfile.TarInfo(f"{ROOT}/{path}")
            member.size, member.mode = len(data), 0o600
            tar.addfile(member, io.BytesIO(data))


def write_file(path: Path, table: BundleManifest, parts: Mapping[str, str]) -> None:
    """Write a bundle to a new file that only its owner can read. Raises OSError; FileExistsError if the file exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        write(stream, table, parts)


_SECONDS = 120
_SYSCTLS = "net/sysctls.txt"
_REMARK = 300


class GatheredParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that were taken, and how taking each part went."""

    table: BundleManifest
    parts: dict[str, str]


def gather(node: str = "", namespace: str | None = None, *, without: frozenset[str] = frozenset()) -> GatheredParts:
    """Run all tools. `node` is the node's name (default: the machine's); `without` names parts to leave out."""
    parts: dict[str, str] = {}
    taken: list[PartStatus] = []

    def add(text: str | None, status: PartStatus) -> None:
        """Record the part's status, and its text if it could be read."""
        taken.append(status)
        if text is not None:
            parts[status.path] = text

    for part in PARTS:
        if part.path not in without and not any(other in parts for other in part.unless):
            add(*(_settings(part, namespace) if part.path == _SYSCTLS else _asked(part, namespace)))
    if CNI_FILE not in without:
        add(*_cni(Path(CNI_DIRECTORY)))
    if SOCKETS_FILE not in without:
        add(*_sockets(namespace))
    name = node or namespace or socket.gethostname()
    return GatheredParts(
        table=BundleManifest(node=name, writer=f"narthex {narthex.__version__}", parts=tuple(taken)), parts=parts
    )


def _asked(part: BundlePart, namespace: str | None) -> tuple[str | None, PartStatus]:
    missing = PartStatus(path=part.path, status=ABSENT, command=" ".join(part.command))
    if part.needs and not _there(part.needs, namespace):
        return None, replace(missing, remark=f"this kernel has none of it: there is no {part.needs}")
    try:
        text = run(part.command, namespace=namespace, timeout=_SECONDS)
    except FileNotFoundError:
        return None, replace(missing, remark=f"{part.command[0]} is not installed")
    except CommandError as error:
        said = " ".join(error.said.split())[:_REMARK] or f"exit status {error.status}"
        return None, replace(missing, status=FAILED, remark=said)
    except (TimeoutExpired, OSError, UnicodeDecodeError) as error:
        return None, replace(missing, status=FAILED, remark=str(error)[:_REMARK])
    return text, replace(missing, status=TAKEN, bytes=len(text.encode()))


def _there(path: str, namespace: str | None) -> bool:
    with in_namespace(namespace):
        return Path(path).exists()


def attached_namespaces(namespace: str | None = None) -> tuple[str, ...]:
    """Return the named network namespaces that have a link into a namespace, None for the current one; empty if not known."""
    try:
        entries = json.loads(run(["ip", "-j", "netns", "list-id"], namespace=namespace, timeout=_SECONDS) or "[]")
    except (FileNotFoundError, CommandError, TimeoutExpired, ValueError):
        return ()
    return tuple(str(entry["name"]) for entry in entries if entry.get("name"))


def _settings(part: BundlePart, namespace: str | None) -> tuple[str | None, PartStatus]:
    """Read the settings from /proc/sys; `sysctl` would print the same, but isn't installed everywhere."""
    relevant = re.compile(SETTINGS)
    lines: list[str] = []
    with in_namespace(namespace):
        root = Path("/proc/sys")
        for folder, _, names in os.walk(root / "net"):
            for name in names:
                path = Path(folder) / name
                # A dot in an interface's name is written as a slash, as sysctl does.
                key = ".".join(piece.replace(".", "/") for piece in path.relative_to(root).parts)
                if relevant.match(key):
                    try:
                        lines.append(f"{key} = {' '.join(path.read_text().split())}")
                    except OSError:
                        continue
    text = "".join(line + "\n" for line in sorted(lines))
    return text, PartStatus(path=part.path, status=TAKEN, command="/proc/sys/net", bytes=len(text))


def _sockets(namespace: str | None) -> tuple[str | None, PartStatus]:
    """Return the maps of socket load balancing."""
    status = PartStatus(path=SOCKETS_FILE, status=ABSENT, command=str(PINS))
    try:
        with in_namespace(namespace):
            pinned = pinned_sockets()
    except (ApplyError, OSError) as error:
        return None, replace(status, status=FAILED, remark=str(error)[:_REMARK])
    if not pinned:
        return None, replace(status, remark="socket load balancing is not in use")
    text = msgspec.json.encode(socket_document(pinned)).decode()
    return text, replace(status, status=TAKEN, bytes=len(text))


def _cni(directory: Path) -> tuple[str | None, PartStatus]:
    """Return the names of the CNI configurations and the types of their plugins."""
    try:
        files = sorted(path for path in directory.iterdir() if path.is_file())
    except OSError as error:
        return None, PartStatus(path=CNI_FILE, status=ABSENT, command=f"ls {directory}", remark=error.strerror or "")
    text = "".join(f"{path.name}\t{' '.join(_types(path))}\n" for path in files)
    return text, PartStatus(path=CNI_FILE, status=TAKEN, command=f"ls {directory}", bytes=len(text))


def _types(path: Path) -> list[str]:
    try:
        data = json.loads(path.read_text())
        return [str(plugin.get("type", "")) for plugin in data.get("plugins", [data])]
    except (OSError, ValueError, AttributeError, TypeError):
        return ["(not readable)"]


_ATTEMPTS = 2
"""Rules of a large node take tens of seconds to read, in which some object always changes."""
_DECISIVE = ("services", "endpointslices")
"""Objects that a proxy turns into rules."""
CHANGED = "it changed while the rules were read"


def take(node: str = "", namespace: str | None = None, kubeconfig: str = "", master: str = "") -> GatheredParts:
    """Take a bundle; its manifest says what could not be taken, and why.

    Rules and objects belong together: if objects change while the rules are read, both are read again.
    """
    if not (kubeconfig or master):
        return gather(node, namespace)
    from narthex.kube.access import access_to
    from narthex.kube.snapshot import UNKNOWN_KIND, read_lists

    access = access_to(kubeconfig, master)
    lists = read_lists(access)
    for _ in range(_ATTEMPTS):
        before = _versions(lists)
        gathered = gather(node, namespace)
        lists = read_lists(access)
        changed = {plural for plural, versions in _versions(lists).items() if versions != before[plural]}
        if not changed:
            break
    parts = dict(gathered.parts)
    taken = list(gathered.table.parts)
    for path, plural in OBJECTS.items():
        found, remark = lists[plural], CHANGED if plural in changed else ""
        if isinstance(found, str):
            status = ABSENT if found == UNKNOWN_KIND else FAILED
            taken.append(PartStatus(path=path, status=status, command=f"list {plural}", remark=found))
            continue
        parts[path] = json.dumps(scrubbed(plural, found))
        size = len(parts[path])
        taken.append(PartStatus(path=path, status=TAKEN, command=f"list {plural}", remark=remark, bytes=size))
    table = replace(gathered.table, parts=tuple(taken))
    return GatheredParts(table=table, parts=parts)


def _versions(lists: Mapping[str, Any]) -> dict[str, object]:
    """Return name and version of each decisive object, by the plural of its kind; an unreadable list never changes."""
    found: dict[str, object] = {}
    for plural in _DECISIVE:
        held = lists[plural]
        items = held.get("items") or () if isinstance(held, dict) else ()
        every = [
            each["metadata"] for each in items if isinstance(each, dict) and isinstance(each.get("metadata"), dict)
        ]
        found[plural] = sorted(f"{one.get('uid')} {one.get('resourceVersion')}" for one in every)
    return found


def intended(kubeconfig: bool) -> BundleManifest:
    """Return what would be taken."""
    parts = [
        PartStatus(path=part.path, status="root" if part.root else "anyone", command=" ".join(part.command))
        for part in PARTS
    ]
    parts.append(PartStatus(path=CNI_FILE, status="anyone", command=f"ls {CNI_DIRECTORY}"))
    if kubeconfig:
        parts += [
            PartStatus(path=path, status="kubeconfig", command=f"list {plural}") for path, plural in OBJECTS.items()
        ]
    return BundleManifest(node="", writer="", parts=tuple(parts))


Kept = bool | dict[str, Any]
"""True: the whole value; otherwise the fields to keep, of a mapping or of each entry of a list."""

_META: dict[str, Any] = {
    "name": True,
    "namespace": True,
    "uid": True,
    "labels": True,
    "creationTimestamp": True,
    "deletionTimestamp": True,
    "ownerReferences": {"kind": True, "name": True, "uid": True, "controller": True},
}
_PROBE = {"httpGet": {"port": True}, "tcpSocket": {"port": True}, "grpc": {"port": True}}
_KEPT: dict[str, dict[str, Any]] = {
    "services": {"metadata": {**_META, "annotations": True}, "spec": True, "status": True},
    "endpointslices": {"metadata": _META, "addressType": True, "endpoints": True, "ports": True},
    "nodes": {
        "metadata": {**_META, "annotations": True},
        "spec": {"podCIDR": True, "podCIDRs": True, "unschedulable": True, "taints": True},
        "status": {"addresses": True, "conditions": {"type": True, "status": True, "reason": True}},
    },
    "pods": {
        "metadata": _META,
        "spec": {
            "nodeName": True,
            "hostNetwork": True,
            "hostname": True,
            "subdomain": True,
            "readinessGates": True,
            "containers": {"name": True, "ports": True, "readinessProbe": _PROBE},
        },
        "status": {
            "phase": True,
            "podIP": True,
            "podIPs": True,
            "hostIP": True,
            "conditions": {"type": True, "status": True, "reason": True},
            "containerStatuses": {"name": True, "ready": True},
        },
    },
    "networkpolicies": {"metadata": _META, "spec": True},
}
_OWNERS = ("kubernetes.io", "k8s.io", "metallb.io", "metallb.universe.tf", "narthex.io", "flannel.alpha.coreos.com")
_NEVER = "kubectl.kubernetes.io/last-applied-configuration"


def scrubbed(plural: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return an API list reduced to the fields that bundles keep. Raises KeyError for a kind that no bundle holds.

    Only listed fields are kept: no environment, volumes, commands, images, or annotations of other programs.
    """
    kind, version = str(found.get("kind", "List")).removesuffix("List"), str(found.get("apiVersion", "v1"))
    items = [
        {"apiVersion": version, "kind": kind, **_keep(_KEPT[plural], item)}
        for item in found.get("items") or ()
        if isinstance(item, dict)
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _keep(kept: Kept, value: Any) -> Any:
    if kept is True:
        return value
    if isinstance(value, list):
        return [_keep(kept, each) for each in value]
    if not isinstance(value, dict) or not isinstance(kept, dict):
        return {}
    made: dict[str, Any] = {}
    for key, below in kept.items():
        if key in value:
            made[key] = _annotations(value[key]) if key == "annotations" else _keep(below, value[key])
    return made


def _annotations(held: Any) -> dict[str, Any]:
    if not isinstance(held, dict):
        return {}
    return {
        key: value
        for key, value in held.items()
        if key != _NEVER and any(key.partition("/")[0].endswith(owner) for owner in _OWNERS)
    }
