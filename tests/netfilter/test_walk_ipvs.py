"""IPVS and ipsets on a packet's way, by hand-made rules."""

from fractions import Fraction

import pytest

from narthex.model.net import IPFamily, Protocol
from narthex.model.packet import Disposition, Host, Memory, Packet
from narthex.netfilter.dump.read import DumpError, read_dumps
from narthex.netfilter.ipset import IpSet
from narthex.netfilter.ipvs import RealServer, VirtualServer
from narthex.netfilter.walk.state import KernelObjects
from narthex.netfilter.walk.walk import walk
from narthex.netfilter.xtables.parse import parse_save_text

HOST = Host(addresses=("10.20.0.11",))
VIP = "10.110.0.5"
HALF = Fraction(1, 2)
DELIVERED = Disposition.DELIVERED


def server(*reals, scheduler="rr", port=80, seconds=None):
    held = tuple(each if isinstance(each, RealServer) else RealServer(each, 8080) for each in reals)
    return VirtualServer(
        address=VIP, protocol=Protocol.TCP, port=port, scheduler=scheduler, persistence_seconds=seconds, reals=held
    )


def kernel_objects(*servers, sets=(), bound=(VIP,), marks=()):
    return KernelObjects(
        servers={each.key: each for each in servers},
        sets={each.name: each for each in sets},
        bound=frozenset(bound),
        marks=frozenset(marks),
    )


def table(name, *rules):
    return f"*{name}\n" + "".join(f"{rule}\n" for rule in rules) + "COMMIT\n"


def ends(rules, around, source="198.51.100.7", memory=None, now=0.0, port=80):
    packet = Packet(
        source=source, destination=VIP, port=port, iif="" if source in HOST.addresses else "eth0",
        from_host=source in HOST.addresses,
    )  # fmt: skip
    return walk(parse_save_text(rules, IPFamily.IPV4), packet, HOST, memory, now, objects=around)


def test_every_real_server_is_as_likely_in_turn():
    trace = ends("", kernel_objects(server("10.64.1.10", "10.64.2.10")))
    assert trace.ends() == {(DELIVERED, (pod, 8080), False): HALF for pod in ("10.64.1.10", "10.64.2.10")}


def test_weights_count_where_the_scheduler_knows_them():
    reals = RealServer("10.64.1.10", 80, 3), RealServer("10.64.2.10", 80, 1), RealServer("10.64.3.10", 80, 0)
    chances = [
        {end[1][0]: chance for end, chance in ends("", kernel_objects(server(*reals, scheduler=name))).ends().items()}
        for name in ("wrr", "sed", "rr", "lc")
    ]
    by_weight = {"10.64.1.10": Fraction(3, 4), "10.64.2.10": Fraction(1, 4)}
    alike = {"10.64.1.10": HALF, "10.64.2.10": HALF}
    assert chances == [by_weight, by_weight, alike, alike]


@pytest.mark.row("13.8")
@pytest.mark.parametrize("reals", [(), (RealServer("10.64.1.10", 80, 0),)])
def test_without_a_real_server_the_kernel_refuses(reals):
    assert ends("", kernel_objects(server(*reals))).ends() == {(Disposition.REJECTED, None, False): 1}


def test_an_address_that_is_not_bound_is_passed_on():
    assert ends("", kernel_objects(server("10.64.1.10"), bound=())).ends() == {(Disposition.NOT_OURS, None, False): 1}


def test_but_what_the_node_itself_sends_is_taken_anyway():
    assert ends("", kernel_objects(server("10.64.1.10"), bound=()), "10.20.0.11").ends() == {
        (DELIVERED, ("10.64.1.10", 8080), False): 1
    }


