"""Sets of the kernel's ipset facility: one `ipset restore` writes, one `ipset save` reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from narthex.linux.run import CommandError, TimeoutExpired, run
from narthex.netfilter.ast import Unprintable
from narthex.netfilter.ipset import IpSet, IpsetTextError, entry_line, ipset_save_text, parse_ipsets
from narthex.proxy.backends.base import ApplyError

_IN_USE = "in use by a kernel component"
_DESTROY_ATTEMPTS = 20
_DESTROY_PAUSE = 0.05


def read_ipsets(ours: Callable[[str], bool], namespace: str | None = None) -> dict[str, IpSet]:
    """Return the sets with our names. Raises ApplyError."""
    try:
        held = parse_ipsets(_run(["ipset", "save"], namespace=namespace))
    except IpsetTextError as error:
        raise ApplyError(f"ipset save printed what cannot be read: {error}") from error
    return {name: each for name, each in held.items() if ours(name)}


def write_ipsets(
    added: Sequence[IpSet] = (),
    entries_added: Mapping[str, frozenset[str]] | None = None,
    entries_removed: Mapping[str, frozenset[str]] | None = None,
    namespace: str | None = None,
) -> None:
    """Create sets, add entries, and remove entries in one load; existing or missing entries are no error.

    Raises ApplyError.
    """
    try:
        text = ipset_save_text(added) + "".join(
            entry_line(verb, name, entry) + "\n"
            for verb, changes in (("add", entries_added or {}), ("del", entries_removed or {}))
            for name, entries in sorted(changes.items())
            for entry in sorted(entries)
        )
    except Unprintable as error:
        raise ApplyError(f"a set could not be written down: {error}") from error
    if text:
        _run(["ipset", "-exist", "restore"], text, namespace)


def destroy_ipsets(names: Sequence[str], namespace: str | None = None) -> None:
    """Remove sets that no rule uses; missing ones are no error. Raises ApplyError."""
    script = "".join(f"destroy {name}\n" for name in names)
    for attempt in range(1, _DESTROY_ATTEMPTS + 1 if script else 0):
        try:
            _run(["ipset", "-exist", "restore"], script, namespace)
            return
        except ApplyError as error:
            # nf_tables lets go of a rule's set a moment after the rule is gone.
            if _IN_USE not in str(error) or attempt == _DESTROY_ATTEMPTS:
                raise
            time.sleep(_DESTROY_PAUSE)


def _run(argv: list[str], stdin: str = "", namespace: str | None = None) -> str:
    try:
        return run(argv, stdin=stdin, namespace=namespace)
    except FileNotFoundError as error:
        raise ApplyError(f"{error.filename or argv[0]} is not there: is ipset installed?") from error
    except (CommandError, TimeoutExpired) as error:
        raise ApplyError(f"{error}{_quoted(stdin, str(error))}") from error


def _quoted(script: str, said: str) -> str:
    """Return the input line that ipset complains about."""
    _, found, rest = said.partition("Error in line ")
    number, _, _ = rest.partition(":")
    lines = script.splitlines()
    if not found or not number.isdigit() or not 0 < int(number) <= len(lines):
        return ""
    return f"\n  line {number} of the input: {lines[int(number) - 1]}"
