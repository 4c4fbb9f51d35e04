"""What Kubernetes says of its types and fields, for `kubectl explain`: the docstrings of lightkube's models.

Those modules take a moment to load, so they are loaded when the first client asks.
"""

from __future__ import annotations

import importlib
import re
from functools import cache

_FIELD = re.compile(r"^\s*\* \*\*(?P<name>\S+)\*\* ``[^`]*`` - (?P<text>.*)$")


@cache
def description(name: str) -> tuple[str, dict[str, str]]:
    """Of a type such as core_v1.Pod and of its fields; empty where nothing is known."""
    module, _, bare = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(f"lightkube.models.{module}"), bare, None)
    except ImportError:
        return "", {}
    said, _, parameters = (getattr(found, "__doc__", "") or "").partition("**parameters**")
    fields: dict[str, list[str]] = {}
    at: list[str] = []
    for line in parameters.splitlines():
        match = _FIELD.match(line)
        if match is not None:
            at = fields.setdefault(match["name"], [match["text"]])
        elif line.strip():
            at.append(line.strip())
    return _plain(said.splitlines()), {field: _plain(lines) for field, lines in fields.items()}


def _plain(lines: list[str]) -> str:
    text = "\n".join(line.strip() for line in lines).strip()
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)
