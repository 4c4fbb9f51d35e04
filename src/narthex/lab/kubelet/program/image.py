"""What a container's image means in a lab, where no image is ever fetched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ECHO = "echo"
"""The image that always is the lab's own server, although machines have a command of that name."""


class Image(NamedTuple):
    """What stands behind an image."""

    program: str = ""
    """Absolute path of a program of this machine; empty: the echo server stands for it."""
    missing: str = ""
    """Why it cannot be had."""


def image_of(container: Mapping[str, Any]) -> Image:
    """A path (`/opt/shop/serve`) or a command (`redis-server`) of this machine is that program; everything else is the echo
    server, on the ports that the container declares."""
    name = str(container.get("image") or "")
    if name.startswith("/"):
        if Path(name).is_file() and os.access(name, os.X_OK):
            return Image(name)
        return Image(missing=f"{name} is no program on this machine")
    if not name or name == ECHO or "/" in name or ":" in name:
        return Image()
    return Image(shutil.which(name) or "")
