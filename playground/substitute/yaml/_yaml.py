"""PyYAML's own parser and emitter under the names of its libyaml binding, which WebAssembly lacks.

The build puts this module into the package `yaml`, whose `cyaml.py` then defines `CSafeLoader` from it.
"""

from __future__ import annotations

from typing import IO, Any

from yaml.composer import Composer  # type: ignore[import-untyped]
from yaml.emitter import Emitter as CEmitter  # type: ignore[import-untyped]
from yaml.parser import Parser  # type: ignore[import-untyped]
from yaml.reader import Reader  # type: ignore[import-untyped]
from yaml.scanner import Scanner  # type: ignore[import-untyped]

__all__ = ["CEmitter", "CParser"]


class CParser(Reader, Scanner, Parser, Composer):  # type: ignore[misc]
    """A parser that is created with its stream, as libyaml's is."""

    def __init__(self, stream: str | bytes | IO[Any]) -> None:
        Reader.__init__(self, stream)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
