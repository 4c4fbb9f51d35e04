"""The nftables backend, the default: rules that stay as they are, and state that lives in maps.

`nftables_frame` has the constant part, `nftables_rows` the chains that Services share, `nftables_sticky` what affinity
needs, `nftables_service` what one Service adds, `nftables_rules` the whole and its next version, `nftables_changes`
the way from one table to another.
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
    """Table `ip narthex` or `ip6 narthex`; nothing outside it is touched."""

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
        """The rules after the changes."""
        return from_table(patched(have.table(), changes))

    def walk(
        self, rules: NftRules, packet: Packet, host: Host, memory: Memory | None = None, now: float = 0.0
    ) -> Trace:
        """A packet's way through the rules."""
        return walk(rules.ruleset(), packet, host, memory, now)

    def text(self, rules: NftRules) -> str:
        """The rules as `nft -f` reads them."""
        return nft.script(rules.table())
