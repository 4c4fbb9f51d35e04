"""Addresses for the load balancers of a lab."""

import pytest
from msgspec.structs import replace

from narthex.lab.program import lab_process
from narthex.lab.program.lab_process import LoadBalancerAddresses
from narthex.lab.program.load_balancer_addresses import allocate_addresses, answered_addresses, patches, pools_of
from narthex.lab.program.state import ObjectGone
from narthex.lab.topology import nodes
from narthex.model.net import FAMILIES, IPFamily
from narthex.model.objects import IPAddressPool, LoadBalancerIngress, Service, ServiceCIDR, ServicePort
from narthex.testing.build import snapshot

NODES = nodes("t", 2)
ASKS = "metallb.io/loadBalancerIPs"
SEEDS = ("192.168.15.0/28", "172.6.6.6/32")


def balancer(name, asks="", **fields):
    annotations = ((ASKS, asks),) if asks else ()
    given = {"ip_families": (IPFamily.IPV4,), "cluster_ips": ("10.96.0.9",)}
    values = {**given, "annotations": annotations, "type": "LoadBalancer", "ports": (ServicePort(port=80),), **fields}
    return Service(name=name, namespace="shop", **values)


class Lab:
    """A lab's turns, without a machine."""

    def __init__(self, *ranges):
        self.pools = pools_of(ranges, NODES)
        self.services = {}

    def turn(self, *objects):
        wanted = snapshot(*map(self.as_the_api_has_it, objects), *self.pools, with_node=False)
        made = allocate_addresses(wanted, NODES)
        self.services = {**wanted.services, **made.changed}
        return made

    def as_the_api_has_it(self, obj):
        """Who writes a manifest again writes no status, and takes no annotation of somebody else's away."""
        held = self.services.get(obj.key) if isinstance(obj, Service) else None
        if held is None:
            return obj
        return replace(obj, ingress=obj.ingress or held.ingress, annotations=held.annotations)

    def addresses(self):
        return {key.name: [entry.ip for entry in each.ingress] for key, each in self.services.items()}


def test_the_seeds_addresses_can_be_had():
    lab = Lab(*SEEDS)
    made = lab.turn(balancer("a", "192.168.15.1"), balancer("b", "192.168.15.8"), balancer("c", "172.6.6.6"))
    assert lab.addresses() == {"a": ["192.168.15.1"], "b": ["192.168.15.8"], "c": ["172.6.6.6"]}
    assert (made.networks, made.problems) == (("172.6.6.6/32", "192.168.15.0/28"), ())
    assert {dict(each.annotations)["metallb.io/ip-allocated-from-pool"] for each in made.changed.values()} == {
        "lab-1",
        "lab-2",
    }


def test_who_asks_for_nothing_gets_the_first_address_of_a_host_in_the_first_pool():
    lab = Lab(*SEEDS)
    lab.turn(balancer("web"), balancer("inside", type="ClusterIP"), balancer("foreign", load_balancer_class="other/x"))
    assert lab.addresses() == {"web": ["192.168.15.1"], "inside": [], "foreign": []}


def test_what_was_given_stays_when_others_come_and_go():
    lab = Lab("192.168.15.0/28")
    lab.turn(balancer("m"), balancer("z"))
    held = lab.addresses()
    lab.turn(balancer("a"), balancer("m"), balancer("z"))
    assert lab.addresses() == {**held, "a": ["192.168.15.3"]}
    lab.turn(balancer("z"))
    assert lab.addresses() == {"z": held["z"]}
    lab.turn(balancer("z", type="ClusterIP"))
    assert lab.addresses() == {"z": []}
    assert lab.services[balancer("z").key].annotations == ()


def test_both_families_of_one_service_come_from_one_pool():
    lab = Lab("192.168.15.0/28", "172.6.6.6/32", "fd00:15::10-fd00:15::1f")
    made = lab.turn(balancer("web", ip_families=FAMILIES, ip_family_policy="RequireDualStack"))
    assert lab.addresses() == {"web": ["192.168.15.1", "fd00:15::10"]}
    assert made.networks == ("172.6.6.6/32", "192.168.15.0/28", "fd00:15::10/124")


