"""Known answers from iptables dumps that people published between 2018 and 2023, kube-proxy's own work."""

from pathlib import Path

import pytest

from narthex.model.net import IPFamily, Protocol, split_port
from narthex.model.objects import EndpointPort, ServicePort, ServicePortName
from narthex.model.packet import Disposition, Host, Packet
from narthex.netfilter.ast import RandomMatch, Unknown
from narthex.netfilter.walk.walk import walk
from narthex.netfilter.xtables.parse import parse_rules, parse_save_text
from narthex.netfilter.xtables.values import kernel_probability
from narthex.proxy.backends.iptables.backend import IptablesBackend
from narthex.proxy.backends.iptables.names import chain_hash, sep, service_id, svc
from narthex.proxy.plan.ir import Endpoint
from narthex.testing.build import endpoint, endpoint_slice, plan, port_name, service

V4 = IPFamily.IPV4
BACKEND = IptablesBackend()

NAMED = [
    ("redis/redis:client", "tcp", "X65RDOJUUA3VPRY4"),
    ("rabbitmq/rabbitmq:http", "tcp", "35VHXOLOORONIWYJ"),
    ("seaweedfs/filer:http", "tcp", "BRYNYVZ5Q2DDPJIY"),
    ("kube-system/traefik-load-balance-service:web", "tcp", "VZFKBL2WWL2EQZ6G"),
    ("kube-system/traefik-load-balance-service:https", "tcp", "OZONKQKEZE5YW3UK"),
    ("kube-system/kube-dns:dns", "udp", "TCOU7JCQXEZGVUNU"),
    ("kube-system/kube-dns:dns-tcp", "tcp", "ERIFXISQEP7F7OF4"),
    ("kube-system/kube-dns:metrics", "tcp", "JD5MR3NA4I4DYORP"),
    ("kube-system/tiller-deploy:tiller", "tcp", "K7J76NXP7AUZVFGS"),
    ("default/kubernetes:https", "tcp", "NPX46M4PTMTKRN6Y"),
]


@pytest.mark.parametrize(("text", "protocol", "known"), NAMED)
def test_hashes_of_service_ports(text, protocol, known):
    name = port_name(text, Protocol(protocol.upper()))
    assert str(name) == text
    assert svc(name) == f"KUBE-SVC-{known}"


def test_hashes_of_endpoints():
    redis = Endpoint(*split_port("10.244.5.216:6379"))
    assert sep(port_name("redis/redis:client"), redis) == "KUBE-SEP-BAPRIFMT5YYOA3WI"


def test_hashes_of_an_unnamed_port_of_that_time():
    """kube-proxy left the colon then; the hash is the same function of another identity."""
    hello = port_name("default/hello-world-service")
    old = "default/hello-world-service:" + hello.protocol.lower
    assert service_id(hello) == "default/hello-world-servicetcp"
    assert chain_hash(old) == "5MRENC7Q6ZQR6GKR"
    assert chain_hash(old + "10.244.3.81:8080") == "JNUJINTC6VOLRDUD"


LADDERS = [
    ["0.14286000002", "0.16667000018", "0.20000000019", "0.25000000000", "0.33332999982", "0.50000000000"],
    ["0.16667000018", "0.20000000019", "0.25000000000", "0.33332999982", "0.50000000000"],
    ["0.33332999982", "0.50000000000"],
    ["0.50000000000"],
]


@pytest.mark.parametrize("ladder", LADDERS, ids=len)
def test_ladders(ladder):
    """Five decimals were written then; the kernel's rounding is the same today."""
    left = len(ladder) + 1
    assert [kernel_probability(f"{1 / (left - step):.5f}") for step in range(len(ladder))] == ladder


REDIS = """
-A KUBE-SERVICES ! -s 10.244.0.0/16 -d 10.96.7.210/32 -p tcp -m comment --comment "redis/redis:client cluster IP" -m tcp --dport 6379 -j KUBE-MARK-MASQ
-A KUBE-SERVICES -d 10.96.7.210/32 -p tcp -m comment --comment "redis/redis:client cluster IP" -m tcp --dport 6379 -j KUBE-SVC-X65RDOJUUA3VPRY4
-A KUBE-SVC-X65RDOJUUA3VPRY4 -m statistic --mode random --probability 0.16667000018 -j KUBE-SEP-MWI2C5QF6IXJQU63
-A KUBE-SVC-X65RDOJUUA3VPRY4 -m statistic --mode random --probability 0.20000000019 -j KUBE-SEP-FXRXESSRETWGI65E
-A KUBE-SVC-X65RDOJUUA3VPRY4 -m statistic --mode random --probability 0.25000000000 -j KUBE-SEP-66HFVIWNCINZQPZR
-A KUBE-SVC-X65RDOJUUA3VPRY4 -m statistic --mode random --probability 0.33332999982 -j KUBE-SEP-ZH23ZMDYUP2DO5GI
-A KUBE-SVC-X65RDOJUUA3VPRY4 -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-BAPRIFMT5YYOA3WI
-A KUBE-SVC-X65RDOJUUA3VPRY4 -j KUBE-SEP-ILU3WXFIDU2MOAD4
-A KUBE-SEP-BAPRIFMT5YYOA3WI -s 10.244.5.216/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-BAPRIFMT5YYOA3WI -p tcp -m tcp -j DNAT --to-destination 10.244.5.216:6379
"""


