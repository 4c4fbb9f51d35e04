"""Who gets which address, case by case."""

import msgspec
import pytest

from narthex.lb.allocate import AllocationInput, allocate
from narthex.lb.pools import validate_pools
from narthex.lb.service_status import PREFIX, required_changes
from narthex.model.net import Protocol
from narthex.model.objects import IPAddressPool, LoadBalancerIngress, NamespacedName, ServiceAllocation, ServicePort
from narthex.model.selector import parse_selector
from narthex.testing import build

V4, V6 = "10.110.0.1", "fd6e::1"


def pool(name, *addresses, **fields):
    return IPAddressPool(name=name, namespace="metallb-system", addresses=addresses, **fields)


LAN = pool("lan", "192.168.15.0/28")
BOTH = pool("both", "192.168.16.0/30", "fd00::/126")


def service(name, *held, ips=(V4,), notes=None, **fields):
    """`notes`: annotations without their prefix."""
    fields.setdefault("type", "LoadBalancer")
    annotations = tuple(sorted((PREFIX + key, value) for key, value in (notes or {}).items()))
    return build.service(name, *ips, annotations=annotations, balancers=held, **fields)


def given(services, *pools, **more):
    decided = allocate(AllocationInput(services=services, pools=validate_pools(pools), **more))
    return {str(key): decision for key, decision in decided.items()}


def one(service, *pools, others=(), **more):
    return given([service, *others], *pools, **more)[str(service.key)]


# Without wishes.


def test_the_lowest_free_address_of_the_first_pool():
    found = given([service("shop/b"), service("shop/a")], pool("z", "172.6.6.6/32"), LAN)
    assert {name: (each.addresses, each.pool) for name, each in found.items()} == {
        "shop/a": (("192.168.15.0",), "lan"),
        "shop/b": (("192.168.15.1",), "lan"),
    }


def test_what_is_used_up_is_said():
    found = given([service("shop/a"), service("shop/b")], pool("one", "172.6.6.6/32"))
    assert found["shop/a"].addresses == ("172.6.6.6",)
    assert str(found["shop/b"].refusal) == (
        "no pool has IPv4 for it (one is used up): add addresses to a pool, or free some"
    )


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ([], "there is no pool: make an IPAddressPool"),
        ([pool("bad", "0.0.0.0/0")], "pool bad is refused, '0.0.0.0/0' is all addresses"),
        ([pool("asked", "172.6.6.6/32", auto_assign=False)], "ask for one by name (asked; autoAssign is false"),
        ([pool("six", "fd00::/64")], "six has no IPv4 addresses"),
    ],
)
def test_why_there_is_none(pools, said):
    decision = one(service("shop/web"), *pools)
    assert decision.addresses == ()
    assert said in str(decision.refusal)


def test_buggy_addresses_are_not_given():
    assert one(service("shop/web"), pool("p", "192.168.15.0/24", avoid_buggy=True)).addresses == ("192.168.15.1",)


def test_a_service_without_cluster_ip_waits():
    assert "IP families are unknown" in str(one(service("shop/web", ips=()), LAN).refusal)


# Class, type.


@pytest.mark.parametrize(
    ("own", "theirs", "ours"), [("", "", True), ("", "x", False), ("x", "", False), ("x", "x", True)]
)
def test_the_class_says_whose_it_is(own, theirs, ours):
    web = service("shop/web", load_balancer_class=theirs)
    assert bool(given([web], LAN, load_balancer_class=own)) is ours


def test_a_service_of_another_type_is_nobodys():
    assert given([service("shop/web", type="ClusterIP")], LAN) == {}


@pytest.mark.parametrize("marked", [True, False])
def test_a_service_that_changed_its_type_is_cleared(marked):
    notes = {"ip-allocated-from-pool": "gone"} if marked else {}
    held = "192.0.2.1" if marked else "192.168.15.1"
    decision = one(web := service("shop/web", held, type="NodePort", notes=notes), LAN)
    assert (decision.addresses, decision.cause) == ((), "it is of type NodePort now")
    written = required_changes(web, decision)
    assert written.status["status"] == {"loadBalancer": {"ingress": None}}
    assert [told.reason for told in written.events] == ["ClearAssignment"]


# Whatever a status holds is never given away.


