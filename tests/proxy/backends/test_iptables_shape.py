"""What each kind of Service looks like in iptables: kube-proxy's chains, line by line."""

import msgspec
import pytest

from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import NamespacedName, ServicePort, ServicePortName
from narthex.model.packet import Disposition
from narthex.netfilter.ast import Accept, CtState
from narthex.proxy.backends.iptables.backend import LARGE, SMALL_AGAIN, IptablesBackend
from narthex.proxy.backends.iptables.names import IPTABLES_CHAINS, chain_hash, sep, svc, svl
from narthex.proxy.plan.ir import (
    Drop,
    Endpoint,
    Forward,
    Frontend,
    FrontendKind,
    NodePorts,
    Plan,
    PodDetector,
    Pool,
    Reject,
    Scope,
    ServicePlan,
)
from narthex.testing.build import HOST, endpoint, endpoint_slice, packet, plan, port_name, service
from narthex.trace.evaluate import evaluate

is_ours = IPTABLES_CHAINS.is_ours
BACKEND = IptablesBackend()
WEB = port_name("shop/web:http")
HASH = chain_hash("shop/web:httptcp")
C, L = Scope.CLUSTER, Scope.LOCAL


def lines(a_plan, *chains, table=None):
    """The `-A` lines of some chains, of all tables or one."""
    text = BACKEND.text(BACKEND.render(a_plan))
    if table:
        text = text.split(f"*{table}\n")[1].split("COMMIT")[0]
    return [line[3:] for line in text.splitlines() if any(line.startswith(f"-A {chain} ") for chain in chains)]


def web(*backends, port=8080, **fields):
    return (
        service("shop/web", "10.110.0.7", **fields),
        endpoint_slice("shop/web", *(backends or (endpoint("10.64.1.5"),)), port=port),
    )


def own_chains(a_plan):
    return {chain for chain in BACKEND.render(a_plan).chains["nat"] if chain.endswith(HASH) or "-SEP-" in chain}


@pytest.mark.row("22.5")
def test_a_cluster_ip():
    one = sep(WEB, Endpoint("10.64.1.5", 8080))
    assert lines(plan(*web()), "KUBE-SERVICES", f"KUBE-SVC-{HASH}", one, table="nat") == [
        f"{one} -s 10.64.1.5/32 -m comment --comment \"shop/web:http\" -j KUBE-MARK-MASQ",
        f"{one} -p tcp -m comment --comment \"shop/web:http\" -m tcp -j DNAT --to-destination 10.64.1.5:8080",
        "KUBE-SERVICES -d 10.110.0.7/32 -p tcp -m comment --comment \"shop/web:http cluster IP\" -m tcp --dport 80"
        f" -j KUBE-SVC-{HASH}",
        "KUBE-SERVICES -d 10.20.0.11/32 -m comment --comment \"kubernetes service nodeports; NOTE: this must be the"
        " last rule in this chain\" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS",
        f"KUBE-SVC-{HASH} ! -s 10.64.0.0/12 -d 10.110.0.7/32 -p tcp -m comment --comment \"shop/web:http cluster IP\""
        " -m tcp --dport 80 -j KUBE-MARK-MASQ",
        f"KUBE-SVC-{HASH} -m comment --comment \"shop/web:http -> 10.64.1.5:8080\" -j {one}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({}, "! -s 10.64.0.0/12 -d 10.110.0.7/32 -p tcp"),
        ({"masquerade_all": True}, "-d 10.110.0.7/32 -p tcp"),
        ({"detect_local_mode": "NodeCIDR"}, "! -s 10.64.1.0/24 -d 10.110.0.7/32 -p tcp"),
        ({"detect_local_mode": "BridgeInterface", "bridge_interface": "cni0"}, "-d 10.110.0.7/32 ! -i cni0 -p tcp"),
        (
            {"detect_local_mode": "InterfaceNamePrefix", "interface_name_prefix": "veth"},
            "-d 10.110.0.7/32 ! -i veth+ -p tcp",
        ),
        ({"detect_local_mode": ""}, None),
        ({"cluster_cidrs": ("0.0.0.0/0",)}, None),
    ],
)
def test_who_is_masqueraded_at_a_cluster_ip(config, match):
    marks = [line for line in lines(plan(*web(), **config), f"KUBE-SVC-{HASH}") if line.endswith("KUBE-MARK-MASQ")]
    text = (
        f'KUBE-SVC-{HASH} {match} -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ'
    )
    assert marks == ([text] if match else [])