def test_the_redis_fragment_is_what_we_write_today_but_for_decimals_and_comments():
    """Since 1.22 the masquerade rule stands at the head of the Service's own chain."""
    rules = parse_rules(REDIS, V4)
    assert not [e for each in rules.values() for rule in each for e in rule.expressions if isinstance(e, Unknown)]
    pods = [endpoint(f"10.244.5.{n}") for n in (212, 213, 214, 215, 216, 217)]
    ours = BACKEND.render(
        plan(
            service("redis/redis", "10.96.7.210", ports=(ServicePort(name="client", port=6379),)),
            endpoint_slice("redis/redis", *pods, ports=(EndpointPort(name="client", port=6379),)),
            cluster_cidrs=("10.244.0.0/16",),
        )
    ).chains["nat"]
    service_chain, endpoint_chain = "KUBE-SVC-X65RDOJUUA3VPRY4", "KUBE-SEP-BAPRIFMT5YYOA3WI"
    assert [rule.expressions for rule in ours[endpoint_chain]] == [rule.expressions for rule in rules[endpoint_chain]]
    assert ours["KUBE-SERVICES"][0] == rules["KUBE-SERVICES"][1]
    assert ours[service_chain][0] == rules["KUBE-SERVICES"][0]
    assert ours[service_chain][5].expressions[-1] == rules[service_chain][4].expressions[-1]
    for one, other in zip(ours[service_chain][1:6], rules[service_chain][:5], strict=True):
        new, old = (float(rule.expressions[0].probability) for rule in (one, other))
        assert isinstance(one.expressions[0], RandomMatch) and abs(new - old) < 0.00001


HELLO = (Path(__file__).parents[1] / "dumps" / "hello-world.iptables-save").read_text()
NODE = Host(addresses=("192.168.1.11",))


def test_the_node_port_walk():
    """From outside to nodePort 30001 of any node: the one pod on 8080, with the node's source."""
    outside = Packet(source="192.168.1.99", destination="192.168.1.11", port=30001, iif="eth0")
    hello = "default/hello-world-service"
    port = ServicePort(name="", port=4000, node_port=30001)
    ours = plan(
        service(hello, "10.106.183.112", type="NodePort", ports=(port,)),
        endpoint_slice(hello, endpoint("10.244.3.81"), ports=(EndpointPort(name="", port=8080),)),
        cluster_cidrs=("10.244.0.0/16",),
        node_port_addresses=None,
    )
    theirs, mine = walk(parse_save_text(HELLO, V4), outside, NODE), BACKEND.walk(BACKEND.render(ours), outside, NODE)
    for trace in (theirs, mine):
        assert trace.ends() == {(Disposition.DELIVERED, ("10.244.3.81", 8080), True): 1}
    way = [step.where.rsplit(" ", 1)[-1] for step in theirs.outcomes[0].steps]
    met = [chain for n, chain in enumerate(way) if chain not in way[:n]]
    assert met[:4] == ["PREROUTING", "KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-MARK-MASQ"]
    assert "KUBE-SVC-5MRENC7Q6ZQR6GKR" in met and "KUBE-SEP-JNUJINTC6VOLRDUD" in met
    pod = Packet(source="10.244.7.7", destination="10.106.183.112", port=4000, iif="cni0")
    assert walk(parse_save_text(HELLO, V4), pod, NODE).ends() == BACKEND.walk(BACKEND.render(ours), pod, NODE).ends()


