"""Following a packet from node to node: what lies between two nodes' hooks, and the answer's way back."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from narthex.model.net import family_of, join_port
from narthex.trace.follow.atlas import ClusterMap, bridge_calls_rules
from narthex.trace.follow.hooks import Story
from narthex.trace.follow.passage import NatBinding, NodeTraversal, TraversalExit
from narthex.trace.follow.routing import RouteQuery, look_up
from narthex.trace.follow.views import NodeLink, NodeView
from narthex.trace.model import (
    Alternative,
    Fate,
    Header,
    MissingPart,
    PathBranch,
    PathEnd,
    PathStep,
    Stage,
    branch_tree,
)

_MOST_NODES = 16


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """How a packet comes to a node."""

    link: str | None = None
    """It came in by; None: it is made here."""
    bridged: bool = False
    """Its frame goes from port to port of the bridge `link`."""


MADE_HERE = NodeEntry()


class PathFollower:
    """Follows one packet."""

    def __init__(self, atlas: ClusterMap, size: int = 0) -> None:
        """`size` is the packet's length in bytes, with its do-not-fragment bit set; 0: small."""
        self._atlas = atlas
        self._size = size
        self._missing: dict[tuple[str, str], str] = {}

    @property
    def missing(self) -> tuple[MissingPart, ...]:
        """What was asked for on the way and is not known."""
        return tuple(MissingPart(node=node, part=part, why=why) for (node, part), why in self._missing.items())

    def go(
        self,
        view: NodeView,
        header: Header,
        entry: NodeEntry,
        story: Story = (),
        *,
        bindings: tuple[NatBinding, ...] = (),
        asked: Header | None = None,
        depth: int = 0,
    ) -> list[Alternative]:
        """All ways from a node on. `asked` is the header of the packet that is answered, when this is an answer."""
        if depth > _MOST_NODES:
            reason = f"it goes in circles: {_MOST_NODES} nodes on the way"
            return [(Fraction(1), story, PathEnd(fate=Fate.LOST, node=view.name, reason=reason))]
        answers = next((each for each in reversed(bindings) if each.node == view.name), None) if asked else None
        passage = NodeTraversal(
            view,
            header,
            self._atlas.name_of,
            own=self._atlas.own(view),
            answers=answers,
            answering=asked is not None,
        )
        if entry.bridged and entry.link is not None:
            over = self._over_frames(view, header, entry.link, story, bindings, asked, answers is not None, depth)
            if over is not None:
                return over
        if entry.link is None:
            exits = passage.sent(story)
        elif entry.bridged:
            exits = passage.bridged(entry.link, story)
        else:
            exits = passage.received(entry.link, story)
        for part, why in passage.missing.items():
            self._missing.setdefault((view.name, part), why)
        told: list[Alternative] = []
        for each in exits:
            mine = bindings
            if asked is None and _rewritten(header, each.header):
                mine = (*bindings, NatBinding(node=view.name, before=header, after=each.header))
            if each.end is not None:
                told.append(self._ended(view, each, each.end, mine, asked, depth))
            else:
                told += self._left(view, each, entry, header, mine, asked, depth)
        return told

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _ended(
        self,
        view: NodeView,
        exit: TraversalExit,
        end: PathEnd,
        bindings: tuple[NatBinding, ...],
        asked: Header | None,
        depth: int,
    ) -> Alternative:
        if end.fate is Fate.DELIVERED:
            end = self._delivered(view, exit.header, bindings, asked, MADE_HERE, depth)
        return exit.traveller.branch.probability, exit.traveller.story, end

    def _delivered(
        self,
        view: NodeView,
        header: Header,
        bindings: tuple[NatBinding, ...],
        asked: Header | None,
        back: NodeEntry,
        depth: int,
    ) -> PathEnd:
        """Somebody gets it; `back` is how the answer comes to the node."""
        end = PathEnd(
            fate=Fate.DELIVERED,
            node=view.name,
            address=header.destination,
            port=header.port,
            name=self._atlas.name_of(header.destination),
            source=header.source,
            masqueraded=header.masqueraded,
        )
        if asked is not None:
            return _judged(end, header, asked)
        return msgspec.structs.replace(end, reply=self._answer(view, header, bindings, back, depth))

    def _answer(
        self, view: NodeView, header: Header, bindings: tuple[NatBinding, ...], back: NodeEntry, depth: int
    ) -> PathBranch | None:
        """The answer's way, None when it cannot be followed."""
        if not header.source:
            return None
        first = bindings[0].before if bindings else header
        answer = Header(
            source=header.destination,
            destination=header.source,
            protocol=header.protocol,
            source_port=header.port or None,
            port=header.source_port or 0,
        )
        unknown = "" if header.source_port else "the client's port: rules that ask for it are taken not to match"
        start = PathStep(
            stage=Stage.START, node=view.name, what=f"the answer: {answer}", before=answer, unknown=unknown
        )
        if back.link is not None:
            back = self._over_bridge(view, header.destination, header.source, back.link)
        return branch_tree(self.go(view, answer, back, (start,), bindings=bindings, asked=first, depth=depth))

    def _over_frames(
        self,
        view: NodeView,
        header: Header,
        link: str,
        story: Story,
        bindings: tuple[NatBinding, ...],
        asked: Header | None,
        rewritten_here: bool,
        depth: int,
    ) -> list[Alternative] | None:
        """From port to port of a bridge past IP's hooks; None: through them (br_netfilter)."""
        calls = bridge_calls_rules(view, link, family_of(header.destination).value)
        if calls:
            return None
        name = "net.bridge.bridge-nf-call-iptables"
        step = self._step(view, Stage.BRIDGE, f"from port to port of {link}: no rule sees it", f"{name} is not 1")
        if calls is None:
            self._missing.setdefault((view.name, "sysctls"), view.absent.get("sysctls", ""))
            step = msgspec.structs.replace(step, evidence=(), unknown=f"{name}")
            if rewritten_here:
                reason = f"whether frames over {link} pass the rules that would rewrite the answer: {name} is not known"
                return [(Fraction(1), (*story, step), PathEnd(fate=Fate.UNKNOWN, node=view.name, reason=reason))]
        end = self._delivered(view, header, bindings, asked, NodeEntry(link=link), depth)
        return [(Fraction(1), (*story, step), end)]

    def _over_bridge(self, view: NodeView, source: str, destination: str, link: str) -> NodeEntry:
        """How a packet from one address behind a bridge to another comes: by frames alone when both are on it."""
        held = view.link(link)
        near = self._atlas.link_towards(view, destination)
        on_it = near is not None and near.link == link and destination not in self._atlas.own(view)
        return NodeEntry(
            link=link, bridged=bool(on_it and held is not None and held.kind == "bridge" and source != destination)
        )

    # ---- links -----------------------------------------------------------------------------------------------------

    def _left(
        self,
        view: NodeView,
        exit: TraversalExit,
        entry: NodeEntry,
        came: Header,
        bindings: tuple[NatBinding, ...],
        asked: Header | None,
        depth: int,
    ) -> list[Alternative]:
        """The packet leaves the node."""
        assert exit.out is not None
        share, story, header, hop = exit.traveller.branch.probability, exit.traveller.story, exit.header, exit.out.hop
        link = view.link(hop.link)
        to = hop.via or header.destination
        # A packet's mark is this kernel's own.
        onwire = msgspec.structs.replace(header, mark=0)

        def ends(fate: Fate, reason: str, *more: PathStep) -> list[Alternative]:
            end = PathEnd(
                fate=fate,
                node=view.name,
                address=header.destination,
                port=header.port,
                name=self._atlas.name_of(header.destination),
                source=header.source,
                masqueraded=header.masqueraded,
                reason=reason,
            )
            return [(share, (*story, *more), end)]

        if exit.out.unresolved:
            return ends(Fate.LEAVES, f"where {header.destination} is the routes say, and they are not known")
        if link is not None and not link.up:
            return ends(Fate.LOST, f"the link {hop.link} is down")
        if self._size and link is not None and 0 < link.mtu < self._size:
            step = PathStep(stage=Stage.MTU, node=view.name, what=f"{self._size} bytes do not fit through {hop.link}")
            return ends(
                Fate.LOST, f"{self._size} bytes with DF set do not fit through {hop.link} (mtu {link.mtu})", step
            )
        if link is not None and link.kind == "vxlan":
            onwards = self._tunnelled(view, link, to, header, asked is not None)
            if isinstance(onwards, tuple):
                fate, reason, steps = onwards
                return ends(fate, reason, *steps)
            other, other_link, steps_ = onwards.view, onwards.link, onwards.steps
            more = self.go(
                other, header, NodeEntry(link=other_link), (), bindings=bindings, asked=asked, depth=depth + 1
            )
            return [(share * chance, (*story, *steps_, *rest), end) for chance, rest, end in more]
        neighbour = self._atlas.neighbour(view, to, hop.link)
        if neighbour is not None and neighbour.state in ("FAILED", "INCOMPLETE"):
            step = self._step(
                view, Stage.NEIGHBOUR, f"nobody answers for {to} on {hop.link}", f"{to} {neighbour.state}"
            )
            return ends(Fate.LOST, f"nobody answers for {to} on {hop.link} (neighbour {neighbour.state})", step)
        next_view = self._atlas.holder(to, view)
        if next_view is not None:
            own = next_view.own(to)
            step = self._step(view, Stage.NEXT_NODE, f"over {hop.link} to node {next_view.name}, which has {to}")
            into = NodeEntry(link=own.link if own is not None else None)
            if into.link is None:
                return ends(Fate.LEAVES, f"continues on node {next_view.name}, whose links are not known", step)
            more = self.go(next_view, onwire, into, (), bindings=bindings, asked=asked, depth=depth + 1)
            return [(share * chance, (*story, step, *rest), end) for chance, rest, end in more]
        if self._is_here(view, link, hop.via, header.destination):
            lost = self._hairpin(view, link, entry, came, header)
            if lost:
                return ends(Fate.LOST, lost)
            step = self._step(view, Stage.POD_LINK, f"over {hop.link} to {self._atlas.name_of(to) or to}")
            end = self._delivered(view, header, bindings, asked, NodeEntry(link=hop.link), depth)
            return [(share, (*story, step), end)]
        if asked is not None and header.destination == asked.source:
            end = PathEnd(fate=Fate.DELIVERED, node=view.name, address=header.destination, source=header.source)
            return [(share, story, _judged(end, header, asked))]
        node = self._atlas.node_named(to) or self._atlas.node_named(header.destination)
        where = f"continues on node {node}: give its bundle" if node and node != view.name else "nothing more is known"
        return ends(Fate.LEAVES, f"leaves by {hop.link} to {to}; {where}")

    def _is_here(self, view: NodeView, link: NodeLink | None, via: str, destination: str) -> bool:
        """Whether the packet has come to a pod of this node."""
        if via:
            return False
        if self._atlas.node_of(destination) == view.name and view.name:
            return True
        return link is not None and link.kind in ("bridge", "veth") and not self._is_uplink(view, link)

    @staticmethod
    def _is_uplink(view: NodeView, link: NodeLink) -> bool:
        """Whether the way to everywhere leads over the link: then what is on it are machines and no pods."""
        return any(
            hop.link == link.name
            for route in view.routes or ()
            if route.destination in ("0.0.0.0/0", "::/0") and route.kind == "unicast"
            for hop in route.hops
        ) or any(hop.link == link.name and hop.via for route in view.routes or () for hop in route.hops)

    def _hairpin(self, view: NodeView, link: NodeLink | None, entry: NodeEntry, came: Header, header: Header) -> str:
        """Why a packet cannot go out by the port that it came in by; empty when it can."""
        if link is None or entry.link != link.name or link.kind != "bridge" or header.destination != came.source:
            return ""
        if not bridge_calls_rules(view, link.name, family_of(header.destination).value):
            return ""
        neighbour = self._atlas.neighbour(view, header.destination, link.name)
        port = self._atlas.port(view, neighbour.mac, link.name) if neighbour is not None else None
        if port is not None and port.hairpin is False:
            return (
                f"the bridge {link.name} does not send a frame back by the port that it came in by: hairpin is off on "
                f"{port.name}, and br_netfilter makes the bridge do it"
            )
        return ""

    def _tunnelled(
        self, view: NodeView, link: NodeLink, to: str, header: Header, answering: bool
    ) -> _Landed | tuple[Fate, str, Sequence[PathStep]]:
        """Into a VXLAN, and out of it on the other side."""
        neighbour = self._atlas.neighbour(view, to, link.name)
        if view.neighbours is None or view.fdb is None:
            self._missing.setdefault((view.name, "neighbours" if view.neighbours is None else "fdb"), "")
            node = self._atlas.node_named(to) or self._atlas.node_named(header.destination)
            where = f"node {node}" if node else "the node behind it"
            return Fate.LEAVES, f"by {link.name} to {to}; continues on {where}: give its bundle", ()
        entry = self._atlas.forwarding(view, neighbour.mac if neighbour is not None else "", link.name)
        if entry is None:
            return Fate.LOST, f"{link.name} does not know where {to} is: no neighbour and no forwarding entry", ()
        outer = Header(
            source=link.vxlan_local,
            destination=entry.remote,
            protocol="udp",
            port=link.vxlan_port or 8472,
            mark=header.mark,
        )
        mac = neighbour.mac if neighbour is not None else entry.mac
        steps = [
            self._step(view, Stage.NEIGHBOUR, f"{to} is {mac}", f"{to} dev {link.name} lladdr {mac}"),
            self._step(
                view,
                Stage.OVERLAY,
                f"put into a packet to {entry.remote} (VXLAN {link.vxlan_id}, udp port {outer.port})",
                f"{entry.mac} dev {link.name} dst {entry.remote}",
            ),
        ]
        fault = self._outer(view, outer, None, answering)
        if fault is not None:
            return fault.fate, f"the overlay's own packet: {fault.reason}", steps
        other = self._atlas.holder(entry.remote, view)
        if other is None:
            node = self._atlas.node_named(entry.remote)
            where = f"node {node} ({entry.remote})" if node else f"the node {entry.remote}"
            return Fate.LEAVES, f"continues on {where}: give its bundle", steps
        own = other.own(entry.remote)
        fault = self._outer(other, outer, own.link if own is not None else "", answering)
        if fault is not None:
            return fault.fate, f"the overlay's own packet, on node {other.name}: {fault.reason}", steps
        far = next(
            (each for each in other.links or () if each.vxlan_id == link.vxlan_id and each.kind == "vxlan"), None
        )
        if far is None:
            return Fate.LOST, f"node {other.name} has no VXLAN {link.vxlan_id}", steps
        steps.append(self._step(other, Stage.OVERLAY, f"taken out of it, in by {far.name}"))
        return _Landed(view=other, link=far.name, steps=tuple(steps))

    def _outer(self, view: NodeView, outer: Header, link: str | None, answering: bool) -> PathEnd | None:
        """Why the overlay's packet does not get through a node's rules; None when it does."""
        passage = NodeTraversal(view, outer, self._atlas.name_of, own=self._atlas.own(view), answering=answering)
        exits = passage.sent() if link is None else passage.received(link)
        return next((each.end for each in exits if each.end is not None and each.end.fate is not Fate.DELIVERED), None)

    def entry_of(self, view: NodeView, source: str, destination: str) -> tuple[NodeEntry | None, str]:
        """How a packet of a neighbour (a pod, or a machine outside) comes in; None when it is not known, and why."""
        found = look_up(view, RouteQuery(destination=source, source=destination))
        if found.kind == "unicast" and found.hops and found.hops[0][0].link:
            link = found.hops[0][0].link
            return (
                self._over_bridge(view, source, destination, link) if not found.hops[0][0].via else NodeEntry(link=link)
            ), ""
        return None, found.reason or f"the route to {source} is {found.kind}"

    @staticmethod
    def _step(view: NodeView, stage: Stage, what: str, *evidence: str) -> PathStep:
        return PathStep(stage=stage, node=view.name, what=what, evidence=evidence)


class _Landed(msgspec.Struct, frozen=True):
    view: NodeView
    link: str
    steps: tuple[PathStep, ...]


def _rewritten(before: Header, after: Header) -> bool:
    return (before.source, before.destination, before.port) != (after.source, after.destination, after.port)


def _judged(end: PathEnd, header: Header, asked: Header) -> PathEnd:
    """Whether the sender takes it for the answer to what it asked."""
    if header.destination == asked.source and header.source == asked.destination:
        return end
    got = header.source
    wanted = join_port(asked.destination, asked.port) if asked.port else asked.destination
    reason = f"the sender asked {wanted} and is answered by {got}: the rewriting is not undone on the answer's way"
    return msgspec.structs.replace(end, fate=Fate.LOST, reason=reason)