@pytest.mark.parametrize(
    "holder",
    [
        service("shop/a", "192.168.15.0"),
        service("shop/z", "192.168.15.0"),
        service("shop/z", "192.168.15.0", load_balancer_class="other"),
        service("shop/z", "192.168.15.0", type="ClusterIP"),
        service("shop/z", "192.168.15.0", type="ClusterIP", notes={"ip-allocated-from-pool": "lan"}),
        service("shop/z", "192.168.15.0", deletion_timestamp="2026-01-01T00:00:00Z"),
        service("shop/z", "192.168.15.0", ips=("fd6e::5",)),
        service("shop/z", "192.168.15.0", notes={"address-pool": "elsewhere"}),
    ],
    ids=str,
)
def test_what_a_status_holds_is_given_to_nobody_else(holder):
    assert one(service("shop/m"), LAN, others=[holder]).addresses == ("192.168.15.1",)
    wish = service("shop/n", notes={"loadBalancerIPs": "192.168.15.0"})
    decision = one(wish, LAN, others=[holder])
    assert decision.addresses == ()
    assert f"{holder.key} has it" in str(decision.refusal)


def test_what_an_unreadable_service_holds_is_held():
    more = {"unreadable": {NamespacedName("shop", "odd"): ("192.168.15.0",)}}
    assert one(service("shop/web"), LAN, **more).addresses == ("192.168.15.1",)
    wish = service("shop/web", notes={"loadBalancerIPs": "192.168.15.0", "allow-shared-ip": "k"})
    assert "cannot be decoded" in str(one(wish, LAN, **more).refusal)


def test_what_is_promised_is_held_and_comes_back():
    promised = {NamespacedName("shop", "z"): ("192.168.15.0",)}
    found = given([service("shop/a"), service("shop/z")], LAN, pending=promised)
    assert found["shop/a"].addresses == ("192.168.15.1",)
    assert found["shop/z"].addresses == ("192.168.15.0",)


def test_a_promise_in_exchange_for_what_goes():
    web = service("shop/web", "192.168.15.3", notes={"address-pool": "two"})
    promised = {web.key: ("172.6.6.7",)}
    assert one(web, LAN, pool("two", "172.6.6.6-172.6.6.7"), pending=promised).addresses == ("172.6.6.7",)


# What it has it keeps.


@pytest.mark.parametrize(
    ("web", "pools", "addresses", "cause"),
    [
        (service("shop/web", "192.168.15.9"), [LAN], ["192.168.15.9"], ""),
        (
            service("shop/web", "192.168.15.9"),
            [pool("lan", "192.168.15.0/28", auto_assign=False)],
            ["192.168.15.9"],
            "",
        ),
        (service("shop/web", "192.168.15.9", notes={"address-pool": "lan"}), [LAN], ["192.168.15.9"], ""),
        (service("shop/web", "192.168.15.9", notes={"ip-allocated-from-pool": "gone"}), [LAN], ["192.168.15.9"], ""),
        (
            service("shop/web", "192.168.99.9", notes={"ip-allocated-from-pool": "gone"}),
            [LAN],
            ["192.168.15.0"],
            "no pool has it any more",
        ),
        (
            service("shop/web", "192.168.15.9", notes={"address-pool": "two"}),
            [LAN, pool("two", "172.6.6.6/32")],
            ["172.6.6.6"],
            "it asks for pool two",
        ),
        (
            service("shop/web", "192.168.15.9", notes={"loadBalancerIPs": "192.168.15.8"}),
            [LAN],
            ["192.168.15.8"],
            "it asks for 192.168.15.8",
        ),
        (service("shop/web", "192.168.15.9", load_balancer_ip="192.168.99.1"), [LAN], [], "it asks for 192.168.99.1"),
        (
            service("shop/web", "192.168.15.0"),
            [pool("lan", "192.168.15.0/28", avoid_buggy=True)],
            ["192.168.15.1"],
            "avoidBuggyIPs",
        ),
        (
            service("shop/web", "192.168.15.9"),
            [
                pool("lan", "192.168.15.0/28", allocation=ServiceAllocation(namespaces=("other",))),
                pool("x", "172.6.6.6/32"),
            ],
            ["172.6.6.6"],
            "serviceAllocation",
        ),
        (
            service("shop/web", "192.168.15.9", ips=(V6,), notes={"ip-allocated-from-pool": "lan"}),
            [LAN, BOTH],
            ["fd00::"],
            "no IPv4 address any more",
        ),
        (service("shop/web", "192.168.15.9", "192.168.15.8"), [LAN], ["192.168.15.9"], "another IPv4 address"),
        (service("shop/web", "192.168.15.9", notes={"loadBalancerIPs": "nonsense"}), [LAN], ["192.168.15.9"], ""),
    ],
)
def test_keeping(web, pools, addresses, cause):
    decision = one(web, *pools)
    assert list(decision.addresses) == addresses
    assert cause in decision.cause
    assert bool(cause) is bool(decision.cause)


