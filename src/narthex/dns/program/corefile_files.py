"""A Corefile on disk, with the files it imports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from narthex.dns.corefile.parse import Corefile, parse
from narthex.dns.corefile.settings import DEFAULT_PORT

_LARGEST = 4 * 1024 * 1024
"""Bytes. No Corefile comes near; what a ConfigMap can hold is a quarter of it."""


def read(path: Path, environment: Mapping[str, str], default_port: int = DEFAULT_PORT) -> Corefile:
    """The Corefile at `path`.

    Raises OSError when it cannot be read and CorefileError with all of its faults.
    """
    return parse(_text(path), str(path), load=load, environment=environment, default_port=default_port)


def load(pattern: str) -> tuple[tuple[str, str], ...]:
    """Paths and texts of the files that a pattern means, sorted by path. A plain path that is not there is an OSError."""
    return tuple((path, _text(Path(path))) for path in matching(pattern))


def matching(pattern: str) -> tuple[str, ...]:
    """The paths that a pattern means, sorted. A plain path means itself, whether it is there or not; directories are
    passed over by patterns (mounted ConfigMaps hold some)."""
    path = Path(pattern)
    if not any(char in pattern for char in "*?["):
        return (pattern,)
    root = Path(path.anchor)
    found = root.glob(str(path.relative_to(root)))
    return tuple(str(each) for each in sorted(found) if each.is_file())


def _text(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(_LARGEST + 1)
    if len(raw) > _LARGEST:
        raise OSError(f"{path} is larger than {_LARGEST} bytes, so it is no Corefile")
    return raw.decode("utf-8", errors="replace")
