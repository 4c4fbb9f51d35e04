"""Files of the overlay: atomic writes, and the persisted list of our own routes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from narthex.overlay.desired import OverlayRoute
from narthex.runtime.files import replace_file

_ROUTES = msgspec.json.Decoder(list[OverlayRoute])


def read(path: str) -> str | None:
    """Return the text of a file; None if it does not exist. Raises OSError."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except FileNotFoundError:
        return None


def write(path: str, text: str) -> bool:
    """Write a file atomically; return False if it has this content already. Raises OSError."""
    if read(path) == text:
        return False
    place = Path(path)
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    replace_file(place, text.encode(), 0o644, durable=True)
    return True


def read_routes(path: str) -> frozenset[OverlayRoute]:
    """Return the persisted routes; empty if the file is missing or invalid. Raises OSError."""
    text = read(path)
    if text is None:
        return frozenset()
    try:
        return frozenset(_ROUTES.decode(text))
    except msgspec.MsgspecError:
        # Then no route is considered ours.
        return frozenset()


def write_routes(path: str, routes: frozenset[OverlayRoute]) -> bool:
    """Persist routes; return False if they are unchanged. Raises OSError."""
    text = msgspec.json.encode(sorted(routes, key=str)).decode() + "\n"
    return bool(routes or Path(path).exists()) and write(path, text)
