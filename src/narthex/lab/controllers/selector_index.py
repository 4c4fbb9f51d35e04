"""An index of selectors by the labels that they require."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from narthex.lab.controllers.interfaces import ObjectKey

Pair = tuple[str, str]


class SelectorIndex:
    """An index of the selectors of one kind, by labels that they could match.

    Each selector is filed under one of its required labels: the one with the fewest other selectors.
    """

    def __init__(self) -> None:
        self._filed_under: dict[ObjectKey, tuple[str, Pair | None]] = {}
        self._under: dict[tuple[str, Pair | None], set[ObjectKey]] = {}

    def put(self, key: ObjectKey, required: Mapping[str, str] | None) -> None:
        """Add or replace a selector by its required labels. None removes it; an empty mapping may match anything."""
        filed = self._filed_under.pop(key, None)
        if filed is not None:
            self._under[filed].discard(key)
            if not self._under[filed]:
                del self._under[filed]
        if required is None:
            return
        places: list[tuple[str, Pair | None]] = [(key.namespace, pair) for pair in required.items()] or [
            (key.namespace, None)
        ]
        chosen = min(places, key=lambda filed: (len(self._under.get(filed, ())), filed[1] or ("", "")))
        self._filed_under[key] = chosen
        self._under.setdefault(chosen, set()).add(key)

    def candidates(self, namespace: str, labels: Mapping[str, str]) -> Iterator[ObjectKey]:
        """Yield the keys of selectors that may match the labels. The caller still has to match the whole selector."""
        pairs: Iterable[Pair | None] = (None, *labels.items())
        for pair in pairs:
            yield from self._under.get((namespace, pair), ())
