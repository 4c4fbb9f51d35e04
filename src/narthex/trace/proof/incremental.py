"""Proof of change sets before they are written, for the packets that a change touches.

Rules that were proved equal to a plan are followed change by change. The next rules are the known rules after the changes, as typed
data, so that what is proved is what is written. The packets to look at again are:

* those for the frontends of Service ports whose plan differs, before and after, since the plan may mean something else for them. What a
  plan means for any other packet is the same: it depends on the frontend of the packet and, without one, on whether its destination is a
  cluster IP (`PlanIndex.region`).
* those that the changes of the rules touch (`netfilter.sets.touched`). The walk of a packet through rules reads, at each step, the
  rules and elements that its header at this step meets. Rules and elements that are not new, gone, or in another order are the same in
  both versions, so that a packet that meets no other ones in the new version takes the same way as before: each step leads to the same
  next step.
* A header changes on the way only where the destination is rewritten. A packet that is in none of the other sets until then was sent
  to an endpoint that the plan before names, since the rules before were proved to do so. So if a change touches the address of an
  endpoint, all packets for the Service ports that have this endpoint are looked at.

For all other packets the rules do what they did, and the plan means what it meant. Both were proved equal before. What is left is common
to all Services: settings, base chains, the addresses of the node. If one of these differs, or if the changes touch too much, the
whole is proved anew, as it is at first and whenever the rules were read from the kernel.

The walk of the touched packets needs only the rules that they can meet (`RuleSlice`). Affinity lists are compared by what joins them,
which is a property of all classes together: the pairs of list and endpoint are kept, and the whole is proved if a new pair contradicts
them.

A class that the plan itself leaves to a hash is undecided and does not stop a change. All that the rules leave undecided does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

import msgspec

from narthex.model import Host, ServicePortName
from narthex.netfilter import ast
from narthex.netfilter.edit import TableEdit, UnfitEdit
from narthex.netfilter.sets.diagram import leaves
from narthex.netfilter.sets.space import DADDR, DPORT, PROTOCOL, PacketSpace
from narthex.netfilter.sets.touched import Header, RuleReach, RuleSlice, Unsliceable, meet
from narthex.netfilter.sets.tracked import TouchedRules, TrackedTable
from narthex.netfilter.sets.values import segments, union, values
from narthex.proxy.backends.base import Backend
from narthex.proxy.plan.ir import Balancing, Deviation, OwnEndpoint, Plan, PodDetector, ServicePlan
from narthex.proxy.verification import ChangeVerdict
from narthex.trace.evaluate import affinity_record
from narthex.trace.proof.plan_ends import PlanEnds
from narthex.trace.proof.plan_index import PlanIndex
from narthex.trace.proof.prove import Comparison, Partitions, partitions
from narthex.trace.proof.text import counterexample_words

R = TypeVar("R")
C = TypeVar("C")

_FEW = 256
"""Number of regions that are always looked at one by one."""
_SHARE = 4
"""If the regions are more than one in so many Service ports, all packets are looked at."""
_FRAME = (
    "family",
    "node_name",
    "pods",
    "node_ports",
    "node_addresses",
    "service_cidrs",
    "masquerade_mark",
    "drop_invalid",
)
"""What a plan decides for all Services together."""


class _Proved(NamedTuple):
    """Rules in force that were proved equal to a plan."""

    rules: object
    """The rules as the backend has them, to be recognized."""
    tables: Mapping[str, TrackedTable]
    plan: Plan
    host: Host
    services: PlanIndex
    lists: _Lists
    undecided: frozenset[ServicePortName]


class _Lists:
    """The affinity lists of rules by their names in the plan."""

    def __init__(self) -> None:
        self.by_record: dict[str, str] = {}
        self.by_name: dict[str, str] = {}

    def forget(self, records: Iterable[str]) -> None:
        """Remove the lists with some names in the plan."""
        for record in records:
            if (name := self.by_record.pop(record, None)) is not None and self.by_name.get(name) == record:
                del self.by_name[name]

    def add(self, lists: Mapping[str, str]) -> None:
        """Add lists by their names in the plan."""
        self.by_record.update(lists)
        self.by_name.update((name, record) for record, name in lists.items())

    def agree(self, lists: Mapping[str, str], stale: frozenset[str]) -> bool:
        """Return True if lists are the same as before and none is shared, given the names in the plan that do not count any more."""
        for record, name in lists.items():
            before, owner = self.by_record.get(record, name), self.by_name.get(name, record)
            if (before != name and record not in stale) or (owner != record and owner not in stale):
                return False
        return True


class IncrementalProof(Generic[R, C]):
    """Proves the change sets of one IP family, one after the other. A `ChangeVerifier`."""

    def __init__(self, backend: Backend[R, C], host: Callable[[], Host]) -> None:
        """Prepare the proof of the first rules of a mode. `host` returns the node's addresses as they are now."""
        self._backend = backend
        self._host = host
        self._proved: _Proved | None = None
        self._candidate: tuple[R, _Step] | None = None

    def verify(self, have: R | None, changes: C, want: R, plan: Plan) -> ChangeVerdict:
        """Return whether the rules after the changes do for all packets what the plan means."""
        self._candidate = None
        known = self._proved
        try:
            if known is not None and have is not None and known.rules is have:
                tables, touched = _after(known.tables, self._edits(changes))
            else:
                tables, touched = _after(self._tables(have), self._edits(changes))
                if known is not None:
                    # What was read from the kernel, and changed, differs little from what was proved, or not at all.
                    touched = _between(known.tables, tables)
        except UnfitEdit as error:
            return ChangeVerdict(refusal=f"the changes do not fit the rules in force: {error}")
        step = _Step(self._backend.deviations, known, tables, touched, plan, self._host())
        verdict = step.verdict()
        if not verdict.refusal:
            self._candidate = want, step
        return verdict

    def written(self) -> None:
        """Note that the changes that were verified last are in force."""
        if self._candidate is not None:
            rules, step = self._candidate
            self._proved = step.proved(rules)
            self._candidate = None

    def restores(self, rules: R, changes: C) -> bool:
        """Return True if changes only write parts of rules in force, which were proved."""
        known = self._proved
        if known is None or known.rules is not rules:
            return False
        return all(edit.table in known.tables and known.tables[edit.table].holds(edit) for edit in self._edits(changes))

    def _edits(self, changes: C) -> tuple[TableEdit, ...]:
        """Return changes as those of tables. Raises TypeError for a mode that works by more than rules."""
        edits = self._backend.edits(changes)
        if edits is None:
            raise TypeError(f"mode {self._backend.name} works by more than rules")
        return edits

    def _tables(self, have: R | None) -> Mapping[str, TrackedTable]:
        """Return the tables of rules that were not followed, such as those read from the kernel."""
        if have is None:
            return {}
        return _after({}, self._edits(self._backend.diff(None, have)))[0]


