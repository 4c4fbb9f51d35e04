"""The Store folds events into the present."""

from narthex.model.objects import EndpointSlice, NamespacedName, Pod
from narthex.model.store import Delete, Store, Synced, Upsert
from narthex.testing.build import endpoint, endpoint_slice, service

WEB = NamespacedName("shop", "web")


def test_starts_empty_and_unsynced():
    assert not Store().snapshot.synced
    assert not Store().snapshot.services


def test_an_event_that_changes_nothing_keeps_the_snapshot():
    store = Store()
    first = store.apply(Upsert(service("shop/web", "10.110.0.5")))
    assert store.apply(Upsert(service("shop/web", "10.110.0.5"))) is first
    assert store.apply(Delete("Service", NamespacedName("shop", "other"))) is first
    assert store.apply(Delete("EndpointSlice", NamespacedName("shop", "other"))) is first


def test_an_old_snapshot_stays_as_it_was():
    store = Store()
    first = store.apply(Upsert(service("shop/web", "10.110.0.5")))
    store.apply(Delete("Service", WEB))
    assert WEB in first.services
    assert WEB not in store.snapshot.services


def test_changed_names_services_and_the_owners_of_slices():
    store = Store()
    store.apply(Upsert(service("shop/web", "10.110.0.5")))
    store.apply(Upsert(endpoint_slice("shop/db", endpoint("10.64.1.10"))))
    assert store.take_changed() == {WEB, NamespacedName("shop", "db")}
    assert store.take_changed() == set()


def test_a_slice_that_changes_its_owner_leaves_the_old_one():
    store = Store()
    store.apply(Upsert(endpoint_slice("shop/web", endpoint("10.64.1.10"))))
    moved = EndpointSlice(namespace="shop", name="web-1", service_name="db")
    store.apply(Upsert(moved))
    assert WEB not in store.snapshot.slices
    assert store.snapshot.slices[NamespacedName("shop", "db")]["web-1"] == moved
    assert store.take_changed() == {WEB, NamespacedName("shop", "db")}
    store.apply(Upsert(EndpointSlice(namespace="shop", name="web-1")))
    assert not store.snapshot.slices


def test_synced_is_kept():
    store = Store()
    assert store.apply(Synced()).synced
    assert store.apply(Upsert(service("shop/web", "10.110.0.5"))).synced


def test_changed_pods_are_named_apart():
    store = Store()
    store.apply(Upsert(Pod(namespace="shop", name="web-0", ips=("10.64.1.10",))))
    assert (store.take_changed_pods(), store.take_changed()) == ({NamespacedName("shop", "web-0")}, set())
    store.apply(Upsert(Pod(namespace="shop", name="web-0", ips=("10.64.1.10",))))
    assert store.take_changed_pods() == set()
    store.apply(Delete("Pod", NamespacedName("shop", "web-0")))
    assert store.take_changed_pods() == {NamespacedName("shop", "web-0")}