def test_two_that_hold_the_same():
    a, b = service("shop/a", "192.168.15.9"), service("shop/b", "192.168.15.9")
    found = given([a, b], LAN)
    assert found["shop/a"].addresses == ("192.168.15.9",)
    assert found["shop/b"].addresses == ("192.168.15.0",)
    assert "shop/a has it" in found["shop/b"].cause
    # Who is known to have had it stays.
    found = given([a, b], LAN, settled=frozenset({b.key}))
    assert found["shop/b"].addresses == ("192.168.15.9",)


# Refused pools take nothing away.


@pytest.mark.parametrize("notes", [{}, {"ip-allocated-from-pool": "bad"}])
def test_addresses_of_a_refused_pool_stay(notes):
    web = service("shop/web", "172.6.6.6", notes=notes)
    decision = one(web, LAN, pool("bad", "172.6.6.0/29", "172.6.6.9/24"))
    assert decision.addresses == ("172.6.6.6",)
    assert "which is refused" in decision.note
    assert required_changes(web, decision).status is None


def test_a_refused_pool_does_not_make_foreign_addresses_ours():
    overlapping = pool("z", "192.168.15.9/32")
    assert one(service("shop/web", "198.51.100.7"), LAN, overlapping).foreign
    # Here nobody can tell: some of the pool cannot be read.
    assert one(service("shop/web", "198.51.100.7"), LAN, pool("z", "nonsense")).note.startswith("198.51.100.7 stays")


def test_addresses_stay_while_a_pool_cannot_be_read():
    assert one(service("shop/web", "172.6.6.6"), LAN, pools_unreadable=True).addresses == ("172.6.6.6",)


def test_a_new_pool_that_overlaps_takes_nothing_away():
    web = service("shop/web", "192.168.15.9", notes={"ip-allocated-from-pool": "lan"})
    decision = one(web, LAN, pool("a-new", "192.168.15.8/29"))
    assert (decision.addresses, decision.pool) == (("192.168.15.9",), "a-new")


def test_nothing_new_comes_from_a_refused_pool():
    wish = service("shop/web", notes={"address-pool": "bad"})
    assert str(one(wish, LAN, pool("bad", "0.0.0.0/0")).refusal).startswith("pool bad is refused: '0.0.0.0/0' is all")


# A foreign writer.


def test_a_status_that_another_controller_writes_is_left_alone():
    for web in (service("shop/web", "198.51.100.7"), service("shop/web", ingress_names=("lb.example",))):
        decision = one(web, LAN)
        assert decision.foreign
        written = required_changes(web, decision)
        assert (written.status, written.pool, written.events) == (None, None, ())
        assert [told.reason for told in written.standing] == ["ForeignStatus"]


def test_who_writes_over_it_is_not_fought():
    web = service("shop/web", "198.51.100.7", notes={"ip-allocated-from-pool": "lan"})
    assert one(web, LAN, overwritten=frozenset({web.key})).foreign
    assert not one(web, LAN).foreign


def test_ip_mode_proxy_is_made_vip():
    web = msgspec.structs.replace(service("shop/web"), ingress=(LoadBalancerIngress(ip="192.168.15.3", proxy=True),))
    written = required_changes(web, one(web, LAN))
    assert written.status["status"]["loadBalancer"]["ingress"] == [{"ip": "192.168.15.3", "ipMode": "VIP"}]
    assert written.events == ()


# Wishes.