def _after(
    tables: Mapping[str, TrackedTable], edits: Iterable[TableEdit]
) -> tuple[Mapping[str, TrackedTable], Mapping[str, TouchedRules]]:
    """Return tables after edits, and what these touch. Raises UnfitEdit."""
    made, touched = dict(tables), {}
    for edit in edits:
        before = made.get(edit.table) or TrackedTable(edit.family, edit.table)
        made[edit.table], touched[edit.table] = before.after(edit)
        touched[edit.table].everything |= edit.table not in tables
    return made, touched


def _between(have: Mapping[str, TrackedTable], want: Mapping[str, TrackedTable]) -> Mapping[str, TouchedRules]:
    """Return what the changes from some tables to others touch."""
    try:
        edits = [have[name].edit_to(table) for name, table in want.items() if name in have]
        touched = _after(have, edits)[1]
    except UnfitEdit:
        touched = {}
    everything = TouchedRules()
    everything.everything = True
    return {name: touched.get(name, everything) for name in {**have, **want}}


def _index(plan: Plan, host: Host, deviations: frozenset[Deviation]) -> PlanIndex:
    space = PacketSpace(plan.family, host)
    ends = PlanEnds(msgspec.structs.replace(plan, services={}, pods=PodDetector()), space, deviations)
    made = PlanIndex(space, ends.node_port_addresses(), guarded=Deviation.NO_CLUSTER_IP_GUARD not in deviations)
    made.fill(plan.services.values())
    return made


