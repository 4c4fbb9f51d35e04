"""Proofs of the rules that Narthex's modes write, and what a class of packets predicts."""

from __future__ import annotations

import random
from collections.abc import Collection
from fractions import Fraction
from typing import Any

from narthex.model import Disposition, Host
from narthex.netfilter import ast
from narthex.netfilter.sets.branch import PacketEnd
from narthex.netfilter.sets.diagram import Distribution
from narthex.netfilter.sets.values import ValueSet
from narthex.netfilter.walk.state import KernelObjects
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.ir import Plan
from narthex.testing.build import HOST
from narthex.testing.findings import End
from narthex.trace.proof.prove import Partitions, ProofReport, partitions, prove
from narthex.trace.proof.referred import ReferredObjects

MODES = ("nftables", "iptables", "userspace", "ipvs")
MODES_BY_RULES = ("nftables", "iptables")
"""Those that forward packets by rules alone."""


def ruleset_of(mode: str, rules: Any) -> ast.Ruleset:
    """Return the rules of a mode as a ruleset."""
    if mode in ("userspace", "ipvs"):
        rules = rules.tables
    made: ast.Ruleset = rules.ruleset() if mode == "nftables" else rules.ruleset
    return made


def referred_of(mode: str, rules: Any) -> ReferredObjects:
    """Return what the rules of a mode refer to."""
    if mode == "userspace":
        return ReferredObjects(listeners=rules.listeners)
    if mode == "ipvs":
        return ReferredObjects(KernelObjects(sets=rules.sets, servers=rules.servers, bound=rules.bound))
    return ReferredObjects()


def proved(mode: str, plan: Plan, host: Host = HOST) -> ProofReport:
    """Return the proof of a mode's own rules."""
    rules = BACKENDS[mode].render(plan)
    deviations = BACKENDS[mode].deviations
    return prove(plan, ruleset_of(mode, rules), host, deviations, referred=referred_of(mode, rules))


def partitions_of(mode: str, plan: Plan, host: Host = HOST) -> Partitions:
    """Return the partitions by a mode's own rules and by the plan."""
    rules = BACKENDS[mode].render(plan)
    deviations = BACKENDS[mode].deviations
    return partitions(plan, ruleset_of(mode, rules), host, deviations, referred=referred_of(mode, rules))


def draw(rng: random.Random, values: ValueSet) -> int:
    """Return a value of a set, each as likely as the others."""
    at = rng.randrange(values.size)
    for first, last in values.spans:
        if at <= last - first:
            return first + at
        at -= last - first + 1
    raise AssertionError("the size of a set is the number of its values")


def ends_of(distribution: Distribution, choices: Collection[str]) -> dict[End, Fraction]:
    """Return the ends of a class without their records, for a sender that exactly these lists have."""
    found: dict[End, Fraction] = {}
    for asked, end, (above, below) in distribution:
        if any((name in choices) is not taken for name, taken in asked):
            continue
        assert isinstance(end, PacketEnd)
        delivered = end.disposition is Disposition.DELIVERED
        key = end.disposition, end.endpoint if delivered else None, end.masquerade
        found[key] = found.get(key, Fraction(0)) + Fraction(above, below)
    return found
