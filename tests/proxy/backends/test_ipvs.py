"""The shape of what the ipvs backend renders, and that a change costs what it changes."""

import msgspec
import pytest

from narthex.model.net import FAMILIES, IPFamily, Protocol
from narthex.model.objects import EndpointPort, ServicePort
from narthex.model.store import Delete, Store, Upsert
from narthex.netfilter.ipset import MAX_NAME
from narthex.netfilter.ipvs import RealServer
from narthex.proxy.backends.ipvs import names
from narthex.proxy.backends.ipvs.backend import IpvsBackend
from narthex.proxy.backends.ipvs.rules import RealChanges, SetChanges
from narthex.proxy.plan.ir import Deviation, Forward, Scope
from narthex.proxy.plan.planner import Planner
from narthex.testing.build import CONFIG, endpoint, endpoint_slice, node, plan, port_name, service

V4, V6 = FAMILIES
BACKEND = IpvsBackend()
ALL_PORTS = tuple(
    ServicePort(name=protocol.lower, port=80, protocol=protocol, node_port=31000 + protocol.number)
    for protocol in (Protocol.TCP, Protocol.UDP, Protocol.SCTP)
)
TARGETS = tuple(EndpointPort(name=port.name, protocol=port.protocol, port=8080) for port in ALL_PORTS)


def shop(**fields):
    """A Service of every kind of frontend, with an endpoint here and one elsewhere."""
    fields.setdefault("type", "LoadBalancer")
    fields.setdefault("ports", ALL_PORTS)
    return (
        service("shop/web", "10.110.0.5", balancers=["203.0.113.10"], external_ips=("203.0.113.80",), **fields),
        endpoint_slice("shop/web", endpoint("10.64.1.10"), endpoint("10.64.2.10", node="worker-b"), ports=TARGETS),
    )


def held(rules, name):
    return rules.sets[names.set_name(name, rules.family)].entries


@pytest.mark.row("24.4")
def test_names_and_kinds_of_sets():
    for family in FAMILIES:
        rules = BACKEND.render(plan(family=family))
        assert set(rules.sets) == names.SETS[family] and len(rules.sets) == len(names.KINDS)
        assert all(len(name.encode()) <= MAX_NAME for name in rules.sets)
    six = BACKEND.render(plan(family=V6)).sets
    assert six["KUBE-6-CLUSTER-IP"].family is V6
    assert {"KUBE-6-LOAD-BALANCER-SOURCE-CID", "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS"} <= set(six)
    kinds = {name: each.kind for name, each in BACKEND.render(plan()).sets.items()}
    assert kinds["KUBE-LOOP-BACK"] == "hash:ip,port,ip"
    assert kinds["KUBE-LOAD-BALANCER-SOURCE-CIDR"] == "hash:ip,port,net"
    assert kinds["KUBE-NODE-PORT-TCP"] == kinds["KUBE-HEALTH-CHECK-NODE-PORT"] == "bitmap:port"
    assert kinds["KUBE-NODE-PORT-SCTP-HASH"] == "hash:ip,port" and kinds["KUBE-IPVS-IPS"] == "hash:ip"


@pytest.mark.row("24.2", "24.11")
def test_a_virtual_server_for_each_frontend_and_node_address():
    rules = BACKEND.render(plan(*shop(), node_port_addresses=None))
    places = {(address, port) for address, protocol, port in rules.servers if protocol is Protocol.TCP}
    nodes = {("10.20.0.11", 31006), ("10.20.1.11", 31006)}
    assert places == {("10.110.0.5", 80), ("203.0.113.80", 80), ("203.0.113.10", 80), *nodes}
    assert len(rules.servers) == 3 * len(places)
    assert rules.bound == {"10.110.0.5", "203.0.113.80", "203.0.113.10"} == held(rules, names.IPVS_IPS)


@pytest.mark.row("24.11")
@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (None, {"10.20.0.11", "10.20.1.11"}),
        (("primary",), {"10.20.0.11"}),
        (("10.20.1.0/24", "127.0.0.0/8"), {"10.20.1.11"}),
        (("192.0.2.0/24",), set()),
    ],
)
def test_node_ports_where_they_answer(words, nodes):
    rules = BACKEND.render(plan(*shop(), node_port_addresses=words, node_addresses=("10.20.0.11", "10.20.1.11", "::1")))
    assert {address for address, _, port in rules.servers if port > 31000} == nodes
    assert bool(held(rules, names.NODE_PORT_TCP)) is bool(nodes)


