"""Label selectors as objects write them, and who selects given labels without asking everybody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from narthex.lab.controllers.interfaces import ObjectKey

Pair = tuple[str, str]


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """A `metav1.LabelSelector`. None selects nothing, an empty one everything."""
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
    """It demands nothing."""
    return not selector or not (selector.get("matchLabels") or selector.get("matchExpressions"))


class SelectorIndex:
    """Selectors of one kind of object, found by the labels that they could select.

    Each is kept under one of the labels that it demands: the one that the fewest others are kept under.
    """

    def __init__(self) -> None:
        self._places: dict[ObjectKey, tuple[str, Pair | None]] = {}
        self._under: dict[tuple[str, Pair | None], set[ObjectKey]] = {}

    def put(self, key: ObjectKey, demanded: Mapping[str, str] | None) -> None:
        """Remember a selector by the labels it demands; None: it selects nothing. Empty: it may select anything."""
        place = self._places.pop(key, None)
        if place is not None:
            self._under[place].discard(key)
            if not self._under[place]:
                del self._under[place]
        if demanded is None:
            return
        places: list[tuple[str, Pair | None]] = [(key.namespace, pair) for pair in demanded.items()] or [
            (key.namespace, None)
        ]
        chosen = min(places, key=lambda place: (len(self._under.get(place, ())), place[1] or ("", "")))
        self._places[key] = chosen
        self._under.setdefault(chosen, set()).add(key)

    def candidates(self, namespace: str, labels: Mapping[str, str]) -> Iterator[ObjectKey]:
        """Those that may select an object of these labels; the whole selector is still to be asked."""
        pairs: Iterable[Pair | None] = (None, *labels.items())
        for pair in pairs:
            yield from self._under.get((namespace, pair), ())