def test_input_sees_the_address_asked_for_and_output_the_real_server():
    judged = table("filter", f"-A INPUT -d {VIP} -j ACCEPT", "-A INPUT -j DROP", f"-A OUTPUT -d {VIP} -j DROP")
    assert DELIVERED in {end[0] for end in ends(judged, kernel_objects(server("10.64.1.10"))).ends()}
    refused = table("filter", "-A OUTPUT -d 10.64.1.10 -j DROP")
    for source in ("198.51.100.7", "10.20.0.11"):
        assert ends(refused, kernel_objects(server("10.64.1.10")), source).ends() == {
            (Disposition.DROPPED, None, False): 1
        }


def test_mangle_sees_what_the_node_sends_before_ipvs_does():
    rules = table("mangle", f"-A OUTPUT -d {VIP} -m ipvs ! --ipvs -j DROP")
    assert ends(rules, kernel_objects(server("10.64.1.10")), "10.20.0.11").ends() == {
        (Disposition.DROPPED, None, False): 1
    }


@pytest.mark.parametrize(
    ("match", "met"),
    [
        ("--ipvs", True),
        ("! --ipvs", False),
        (f"--vaddr {VIP} --vproto tcp --vport 80", True),
        ("--vaddr 10.110.0.0/16 --vproto 6", True),
        (f"--vaddr {VIP} --vport 81", False),
        ("--vaddr 10.110.0.6", False),
    ],
)
def test_the_match_on_virtual_servers(match, met):
    rules = table("filter", f"-A OUTPUT -m ipvs {match} -j DROP")
    dropped = ends(rules, kernel_objects(server("10.64.1.10"))).ends() == {(Disposition.DROPPED, None, False): 1}
    assert dropped is met


def test_a_real_server_on_this_node_is_no_way_out():
    rules = table("nat", "-A POSTROUTING -j MASQUERADE")
    here, away = kernel_objects(server("10.20.0.11")), kernel_objects(server("10.64.1.10"))
    assert ends(rules, here).ends() == {(DELIVERED, ("10.20.0.11", 8080), False): 1}
    assert ends(rules, away).ends() == {(DELIVERED, ("10.64.1.10", 8080), True): 1}
    assert ends(rules, here, "10.20.0.11").ends() == {(DELIVERED, ("10.20.0.11", 8080), True): 1}


@pytest.mark.row("14.1", "14.6")
def test_persistence_keeps_a_client_at_its_real_server():
    around, memory = kernel_objects(server("10.64.1.10", "10.64.2.10", seconds=600)), Memory()
    first = ends("", around, memory=memory).outcomes[1]
    for name, key in first.remembers:
        memory.touch(name, key, 0.0)
    again = ends("", around, memory=memory, now=599.0)
    assert list(again.ends()) == [(DELIVERED, first.endpoint, False)]
    assert len(ends("", around, memory=memory, now=601.0).ends()) == 2
    assert len(ends("", around, source="198.51.100.8", memory=memory).ends()) == 2


def test_a_virtual_server_for_all_ports():
    around = kernel_objects(server(RealServer("10.64.1.10", 0), port=0, seconds=360))
    assert ends("", around, port=8443).ends() == {(DELIVERED, ("10.64.1.10", 8443), False): 1}


def test_what_is_not_followed_is_said():
    gateway = ends("", kernel_objects(server(RealServer("10.64.1.10", 80, 1, "gateway")))).outcomes
    assert [(each.disposition, "gateway to 10.64.1.10" in each.note) for each in gateway] == [
        (Disposition.UNSUPPORTED, True)
    ]
    marked = table("mangle", "-A PREROUTING -j MARK --set-xmark 0x7/0x7")
    (outcome,) = ends(marked, kernel_objects(bound=(VIP,), marks=(7,))).outcomes
    assert outcome.disposition is Disposition.UNSUPPORTED and "packet mark 0x7" in outcome.note