@pytest.mark.row("11.3", "24.2")
def test_an_address_of_the_node_is_not_bound_again():
    taken = service("shop/web", "10.110.0.5", external_ips=("10.20.1.11",))
    rules = BACKEND.render(plan(taken))
    assert ("10.20.1.11", Protocol.TCP, 80) in rules.servers
    assert rules.bound == {"10.110.0.5"}


@pytest.mark.row("24.14")
def test_entries_say_who_is_masqueraded():
    rules = BACKEND.render(plan(*shop(), node_port_addresses=None))
    assert held(rules, names.CLUSTER_IP) == {f"10.110.0.5,{each}:80" for each in ("tcp", "udp", "sctp")}
    assert held(rules, names.EXTERNAL_IP) == {f"203.0.113.80,{each}:80" for each in ("tcp", "udp", "sctp")}
    assert held(rules, names.NODE_PORT_TCP) == {"31006"} and held(rules, names.NODE_PORT_UDP) == {"31017"}
    assert held(rules, names.NODE_PORT_SCTP) == {"10.20.0.11,sctp:31132", "10.20.1.11,sctp:31132"}
    assert "10.64.1.10,sctp:8080,10.64.1.10" in held(rules, names.LOOP_BACK)
    assert not any(entry.startswith("10.64.2.10") for entry in held(rules, names.LOOP_BACK))
    local = BACKEND.render(plan(*shop(external_policy_local=True, health_check_node_port=32080)))
    assert held(local, names.EXTERNAL_IP_LOCAL) and not held(local, names.EXTERNAL_IP)
    assert held(local, names.LOAD_BALANCER_IP_LOCAL) == held(local, names.LOAD_BALANCER_IP)
    assert held(local, names.NODE_PORT_LOCAL_TCP) == {"31006"}
    assert held(local, names.HEALTH_CHECK) == {"32080"}


@pytest.mark.row("7.9", "7.10", "29.6")
def test_real_servers_under_local_policy():
    def reals(rules, address):
        return [real.address for real in rules.servers[address, Protocol.TCP, 80].reals]

    here = BACKEND.render(plan(*shop(external_policy_local=True)))
    assert reals(here, "203.0.113.10") == ["10.64.1.10"]
    assert reals(here, "10.110.0.5") == ["10.64.1.10", "10.64.2.10"]
    away, slices = shop(external_policy_local=True)
    none = BACKEND.render(plan(away, msgspec.structs.replace(slices, endpoints=slices.endpoints[1:])))
    assert reals(none, "203.0.113.10") == ["10.64.2.10"]
    assert "203.0.113.10,tcp:80" in held(none, names.DROP_OTHER)
    assert not held(none, names.DROP_POD) and not held(none, names.DROP_NODE)


@pytest.mark.row("10.3", "10.6")
def test_source_ranges_as_entries():
    rules = BACKEND.render(plan(*shop(source_ranges=("10.20.0.0/24", "198.51.100.7/32"))))
    at = "203.0.113.10,tcp:80"
    assert at in held(rules, names.LOAD_BALANCER_IP_FW)
    assert f"{at},10.20.0.0/24" in held(rules, names.LOAD_BALANCER_IP_SOURCE_CIDR)
    # The node is listed, so that it may speak from the balancer's own address.
    assert {f"{at},198.51.100.7", f"{at},203.0.113.10"} <= held(rules, names.LOAD_BALANCER_IP_SOURCE_IP)
    halves = BACKEND.render(plan(*shop(source_ranges=("0.0.0.0/1", "128.0.0.0/1"))))
    assert {f"{at},0.0.0.0/1", f"{at},128.0.0.0/1"} <= held(halves, names.LOAD_BALANCER_IP_SOURCE_CIDR)


@pytest.mark.row("24.6")
@pytest.mark.parametrize("scheduler", ["rr", "wrr", "lc", "wlc", "dh", "sh", "sed", "nq", "mh", "twos"])
def test_schedulers(scheduler):
    backend = IpvsBackend(scheduler)
    servers = backend.render(plan(*shop())).servers.values()
    assert {(each.scheduler, each.hash_ports) for each in servers} == {(scheduler, scheduler == "mh")}
    assert (f"-s {scheduler} -b mh-port\n" in backend.text(backend.render(plan(*shop())))) is (scheduler == "mh")