def test_more_than_one_pod_network_needs_a_chain():
    two = msgspec.structs.replace(plan(*web()), pods=PodDetector(cidrs=("10.64.1.0/24", "10.65.0.0/16")))
    assert lines(two, "KUBE-MARK-NONPOD") == [
        "KUBE-MARK-NONPOD -s 10.64.1.0/24 -j RETURN",
        "KUBE-MARK-NONPOD -s 10.65.0.0/16 -j RETURN",
        "KUBE-MARK-NONPOD -j KUBE-MARK-MASQ",
    ]
    assert lines(two, f"KUBE-SVC-{HASH}")[0].endswith("-j KUBE-MARK-NONPOD")
    for source, masquerade in (("10.64.1.9", False), ("10.65.3.9", False), ("198.51.100.7", True)):
        trace = BACKEND.walk(BACKEND.render(two), packet(source, "10.110.0.7:80"), HOST)
        assert [outcome.masquerade for outcome in trace.outcomes] == [masquerade]


@pytest.mark.row("3.9", "21.6")
def test_the_ladder_and_a_change_from_two_to_three():
    pods = [endpoint(f"10.64.1.{n}") for n in (5, 6, 7)]
    two, three = plan(*web(*pods[:2])), plan(*web(*pods))
    steps = [line.partition("--probability ")[2].split()[:1] for line in lines(three, f"KUBE-SVC-{HASH}")[1:]]
    assert steps == [["0.33333333349"], ["0.50000000000"], []]
    before = BACKEND.render(two)
    changes = BACKEND.advance(before, three)[1]
    assert set(changes.written["nat"]) == {f"KUBE-SVC-{HASH}", sep(WEB, Endpoint("10.64.1.7", 8080))}
    assert (changes.written.keys(), changes.removed, changes.jumps) == ({"nat"}, {}, None)


def test_external_cluster_policy_masquerades_everybody():
    a_plan = plan(*web(type="LoadBalancer", node_port=30080, external_ips=("203.0.113.9",), balancers=("203.0.113.1",)))
    assert lines(a_plan, f"KUBE-EXT-{HASH}") == [
        f"KUBE-EXT-{HASH} -m comment --comment \"masquerade traffic for shop/web:http external destinations\""
        " -j KUBE-MARK-MASQ",
        f"KUBE-EXT-{HASH} -j KUBE-SVC-{HASH}",
    ]  # fmt: skip
    services = lines(a_plan, "KUBE-SERVICES", table="nat")
    assert [line.split(" -m ")[1].split('"')[1] for line in services[:-1]] == [
        "shop/web:http cluster IP",
        "shop/web:http external IP",
        "shop/web:http loadbalancer IP",
    ]
    assert lines(a_plan, "KUBE-NODEPORTS") == [
        f"KUBE-NODEPORTS -p tcp -m comment --comment \"shop/web:http\" -m tcp --dport 30080 -j KUBE-EXT-{HASH}"
    ]  # fmt: skip


@pytest.mark.row("22.4")
def test_external_local_policy():
    pods = endpoint("10.64.1.5"), endpoint("10.64.2.5", node="worker-b")
    a_plan = plan(*web(*pods, type="NodePort", node_port=30080, external_policy_local=True))
    assert lines(a_plan, f"KUBE-EXT-{HASH}", f"KUBE-SVL-{HASH}") == [
        f"KUBE-EXT-{HASH} -s 10.64.0.0/12 -m comment --comment \"pod traffic for shop/web:http external destinations\""
        f" -j KUBE-SVC-{HASH}",
        f"KUBE-EXT-{HASH} -m comment --comment \"masquerade LOCAL traffic for shop/web:http external destinations\""
        " -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ",
        f"KUBE-EXT-{HASH} -m comment --comment \"route LOCAL traffic for shop/web:http external destinations\""
        f" -m addrtype --src-type LOCAL -j KUBE-SVC-{HASH}",
        f"KUBE-EXT-{HASH} -j KUBE-SVL-{HASH}",
        f"KUBE-SVL-{HASH} -m comment --comment \"shop/web:http -> 10.64.1.5:8080\""
        f" -j {sep(WEB, Endpoint('10.64.1.5', 8080))}",
    ]  # fmt: skip


