"""Dumps of every layout and tool, read whole and walked: tests/dumps holds what the tools print.

Rules that were loaded in a namespace and printed again by iptables 1.8.9 (nft and legacy), nft 1.0.6 and ipset 7.17, and what
people published between 2018 and 2023 (`*.transcript`, `*.fragment`).
"""

from fractions import Fraction
from pathlib import Path

import msgspec
import pytest

from narthex.model.net import IPFamily, Protocol
from narthex.model.packet import Disposition, Host, Packet
from narthex.netfilter.ast import Ruleset
from narthex.netfilter.cuts import gap_rule
from narthex.netfilter.dump.read import Flavour, merge_dumps, read_dump
from narthex.netfilter.walk.walk import HookPoint, HookWalk, walk

DUMPS = Path(__file__).parents[1] / "dumps"
V4 = IPFamily.IPV4
NODE = Host(addresses=("192.168.1.11", "10.244.1.1", "10.3.49.200"))
HALF = Fraction(1, 2)


def held(*names):
    return merge_dumps(read_dump((DUMPS / name).read_bytes(), name) for name in names)


def trace(names, destination, port, source="198.51.100.7", protocol=Protocol.TCP, iif="eth0", table=""):
    rules = held(*names).for_family(V4)
    if table:
        only = tuple(each for each in rules.ruleset.tables if each.name == table)
        rules = msgspec.structs.replace(rules, ruleset=Ruleset(only))
    packet = Packet(source=source, destination=destination, port=port, protocol=protocol, iif=iif)
    return walk(rules.ruleset, packet, NODE, objects=rules.objects)


def ends(*asked, **said):
    return trace(*asked, **said).ends()


def delivered(address, port, masquerade=False):
    return (Disposition.DELIVERED, (address, port), masquerade)


SAVED = "kube-docker-flannel-portmap"
WHOLE = {
    f"{SAVED}.iptables-nft-save": {"nat": 48, "filter": 30},
    f"{SAVED}.iptables-legacy-save": {"nat": 48, "filter": 30},
    f"{SAVED}.nat-S": {"nat": 48},
    f"{SAVED}.nat-L-n": {"nat": 48},
    f"{SAVED}.nat-L-nv": {"nat": 48},
    f"{SAVED}.nft-list": {"nat": 48, "filter": 30},
    "firewalld.nft-list": {"firewalld": 43},
    "firewalld.nft-json": {"firewalld": 43},
    "kube-proxy.nft-list-a": {"kube-proxy": 38},
    "kube-proxy.nft-json": {"kube-proxy": 38},
    "ufw.iptables-legacy-save": {"filter": 39},
    "ipvs.iptables-legacy-save": {"nat": 16},
    "ipvs.nat-L-nv": {"nat": 16},
    "userspace-portals.iptables-save": {"nat": 7},
    "redis-traefik.fragment": {"nat": 38, "filter": 16},
    "testsvc.transcript": {"nat": 21},
    "node-port.transcript": {"nat": 10},
    "ipvs.transcript": {"nat": 7},
    "hello-world.transcript": {"nat": 20, "filter": 3},
}


@pytest.mark.parametrize(("name", "rules"), WHOLE.items())
def test_read_whole_and_understood(name, rules):
    dump = held(name)
    assert {each.table.name: each.rules for each in dump.tables} == rules
    assert {
        each.table.name: sum(rule != gap_rule() for c in each.table.chains.values() for rule in c.rules)
        for each in dump.tables
    } == {
        table: count + sum("it is assumed to set" in each.text for each in dump.notes) * (table == "nat")
        for table, count in rules.items()
    }
    assert dump.check() == ()


@pytest.mark.parametrize(
    ("name", "flavour"),
    [
        (f"{SAVED}.iptables-nft-save", Flavour.NFT),
        (f"{SAVED}.iptables-legacy-save", Flavour.LEGACY),
        ("userspace-portals.iptables-save", Flavour.LEGACY),
        (f"{SAVED}.nft-list", Flavour.NFTABLES),
        (f"{SAVED}.nat-S", Flavour.XTABLES),
    ],
)
def test_flavours(name, flavour):
    assert {each.flavour for each in held(name).tables} == {flavour}


def test_both_prints_of_the_same_tables_count_once():
    both = held(f"{SAVED}.iptables-nft-save", f"{SAVED}.nft-list").for_family(V4)
    assert len(both.ruleset.tables) == 2
    assert {(table.name, len(table.chains["FORWARD"].rules)) for table in both.ruleset.tables if table.name == "filter"}


