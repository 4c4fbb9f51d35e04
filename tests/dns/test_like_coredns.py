"""Names whose answers once differed from those of CoreDNS."""

import pytest
from tests.dns.cluster import NOW, OBJECTS, Served, code, texts

from narthex.dns.corefile.settings import KubernetesSettings
from narthex.dns.zone.changes import ZoneTracker
from narthex.dns.zone.zone import Zone
from narthex.model.objects import Namespace
from narthex.model.store import Delete, Store, Synced, Upsert
from narthex.testing.build import endpoint, endpoint_slice, service


@pytest.mark.parametrize(
    ("own", "type_", "answer"),
    [
        (("10.20.0.11",), "A", ["A 10.110.0.10"]),
        (("10.20.0.11",), "AAAA", []),
        (("10.20.0.11",), "TXT", []),
        (("192.0.2.1", "fd00::1"), "A", ["A 192.0.2.1"]),
        (("192.0.2.1", "fd00::1"), "AAAA", ["AAAA fd00::1"]),
        ((), "A", []),
    ],
)
def test_the_name_server_of_the_zone(own, type_, answer):
    """The Service in front of this server, or else its own addresses."""
    served = Served(*OBJECTS, own=own)
    # A template for names beside it must not hide it.
    assert code(served.ask("nx.dns.cluster.local")) == "NXDOMAIN"
    found = served.ask("ns.dns.cluster.local", type_)
    assert (code(found), texts(found.answer)) == ("NOERROR", answer)


def test_a_name_server_behind_a_service_without_a_cluster_ip():
    served = Served(
        service("kube-system/heads", "None"), endpoint_slice("kube-system/heads", endpoint("10.20.0.11", hostname="a"))
    )
    assert texts(served.ask("ns.dns.cluster.local").answer) == ["A 10.20.0.11"]


class Followed:
    """The zone of a server that follows an API server."""

    def __init__(self, *objects, **settings):
        self.store = Store()
        self.tracker = ZoneTracker(KubernetesSettings(zones=("cluster.local.",), **settings), lists_namespaces=True)
        self.zone = Zone()
        self.apply(*map(Upsert, objects), Synced())

    def apply(self, *events):
        self.store.apply_all(events)
        store = self.store
        change = self.tracker.update(store.snapshot, store.take_changed(), store.take_changed_pods(), NOW)
        self.zone.apply(change)

    def exists(self, *labels):
        return self.zone.find(b"".join(bytes((len(label),)) + label.encode() for label in labels)) is not None


def test_a_namespace_that_is_deleted_takes_its_names_with_it():
    web = service("shop/web", "10.110.0.1")
    followed = Followed(Namespace(name="shop"), Namespace(name="default"), web)
    assert followed.exists("shop", "svc") and followed.exists("web", "shop", "svc")
    followed.apply(Delete("Namespace", Namespace(name="shop").key))
    assert not followed.exists("shop", "svc") and not followed.exists("web", "shop", "svc")
    followed.apply(Upsert(Namespace(name="shop")))
    assert followed.exists("web", "shop", "svc")


@pytest.mark.parametrize("first", [True, False], ids=["namespaces first", "services first"])
def test_the_order_of_the_lists_makes_no_difference(first):
    namespace, web = Upsert(Namespace(name="shop")), Upsert(service("shop/web", "10.110.0.1"))
    other = Upsert(service("gone/web", "10.110.0.2"))
    followed = Followed()
    for event in (namespace, web, other) if first else (other, web, namespace):
        followed.apply(event)
    assert followed.exists("web", "shop", "svc") and not followed.exists("web", "gone", "svc")


def test_a_server_without_namespaces_serves_the_names_of_services():
    """As manifests do, which rarely contain Namespaces."""
    assert Followed(service("shop/web", "10.110.0.1")).exists("web", "shop", "svc")
