"""What one family's sync reports after failures."""

import pytest

from narthex.linux.run import ApplyError
from narthex.model.net import IPFamily
from narthex.model.store import Store, Synced, Upsert
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.sync import FamilySync
from narthex.testing.build import CONFIG, port_name, service
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
    assert not sync.sync(snapshot, frozenset(), read_back=True).wrote
    target.left_alone = False
    done = sync.sync(snapshot, frozenset(), read_back=True)
    assert done.wrote and done.drift
