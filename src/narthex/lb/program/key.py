"""The key that announcers share, from a file that a Secret may be mounted at."""

from __future__ import annotations

from pathlib import Path

LEAST_BYTES = 16
_MOST_BYTES = 65536


class NoKey(ValueError):
    """There is no key that can be used; the message says why and what to do."""


def read_keys(path: str) -> tuple[bytes, ...]:
    """The keys of a file, one a line: the first one signs, all may have signed what comes in. So a key is exchanged without
    a gap: add the new one as the second line everywhere, then make it the first, then take the old one out.
    Raises NoKey."""
    if not path:
        raise NoKey(
            "announcers need a key that they share: write 32 random characters into a file, the same on every node, "
            "and name it with --announcer-key-file (`announcer.keyFile`)"
        )
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise NoKey(f"announcer.keyFile: {path}: {error.strerror or error}") from error
    keys = tuple(line.strip() for line in data.splitlines() if line.strip())
    if len(data) > _MOST_BYTES or not keys:
        raise NoKey(f"announcer.keyFile: {path} holds no key: write 32 random characters into it")
    if short := [key for key in keys if len(key) < LEAST_BYTES]:
        raise NoKey(
            f"announcer.keyFile: {path} holds a key of {len(short[0])} characters; it must be {LEAST_BYTES} or more"
        )
    return keys