@pytest.mark.row("29.18", "29.19")
@pytest.mark.parametrize("value, scheduler", [("maglev", "mh"), ("least-connections", "lc"), ("random", "sed")])
def test_a_service_requests_a_scheduler(value, scheduler):
    objects = shop(annotations=(("narthex.dev/load-balancing", value),))
    servers = IpvsBackend("sed").render(plan(*objects)).servers.values()
    assert {(each.scheduler, each.hash_ports) for each in servers} == {(scheduler, False)}
    backend = IpvsBackend("sed", frozenset({"mh", "lc"}))
    assert {each.scheduler for each in backend.render(plan(*objects)).servers.values()} == {"sed"}
    assert backend.deviations - IpvsBackend.deviations == {
        Deviation.NO_CONSISTENT_HASHING,
        Deviation.NO_LEAST_CONNECTIONS,
    }


def test_no_scheduler_named_is_round_robin():
    assert {each.scheduler for each in IpvsBackend("").render(plan(*shop())).servers.values()} == {"rr"}


@pytest.mark.row("14.6")
def test_affinity_is_persistence():
    assert {each.persistence_seconds for each in BACKEND.render(plan(*shop())).servers.values()} == {None}
    sticky = BACKEND.render(plan(*shop(affinity_seconds=600)))
    assert {each.persistence_seconds for each in sticky.servers.values()} == {600}


@pytest.mark.row("5.3", "5.4", "5.5")
def test_how_cluster_ips_are_marked():
    def marked(**config):
        rules = BACKEND.render(plan(*shop(), **config)).tables.chains["nat"][names.SERVICES]
        (found,) = (each for each in rules if each.comment.endswith("for masquerade purpose"))
        return len(found.expressions), found.expressions[-2].sides, found.expressions[0]

    assert marked()[2].negate
    assert marked(masquerade_all=True)[:2] == (2, ("dst", "dst"))
    assert marked(cluster_cidrs=())[2].sides == ("src", "dst")


def test_one_rule_cannot_say_two_ways_for_cluster_ips():
    (name, web), = plan(*shop(ports=ALL_PORTS[:1])).services.items()  # fmt: skip
    everyone = Forward(Scope.CLUSTER, masquerade=True)
    other = msgspec.structs.replace(web.frontends[0], address="10.110.0.9", pod=everyone)
    odd = msgspec.structs.replace(web, name=port_name("shop/web:b"), frontends=(other,))
    strange = msgspec.structs.replace(plan(*shop(ports=ALL_PORTS[:1])), services={name: web, odd.name: odd})
    with pytest.raises(ValueError, match="masqueraded in 2 ways"):
        BACKEND.render(strange)


def test_rules_are_fixed_once_their_sets_are_not_empty():
    web, slices = shop()
    one = BACKEND.render(plan(web, slices))
    more = service("shop/more", "10.110.0.6", balancers=["203.0.113.11"], external_ips=("203.0.113.81",))
    assert BACKEND.render(plan(web, slices, more)).tables == one.tables
    empty = BACKEND.render(plan())
    assert not empty.tables.chains["nat"][names.NODE_PORT]
    assert len(empty.tables.chains["nat"][names.SERVICES]) == 1


def test_all_chains_are_ours_by_name():
    rules = BACKEND.render(plan(*shop(), cluster_cidrs=("10.64.0.0/12",)))
    for table, chains in rules.tables.chains.items():
        assert all(names.IPVS_CHAINS.is_ours(table, chain) for chain in chains)
    for (table, _), jumps in rules.tables.jumps.items():
        assert {jump.expressions[-1].chain for jump in jumps} <= names.IPVS_CHAINS.entries[table]


def test_golden_text(golden):
    golden(
        "render/ipvs.txt",
        BACKEND.text(
            BACKEND.render(
                plan(
                    *shop(
                        external_policy_local=True,
                        health_check_node_port=32080,
                        affinity_seconds=600,
                        source_ranges=("198.51.100.0/24", "10.20.0.11/32"),
                    ),
                    service("shop/lost", "10.110.0.6", internal_policy_local=True, external_ips=("203.0.113.81",)),
                    endpoint_slice("shop/lost", endpoint("10.64.2.11", node="worker-b")),
                )
            )
        ),
    )


