"""Following a packet from node to node, and its reply back to the sender."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from narthex.model import family_of
from narthex.trace.follow.assume import NOTHING, AskedFacts, Assumption, possible_end
from narthex.trace.follow.hooks import PartialPath, Steps
from narthex.trace.follow.routing import RouteQuery, look_up
from narthex.trace.follow.steps import (
    accepted_reply,
    fails,
    fault_step,
    final_ends,
    is_uplink,
    relayed_packets,
    rewritten,
    view_step,
)
from narthex.trace.follow.traversal import NatBinding, NodeTraversal, TraversalExit
from narthex.trace.follow.views import ClusterMap, LinkAddress, NextHop, NodeLink, NodeView, bridge_calls_rules
from narthex.trace.model import (
    Alternative,
    Fate,
    Header,
    MissingPart,
    PathBranch,
    PathEnd,
    PathStep,
    PossibleEnd,
    Stage,
    branch_ends,
    branch_tree,
)

_MOST_NODES = 16
_DEFAULT_VXLAN_PORT = 8472


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """How a packet enters a node."""

    link: str | None = None
    """The input interface; None if the node itself creates the packet."""
    bridged: bool = False
    """Only its frame passes the node, from port to port of the bridge `link`."""


CREATED_HERE = NodeEntry()


class _Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What has happened to the packet's flow so far."""

    bindings: tuple[NatBinding, ...] = ()
    """Rewritings on the nodes passed, which replies undo."""
    asked: Header | None = None
    """For a reply: the header of the packet that it answers."""
    depth: int = 0
    """The number of nodes passed."""

    @property
    def is_reply(self) -> bool:
        return self.asked is not None


class _Departure(msgspec.Struct, frozen=True, kw_only=True):
    """A packet that is about to leave a node."""

    view: NodeView
    entry: NodeEntry
    came: Header
    """Its header when it entered the node."""
    path: PartialPath
    header: Header
    hop: NextHop
    flow: _Flow

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


