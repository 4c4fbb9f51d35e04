"""A name's way through a search list, by table: resolv.conf(5), and the records of the cluster."""

import pytest

from narthex.dns.search_list import SearchPath, candidates, look_up, pod_search
from narthex.testing.build import endpoint, endpoint_slice, service, snapshot

LIST = ("shop.svc.cluster.local.", "svc.cluster.local.", "cluster.local.")
DOMAIN = "cluster.local"


@pytest.mark.parametrize(
    ("name", "ndots", "asked"),
    [
        ("web", 5, [f"web.{zone}" for zone in LIST] + ["web."]),
        ("web.shop", 1, ["web.shop."] + [f"web.shop.{zone}" for zone in LIST]),
        ("a.b.c.d.e", 5, [f"a.b.c.d.e.{zone}" for zone in LIST] + ["a.b.c.d.e."]),
        ("a.b.c.d.e.f", 5, ["a.b.c.d.e.f."] + [f"a.b.c.d.e.f.{zone}" for zone in LIST]),
        ("web.shop.svc.cluster.local.", 5, ["web.shop.svc.cluster.local."]),
        ("web", 0, ["web."] + [f"web.{zone}" for zone in LIST]),
    ],
)
def test_the_order_of_names(name, ndots, asked):
    assert list(candidates(name, SearchPath(LIST, ndots))) == asked


def test_what_becomes_too_long_is_left_out():
    name = ".".join(["a" * 60] * 4)
    assert candidates(name, SearchPath(LIST)) == (f"{name}.",)


@pytest.mark.parametrize("name", ["", "a..b", "a b", "a" * 64, "ü.de"])
def test_what_is_no_name(name):
    with pytest.raises(ValueError, match=r"empty|blank|holds|label"):
        candidates(name, SearchPath(LIST))


def test_a_pod_searches_its_own_namespace_first():
    assert pod_search("shop", "Cluster.Local") == (
        ("shop.svc.Cluster.Local.", "svc.Cluster.Local.", "Cluster.Local."),
        5,
    )


@pytest.fixture(scope="module")
def shop():
    return snapshot(
        service("shop/web", "10.110.0.1", "fd6e::1"),
        service("other/db", "None", type="ClusterIP"),
        endpoint_slice("other/db", endpoint("10.64.1.5"), endpoint("10.64.1.6")),
        service("shop/far", type="ExternalName", external_name="example.org"),
        service("shop/near", type="ExternalName", external_name="web.shop.svc.cluster.local"),
        service("cluster/x", "10.110.0.9"),
    )


@pytest.mark.parametrize(
    ("namespace", "name", "answers", "addresses"),
    [
        ("shop", "web", ["addresses"], ("10.110.0.1", "fd6e::1")),
        ("other", "web.shop", ["no such name", "addresses"], ("10.110.0.1", "fd6e::1")),
        ("other", "db", ["addresses"], ("10.64.1.5", "10.64.1.6")),
        ("shop", "db", ["no such name"] * 3 + ["elsewhere"], ()),
        ("shop", "far", ["elsewhere"], ()),
        ("shop", "near", ["addresses"], ("10.110.0.1", "fd6e::1")),
        ("shop", "shop", ["no such name", "nothing", "no such name", "elsewhere"], ()),
    ],
)
def test_what_a_pod_finds(shop, namespace, name, answers, addresses):
    way = look_up(name, pod_search(namespace, DOMAIN), shop, DOMAIN)
    assert [each.answer for each in way.asked] == answers
    assert tuple(sorted(way.addresses)) == addresses


def test_an_alias_that_leads_away(shop):
    assert look_up("far", pod_search("shop", DOMAIN), shop, DOMAIN).asked[-1].alias == "example.org."


def test_where_musl_gives_up(shop):
    """A namespace's own name exists and is empty: glibc goes on behind it, musl does not."""
    assert look_up("shop", pod_search("shop", DOMAIN), shop, DOMAIN).musl_stops == "shop.svc.cluster.local."
    assert look_up("web", pod_search("shop", DOMAIN), shop, DOMAIN).musl_stops == ""
