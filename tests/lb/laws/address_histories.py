"""A cluster whose Services and pools change, with one controller that sees that late, loses writes and is started anew.

Each step can be taken by anybody who can `pick` one of a list: a property test, or a generator of random numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from narthex.lb.allocate import AllocationInput, allocate
from narthex.lb.ledger import UNCONFIRMED_SECONDS, AllocationLedger
from narthex.lb.pools import validate_pools
from narthex.lb.service_status import PREFIX, is_served, required_changes, status_addresses
from narthex.lb.sharing import sharing_conflict, sharing_profile
from narthex.model.net import IPFamily, Protocol, family_of
from narthex.model.objects import (
    IPAddressPool,
    LoadBalancerIngress,
    NamespacedName,
    Service,
    ServiceAllocation,
    ServicePort,
)

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
NAMES = [NamespacedName("shop", name) for name in "abcd"]
FOREIGN = "203.0.113.1"
"""Of another controller, and in no pool."""
ADDRESSES = ["192.168.15.0", "192.168.15.1", "192.168.15.3", "172.6.6.6", "fd00::1", FOREIGN]
FATES = ["done", "done", "lost", "done but not told"]

_WISHES = [
    *[("", "", "k")] * 6,
    *[("", "", "")] * 4,
    ("192.168.15.1", "", "k"),
    ("192.168.15.1", "", ""),
    ("192.168.15.0", "", ""),
    ("172.6.6.6", "b", ""),
    ("192.168.15.1,fd00::1", "", ""),
    (FOREIGN, "", ""),
    ("nonsense", "", ""),
    ("", "a", "k"),
    ("", "b", ""),
    ("", "nowhere", "l"),
]
"""loadBalancerIPs, address-pool, allow-shared-ip."""
_STACKS = [
    *[((V4,), "SingleStack")] * 5,
    ((V6,), "SingleStack"),
    ((V4, V6), "PreferDualStack"),
    ((V6, V4), "PreferDualStack"),
    ((V4, V6), "RequireDualStack"),
]
_RANGES = ["192.168.15.0/31", "192.168.15.0-192.168.15.4", "172.6.6.6/32", "fd00::/126", "fd01::/64", "10.0.0.0/7"]


def spec(pick: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
    """What people choose of a Service."""
    families, policy = pick(_STACKS)
    names = ("loadBalancerIPs", "address-pool", "allow-shared-ip")
    notes = {PREFIX + name: value for name, value in zip(names, pick(_WISHES), strict=True) if value}
    return {
        "type": pick(["LoadBalancer"] * 7 + ["ClusterIP"]),
        "ip_families": families,
        "ip_family_policy": policy,
        "ports": (ServicePort(port=pick([80, 81, 82])),),
        "selector": pick([(("app", "x"),), (("app", "y"),)]),
        "external_policy_local": pick([False, False, False, True]),
        "load_balancer_class": pick([""] * 7 + ["other"]),
        "annotations": tuple(sorted(notes.items())),
    }


def pool(pick: Callable[[Sequence[Any]], Any], name: str = "") -> IPAddressPool:
    """A pool; they may overlap."""
    allocation = ServiceAllocation(namespaces=(pick(["shop", "other"]),), priority=pick([0, 1, 2]))
    return IPAddressPool(
        namespace="metallb-system",
        name=name or pick("abc"),
        addresses=tuple(dict.fromkeys([pick(_RANGES), pick(_RANGES)])),
        auto_assign=pick([True, True, True, False]),
        avoid_buggy=pick([False, False, False, True]),
        allocation=pick([None, None, allocation]),
    )


class History:
    """The server's objects, and the controller."""

    def __init__(self, first: IPAddressPool) -> None:
        self.version = 0
        self.time = 0.0
        self.services: dict[Any, Any] = {}
        self.unseen: list[Any] = []
        self.pools = {first.name: first}
        self.start_anew()

    # What people do.

    def make_or_change(self, key: NamespacedName, chosen: dict[str, Any]) -> None:
        before = self.services.get(key)
        kept = tuple(pair for pair in before.annotations if "allocated" in pair[0]) if before else ()
        status = {"ingress": before.ingress, "uid": before.uid} if before else {"uid": str(self.version)}
        notes = tuple(sorted((*chosen["annotations"], *kept)))
        self.put(Service(namespace=key.namespace, name=key.name, **{**chosen, "annotations": notes}, **status))

    def change_port(self, key: NamespacedName, port: int) -> None:
        if key in self.services:
            self.put(
                msgspec.structs.replace(self.services[key], ports=(ServicePort(port=port, protocol=Protocol.TCP),))
            )

    def drop(self, key: NamespacedName) -> None:
        if self.services.pop(key, None) is not None:
            self.unseen.append((key, None))

    def overwrite(self, key: NamespacedName, *addresses: str) -> None:
        """Somebody else writes a status."""
        if key in self.services:
            ingress = tuple(LoadBalancerIngress(ip=address) for address in addresses)
            self.put(msgspec.structs.replace(self.services[key], ingress=ingress))

    # What the controller does.

    def start_anew(self) -> None:
        """With everything read again, as each term begins."""
        self.ledger = AllocationLedger()
        self.seen = dict(self.services)
        self.unseen = []

    def see(self, count: int) -> None:
        """A watch tells what happened, in order, and late."""
        for key, service in self.unseen[:count]:
            if service is None:
                self.seen.pop(key, None)
            else:
                self.seen[key] = service
        del self.unseen[:count]

    def turn(self, fates: Any) -> None:
        """Decide from what was seen, and write; what becomes of each write is fate's."""
        for index, (key, decision) in enumerate(self.decide().items()):
            self.write(key, decision, fates[index % len(fates)])

    def come_to_rest(self) -> None:
        """After some undisturbed turns nothing is left to do, and all is as it should be, also for a newcomer."""
        self.time += 2 * UNCONFIRMED_SECONDS
        for _ in range(8):
            self.see(len(self.unseen))
            before = self.version, self.ledger.pending
            self.turn(["done"])
            if (self.version, self.ledger.pending) == before:
                break
        else:
            raise AssertionError("it does not come to rest")
        self.check_rest()
        self.ledger = AllocationLedger()
        for key, decision in self.decide().items():
            todo = required_changes(self.seen[key], decision)
            # Only who was fighting us looks different to somebody who has not seen the fight.
            assert todo.status is None or FOREIGN in status_addresses(self.seen[key]), (key, decision)
        self.start_anew()

    def decide(self) -> Any:
        accepted = validate_pools(self.pools.values())
        self.ledger.observe(self.seen.values(), accepted, self.time)
        shown = self.ledger.with_pending(self.seen.values())
        situation = AllocationInput(
            services=list(shown.values()),
            pools=accepted,
            pending=self.ledger.pending,
            superseded=self.ledger.superseded,
            settled=self.ledger.settled,
            overwritten=self.ledger.overwritten,
        )
        decisions = allocate(situation)
        mirrored = msgspec.structs.replace(situation, services=list(shown.values())[::-1])
        assert allocate(mirrored) == decisions, "the order of Services decides"
        self.ledger.drop_unmet(decisions)
        return decisions

    def write(self, key: NamespacedName, decision: Any, fate: str) -> Any:
        seen, there = self.ledger.with_pending([self.seen[key]])[key], self.services.get(key)
        todo = required_changes(seen, decision)
        if todo.status is None and todo.pool is None:
            self.ledger.confirm(seen, decision)
            return
        gone = set(status_addresses(seen)) - set(decision.addresses)
        assert not gone or decision.cause, "taken away without a cause"
        if todo.status is not None:
            self.ledger.record_write(seen, decision.addresses, self.time)
        if fate == "lost":
            return
        if there is None or there.resource_version != seen.resource_version:
            self.ledger.write_rejected(seen)
            return
        for address in set(decision.addresses) - set(status_addresses(there)):
            self.check_free(address, there)
        ingress = tuple(LoadBalancerIngress(ip=address) for address in decision.addresses)
        notes = tuple(pair for pair in there.annotations if "allocated" not in pair[0])
        if decision.pool:
            notes = tuple(sorted((*notes, (PREFIX + "ip-allocated-from-pool", decision.pool))))
        self.put(msgspec.structs.replace(there, ingress=ingress, annotations=notes))
        if fate == "done":
            self.ledger.write_succeeded(seen)

    def check_free(self, address: str, taker: Any) -> None:
        """Whoever has it on the server agreed to share it, as far as the controller could know."""
        for key, other in self.services.items():
            if key != taker.key and address in status_addresses(other):
                known = self.seen.get(key, other)
                mine = sharing_profile(self.seen[taker.key], ours=is_served(self.seen[taker.key], ""))
                theirs = sharing_profile(known, ours=is_served(known, ""))
                assert not sharing_conflict(mine, theirs), f"{address} is given to {taker.key}, but {key} has it"

    def check_rest(self) -> None:
        accepted = validate_pools(self.pools.values())
        decisions = self.decide()
        for key, service in self.services.items():
            held = status_addresses(service)
            if not is_served(service, ""):
                continue
            decision = decisions[key]
            assert decision.addresses == held, "the status lies"
            if decision.foreign:
                continue
            assert held or decision.refusal, "nothing is given, and nothing said"
            for address in held:
                found = accepted.of(address)
                assert found is not None or decision.note, "an address of no pool, and nothing said"
                if found is not None and decision.refusal is None:
                    assert not found.avoids(address)
                    assert family_of(address) in service.ip_families
            for other_key, other in self.services.items():
                if other_key != key and set(held) & set(status_addresses(other)) - {FOREIGN}:
                    theirs = sharing_profile(other, ours=is_served(other, ""))
                    why = sharing_conflict(sharing_profile(service), theirs)
                    assert not why, f"{key} and {other_key} have one address: {why}"

    def put(self, service: Service) -> None:
        self.version += 1
        made = msgspec.structs.replace(service, resource_version=str(self.version))
        self.services[service.key] = made
        self.unseen.append((service.key, made))
