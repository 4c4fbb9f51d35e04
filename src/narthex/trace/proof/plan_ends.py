"""The symbolic evaluation of a plan: what it decides for all packets at once.

`narthex.trace.evaluate` says the same for one packet; a law compares both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from narthex.model import Disposition, NamespacedName, Protocol, join_port
from narthex.netfilter.sets.branch import PacketEnd
from narthex.netfilter.sets.diagram import Choice, WeightedBox
from narthex.netfilter.sets.matches import choice_name
from narthex.netfilter.sets.probabilities import share
from narthex.netfilter.sets.space import DADDR, DPORT, HERE, LINK, PROTOCOL, SADDR, Box, PacketSpace
from narthex.netfilter.sets.values import EMPTY, ValueSet, union, values
from narthex.proxy.plan.ir import (
    Balancing,
    Decision,
    Deviation,
    Endpoint,
    Forward,
    Frontend,
    FrontendKind,
    OwnEndpoint,
    Plan,
    Reject,
    Sender,
    ServicePlan,
)
from narthex.trace.evaluate import affinity_record

INTERPRETED = frozenset(
    (
        Deviation.NO_CLUSTER_IP_GUARD,
        Deviation.REJECT_BEFORE_RANGES,
        Deviation.HAIRPIN_LOCAL_ONLY,
        Deviation.HAIRPIN_PER_PORT,
        Deviation.RELAYED,
        Deviation.NO_SCTP,
        Deviation.ONE_POOL_PER_ADDRESS,
        Deviation.BOUND_ADDRESS_GUARD,
        Deviation.CLUSTER_IP_SOURCE,
        Deviation.AFFINITY_PER_ADDRESS,
        Deviation.HASH_OF_THE_KERNEL,
        Deviation.NO_CONSISTENT_HASHING,
        Deviation.NO_LEAST_CONNECTIONS,
    )
)
"""The deviations that a proof takes into account."""

_REJECTED, _DROPPED = PacketEnd(Disposition.REJECTED), PacketEnd(Disposition.DROPPED)
_NOT_OURS = PacketEnd(Disposition.NOT_OURS)
_SCTP = 132
_TCP = values(6)
_OTHER_HASHING = frozenset({Deviation.NO_CONSISTENT_HASHING, Deviation.HASH_OF_THE_KERNEL})
_ONE = Fraction(1)

Region = tuple[ValueSet, ValueSet]
"""Links of arrival and sources."""


class Claim(NamedTuple):
    """A frontend of the plan, with its Service port."""

    service: ServicePlan
    frontend: Frontend


class PlanEnds:
    """What a plan decides for the packets of a space, given the deviations of a backend.

    `elsewhere` are endpoints of this node by Service ports that a part of a plan does not have.
    """

    def __init__(
        self, plan: Plan, space: PacketSpace, deviations: frozenset[Deviation], elsewhere: Iterable[OwnEndpoint] = ()
    ) -> None:
        self._plan = plan
        self._elsewhere = tuple(elsewhere)
        self._own: frozenset[object] | None = None
        """The endpoints of this node, or their addresses."""
        self._space = space
        self._deviations = deviations
        self._exact: dict[int, dict[tuple[int, int], Claim]] = {}
        """By destination, then by protocol and port."""
        self._by_port: dict[tuple[int, int], Claim] = {}
        for service in plan.services.values():
            for frontend in service.frontends:
                match = frontend.protocol.number, frontend.port
                if frontend.address is None:
                    self._by_port[match] = Claim(service, frontend)
                else:
                    held = self._exact.setdefault(space.address(frontend.address), {})
                    held.setdefault(match, Claim(service, frontend))
        self._taken = union(values(each) for each in self._exact)
        """The destinations that frontends name."""
        self._open_to = self.node_port_addresses()
        self._senders = tuple(self._sender_regions())
        self._guards = self._guarded_addresses()
        self._addresses: dict[str, ValueSet] = {}
        self._by_match: dict[tuple[Protocol, int], ValueSet] | None = None
        self._checks = values(*(check.port for check in plan.health_checks.values()))

    def record(self, service: ServicePlan, endpoint: Endpoint, destination: int, port: int) -> str:
        """Return the name of the affinity list for an endpoint of packets to a destination."""
        per_address = Deviation.AFFINITY_PER_ADDRESS in self._deviations
        via = join_port(self._space.address_text(destination), port) if per_address else ""
        return affinity_record(service, endpoint, via)

    def claim(self, daddr: int, protocol: int, port: int) -> Claim | None:
        """Return the frontend that a packet matches."""
        exact = self._exact.get(daddr, {}).get((protocol, port))
        if exact is None and daddr in self._open_to:
            return self._by_port.get((protocol, port))
        return exact

    @property
    def destinations(self) -> ValueSet:
        """The addresses that frontends name."""
        return self._taken

    def ends(self, to: ValueSet | None = None) -> Iterator[WeightedBox]:
        """Yield the ends of all packets, or of those to some addresses, by boxes whose probabilities add up to 1 for each packet."""
        space = self._space
        to = space.addresses if to is None else to
        open_to, taken = self._open_to, self._taken
        for first, last in (to & taken).spans:
            for address in range(first, last + 1):
                claims = self._exact[address]
                yield from self._at(values(address), claims if address not in open_to else {**self._by_port, **claims})
        left = to - taken
        if rest := left & open_to:
            yield from self._at(rest, self._by_port)
        if others := left - open_to:
            yield from self._guarded((others, *space.possible[1:]))

    def regions(self, name: NamespacedName) -> list[Box]:
        """Return the packets for the frontends of one Service, as disjoint boxes."""
        possible = self._space.possible
        found: list[Box] = []
        for address, claims in self._exact.items():
            for (protocol, port), claim in claims.items():
                if claim.service.name.service == name:
                    found.append((values(address), values(protocol), values(port), *possible[DPORT + 1 :]))
        for (protocol, port), claim in self._by_port.items():
            if claim.service.name.service != name:
                continue
            taken = (each for each, claims in self._exact.items() if (protocol, port) in claims)
            free = self._open_to - values(*taken)
            if free:
                found.append((free, values(protocol), values(port), *possible[DPORT + 1 :]))
        return found

    def node_port_addresses(self) -> ValueSet:
        """Return the addresses of the node on which node ports are open."""
        ports, space = self._plan.node_ports, self._space
        own = space.own - space.loopback
        if ports.localhost:
            own = union((own, space.loopback))
        if ports.cidrs is not None:
            own = own & space.networks(ports.cidrs)
        six = space.network("::1")
        return own - six if six else own

    def _at(self, addresses: ValueSet, claims: Mapping[tuple[int, int], Claim]) -> Iterator[WeightedBox]:
        """Yield the ends of packets for addresses that have these frontends."""
        possible = self._space.possible
        ports: dict[int, list[int]] = {}
        for protocol, port in claims:
            ports.setdefault(protocol, []).append(port)
        for (protocol, port), claim in claims.items():
            box = (addresses, values(protocol), values(port), *possible[DPORT + 1 :])
            yield from self._frontend(claim, box)
        for protocol, taken in ports.items():
            free = possible[DPORT] - values(*taken)
            if free:
                yield from self._guarded((addresses, values(protocol), free, *possible[DPORT + 1 :]))
        yield from self._guarded((addresses, possible[PROTOCOL] - values(*ports), *possible[DPORT:]))

    def _guarded(self, box: Box) -> Iterator[WeightedBox]:
        """Yield the ends of packets without a frontend."""
        cluster, free = self._guards
        if Deviation.BOUND_ADDRESS_GUARD in self._deviations:
            yield from self._guarded_bound(box, free)
            return
        received = box[LINK] - HERE
        for part, end in ((box[DADDR] & cluster, _REJECTED), (box[DADDR] & free, _DROPPED)):
            # What others send to an address of the node stays with the node.
            own = part & self._space.node
            if own:
                yield WeightedBox((own, *box[1:LINK], received, box[SADDR]), _NOT_OURS)
                yield WeightedBox((own, *box[1:LINK], HERE, box[SADDR]), end)
            if part - own:
                yield WeightedBox((part - own, *box[1:]), end)
        rest = box[DADDR] - cluster - free
        if rest:
            yield WeightedBox((rest, *box[1:]), _NOT_OURS)

    def _guarded_bound(self, box: Box, free: ValueSet) -> Iterator[WeightedBox]:
        """Yield the ends of packets without a frontend where the node has all addresses of Services (mode ipvs)."""
        address = box[DADDR]
        bound = (address & self._taken) - self._space.node
        if bound:
            probes, checks = box[PROTOCOL] & _TCP, box[DPORT] & self._checks
            if probes and checks:
                yield WeightedBox((bound, probes, checks, *box[DPORT + 1 :]), _NOT_OURS)
            if others := box[DPORT] - self._checks:
                yield WeightedBox((bound, box[PROTOCOL], others, *box[DPORT + 1 :]), _REJECTED)
            if checks and (rest := box[PROTOCOL] - _TCP):
                yield WeightedBox((bound, rest, checks, *box[DPORT + 1 :]), _REJECTED)
        dropped = (address & free) - self._space.node - bound
        if dropped:
            yield WeightedBox((dropped, *box[1:]), _DROPPED)
        if left := address - bound - dropped:
            yield WeightedBox((left, *box[1:]), _NOT_OURS)

    def _guarded_addresses(self) -> tuple[ValueSet, ValueSet]:
        """Return the cluster IPs, and the other addresses of ServiceCIDRs."""
        if Deviation.NO_CLUSTER_IP_GUARD in self._deviations:
            return EMPTY, EMPTY
        fronts = (front for service in self._plan.services.values() for front in service.frontends)
        cluster_ips = {front.address for front in fronts if front.kind is FrontendKind.CLUSTER_IP and front.address}
        cluster = values(*map(self._space.address, cluster_ips))
        return cluster, self._space.networks(self._plan.service_cidrs) - cluster

    # ---- senders -----------------------------------------------------------------------------------------------------------------

    def _sender_regions(self) -> Iterator[tuple[Sender, Region]]:
        """Yield the disjoint regions of each class of sender."""
        pods, space = self._plan.pods, self._space
        links, sources = space.possible[LINK], space.addresses
        if pods.cidrs:
            inside = space.networks(pods.cidrs)
            yield Sender.POD, (links, inside)
            yield Sender.NODE, (links, space.local - inside)
            yield Sender.OTHER, (links, sources - inside - space.local)
            return
        if pods.enabled:
            at = space.link(pods.interface or f"{pods.interface_prefix}*") & links
            yield Sender.POD, (at, sources)
            links = links - at
        yield Sender.NODE, (links, space.local)
        yield Sender.OTHER, (links, sources - space.local)

    def _frontend(self, claim: Claim, box: Box) -> Iterator[WeightedBox]:
        """Yield the ends of the packets for a frontend."""
        frontend = claim.frontend
        allowed = None if frontend.allow_from is None else self._space.networks(frontend.allow_from)
        for sender, (links, sources) in self._senders:
            decision: Decision = frontend.decision(sender)
            pooled = Deviation.ONE_POOL_PER_ADDRESS in self._deviations and isinstance(frontend.other, Forward)
            if pooled and isinstance(decision, Forward) and isinstance(frontend.other, Forward):
                decision = Forward(frontend.other.scope, decision.masquerade)
            if Deviation.NO_SCTP in self._deviations and box[PROTOCOL].first == _SCTP and isinstance(decision, Forward):
                decision = Reject()
            refused = isinstance(decision, Reject) and Deviation.REJECT_BEFORE_RANGES in self._deviations
            region = (*box[:LINK], links, sources)
            if allowed is not None and not refused:
                if denied := sources - allowed:
                    yield WeightedBox((*box[:LINK], links, denied), _DROPPED)
                region = (*box[:LINK], links, sources & allowed)
            if not region[SADDR] or not links:
                continue
            if isinstance(decision, Forward):
                for part, forward in self._by_source(frontend, decision, region):
                    yield from self._forwarded(claim.service, forward, part)
            else:
                yield WeightedBox(region, _REJECTED if isinstance(decision, Reject) else _DROPPED)

    def _by_source(self, frontend: Frontend, decision: Forward, region: Box) -> Iterator[tuple[Box, Forward]]:
        """Yield parts of a region with what is decided for them: connections from a cluster IP to a cluster IP are masqueraded."""
        apart = EMPTY
        if (
            Deviation.CLUSTER_IP_SOURCE in self._deviations
            and frontend.kind is FrontendKind.CLUSTER_IP
            and not self._plan.pods.enabled
        ):
            apart = region[SADDR] & self._cluster_ips(frontend)
        if apart:
            yield (*region[:SADDR], apart), Forward(decision.scope, masquerade=True)
        if rest := region[SADDR] - apart if apart else region[SADDR]:
            yield (*region[:SADDR], rest), decision

    def _cluster_ips(self, alike: Frontend) -> ValueSet:
        """Return the cluster IPs that have the protocol and the port of a frontend."""
        if self._by_match is None:
            found: dict[tuple[Protocol, int], list[int]] = {}
            for service in self._plan.services.values():
                for front in service.frontends:
                    if front.kind is FrontendKind.CLUSTER_IP and front.address:
                        found.setdefault((front.protocol, front.port), []).append(self._space.address(front.address))
            self._by_match = {match: values(*addresses) for match, addresses in found.items()}
        return self._by_match.get((alike.protocol, alike.port), EMPTY)

    def _forwarded(self, service: ServicePlan, decision: Forward, region: Box) -> Iterator[WeightedBox]:
        if service.balancing is Balancing.MAGLEV and not self._deviations & _OTHER_HASHING:
            note = f"{service.name}: its plan selects endpoints by a hash of the source, which splits no set of packets"
            yield WeightedBox(region, PacketEnd(Disposition.UNSUPPORTED, note=note))
            return
        endpoints = service.pool(decision.scope).endpoints
        probability = share(1, len(endpoints))
        if service.affinity_seconds is None:
            for endpoint in endpoints:
                yield from self._to(endpoint, decision, region, probability, frozenset(), ())
            return
        for part in self._with_own_lists(region):
            missed: frozenset[Choice] = frozenset()
            names = [self.record(service, endpoint, part[DADDR].first, part[DPORT].first) for endpoint in endpoints]
            for endpoint, name in zip(endpoints, names, strict=True):
                choice = choice_name(name, service.affinity_seconds)
                yield from self._to(endpoint, decision, part, _ONE, missed | {(choice, True)}, (name,))
                missed |= {(choice, False)}
            for endpoint, name in zip(endpoints, names, strict=True):
                yield from self._to(endpoint, decision, part, probability, missed, (name,))

    def _with_own_lists(self, region: Box) -> Iterator[Box]:
        """Yield the parts of a region that have affinity lists of their own: each address, or all together."""
        if Deviation.AFFINITY_PER_ADDRESS not in self._deviations:
            yield region
            return
        for first, last in region[DADDR].spans:
            for value in range(first, last + 1):
                yield (values(value), *region[1:])

    def _is_own(self, endpoint: Endpoint, region: Box) -> bool:
        """Return True if another Service port says that an endpoint is on this node, or that its address is."""
        per_port = Deviation.HAIRPIN_PER_PORT in self._deviations
        if self._own is None:
            own = itertools.chain(self._plan.own_endpoints(), self._elsewhere)
            self._own = frozenset(
                (each.address, each.protocol.number, each.port) if per_port else each.address for each in own
            )
        asked = (endpoint.address, region[PROTOCOL].first, endpoint.port) if per_port else endpoint.address
        return asked in self._own

    def _to(
        self,
        endpoint: Endpoint,
        decision: Forward,
        region: Box,
        probability: Fraction,
        choices: frozenset[Choice],
        remembers: tuple[str, ...],
    ) -> Iterator[WeightedBox]:
        """Yield the ends of packets to one endpoint, by whether their source is rewritten."""
        space = self._space
        address = self._addresses.get(endpoint.address)
        if address is None:
            address = self._addresses[endpoint.address] = values(space.address(endpoint.address))
        to = endpoint.address, endpoint.port
        kept = PacketEnd(Disposition.DELIVERED, to, False, remembers)
        rewritten = PacketEnd(Disposition.DELIVERED, to, True, remembers)
        links, sources = region[LINK], region[SADDR]
        if Deviation.RELAYED in self._deviations:
            yield WeightedBox(region, rewritten, probability, choices)
            return
        # A packet from outside to a process on this node ends in input: postrouting never sees it.
        leaving = links & HERE if address.first in space.node else links
        if staying := links - leaving:
            yield WeightedBox((*region[:LINK], staying, sources), kept, probability, choices)
        if not leaving:
            return
        hairpin = (
            endpoint.local or Deviation.HAIRPIN_LOCAL_ONLY not in self._deviations or self._is_own(endpoint, region)
        )
        own = sources if decision.masquerade else sources & address if hairpin else EMPTY
        if own:
            yield WeightedBox((*region[:LINK], leaving, own), rewritten, probability, choices)
        if others := sources - own if own else sources:
            yield WeightedBox((*region[:LINK], leaving, others), kept, probability, choices)