@pytest.mark.parametrize(
    ("rule", "dropped"),
    [
        ("-m set --match-set A dst,dst", True),
        ("-m set ! --match-set A dst,dst", False),
        ("-m set --match-set A src,dst", False),
        ("-m set --match-set B dst,dst,src", True),
        ("-p udp -m set --match-set A dst,dst", False),
    ],
)
def test_matches_on_sets(rule, dropped):
    sets = (
        IpSet("A", "hash:ip,port", IPFamily.IPV4, frozenset({f"{VIP},tcp:80"})),
        IpSet("B", "hash:ip,port,net", IPFamily.IPV4, frozenset({f"{VIP},tcp:80,198.51.100.0/24"})),
    )
    got = ends(table("filter", f"-A INPUT {rule} -j DROP"), kernel_objects(sets=sets)).ends()
    assert (got == {(Disposition.DROPPED, None, False): 1}) is dropped


@pytest.mark.parametrize(
    ("rule", "note"),
    [
        ("-m set --match-set A dst", "the ipset A is not in the input"),
        ("-m set --match-set L dst", "the set L is not understood: kind list:set"),
        ("-m set --match-set P src", "the client's own port is drawn by the client"),
    ],
)
def test_sets_that_cannot_be_asked_end_the_walk(rule, note):
    strange = IpSet("L", "list:set", IPFamily.IPV4, frozenset(), "kind list:set")
    ports = IpSet("P", "bitmap:port", IPFamily.IPV4, frozenset({"80"}))
    (outcome,) = ends(table("filter", f"-A INPUT {rule} -j DROP"), kernel_objects(sets=(strange, ports))).outcomes
    assert outcome.disposition is Disposition.UNSUPPORTED and note in outcome.note


# ---- dumps ---------------------------------------------------------------------------------------------------------


def test_one_file_may_hold_what_several_tools_print():
    text = (
        "create KUBE-IPVS-IPS hash:ip family inet\nadd KUBE-IPVS-IPS 203.0.113.9\n"
        + table("filter", "-A INPUT -m set --match-set KUBE-IPVS-IPS dst -j DROP")
        + f"# a remark\n-A -t {VIP}:80 -s rr\n-a -t {VIP}:80 -r 10.64.1.10:80 -m -w 1\n"
    )
    dump = read_dumps([("all.txt", text)], IPFamily.IPV4).for_family(IPFamily.IPV4)
    assert dump.objects.bound == {VIP, "203.0.113.9"}
    assert [held.name for held in dump.ruleset.tables] == ["filter"]


def test_the_other_family_is_left_out():
    four = "# Generated by iptables-save v1.8.9\n" + table("filter", "-A INPUT -j DROP")
    six = "# Generated by ip6tables-save v1.8.9\n" + table("filter", "-A INPUT -j ACCEPT")
    servers = f"-A -t {VIP}:80 -s rr\n-A -t [fd6e::5]:80 -s rr\n"
    dump = read_dumps([("four", four), ("six", six), ("ipvs", servers)], IPFamily.IPV6).for_family(IPFamily.IPV6)
    assert len(dump.ruleset.tables) == 1
    assert dump.objects.bound == {"fd6e::5"}
    assert len(read_dumps([("nft", "table ip t {\n}\n")], IPFamily.IPV4).for_family(IPFamily.IPV4).ruleset.tables) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello", "dump.txt: is not what iptables-save"),
        ("-A -t 10.0.0.1:80 -s rr\n-a -t 10.0.0.2:80 -r 10.0.0.3:80 -m", "dump.txt: line 2: "),
        ("create A hash:ip\n\nadd B 10.0.0.1", "dump.txt: line 3: "),
        ("*nat\n-A PREROUTING -j X\n", "dump.txt: line 3: table nat has no COMMIT"),
    ],
)
def test_errors_name_the_file_and_the_line(text, why):
    with pytest.raises(DumpError) as caught:
        read_dumps([("dump.txt", text)], IPFamily.IPV4).for_family(IPFamily.IPV4)
    assert str(caught.value).startswith(why)
