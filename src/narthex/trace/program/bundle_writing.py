"""Writing a bundle: a packed tar that only its owner may read."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from narthex.trace.node.layout import ROOT, TABLE_FILE, BundleManifest, table_text


def write(stream: BinaryIO, table: BundleManifest, parts: Mapping[str, str]) -> None:
    """Write a bundle. Raises OSError."""
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for path, text in ((TABLE_FILE, table_text(table)), *parts.items()):
            data = text.encode(errors="replace")
            member = tarfile.TarInfo(f"{ROOT}/{path}")
            member.size, member.mode = len(data), 0o600
            tar.addfile(member, io.BytesIO(data))


def write_file(path: Path, table: BundleManifest, parts: Mapping[str, str]) -> None:
    """Write a bundle to a file of its own. Raises OSError, FileExistsError when the file is there already."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        write(stream, table, parts)
