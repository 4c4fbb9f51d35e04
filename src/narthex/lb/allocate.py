"""Address allocation: from all Services, the addresses that each of them gets (rows M1-M8).

The Service statuses are the only record, which leads to three rules:

* All addresses in statuses are known before any address is assigned, and none of them is assigned to another Service.
* A Service keeps its addresses unless something requires their release; the decision then contains the cause.
* The outcome depends only on the present objects, not on the order of events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from narthex.lb.pools import AddressPool, Pools, address_text, may_contain, pool_containing
from narthex.lb.requests import AddressRequest, address_request
from narthex.lb.resources import pool_serves
from narthex.lb.service_status import AllocationDecision, Refusal, is_served, pool_of, status_addresses
from narthex.lb.sharing import SharingProfile, sharing_conflict, sharing_profile
from narthex.model import IPFamily, Labels, NamespacedName, Service, address_key, family_of


class AllocationInput(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that allocation depends on."""

    services: Iterable[Service]
    """All Services of the cluster, including those of other controllers."""
    pools: Pools
    namespaces: Mapping[str, Labels] = {}
    """Labels of the namespaces, by name."""
    load_balancer_class: str = ""
    """Serve Services with this spec.loadBalancerClass; empty: Services without a class."""
    unreadable: Mapping[NamespacedName, tuple[str, ...]] = {}
    """Status addresses of Services that could not be decoded."""
    pools_unreadable: bool = False
    """True if some pools could not be decoded: addresses of no known pool may belong to them."""
    pending: Mapping[NamespacedName, tuple[str, ...]] = {}
    """Addresses that were written, or may have been written, but are not visible in the status yet."""
    superseded: Mapping[NamespacedName, tuple[str, ...]] = {}
    """Other addresses that an earlier write may still put into a status."""
    settled: frozenset[NamespacedName] = frozenset()
    """Services whose decided status has been observed; they win conflicts over an address."""
    held_back: Mapping[str, NamespacedName] = {}
    """Addresses that were released lately, by the Service that had them; another one gets them only if no other is free."""
    overwritten: frozenset[NamespacedName] = frozenset()
    """Services whose status another controller has overwritten."""


def allocate(inputs: AllocationInput) -> dict[NamespacedName, AllocationDecision]:
    """Return the decision for each Service of this controller."""
    return _Allocation(inputs).run()


class _Retained(msgspec.Struct, frozen=True):
    """The current addresses that a Service keeps, and why others are released."""

    addresses: tuple[str, ...] = ()
    pool: str = ""
    cause: str = ""
    note: str = ""


