"""The nftables backend, the default: constant rules, with all state in maps.

`frame` has the constant part, `rows` the chains that Services share, `affinity` the chains and sets of session
affinity, `service` what one Service port adds, `rules` the whole table and its next version, and `changes` the
difference between two tables.
"""

from __future__ import annotations

from narthex.model.packet import Host, Memory, Packet, Trace
from narthex.netfilter import nft
from narthex.netfilter.walk.walk import walk
from narthex.proxy.backends.base import Backend
from narthex.proxy.backends.nftables.changes import NftChanges, between, patched, replacement
from narthex.proxy.backends.nftables.rules import NftRules, advance, from_table, render
from narthex.proxy.backends.traits import NFTABLES
from narthex.proxy.plan.ir import Deviation, Plan


class NftablesBackend(Backend[NftRules, NftChanges]):
    """Renders table `ip narthex` or `ip6 narthex`; nothing outside it is touched."""

    name = "nftables"
    deviations = frozenset({Deviation.HAIRPIN_LOCAL_ONLY})
    traits = NFTABLES

    def advance(self, previous: NftRules | None, plan: Plan) -> tuple[NftRules, NftChanges]:
        """Return the rules for a plan and the changes. Endpoints keep their slots, unchanged Services cost nothing."""
        return advance(previous, plan)

    def render(self, plan: Plan) -> NftRules:
        """Return the rules for a plan, from scratch."""
        return render(plan)

    def diff(self, have: NftRules | None, want: NftRules) -> NftChanges:
        """Return the changes between any two rules; compares the whole tables."""
        return replacement(want.spell_out()) if have is None else between(have.spell_out(), want.spell_out())

    def patch(self, have: NftRules, changes: NftChanges) -> NftRules:
        """Return the rules after the changes."""
        return from_table(patched(have.table(), changes))

    def walk(
        self, rules: NftRules, packet: Packet, host: Host, memory: Memory | None = None, now: float = 0.0
    ) -> Trace:
        """Return the path of a packet through the rules."""
        return walk(rules.ruleset(), packet, host, memory, now)

    def text(self, rules: NftRules) -> str:
        """Return the rules in the format that `nft -f` reads."""
        return nft.script(rules.table())