@pytest.mark.parametrize(
    ("notes", "fields", "outcome"),
    [
        ({"loadBalancerIPs": "192.168.15.7"}, {}, ["192.168.15.7"]),
        ({}, {"load_balancer_ip": "192.168.15.7"}, ["192.168.15.7"]),
        ({"loadBalancerIPs": "192.168.15.7", "address-pool": "lan"}, {}, ["192.168.15.7"]),
        ({"address-pool": "asked"}, {}, ["172.6.6.6"]),
        ({"loadBalancerIPs": "172.6.6.6"}, {}, ["172.6.6.6"]),
        ({"loadBalancerIPs": "192.168.15.7"}, {"load_balancer_ip": "192.168.15.7"}, "keep one of them"),
        ({"loadBalancerIPs": "192.168.15.7, fd00::1"}, {}, "its IP families are IPv4"),
        ({"loadBalancerIPs": "fd00::1"}, {}, "it asks for fd00::1, but its IP families are IPv4"),
        ({"loadBalancerIPs": "hello"}, {}, "'hello' is not an IP address"),
        ({"loadBalancerIPs": "127.0.0.1"}, {}, "is a loopback address"),
        ({"loadBalancerIPs": "192.168.15.7,192.168.15.8"}, {}, "at most one address of each IP family"),
        ({"loadBalancerIPs": "192.168.99.1"}, {}, "is in no pool that can be used: ask for an address of a pool"),
        ({"loadBalancerIPs": "172.7.7.7"}, {}, "pool bad has it but is refused"),
        ({"loadBalancerIPs": "192.168.15.7", "address-pool": "asked"}, {}, "but the address is in pool lan"),
        ({"address-pool": "nowhere"}, {}, "there is no pool nowhere"),
        ({"address-pool": "buggy", "loadBalancerIPs": "192.168.17.0"}, {}, "end in .0 or .255"),
        ({"address-pool": "closed"}, {}, "pool closed is for other Services"),
        ({"loadBalancerIPs": "192.168.18.1"}, {}, "pool closed is for other Services"),
    ],
)
def test_wishes(notes, fields, outcome):
    pools = [
        LAN,
        pool("asked", "172.6.6.6/32", auto_assign=False),
        pool("bad", "172.7.7.0/24", "172.7.7.0/24"),
        pool("buggy", "192.168.17.0/24", avoid_buggy=True),
        pool("closed", "192.168.18.0/24", allocation=ServiceAllocation(namespaces=("other",))),
    ]
    decision = one(service("shop/web", notes=notes, **fields), *pools)
    if isinstance(outcome, str):
        assert decision.addresses == ()
        assert outcome in str(decision.refusal)
    else:
        assert list(decision.addresses) == outcome


def test_the_old_prefix_is_read():
    web = build.service(
        "shop/web", V4, type="LoadBalancer", annotations=(("metallb.universe.tf/loadBalancerIPs", "192.168.15.7"),)
    )
    assert one(web, LAN).addresses == ("192.168.15.7",)


def test_who_asks_for_one_address_comes_before_who_takes_any():
    any_ = service("shop/a")
    wish = service("shop/z", notes={"loadBalancerIPs": "192.168.15.0"})
    assert one(wish, LAN, others=[any_]).addresses == ("192.168.15.0",)


# serviceAllocation.


def allocation(**fields):
    return ServiceAllocation(**fields)


@pytest.mark.parametrize(
    ("wanted", "serves"),
    [
        (allocation(), True),
        (allocation(namespaces=("shop",)), True),
        (allocation(namespaces=("other",)), False),
        (allocation(namespaces=("other",), namespace_selectors=(parse_selector("team=a"),)), True),
        (allocation(namespace_selectors=(parse_selector("team=b"), parse_selector("team in (a)"))), True),
        (allocation(namespace_selectors=(parse_selector("team=b"),)), False),
        (allocation(service_selectors=(parse_selector("tier=front"),)), True),
        (allocation(service_selectors=(parse_selector("tier=back"),)), False),
        (allocation(namespaces=("shop",), service_selectors=(parse_selector("tier=back"),)), False),
        (allocation(namespaces=("other",), service_selectors=(parse_selector("tier=front"),)), False),
    ],
)
def test_whom_a_pool_is_for(wanted, serves):
    web = service("shop/web", labels=(("tier", "front"),))
    decision = one(web, pool("p", "172.6.6.6/32", allocation=wanted), namespaces={"shop": (("team", "a"),)})
    assert bool(decision.addresses) is serves


