"""The nftables backend, the default: constant rules, with all state in maps.

`frame` has the constant part, `rows` the chains that Services share, `affinity` the chains and sets of session
affinity, `service` what one Service port adds, `rules` the whole table and its next version, and `changes` the
difference between two tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec
from immutables import Map

from narthex.model import Host, Memory, Packet, ServicePortName, Trace
from narthex.netfilter.ast import Ruleset, Set, Table
from narthex.netfilter.netlink.slot_map import SlotMap
from narthex.netfilter.nft.print import nft_script
from narthex.netfilter.walk.walk import walk
from narthex.proxy.backends.base import Backend
from narthex.proxy.backends.nftables.changes import NftChanges, between, edits_of, patched, replacement, with_elements
from narthex.proxy.backends.nftables.frame import SERVICES, TABLE, NftSettings, frame_chains, shared_sets
from narthex.proxy.backends.nftables.rows import DecisionRow, EndpointCount, count_sets, draw_chains, row_chains
from narthex.proxy.backends.nftables.service import SHARED, NftFragment, TablePart, add, fragment
from narthex.proxy.backends.traits import NFTABLES
from narthex.proxy.plan.ir import Deviation, Plan


class NftRules(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Table `ip narthex` or `ip6 narthex`. Compares by content, without elements of dynamic sets."""

    settings: NftSettings | None = None
    """None: read from a kernel, or patched; then `spelled` holds everything."""
    fragments: Map[ServicePortName, NftFragment] = Map()
    shared: Mapping[str, Map[str, int]] = {}
    """For the sets of `SHARED`: how many Service ports need each address."""
    rows: frozenset[DecisionRow] = frozenset()
    """Rows in use, and those that were used before. A chain stays while rules advance, so that a row that returns finds
    it. Rules rendered from scratch have only the rows in use.
    """
    counts: frozenset[EndpointCount] = frozenset()
    """Numbers of endpoints, kept like rows."""
    lineage: int = 0
    """Lineage number of the plan."""
    spelled: list[Table] = msgspec.field(default_factory=list)
    """The table, once it was computed."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NftRules):
            return NotImplemented
        return self is other or self.table() == other.table()

    def __ne__(self, other: object) -> bool:
        # The base class has one of its own, which asks for identity.
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def table(self) -> Table:
        """Return the complete table. The first call costs as much as there are elements."""
        if not self.spelled:
            self.spelled.append(self.spell_out())
        return self.spelled[0]

    def spell_out(self) -> Table:
        """Return the complete table without keeping it, because rules live for long after they are loaded."""
        if self.settings is None:
            return self.spelled[0]
        if self.spelled:
            return self.spelled.pop()
        part = add(TablePart(self.settings), self.fragments.values())
        return _spelled(self.settings, part, self.rows, self.counts)

    def ruleset(self) -> Ruleset:
        """Return the table as a ruleset, for walks, printing, and comparison."""
        return Ruleset((self.table(),))


def from_table(table: Table) -> NftRules:
    """Return rules that were read from a kernel."""
    return NftRules(spelled=[table])


def _rendered(settings: NftSettings, plan: Plan, before: Map[ServicePortName, NftFragment]) -> tuple[NftRules, Table]:
    """Render all Service ports, with the slots that they had. Returns the table, too, which the rules do not keep."""
    fragments: Map[ServicePortName, NftFragment] = Map(
        {name: fragment(service, before.get(name)) for name, service in plan.services.items()}
    )
    part = add(TablePart(settings), fragments.values())
    rows, counts = frozenset(part.rows), frozenset(part.counts)
    rules = NftRules(
        settings=settings,
        fragments=fragments,
        shared={name: Map(counts) for name, counts in part.shared.items()},
        rows=rows,
        counts=counts,
        lineage=plan.lineage.number,
    )
    return rules, _spelled(settings, part, rows, counts)


def _advanced(previous: NftRules, settings: NftSettings, plan: Plan) -> tuple[NftRules, NftChanges]:
    """Return the next rules and the changes, and process only what changed."""
    leaving: list[NftFragment] = []
    coming: list[NftFragment] = []
    with previous.fragments.mutate() as mutation:
        for name in plan.differing(previous.lineage, previous.fragments):
            before, service = previous.fragments.get(name), plan.services.get(name)
            if before is not None and before.service is service:
                continue
            if before is not None:
                leaving.append(before)
            if service is None:
                mutation.pop(name, None)
            else:
                now = fragment(service, before)
                mutation[name] = now
                coming.append(now)
    fragments = mutation.finish()
    old, new = add(TablePart(settings), leaving), add(TablePart(settings), coming)
    shared = _counted(previous.shared, old, new)
    rows, counts = previous.rows | new.rows, previous.counts | new.counts
    # A shared set that only one side touches is not a set that comes or goes; the set of a new count does come.
    coming_sets = {count.frontends for count in counts - previous.counts}
    for touched in old.elements.keys() | new.elements.keys():
        new.of(touched)
        if touched not in coming_sets:
            old.of(touched)
    for touched in old.endpoints.keys() | new.endpoints.keys():
        new.endpoints.setdefault(touched, SlotMap())
        old.endpoints.setdefault(touched, SlotMap())
    # Rows and counts share chains, so a new one changes the chains of others.
    grown = rows != previous.rows or counts != previous.counts
    have = _partial(settings, old, previous.rows, previous.counts, with_shared=grown)
    want = _partial(settings, new, rows, counts, with_shared=grown)
    rules = NftRules(
        settings=settings, fragments=fragments, shared=shared, rows=rows, counts=counts, lineage=plan.lineage.number
    )
    return rules, between(have, want)


def _counted(before: Mapping[str, Map[str, int]], old: TablePart, new: TablePart) -> Mapping[str, Map[str, int]]:
    """Return the new counts of shared addresses. Addresses that are added or removed become elements of the parts."""
    return {name: _counted_in(name, before.get(name, Map()), old, new) for name in SHARED}


def _counted_in(name: str, counts: Map[str, int], old: TablePart, new: TablePart) -> Map[str, int]:
    leaving, coming, key = old.shared[name], new.shared[name], SHARED[name]
    touched = leaving.keys() | coming.keys()
    if not touched:
        return counts
    mutation = counts.mutate()
    for address in touched:
        before = mutation.get(address, 0)
        after = before - leaving.get(address, 0) + coming.get(address, 0)
        if after:
            mutation[address] = after
        elif before:
            del mutation[address]
        if before:
            old.of(name)[key(address)] = None
        if after:
            new.of(name)[key(address)] = None
    return mutation.finish()


def _partial(
    settings: NftSettings,
    part: TablePart,
    rows: frozenset[DecisionRow],
    counts: frozenset[EndpointCount],
    *,
    with_shared: bool,
) -> Table:
    """Return the part of the table that is touched; `with_shared` adds what rows and counts need, touched or not."""
    chains = dict(part.chains)
    sets = dict(part.sets)
    if with_shared:
        chains.update((chain.name, chain) for row in sorted(rows) for chain in row_chains(row, settings))
        chains.update((chain.name, chain) for chain in draw_chains(counts))
        sets.update(count_sets(counts))
    declared = _declared(settings, counts)
    for name, elements in (*part.elements.items(), *part.endpoints.items()):
        sets[name] = with_elements(declared[name], elements)
    return Table(family=settings.family, name=TABLE, chains=chains, sets=sets)


@lru_cache(maxsize=8)
def _declared(settings: NftSettings, counts: frozenset[EndpointCount]) -> Mapping[str, Set]:
    return {**shared_sets(settings), **count_sets(counts)}


def _spelled(
    settings: NftSettings, part: TablePart, rows: frozenset[DecisionRow], counts: frozenset[EndpointCount]
) -> Table:
    for name, addresses in part.shared.items():
        if addresses:
            part.of(name).update(dict.fromkeys(map(SHARED[name], addresses)))
    partial = _partial(settings, part, rows, counts, with_shared=True)
    return Table(
        family=settings.family,
        name=TABLE,
        chains={**frame_chains(settings), **partial.chains},
        sets={**shared_sets(settings), **partial.sets},
    )


class NftablesBackend(Backend[NftRules, NftChanges]):
    """Renders table `ip narthex` or `ip6 narthex`; nothing outside it is touched."""

    name = "nftables"
    deviations = frozenset({Deviation.HAIRPIN_LOCAL_ONLY, Deviation.NO_LEAST_CONNECTIONS})
    traits = NFTABLES

    def advance(self, previous: NftRules | None, plan: Plan) -> tuple[NftRules, NftChanges]:
        """Return the rules for a plan and the changes. Endpoints keep their slots, unchanged Services cost nothing.

        All Services are rendered without `previous`, when a setting changed, or when `previous` was read from a kernel.
        """
        settings = NftSettings.of(plan)
        if previous is None:
            rules, table = _rendered(settings, plan, Map())
            return rules, replacement(table)
        if previous.settings == settings:
            return _advanced(previous, settings, plan)
        same_family = previous.settings is not None and previous.settings.family is settings.family
        rules, table = _rendered(settings, plan, previous.fragments if same_family else Map())
        return rules, between(previous.spell_out(), table)

    def render(self, plan: Plan) -> NftRules:
        """Return the rules for a plan, from scratch, with the table already spelled out."""
        rules, table = _rendered(NftSettings.of(plan), plan, Map())
        rules.spelled.append(table)
        return rules

    def diff(self, have: NftRules | None, want: NftRules) -> NftChanges:
        """Return the changes between any two rules; compares the whole tables."""
        return replacement(want.spell_out()) if have is None else between(have.spell_out(), want.spell_out())

    def patch(self, have: NftRules, changes: NftChanges) -> NftRules:
        """Return the rules after the changes."""
        return from_table(patched(have.table(), changes))

    edits = staticmethod(edits_of)

    def walk(
        self, rules: NftRules, packet: Packet, host: Host, memory: Memory | None = None, now: float = 0.0
    ) -> Trace:
        """Return the path of a packet through the rules."""
        return walk(rules.ruleset(), packet, host, memory, now)

    def contents(self, rules: NftRules) -> Table:
        """Return the complete table."""
        return rules.spell_out()

    def served(self, rules: NftRules) -> int:
        """Return the number of addresses and ports."""
        services = rules.table().sets.get(SERVICES)
        return len(services.elements) if services is not None else 0

    def text(self, rules: NftRules) -> str:
        """Return the rules in the format that `nft -f` reads."""
        return nft_script(rules.table())