def test_external_local_policy_with_nothing_here_drops_outsiders_only():
    pods = endpoint("10.64.2.5", node="worker-b")
    a_plan = plan(*web(pods, type="NodePort", node_port=30080, external_policy_local=True))
    assert not any("SVL" in chain for chain in own_chains(a_plan))
    assert lines(a_plan, "KUBE-EXTERNAL-SERVICES")[1:] == [
        "KUBE-EXTERNAL-SERVICES -d 10.20.0.11/32 -p tcp -m comment --comment \"shop/web:http has no local endpoints\""
        " -m addrtype --dst-type LOCAL -m tcp --dport 30080 -j DROP"
    ]  # fmt: skip


def test_internal_local_policy():
    here = plan(*web(internal_policy_local=True))
    assert own_chains(here) == {f"KUBE-SVL-{HASH}", sep(WEB, Endpoint("10.64.1.5", 8080))}
    away = plan(*web(endpoint("10.64.2.5", node="worker-b"), internal_policy_local=True))
    assert own_chains(away) == set()
    assert lines(away, "KUBE-SERVICES", table="filter")[1:] == [
        "KUBE-SERVICES -d 10.110.0.7/32 -p tcp -m comment --comment \"shop/web:http has no local endpoints\""
        " -m tcp --dport 80 -j DROP"
    ]  # fmt: skip


def test_without_endpoints_every_frontend_rejects():
    void = plan(service("shop/web", "10.110.0.7", type="NodePort", node_port=30080, external_ips=("203.0.113.9",)))
    assert lines(void, "KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", table="filter") == [
        "KUBE-EXTERNAL-SERVICES -m conntrack --ctstate DNAT -j RETURN",
        "KUBE-EXTERNAL-SERVICES -d 203.0.113.9/32 -p tcp -m comment --comment \"shop/web:http has no endpoints\""
        " -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable",
        "KUBE-EXTERNAL-SERVICES -d 10.20.0.11/32 -p tcp -m comment --comment \"shop/web:http has no endpoints\""
        " -m addrtype --dst-type LOCAL -m tcp --dport 30080 -j REJECT --reject-with icmp-port-unreachable",
        "KUBE-SERVICES -m conntrack --ctstate DNAT -j RETURN",
        "KUBE-SERVICES -d 10.110.0.7/32 -p tcp -m comment --comment \"shop/web:http has no endpoints\""
        " -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable",
    ]  # fmt: skip
    host = BACKEND.walk(BACKEND.render(void), packet("10.20.0.11", "203.0.113.9:80"), HOST)
    assert [outcome.disposition for outcome in host.outcomes] == [Disposition.REJECTED], "rows 13.4, 29.5"
    other = BACKEND.walk(BACKEND.render(void), packet("198.51.100.7", "10.20.1.11:30080"), HOST)
    assert [outcome.disposition for outcome in other.outcomes] == [Disposition.NOT_OURS], "rows 13.6, 29.5"


@pytest.mark.row("10.14", "22.4")
def test_source_ranges():
    ranges = ("198.51.100.0/24", "203.0.114.0/24")
    a_plan = plan(*web(type="LoadBalancer", balancers=("203.0.113.1",), source_ranges=ranges))
    text = "-m comment --comment \"shop/web:http loadbalancer IP\""  # fmt: skip
    assert lines(a_plan, f"KUBE-FW-{HASH}", "KUBE-PROXY-FIREWALL") == [
        f"KUBE-FW-{HASH} -s 198.51.100.0/24 {text} -j KUBE-EXT-{HASH}",
        f"KUBE-FW-{HASH} -s 203.0.114.0/24 {text} -j KUBE-EXT-{HASH}",
        f"KUBE-FW-{HASH} -m comment --comment"
        " \"other traffic to shop/web:http will be dropped by KUBE-PROXY-FIREWALL\"",
        "KUBE-PROXY-FIREWALL -m conntrack --ctstate DNAT -j RETURN",
        "KUBE-PROXY-FIREWALL -d 203.0.113.1/32 -p tcp -m comment --comment"
        f" \"shop/web:http traffic not accepted by KUBE-FW-{HASH}\" -m tcp --dport 80 -j DROP",
    ]  # fmt: skip
    empty = plan(
        service("shop/web", "10.110.0.7", type="LoadBalancer", balancers=("203.0.113.1",), source_ranges=ranges)
    )
    assert lines(empty, "KUBE-PROXY-FIREWALL") == [], "row 10.13: the refusal wins"


