"""Walks through dumps of real clusters, as kube-proxy and kubelet of 2018 to 2020 wrote them."""

from fractions import Fraction
from pathlib import Path

from narthex.model.net import IPFamily, Protocol
from narthex.model.packet import Disposition, Host, Packet, Trace
from narthex.netfilter.walk.walk import walk
from narthex.netfilter.xtables.parse import parse_save_text

NODE = Host(addresses=("192.168.56.11",))

NODE_PORT = (Path(__file__).parents[1] / "dumps" / "hello-world.iptables-save").read_text()

LADDER = """
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A POSTROUTING -s 10.244.0.0/16 -d 10.244.0.0/16 -j RETURN
-A POSTROUTING -s 10.244.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE
-A POSTROUTING ! -s 10.244.0.0/16 -d 10.244.0.0/24 -j RETURN
-A POSTROUTING ! -s 10.244.0.0/16 -d 10.244.0.0/16 -j MASQUERADE
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -m mark --mark 0x4000/0x4000 -j MASQUERADE
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
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD -s 10.244.0.0/16 -j ACCEPT
-A FORWARD -d 10.244.0.0/16 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -s 10.244.0.0/16 -m comment --comment "kubernetes forwarding conntrack pod source rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-SERVICES -d 10.109.183.27/32 -p tcp -m comment --comment "jhub/hub: has no endpoints" -m tcp --dport 8081 -j REJECT --reject-with icmp-port-unreachable
COMMIT
"""

BALANCER = """
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SERVICES -d 192.168.15.1/32 -p tcp -m comment --comment "kube-system/traefik-load-balance-service:https loadbalancer IP" -m tcp --dport 443 -j KUBE-FW-OZONKQKEZE5YW3UK
-A KUBE-FW-OZONKQKEZE5YW3UK -m comment --comment "kube-system/traefik-load-balance-service:https loadbalancer IP" -j KUBE-XLB-OZONKQKEZE5YW3UK
-A KUBE-FW-OZONKQKEZE5YW3UK -m comment --comment "kube-system/traefik-load-balance-service:https loadbalancer IP" -j KUBE-MARK-DROP
-A KUBE-XLB-OZONKQKEZE5YW3UK -m comment --comment "masquerade LOCAL traffic for kube-system/traefik-load-balance-service:https LB IP" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
-A KUBE-XLB-OZONKQKEZE5YW3UK -m comment --comment "route LOCAL traffic for kube-system/traefik-load-balance-service:https LB IP to service chain" -m addrtype --src-type LOCAL -j KUBE-SVC-OZONKQKEZE5YW3UK
-A KUBE-XLB-OZONKQKEZE5YW3UK -s 10.244.0.0/16 -m comment --comment "Redirect pods trying to reach external loadbalancer VIP to clusterIP" -j KUBE-SVC-OZONKQKEZE5YW3UK
-A KUBE-XLB-OZONKQKEZE5YW3UK -m comment --comment "kube-system/traefik-load-balance-service:https has no local endpoints" -j KUBE-MARK-DROP
-A KUBE-SVC-OZONKQKEZE5YW3UK -j KUBE-SEP-EUB52TCTNKDY6XP4
-A KUBE-SEP-EUB52TCTNKDY6XP4 -p tcp -m tcp -j DNAT --to-destination 10.244.7.9:443
-A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL -m comment --comment "kubernetes firewall for dropping marked packets" -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
"""


def walked(dump: str, source: str, destination: str, port: int, host: Host = NODE, from_host: bool = False) -> Trace:
    packet = Packet(source=source, destination=destination, port=port, protocol=Protocol.TCP, from_host=from_host)
    return walk(parse_save_text(dump, IPFamily.IPV4), packet, host)


def test_node_port_from_outside() -> None:
    trace = walked(NODE_PORT, "203.0.113.9", "192.168.56.11", 30001)
    (outcome,) = trace.outcomes
    assert (outcome.endpoint, outcome.masquerade) == (("10.244.3.81", 8080), True)
    assert [step.where.rpartition(" ")[2] for step in outcome.steps] == [
        "PREROUTING",
        "KUBE-SERVICES",
        "KUBE-NODEPORTS",
        "KUBE-MARK-MASQ",
        "KUBE-NODEPORTS",
        "KUBE-SVC-5MRENC7Q6ZQR6GKR",
        "KUBE-SEP-JNUJINTC6VOLRDUD",
        "POSTROUTING",
        "KUBE-POSTROUTING",
    ]


def test_cluster_ip_from_pods_and_host() -> None:
    for source, from_host, masquerade in (
        ("10.244.1.5", False, False),
        ("10.244.3.81", False, True),
        ("192.168.56.11", True, True),
    ):
        (outcome,) = walked(NODE_PORT, source, "10.106.183.112", 4000, from_host=from_host).outcomes
        assert (outcome.endpoint, outcome.masquerade) == (("10.244.3.81", 8080), masquerade)


def test_ladder_of_which_one_rung_is_known() -> None:
    trace = walked(LADDER, "203.0.113.9", "10.96.7.210", 6379)
    ends = trace.ends()
    sixth = ends[Disposition.DELIVERED, ("10.244.5.216", 6379), True]
    assert abs(sixth - Fraction(1, 6)) < Fraction(1, 10**4)
    assert ends[Disposition.UNSUPPORTED, None, False] == 1 - sixth
    notes = {outcome.note for outcome in trace.outcomes if outcome.note}
    assert "chain KUBE-SEP-MWI2C5QF6IXJQU63 of table nat is not in the input" in notes
    assert len(notes) == 5


def test_forward_policy_drop_lets_pods_through() -> None:
    (outcome,) = walked(LADDER, "10.244.5.9", "10.244.6.6", 80).outcomes
    assert outcome.disposition is Disposition.NOT_OURS
    (outcome,) = walked(LADDER, "203.0.113.9", "198.51.100.1", 80).outcomes
    assert outcome.disposition is Disposition.DROPPED


def test_service_without_endpoints() -> None:
    (outcome,) = walked(LADDER, "10.244.5.9", "10.109.183.27", 8081).outcomes
    assert outcome.disposition is Disposition.REJECTED
    assert outcome.steps[-1].why == "jhub/hub: has no endpoints"


def test_balancer_with_no_local_endpoint() -> None:
    bound_here = Host(addresses=("192.168.56.11", "192.168.15.1"))
    (outcome,) = walked(BALANCER, "203.0.113.9", "192.168.15.1", 443, bound_here).outcomes
    assert outcome.disposition is Disposition.DROPPED
    (outcome,) = walked(BALANCER, "10.244.1.5", "192.168.15.1", 443).outcomes
    assert (outcome.endpoint, outcome.masquerade) == (("10.244.7.9", 443), False)
    (outcome,) = walked(BALANCER, "192.168.56.11", "192.168.15.1", 443, from_host=True).outcomes
    assert (outcome.endpoint, outcome.masquerade) == (("10.244.7.9", 443), True)
