"""The ipvs backend: virtual servers, sets that say what to masquerade, and a few iptables rules.

Names and structure are kube-proxy's (rows of group 24). Three things are improved. Packets for which a Local policy
leaves no endpoint are dropped by a set for each class of sender, where kube-proxy sends them to other nodes (rows 7.10,
8.5, 29.6). Source ranges apply to packets from this node, too, without a rule for each address. Packets to free
addresses of a ServiceCIDR are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar, cast

import msgspec
from immutables import Map, MapMutation

from narthex.model import Host, Memory, NamespacedName, Packet, ServicePortName, Trace
from narthex.netfilter.ipset import IpSet, ipset_save_text
from narthex.netfilter.ipvs import ServerKey, VirtualServer, ipvsadm_save_text
from narthex.netfilter.walk.state import KernelObjects
from narthex.netfilter.walk.walk import walk
from narthex.netfilter.xtables.print import save_text
from narthex.proxy.backends.base import Backend
from narthex.proxy.backends.iptables.frame import Frame
from narthex.proxy.backends.ipvs import names
from narthex.proxy.backends.ipvs.frame import MASK_NONE, IpvsFrame, Mask
from narthex.proxy.backends.ipvs.rules import IpvsChanges, IpvsRules, diff, patch
from narthex.proxy.backends.ipvs.service import (
    SCHEDULERS,
    IpvsFragment,
    IpvsServerSettings,
    PlacedServer,
    SetEntry,
    fragment,
    settings_of,
)
from narthex.proxy.backends.traits import IPVS
from narthex.proxy.plan.ir import Balancing, Deviation, Plan, ServiceHealthCheck

_WITHOUT = {
    SCHEDULERS[Balancing.MAGLEV]: Deviation.NO_CONSISTENT_HASHING,
    SCHEDULERS[Balancing.LEAST_CONNECTIONS]: Deviation.NO_LEAST_CONNECTIONS,
}
_NO_PLAN = -1
"""A lineage number that no plan has, nor the missing parent of a plan."""

K = TypeVar("K")
Ways = MapMutation[ServerKey, PlacedServer]


class _Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """What a rendering keeps for the next one."""

    plan_number: int
    frame: IpvsFrame
    settings: IpvsServerSettings
    fragments: Map[ServicePortName, IpvsFragment] = Map()
    exact: Map[ServerKey, PlacedServer] = Map()
    node: Map[ServerKey, PlacedServer] = Map()
    counts: Map[SetEntry, int] = Map()
    """How many need an entry: several ports of a Service have its address, several Services an endpoint."""
    masks: Map[Mask, int] = Map()
    health_checks: Mapping[NamespacedName, ServiceHealthCheck] = {}


class IpvsBackend(Backend[IpvsRules, IpvsChanges]):
    """Renders plans as virtual servers, sets, and rules."""

    name = "ipvs"
    deviations = frozenset(
        {
            Deviation.ONE_POOL_PER_ADDRESS,
            Deviation.BOUND_ADDRESS_GUARD,
            Deviation.CLUSTER_IP_SOURCE,
            Deviation.AFFINITY_PER_ADDRESS,
            Deviation.HAIRPIN_LOCAL_ONLY,
            Deviation.HAIRPIN_PER_PORT,
            Deviation.HASH_OF_THE_KERNEL,
        }
    )
    traits = IPVS

    def __init__(self, scheduler: str = "rr", lacking: frozenset[str] = frozenset()) -> None:
        """Create the backend for a scheduler, the name of a kernel module without `ip_vs_`.

        The scheduler mh hashes clients' ports, too (row 24.6). `lacking` has the schedulers that Services may request and
        the kernel does not have (row 29.19).
        """
        self._scheduler = scheduler or "rr"
        self._lacking = lacking
        self.deviations = self.deviations | {_WITHOUT[name] for name in lacking}

    def advance(self, previous: IpvsRules | None, plan: Plan) -> tuple[IpvsRules, IpvsChanges]:
        """Return the rules for a plan and the changes. Fragments of unchanged Service ports are taken over."""
        last = cast("_Rendering | None", previous.rendering) if previous else None
        frame = IpvsFrame(Frame.of(plan, commented=False), plan.service_cidrs)
        settings = settings_of(plan, self._scheduler, self._lacking)
        if previous is None or last is None or last.frame != frame or last.settings != settings:
            empty = _Rendering(plan_number=_NO_PLAN, frame=frame, settings=settings)
            rules, _ = _Turn(plan, empty, None).rules()
            return rules, diff(previous, rules)
        rules, touched = _Turn(plan, last, previous).rules()
        return rules, diff(previous, rules, touched)

    diff = staticmethod(diff)
    patch = staticmethod(patch)

    def walk(
        self, rules: IpvsRules, packet: Packet, host: Host, memory: Memory | None = None, now: float = 0.0
    ) -> Trace:
        """Return the path of a packet through these rules, sets, and virtual servers alone."""
        objects = KernelObjects(sets=rules.sets, servers=rules.servers, bound=rules.bound)
        return walk(rules.tables.ruleset, packet, host, memory, now, objects=objects)

    def contents(self, rules: IpvsRules) -> Mapping[str, object]:
        """Return virtual servers, addresses, sets, chains, and jumps."""
        tables = rules.tables
        return {
            "servers": rules.servers,
            "bound": rules.bound,
            "sets": rules.sets,
            "chains": tables.chains,
            "jumps": tables.jumps,
        }

    def served(self, rules: IpvsRules) -> int:
        """Return the number of virtual servers."""
        return len(rules.servers)

    def text(self, rules: IpvsRules) -> str:
        """Return everything as the kernel's tools print it.

        The tools are `ipset save`, iptables-save, and `ipvsadm -S -n`; bound addresses are comments.
        """
        sets = ipset_save_text(rules.sets[name] for name in sorted(rules.sets))
        link = "".join(f"# {address} dev {names.LINK}\n" for address in sorted(rules.bound))
        servers = ipvsadm_save_text(rules.servers.values())
        return f"{sets}{save_text(rules.tables.ruleset)}{link}{servers}"


class _Turn:
    """One rendering on top of another: removes what Service ports no longer need, and adds what they need now."""

    def __init__(self, plan: Plan, last: _Rendering, previous: IpvsRules | None) -> None:
        self._plan = plan
        self._last = last
        self._previous = previous
        self._touched: set[ServerKey] = set()
        self._counted: Counter[SetEntry] = Counter()
        self._masks: Counter[Mask] = Counter()

    def rules(self) -> tuple[IpvsRules, set[ServerKey]]:
        """Return the next rules, and the virtual servers that may differ."""
        last = self._last
        fragments = last.fragments.mutate()
        exact, node = last.exact.mutate(), last.node.mutate()
        for name in self._plan.differing(last.plan_number, last.fragments):
            service, before = self._plan.services.get(name), last.fragments.get(name)
            after = fragment(service, last.settings) if service else None
            if before is not None:
                del fragments[name]
                self._leave(before, exact, node)
            if after is not None:
                fragments[name] = after
                self._come(after, exact, node)
        self._count_health_checks()
        now = msgspec.structs.replace(
            last,
            plan_number=self._plan.lineage.number,
            fragments=fragments.finish(),
            exact=exact.finish(),
            node=node.finish(),
            masks=_added(last.masks, self._masks),
            health_checks=self._plan.health_checks,
        )
        servers = self._servers(now)
        counts = _added(last.counts, self._counted)
        return self._assemble(msgspec.structs.replace(now, counts=counts), servers), self._touched

    def _assemble(self, now: _Rendering, servers: Map[ServerKey, VirtualServer]) -> IpvsRules:
        previous = self._previous
        sets = self._sets(now.counts)
        held = frozenset(name for name in names.KINDS if sets[self._name(name)].entries)
        if previous is None or now.masks.keys() != self._last.masks.keys() or held != _held(previous):
            tables = now.frame.tables(held, _only_mask(now.masks))
            tables = previous.tables if previous is not None and previous.tables == tables else tables
        else:
            tables = previous.tables
        return IpvsRules(self._plan.family, servers, sets[self._name(names.IPVS_IPS)].entries, sets, tables, now)

    def _come(self, each: IpvsFragment, exact: Ways, node: Ways) -> None:
        exact.update(each.exact)
        node.update(each.node)
        self._note(each, 1)

    def _leave(self, each: IpvsFragment, exact: Ways, node: Ways) -> None:
        for ways, held in ((each.exact, exact), (each.node, node)):
            for key, way in ways.items():
                # Another Service may have got the address and port in the same turn, and be there already.
                if held.get(key) is way:
                    del held[key]
        self._note(each, -1)

    def _note(self, each: IpvsFragment, sign: int) -> None:
        self._touched.update(each.exact)
        self._touched.update(each.node)
        for entry in each.entries:
            self._counted[entry] += sign
        if each.mask is not None:
            self._masks[each.mask] += sign

    def _count_health_checks(self) -> None:
        for checks, sign in ((self._last.health_checks, -1), (self._plan.health_checks, 1)):
            if self._last.health_checks is not self._plan.health_checks:
                for check in checks.values():
                    self._counted[names.HEALTH_CHECK, str(check.port)] += sign

    def _servers(self, now: _Rendering) -> Map[ServerKey, VirtualServer]:
        """Return virtual servers, and count the entries of sets that belong to them.

        Exact addresses take precedence over node ports.
        """
        held: Map[ServerKey, VirtualServer] = self._previous.servers if self._previous else Map()
        servers = held.mutate()
        for key in self._touched:
            before = self._last.exact.get(key) or self._last.node.get(key)
            after = now.exact.get(key) or now.node.get(key)
            for way, sign in ((before, -1), (after, 1)):
                for entry in way.entries if way else ():
                    self._counted[entry] += sign
            if after is None:
                servers.pop(key, None)
            elif before is None or before.server != after.server:
                servers[key] = after.server
        return servers.finish()

    def _sets(self, counts: Map[SetEntry, int]) -> dict[str, IpSet]:
        sets = dict(self._previous.sets) if self._previous else self._empty_sets()
        added: dict[str, set[str]] = {}
        removed: dict[str, set[str]] = {}
        for (name, text), change in self._counted.items():
            if change:
                was, now = (name, text) in self._last.counts, (name, text) in counts
                if was is not now:
                    (added if now else removed).setdefault(name, set()).add(text)
        for name in added.keys() | removed.keys():
            held = sets[self._name(name)]
            entries = (held.entries - removed.get(name, set())) | added.get(name, set())
            sets[held.name] = msgspec.structs.replace(held, entries=entries)
        return sets

    def _empty_sets(self) -> dict[str, IpSet]:
        family = self._plan.family
        made = (IpSet(self._name(name), kind, names.set_family(kind, family)) for name, kind in names.KINDS.items())
        return {held.name: held for held in made}

    def _name(self, name: str) -> str:
        return names.set_name(name, self._plan.family)


def _added(counts: Map[K, int], changes: Mapping[K, int]) -> Map[K, int]:
    """Return counts with the changes; counts of zero are removed."""
    sums = counts.mutate()
    for key, change in changes.items():
        if change:
            total = sums.get(key, 0) + change
            if total:
                sums[key] = total
            else:
                del sums[key]
    return sums.finish()


def _held(rules: IpvsRules) -> frozenset[str]:
    """Return the sets, by their IPv4 names, that are not empty."""
    return frozenset(name for name in names.KINDS if rules.sets[names.set_name(name, rules.family)].entries)


def _only_mask(masks: Map[Mask, int]) -> Mask:
    """Return how ClusterIPs are masqueraded; the configuration makes it the same for all (group 5)."""
    if len(masks) > 1:
        raise ValueError(f"ClusterIPs are masqueraded in {len(masks)} ways: one rule for their set says one way only")
    return next(iter(masks), MASK_NONE)
