"""The overlay's files: `subnet.env`, whole or not at all, and the routes that are its own."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from narthex.overlay.desired import OverlayRoute

_ROUTES = msgspec.json.Decoder(list[OverlayRoute])


def read(path: str) -> str | None:
    """A file's text; None when it is not there. Raises OSError."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except FileNotFoundError:
        return None


def write(path: str, text: str) -> bool:
    """Make a file hold a text, at one moment; False when it does already. Raises OSError."""
    if read(path) == text:
        return False
    place = Path(path)
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fresh = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(place)
    finally:
        fresh.unlink(missing_ok=True)
    return True


def read_routes(path: str) -> frozenset[OverlayRoute]:
    """The routes that were written down; none when the file is not there or not readable as such. Raises OSError."""
    text = read(path)
    if text is None:
        return frozenset()
    try:
        return frozenset(_ROUTES.decode(text))
    except msgspec.MsgspecError:
        # Then nobody's route is taken for ours.
        return frozenset()


def write_routes(path: str, routes: frozenset[OverlayRoute]) -> bool:
    """Write routes down; False when they are so already. Raises OSError."""
    text = msgspec.json.encode(sorted(routes, key=str)).decode() + "\n"
    return bool(routes or Path(path).exists()) and write(path, text)
