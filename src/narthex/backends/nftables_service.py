"""What one Service port adds to the rules: elements, rows, and with affinity chains and sets of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from narthex.backends.nftables_frame import (
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
    Settings,
    element_network,
)
from narthex.backends.nftables_rows import (
    ENDPOINT_MAPS,
    NODEPORT,
    REFUSE,
    SEND,
    Cells,
    Count,
    Row,
    decisions,
    refuse_cell,
    refuse_verdict,
    send_cell,
)
from narthex.backends.nftables_sticky import sticky_chains, sticky_row, sticky_sets
from narthex.netfilter.ast import Chain, ElementData, ElementKey, Goto, Return, Set
from narthex.plan.ir import Forward, Frontend, FrontendKind, Pool, Scope, ServicePlan

Slots = tuple[tuple[str, int], ...]
"""Addresses and ports by slot number; no number is free."""

Shared = tuple[str, ElementKey]
"""An element that several Service ports may need: set and key."""


class Fragment(msgspec.Struct, frozen=True):
    """A Service port with the slots that its endpoints have."""

    service: ServicePlan
    cluster: Slots
    local: Slots

    def slots(self, scope: Scope) -> Slots:
        """Those of one pool."""
        return self.cluster if scope is Scope.CLUSTER else self.local


class Part:
    """What several Service ports add together. Filled by `add`, then only read."""

    def __init__(self) -> None:
        self.elements: dict[str, dict[ElementKey, ElementData]] = {}
        self.shared: Counter[Shared] = Counter()
        """How many Service ports need the element."""
        self.rows: set[Row] = set()
        self.counts: set[Count] = set()
        self.chains: dict[str, Chain] = {}
        self.sets: dict[str, Set] = {}

    def of(self, name: str) -> dict[ElementKey, ElementData]:
        """The elements of one set, to be filled."""
        return self.elements.setdefault(name, {})


def fragment(service: ServicePlan, before: Fragment | None) -> Fragment:
    """The Service port with slots; endpoints that were there before keep theirs."""
    return Fragment(
        service,
        arrange(before.cluster if before else (), service.cluster),
        arrange(before.local if before else (), service.local),
    )


def arrange(before: Slots, pool: Pool | None) -> Slots:
    """Dense slots for a pool. New endpoints take the places of those that left; places left over are filled from the
    end, so that one that leaves costs one move and a change of the count."""
    if pool is None:
        return ()
    wanted = dict.fromkeys([(one.address, one.port) for one in pool.endpoints])
    if not before:
        return tuple(wanted)
    kept = set(before)
    fresh = [endpoint for endpoint in wanted if endpoint not in kept]
    slots: list[tuple[str, int] | None] = [one if one in wanted else None for one in before]
    arriving = iter(fresh)
    slots = [one if one is not None else next(arriving, None) for one in slots]
    slots.extend(arriving)
    dense: list[tuple[str, int]] = []
    for index in range(len(wanted)):
        while slots[-1] is None:
            slots.pop()
        one = slots[index]
        if one is None:
            one = slots.pop()
        assert one is not None
        dense.append(one)
    return tuple(dense)


def add(part: Part, fragments: Iterable[Fragment], settings: Settings) -> Part:
    """Put what the Service ports need into `part`, and return it."""
    for one in fragments:
        _add_service(part, one, settings)
    return part


def _add_service(part: Part, one: Fragment, settings: Settings) -> None:
    service = one.service
    shared: set[Shared] = set()
    sticky: set[Cells] = set()
    for frontend in service.frontends:
        if frontend.kind is FrontendKind.CLUSTER_IP and frontend.address is not None:
            shared.add((CLUSTER_IPS, (frontend.address,)))
        if frontend.allow_from is not None:
            _add_ranges(part, frontend, frontend.allow_from)
        cells = _add_frontend(part, one, frontend, settings)
        if cells is not None:
            sticky.add(cells)
    for pool in (service.cluster, service.local):
        if pool is not None:
            shared.update((HAIRPIN, (end.address, end.address)) for end in pool.endpoints if end.local)
    part.shared.update(shared)
    if sticky:
        part.chains.update((chain.name, chain) for chain in sticky_chains(service, frozenset(sticky), settings))
        part.sets.update((clients.name, clients) for clients in sticky_sets(service))


def _key(frontend: Frontend) -> ElementKey:
    if frontend.address is None:
        return frontend.protocol.lower, frontend.port
    return frontend.address, frontend.protocol.lower, frontend.port


def _add_ranges(part: Part, frontend: Frontend, ranges: tuple[str, ...]) -> None:
    node_port = frontend.address is None
    key = _key(frontend)
    part.of(NODEPORT_RESTRICTED if node_port else RESTRICTED)[key] = None
    allowed = part.of(NODEPORT_ALLOWED_SOURCES if node_port else ALLOWED_SOURCES)
    for cidr in ranges:
        allowed[(*key, element_network(cidr))] = None


def _add_frontend(part: Part, one: Fragment, frontend: Frontend, settings: Settings) -> Cells | None:
    """Elements of one frontend. Returns its cells when it needs chains for affinity."""
    row = decisions(frontend, settings)
    sends = [decision for decision in row if isinstance(decision, Forward)]
    key = _key(frontend)
    node_port = frontend.address is None
    if len(sends) < 3:
        refused = Row(REFUSE, (refuse_cell(row[0]), refuse_cell(row[1]), refuse_cell(row[2])))
        part.rows.add(refused)
        part.of(NO_ENDPOINT_NODEPORTS if node_port else NO_ENDPOINT_SERVICES)[key] = refuse_verdict(refused)
    if not sends:
        if not node_port:
            # An exact address wins over node ports, also when it refuses: the walk in nat must end here.
            part.of(SERVICES)[key] = Return()
        return None
    services = part.of(NODEPORT_SERVICES if node_port else SERVICES)
    cells = (send_cell(row[0]), send_cell(row[1]), send_cell(row[2]))
    if one.service.affinity_seconds is not None:
        services[key] = Goto(sticky_row(one.service, cells))
        return cells
    kind = NODEPORT if node_port else SEND
    way = Row(kind, cells)
    part.rows.add(way)
    services[key] = Goto(way.chain)
    for scope in {decision.scope for decision in sends}:
        slots = one.slots(scope)
        count = Count(kind, scope, len(slots))
        part.counts.add(count)
        part.of(count.frontends)[key] = None
        endpoints = part.of(ENDPOINT_MAPS[kind, scope])
        endpoints.update(zip([(*key, slot) for slot in range(len(slots))], slots, strict=True))
    return None
