"""What can be wrong with a path, and what was found to be."""

from __future__ import annotations

import msgspec


class Cause(msgspec.Struct, frozen=True):
    """One thing that makes a path fail. `docs/reference/causes/ID.md` tells all about it."""

    id: str
    title: str
    """For a list: "The Service has no endpoint that is ready"."""

    @property
    def page(self) -> str:
        """The page about it, seen from the top of the project."""
        return f"docs/reference/causes/{self.id}.md"


class CauseFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A cause, found."""

    cause: Cause
    certain: bool
    """What is known leaves no other reading. False: it is likely."""
    sentence: str
    """What is the matter, in plain words, with the objects' names."""
    evidence: tuple[str, ...] = ()
    """What was seen that says so, each as its tool or object has it."""
    advice: str = ""
    """What to do."""
    node: str = ""
    explains: bool = True
    """It makes this very path fail. False: it was met beside."""
