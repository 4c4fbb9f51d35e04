"""Who has which address: from all Services as they are now, to what each of them is to have (rows M1-M8).

The statuses are the only record there is, so three rules hold, whatever came before:

* Everything that a status holds is known before anything is given, and is given to nobody else, whoever holds it.
* What a Service has it keeps, unless something says that it must go; then the cause is part of the decision.
* The outcome depends on what there is and not on the order in which it came.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from narthex.lb.pools import AddressPool, Pools, address_text, may_contain, pool_containing
from narthex.lb.requests import AddressRequest, SharingProfile, address_request, sharing_conflict, sharing_profile
from narthex.lb.resources import pool_serves
from narthex.lb.service_status import AllocationDecision, Refusal, is_served, pool_of, status_addresses
from narthex.model.names import NamespacedName
from narthex.model.net import IPFamily, address_key, family_of
from narthex.model.objects import Labels, Service


class AllocationInput(msgspec.Struct, frozen=True, kw_only=True):
    """All that the decisions depend on."""

    services: Iterable[Service]
    """All of the cluster, also those that are somebody else's."""
    pools: Pools
    namespaces: Mapping[str, Labels] = {}
    """Labels of the namespaces."""
    balancer_class: str = ""
    """Serve the Services with this spec.loadBalancerClass; empty: those without one."""
    unreadable: Mapping[NamespacedName, tuple[str, ...]] = {}
    """Addresses in the status of Services that cannot be used for a fault in them."""
    pools_unreadable: bool = False
    """There are pools that nobody can read: what no other pool explains may be from them."""
    promised: Mapping[NamespacedName, tuple[str, ...]] = {}
    """What was written, or perhaps written, and has not been seen in the status yet."""
    withheld: Mapping[NamespacedName, tuple[str, ...]] = {}
    """What else may be in a status by now."""
    settled: frozenset[NamespacedName] = frozenset()
    """Services that have been seen to have what they have; in a quarrel over an address they come first."""
    overwritten: frozenset[NamespacedName] = frozenset()
    """Services whose status somebody else has written over."""


def allocate(situation: AllocationInput) -> dict[NamespacedName, AllocationDecision]:
    """What is decided of each Service that is this controller's, by name."""
    return _Allocation(situation).run()


class _Kept(msgspec.Struct, frozen=True):
    """What of its present addresses a Service may keep, and why others go."""

    addresses: tuple[str, ...] = ()
    pool: str = ""
    cause: str = ""
    note: str = ""