@pytest.mark.row("14.6")
def test_affinity():
    a_plan = plan(*web(endpoint("10.64.1.5"), endpoint("10.64.1.6"), affinity_seconds=600))
    one, two = (sep(WEB, Endpoint(f"10.64.1.{n}", 8080)) for n in (5, 6))
    seen = "--mask 255.255.255.255 --rsource"
    assert lines(a_plan, f"KUBE-SVC-{HASH}")[1:] == [
        f"KUBE-SVC-{HASH} -m comment --comment \"shop/web:http -> 10.64.1.5:8080\""
        f" -m recent --rcheck --seconds 600 --reap --name {one} {seen} -j {one}",
        f"KUBE-SVC-{HASH} -m comment --comment \"shop/web:http -> 10.64.1.6:8080\""
        f" -m recent --rcheck --seconds 600 --reap --name {two} {seen} -j {two}",
        f"KUBE-SVC-{HASH} -m comment --comment \"shop/web:http -> 10.64.1.5:8080\""
        f" -m statistic --mode random --probability 0.50000000000 -j {one}",
        f"KUBE-SVC-{HASH} -m comment --comment \"shop/web:http -> 10.64.1.6:8080\" -j {two}",
    ]  # fmt: skip
    assert f"-m recent --set --name {one} {seen} -m tcp -j DNAT" in lines(a_plan, one)[1]


def test_ipv6():
    objects = service("shop/web", "fd6e::7"), endpoint_slice("shop/web", endpoint("fd64:0:0:1::5"), port=8080)
    a_plan = plan(*objects, family=IPFamily.IPV6, node_port_addresses=None, localhost_node_ports=True)
    text = BACKEND.text(BACKEND.render(a_plan))
    assert "-j DNAT --to-destination [fd64:0:0:1::5]:8080" in text
    assert "! -s fd64::/48 -d fd6e::7/128 -p tcp" in text
    assert "! -d ::1/128 -m comment" in text, "row 9.10"
    assert "KUBE-FIREWALL" not in text and BACKEND.render(a_plan).sysctls == ()


@pytest.mark.parametrize(
    ("config", "matches"),
    [
        ({"node_port_addresses": None, "localhost_node_ports": True}, [""]),
        ({"node_port_addresses": None}, ["! -d 127.0.0.0/8 "]),
        ({"node_port_addresses": ("0.0.0.0/0",)}, ["! -d 127.0.0.0/8 "]),
        ({"node_port_addresses": ("10.20.0.0/16",)}, ["-d 10.20.0.0/16 "]),
        ({"node_port_addresses": ("10.20.0.11/32", "10.30.0.0/16")}, ["-d 10.20.0.11/32 ", "-d 10.30.0.0/16 "]),
        ({"node_port_addresses": ("127.0.0.0/8", "10.20.0.0/16")}, ["-d 10.20.0.0/16 "]),
        (
            {"node_port_addresses": ("127.0.0.0/8", "10.20.0.0/16"), "localhost_node_ports": True},
            ["-d 10.20.0.0/16 ", "-d 127.0.0.0/8 "],
        ),
        ({"node_port_addresses": ("126.0.0.0/7",)}, ["-d 126.0.0.0/8 "]),
        ({"node_port_addresses": ("fd20::/64",)}, []),
    ],
)
@pytest.mark.row("22.6")
def test_where_node_ports_answer(config, matches):
    a_plan = plan(*web(type="NodePort", node_port=30080), **config)
    if "fd20::/64" in str(config):
        a_plan = msgspec.structs.replace(a_plan, node_ports=NodePorts(cidrs=()))
    jumps = [line for line in lines(a_plan, "KUBE-SERVICES", table="nat") if line.endswith("-j KUBE-NODEPORTS")]
    assert [line.split(" ", 1)[1].split("-m comment")[0] for line in jumps] == matches