def test_a_rule_says_where_it_stood():
    dump = held(f"{SAVED}.iptables-legacy-save")
    nat = next(each.table for each in dump.tables if each.table.name == "nat")
    origin, line, text = dump.locate(nat, "KUBE-MARK-MASQ", 0)
    assert origin == f"{SAVED}.iptables-legacy-save"
    assert text == "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000"
    assert (DUMPS / origin).read_text().split("\n")[line - 1] == text


# ---- kube-proxy beside Docker, flannel and portmap -------------------------------------------------------------------

FORMS = ["iptables-nft-save", "iptables-legacy-save", "nat-S", "nat-L-n", "nat-L-nv", "nft-list"]


@pytest.mark.parametrize("form", FORMS)
def test_every_print_of_the_rules_says_the_same(form):
    name = [f"{SAVED}.{form}"]
    assert ends(name, "192.168.1.11", 30080, table="nat") == {delivered("10.244.1.5", 8080): 1}
    assert ends(name, "192.168.15.7", 80, table="nat") == {delivered("10.244.1.5", 8080): 1}
    assert ends(name, "192.168.1.11", 8888, table="nat") == {delivered("10.244.1.9", 80): 1}
    cluster = ends(name, "10.96.0.50", 80)
    assert cluster == {delivered("10.244.1.5", 8080, True): HALF, delivered("10.244.2.7", 8080, True): HALF}
    pod = ends(name, "10.96.0.50", 80, source="10.244.1.8", iif="cni0", table="nat")
    assert pod == {delivered("10.244.1.5", 8080): HALF, delivered("10.244.2.7", 8080): HALF}


def test_a_listing_without_interfaces_says_so():
    (outcome,) = trace([f"{SAVED}.nat-L-n"], "192.168.1.11", 30080).outcomes
    assert outcome.supposing == ("iptables -L without -v omits the interfaces of a rule",)
    assert not trace([f"{SAVED}.nat-L-nv"], "192.168.1.11", 30080).outcomes[0].supposing


def test_a_service_without_endpoints():
    name = [f"{SAVED}.iptables-nft-save"]
    assert [end[0] for end in ends(name, "10.96.0.77", 80)] == [Disposition.REJECTED]
    near = [miss for miss in trace(name, "10.96.0.77", 81).near if "shop/empty" in miss.why]
    assert [miss.missing for miss in near] == ["port 80"]


def test_what_an_interface_decides_may_go_both_ways():
    """Docker lets in what goes out by docker0; nobody has said where the packet goes out."""
    (outcome,) = trace([f"{SAVED}.iptables-nft-save"], "192.168.1.11", 8081).outcomes
    assert outcome.disposition is Disposition.UNSUPPORTED and "outgoing interface" in outcome.note
    assert {end[0] for end in outcome.may} == {Disposition.DELIVERED, Disposition.DROPPED}


# ---- others ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kube-proxy.nft-list-a", "kube-proxy.nft-json"])
def test_kube_proxys_nftables(name):
    both = {delivered("10.244.1.5", 8080, True): HALF, delivered("10.244.2.7", 8080, True): HALF}
    assert ends([name], "192.168.1.11", 30080) == both
    assert ends([name], "192.168.15.7", 80, source="203.0.113.9") == both
    assert [end[0] for end in ends([name], "192.168.15.7", 80)] == [Disposition.DROPPED]
    assert [end[0] for end in ends([name], "10.96.0.77", 80)] == [Disposition.REJECTED]
    assert [end[0] for end in ends([name], "10.96.0.50", 81)] == [Disposition.REJECTED]
    assert [end[0] for end in ends([name], "10.96.0.99", 80)] == [Disposition.DROPPED]
    assert ends([name], "10.96.0.60", 80) == {delivered("10.244.1.6", 80, True): 1}


IPVS = {
    "saved": ["ipvs.iptables-legacy-save", "ipvs.ipset-save", "ipvs.ipvsadm-S"],
    "listed": ["ipvs.nat-L-nv", "ipvs.ipset-list", "ipvs.ipvsadm-L"],
}


@pytest.mark.parametrize("form", IPVS)
def test_ipvs_through_its_sets(form):
    to = "172.31.12.98", 50051
    outside = ends(IPVS[form], *to)
    assert outside == {delivered(f"172.30.{n}.12", 50051, True): HALF for n in (0, 3)}
    pod = ends(IPVS[form], *to, source="172.30.9.9", iif="cni0")
    assert pod == {delivered(f"172.30.{n}.12", 50051): HALF for n in (0, 3)}


def test_portals_of_the_userspace_proxy():
    name = ["userspace-portals.iptables-save"]
    assert ends(name, "10.0.0.1", 443, source="10.244.1.8", iif="cbr0") == {delivered("192.168.1.11", 40221): 1}
    assert ends(name, "192.168.1.11", 30080) == {delivered("192.168.1.11", 41234): 1}


