"""Reading and writing bundles: a tar, or a directory with its files.

Bundles are untrusted input: reading writes nothing, follows no links, and limits size and number of files.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from narthex.trace.node.layout import ROOT, TABLE_FILE, BundleManifest, read_table, table_text

MAX_BYTES = 512 << 20
"""Limit for all files together, uncompressed."""
MAX_FILES = 2000
_CHUNK = 1 << 16


class BundleError(ValueError):
    """The bundle can't be read; the message names the file and the reason."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a bundle."""

    origin: str
    """Its file name."""
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
                files = _tar(stream, max_bytes)
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