@pytest.mark.row("9.11", "22.1")
def test_localhost_node_ports_are_guarded():
    a_plan = plan(*web(type="NodePort", node_port=30080), node_port_addresses=None, localhost_node_ports=True)
    rules = BACKEND.render(a_plan)
    assert rules.sysctls == (("net/ipv4/conf/all/route_localnet", "1"),)
    assert lines(a_plan, "KUBE-FIREWALL") == [
        "KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment \"block incoming localnet connections\""
        " -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
    ]  # fmt: skip
    for chain in ("INPUT", "OUTPUT"):
        assert lines(a_plan, chain, table="filter")[-1] == f"{chain} -j KUBE-FIREWALL"
    assert BACKEND.render(plan(*web(type="NodePort", node_port=30080))).sysctls == ()


@pytest.mark.row("16.9")
def test_health_check_node_ports_are_let_in():
    fields = {"type": "LoadBalancer", "external_policy_local": True, "node_port": 30080}
    cart = service("shop/cart", "10.110.0.8", health_check_node_port=32001, **fields | {"node_port": 30081})
    a_plan = plan(*web(health_check_node_port=32000, **fields), cart)
    assert lines(a_plan, "KUBE-NODEPORTS", table="filter") == [
        'KUBE-NODEPORTS -p tcp -m comment --comment "shop/cart health check node port" -m tcp --dport 32001 -j ACCEPT',
        'KUBE-NODEPORTS -p tcp -m comment --comment "shop/web health check node port" -m tcp --dport 32000 -j ACCEPT',
    ]
    trace = BACKEND.walk(BACKEND.render(a_plan), packet("198.51.100.7", "10.20.0.11:32000"), HOST)
    assert {outcome.disposition for outcome in trace.outcomes} == {Disposition.NOT_OURS}