def test_pools_for_few_come_first_by_priority():
    pools = [
        LAN,
        pool("a", "172.6.1.0/32", allocation=allocation()),
        pool("b", "172.6.2.0/32", allocation=allocation(priority=20)),
        pool("c", "172.6.3.0/32", allocation=allocation(priority=10)),
    ]
    found = given([service(f"shop/{index}") for index in "1234"], *pools)
    assert [found[f"shop/{index}"].pool for index in "1234"] == ["c", "b", "a", "lan"]


# Sharing.


def sharer(name, key="k", port=80, protocol=Protocol.TCP, held=(), **fields):
    ports = (ServicePort(port=port, protocol=protocol),)
    notes = fields.pop("notes", {}) | ({"allow-shared-ip": key} if key else {})
    return service(name, *held, notes=notes, ports=ports, **fields)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (sharer("shop/b", port=81), ""),
        (sharer("shop/b", protocol=Protocol.UDP), ""),
        (sharer("shop/b", port=81, external_policy_local=True), "must select the same pods"),
        (sharer("shop/b"), "both use port 80/TCP"),
        (sharer("shop/b", key="other", port=81), "allow-shared-ip differ"),
        (sharer("shop/b", key="", port=81), "has no annotation metallb.io/allow-shared-ip"),
    ],
)
def test_sharing(other, said):
    first = sharer("shop/a", held=["192.168.15.4"])
    wish = msgspec.structs.replace(
        other, annotations=tuple(sorted((*other.annotations, (PREFIX + "loadBalancerIPs", "192.168.15.4"))))
    )
    decision = one(wish, LAN, others=[first])
    assert bool(decision.addresses) is not bool(said)
    assert said in str(decision.refusal)
    # Without asking for it, they share where they may, and get one of their own where not.
    unasked = one(other, LAN, others=[first]).addresses
    assert unasked == (("192.168.15.0",) if said else ("192.168.15.4",))


@pytest.mark.parametrize(("selector", "shared"), [((("app", "x"),), True), ((("app", "y"),), False)])
def test_sharing_with_policy_local(selector, shared):
    first = sharer("shop/a", held=["192.168.15.4"], external_policy_local=True, selector=(("app", "x"),))
    other = sharer("shop/b", port=81, external_policy_local=True, selector=selector)
    assert (one(other, LAN, others=[first]).addresses == ("192.168.15.4",)) is shared


def test_all_sharers_must_agree():
    holders = [sharer("shop/a", held=["192.168.15.4"]), sharer("shop/b", port=81, held=["192.168.15.4"])]
    assert one(sharer("shop/c", port=81), LAN, others=holders).addresses == ("192.168.15.0",)
    assert one(sharer("shop/c", port=82), LAN, others=holders).addresses == ("192.168.15.4",)


def test_sharers_of_one_run_share():
    found = given([sharer("shop/a"), sharer("shop/b", port=81)], LAN)
    assert found["shop/a"].addresses == found["shop/b"].addresses == ("192.168.15.0",)


def test_who_ends_sharing_gets_another():
    a, b = sharer("shop/a", held=["192.168.15.4"]), sharer("shop/b", key="", port=81, held=["192.168.15.4"])
    found = given([a, b], LAN)
    assert found["shop/a"].addresses == ("192.168.15.4",)
    assert found["shop/b"].addresses == ("192.168.15.0",)


# Dual stack.

DUAL = (V4, V6)


@pytest.mark.parametrize(
    ("policy", "pools", "addresses", "said"),
    [
        ("RequireDualStack", [LAN, BOTH], ["192.168.16.0", "fd00::"], ""),
        ("PreferDualStack", [LAN, BOTH], ["192.168.16.0", "fd00::"], ""),
        ("RequireDualStack", [LAN, pool("six", "fd01::/64")], [], "no pool has IPv4 and IPv6 for it (lan has no IPv6"),
        ("PreferDualStack", [LAN, pool("six", "fd01::/64")], ["192.168.15.0"], ""),
        ("PreferDualStack", [pool("six", "fd01::/64")], ["fd01::"], ""),
    ],
)
def test_dual_stack(policy, pools, addresses, said):
    decision = one(service("shop/web", ips=DUAL, ip_family_policy=policy), *pools)
    assert list(decision.addresses) == addresses
    assert said in str(decision.refusal)


