"""One packet in one network namespace: hooks, routing decisions, and source checks, from link to link.

After net/ipv4/ip_input.c, ip_output.c, ip_forward.c and route.c of Linux 6.x; IPVS is in input and output.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from narthex.model import Disposition, Host, IPFamily, Protocol, contains, family_of, join_port, network
from narthex.netfilter.dump.dump import GapKind
from narthex.netfilter.walk.state import (
    AFTER_INPUT,
    AFTER_OUTPUT,
    ALL_PRIORITIES,
    BEFORE_INPUT,
    BEFORE_OUTPUT,
    HookPoint,
    PriorityRange,
)
from narthex.trace.follow.hooks import NodeHooks, PartialPath, Steps
from narthex.trace.follow.routing import RouteDecision, RouteQuery, check_source, forwards, localnet, look_up
from narthex.trace.follow.unknown_facts import NOTHING, AskedFacts, Assumption
from narthex.trace.follow.views import NextHop, NodeView, TrackedConnection
from narthex.trace.model import Fate, Header, PathEnd, PathStep, Stage

_PROXY_TABLES = ("nat", "filter")
"""Tables in which kube-proxy has rules."""


class NatBinding(msgspec.Struct, frozen=True, kw_only=True):
    """The rewriting of a flow that connection tracking of one node remembers."""

    node: str
    before: Header
    """The first packet before the rewriting."""
    after: Header
    """The first packet after it."""


class Egress(msgspec.Struct, frozen=True, kw_only=True):
    """The next hop of a packet that leaves the node."""

    hop: NextHop
    header: Header
    unresolved: bool = False
    """The routes are unknown, so the link is unknown as well."""


class TraversalExit(msgspec.Struct, frozen=True, kw_only=True):
    """How one alternative leaves the node, or ends on it."""

    path: PartialPath
    header: Header
    end: PathEnd | None = None
    egress: Egress | None = None
    """Exactly one of `end` and `egress` is set."""


class NodeTraversal:
    """One packet on one node; call one of `received`, `bridged`, and `created`, once."""

    def __init__(
        self,
        view: NodeView,
        header: Header,
        name_of: Callable[[str], str],
        *,
        host: Host,
        undo: NatBinding | None = None,
        is_reply: bool = False,
        assumed: Assumption = NOTHING,
    ) -> None:
        """Prepare the traversal.

        Args:
            view: What is known of the node.
            header: The packet.
            name_of: Returns the owner of an address.
            host: The node, with the addresses that are known.
            undo: For a reply: the rewriting on this node that has to be undone.
            is_reply: The packet is a reply.
            assumed: Facts that the view lacks, with the values to assume.
        """
        self._view = view
        self._assumed = assumed
        self._header = header
        self._undo = undo
        self._is_reply = is_reply
        self.missing: dict[str, str] = {}
        self._known = None if is_reply else self._connection()
        established = is_reply or self._known is not None
        self._nat = not established
        host = msgspec.structs.replace(host, addresses=(*host.addresses, *assumed.own))
        self._hooks = NodeHooks(view, header, host, name_of, "established" if established else "new")
        self._exits: list[TraversalExit] = []
        if not self._hooks.known:
            self._miss("rules")
        for text in (*view.partial, *self._hooks.unread):
            self.missing[text.partition(":")[0]] = text.partition(":")[2].strip()
        others = [gap.table for gap in self._hooks.gaps if gap.kind is GapKind.TABLE and gap.table not in _PROXY_TABLES]
        if others:
            self.missing[f"table {', '.join(others)}"] = "not in the input"
        for gap in self._hooks.gaps:
            if gap.table not in others:
                part = f"table {gap.table}" if gap.table else gap.kind.value
                self.missing[part] = "; ".join(filter(None, (self.missing.get(part), str(gap))))

    @property
    def asked(self) -> AskedFacts:
        """The facts that rules asked for and the view lacks."""
        return self._hooks.asked

    # ---- alternatives in ---------------------------------------------------------------------------------------------------

    def received(self, iif: str, steps: Steps = ()) -> list[TraversalExit]:
        """Return the exits of a packet that comes in by a link."""
        start = self._hooks.start((*steps, *self._connection_steps()))
        for path in self._hook(HookPoint("prerouting", iif=iif), [start]):
            self._routed_in(self._undo_destination(self._as_known(path)), iif)
        return self._exits

    def bridged(self, link: str, steps: Steps = ()) -> list[TraversalExit]:
        """Return the exits of a bridged frame that passes the hooks of IP (br_netfilter).

        It is routed only if its destination is rewritten.
        """
        start = self._hooks.start((*steps, *self._connection_steps()))
        for path in self._hook(HookPoint("prerouting", iif=link), [start]):
            path = self._as_known(path)
            if path.branch.daddr != self._header.destination:
                self._routed_in(path, link)
                continue
            for on in self._hook(HookPoint("forward", iif=link, oif=link), [path]):
                self._out(on, NextHop(link=link))
        return self._exits

    def created(self, steps: Steps = ()) -> list[TraversalExit]:
        """Return the exits of a packet that a process of the node sends."""
        start = self._hooks.start(steps)
        for path, hop in self._alternatives(start, self._find(start, "lo"), "lo"):
            oif = hop.link if hop is not None else "lo"
            self._sent(path.then(*self._connection_steps()), oif, hop)
        return self._exits

    def _sent(self, start: PartialPath, oif: str | None, hop: NextHop | None) -> None:
        place = HookPoint("output", oif=oif or self._assumed.link or None)
        paths = self._hook(place, [start], span=BEFORE_OUTPUT)
        paths, away, ended = self._hooks.balance(place, paths)
        self._ended(ended)
        for path in self._hook(place, paths, span=AFTER_OUTPUT):
            self._sent_on(self._undo_destination(self._as_known(path)), hop)
        for path in away:
            self._again(path)

    def _sent_on(self, path: PartialPath, hop: NextHop | None) -> None:
        """Route again after output if a rule changed the destination or the mark (ip_route_me_harder)."""
        changed = path.branch.daddr != self._header.destination or path.branch.mark != self._header.mark
        alternatives: list[tuple[PartialPath, NextHop | None]] = [(path, hop)]
        if changed:
            alternatives = list(self._alternatives(path, self._find(path, "lo"), "lo"))
        for one, to in alternatives:
            if to is None:
                self._round_loopback(one)
            else:
                self._out(one, to)

    def _round_loopback(self, path: PartialPath) -> None:
        for one in self._hook(HookPoint("postrouting", oif="lo"), [path]):
            for two in self._hook(HookPoint("prerouting", iif="lo"), [one], nat=False):
                self._input(two, "lo", nat=False)

    # ---- routing ---------------------------------------------------------------------------------------------------

    def _find(self, path: PartialPath, iif: str) -> RouteDecision:
        header = self._hooks.header(path)
        question = RouteQuery(destination=header.destination, source=header.source, iif=iif, mark=header.mark)
        found = look_up(self._view, question)
        # Without routes or addresses, those of Services that IPVS has, and those that a person named, are known all the same.
        unlisted = self._view.addresses is None or self._view.routes is None
        if unlisted and self._hooks.local(header.destination):
            return RouteDecision(kind="local", evidence=("an address of this node",))
        return found

    def _routed_in(self, path: PartialPath, iif: str) -> None:
        header = self._hooks.header(path, iif=iif)
        destination = header.destination
        if family_of(destination) is IPFamily.IPV4 and contains("127.0.0.0/8", destination) and iif != "lo":
            allowed = localnet(self._view, iif)
            evidence = (f"net.ipv4.conf.{iif}.route_localnet",)
            if allowed is False:
                reason = f"{destination} is loopback, and packets to it may not come in by {iif}: route_localnet is off"
                self._lost(path, Stage.ROUTING, reason, evidence)
                return
            if allowed is None:
                self._miss("sysctls")
        found = self._find(path, iif)
        if found.kind in ("unicast", "local"):
            checked = check_source(
                self._view,
                RouteQuery(destination=destination, source=header.source or destination, iif=iif, mark=header.mark),
                found.hops[0][0].link if found.hops else "lo",
            )
            if checked.passed is False and header.source:
                self._lost(path, Stage.RP_FILTER, checked.reason, checked.evidence)
                return
            if checked.passed is None:
                self._miss("sysctls" if self._view.sysctls is None else "routes")
        for one, hop in self._alternatives(path, found, iif):
            if hop is None:
                self._input(one, iif, nat=self._nat)
            else:
                self._forward(one, iif, hop)

    def _alternatives(
        self, path: PartialPath, found: RouteDecision, iif: str
    ) -> list[tuple[PartialPath, NextHop | None]]:
        """Return the alternatives of a route lookup, each with its next hop, or None for the node itself; record those that end."""
        header = self._hooks.header(path, iif="" if iif == "lo" else iif)
        step = msgspec.structs.replace(self._step(Stage.ROUTING, "", evidence=found.evidence), before=header)
        if found.kind == "local":
            decided = msgspec.structs.replace(step, what=f"{header.destination} is {self._who}'s own", verdict="local")
            return [(path.then(decided), None)]
        if found.kind == "unicast":
            alternatives: list[tuple[PartialPath, NextHop | None]] = []
            left = sum(share for _, share in found.hops)
            for hop, share in found.hops:
                one = path.part(share / left) if share != left else path
                what = f"{header.destination}: {hop_text(hop)}"
                decided = msgspec.structs.replace(step, what=what, verdict=hop.link, probability=share)
                alternatives.append((one.then(decided), hop))
                left -= share
            return alternatives
        if found.kind == "unknown" and self._view.routes is None:
            self._miss("routes")
            decided = msgspec.structs.replace(
                step, what=f"{header.destination} is not this node's own", unknown=found.reason, verdict="away"
            )
            return [(path.then(decided), NextHop())]
        if found.kind in ("broadcast", "multicast"):
            self._finish(path, header, Fate.UNKNOWN, f"{header.destination} is a {found.kind} address")
        elif found.kind == "unknown":
            self._finish(path.then(step), header, Fate.UNKNOWN, found.reason)
        else:
            self._lost(path, Stage.ROUTING, found.reason, found.evidence)
        return []

    # ---- alternatives through ----------------------------------------------------------------------------------------------

    def _input(self, path: PartialPath, iif: str, *, nat: bool) -> None:
        place = HookPoint("input", iif=iif)
        paths = self._hook(place, [path], nat=nat, span=BEFORE_INPUT)
        paths, away, ended = self._hooks.balance(place, paths)
        self._ended(ended)
        for one in self._hook(place, paths, nat=nat, span=AFTER_INPUT):
            one = self._undo_source(one)
            header = self._hooks.header(one, iif=iif)
            step = msgspec.structs.replace(self._step(Stage.DELIVERY, f"to a process of {self._who}"), before=header)
            unsure = self._hooks.unsure_end(one.branch, Disposition.DELIVERED)
            if unsure is not None:
                self._put(one.then(step), header, unsure)
                continue
            end = PathEnd(fate=Fate.DELIVERED, node=self._view.node, address=header.destination, port=header.port)
            self._put(one.then(step), header, end)
        for one in away:
            self._again(one)

    def _again(self, path: PartialPath) -> None:
        """Route what IPVS sends to a real server; it passes output again, without nat."""
        for one, hop in self._alternatives(path, self._find(path, "lo"), "lo"):
            for out in self._hook(HookPoint("output", oif=hop.link if hop else "lo"), [one], nat=False):
                self._out(out, hop or NextHop(link="lo"))

    def _forward(self, path: PartialPath, iif: str, hop: NextHop) -> None:
        passes = forwards(self._view, family_of(self._header.destination), iif)
        if passes is False:
            name = "net.ipv4.ip_forward" if "." in self._header.destination else "net.ipv6.conf.all.forwarding"
            self._lost(path, Stage.ROUTING, f"this node passes nothing on: {name} is 0", (f"{name} = 0",))
            return
        if passes is None:
            self._miss("sysctls")
        for one in self._hook(HookPoint("forward", iif=iif, oif=hop.link or self._assumed.link or None), [path]):
            self._out(one, hop)

    def _out(self, path: PartialPath, hop: NextHop) -> None:
        for one in self._hook(HookPoint("postrouting", oif=hop.link or self._assumed.link or None), [path]):
            unsure = self._hooks.unsure_end(one.branch, Disposition.NOT_OURS)
            if unsure is not None:
                self._put(one, self._hooks.header(one), unsure)
                continue
            self._resolve_source(one, hop)
            one = self._undo_source(self._as_known_source(one))
            header = self._hooks.header(one, oif=hop.link)
            if one.steps and one.steps[-1].after is not None and one.branch.masquerade:
                last = msgspec.structs.replace(one.steps[-1], after=header)
                one = PartialPath(one.branch, (*one.steps[:-1], last))
            out = Egress(hop=hop, header=header, unresolved=not hop.link)
            self._exits.append(TraversalExit(path=one, header=header, egress=out))

    def _resolve_source(self, path: PartialPath, hop: NextHop) -> None:
        """Set the masquerade address: one of the outgoing link, preferably in the network of the next hop."""
        branch = path.branch
        if not branch.masquerade or branch.saddr:
            return
        family = family_of(branch.daddr)
        held = [
            each
            for each in self._view.addresses or ()
            if each.link == hop.link and family_of(each.address) is family and each.scope != "link"
        ]
        to = hop.via or branch.daddr
        same = [each for each in held if family_of(to) is family and _in_network(each.address, each.prefix, to)]
        if held:
            branch.saddr = (same or held)[0].address
        elif self._view.addresses is None:
            self._miss("addresses")

    def _hook(
        self, place: HookPoint, paths: list[PartialPath], *, nat: bool = True, span: PriorityRange = ALL_PRIORITIES
    ) -> list[PartialPath]:
        passed, ended = self._hooks.hook(place, paths, nat=nat and self._nat, span=span)
        self._ended(ended)
        return passed

    # ---- connections -----------------------------------------------------------------------------------------------

    def _connection(self) -> TrackedConnection | None:
        """Return the tracked connection of the packet, if its source port is known."""
        header, table = self._header, self._view.connections
        if table is None or header.source_port is None:
            return None
        return next((each for each in self._alike() if each.source_port == header.source_port), None)

    def _alike(self) -> list[TrackedConnection]:
        if self._view.connections is None:
            return []
        header = self._header
        held = self._view.connections.to(Protocol(header.protocol.upper()), header.destination, header.port)
        return [each for each in held if each.source == header.source]

    def _connection_steps(self) -> Steps:
        if self._is_reply:
            return ()
        alike = self._alike()
        if not alike:
            return ()
        if self._known is not None:
            what = "the connection is known: nat is skipped, the packet goes where its first one went"
            return (self._step(Stage.CONNTRACK, what, verdict="established", evidence=(self._known.text,)),)
        to = ", ".join(sorted({join_port(each.reply_source, each.reply_source_port) for each in alike})[:4])
        what = f"{len(alike)} known connection(s) from here to there go to {to}; only a new one meets the rules of nat"
        return (self._step(Stage.CONNTRACK, what, verdict="new", evidence=tuple(each.text for each in alike[:4])),)

    def _as_known(self, path: PartialPath) -> PartialPath:
        """Rewrite the destination as for the tracked connection."""
        known, branch = self._known, path.branch
        if known is None or (known.reply_source, known.reply_source_port) == (branch.daddr, branch.dport):
            return path
        before = self._hooks.header(path)
        branch.daddr, branch.dport, branch.dnat = known.reply_source, known.reply_source_port, True
        step = self._step(Stage.CONNTRACK, "the destination as its first packet's", evidence=(known.text,))
        return self._changed(path, step, before)

    def _as_known_source(self, path: PartialPath) -> PartialPath:
        known, branch = self._known, path.branch
        if known is not None and known.reply_destination != known.source:
            branch.saddr, branch.masquerade = known.reply_destination, True
        return path

    def _undo_destination(self, path: PartialPath) -> PartialPath:
        """Rewrite the destination of a reply back to the sender that this node masqueraded."""
        held, branch = self._undo, path.branch
        if held is None or branch.daddr != held.after.source or held.after.source == held.before.source:
            return path
        before = self._hooks.header(path)
        branch.daddr, branch.dnat = held.before.source, True
        what = f"the answer's destination becomes {held.before.source} again (masquerading undone)"
        return self._changed(path, self._step(Stage.REPLY, what), before)

    def _undo_source(self, path: PartialPath) -> PartialPath:
        """Rewrite the source of a reply back to the address that the sender asked."""
        held = self._undo
        if held is None:
            return path
        was = (held.before.destination, held.before.port)
        now = (held.after.destination, held.after.port)
        if was == now or self._header.source != held.after.destination:
            return path
        before = self._hooks.header(path)
        path.branch.saddr = held.before.destination
        what = f"the answer's source becomes {join_port(*was) if was[1] else was[0]} again (the rewriting undone)"
        return self._changed(path, self._step(Stage.REPLY, what), before)

    def _changed(self, path: PartialPath, step: PathStep, before: Header) -> PartialPath:
        return path.then(msgspec.structs.replace(step, before=before, after=self._hooks.header(path)))

    # ---- ends ------------------------------------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        return "this node" if self._view.on is None else self._view.words

    def _step(self, stage: Stage, what: str, verdict: str = "", evidence: tuple[str, ...] = ()) -> PathStep:
        return PathStep(
            stage=stage,
            node=self._view.node,
            namespace=self._view.namespace,
            what=what,
            verdict=verdict,
            evidence=evidence,
        )

    def _lost(self, path: PartialPath, stage: Stage, reason: str, evidence: tuple[str, ...]) -> None:
        header = self._hooks.header(path)
        step = msgspec.structs.replace(self._step(stage, reason, "lost", evidence), before=header)
        self._finish(path.then(step), header, Fate.LOST, reason)

    def _finish(self, path: PartialPath, header: Header, fate: Fate, reason: str) -> None:
        self._put(path, header, PathEnd(fate=fate, node=self._view.node, reason=reason))

    def _ended(self, ended: list[tuple[PartialPath, PathEnd]]) -> None:
        for path, end in ended:
            self._put(path, self._hooks.header(path), end)

    def _put(self, path: PartialPath, header: Header, end: PathEnd) -> None:
        self._exits.append(TraversalExit(path=path, header=header, end=end))

    def _miss(self, part: str) -> None:
        self.missing.setdefault(part, self._view.absent.get(part, ""))


def hop_text(hop: NextHop) -> str:
    """Return a next hop as text."""
    if not hop.link:
        return "somewhere: the routes are unknown"
    return f"over {hop.link} by way of {hop.via}" if hop.via else f"over {hop.link}, straight to it"


def _in_network(address: str, prefix: int, other: str) -> bool:
    return contains(network(f"{address}/{prefix}"), other)
