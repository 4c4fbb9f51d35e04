"""What can be made to go wrong with an answer of the API server for tests."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from narthex.lab.api.requests import Request


class DropConnection(msgspec.Struct, frozen=True):
    """The connection is reset after so many bytes of the answer, its head among them."""

    after: int = 0


class Refuse(msgspec.Struct, frozen=True):
    """Another status is answered."""

    code: int
    retry_after: int | None = None


class Garble(msgspec.Struct, frozen=True):
    """One byte of the body is another: the one at this place, or the last."""

    at: int = 0


class Silence(msgspec.Struct, frozen=True):
    """Nothing comes after so many bytes, and the connection stays open."""

    after: int = 0


Fault = DropConnection | Refuse | Garble | Silence


Faults = Callable[[Request], Fault | None]
"""What goes wrong with the answer to a request; None: nothing."""
