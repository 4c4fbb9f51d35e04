"""Matching of label selectors, and an index of selectors by the labels they require."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from narthex.lab.controllers.interfaces import ObjectKey

Pair = tuple[str, str]


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Return True if a `metav1.LabelSelector` matches the labels. None matches nothing, an empty selector everything."""
    if selector is None:
        return False
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    return all(_meets(requirement, labels) for requirement in selector.get("matchExpressions") or ())


def _meets(requirement: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    operator, key, values = requirement.get("operator"), requirement.get("key", ""), requirement.get("values") or ()
    if operator == "In":
        return labels.get(key) in values
    if operator == "NotIn":
        return labels.get(key) not in values
    if operator == "Exists":
        return key in labels
    return operator == "DoesNotExist" and key not in labels


def is_empty(selector: Mapping[str, Any] | None) -> bool:
    """Return True if the selector has no requirements."""
    return not selector or not (selector.get("matchLabels") or selector.get("matchExpressions"))


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
