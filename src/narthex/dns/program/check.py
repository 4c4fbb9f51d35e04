"""A look at a Corefile that starts nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from narthex.dns.corefile.parse import CorefileError
from narthex.dns.program.start import Configuration, Flags, SourceError
from narthex.model.problem import Problem


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """One server block, as far as it tells servers apart."""

    zones: tuple[str, ...]
    port: int


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to say of a Corefile."""

    usable: bool
    servers: tuple[Server, ...]
    """Empty when it is not usable."""
    problems: tuple[Problem, ...]
    """Errors and warnings, in the order of the file."""


def check(path: Path | None, flags: Flags) -> Checked:
    """Read the Corefile at `path`, or what the flags mean. Faults are in the answer."""
    try:
        found = Configuration(path, flags)
    except SourceError as error:
        cause = error.__cause__
        faults = cause.problems if isinstance(cause, CorefileError) else (Problem(message=str(error)),)
        return Checked(usable=False, servers=(), problems=faults)
    servers = tuple(Server(zones=tuple(block.zones), port=block.port) for block in found.blocks)
    return Checked(usable=True, servers=servers, problems=found.problems)
