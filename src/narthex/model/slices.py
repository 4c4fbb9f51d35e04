"""The slices of one Service: few, mostly one, and for every Service there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from narthex.model.objects import EndpointSlice


class Slices(Mapping[str, EndpointSlice]):
    """By their own name, and in its order. Immutable; holds no more than the slices themselves."""

    __slots__ = ("ordered",)

    def __init__(self, *ordered: EndpointSlice) -> None:
        """`ordered` by name, each name once."""
        self.ordered = ordered

    def put(self, one: EndpointSlice) -> Slices:
        """With this slice, in place of the one of its name."""
        name = one.name
        if not self.ordered or self.ordered[-1].name < name:
            return Slices(*self.ordered, one)
        rest = [each for each in self.ordered if each.name != name]
        return Slices(*sorted((*rest, one), key=lambda each: each.name))

    def without(self, name: str) -> Slices:
        """Without the slice of this name."""
        return Slices(*[each for each in self.ordered if each.name != name])

    def __getitem__(self, name: str) -> EndpointSlice:
        for each in self.ordered:
            if each.name == name:
                return each
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (each.name for each in self.ordered)

    def __len__(self) -> int:
        return len(self.ordered)

    def __repr__(self) -> str:
        return f"Slices({', '.join(self)})"