def _changed(before: Plan, after: Plan) -> frozenset[ServicePortName]:
    """Return the Service ports that differ between two plans."""
    if after.lineage.number == before.lineage.number:
        return frozenset()
    if after.lineage.parent == before.lineage.number:
        return after.lineage.changed
    old, new = before.services, after.services
    gone = {name for name in old if name not in new}
    return frozenset(gone | {name for name, service in new.items() if old.get(name) is not service})


class _Step:
    """The proof of one change set."""

    def __init__(
        self,
        deviations: frozenset[Deviation],
        known: _Proved | None,
        tables: Mapping[str, TrackedTable],
        touched: Mapping[str, TouchedRules],
        plan: Plan,
        host: Host,
    ) -> None:
        self._deviations = deviations
        self._known = known
        self._tables = tables
        self._touched = touched
        self._plan = plan
        self._host = host
        self._services = known.services if known is not None else _index(plan, host, deviations)
        self._reach = RuleReach(tables, PacketSpace(plan.family, host))
        self._differing = _changed(known.plan, plan) if known is not None else frozenset(plan.services)
        self._undecided = self._all_undecided()
        self._stale: frozenset[str] = frozenset()
        self._found: Mapping[str, str] = {}
        """Affinity lists."""
        self._whole = False

    def proved(self, rules: object) -> _Proved:
        """Return what is proved once these rules are in force. To be called once, after a verdict without refusal."""
        known, plan = self._known, self._plan
        if known is None or self._whole:
            services, lists = _index(plan, self._host, self._deviations), _Lists()
        else:
            services, lists = known.services, known.lists
            for name in self._differing:
                services.replace(known.plan.services.get(name), plan.services.get(name))
            lists.forget(self._stale)
        lists.add(self._found)
        return _Proved(rules, self._tables, plan, self._host, services, lists, self._undecided)

    def verdict(self) -> ChangeVerdict:
        """Prove the touched packets, or all."""
        regions = self._regions()
        if regions is not None:
            try:
                verdict = self._of_regions(regions)
            except Unsliceable:
                verdict = None
            if verdict is not None:
                return verdict
        self._whole = True
        ruleset = ast.Ruleset(tuple(table.table() for table in self._tables.values()))
        found = partitions(self._plan, ruleset, self._host, self._deviations)
        self._found = found.lists
        return self._compared(found, self._plan, ruleset)

    # ---- which packets -----------------------------------------------------------------------------------------------------------

    def _regions(self) -> list[Header] | None:
        """Return the packets to look at as disjoint headers of packets as they are sent; None: all."""
        known, plan = self._known, self._plan
        if known is None or known.host != self._host:
            return None
        if any(getattr(known.plan, name) != getattr(plan, name) for name in _FRAME):
            return None
        most = max(_FEW, len(plan.services) // _SHARE)
        if len(self._differing) > most:
            return None
        headers = self._reach.touched(self._touched)
        if headers is None or len(headers) > most:
            return None
        behind = {service.name: service for each in headers for service in self._services.behind(each, known.plan)}
        services = [*self._both(self._differing), *behind.values()]
        found = dict.fromkeys((*headers, *(part for each in services for part in self._services.region(each))))
        return list(_disjoint(found)) if len(found) <= most else None

    def _both(self, names: Iterable[ServicePortName]) -> Iterator[ServicePlan]:
        """Yield some Service ports as they were and as they are to be."""
        assert self._known is not None
        for services in (self._known.plan.services, self._plan.services):
            yield from (service for name in names if (service := services.get(name)) is not None)

    # ---- the proof ---------------------------------------------------------------------------------------------------------------

    def _of_regions(self, regions: list[Header]) -> ChangeVerdict | None:
        """Prove the packets of some regions; None if only a proof of the whole can tell. Raises Unsliceable."""
        plan = self._plan
        if not regions:
            return ChangeVerdict(undecided=self._undecided)
        names = self._services.at(regions) | self._differing
        services = {name: service for name in names if (service := plan.services.get(name)) is not None}
        part = msgspec.structs.replace(plan, services=services)
        ruleset = RuleSlice(self._reach, (*regions, *self._aims(services.values()))).ruleset()
        elsewhere = tuple(self._own_elsewhere(services))
        found = partitions(part, ruleset, self._host, self._deviations, regions=regions, elsewhere=elsewhere)
        if not self._lists_agree(found):
            return None
        return self._compared(found, part, ruleset)

    def _own_elsewhere(self, services: Mapping[ServicePortName, ServicePlan]) -> Iterator[OwnEndpoint]:
        """Yield this node's endpoints by other Service ports whose addresses some of these ones place on other nodes."""
        address = self._reach.space.address
        pools = (pool for each in services.values() for pool in each.pools.values())
        remote = {end.address for pool in pools for end in pool.endpoints if not end.local}
        names = {name for each in remote for name in self._services.with_endpoint(address(each))}
        for name in names - services.keys():
            if (other := self._plan.services.get(name)) is not None:
                yield from (own for own in other.own_endpoints() if own.address in remote)

    def _aims(self, services: Iterable[ServicePlan]) -> Iterator[Header]:
        """Yield the headers that packets are expected to get."""
        space = self._reach.space
        ends = {(end.address, end.port) for each in services for pool in each.pools.values() for end in pool.endpoints}
        for address, port in ends:
            yield values(space.address(address)), space.whole[PROTOCOL], values(port)

    def _lists_agree(self, found: Partitions) -> bool:
        """Return True if affinity lists belong to the same endpoints as before, apart from those of Service ports that differ."""
        assert self._known is not None
        affected = (each for each in self._both(self._differing) if each.affinity_seconds is not None)
        self._stale = frozenset(record for each in affected for record in _records(each))
        self._found = found.lists
        return self._known.lists.agree(found.lists, self._stale)

    def _compared(self, found: Partitions, plan: Plan, ruleset: ast.Ruleset) -> ChangeVerdict:
        comparison = Comparison(found, plan, ruleset, self._deviations)
        comparison.compare(found)
        wrong = (*comparison.classes, *comparison.not_interpreted)
        if not wrong:
            classes = sum(len(leaf.regions) for _, leaf in leaves(found.rules, found.space))
            return ChangeVerdict(undecided=self._undecided, whole=self._whole, classes=classes)
        counterexample = comparison.counterexample()
        if counterexample is not None:
            reason = counterexample_words(counterexample)
        else:
            reason = "; ".join(f"{each.described}: {each.rule}" for each in comparison.undecided_rules()[:1])
        headers = [(box[DADDR], box[PROTOCOL], box[DPORT]) for box in (each.box for each in wrong)]
        culprits = self._culprits(headers)
        return ChangeVerdict(refusal=reason, culprits=culprits, undecided=self._undecided, whole=self._whole)

    def _culprits(self, headers: list[Header]) -> frozenset[ServicePortName]:
        """Return the Service ports that differ and that some packets may be for; none if some packets are for none of these."""
        found: set[ServicePortName] = set()
        left = set(range(len(headers)))
        for each in self._both(self._differing) if self._known is not None else self._plan.services.values():
            for part in self._services.region(each):
                hit = {number for number, header in enumerate(headers) if meet(header, part)}
                if hit:
                    found.add(each.name)
                    left -= hit
        return frozenset() if left else frozenset(found)

    def _all_undecided(self) -> frozenset[ServicePortName]:
        if Deviation.NO_CONSISTENT_HASHING in self._deviations:
            return frozenset()
        services = self._plan.services
        differing = (service for name in self._differing if (service := services.get(name)) is not None)
        hashing = frozenset(each.name for each in differing if each.balancing is Balancing.MAGLEV)
        return hashing if self._known is None else (self._known.undecided - self._differing) | hashing


def _disjoint(headers: Iterable[Header]) -> Iterator[Header]:
    """Yield the same packets as headers of which no two have a packet in common."""
    held = list(headers)
    for addresses, here in segments([each[DADDR] for each in held]):
        for protocols, there in segments([held[number][PROTOCOL] for number in here]):
            yield addresses, protocols, union(held[here[number]][DPORT] for number in there)


def _records(service: ServicePlan) -> Iterator[str]:
    return (affinity_record(service, end) for pool in service.pools.values() for end in pool.endpoints)