# ---- changes -------------------------------------------------------------------------------------------------------


class Running:
    """A store, a planner and what was rendered last."""

    def __init__(self, *objects, family=IPFamily.IPV4):
        self.store, self.planner = Store(), Planner(CONFIG, family)
        self.rules = None
        self.change(*map(Upsert, (node(), *objects)))

    def change(self, *events):
        """The changes that the events lead to."""
        for event in events:
            self.store.apply(event)
        before = self.rules
        plan = self.planner.plan(self.store.snapshot, self.store.take_changed())
        self.rules, changes = BACKEND.advance(before, plan)
        if before is not None:
            assert BACKEND.patch(before, changes) == self.rules
        return changes


def test_one_endpoint_more_is_one_real_server_more():
    web, slices = shop(ports=ALL_PORTS[:1])
    running = Running(web, slices, service("shop/other", "10.110.0.6"))
    before = running.rules
    grown = msgspec.structs.replace(slices, endpoints=(*slices.endpoints, endpoint("10.64.1.11")))
    changes = running.change(Upsert(grown))
    assert set(changes.reals.values()) == {RealChanges(added=(RealServer("10.64.1.11", 8080),))}
    assert len(changes.reals) == 4
    assert changes.entries == {names.LOOP_BACK: SetChanges(added=frozenset({"10.64.1.11,tcp:8080,10.64.1.11"}))}
    assert not (changes.servers_added or changes.servers_edited or changes.servers_removed)
    assert not (changes.bind or changes.unbind or changes.sets_added or changes.tables)
    assert running.rules.tables is before.tables
    other = "10.110.0.6", Protocol.TCP, 80
    assert running.rules.servers[other] is before.servers[other]


@pytest.mark.row("24.8")
def test_an_endpoint_that_leaves_is_absent():
    web, slices = shop(ports=ALL_PORTS[:1])
    changes = Running(web, slices).change(Upsert(msgspec.structs.replace(slices, endpoints=slices.endpoints[:1])))
    assert set(changes.reals.values()) == {RealChanges(removed=(RealServer("10.64.2.10", 8080),))}


def test_a_service_that_comes_and_goes():
    web, slices = shop(ports=ALL_PORTS[:1])
    running = Running(web, slices)
    before = running.rules
    came = running.change(Upsert(service("shop/more", "10.110.0.6")))
    assert [each.key for each in came.servers_added] == [("10.110.0.6", Protocol.TCP, 80)]
    assert came.bind == {"10.110.0.6"} and not came.reals and not came.tables
    went = running.change(Delete("Service", service("shop/more", "10.110.0.6").key))
    assert went.servers_removed == (("10.110.0.6", Protocol.TCP, 80),)
    assert went.unbind == {"10.110.0.6"}
    assert running.rules == before


def test_affinity_switched_on_edits_the_servers_alone():
    web, slices = shop(ports=ALL_PORTS[:1])
    changes = Running(web, slices).change(Upsert(msgspec.structs.replace(web, affinity_seconds=600)))
    assert {each.persistence_seconds for each in changes.servers_edited} == {600}
    assert not changes.reals and not changes.entries


def test_an_exact_address_goes_before_a_node_port_and_gives_it_back():
    docs = service("shop/docs", "10.110.0.6", type="NodePort", node_port=31006)
    pods = endpoint_slice("shop/docs", endpoint("10.64.1.11"))
    running = Running(docs, pods)
    before, key = running.rules, ("10.20.0.11", Protocol.TCP, 31006)
    assert before.servers[key].reals
    taker = service("shop/taker", "10.110.0.7", port=31006, external_ips=("10.20.0.11",))
    running.change(Upsert(taker))
    assert not running.rules.servers[key].reals
    running.change(Delete("Service", taker.key))
    assert running.rules == before


def test_nothing_new_is_nothing_to_do():
    running = Running(*shop())
    before = running.rules
    assert not running.change()
    assert running.rules.tables is before.tables
    assert all(running.rules.sets[name] is held for name, held in before.sets.items())


def test_what_is_unknown_is_replaced_whole():
    rules = BACKEND.render(plan(*shop()))
    changes = BACKEND.diff(None, rules)
    assert changes.replace and len(changes.servers_added) == len(rules.servers)
    assert len(changes.sets_added) == len(names.KINDS) and changes.tables.replace
    assert changes.bind == rules.bound
