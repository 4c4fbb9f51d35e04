"""A name that leads to no address, so that no packet is ever sent."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from narthex.trace.causes.finding import CauseFinding
from narthex.trace.causes.scene import finding


def name_not_found(name: str, asker: str, asked: Iterable[str], services: Iterable[str], advice: str) -> CauseFinding:
    """`asker` is the pod that asks, `asked` are its questions with their answers, `services` are `NAMESPACE/NAME`."""
    wanted = name.rstrip(".").split(".")
    known = {f"{service}.{namespace}": f"{namespace}/{service}"
             for namespace, _, service in (each.partition("/") for each in services)}  # fmt: skip
    namespace = asker.removeprefix("pod ").partition("/")[0]
    full = ".".join(wanted[:2]) if len(wanted) > 1 else f"{wanted[0]}.{namespace}"
    near = get_close_matches(full, known, n=3, cutoff=0.75)
    near += [each for each in known if each.partition(".")[0] == wanted[0] and each not in near][:3]
    if near:
        advice += f" Names that are close: {', '.join(near)}."
    return finding("dns-name", f"{asker} finds no address for {name!r}", evidence=tuple(asked), advice=advice)
