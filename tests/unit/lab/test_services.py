"""What a Service's manifest leaves open is filled in."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from narthex.lab.services import NODE_PORTS, allocate
from narthex.lab.topology import SERVICE_CIDRS
from narthex.model.net import IPFamily, Protocol, contains
from narthex.model.objects import ServicePort

from .clusters import service


def filled(*services, before=None):
    wanted = {each.key: each for each in services}
    result, problems = allocate(wanted, before or {})
    return result, [str(problem) for problem in problems]


def only(*services, before=None):
    result, problems = filled(*services, before=before)
    assert not problems
    return next(iter(result.values()))


def test_a_cluster_ip_of_the_range():
    got = only(service())
    assert got.ip_families == (IPFamily.IPV4,)
    assert contains(SERVICE_CIDRS[0], got.cluster_ips[0])
    assert got.ports[0].node_port == 0


def test_both_families_when_the_policy_wants_both():
    got = only(service(ip_family_policy="PreferDualStack"))
    assert [contains(*pair) for pair in zip(SERVICE_CIDRS, got.cluster_ips, strict=True)] == [True, True]
    six = only(service(ip_family_policy="RequireDualStack", ip_families=(IPFamily.IPV6,)))
    assert six.ip_families == (IPFamily.IPV6, IPFamily.IPV4)


def test_what_the_manifest_asks_for_is_kept():
    ports = (ServicePort(port=4000, node_port=30001),)
    got = only(service(type="NodePort", cluster_ips=("10.106.183.112",), ports=ports))
    assert got.cluster_ips == ("10.106.183.112",)
    assert got.ports == ports


def test_node_ports_for_the_types_that_have_them():
    assert only(service(type="NodePort")).ports[0].node_port in NODE_PORTS
    assert only(service(type="LoadBalancer")).ports[0].node_port in NODE_PORTS
    assert only(service(type="LoadBalancer", allocate_node_ports=False)).ports[0].node_port == 0


def test_a_health_check_port_for_local_balancers():
    assert only(service(type="LoadBalancer", external_policy_local=True)).health_check_node_port in NODE_PORTS
    assert only(service(type="NodePort", external_policy_local=True)).health_check_node_port == 0


def test_headless_and_external_names_get_no_address():
    assert only(service(cluster_ips=("None",))).cluster_ips == ("None",)
    name = service(type="ExternalName", external_name="example.org")
    assert only(name) == name


def test_an_explicit_address_is_never_drawn_for_another():
    drawn = only(service("a")).cluster_ips
    both, problems = filled(service("a"), service("b", cluster_ips=drawn))
    assert not problems
    assert len({each.cluster_ips for each in both.values()}) == 2


def test_two_that_ask_for_the_same_are_settled_by_name():
    ports = (ServicePort(port=80, node_port=30001),)
    for order in (("a", "b"), ("b", "a")):
        got, problems = filled(*(service(name, type="NodePort", ports=ports) for name in order))
        assert [key.name for key in got] == ["a"]
        assert "Service shop/b" in problems[0]
        assert "taken by Service shop/a" in problems[0]


def test_one_node_port_for_two_protocols():
    ports = tuple(ServicePort(name=p.value, protocol=p, port=53, node_port=30053) for p in (Protocol.TCP, Protocol.UDP))
    assert only(service(type="NodePort", ports=ports)).ports == ports


def test_allocations_outlive_changes_of_other_things():
    first, _ = filled(service("a", type="NodePort"), service("b", type="NodePort"))
    again, _ = filled(service("b", type="NodePort", affinity_seconds=10), before=first)
    old, new = first[service("b").key], again[service("b").key]
    assert (new.cluster_ips, new.ports) == (old.cluster_ips, old.ports)


def test_an_explicit_claim_takes_an_address_from_who_had_drawn_it():
    first, _ = filled(service("a"))
    had = first[service("a").key].cluster_ips
    got, problems = filled(service("a"), service("b", cluster_ips=had), before=first)
    assert not problems
    assert got[service("b").key].cluster_ips == had
    assert got[service("a").key].cluster_ips != had


@given(st.lists(st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]), min_size=1, max_size=40), st.randoms())
def test_no_address_and_no_port_twice_and_no_order(kinds, random):
    services = [service(f"s{number}", type=kind) for number, kind in enumerate(kinds)]
    got, problems = filled(*services)
    assert not problems
    addresses = [each.cluster_ips for each in got.values()]
    ports = [port.node_port for each in got.values() for port in each.ports if port.node_port]
    assert len(set(addresses)) == len(addresses)
    assert len(set(ports)) == len(ports)
    random.shuffle(services)
    assert filled(*services)[0] == got
    assert allocate({each.key: each for each in services}, got)[0] == got


def test_a_type_without_node_ports_lets_them_go():
    first, _ = filled(service(type="NodePort"))
    assert only(replace(service(), type="ClusterIP"), before=first).ports[0].node_port == 0
