"""Rows of groups 2, 3 and 4: which endpoints a Service port may use."""

import pytest

from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import EndpointPort, EndpointSlice, ServicePort
from narthex.proxy.plan.select import ProxyLocation, candidates, select
from narthex.testing.build import NODE, endpoint, endpoint_slice

HTTP = ServicePort(name="http", port=80)
HERE = ProxyLocation(NODE, "east")


def found(*slices, port=HTTP, place=HERE):
    return candidates(slices, port, IPFamily.IPV4, place)


def cluster(*endpoints, place=HERE):
    pool = select(found(endpoint_slice("shop/web", *endpoints)), place, cluster=True, local=True).cluster
    return {each.address for each in pool.endpoints} if pool else set()


def local(*endpoints):
    pool = select(found(endpoint_slice("shop/web", *endpoints)), HERE, cluster=True, local=True).local
    return {each.address for each in pool.endpoints} if pool else set()


def dying(address, **fields):
    return endpoint(address, ready=False, serving=True, terminating=True, **fields)


class TestCandidates:
    @pytest.mark.row("2.12", "2.5")
    def test_union_of_slices_sorted_by_text(self):
        got = found(
            endpoint_slice("shop/web", endpoint("10.64.1.9"), port=8080),
            endpoint_slice("shop/web", endpoint("10.64.1.10"), port=80, suffix="2"),
        )
        assert [(each.address, each.port) for each in got.endpoints] == [("10.64.1.10", 80), ("10.64.1.9", 8080)]

    @pytest.mark.parametrize(
        "port",
        [
            EndpointPort(name="other", port=80),
            EndpointPort(name="http", protocol=Protocol.UDP, port=80),
            EndpointPort(name="http", port=None),
        ],
    )
    def test_ports_match_by_name_and_protocol_and_have_a_number(self, port):
        assert not found(endpoint_slice("shop/web", endpoint("10.64.1.10"), ports=(port,))).endpoints

    def test_other_families_fqdn_and_headless_slices_do_not_count(self):
        assert not found(endpoint_slice("shop/web", endpoint("fd64::1"))).endpoints
        for other in (
            EndpointSlice(namespace="shop", name="x", service_name="web", ports=(EndpointPort(name="http", port=80),)),
            endpoint_slice("shop/web", endpoint("10.64.1.10"), labels=(("service.kubernetes.io/headless", ""),)),
        ):
            assert not found(other).endpoints

    def test_of_two_entries_the_living_one_counts(self):
        one, two = endpoint("10.64.1.10"), dying("10.64.1.10")
        for order in ((one, two), (two, one)):
            (got,) = found(endpoint_slice("shop/web", *order)).states
            assert not got.terminating

    @pytest.mark.row("2.9", "15.9")
    def test_local_needs_the_exact_node_name(self):
        (here, nowhere, there) = found(
            endpoint_slice(
                "shop/web",
                endpoint("10.64.1.1"),
                endpoint("10.64.1.2", node=""),
                endpoint("10.64.1.3", node="Worker-A"),
            )
        ).endpoints
        assert (here.local, nowhere.local, there.local) == (True, False, False)


class TestReadiness:
    def test_ready_ones_only(self):
        assert cluster(endpoint("10.64.1.1"), dying("10.64.1.2"), endpoint("10.64.1.3", ready=False)) == {"10.64.1.1"}

    def test_none_ready_falls_back_to_serving_and_terminating(self):
        off = endpoint("10.64.1.3", ready=False, serving=False, terminating=True)
        assert cluster(dying("10.64.1.2"), dying("10.64.2.2", node="worker-b"), off) == {"10.64.1.2", "10.64.2.2"}

    def test_serving_but_neither_ready_nor_terminating_is_never_used(self):
        assert cluster(endpoint("10.64.1.1", ready=False, serving=True)) == set()

    def test_published_although_terminating_is_used_like_any(self):
        assert cluster(endpoint("10.64.1.1", terminating=True), endpoint("10.64.1.2")) == {"10.64.1.1", "10.64.1.2"}

    def test_local_is_decided_apart_from_the_cluster(self):
        ends = dying("10.64.1.2"), endpoint("10.64.2.2", node="worker-b")
        assert cluster(*ends) == {"10.64.2.2"}
        assert local(*ends) == {"10.64.1.2"}

    @pytest.mark.parametrize("state, usable", [({}, True), ({"ready": False}, False)])
    def test_any_usable(self, state, usable):
        selection = select(
            found(endpoint_slice("shop/web", endpoint("10.64.2.1", node="b", **state))), HERE, cluster=False, local=True
        )
        assert selection.any_usable is usable
        assert selection.local is None


class TestHints:
    def test_zone_hints_narrow(self):
        assert cluster(endpoint("10.64.1.1", for_zones=("east",)), endpoint("10.64.1.2", for_zones=("west",))) == {
            "10.64.1.1"
        }

    def test_one_ready_endpoint_without_hint_sets_them_aside(self):
        assert len(cluster(endpoint("10.64.1.1", for_zones=("east",)), endpoint("10.64.1.2"))) == 2

    def test_an_unready_one_without_hint_does_not(self):
        assert cluster(
            endpoint("10.64.1.1", for_zones=("east",)),
            endpoint("10.64.1.2", for_zones=("west",)),
            endpoint("10.64.1.3", ready=False),
        ) == {"10.64.1.1"}

    @pytest.mark.parametrize("zone", ["", "north"])
    def test_no_zone_or_none_for_it_means_all(self, zone):
        ends = endpoint("10.64.1.1", for_zones=("east",)), endpoint("10.64.1.2", for_zones=("west",))
        assert len(cluster(*ends, place=ProxyLocation(NODE, zone))) == 2

    def test_several_zones_match_each(self):
        ends = endpoint("10.64.1.1", for_zones=("west", "east")), endpoint("10.64.1.2", for_zones=("west",))
        assert cluster(*ends) == {"10.64.1.1"}

    def test_node_hints_come_before_zone_hints(self):
        ends = (
            endpoint("10.64.1.1", for_zones=("west",), for_nodes=(NODE,)),
            endpoint("10.64.1.2", for_zones=("east",), for_nodes=("worker-b",)),
        )
        assert cluster(*ends) == {"10.64.1.1"}
        assert cluster(*ends, place=ProxyLocation("worker-c", "east")) == {"10.64.1.2"}

    def test_the_terminating_fallback_and_local_sets_ignore_hints(self):
        assert cluster(dying("10.64.1.1", for_zones=("west",)), dying("10.64.1.2", for_zones=("east",))) == {
            "10.64.1.1",
            "10.64.1.2",
        }
        assert local(endpoint("10.64.1.1", for_zones=("west",)), endpoint("10.64.1.2", for_zones=("east",))) == {
            "10.64.1.1",
            "10.64.1.2",
        }
