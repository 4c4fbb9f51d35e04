"""Faults that the API server for tests injects into its answers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from narthex.lab.api.requests import ApiRequest


class DropConnection(msgspec.Struct, frozen=True):
    """Reset the connection after this many bytes of the answer, including its head."""

    after: int = 0


class Refuse(msgspec.Struct, frozen=True):
    """Answer with another status."""

    code: int
    retry_after: int | None = None


class Garble(msgspec.Struct, frozen=True):
    """Change one byte of the body: the byte at this offset, or the last one."""

    at: int = 0


class Silence(msgspec.Struct, frozen=True):
    """Send nothing after this many bytes, and keep the connection open."""

    after: int = 0


Fault = DropConnection | Refuse | Garble | Silence


Faults = Callable[[ApiRequest], Fault | None]
"""What goes wrong with the answer to a request; None: nothing."""