def test_ufw():
    name = ["ufw.iptables-legacy-save"]
    assert [end[0] for end in ends(name, "192.168.1.11", 443)] == [Disposition.NOT_OURS]
    assert [end[0] for end in ends(name, "192.168.1.11", 8080)] == [Disposition.DROPPED]
    assert [end[0] for end in ends(name, "192.168.1.11", 0, protocol=Protocol.ICMP)] == [Disposition.NOT_OURS]
    (limited,) = trace(name, "192.168.1.11", 22).outcomes
    assert "the number of earlier packets from the source" in limited.note
    assert {end[0] for end in limited.may} == {Disposition.NOT_OURS, Disposition.REJECTED}


@pytest.mark.parametrize("name", ["firewalld.nft-list", "firewalld.nft-json"])
def test_firewalld(name):
    assert [end[0] for end in ends([name], "192.168.1.11", 22)] == [Disposition.NOT_OURS]
    assert [end[0] for end in ends([name], "192.168.1.11", 30001)] == [Disposition.NOT_OURS]
    assert [end[0] for end in ends([name], "192.168.1.11", 23)] == [Disposition.REJECTED]
    assert [end[0] for end in ends([name], "192.168.1.11", 23, iif="cni0")] == [Disposition.NOT_OURS]
    (sent_on,) = trace([name], "192.168.15.1", 8080).outcomes
    assert sent_on.may == (delivered("10.244.1.5", 80, True),)


def test_calico_is_walked_with_what_is_not_understood():
    dump = held("calico.iptables-nft-save")
    assert [problem.text.rpartition(": ")[2] for problem in dump.check()] == ['-m u32 --u32 "0x0&0xff=0x1"']
    rules = dump.for_family(V4)

    def forward(iif, oif):
        packet = Packet(source="10.65.0.3", destination="10.65.1.9", port=80, iif=iif)
        hooks = HookWalk(rules.ruleset, packet, NODE)
        passed, ended = hooks.hook(HookPoint("forward", iif=iif, oif=oif), [hooks.start()])
        return {branch.doubt and "may pass" for branch in passed}, {end.disposition for _, end in ended}

    assert forward("eth0", "eth1") == ({""}, set())
    assert forward("cali9999", "eth1") == (set(), {Disposition.DROPPED})
    assert forward("eth0", "cali1234") == (set(), {Disposition.UNSUPPORTED, Disposition.DROPPED})


# ---- what people published -------------------------------------------------------------------------------------------


def test_the_node_port_that_two_pods_share():
    found = ends(["node-port.transcript"], "10.3.49.200", 31103)
    assert found == {delivered("10.3.34.219", 3001): HALF, delivered("10.3.57.124", 3001): HALF}
    after = (
        (DUMPS / "node-port.transcript")
        .read_text()
        .split("| grep 31103")[1]
        .split("KUBE-SVC-TII5GQPKXWC65SRC | column -t")
    )
    again = read_dump("# iptables -t nat -L X -n\n" + after[-1])
    scaled = again.tables[0].table.chains["KUBE-SVC-TII5GQPKXWC65SRC"].rules
    assert len(scaled) == 3


def chains_met(name, destination, port):
    """Chains of endpoints and how likely each is, whether or not it is in the dump."""
    told = {}
    for outcome in trace([name], destination, port).outcomes:
        last = next(
            word.removeprefix("jump ")
            for step in reversed(outcome.steps)
            for word in step.what.split(", ")
            if word.startswith("jump KUBE-SEP-")
        )
        told[last] = told.get(last, 0) + outcome.probability
    return told


def test_seven_ways_at_one_seventh_each():
    found = chains_met("testsvc.transcript", "172.30.5.207", 443)
    assert len(found) == 7 and all(abs(share - Fraction(1, 7)) < Fraction(1, 100_000) for share in found.values())
    assert delivered("172.31.9.52", 80) in ends(["testsvc.transcript"], "172.30.5.207", 443)


def test_redis_at_one_sixth_each():
    found = chains_met("redis-traefik.fragment", "10.96.7.210", 6379)
    assert len(found) == 6 and all(abs(share - Fraction(1, 6)) < Fraction(1, 100_000) for share in found.values())
    assert delivered("10.244.5.216", 6379, True) in ends(["redis-traefik.fragment"], "10.96.7.210", 6379)


def test_hello_worlds_node_port():
    nat = held("hello-world.transcript")
    assert {each.line for each in nat.notes} and not nat.problems
    found = ends(["hello-world.transcript"], "192.168.1.11", 30001, table="nat")
    assert found == {delivered("10.244.3.81", 8080): 1}


def test_ipvs_of_a_published_list():
    found = ends(["ipvs.transcript"], "172.31.12.98", 50051)
    assert set(found.values()) == {Fraction(1, 4)} and len(found) == 4
