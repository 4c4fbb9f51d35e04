"""What one Service port adds to the rules: elements, rows, and, with session affinity, its own chains and sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from narthex.model import Protocol
from narthex.netfilter.ast import Chain, ElementData, ElementKey, Goto, Return, Set
from narthex.netfilter.netlink.slot_map import SlotMap, Slots
from narthex.proxy.backends.nftables.affinity import affinity_chain, affinity_chains, affinity_sets
from narthex.proxy.backends.nftables.frame import (
    ALLOWED_SOURCES,
    CLUSTER_IPS,
    HAIRPIN,
    NO_ENDPOINT_NODEPORTS,
    NO_ENDPOINT_SERVICES,
    NODEPORT_ALLOWED_SOURCES,
    NODEPORT_RESTRICTED,
    NODEPORT_SERVICES,
    RESTRICTED,
    SERVICES,
    NftSettings,
    element_network,
)
from narthex.proxy.backends.nftables.hashing import hashed_slots, hashing_chain, hashing_chains, hashing_maps
from narthex.proxy.backends.nftables.rows import (
    ENDPOINT_MAPS,
    NODEPORT,
    REFUSE,
    SEND,
    Cells,
    DecisionRow,
    EndpointCount,
    decisions,
    refuse_cell,
    refuse_verdict,
    send_cell,
)
from narthex.proxy.plan.ir import Balancing, Forward, Frontend, FrontendKind, Pool, Scope, ServicePlan

SHARED: Mapping[str, Callable[[str], ElementKey]] = {CLUSTER_IPS: lambda ip: (ip,), HAIRPIN: lambda ip: (ip, ip)}
"""Sets in which several Service ports may need the same element, and the element of an address."""


class NftFragment(msgspec.Struct, frozen=True):
    """A Service port with the slots of its endpoints."""

    service: ServicePlan
    cluster: Slots
    local: Slots

    def slots(self, scope: Scope) -> Slots:
        """Return the slots of one pool."""
        return self.cluster if scope is Scope.CLUSTER else self.local

    def hashed(self) -> dict[Scope, Slots]:
        """Return the slots of the pools that there are."""
        return {scope: self.slots(scope) for scope in self.service.pools}


class _RowElements(msgspec.Struct, frozen=True):
    """What frontends with the same decisions add: the target sets and the data of their elements."""

    refusals: dict[ElementKey, ElementData] | None
    """Elements of the map of refused frontends; None if no sender is refused."""
    refused: ElementData
    services: dict[ElementKey, ElementData] | None
    """Elements of the map that ends the lookup in nat."""
    verdict: ElementData
    cells: Cells | None
    """Set if the Service port has chains of its own, for session affinity or consistent hashing."""
    sends: tuple[tuple[EndpointCount, SlotMap], ...] = ()
    """The endpoint maps in use, each with a count of zero."""


class TablePart:
    """What several Service ports add together. Filled by `add`, then read-only."""

    def __init__(self, settings: NftSettings) -> None:
        self.settings = settings
        self.elements: dict[str, dict[ElementKey, ElementData]] = {}
        self.endpoints: dict[str, SlotMap] = {}
        """Elements of the endpoint maps."""
        self.shared: dict[str, dict[str, int]] = {name: {} for name in SHARED}
        """How often each address is needed in these sets."""
        self.rows: set[DecisionRow] = set()
        self.counts: set[EndpointCount] = set()
        self.chains: dict[str, Chain] = {}
        self.sets: dict[str, Set] = {}
        self._row_elements: dict[tuple[object, ...], _RowElements] = {}
        self._counted: dict[tuple[EndpointCount, int], dict[ElementKey, ElementData]] = {}

    def of(self, name: str) -> dict[ElementKey, ElementData]:
        """Return the elements of one set, to be filled."""
        return self.elements.setdefault(name, {})

    def elements_for(self, frontend: Frontend, own_chains: bool) -> _RowElements:
        """Return what the decisions of a frontend add; nearly all frontends have the same few decisions."""
        key = frontend.address is None, own_chains, frontend.pod, frontend.node, frontend.other
        elements = self._row_elements.get(key)
        if elements is None:
            elements = self._row_elements[key] = self._made(frontend, own_chains)
        return elements

    def counted(self, kind: EndpointCount, number: int) -> dict[ElementKey, ElementData]:
        """Return the elements of the set of frontends with this number of endpoints."""
        found = self._counted.get((kind, number))
        if found is None:
            count = kind._replace(number=number)
            self.counts.add(count)
            found = self._counted[kind, number] = self.of(count.frontends)
        return found

    def _made(self, frontend: Frontend, own_chains: bool) -> _RowElements:
        node_port = frontend.address is None
        row = decisions(frontend, self.settings)
        sends = [decision for decision in row if isinstance(decision, Forward)]
        refusals, refused = None, None
        if len(sends) < 3:
            refusing = DecisionRow(REFUSE, (refuse_cell(row[0]), refuse_cell(row[1]), refuse_cell(row[2])))
            self.rows.add(refusing)
            refusals = self.of(NO_ENDPOINT_NODEPORTS if node_port else NO_ENDPOINT_SERVICES)
            refused = refuse_verdict(refusing)
        if not sends and node_port:
            return _RowElements(refusals, refused, None, None, None)
        services = self.of(NODEPORT_SERVICES if node_port else SERVICES)
        if not sends:
            # An exact address wins over node ports, also when it refuses: the walk in nat must end here.
            return _RowElements(refusals, refused, services, Return(), None)
        cells = (send_cell(row[0]), send_cell(row[1]), send_cell(row[2]))
        if own_chains:
            return _RowElements(refusals, refused, services, None, cells)
        kind = NODEPORT if node_port else SEND
        sending = DecisionRow(kind, cells)
        self.rows.add(sending)
        scopes = sorted({decision.scope for decision in sends}, key=lambda scope: scope.value)
        drawn = [(EndpointCount(kind, scope, 0), self._slotted(ENDPOINT_MAPS[kind, scope])) for scope in scopes]
        return _RowElements(refusals, refused, services, Goto(sending.chain), None, tuple(drawn))

    def _slotted(self, name: str) -> SlotMap:
        return self.endpoints.setdefault(name, SlotMap())


def fragment(service: ServicePlan, before: NftFragment | None) -> NftFragment:
    """Return the Service port with slots; known endpoints keep theirs."""
    if _is_hashed(service):
        return NftFragment(service, hashed_slots(service.cluster), hashed_slots(service.local))
    if before is not None and _is_hashed(before.service):
        before = None
    return NftFragment(
        service,
        arrange(before.cluster if before else (), service.cluster),
        arrange(before.local if before else (), service.local),
    )


def _is_hashed(service: ServicePlan) -> bool:
    return service.balancing is Balancing.MAGLEV


def arrange(before: Slots, pool: Pool | None) -> Slots:
    """Return dense slots for a pool.

    New endpoints take the slots of removed ones; remaining gaps are filled from the end, so that a removal costs one
    move and a change of the count.
    """
    if pool is None:
        return ()
    desired = dict.fromkeys([(one.address, one.port) for one in pool.endpoints])
    if not before:
        return tuple(desired)
    kept = set(before)
    fresh = [endpoint for endpoint in desired if endpoint not in kept]
    slots: list[tuple[str, int] | None] = [one if one in desired else None for one in before]
    arriving = iter(fresh)
    slots = [one if one is not None else next(arriving, None) for one in slots]
    slots.extend(arriving)
    dense: list[tuple[str, int]] = []
    for index in range(len(desired)):
        while slots[-1] is None:
            slots.pop()
        one = slots[index]
        if one is None:
            one = slots.pop()
        assert one is not None
        dense.append(one)
    return tuple(dense)


def add(part: TablePart, fragments: Iterable[NftFragment]) -> TablePart:
    """Add what the Service ports need to `part`, and return it."""
    for one in fragments:
        _add_service(part, one)
    return part


def _add_service(part: TablePart, one: NftFragment) -> None:
    service = one.service
    rows: set[Cells] = set()
    for frontend in service.frontends:
        if frontend.kind is FrontendKind.CLUSTER_IP and frontend.address is not None:
            _count(part, CLUSTER_IPS, frontend.address)
        if frontend.allow_from is not None:
            _add_ranges(part, frontend, frontend.allow_from)
        cells = _add_frontend(part, one, frontend)
        if cells is not None:
            rows.add(cells)
    for pool in service.pools.values():
        for end in pool.endpoints:
            if end.local:
                _count(part, HAIRPIN, end.address)
    if not rows:
        return
    if _is_hashed(service):
        chains, sets = hashing_chains(service, frozenset(rows), part.settings), hashing_maps(service, one.hashed())
    else:
        chains, sets = affinity_chains(service, frozenset(rows), part.settings), affinity_sets(service)
    part.chains.update((chain.name, chain) for chain in chains)
    part.sets.update((each.name, each) for each in sets)


def _count(part: TablePart, name: str, address: str) -> None:
    counts = part.shared[name]
    counts[address] = counts.get(address, 0) + 1


_WORDS = {protocol: protocol.lower for protocol in Protocol}


def _key(frontend: Frontend) -> ElementKey:
    protocol = _WORDS[frontend.protocol]
    return (protocol, frontend.port) if frontend.address is None else (frontend.address, protocol, frontend.port)


def _add_ranges(part: TablePart, frontend: Frontend, ranges: tuple[str, ...]) -> None:
    node_port = frontend.address is None
    key = _key(frontend)
    part.of(NODEPORT_RESTRICTED if node_port else RESTRICTED)[key] = None
    allowed = part.of(NODEPORT_ALLOWED_SOURCES if node_port else ALLOWED_SOURCES)
    for cidr in ranges:
        allowed[(*key, element_network(cidr))] = None


def _add_frontend(part: TablePart, one: NftFragment, frontend: Frontend) -> Cells | None:
    """Add the elements of one frontend. Returns its cells if it needs chains of the Service port's own."""
    hashed = _is_hashed(one.service)
    elements = part.elements_for(frontend, hashed or one.service.affinity_seconds is not None)
    key = _key(frontend)
    if elements.refusals is not None:
        elements.refusals[key] = elements.refused
    if elements.services is not None:
        name_of = hashing_chain if hashed else affinity_chain
        elements.services[key] = (
            Goto(name_of(one.service, elements.cells)) if elements.cells is not None else elements.verdict
        )
    for kind, endpoints in elements.sends:
        slots = one.slots(kind.scope)
        part.counted(kind, len(slots))[key] = None
        endpoints.runs[key] = slots
    return elements.cells