def test_a_status_in_a_manifest_is_its_writers():
    lab = Lab("192.168.15.0/28")
    made = lab.turn(balancer("web", ingress=(LoadBalancerIngress(ip="203.0.113.9"),)))
    assert lab.addresses() == {"web": ["203.0.113.9"]}
    assert made.networks == ("192.168.15.0/28",)
    assert "another controller writes it" in made.problems[0].message


def test_pools_of_manifests_count_and_a_bad_one_is_said_and_takes_nothing_away():
    lab = Lab()
    good = IPAddressPool(name="own", namespace="x", addresses=("192.168.15.8/32",))
    lab.turn(good, balancer("web"))
    assert lab.addresses() == {"web": ["192.168.15.8"]}
    spoiled = replace(good, addresses=("192.168.15.8/32", "10.96.0.0/24"), origin="pools.yaml:1")
    made = lab.turn(spoiled, balancer("more"), balancer("web"))
    assert lab.addresses() == {"more": [], "web": ["192.168.15.8"]}
    assert made.networks == ("192.168.15.8/32",)
    said = [str(problem) for problem in made.problems]
    assert said[0].startswith(
        "pools.yaml:1: error: IPAddressPool x/own: is refused: 10.96.0.0/24 overlaps 10.96.0.0/16"
    )
    assert any("Service shop/more" in each for each in said)
    lab.turn(ServiceCIDR(name="more", cidrs=("192.168.15.0/24",)), good, balancer("web"))
    assert lab.addresses() == {"web": ["192.168.15.8"]}


def test_nobody_waits_for_an_answer_for_what_no_node_announces():
    proxied = balancer(
        "a", ingress=(LoadBalancerIngress(ip="203.0.113.9", proxy=True), LoadBalancerIngress(ip="203.0.113.1"))
    )
    was = balancer("b", type="ClusterIP", ingress=(LoadBalancerIngress(ip="203.0.113.2"),))
    assert answered_addresses([proxied, was]) == {"203.0.113.1"}


def test_no_room_is_said():
    made = Lab("172.6.6.6/32").turn(balancer("a"), balancer("b"))
    (problem,) = made.problems
    assert (problem.object, problem.severity) == ("Service shop/b", "warning")


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        (["0.0.0.0/0"], "is all addresses there are"),
        (["192.168.15.1"], "write 192.168.15.1/32"),
        (["10.244.3.0/24"], "where the lab's pods are"),
        (["fd00:10:96::/120"], "where the lab's cluster IPs are"),
        (["192.0.2.128/25"], "where `outside` is"),
        (["192.168.49.0/28"], "an address of node-1|the router's"),
        (["192.168.49.12/32"], "an address of node-2"),
        (["192.168.15.0/28", "192.168.15.1/32"], "overlaps"),
        (["127.0.0.0/28"], "loopback"),
        (["$(reboot)/32"], "is not a network"),
        (["192.168.15.9-192.168.15.1"], "ends before it begins"),
    ],
)
def test_bad_pools_are_refused_with_the_reason(ranges, reason):
    with pytest.raises(ValueError, match=reason):
        pools_of(ranges, NODES)


def test_without_ranges_there_are_no_pools():
    assert pools_of([], NODES) == ()


def test_what_is_written_of_a_service_is_its_annotation_and_its_status():
    made = Lab("192.168.15.0/28").turn(balancer("web"))
    (service,) = made.changed.values()
    path = "/api/v1/namespaces/shop/services/web"
    assert list(patches(service)) == [
        (path, {"metadata": {"annotations": {"metallb.io/ip-allocated-from-pool": "lab-1"}}}),
        (
            f"{path}/status",
            {"metadata": {}, "status": {"loadBalancer": {"ingress": [{"ip": "192.168.15.1", "ipMode": "VIP"}]}}},
        ),
    ]


def test_a_service_that_was_deleted_meanwhile_does_not_hold_up_the_others(monkeypatch):
    monkeypatch.setattr(lab_process, "wire", lambda _wiring: None)
    sent = []

    def send(_method, path, _patch, _content_type):
        if "/gone" in path:
            raise ObjectGone('services "gone" not found')
        sent.append(path.removeprefix("/api/v1/namespaces/shop/services/"))

    objects = snapshot(balancer("gone"), balancer("stays"), *pools_of(SEEDS, NODES), with_node=False)
    LoadBalancerAddresses("t", NODES, send).reconcile(objects, balancing=True)
    assert sent == ["stays", "stays/status"]
