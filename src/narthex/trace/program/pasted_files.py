"""Pasted text as files, and the options that name them to `narthex trace`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from narthex.trace.node.pasted import PastedKind, sort_pasted

_OPTIONS = {PastedKind.BUNDLE: "--bundle", PastedKind.OUTPUT: "--rules"}
_MANIFESTS = "manifests"


def store_pasted(files: Sequence[tuple[str, str | bytes]], folder: Path) -> list[str]:
    """Write pasted files, pairs of a name and the content, below a folder; return options with paths relative to it."""
    words: list[str] = []
    manifests = folder / _MANIFESTS
    for pasted in sort_pasted(files):
        path = (manifests if pasted.kind is PastedKind.MANIFESTS else folder) / pasted.name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pasted.content)
        if pasted.kind is not PastedKind.MANIFESTS:
            words += [_OPTIONS[pasted.kind], pasted.name]
    return [*words, "--manifests", _MANIFESTS] if manifests.exists() else words
