"""What happens to packets after the rewriting of their destination: routes, later rules, and links, one packet of each class.

A node with 5,000 Services of 10 endpoints has 50,000 such packets. Most of them differ only in the destination, and no later rule,
route, or neighbour entry distinguishes one destination from the other. Such packets are a class: the first one is followed over
the whole node, and the others share its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from narthex.model import IPFamily, address_key, family_of, parsed_network
from narthex.netfilter import ast
from narthex.netfilter.lazy import base_chains
from narthex.netfilter.walk.walk import Branch
from narthex.trace.follow.departure import NodeEntry
from narthex.trace.follow.path import PathFollower
from narthex.trace.follow.routing import RouteQuery, look_up
from narthex.trace.follow.views import ClusterMap, NextHop, NodeRules, NodeView
from narthex.trace.model import Alternative, Fate, Header, PathEnd, PathStep

_LATER_HOOKS = ("input", "forward", "postrouting")
_MOST_FOLLOWED = 2_000
"""Packets that are followed over the whole node for one report. Each takes milliseconds, and rules that distinguish more classes
of destinations were not seen."""
_BAD = (Fate.DROPPED, Fate.REJECTED, Fate.LOST, Fate.UNKNOWN)

Endpoint = tuple[str, int]


class Obstacle(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rewritten packet does not arrive."""

    fate: Fate
    """DROPPED, REJECTED, LOST, or UNKNOWN."""
    reason: str
    place: str = ""
    """Position in the dump, if known."""


class ForwardingResult(msgspec.Struct, frozen=True):
    """What happens to a rewritten packet."""

    obstacle: Obstacle | None = None
    """None: it arrives, or leaves the node for another one."""
    masqueraded: bool = False


class ForwardingWalker:
    """Follows packets of one node and IP family after the rewriting of their destination."""

    def __init__(self, view: NodeView, rules: NodeRules, family: IPFamily, own: tuple[str, ...]) -> None:
        """Index what later rules and routes distinguish. `own` are the node's addresses."""
        self._view = view
        self._own = frozenset((*own, *(each.address for each in view.addresses or ())))
        self._bound = self._own | rules.objects.bound
        self._of_rules = _Distinctions(rules, family)
        networks = [route.destination for route in view.routes or () if family_of(route.destination) is family]
        networks += [rule.destination for rule in view.policies or () if rule.destination]
        networks.append(family.loopback)
        self._of_routes = _Networks(networks)
        name = view.name
        nodes = {name: own} if view.addresses is None else {}
        self._follower = PathFollower(ClusterMap((view,), node_addresses=nodes))
        self._neighbours = {(each.address, each.link): each.state for each in view.neighbours or ()}
        self._hops: dict[tuple[object, ...], tuple[object, ...]] = {}
        self._known: dict[tuple[object, ...], ForwardingResult] = {}
        self._targets: dict[Endpoint, tuple[object, ...]] = {}
        self._followed = 0
        self.left_out = 0
        """Packets that were not followed because there were too many classes."""

    def results(self, header: Header, iif: str, branches: Iterable[Branch]) -> dict[Endpoint, ForwardingResult]:
        """Return what happens to the rewritten packets of a connection, by endpoint.

        Args:
            header: The packet as it arrives.
            iif: The input interface.
            branches: Its alternatives after prerouting or IPVS.
        """
        found: dict[Endpoint, ForwardingResult] = {}
        followed: dict[Endpoint, ForwardingResult] | None = None
        original = self._original(header)
        for branch in branches:
            key = original, self._class(header, iif, branch)
            if key not in self._known:
                if self._followed >= _MOST_FOLLOWED:
                    self.left_out += 1
                    continue
                if followed is None:
                    self._followed += 1
                    followed = self._follow(header, iif)
                self._known[key] = followed.get((branch.daddr, branch.dport), ForwardingResult())
            found[branch.daddr, branch.dport] = self._known[key]
        return found

    def link_to(self, source: str, destination: str, iif: str) -> str | None:
        """Return the link by which a packet leaves that no rule rewrites; None if it is unknown."""
        hops = self._routed(destination, source, iif, 0, self._of_routes.of(address_key(destination)[1]))
        return next((hop.link for hop in hops if isinstance(hop, NextHop) and hop.link), None)

    def _original(self, header: Header) -> tuple[object, ...]:
        """Return what later rules distinguish about the destination before the rewriting."""
        rules = self._of_rules
        if not rules.original:
            return ()
        return rules.address(header.destination, address_key(header.destination)[1]), rules.ports.get(header.port)

    def _class(self, header: Header, iif: str, branch: Branch) -> tuple[object, ...]:
        """Return everything that later decisions depend on, except for the destination before the rewriting."""
        rules = self._of_rules
        to = branch.daddr, branch.dport
        target = self._targets.get(to)
        if target is None:
            number = address_key(branch.daddr)[1]
            target = self._targets[to] = (
                rules.address(branch.daddr, number),
                rules.ports.get(branch.dport),
                branch.daddr in self._bound,
                self._of_routes.of(number),
            )
        remembered = tuple([name for name, _ in branch.remembers if name in rules.lists]) if branch.remembers else ()
        state = (header.source, header.protocol, iif, branch.mark, branch.connection_mark, branch.rewritten)
        nat = (branch.masquerade, branch.saddr, branch.tracked, branch.served is not None, remembered)
        return state, nat, target, self._hop(header.source, iif, branch, target)

    def _hop(self, source: str, iif: str, branch: Branch, target: tuple[object, ...]) -> tuple[object, ...]:
        """Return the next hops with the states of their neighbours."""
        hops = self._routed(branch.daddr, source, iif, branch.mark, target[3])
        return tuple([self._next(hop, branch.daddr) if isinstance(hop, NextHop) else hop for hop in hops])

    def _routed(self, to: str, source: str, iif: str, mark: int, networks: object) -> tuple[object, ...]:
        """Return the kind of a route and its next hops. `networks` are those of routes that contain the destination."""
        key = networks, to in self._own, source, iif, mark
        known = self._hops.get(key)
        if known is None:
            found = look_up(self._view, RouteQuery(destination=to, source=source, iif=iif, mark=mark))
            known = self._hops[key] = (found.kind, *(hop for hop, _ in found.hops))
        return known

    def _next(self, hop: NextHop, to: str) -> tuple[object, ...]:
        state = self._neighbours.get((hop.via or to, hop.link), "")
        return hop.link, bool(hop.via), state if state in ("", "FAILED", "INCOMPLETE") else "known"

    def _follow(self, header: Header, iif: str) -> dict[Endpoint, ForwardingResult]:
        """Follow a packet over the node; return what happens to each of its alternatives."""
        found: dict[Endpoint, ForwardingResult] = {}
        for alternative in self._follower.follow(self._view, header, NodeEntry(link=iif)):
            _, steps, end = alternative
            obstacle = _obstacle(steps, end) if end.fate in _BAD else None
            at = _endpoint(alternative)
            if at not in found or (obstacle is not None and found[at].obstacle is None):
                found[at] = ForwardingResult(obstacle, end.masqueraded)
        return found