def test_the_order_is_that_of_the_families():
    decision = one(service("shop/web", ips=(V6, V4), ip_family_policy="RequireDualStack"), BOTH)
    assert decision.addresses == ("fd00::", "192.168.16.0")


def test_the_second_address_is_added_from_the_same_pool():
    web = service("shop/web", "192.168.16.2", ips=DUAL, ip_family_policy="PreferDualStack")
    assert one(web, pool("a", "fd09::/64"), BOTH).addresses == ("192.168.16.2", "fd00::")
    assert one(web, pool("a", "fd09::/64"), pool("both", "192.168.16.0/30")).addresses == ("192.168.16.2",)


def test_a_family_that_goes_takes_its_address_along():
    web = service("shop/web", "192.168.16.2", "fd00::2", ips=(V4,), notes={"ip-allocated-from-pool": "both"})
    decision = one(web, BOTH)
    assert decision.addresses == ("192.168.16.2",)
    assert decision.cause == "fd00::2: it has no IPv6 address any more"


def test_one_that_must_have_both_has_both_or_none():
    web = service("shop/web", "192.168.15.3", ips=DUAL, ip_family_policy="RequireDualStack")
    assert one(web, LAN, BOTH).addresses == ("192.168.16.0", "fd00::")
    alone = one(web, LAN)
    assert alone.addresses == ()
    assert alone.cause == "an address of each IP family is required"


@pytest.mark.parametrize(
    ("wish", "policy", "outcome"),
    [
        ("192.168.16.1,fd00::1", "RequireDualStack", ["192.168.16.1", "fd00::1"]),
        ("fd00::1,192.168.16.1", "RequireDualStack", ["fd00::1", "192.168.16.1"]),
        ("192.168.16.1", "RequireDualStack", "ask for an address of each IP family"),
        ("192.168.16.1", "PreferDualStack", ["192.168.16.1"]),
        ("192.168.16.1,fd09::1", "RequireDualStack", "are in the pools both and six"),
    ],
)
def test_wishes_of_both_families(wish, policy, outcome):
    web = service("shop/web", ips=DUAL, ip_family_policy=policy, notes={"loadBalancerIPs": wish})
    decision = one(web, BOTH, pool("six", "fd09::/64"))
    if isinstance(outcome, str):
        assert outcome in str(decision.refusal)
    else:
        assert list(decision.addresses) == outcome


# What is written.


def test_what_is_written_and_told():
    web = service("shop/web", "192.168.99.9", notes={"ip-allocated-from-pool": "gone"}, resource_version="7")
    written = required_changes(web, one(web, LAN))
    assert written.status == {
        "metadata": {"resourceVersion": "7"},
        "status": {"loadBalancer": {"ingress": [{"ip": "192.168.15.0", "ipMode": "VIP"}]}},
    }
    assert written.pool == "lan"
    assert [(told.reason, told.text) for told in written.events] == [
        ("ClearAssignment", "192.168.99.9 taken away: 192.168.99.9: no pool has it any more"),
        ("IPAllocated", "assigned 192.168.15.0 from pool lan"),
    ]


def test_nothing_is_written_when_all_is_well():
    web = service("shop/web", "192.168.15.3", notes={"ip-allocated-from-pool": "lan"})
    assert required_changes(web, one(web, LAN)) == required_changes(web, one(web, LAN)).__class__()


def test_a_refusal_stands():
    web = service("shop/web")
    written = required_changes(web, one(web))
    assert (written.status, written.pool) == (None, None)
    assert [told.reason for told in written.standing] == ["AllocationFailed"]


def test_from_a_refused_pool_nothing_is_taken_for_want_of_the_other_family():
    web = service("shop/web", "172.6.6.6", ips=DUAL, ip_family_policy="RequireDualStack")
    decision = one(web, BOTH, pool("bad", "172.6.6.6/32", "nonsense"))
    assert decision.addresses == ("172.6.6.6",)


def test_five_thousand_services_and_a_pool_of_millions():
    """Nothing here grows with the size of the pool, nor with the square of the Services."""
    crowd = [service(f"shop/s{number:04}") for number in range(5000)]
    found = given(crowd, pool("huge", "11.0.0.0/8", "fd00::/32"))
    assert len({each.addresses for each in found.values()}) == 5000
    assert found["shop/s4999"].addresses == ("11.0.19.135",)
