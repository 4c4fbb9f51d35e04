"""The programs of this machine that manifests run as pods, for `lab up` to name before it runs them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from narthex.kube.manifests import ManifestSource
from narthex.lab.kubelet.environment import command_line
from narthex.lab.kubelet.program.images import Images
from narthex.lab.program.manifests import ManifestObject, decode_document
from narthex.model import Upsert

_MOST = 20
"""Programs that are named; more would fill the screen."""
_LONGEST = 100
"""Characters of a command that are shown."""


def machine_programs(source: Path, images: Images) -> list[str]:
    """Return a line for each container in the manifests that runs a program of this machine; at most some dozens."""
    found = list(_lines(source, images))
    more = [f"... and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return [*found[:_MOST], *more]


def _lines(source: Path, images: Images) -> Iterator[str]:
    for event in ManifestSource(source, decode_document).scan():
        if isinstance(event, Upsert):
            item = cast(ManifestObject, event.object)
            for container in _containers(item.raw):
                image = images.find(container)
                if image.program:
                    words = command_line(container, image.entry_point, image.arguments, {})
                    yield f"{item.title}: {_shown(words)}"


def _shown(words: Sequence[Any]) -> str:
    text = shlex.join(map(str, words)).encode("unicode_escape").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _containers(raw: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the containers of a pod or of a pod template. Anything malformed is left to the API server."""
    spec = raw.get("spec")
    for field in ("template", "spec"):
        if isinstance(spec, dict) and isinstance(spec.get(field), dict):
            spec = spec[field]
    for name in ("initContainers", "containers"):
        for each in (spec.get(name) if isinstance(spec, dict) else None) or ():
            if isinstance(each, dict) and all(isinstance(each.get(field) or [], list) for field in ("command", "args")):
                yield each