TRAEFIK = """*nat
:PREROUTING ACCEPT [0:0]
:KUBE-FW-VZFKBL2WWL2EQZ6G - [0:0]
:KUBE-MARK-DROP - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SEP-EUB52TCTNKDY6XP4 - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-VZFKBL2WWL2EQZ6G - [0:0]
:KUBE-XLB-VZFKBL2WWL2EQZ6G - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 192.168.15.1/32 -p tcp -m comment --comment "kube-system/traefik-load-balance-service:web loadbalancer IP" -m tcp --dport 80 -j KUBE-FW-VZFKBL2WWL2EQZ6G
-A KUBE-FW-VZFKBL2WWL2EQZ6G -m comment --comment "kube-system/traefik-load-balance-service:web loadbalancer IP" -j KUBE-XLB-VZFKBL2WWL2EQZ6G
-A KUBE-FW-VZFKBL2WWL2EQZ6G -m comment --comment "kube-system/traefik-load-balance-service:web loadbalancer IP" -j KUBE-MARK-DROP
-A KUBE-XLB-VZFKBL2WWL2EQZ6G -m comment --comment "masquerade LOCAL traffic for kube-system/traefik-load-balance-service:web LB IP" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
-A KUBE-XLB-VZFKBL2WWL2EQZ6G -s 10.244.0.0/16 -m comment --comment "Redirect pods trying to reach external loadbalancer VIP to clusterIP" -j KUBE-SVC-VZFKBL2WWL2EQZ6G
-A KUBE-XLB-VZFKBL2WWL2EQZ6G -m comment --comment "Balancing rule 0 for kube-system/traefik-load-balance-service:web" -j KUBE-SEP-EUB52TCTNKDY6XP4
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SEP-EUB52TCTNKDY6XP4 -p tcp -m tcp -j DNAT --to-destination 10.244.1.5:8000
-A KUBE-SVC-VZFKBL2WWL2EQZ6G -j KUBE-SEP-EUB52TCTNKDY6XP4
COMMIT
*filter
:FORWARD ACCEPT [0:0]
:KUBE-FIREWALL - [0:0]
-A FORWARD -j KUBE-FIREWALL
-A KUBE-FIREWALL -m comment --comment "kubernetes firewall for dropping marked packets" -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
"""
LAST_RULE = '-A KUBE-XLB-VZFKBL2WWL2EQZ6G -m comment --comment "Balancing rule 0'


def test_the_layout_before_1_24_is_walked():
    """KUBE-XLB- and KUBE-MARK-DROP: delivered with a local pod, dropped for outsiders without one."""
    outside = Packet(source="192.168.15.99", destination="192.168.15.1", port=80, iif="eth0")
    delivered = (Disposition.DELIVERED, ("10.244.1.5", 8000), False)
    assert walk(parse_save_text(TRAEFIK, V4), outside, NODE).ends() == {delivered: 1}
    without = "\n".join(
        '-A KUBE-XLB-VZFKBL2WWL2EQZ6G -m comment --comment "x has no local endpoints" -j KUBE-MARK-DROP'
        if line.startswith(LAST_RULE)
        else line
        for line in TRAEFIK.splitlines()
    )
    assert [end[0] for end in walk(parse_save_text(without, V4), outside, NODE).ends()] == [Disposition.DROPPED]
    pod = Packet(source="10.244.9.9", destination="192.168.15.1", port=80, iif="cni0")
    assert walk(parse_save_text(without, V4), pod, NODE).ends() == {delivered: 1}


FLANNEL = """
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 10.244.0.0/16 -d 10.244.0.0/16 -j RETURN
-A POSTROUTING -s 10.244.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE
-A POSTROUTING ! -s 10.244.0.0/16 -d 10.244.0.0/24 -j RETURN
-A POSTROUTING ! -s 10.244.0.0/16 -d 10.244.0.0/16 -j MASQUERADE
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD -s 10.244.0.0/16 -j ACCEPT
-A KUBE-FORWARD -s 10.244.0.0/16 -m comment --comment "kubernetes forwarding conntrack pod source rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-SERVICES -d 10.109.183.27/32 -p tcp -m comment --comment "jhub/hub: has no endpoints" -m tcp --dport 8081 -j REJECT --reject-with icmp-port-unreachable
"""


def test_rules_of_docker_and_flannel_are_understood():
    rules = parse_rules(FLANNEL, V4)
    expressions = [e for each in rules.values() for rule in each for e in rule.expressions]
    assert len(expressions) > 20 and not [e for e in expressions if isinstance(e, Unknown)]
    assert rules["KUBE-SERVICES"][0].comment == "jhub/hub: has no endpoints"


def test_the_scale_from_two_to_three():
    """One new rule in the Service's chain, one new endpoint chain, the others as they were."""
    name = "eks-dev-1-appname-ns/appname-backend-svc"
    port = EndpointPort(name="", port=3001)

    def scaled(*pods):
        return plan(
            service(name, "172.20.249.22", type="NodePort", ports=(ServicePort(name="", port=80, node_port=31103),)),
            endpoint_slice(name, *(endpoint(pod) for pod in pods), ports=(port,)),
        )

    two = BACKEND.render(scaled("10.3.34.219", "10.3.57.124"))
    three, changes = BACKEND.advance(two, scaled("10.3.34.219", "10.3.41.7", "10.3.57.124"))
    port_of = ServicePortName(port_name(name).service, "", Protocol.TCP)
    chances = [
        [
            e.probability
            for rule in rules.chains["nat"][svc(port_of)]
            for e in rule.expressions
            if isinstance(e, RandomMatch)
        ]
        for rules in (two, three)
    ]
    assert chances == [["0.50000000000"], ["0.33333333349", "0.50000000000"]]
    assert set(changes.written) == {"nat"}
    assert set(changes.written["nat"]) == {svc(port_of), sep(port_of, Endpoint("10.3.41.7", 3001))}
    assert BACKEND.patch(two, changes) == three