def _endpoint(alternative: Alternative) -> Endpoint:
    """Return the destination of an alternative at its end."""
    _, steps, end = alternative
    if end.address:
        return end.address, end.port
    headers = (step.after or step.before for step in reversed(steps))
    last = next((header for header in headers if header is not None), None)
    return (last.destination, last.port) if last is not None else ("", 0)


def _obstacle(steps: tuple[PathStep, ...], end: PathEnd) -> Obstacle:
    """Return why a packet does not arrive: the rule that ended it, or the reason of its end."""
    last = next((step for step in reversed(steps) if step.what), None)
    if last is None or not last.chain or end.fate not in (Fate.DROPPED, Fate.REJECTED):
        return Obstacle(fate=end.fate, reason=end.reason)
    rule = "the policy of the chain is drop" if last.what == "policy drop" else last.rule or last.what
    reason = f"{last.stage.value}, table {last.table}, chain {last.chain}: {rule}"
    return Obstacle(fate=end.fate, reason=reason, place=last.place)


# ---- what rules distinguish ------------------------------------------------------------------------------------------


class _Networks:
    """Finds the networks that contain an address."""

    def __init__(self, cidrs: Iterable[str]) -> None:
        self._held: dict[int, set[int]] = {}
        for cidr in set(cidrs):
            net = parsed_network(cidr)
            shift = net.max_prefixlen - net.prefixlen
            self._held.setdefault(shift, set()).add(int(net.network_address) >> shift)

    def of(self, number: int) -> tuple[int, ...]:
        """Return the networks of an address, given as a number, as (host bits, prefix) pairs in a row."""
        found: list[int] = []
        for shift, prefixes in self._held.items():
            if number >> shift in prefixes:
                found += (shift, number >> shift)
        return tuple(found)


class _Ports:
    """Finds the ports and port ranges that rules name."""

    def __init__(self) -> None:
        self.exact: set[int] = set()
        self.ranges: set[tuple[int, int]] = set()
        self._known: dict[int, tuple[object, ...]] = {}

    def get(self, port: int) -> tuple[object, ...]:
        """Return what rules distinguish about a port. All rules must have been seen."""
        known = self._known.get(port)
        if known is None:
            ranges = (first <= port <= last for first, last in sorted(self.ranges))
            known = self._known[port] = (port if port in self.exact else 0, *ranges)
        return known


