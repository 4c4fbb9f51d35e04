"""Following a packet from node to node, and its reply back to the sender."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from narthex.model import family_of
from narthex.netfilter.describe import one_of
from narthex.trace.follow.bridges import entry_over, hairpin_refusal, is_here
from narthex.trace.follow.crossing import cross, leaving
from narthex.trace.follow.departure import CREATED_HERE, Departure, NodeEntry, Onward, Stop
from narthex.trace.follow.hooks import Steps
from narthex.trace.follow.steps import (
    accepted_reply,
    fails,
    fault_step,
    final_ends,
    relayed_packets,
    rewritten,
    view_step,
)
from narthex.trace.follow.traversal import NatBinding, NodeTraversal, TraversalExit
from narthex.trace.follow.unknown_facts import NOTHING, AskedFacts, Assumption, possible_end
from narthex.trace.follow.views import ClusterMap, NodeView, bridge_calls_rules
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
        """Return True if the packet answers an earlier one."""
        return self.asked is not None


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
            host=self._cluster.host(view),
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
        departure = Departure(
            view=view,
            entry=entry,
            came=came,
            path=exit.path,
            header=exit.header,
            hop=exit.egress.hop,
            is_reply=flow.is_reply,
        )
        if exit.egress.unresolved:
            reason = f"the route to {exit.header.destination} is unknown"
            return self._stop(departure, Stop(fate=Fate.LEAVES, reason=reason))
        return self._leave(departure, flow)

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
            back = entry_over(self._cluster, view, header.destination, header.source, back.link)
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
        step = view_step(
            view, Stage.RELAY, f"the relay accepts it and connects to {one_of(len(endpoints), 'endpoint')}"
        )
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
                reason = f"it is unknown whether frames over {link} pass the rules that rewrite the reply: the input lacks {name}"
                return [(Fraction(1), (*steps, step), PathEnd(fate=Fate.UNKNOWN, node=view.node, reason=reason))]
        return [(Fraction(1), (*steps, step), self._delivered(view, header, flow, NodeEntry(link=link)))]

    # ---- leaving a node --------------------------------------------------------------------------------------------

    def _leave(self, departure: Departure, flow: _Flow) -> list[Alternative]:
        """Continue behind the output interface."""
        crossing = cross(self._cluster, departure, self._size)
        if isinstance(crossing, Onward):
            return self._continue(departure, crossing, flow)
        if crossing is not None:
            return self._stop(departure, crossing)
        return (
            self._to_pod(departure, flow)
            or self._to_sender(departure, flow)
            or self._stop(departure, leaving(self._cluster, departure))
        )

    def _stop(self, departure: Departure, stop: Stop) -> list[Alternative]:
        if stop.missing:
            self._missing.setdefault((departure.view.name, stop.missing), "")
        end = self._end(stop.fate, departure.view, departure.header, stop.reason)
        return [(departure.path.branch.probability, (*departure.path.steps, *stop.steps), end)]

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

    def _continue(self, departure: Departure, onward: Onward, flow: _Flow) -> list[Alternative]:
        """Continue in another namespace."""
        lost, left = self._lost_at_border(departure, onward.view.name, onward.steps)
        if not left:
            return lost
        path = departure.path
        flow = msgspec.structs.replace(flow, depth=flow.depth + 1)
        # A packet's mark doesn't leave its kernel.
        header = msgspec.structs.replace(departure.header, mark=0)
        return lost + [
            (path.branch.probability * left * share, (*path.steps, *onward.steps, *onward.inside, *more), end)
            for share, more, end in self._follow(onward.view, header, onward.entry, (), flow)
        ]

    def _lost_at_border(
        self, departure: Departure, to: str, steps: Sequence[PathStep]
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

    def _to_pod(self, departure: Departure, flow: _Flow) -> list[Alternative]:
        """Deliver to a pod of the node, through its own namespace if that is known; nothing if it is no pod of the node."""
        view, header, path = departure.view, departure.header, departure.path
        if not is_here(self._cluster, view, departure.link, departure.hop.via, header.destination):
            return []
        stuck = hairpin_refusal(self._cluster, departure)
        if stuck:
            return self._stop(departure, Stop(reason=stuck))
        link = departure.hop.link
        step = departure.step(Stage.POD_LINK, f"over {link} to {self._cluster.name_of(departure.to) or departure.to}")
        pod = self._cluster.pod_view(header.destination)
        own = pod.own(header.destination) if pod is not None and pod.rules is not None else None
        if pod is not None and own is not None:
            end_link = pod.link(own.link)
            if end_link is not None and not end_link.up:
                reason = f"the link {own.link} of {pod.words} is down"
                return self._stop(departure, Stop(reason=reason, steps=(step,)))
            return self._continue(departure, Onward(view=pod, entry=NodeEntry(link=own.link), steps=(step,)), flow)
        lost, left = self._lost_at_border(departure, self._cluster.pod_of(header.destination), (step,))
        if not left:
            return lost
        end = self._delivered(view, header, flow, NodeEntry(link=link))
        return [*lost, (path.branch.probability * left, (*path.steps, step), end)]

    @staticmethod
    def _to_sender(departure: Departure, flow: _Flow) -> list[Alternative]:
        """Deliver a reply to a sender of which no more than the address is known; nothing if it is another packet."""
        asked, header, path = flow.asked, departure.header, departure.path
        if asked is None or header.destination != asked.source:
            return []
        end = PathEnd(fate=Fate.DELIVERED, node=departure.view.node, address=header.destination, source=header.source)
        return [(path.branch.probability, path.steps, accepted_reply(end, header, asked))]


def _supposing(end: PathEnd, supposing: tuple[str, ...]) -> PathEnd:
    if not supposing:
        return end
    return msgspec.structs.replace(end, supposing=tuple(dict.fromkeys((*supposing, *end.supposing))))
