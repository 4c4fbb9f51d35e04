"""Addresses that a Service has released go to other Services last."""

from narthex.lb.allocate import AllocationInput, allocate
from narthex.lb.pools import validate_pools
from narthex.lb.released import HOLD_SECONDS, ReleasedAddresses
from narthex.model import IPAddressPool, NamespacedName
from narthex.testing import build

POOL = IPAddressPool(name="lan", namespace="metallb-system", addresses=("192.0.2.0/31",))
A, B = NamespacedName("shop", "a"), NamespacedName("shop", "b")


def service(key, *held):
    return build.service(str(key), "10.96.0.1", type="LoadBalancer", balancers=held)


def address(key, held_back):
    services = [service(key)]
    decided = allocate(AllocationInput(services=services, pools=validate_pools([POOL]), held_back=held_back))
    return decided[key].addresses[0]


def test_an_address_rests_for_a_time():
    released = ReleasedAddresses()
    assert released.observe([service(A, "192.0.2.0")], 0.0) == {}
    assert released.observe([], 1.0) == released.observe([], HOLD_SECONDS) == {"192.0.2.0": A}
    assert released.observe([], 1.0 + HOLD_SECONDS) == {}


def test_an_address_in_use_does_not_rest():
    released = ReleasedAddresses()
    released.observe([service(A, "192.0.2.0")], 0.0)
    released.observe([], 1.0)
    assert released.observe([service(B, "192.0.2.0")], 2.0) == {}


def test_others_get_it_last_and_its_service_first():
    assert address(B, {"192.0.2.0": A}) == "192.0.2.1"
    assert address(A, {"192.0.2.0": A}) == "192.0.2.0"
    assert address(B, {"192.0.2.0": A, "192.0.2.1": A}) == "192.0.2.0"


def test_two_services_share_what_is_left():
    services = [service(A), service(B)]
    held_back = {"192.0.2.0": NamespacedName("shop", "gone")}
    decided = allocate(AllocationInput(services=services, pools=validate_pools([POOL]), held_back=held_back))
    assert [decided[key].addresses for key in (A, B)] == [("192.0.2.1",), ("192.0.2.0",)]