class _Allocation:
    """One allocation run."""

    def __init__(self, inputs: AllocationInput) -> None:
        self._input = inputs
        self._services = {service.key: service for service in inputs.services}
        self._shares = {key: sharing_profile(each, ours=self._is_ours(each)) for key, each in self._services.items()}
        self._holders: dict[str, set[NamespacedName]] = defaultdict(set)
        """By address: Services whose status contains it, now or soon. Entries stay during a run, even if their status is
        about to be cleared."""
        self._owners: dict[str, set[NamespacedName]] = defaultdict(set)
        """By address: Services confirmed in this run."""
        self._taken: dict[IPFamily, set[int]] = {family: set() for family in IPFamily}
        self._held_back = {
            (family_of(address), address_key(address)[1]): key for address, key in inputs.held_back.items()
        }
        self._starts: dict[tuple[str, IPFamily], int] = {}
        self._shared: dict[str, list[str]] = defaultdict(list)
        """Addresses by the sharing key of their holders."""

    def run(self) -> dict[NamespacedName, AllocationDecision]:
        """Return a decision for each relevant Service.

        Services that keep their addresses come first, then those that request an address or a pool.
        """
        self._record()
        decisions: dict[NamespacedName, AllocationDecision] = {}
        waiting: list[tuple[Service, AddressRequest, _Retained]] = []
        for service in sorted(filter(self._is_relevant, self._services.values()), key=self._sort_key):
            outcome = self._evaluate(service)
            if isinstance(outcome, AllocationDecision):
                decisions[service.key] = outcome
            else:
                waiting.append((service, *outcome))
        # Services that request one specific address come first; the others have a choice.
        for service, request, retained in sorted(
            waiting, key=lambda one: (not one[1].addresses, not one[1].pool, one[0].key)
        ):
            decisions[service.key] = self._assign(service, request, retained)
        return decisions

    def _is_ours(self, service: Service) -> bool:
        return is_served(service, self._input.load_balancer_class)

    def _is_relevant(self, service: Service) -> bool:
        """Return True for Services of this controller, and for former ones whose status must be cleared."""
        if service.type == "LoadBalancer":
            return self._is_ours(service)
        return bool(pool_of(service)) or any(self._input.pools.of(address) for address in status_addresses(service))

    def _sort_key(self, service: Service) -> tuple[bool, bool, NamespacedName]:
        return service.key not in self._input.settled, not pool_of(service), service.key

    def _record(self) -> None:
        for service in self._services.values():
            unseen = (*self._input.pending.get(service.key, ()), *self._input.superseded.get(service.key, ()))
            for address in (*status_addresses(service), *unseen):
                self._hold(address, service.key)
        for key, addresses in self._input.unreadable.items():
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

    def _evaluate(self, service: Service) -> AllocationDecision | tuple[AddressRequest, _Retained]:
        """Return the decision if the current state determines it, otherwise the request and the retained addresses."""
        held = status_addresses(service)
        if service.type != "LoadBalancer":
            return AllocationDecision(service=service.key, cause=f"it is of type {service.type} now")
        if foreign := self._foreign(service, held):
            return foreign
        request = address_request(service)
        if isinstance(request, Refusal):
            retained = self._retain(service, held, None)
            return self._confirmed(service, retained, refusal=request)
        retained = self._retain(service, held or self._input.pending.get(service.key, ()), request)
        have = {family_of(address) for address in retained.addresses}
        if retained.addresses and (set(request.addresses) <= set(retained.addresses)) and have >= set(request.families):
            return self._confirmed(service, retained)
        if service.deletion_timestamp:
            return self._confirmed(service, retained)
        for address in retained.addresses:
            self._owners[address].add(service.key)
        return request, retained

    def _foreign(self, service: Service, held: tuple[str, ...]) -> AllocationDecision | None:
        """Return the decision to leave the status alone if another controller writes it."""
        outside = [address for address in held if self._input.pools.of(address) is None]
        if service.key not in self._input.overwritten:
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
        """Return why addresses outside of all usable pools may belong to an unusable one; empty if they do not."""
        if self._input.pools_unreadable:
            return "a pool that cannot be read"
        refused = self._input.pools.refused
        name = pool_of(service)
        if name:
            found = self._input.pools.refusal_of(name)
            return f"pool {name}, which is refused ({found.reason})" if found is not None else ""
        for each in refused:
            if any(may_contain(each.object, address) for address in addresses):
                return f"pool {each.object.name}, which is refused ({each.reason})"
        return ""

    def _retain(self, service: Service, held: tuple[str, ...], request: AddressRequest | None) -> _Retained:
        """Return the addresses that stay. `request` is None if it is invalid; then everything that nothing else forbids stays."""
        retained: list[str] = []
        causes: list[str] = []
        notes: list[str] = []
        pool = ""
        for address in held:
            said = self._why_released(service, address, retained, request)
            found = self._input.pools.of(address)
            if not said and found is None:
                refused = self._may_be_refused(service, [address])
                said = "" if refused else "no pool has it any more"
                notes += [f"{address} stays, though it is from {refused}"] if refused else []
            if said:
                causes.append(f"{address}: {said}")
            else:
                retained.append(address)
                pool = pool or (found.name if found is not None else pool_of(service))
        order = request.families if request is not None else ()
        retained.sort(key=lambda address: order.index(family_of(address)) if order else 0)
        return _Retained(tuple(retained), pool, "; ".join(causes), "; ".join(notes))

    def _why_released(
        self, service: Service, address: str, retained: Iterable[str], request: AddressRequest | None
    ) -> str:
        """Return why a Service must release an address although its pool exists; empty if it may keep it."""
        # A pending address must not conflict with any holder, a status address only with those that precede it.
        seen = address in status_addresses(service)
        others = self._confirmed_or_foreign(address) if seen else self._holders.get(address, set())
        if other := self._clash(service, others):
            return other
        if request is None:
            return ""
        family = family_of(address)
        if request.addresses and address not in request.addresses:
            return f"it asks for {', '.join(request.addresses)}"
        if family not in request.families:
            return f"it has no {family.label} address any more"
        if any(family_of(other) is family for other in retained):
            return f"it has another {family.label} address"
        pool = self._input.pools.of(address)
        if request.pool and (pool.name if pool is not None else pool_of(service)) != request.pool:
            return f"it asks for pool {request.pool}"
        return self._pool_forbids(service, address, pool) if pool is not None else ""

    def _pool_forbids(self, service: Service, address: str, pool: AddressPool) -> str:
        if not self._serves(pool, service):
            return f"pool {pool.name} is for other Services (serviceAllocation)"
        if pool.avoids(address):
            return f"pool {pool.name} gives no addresses that end in .0 or .255 (avoidBuggyIPs)"
        return ""

    def _serves(self, pool: AddressPool, service: Service) -> bool:
        return pool_serves(pool.object, service, self._input.namespaces.get(service.namespace, ()))

    def _confirmed_or_foreign(self, address: str) -> set[NamespacedName]:
        """Return the Services that take precedence for an address: those confirmed earlier, and those of other controllers."""
        others = {key for key in self._holders.get(address, ()) if not self._shares[key].ours}
        return others | self._owners.get(address, set())

    def _clash(self, service: Service, others: Iterable[NamespacedName]) -> str:
        mine = self._shares[service.key]
        for other in sorted(others):
            if other != service.key and (why := sharing_conflict(mine, self._shares[other])):
                return why
        return ""

    def _confirmed(self, service: Service, retained: _Retained, refusal: Refusal | None = None) -> AllocationDecision:
        for address in retained.addresses:
            self._owners[address].add(service.key)
        return AllocationDecision(
            service=service.key,
            addresses=retained.addresses,
            pool=retained.pool if retained.addresses else "",
            cause=retained.cause,
            note=retained.note,
            refusal=refusal,
        )

    def _assign(self, service: Service, request: AddressRequest, retained: _Retained) -> AllocationDecision:
        """Find the missing addresses."""
        found = self._requested(service, request) if request.addresses else self._chosen(service, request, retained)
        if isinstance(found, Refusal):
            if request.all_families and retained.addresses:
                cause = retained.cause or "an address of each IP family is required"
                retained = _Retained(cause=cause)
            return self._confirmed(service, retained, refusal=found)
        pool, addresses = found
        for address in addresses:
            self._hold(address, service.key)
        cause = retained.cause or f"pool {pool} has an address of each IP family"
        note = retained.note if set(retained.addresses) & set(addresses) else ""
        return self._confirmed(service, _Retained(addresses, pool, cause, note))

    def _requested(self, service: Service, request: AddressRequest) -> tuple[str, tuple[str, ...]] | Refusal:
        """Return the pool and the addresses that the Service requests explicitly."""
        pools: dict[str, AddressPool] = {}
        for address in request.addresses:
            pool = self._input.pools.of(address)
            if pool is None:
                return Refusal(f"{address} is in no pool that can be used", self._nearest(address))
            if request.pool and pool.name != request.pool:
                text = f"it asks for {address} and for pool {request.pool}, but the address is in pool {pool.name}"
                return Refusal(text, "drop one of the two annotations, or correct it")
            if why := self._pool_forbids(service, address, pool):
                return Refusal(f"{address} cannot be had: {why}", "ask for another address, or change the pool")
            if why := self._clash(service, self._holders.get(address, ())):
                return Refusal(f"{address} cannot be had: {why}", "ask for another address, or free this one")
            pools[pool.name] = pool
        if len(pools) > 1:
            text = f"{' and '.join(request.addresses)} are in the pools {' and '.join(sorted(pools))}"
            return Refusal(text, "ask for addresses of one pool")
        return next(iter(pools)), request.addresses

    def _nearest(self, address: str) -> str:
        for refused in self._input.pools.refused:
            if pool_containing([refused.object], address) is not None:
                return f"pool {refused.object.name} has it but is refused, {refused.reason}"
        return "ask for an address of a pool, or add it to one"

    def _chosen(
        self, service: Service, request: AddressRequest, retained: _Retained
    ) -> tuple[str, tuple[str, ...]] | Refusal:
        """Return addresses of the first suitable pool."""
        if retained.addresses and (pool := self._input.pools.named(retained.pool)) is not None:
            more = self._of_pool(service, pool, request, retained.addresses)
            if len(more) == len(request.families) or not request.all_families:
                return pool.name, more
        # Addresses of a refused pool stay, even if the other family is missing.
        if retained.addresses and (retained.note or not request.all_families):
            return retained.pool, retained.addresses
        pools = self._candidates(service, request)
        if isinstance(pools, Refusal):
            return pools
        best: tuple[str, tuple[str, ...]] | None = None
        for pool in pools:
            found = self._of_pool(service, pool, request, ())
            if len(found) == len(request.families):
                return pool.name, found
            if found and not request.all_families and best is None:
                best = pool.name, found
        return best if best is not None else self._none(service, request, pools)

    def _candidates(self, service: Service, request: AddressRequest) -> list[AddressPool] | Refusal:
        """Return the pools that may serve the Service, in order of precedence."""
        if request.pool:
            pool = self._input.pools.named(request.pool)
            if pool is not None and self._serves(pool, service):
                return [pool]
            if pool is not None:
                text = f"pool {pool.name} is for other Services"
                return Refusal(text, "see its serviceAllocation, or ask for another pool")
            refused = self._input.pools.refusal_of(request.pool)
            if refused is not None:
                return Refusal(f"pool {request.pool} is refused", refused.reason)
            return Refusal(f"there is no pool {request.pool}", "correct the annotation, or make the pool")
        pools = [pool for pool in self._input.pools.accepted if pool.object.auto_assign and self._serves(pool, service)]
        return sorted(pools, key=_precedence)

    def _of_pool(
        self, service: Service, pool: AddressPool, request: AddressRequest, have: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return one address of each family, as far as the pool has them; `have` is kept."""
        by_family = {family_of(address): address for address in have}
        for family in request.families:
            if family not in by_family and (address := self._address(service, pool, family)):
                by_family[family] = address
        return tuple(by_family[family] for family in request.families if family in by_family)

    def _address(self, service: Service, pool: AddressPool, family: IPFamily) -> str:
        """Return the pending address, an address that can be shared, or the lowest free one; empty if there is none."""
        sharing = self._shares[service.key].key
        known = self._input.pending.get(service.key, ())
        shared: list[str] = self._shared.get(sharing, []) if sharing else []
        for address in (*known, *shared):
            if family_of(address) is family and pool.holds(address) and not pool.avoids(address):
                others = self._holders[address] - {service.key}
                if (others or address in known) and not self._clash(service, others):
                    return address
        start, taken = self._starts.get((pool.name, family), 0), self._taken[family]
        held_back = {number for (of, number), key in self._held_back.items() if of is family and key != service.key}
        number = pool.lowest_free(family, taken | held_back if held_back else taken, start)
        if number is None:
            number = pool.lowest_free(family, taken) if held_back else None
        elif not held_back:
            self._starts[pool.name, family] = number
        return "" if number is None else address_text(family, number)

    def _none(self, service: Service, request: AddressRequest, pools: list[AddressPool]) -> Refusal:
        """Explain why no pool has the required addresses."""
        needed = " and ".join(family.label for family in request.families)
        if pools:
            said = []
            for pool in pools:
                lacks = [family.label for family in request.families if family not in pool.families]
                said.append(f"{pool.name} {f'has no {lacks[0]} addresses' if lacks else 'is used up'}")
            return Refusal(f"no pool has {needed} for it ({', '.join(said)})", "add addresses to a pool, or free some")
        if not self._input.pools.accepted:
            first = next(iter(self._input.pools.refused), None)
            if first is not None:
                return Refusal(
                    "there is no pool that can be used", f"pool {first.object.name} is refused, {first.reason}"
                )
            return Refusal("there is no pool", "make an IPAddressPool with addresses of your network")
        reserved = [pool.name for pool in self._input.pools.accepted if not pool.object.auto_assign]
        text = f"no pool is for {service.key}"
        if reserved:
            return Refusal(text, f"ask for one by name ({', '.join(reserved)}; autoAssign is false there), or make one")
        return Refusal(text, "see serviceAllocation of the pools, or make one that is for it")


def _precedence(pool: AddressPool) -> tuple[bool, float, str]:
    """Sort restricted pools first, then by priority, where 0 is the lowest (row M3)."""
    allocation = pool.object.allocation
    if allocation is None:
        return True, 0.0, pool.name
    return False, allocation.priority or float("inf"), pool.name
