"""What one family's sync reports after failures."""

import pytest

from narthex.model.net import IPFamily
from narthex.model.store import Delete, Store, Synced, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.sync import FamilySync, Look
from narthex.testing.build import CONFIG, endpoint, endpoint_slice, node, plan, port_name, service
from narthex.testing.fakes import FakeBackend, FakeClock, FakeRules, FakeTarget


def test_what_changed_across_a_plan_that_never_got_into_the_kernel():
    """Plans 1, 2, 3; 2 failed: the report compares 3 with 1, whose lineage does not reach that far."""
    store, backend = Store(), FakeBackend()
    target = FakeTarget(backend, FakeRules())
    sync = FamilySync(IPFamily.IPV4, Planner(CONFIG, IPFamily.IPV4), backend, target, FakeClock())
    store.apply(Upsert(service("shop/a", "10.110.0.1")))
    sync.sync(store.apply(Synced()), store.take_changed())
    target.failures.append("no")
    with pytest.raises(ApplyError):
        sync.sync(store.apply(Upsert(service("shop/b", "10.110.0.2"))), store.take_changed())
    done = sync.sync(store.apply(Upsert(service("shop/c", "10.110.0.3"))), store.take_changed())
    assert done.changed == {port_name("shop/b:http"), port_name("shop/c:http")}


class Telling(FakeTarget):
    """A target that says whether it was left alone."""

    left_alone = True

    def unchanged(self):
        return self.left_alone


def test_a_kernel_that_nobody_touched_is_not_read_again():
    store, backend = Store(), FakeBackend()
    target = Telling(backend, FakeRules())
    sync = FamilySync(IPFamily.IPV4, Planner(CONFIG, IPFamily.IPV4), backend, target, FakeClock())
    store.apply(Upsert(service("shop/a", "10.110.0.1")))
    snapshot = store.apply(Synced())
    sync.sync(snapshot, store.take_changed())
    target.rules = FakeRules()
    assert not sync.sync(snapshot, frozenset(), look=Look.ALL).wrote
    target.left_alone = False
    done = sync.sync(snapshot, frozenset(), look=Look.ALL)
    assert done.wrote and done.drift


def restarted(mode, *objects, doubt=300.0, clock=None, earlier=()):
    """Return the sync of a process that starts over the rules that an earlier one wrote, its store, and its target."""
    store, backend = Store(), BACKENDS[mode]
    rules = backend.render(plan(*earlier)) if earlier else None
    target = FakeTarget(backend, backend.render(plan()), rules)
    sync = FamilySync(IPFamily.IPV4, Planner(CONFIG, IPFamily.IPV4), backend, target, clock or FakeClock(), doubt=doubt)
    for obj in (node(), *objects):
        store.apply(Upsert(obj))
    return sync, store, target


KUBERNETES = service("default/kubernetes", "10.110.0.1"), endpoint_slice("default/kubernetes", endpoint("10.20.0.2"))
SHOP = [
    obj
    for number in range(5)
    for obj in (
        service(f"shop/a{number}", f"10.110.0.{10 + number}"),
        endpoint_slice(f"shop/a{number}", endpoint(f"10.64.1.{10 + number}")),
    )
]
KEEPING = [mode for mode in BACKENDS if mode != "userspace"]


@pytest.mark.parametrize("mode", KEEPING)
@pytest.mark.parametrize("listed", [(), KUBERNETES], ids=["nothing", "the API server alone"])
def test_a_first_list_without_services_removes_nothing_for_a_while(mode, listed):
    clock = FakeClock()
    sync, store, target = restarted(mode, *listed, clock=clock, earlier=(*KUBERNETES, *SHOP))
    snapshot, before = store.apply(Synced()), target.rules
    done = sync.sync(snapshot, store.take_changed())
    assert done.doubted_until == clock.now() + 300.0 and not target.applied
    clock.advance(299.0)
    assert sync.sync(snapshot, frozenset(), look=Look.ALL).doubted_until == clock.now() + 1.0
    assert target.rules == before
    clock.advance(1.0)
    assert sync.sync(snapshot, frozenset(), look=Look.ALL).wrote
    assert sync.backend.served(target.rules) == sync.backend.served(sync.backend.render(plan(*listed)))


@pytest.mark.parametrize("mode", KEEPING)
def test_services_without_endpoints_do_not_end_the_doubt(mode):
    """A server that regains its data may list Services before their endpoints."""
    services, slices = SHOP[::2], SHOP[1::2]
    sync, store, target = restarted(mode, *services, earlier=SHOP)
    before = target.rules
    assert sync.sync(store.apply(Synced()), store.take_changed()).doubted_until
    assert target.rules == before
    for obj in slices:
        snapshot = store.apply(Upsert(obj))
    assert sync.sync(snapshot, store.take_changed()).doubted_until is None
    assert sync.backend.served(target.rules) == sync.backend.served(before)


@pytest.mark.parametrize("mode", KEEPING)
def test_a_service_that_appears_ends_the_doubt(mode):
    sync, store, target = restarted(mode, earlier=SHOP)
    assert sync.sync(store.apply(Synced()), store.take_changed()).doubted_until
    target.rules = sync.backend.render(plan(*SHOP[2:]))
    for obj in SHOP[:2]:
        snapshot = store.apply(Upsert(obj))
    assert sync.sync(snapshot, store.take_changed()).wrote
    assert sync.backend.served(target.rules) == sync.backend.served(sync.backend.render(plan(*SHOP[:2])))


@pytest.mark.parametrize(
    ("mode", "earlier", "more"),
    [("nftables", SHOP[:4], {}), ("nftables", (), {}), ("userspace", SHOP, {}), ("iptables", SHOP, {"doubt": 0.0})],
    ids=["few Services", "no rules", "rules that do not work alone", "files"],
)
def test_other_first_lists_take_effect_at_once(mode, earlier, more):
    sync, store, target = restarted(mode, earlier=earlier, **more)
    done = sync.sync(store.apply(Synced()), store.take_changed())
    assert done.doubted_until is None and done.wrote
    assert sync.backend.served(target.rules) == sync.backend.served(sync.backend.render(plan()))


def test_a_running_proxy_is_not_in_doubt():
    """Its source knows what it listed before, and doubts for itself."""
    sync, store, target = restarted("nftables", *SHOP)
    sync.sync(store.apply(Synced()), store.take_changed())
    for obj in SHOP:
        snapshot = store.apply(Delete(type(obj).__name__, obj.key))
    assert sync.sync(snapshot, store.take_changed()).doubted_until is None
    assert sync.backend.served(target.rules) == 0