class _Distinctions:
    """The destinations that the rules after prerouting name; packets to all others are alike for them."""

    def __init__(self, rules: NodeRules, family: IPFamily) -> None:
        self._rules = rules
        self._family = family
        self._exact: set[str] = set()
        self._cidrs: set[str] = {family.loopback}
        self._between: set[tuple[int, int]] = set()
        self._types = False
        self.ports = _Ports()
        self.original = False
        """Rules look at the destination before the rewriting."""
        self.lists: set[str] = set()
        """Dynamic sets and lists that rules read."""
        self._seen: set[tuple[int, str]] = set()
        # What IPVS sends on passes output instead of forward.
        hooks = ("output", *_LATER_HOOKS) if rules.objects.servers else _LATER_HOOKS
        for table in rules.ruleset.tables:
            if table.family in (None, family):
                for chain in base_chains(table.chains):
                    if chain.hook is not None and chain.hook.hook in hooks:
                        self._chain(table, chain)
        self._networks = _Networks(self._cidrs)

    def address(self, address: str, number: int) -> tuple[object, ...]:
        """Return what rules distinguish about an address, given as text and as a number."""
        special = self._types and address.endswith((".0", ".255"))
        between: tuple[bool, ...] = ()
        if self._between:
            between = tuple(first <= number <= last for first, last in sorted(self._between))
        exact = address if special or address in self._exact else ""
        return exact, self._networks.of(number), between

    def _chain(self, table: ast.Table, chain: ast.Chain) -> None:
        todo = [chain.name]
        while todo:
            name = todo.pop()
            if (id(table), name) in self._seen or name not in table.chains:
                continue
            self._seen.add((id(table), name))
            for rule in table.chains[name].rules:
                for expression in rule.expressions:
                    todo += self._expression(table, expression)

    def _expression(self, table: ast.Table, e: ast.Expression) -> Iterator[str]:
        """Record what an expression distinguishes, and yield the chains that it calls."""
        if isinstance(e, (ast.Jump, ast.Goto)):
            yield e.chain
        elif isinstance(e, (ast.Compare, ast.PortRange)):
            self._field(e)
        elif isinstance(e, ast.AddressType):
            self._types = True
        elif isinstance(e, (ast.InSet, ast.VerdictMap, ast.DnatMap)):
            yield from self._set(table, e.name if isinstance(e, ast.InSet) else e.map, e.key)
        elif isinstance(e, ast.MatchSet):
            ipset = self._rules.objects.sets.get(e.name)
            self._atoms(part for entry in (ipset.entries if ipset else ()) for part in entry.split(","))
        elif isinstance(e, ast.RecentCheck):
            self.lists.add(e.name)
        elif isinstance(e, ast.IpvsMatch):
            self.original = True
            self._atoms(each for each in (e.address, e.port) if each is not None)
        elif isinstance(e, ast.AnyOf):
            for each in (each for alternative in e.alternatives for each in alternative):
                yield from self._expression(table, each)
        elif isinstance(e, ast.InlineVerdictMap):
            for matches, verdict in e.arms:
                for each in (*matches, verdict):
                    yield from self._expression(table, each)
        elif isinstance(e, ast.RandomGoto):
            yield from e.chains
        elif isinstance(e, ast.RandomMap):
            for _, _, what in e.arms:
                yield from self._expression(table, what)

    def _field(self, e: ast.Compare | ast.PortRange) -> None:
        self.original = self.original or e.field in (ast.Field.ORIG_DADDR, ast.Field.ORIG_DPORT)
        if isinstance(e, ast.PortRange):
            self.ports.ranges.add((e.first, e.last))
        elif e.field in (ast.Field.DADDR, ast.Field.ORIG_DADDR, ast.Field.DPORT, ast.Field.ORIG_DPORT):
            self._atoms(e.values)

    def _set(self, table: ast.Table, name: str, key: ast.Key) -> Iterator[str]:
        held = table.sets.get(name)
        if held is None:
            return
        if held.dynamic:
            self.lists.add(name)
        self.original = self.original or ast.Field.ORIG_DADDR in key or ast.Field.ORIG_DPORT in key
        self._atoms(part for element in held.elements for part in element)
        for data in held.elements.values():
            if isinstance(data, (ast.Jump, ast.Goto)):
                yield data.chain

    def _atoms(self, values: Iterable[ast.Atom]) -> None:
        """Record addresses, networks, ranges, and ports; other words (protocols, links) are no destinations."""
        for value in values:
            text = str(value).rpartition(":")[2] if isinstance(value, str) and value.count(":") == 1 else str(value)
            first, dash, last = text.partition("-")
            if text.isdigit():
                self.ports.exact.add(int(text))
            elif dash and first.isdigit() and last.isdigit():
                self.ports.ranges.add((int(first), int(last)))
            elif dash and _is_address(first) and _is_address(last):
                self._between.add((address_key(first)[1], address_key(last)[1]))
            elif "/" in text and _is_address(text.partition("/")[0]):
                if family_of(text) is self._family:
                    self._cidrs.add(str(parsed_network(text)))
            elif _is_address(text):
                self._exact.add(text)


def _is_address(text: str) -> bool:
    """Return True for text that can be an address, and for no protocol, link, or port."""
    return ("." in text and text.replace(".", "").isdigit()) or text.count(":") > 1