class PathFollower:
    """Follows one packet over the nodes of a `ClusterMap`."""

    def __init__(self, cluster: ClusterMap, size: int = 0, assumed: Assumption = NOTHING) -> None:
        """`size` is the packet's length in bytes, sent with the DF bit; 0 stands for a small packet."""
        self._assumed = assumed
        self._asked: list[AskedFacts] = []
        self._may: dict[str, list[PossibleEnd]] = {}
        """The ends of alternatives in doubt, by the reason of the doubt."""
        self._cluster = cluster
        self._size = size
        self._missing: dict[tuple[str, str], str] = {}

    @property
    def missing(self) -> tuple[MissingPart, ...]:
        """Information that the path depends on and that the views lack."""
        return tuple(MissingPart(node=node, part=part, why=why) for (node, part), why in self._missing.items())

    def follow(self, view: NodeView, header: Header, entry: NodeEntry, steps: Steps = ()) -> list[Alternative]:
        """Return all alternatives from a node on; `steps` are those before."""
        found = self._follow(view, header, entry, steps, _Flow())
        return [(share, steps, self._with_possible(end)) for share, steps, end in found]

    @property
    def asked(self) -> AskedFacts:
        """The facts that rules asked for and the views lack."""
        return AskedFacts(
            links=frozenset(link for each in self._asked for link in each.links),
            addresses=frozenset(address for each in self._asked for address in each.addresses),
        )

    def _with_possible(self, end: PathEnd) -> PathEnd:
        may = self._may.get(end.reason) if end.fate is Fate.UNKNOWN and not end.may else None
        return msgspec.structs.replace(end, may=tuple(dict.fromkeys(may))) if may else end

    def entry_of(self, view: NodeView, source: str, destination: str) -> tuple[NodeEntry | None, str]:
        """Return how a packet of a neighbour (a pod, or a machine outside) enters; None and the reason if not known."""
        found = look_up(view, RouteQuery(destination=source, source=destination))
        if found.kind == "unicast" and found.hops and found.hops[0][0].link:
            hop = found.hops[0][0]
            return (NodeEntry(link=hop.link) if hop.via else self._over_bridge(view, source, destination, hop.link)), ""
        return None, found.reason or f"the route to {source} is {found.kind}"

    def _follow(self, view: NodeView, header: Header, entry: NodeEntry, steps: Steps, flow: _Flow) -> list[Alternative]:
        if flow.depth > _MOST_NODES:
            reason = f"routing loop: it has passed {_MOST_NODES} nodes"
            return [(Fraction(1), steps, PathEnd(fate=Fate.LOST, node=view.node, reason=reason))]
        bindings = reversed(flow.bindings) if flow.is_reply else ()
        undo = next((each for each in bindings if each.node == view.name), None)
        traversal = NodeTraversal(
            view,
            header,
            self._cluster.name_of,
            own=self._cluster.own(view),
            undo=undo,
            is_reply=flow.is_reply,
            assumed=self._assumed,
        )
        if entry.bridged and entry.link is not None:
            over = self._over_frames(view, header, entry.link, steps, flow, undo is not None)
            if over is not None:
                return over
        if entry.link is None:
            exits = traversal.created(steps)
        elif entry.bridged:
            exits = traversal.bridged(entry.link, steps)
        else:
            exits = traversal.received(entry.link, steps)
        for part, why in traversal.missing.items():
            self._missing.setdefault((view.name, part), why)
        if not flow.is_reply:
            self._asked.append(traversal.asked)
        found: list[Alternative] = []
        for each in exits:
            branch = each.path.branch
            after = [
                (share, steps, _supposing(end, branch.supposing))
                for share, steps, end in self._after(view, header, entry, each, flow)
            ]
            if branch.doubt:
                self._may.setdefault(branch.doubt, []).extend(
                    possible_end("", end) for _, _, end in after if end.fate is not Fate.UNKNOWN
                )
            else:
                found += after
        return found

    def _after(
        self, view: NodeView, came: Header, entry: NodeEntry, exit: TraversalExit, flow: _Flow
    ) -> list[Alternative]:
        """Continue after the hooks of a node."""
        if not flow.is_reply and rewritten(came, exit.header):
            binding = NatBinding(node=view.name, before=came, after=exit.header)
            flow = msgspec.structs.replace(flow, bindings=(*flow.bindings, binding))
        if exit.end is not None:
            end = exit.end
            if end.fate is Fate.DELIVERED:
                relayed = self._relayed(view, exit, flow)
                if relayed is not None:
                    return relayed
                end = self._delivered(view, exit.header, flow, CREATED_HERE)
            return [(exit.path.branch.probability, exit.path.steps, end)]
        assert exit.egress is not None
        departure = _Departure(
            view=view, entry=entry, came=came, path=exit.path, header=exit.header, hop=exit.egress.hop, flow=flow
        )
        if exit.egress.unresolved:
            reason = f"where {exit.header.destination} is the routes say, and they are not known"
            return self._ends(departure, Fate.LEAVES, reason)
        return self._leave(departure)

    # ---- delivery and reply ----------------------------------------------------------------------------------------

    def _delivered(self, view: NodeView, header: Header, flow: _Flow, back: NodeEntry) -> PathEnd:
        """Return the end for a received packet; `back` is how its reply enters the node."""
        end = self._end(Fate.DELIVERED, view, header)
        if flow.asked is not None:
            return accepted_reply(end, header, flow.asked)
        return msgspec.structs.replace(end, reply=self._reply(view, header, flow, back))

    def _reply(self, view: NodeView, header: Header, flow: _Flow, back: NodeEntry) -> PathBranch | None:
        """Return the path of the reply; None if it can't be followed."""
        if not header.source:
            return None
        first = flow.bindings[0].before if flow.bindings else header
        reply = Header(
            source=header.destination,
            destination=header.source,
            protocol=header.protocol,
            source_port=header.port or None,
            port=header.source_port or 0,
        )
        unknown = "" if header.source_port else "the client's port: rules that match on it are assumed not to match"
        start = view_step(view, Stage.START, f"the reply: {reply}")
        start = msgspec.structs.replace(start, before=reply, unknown=unknown)
        if back.link is not None:
            back = self._over_bridge(view, header.destination, header.source, back.link)
        flow = msgspec.structs.replace(flow, asked=first)
        return branch_tree(self._follow(view, reply, back, (start,), flow))

    def _relayed(self, view: NodeView, exit: TraversalExit, flow: _Flow) -> list[Alternative] | None:
        """Continue with the connections that a userspace relay opens; None if none of its listeners gets the packet."""
        endpoints = [] if flow.is_reply else relayed_packets(view, exit.header)
        accepted = self._reply(view, exit.header, flow, CREATED_HERE) if endpoints else None
        if accepted is None or fails(branch_ends(accepted)):
            return None
        onward = _Flow(depth=flow.depth + 1)
        opened = [self._follow(view, each, CREATED_HERE, (), onward) for each in endpoints]
        if exit.header.protocol == "tcp":
            # The relay tries another endpoint if one does not answer.
            opened = [each for each in opened if not fails(final_ends(each))] or opened
        step = view_step(view, Stage.RELAY, f"the relay accepts it and connects to one of {len(endpoints)} endpoints")
        share = exit.path.branch.probability / len(opened)
        return [(share * part, (*exit.path.steps, step, *steps), end) for each in opened for part, steps, end in each]

    # ---- bridges ---------------------------------------------------------------------------------------------------

    def _over_frames(
        self, view: NodeView, header: Header, link: str, steps: Steps, flow: _Flow, rewritten_here: bool
    ) -> list[Alternative] | None:
        """Pass a bridge without the hooks of IP; None if its frames pass them (br_netfilter)."""
        calls = bridge_calls_rules(view, link, family_of(header.destination).value)
        if calls:
            return None
        name = "net.bridge.bridge-nf-call-iptables"
        what = f"from port to port of {link}: no rule sees it"
        step = view_step(view, Stage.BRIDGE, what, f"{name} is not 1")
        if calls is None:
            self._missing.setdefault((view.name, "sysctls"), view.absent.get("sysctls", ""))
            step = msgspec.structs.replace(step, evidence=(), unknown=name)
            if rewritten_here:
                reason = f"whether frames over {link} pass the rules that would rewrite the reply: {name} is not known"
                return [(Fraction(1), (*steps, step), PathEnd(fate=Fate.UNKNOWN, node=view.node, reason=reason))]
        return [(Fraction(1), (*steps, step), self._delivered(view, header, flow, NodeEntry(link=link)))]

    def _over_bridge(self, view: NodeView, source: str, destination: str, link: str) -> NodeEntry:
        """Return how a packet from an address behind `link` enters: only as frames if both ends are on the bridge."""
        held = view.link(link)
        near = self._cluster.link_towards(view, destination)
        on_it = near is not None and near.link == link and destination not in self._cluster.own(view)
        on_it = on_it and not self._cluster.through_node
        bridged = on_it and held is not None and held.kind == "bridge" and source != destination
        return NodeEntry(link=link, bridged=bridged)

    # ---- leaving a node --------------------------------------------------------------------------------------------

    def _leave(self, departure: _Departure) -> list[Alternative]:
        """Continue behind the output interface: each check either decides what happens or returns None."""
        checks = (
            self._blocked_by_link,
            self._out_of_pod,
            self._over_vxlan,
            self._without_neighbour,
            self._to_next_node,
            self._to_no_machine,
            self._to_pod,
            self._to_sender,
        )
        for check in checks:
            found = check(departure)
            if found is not None:
                return found
        to, name = departure.to, departure.view.name
        node = self._cluster.node_named(to) or self._cluster.node_named(departure.header.destination)
        where = f"continues on node {node}: give its bundle" if node and node != name else "nothing more is known"
        return self._ends(departure, Fate.LEAVES, f"leaves by {departure.hop.link} to {to}; {where}")

    def _ends(self, departure: _Departure, fate: Fate, reason: str, *steps: PathStep) -> list[Alternative]:
        end = self._end(fate, departure.view, departure.header, reason)
        return [(departure.path.branch.probability, (*departure.path.steps, *steps), end)]

    def _end(self, fate: Fate, view: NodeView, header: Header, reason: str = "") -> PathEnd:
        return PathEnd(
            fate=fate,
            node=view.node,
            address=header.destination,
            port=header.port,
            name=self._cluster.name_of(header.destination),
            source=header.source,
            masqueraded=header.masqueraded,
            reason=reason,
        )

    def _continue(
        self, departure: _Departure, view: NodeView, entry: NodeEntry, steps: Sequence[PathStep], *inside: PathStep
    ) -> list[Alternative]:
        """Continue in another namespace; `steps` come before its border, `inside` after it."""
        lost, left = self._lost_at_border(departure, view.name, steps)
        if not left:
            return lost
        path = departure.path
        flow = msgspec.structs.replace(departure.flow, depth=departure.flow.depth + 1)
        # A packet's mark doesn't leave its kernel.
        header = msgspec.structs.replace(departure.header, mark=0)
        return lost + [
            (path.branch.probability * left * share, (*path.steps, *steps, *inside, *more), end)
            for share, more, end in self._follow(view, header, entry, (), flow)
        ]

    def _lost_at_border(
        self, departure: _Departure, to: str, steps: Sequence[PathStep]
    ) -> tuple[list[Alternative], Fraction]:
        """Return what impairments lose on the way to a neighbouring place, and the share that passes."""
        lost: list[Alternative] = []
        path, left = departure.path, Fraction(1)
        for impairment, share in self._cluster.losses(departure.view.name, to):
            step = msgspec.structs.replace(fault_step(departure.view, impairment), probability=share)
            end = self._end(Fate.LOST, departure.view, departure.header, impairment.text)
            lost.append((path.branch.probability * left * share, (*path.steps, *steps, step), end))
            left *= 1 - share
        return lost, left

    def _blocked_by_link(self, departure: _Departure) -> list[Alternative] | None:
        link = departure.link
        if link is None:
            return None
        if not link.up:
            return self._ends(departure, Fate.LOST, f"the link {link.name} is down")
        if not link.carrier and link.kind != "bridge":
            return self._ends(departure, Fate.LOST, f"the link {link.name} has no carrier: its other end is down")
        if 0 < link.mtu < self._size:
            step = departure.step(Stage.MTU, f"{self._size} bytes do not fit through {link.name}")
            reason = f"{self._size} bytes with DF set do not fit through {link.name} (mtu {link.mtu})"
            return self._ends(departure, Fate.LOST, reason, step)
        return None

    def _without_neighbour(self, departure: _Departure) -> list[Alternative] | None:
        to, link = departure.to, departure.hop.link
        if self._cluster.complete:
            # Who is there is known, and the kernel asks again for a neighbour that has failed.
            return None
        neighbour = self._cluster.neighbour(departure.view, to, link)
        if neighbour is None or neighbour.state not in ("FAILED", "INCOMPLETE"):
            return None
        what = f"no neighbour responds for {to} on {link}"
        step = departure.step(Stage.NEIGHBOUR, what, f"{to} {neighbour.state}")
        return self._ends(departure, Fate.LOST, f"{what} (neighbour {neighbour.state})", step)

    def _to_next_node(self, departure: _Departure) -> list[Alternative] | None:
        view = self._cluster.receiver(departure.to, departure.view)
        if view is None:
            return None
        own = view.own(departure.to) or self._facing(departure, view)
        has = "has" if view.own(departure.to) is not None or own is None else "answers for"
        what = f"over {departure.hop.link} to {view.words}, which {has} {departure.to}"
        step = departure.step(Stage.NEXT_NODE, what)
        if own is None:
            reason = f"continues on {view.words}, whose links are not known"
            return self._ends(departure, Fate.LEAVES, reason, step)
        return self._continue(departure, view, NodeEntry(link=own.link), (step,))

    def _facing(self, departure: _Departure, view: NodeView) -> LinkAddress | None:
        """Return the address of another node in the network of the link that the packet leaves by."""
        held = (each for each in departure.view.addresses or () if each.link == departure.hop.link)
        found = (self._cluster.link_towards(view, each.address) for each in held)
        return next((each for each in found if each is not None), None)

    def _to_no_machine(self, departure: _Departure) -> list[Alternative] | None:
        """Lose a packet for an address that is known to be free."""
        to, link = departure.to, departure.hop.link
        if not self._cluster.complete or self._cluster.pod_of(to):
            return None
        what = f"no machine on {link} has {to}"
        return self._ends(departure, Fate.LOST, what, departure.step(Stage.NEIGHBOUR, what))

    def _out_of_pod(self, departure: _Departure) -> list[Alternative] | None:
        """Continue on the node of a pod."""
        view, header = departure.view, departure.header
        node = self._cluster.view(view.on) if view.on else None
        if node is None:
            return None
        entry, why = self.entry_of(node, departure.came.source, header.destination)
        if entry is None:
            return self._ends(departure, Fate.UNKNOWN, f"the link of {node.words} to {view.words} is not known: {why}")
        if departure.hop.via:
            entry = NodeEntry(link=entry.link)
        step = departure.step(Stage.POD_LINK, f"over {departure.hop.link} to {node.words}, in by {entry.link}")
        return self._continue(departure, node, entry, (step,))

    def _to_pod(self, departure: _Departure) -> list[Alternative] | None:
        view, header, path = departure.view, departure.header, departure.path
        if not self._is_here(view, departure.link, departure.hop.via, header.destination):
            return None
        stuck = self._bridge_hairpin(departure)
        if stuck:
            return self._ends(departure, Fate.LOST, stuck)
        link = departure.hop.link
        step = departure.step(Stage.POD_LINK, f"over {link} to {self._cluster.name_of(departure.to) or departure.to}")
        pod = self._cluster.pod_view(header.destination)
        own = pod.own(header.destination) if pod is not None and pod.rules is not None else None
        if pod is not None and own is not None:
            return self._continue(departure, pod, NodeEntry(link=own.link), (step,))
        lost, left = self._lost_at_border(departure, self._cluster.pod_of(header.destination), (step,))
        if not left:
            return lost
        end = self._delivered(view, header, departure.flow, NodeEntry(link=link))
        return [*lost, (path.branch.probability * left, (*path.steps, step), end)]

    def _to_sender(self, departure: _Departure) -> list[Alternative] | None:
        """Deliver a reply to a sender of which no more than the address is known."""
        asked, header, path = departure.flow.asked, departure.header, departure.path
        if asked is None or header.destination != asked.source:
            return None
        end = PathEnd(fate=Fate.DELIVERED, node=departure.view.node, address=header.destination, source=header.source)
        return [(path.branch.probability, path.steps, accepted_reply(end, header, asked))]

    def _is_here(self, view: NodeView, link: NodeLink | None, via: str, destination: str) -> bool:
        if via:
            return False
        if self._cluster.node_of(destination) == view.name and view.name:
            return True
        return link is not None and link.kind in ("bridge", "veth") and not is_uplink(view, link)

    def _bridge_hairpin(self, departure: _Departure) -> str:
        """Return why a frame can't leave by the bridge port that it came in by; empty if it can."""
        view, link, header = departure.view, departure.link, departure.header
        if link is None or departure.entry.link != link.name or link.kind != "bridge":
            return ""
        family = family_of(header.destination).value
        if header.destination != departure.came.source or not bridge_calls_rules(view, link.name, family):
            return ""
        neighbour = self._cluster.neighbour(view, header.destination, link.name)
        port = self._cluster.port(view, neighbour.mac, link.name) if neighbour is not None else None
        if port is None or port.hairpin is not False:
            return ""
        return (
            f"the bridge {link.name} does not send a frame back by the port that it came in by: hairpin is off on "
            f"{port.name}, and br_netfilter makes the bridge do it"
        )

    # ---- overlay ---------------------------------------------------------------------------------------------------

    def _over_vxlan(self, departure: _Departure) -> list[Alternative] | None:
        """Encapsulate, send the outer packet to the other node, and decapsulate there."""
        view, link, to = departure.view, departure.link, departure.to
        if link is None or link.kind != "vxlan":
            return None
        if view.neighbours is None or view.fdb is None:
            self._missing.setdefault((view.name, "neighbours" if view.neighbours is None else "fdb"), "")
            node = self._cluster.node_named(to) or self._cluster.node_named(departure.header.destination)
            where = f"node {node}" if node else "the node behind it"
            reason = f"by {link.name} to {to}; continues on {where}: give its bundle"
            return self._ends(departure, Fate.LEAVES, reason)
        neighbour = self._cluster.neighbour(view, to, link.name)
        entry = self._cluster.forwarding(view, neighbour.mac if neighbour is not None else "", link.name)
        if entry is None:
            reason = f"{link.name} does not know where {to} is: no neighbour and no forwarding entry"
            return self._ends(departure, Fate.LOST, reason)
        outer = Header(
            source=link.vxlan_local,
            destination=entry.remote,
            protocol="udp",
            port=link.vxlan_port or _DEFAULT_VXLAN_PORT,
            mark=departure.header.mark,
        )
        mac = neighbour.mac if neighbour is not None else entry.mac
        into = f"put into a packet to {entry.remote} (VXLAN {link.vxlan_id}, udp port {outer.port})"
        steps = (
            departure.step(Stage.NEIGHBOUR, f"{to} is {mac}", f"{to} dev {link.name} lladdr {mac}"),
            departure.step(Stage.OVERLAY, into, f"{entry.mac} dev {link.name} dst {entry.remote}"),
        )
        fault = self._outer_fault(view, outer, None, departure.flow)
        if fault is not None:
            return self._ends(departure, fault.fate, f"the overlay's own packet: {fault.reason}", *steps)
        return self._out_of_vxlan(departure, link, outer, steps)

    def _out_of_vxlan(
        self, departure: _Departure, link: NodeLink, outer: Header, steps: tuple[PathStep, ...]
    ) -> list[Alternative]:
        remote = outer.destination
        view = self._cluster.holder(remote, departure.view)
        if view is None:
            node = self._cluster.node_named(remote)
            where = f"node {node} ({remote})" if node else f"the node {remote}"
            return self._ends(departure, Fate.LEAVES, f"continues on {where}: give its bundle", *steps)
        own = view.own(remote)
        fault = self._outer_fault(view, outer, own.link if own is not None else "", departure.flow)
        if fault is not None:
            reason = f"the overlay's own packet, on node {view.name}: {fault.reason}"
            return self._ends(departure, fault.fate, reason, *steps)
        far = next((each for each in view.links or () if each.vxlan_id == link.vxlan_id and each.kind == "vxlan"), None)
        if far is None:
            reason = f"node {view.name} has no VXLAN {link.vxlan_id}"
            return self._ends(departure, Fate.LOST, reason, *steps)
        out = view_step(view, Stage.OVERLAY, f"taken out of it, in by {far.name}")
        return self._continue(departure, view, NodeEntry(link=far.name), steps, out)

    def _outer_fault(self, view: NodeView, outer: Header, link: str | None, flow: _Flow) -> PathEnd | None:
        """Return how the outer packet ends on a node if it doesn't get through; `link` is None where it is created."""
        traversal = NodeTraversal(
            view, outer, self._cluster.name_of, own=self._cluster.own(view), is_reply=flow.is_reply
        )
        exits = traversal.created() if link is None else traversal.received(link)
        return next((each.end for each in exits if each.end is not None and each.end.fate is not Fate.DELIVERED), None)


def _supposing(end: PathEnd, supposing: tuple[str, ...]) -> PathEnd:
    if not supposing:
        return end
    return msgspec.structs.replace(end, supposing=tuple(dict.fromkeys((*supposing, *end.supposing))))
