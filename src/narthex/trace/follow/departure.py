"""A packet at the border of a network namespace: how it came in, how it is about to leave, and what becomes of it there."""

from __future__ import annotations

import msgspec

from narthex.trace.follow.hooks import PartialPath
from narthex.trace.follow.steps import view_step
from narthex.trace.follow.views import NextHop, NodeLink, NodeView
from narthex.trace.model import Fate, Header, PathStep, Stage


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """How a packet enters a node."""

    link: str | None = None
    """The input interface; None if the node itself creates the packet."""
    bridged: bool = False
    """Only its frame passes the node, from port to port of the bridge `link`."""


CREATED_HERE = NodeEntry()


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """A packet that is about to leave a node."""

    view: NodeView
    entry: NodeEntry
    came: Header
    """Its header when it entered the node."""
    path: PartialPath
    header: Header
    hop: NextHop
    is_reply: bool

    @property
    def link(self) -> NodeLink | None:
        """The output interface, if known."""
        return self.view.link(self.hop.link)

    @property
    def to(self) -> str:
        """The address that has to be resolved on the link."""
        return self.hop.via or self.header.destination

    def step(self, stage: Stage, what: str, *evidence: str) -> PathStep:
        """Return a step on this node."""
        return view_step(self.view, stage, what, *evidence)


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """The packet ends behind the link, or nothing more is known of it."""

    reason: str
    fate: Fate = Fate.LOST
    steps: tuple[PathStep, ...] = ()
    missing: str = ""
    """The part of the node's view that would tell more."""


class Onward(msgspec.Struct, frozen=True, kw_only=True):
    """The packet enters another namespace."""

    view: NodeView
    entry: NodeEntry
    steps: tuple[PathStep, ...]
    """The steps before its border."""
    inside: tuple[PathStep, ...] = ()
    """The steps behind it."""


Crossing = Stop | Onward