@pytest.mark.row("5.6", "5.7", "22.1", "22.7")
def test_chains_that_are_always_there():
    a_plan = plan(masquerade_bit=20)
    assert lines(a_plan, "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-FORWARD") == [
        "KUBE-MARK-MASQ -j MARK --set-xmark 0x100000/0x100000",
        "KUBE-POSTROUTING -m mark ! --mark 0x100000/0x100000 -j RETURN",
        "KUBE-POSTROUTING -j MARK --set-xmark 0x100000/0x0",
        "KUBE-POSTROUTING -m comment --comment \"kubernetes service traffic requiring SNAT\" -j MASQUERADE --random-fully",
        "KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP",
        "KUBE-FORWARD -m comment --comment \"kubernetes forwarding rules\" -m mark --mark 0x100000/0x100000 -j ACCEPT",
        "KUBE-FORWARD -m comment --comment \"kubernetes forwarding conntrack rule\""
        " -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    ]  # fmt: skip
    rules = BACKEND.render(a_plan)
    assert set(rules.chains["nat"]) == {
        "KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-PROXY-CANARY",
    }  # fmt: skip
    assert set(rules.chains["filter"]) == {
        "KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-FORWARD", "KUBE-PROXY-FIREWALL",
        "KUBE-PROXY-CANARY",
    }  # fmt: skip
    assert set(rules.chains["mangle"]) == {"KUBE-PROXY-CANARY"}
    for table, chains in rules.chains.items():
        assert all(is_ours(table, chain) for chain in chains)


@pytest.mark.row("22.2", "22.3")
def test_jumps_from_built_in_chains():
    """Rows 22.2 and 22.3, and OUTPUT to EXTERNAL-SERVICES (row 29.5)."""
    targets = {
        place: [rule.expressions[-1].chain.removeprefix("KUBE-") for rule in rules]
        for place, rules in BACKEND.render(plan()).jumps.items()
    }
    new = {
        (place, rule.expressions[-1].chain.removeprefix("KUBE-"))
        for place, rules in BACKEND.render(plan()).jumps.items()
        for rule in rules
        if CtState(("new",)) in rule.expressions
    }
    kinds = ("SERVICES", "EXTERNAL-SERVICES", "PROXY-FIREWALL")
    assert new == {
        (place, target)
        for place, jumps in targets.items()
        if place[0] == "filter"
        for target in jumps
        if target in kinds
    }
    assert targets == {
        ("nat", "PREROUTING"): ["SERVICES"],
        ("nat", "OUTPUT"): ["SERVICES"],
        ("nat", "POSTROUTING"): ["POSTROUTING"],
        ("filter", "INPUT"): ["PROXY-FIREWALL", "NODEPORTS", "EXTERNAL-SERVICES"],
        ("filter", "FORWARD"): ["PROXY-FIREWALL", "FORWARD", "SERVICES", "EXTERNAL-SERVICES"],
        ("filter", "OUTPUT"): ["PROXY-FIREWALL", "SERVICES", "EXTERNAL-SERVICES"],
    }


@pytest.mark.row("22.8")
def test_nothing_is_opened_but_health_check_ports_and_what_is_to_be_masqueraded():
    empty = service("shop/empty", "10.110.0.9", external_ips=("203.0.113.1",))
    fields = {"type": "LoadBalancer", "external_policy_local": True, "node_port": 30080, "balancers": ["203.0.113.2"]}
    rules = BACKEND.render(
        plan(
            *web(health_check_node_port=32000, source_ranges=("198.51.100.0/24",), affinity_seconds=60, **fields),
            empty,
            localhost_node_ports=True,
            node_port_addresses=None,
        )
    )
    opening = [
        (table, chain, len(rule.expressions) > 1)
        for table, chains in rules.chains.items()
        for chain, lines in chains.items()
        for rule in lines
        if rule.expressions[-1:] == (Accept(),)
    ]
    assert sorted(opening) == [
        ("filter", "KUBE-FORWARD", True),
        ("filter", "KUBE-FORWARD", True),
        ("filter", "KUBE-NODEPORTS", True),
    ]


@pytest.mark.row("21.12")
def test_large_clusters_have_no_comments_on_endpoint_rules():
    def of(count):
        pods = tuple(Endpoint(f"10.64.{n // 200}.{n % 200 + 1}", 80) for n in range(count))
        every = Forward(C, True)
        front = Frontend(
            kind=FrontendKind.CLUSTER_IP, address="10.110.0.7", protocol=Protocol.TCP, port=80, pod=every, node=every,
            other=every,
        )  # fmt: skip
        return ServicePlan(name=WEB, frontends=(front,), cluster=Pool(endpoints=pods))

    small, large = (Plan(family=IPFamily.IPV4, services={WEB: of(count)}) for count in (LARGE, LARGE + 1))
    assert "->" in BACKEND.text(BACKEND.render(small))
    assert "->" not in BACKEND.text(BACKEND.render(large))
    grown, _ = BACKEND.advance(BACKEND.render(small), large)
    assert grown == BACKEND.render(large)
    # One endpoint less is no reason to write all chains of all endpoints again.
    assert "->" not in BACKEND.text(BACKEND.advance(grown, small)[0])
    smaller = Plan(family=IPFamily.IPV4, services={WEB: of(SMALL_AGAIN)})
    assert BACKEND.advance(grown, smaller)[0] == BACKEND.render(smaller)


CELLS = [Forward(C, False), Forward(C, True), Forward(L, False), Forward(L, True), Drop(), Reject()]
ROWS = [(pod, node, other) for pod in CELLS for node in CELLS for other in CELLS]
DETECTORS = [
    PodDetector(),
    PodDetector(cidrs=("10.64.0.0/12",)),
    PodDetector(cidrs=("10.64.1.0/24", "10.64.2.0/24")),
    PodDetector(cidrs=("0.0.0.0/0",)),
    PodDetector(interface="cni0"),
    PodDetector(interface_prefix="cni"),
]


@pytest.mark.parametrize("detector", DETECTORS, ids=repr)
def test_every_row_of_decisions_holds(detector):
    """Also rows that no planner makes today: a backend must not know which ones those are."""
    pods = Endpoint("10.64.1.5", 8080, local=True), Endpoint("10.64.2.5", 8080)
    packets = [
        packet(source, f"{address}:{port}", iif="cni0" if source.startswith("10.64") else "eth0")
        for source in ("10.64.1.5", "10.64.2.9", "10.20.0.11", "198.51.100.7")
        for address, port in (("10.110.0.7", 80), ("203.0.113.1", 80), ("203.0.113.2", 80), ("10.20.0.11", 30080))
    ]
    ways = [
        (FrontendKind.CLUSTER_IP, "10.110.0.7", 80, None),
        (FrontendKind.EXTERNAL_IP, "203.0.113.1", 80, None),
        (FrontendKind.LOAD_BALANCER, "203.0.113.2", 80, ("10.64.1.0/24", "198.51.100.0/24")),
        (FrontendKind.NODE_PORT, None, 30080, None),
    ]
    for number, row in enumerate(ROWS):
        # Each frontend has another row, so that chains of several rows stand side by side.
        rows = [ROWS[(number + step) % len(ROWS)] for step in (0, 0, 7, 91)]
        fronts = tuple(
            Frontend(
                kind=kind, address=address, protocol=Protocol.TCP, port=port, allow_from=allow, pod=pod, node=node, other=other
            )
            for (kind, address, port, allow), (pod, node, other) in zip(ways, rows, strict=True)
        )  # fmt: skip
        a_plan = Plan(
            family=IPFamily.IPV4,
            services={
                WEB: ServicePlan(
                    name=WEB, frontends=fronts, cluster=Pool(endpoints=pods), local=Pool(endpoints=pods[:1])
                )
            },
            pods=detector,
        )
        rules = BACKEND.render(a_plan)
        for each in packets:
            meant = evaluate(a_plan, each, HOST, BACKEND.deviations).ends()
            assert {end: round(chance, 6) for end, chance in BACKEND.walk(rules, each, HOST).ends().items()} == {
                end: round(chance, 6) for end, chance in meant.items()
            }, f"{row} {each}"


def test_an_address_that_forwards_nothing_is_no_node_port():
    """An external IP that is the node's own and has a node port's number: the exact address has the say."""
    mine = service("shop/mine", "10.110.0.8", type="NodePort", node_port=30080)
    void = service(
        "shop/void", "10.110.0.9", external_ips=("10.20.0.11",), ports=(ServicePort(name="http", port=30080),)
    )
    a_plan = plan(mine, endpoint_slice("shop/mine", endpoint("10.64.1.5")), void)
    trace = BACKEND.walk(BACKEND.render(a_plan), packet("198.51.100.7", "10.20.0.11:30080"), HOST)
    assert [outcome.disposition for outcome in trace.outcomes] == [Disposition.REJECTED]


@pytest.mark.parametrize("name", ['a"b', "a\nb", "a' -j ACCEPT", "x" * 400, "$(x)\\", "é" * 200])
def test_a_hostile_name_stays_in_its_comment(name):
    hostile = ServicePortName(NamespacedName(name, name), name, Protocol.TCP)
    every = Forward(C, True)
    fronts = tuple(
        Frontend(
            kind=kind, address=address, protocol=Protocol.TCP, port=80, allow_from=allow, pod=Forward(C, False), node=every,
            other=every,
        )
        for kind, address, allow in (
            (FrontendKind.CLUSTER_IP, "10.110.0.7", None),
            (FrontendKind.LOAD_BALANCER, "203.0.113.1", ("198.51.100.0/24",)),
        )
    )  # fmt: skip
    service_plan = ServicePlan(
        name=hostile, frontends=fronts, cluster=Pool(endpoints=(Endpoint("10.64.1.5", 80),)), affinity_seconds=5
    )
    a_plan = Plan(family=IPFamily.IPV4, services={hostile: service_plan}, pods=PodDetector(cidrs=("10.64.0.0/12",)))
    plain = msgspec.structs.replace(a_plan, services={WEB: msgspec.structs.replace(service_plan, name=WEB)})
    text, expected = BACKEND.text(BACKEND.render(a_plan)), BACKEND.text(BACKEND.render(plain))
    assert len(text.splitlines()) == len(expected.splitlines())
    assert all(line.startswith(("*", ":", "-A ", "COMMIT")) for line in text.splitlines())


@pytest.mark.row("22.4")
def test_names():
    dns = port_name("kube-system/kube-dns:dns", Protocol.UDP)
    assert (svc(dns), svl(dns)) == ("KUBE-SVC-TCOU7JCQXEZGVUNU", "KUBE-SVL-TCOU7JCQXEZGVUNU")
    client = Endpoint("10.244.5.216", 6379)
    assert sep(port_name("redis/redis:client"), client) == "KUBE-SEP-BAPRIFMT5YYOA3WI"
    assert is_ours("nat", "KUBE-XLB-VZFKBL2WWL2EQZ6G") and not is_ours("filter", "KUBE-SVC-TCOU7JCQXEZGVUNU")
    for chain in (
        "KUBE-MARK-DROP",
        "KUBE-IPTABLES-HINT",
        "KUBE-KUBELET-CANARY",
        "KUBE-ROUTER-INPUT",
        "DOCKER",
        "KUBE-SVC-X",
    ):
        assert not any(is_ours(table, chain) for table in ("nat", "filter", "mangle", "raw")), chain