class _Allocation:
    def __init__(self, situation: AllocationInput) -> None:
        self._now = situation
        self._services = {service.key: service for service in situation.services}
        self._shares = {key: sharing_profile(each, ours=self._is_ours(each)) for key, each in self._services.items()}
        self._holders: dict[str, set[NamespacedName]] = defaultdict(set)
        """By address, whose status holds it or will. Nobody leaves during a run: a status that is about to be cleared
        still holds what it holds."""
        self._owners: dict[str, set[NamespacedName]] = defaultdict(set)
        """By address, who has been confirmed in this run."""
        self._taken: dict[IPFamily, set[int]] = {family: set() for family in IPFamily}
        self._starts: dict[tuple[str, IPFamily], int] = {}
        self._shared: dict[str, list[str]] = defaultdict(list)
        """Addresses by the sharing key of those who hold them."""

    def run(self) -> dict[NamespacedName, AllocationDecision]:
        """All decisions."""
        self._record()
        decisions: dict[NamespacedName, AllocationDecision] = {}
        waiting: list[tuple[Service, AddressRequest, _Kept]] = []
        for service in sorted((each for each in self._services.values() if self._concerns(each)), key=self._rank):
            outcome = self._first(service)
            if isinstance(outcome, AllocationDecision):
                decisions[service.key] = outcome
            else:
                waiting.append((service, *outcome))
        # Who asks for one address alone has no choice; who has the choice comes afterwards.
        for service, wishes, kept in sorted(
            waiting, key=lambda one: (not one[1].addresses, not one[1].pool, one[0].key)
        ):
            decisions[service.key] = self._give(service, wishes, kept)
        return decisions

    def _is_ours(self, service: Service) -> bool:
        return is_served(service, self._now.balancer_class)

    def _concerns(self, service: Service) -> bool:
        """Ours, or something that was ours and has to be cleared."""
        if service.type == "LoadBalancer":
            return self._is_ours(service)
        return bool(pool_of(service)) or any(self._now.pools.of(address) for address in status_addresses(service))

    def _rank(self, service: Service) -> tuple[bool, bool, NamespacedName]:
        return service.key not in self._now.settled, not pool_of(service), service.key

    def _record(self) -> None:
        for service in self._services.values():
            unseen = (*self._now.promised.get(service.key, ()), *self._now.withheld.get(service.key, ()))
            for address in (*status_addresses(service), *unseen):
                self._hold(address, service.key)
        for key, addresses in self._now.unreadable.items():
            self._shares[key] = SharingProfile(key, "", frozenset(), None, ours=False)
            for address in addresses:
                self._hold(address, key)
        for shared in self._shared.values():
            shared.sort(key=address_key)

    def _hold(self, address: str, key: NamespacedName) -> None:
        self._holders[address].add(key)
        self._taken[family_of(address)].add(address_key(address)[1])
        sharing = self._shares[key].key
        if sharing and address not in self._shared[sharing]:
            self._shared[sharing].append(address)

    def _first(self, service: Service) -> AllocationDecision | tuple[AddressRequest, _Kept]:
        """The decision where the present state makes it, else what is asked for and what may be kept."""
        held = status_addresses(service)
        if service.type != "LoadBalancer":
            return AllocationDecision(service=service.key, cause=f"it is of type {service.type} now")
        if foreign := self._foreign(service, held):
            return foreign
        wishes = address_request(service)
        if isinstance(wishes, Refusal):
            kept = self._keep(service, held, None)
            return self._confirmed(service, kept, refusal=wishes)
        kept = self._keep(service, held or self._now.promised.get(service.key, ()), wishes)
        have = {family_of(address) for address in kept.addresses}
        if kept.addresses and (set(wishes.addresses) <= set(kept.addresses)) and have >= set(wishes.families):
            return self._confirmed(service, kept)
        if service.deletion_timestamp:
            return self._confirmed(service, kept)
        for address in kept.addresses:
            self._owners[address].add(service.key)
        return wishes, kept

    def _foreign(self, service: Service, held: tuple[str, ...]) -> AllocationDecision | None:
        """The decision to leave a status alone that somebody else writes."""
        outside = [address for address in held if self._now.pools.of(address) is None]
        if service.key not in self._now.overwritten:
            if pool_of(service) or not (service.ingress_names or outside):
                return None
            if not service.ingress_names and self._may_be_refused(service, outside):
                return None
        shown = ", ".join((*held, *service.ingress_names))
        note = (
            f"the status holds {shown}, which is from no pool here: another controller writes it, and it is left alone; "
            "clear the status or give the Service a loadBalancerClass to end this"
        )
        return AllocationDecision(service=service.key, addresses=held, note=note, foreign=True)

    def _may_be_refused(self, service: Service, addresses: Iterable[str]) -> str:
        """Why addresses that are in no pool that can be used may be from one that cannot; empty when they are not."""
        if self._now.pools_unreadable:
            return "a pool that cannot be read"
        refused = self._now.pools.refused
        name = pool_of(service)
        if name:
            found = self._now.pools.refusal_of(name)
            return f"pool {name}, which is refused ({found.reason})" if found is not None else ""
        for each in refused:
            if any(may_contain(each.object, address) for address in addresses):
                return f"pool {each.object.name}, which is refused ({each.reason})"
        return ""

    def _keep(self, service: Service, held: tuple[str, ...], wishes: AddressRequest | None) -> _Kept:
        """Which of the addresses stay. Without wishes, that is, when these make no sense, all that nothing else forbids."""
        kept: list[str] = []
        causes: list[str] = []
        notes: list[str] = []
        pool = ""
        for address in held:
            said = self._must_go(service, address, kept, wishes)
            found = self._now.pools.of(address)
            if not said and found is None:
                refused = self._may_be_refused(service, [address])
                said = "" if refused else "no pool has it any more"
                notes += [f"{address} stays, though it is from {refused}"] if refused else []
            if said:
                causes.append(f"{address}: {said}")
            else:
                kept.append(address)
                pool = pool or (found.name if found is not None else pool_of(service))
        order = wishes.families if wishes is not None else ()
        kept.sort(key=lambda address: order.index(family_of(address)) if order else 0)
        return _Kept(tuple(kept), pool, "; ".join(causes), "; ".join(notes))

    def _must_go(self, service: Service, address: str, kept: Iterable[str], wishes: AddressRequest | None) -> str:
        """Why a Service cannot keep an address, apart from its pool being gone; empty when it can."""
        # What is only promised may be in nobody's way; what a status holds has to get on with those before it.
        seen = address in status_addresses(service)
        others = self._confirmed_or_foreign(address) if seen else self._holders.get(address, set())
        if other := self._clash(service, others):
            return other
        if wishes is None:
            return ""
        family = family_of(address)
        if wishes.addresses and address not in wishes.addresses:
            return f"it asks for {', '.join(wishes.addresses)}"
        if family not in wishes.families:
            return f"it has no {family.label} address any more"
        if any(family_of(other) is family for other in kept):
            return f"it has another {family.label} address"
        pool = self._now.pools.of(address)
        if wishes.pool and (pool.name if pool is not None else pool_of(service)) != wishes.pool:
            return f"it asks for pool {wishes.pool}"
        return self._pool_forbids(service, address, pool) if pool is not None else ""

    def _pool_forbids(self, service: Service, address: str, pool: AddressPool) -> str:
        if not self._serves(pool, service):
            return f"pool {pool.name} is for other Services (serviceAllocation)"
        if pool.avoids(address):
            return f"pool {pool.name} gives no addresses that end in .0 or .255 (avoidBuggyIPs)"
        return ""

    def _serves(self, pool: AddressPool, service: Service) -> bool:
        return pool_serves(pool.object, service, self._now.namespaces.get(service.namespace, ()))

    def _confirmed_or_foreign(self, address: str) -> set[NamespacedName]:
        """Whom a Service that holds an address has to get on with: whoever was before it, and whoever is not ours."""
        others = {key for key in self._holders.get(address, ()) if not self._shares[key].ours}
        return others | self._owners.get(address, set())

    def _clash(self, service: Service, others: Iterable[NamespacedName]) -> str:
        mine = self._shares[service.key]
        for other in sorted(others):
            if other != service.key and (why := sharing_conflict(mine, self._shares[other])):
                return why
        return ""

    def _confirmed(self, service: Service, kept: _Kept, refusal: Refusal | None = None) -> AllocationDecision:
        for address in kept.addresses:
            self._owners[address].add(service.key)
        return AllocationDecision(
            service=service.key,
            addresses=kept.addresses,
            pool=kept.pool if kept.addresses else "",
            cause=kept.cause,
            note=kept.note,
            refusal=refusal,
        )

    def _give(self, service: Service, wishes: AddressRequest, kept: _Kept) -> AllocationDecision:
        """Find what is missing."""
        found = self._requested(service, wishes) if wishes.addresses else self._chosen(service, wishes, kept)
        if isinstance(found, Refusal):
            if wishes.all_families and kept.addresses:
                cause = kept.cause or "an address of each IP family is required"
                kept = _Kept(cause=cause)
            return self._confirmed(service, kept, refusal=found)
        pool, addresses = found
        for address in addresses:
            self._hold(address, service.key)
        cause = kept.cause or f"pool {pool} has an address of each IP family"
        note = kept.note if set(kept.addresses) & set(addresses) else ""
        return self._confirmed(service, _Kept(addresses, pool, cause, note))

    def _requested(self, service: Service, wishes: AddressRequest) -> tuple[str, tuple[str, ...]] | Refusal:
        """The very addresses that a Service asks for."""
        pools: dict[str, AddressPool] = {}
        for address in wishes.addresses:
            pool = self._now.pools.of(address)
            if pool is None:
                return Refusal(f"{address} is in no pool that can be used", self._nearest(address))
            if wishes.pool and pool.name != wishes.pool:
                text = f"it asks for {address} and for pool {wishes.pool}, but the address is in pool {pool.name}"
                return Refusal(text, "drop one of the two annotations, or correct it")
            if why := self._pool_forbids(service, address, pool):
                return Refusal(f"{address} cannot be had: {why}", "ask for another address, or change the pool")
            if why := self._clash(service, self._holders.get(address, ())):
                return Refusal(f"{address} cannot be had: {why}", "ask for another address, or free this one")
            pools[pool.name] = pool
        if len(pools) > 1:
            text = f"{' and '.join(wishes.addresses)} are in the pools {' and '.join(sorted(pools))}"
            return Refusal(text, "ask for addresses of one pool")
        return next(iter(pools)), wishes.addresses

    def _nearest(self, address: str) -> str:
        for refused in self._now.pools.refused:
            if pool_containing([refused.object], address) is not None:
                return f"pool {refused.object.name} has it but is refused, {refused.reason}"
        return "ask for an address of a pool, or add it to one"

    def _chosen(self, service: Service, wishes: AddressRequest, kept: _Kept) -> tuple[str, tuple[str, ...]] | Refusal:
        """Addresses of the first pool that has them."""
        if kept.addresses and (pool := self._now.pools.named(kept.pool)) is not None:
            more = self._of_pool(service, pool, wishes, kept.addresses)
            if len(more) == len(wishes.families) or not wishes.all_families:
                return pool.name, more
        # From a refused pool nothing is taken away, not even for want of the other family.
        if kept.addresses and (kept.note or not wishes.all_families):
            return kept.pool, kept.addresses
        pools = self._candidates(service, wishes)
        if isinstance(pools, Refusal):
            return pools
        best: tuple[str, tuple[str, ...]] | None = None
        for pool in pools:
            found = self._of_pool(service, pool, wishes, ())
            if len(found) == len(wishes.families):
                return pool.name, found
            if found and not wishes.all_families and best is None:
                best = pool.name, found
        return best if best is not None else self._none(service, wishes, pools)

    def _candidates(self, service: Service, wishes: AddressRequest) -> list[AddressPool] | Refusal:
        """The pools that may give this Service an address, in their order."""
        if wishes.pool:
            pool = self._now.pools.named(wishes.pool)
            if pool is not None and self._serves(pool, service):
                return [pool]
            if pool is not None:
                text = f"pool {pool.name} is for other Services"
                return Refusal(text, "see its serviceAllocation, or ask for another pool")
            refused = self._now.pools.refusal_of(wishes.pool)
            if refused is not None:
                return Refusal(f"pool {wishes.pool} is refused", refused.reason)
            return Refusal(f"there is no pool {wishes.pool}", "correct the annotation, or make the pool")
        pools = [pool for pool in self._now.pools.accepted if pool.object.auto_assign and self._serves(pool, service)]
        return sorted(pools, key=_precedence)

    def _of_pool(
        self, service: Service, pool: AddressPool, wishes: AddressRequest, have: tuple[str, ...]
    ) -> tuple[str, ...]:
        """An address of each family, as far as the pool has them; those that are there already stay."""
        by_family = {family_of(address): address for address in have}
        for family in wishes.families:
            if family not in by_family and (address := self._address(service, pool, family)):
                by_family[family] = address
        return tuple(by_family[family] for family in wishes.families if family in by_family)

    def _address(self, service: Service, pool: AddressPool, family: IPFamily) -> str:
        """The address that it was promised, one that it may share, or the lowest free one; empty when there is none."""
        sharing = self._shares[service.key].key
        known = self._now.promised.get(service.key, ())
        shared: list[str] = self._shared.get(sharing, []) if sharing else []
        for address in (*known, *shared):
            if family_of(address) is family and pool.holds(address) and not pool.avoids(address):
                others = self._holders[address] - {service.key}
                if (others or address in known) and not self._clash(service, others):
                    return address
        start = self._starts.get((pool.name, family), 0)
        number = pool.lowest_free(family, self._taken[family], start)
        if number is None:
            return ""
        self._starts[pool.name, family] = number
        return address_text(family, number)

    def _none(self, service: Service, wishes: AddressRequest, pools: list[AddressPool]) -> Refusal:
        """Why no pool has what is needed."""
        needed = " and ".join(family.label for family in wishes.families)
        if pools:
            said = []
            for pool in pools:
                lacks = [family.label for family in wishes.families if family not in pool.families]
                said.append(f"{pool.name} {f'has no {lacks[0]} addresses' if lacks else 'is used up'}")
            return Refusal(f"no pool has {needed} for it ({', '.join(said)})", "add addresses to a pool, or free some")
        if not self._now.pools.accepted:
            first = next(iter(self._now.pools.refused), None)
            if first is not None:
                return Refusal(
                    "there is no pool that can be used", f"pool {first.object.name} is refused, {first.reason}"
                )
            return Refusal("there is no pool", "make an IPAddressPool with addresses of your network")
        reserved = [pool.name for pool in self._now.pools.accepted if not pool.object.auto_assign]
        text = f"no pool is for {service.key}"
        if reserved:
            return Refusal(text, f"ask for one by name ({', '.join(reserved)}; autoAssign is false there), or make one")
        return Refusal(text, "see serviceAllocation of the pools, or make one that is for it")


def _precedence(pool: AddressPool) -> tuple[bool, float, str]:
    """Pools that are for few come first, by priority, of which 0 is the last (row M3)."""
    allocation = pool.object.allocation
    if allocation is None:
        return True, 0.0, pool.name
    return False, allocation.priority or float("inf"), pool.name
