"""Known answers from a cluster that ran kube-proxy 1.22 in ipvs mode: its `ipvsadm -l` and its chain KUBE-SERVICES."""

from fractions import Fraction

import pytest

from narthex.model.objects import EndpointPort, ServicePort
from narthex.model.packet import Disposition, Host, Packet
from narthex.netfilter.ast import Accept, Compare, Field, IsLocal, Jump, MatchSet
from narthex.netfilter.dump.read import read_dumps
from narthex.netfilter.ipvs import ipvsadm_save_text
from narthex.netfilter.walk.walk import walk
from narthex.proxy.backends.ipvs.backend import IpvsBackend
from narthex.proxy.plan.ir import IPFamily
from narthex.testing.build import endpoint, endpoint_slice, plan, service

PODS = "172.30.0.0/16"
NODE = Host(addresses=("10.7.0.11",))
REALS = ("172.30.0.12", "172.30.0.16", "172.30.3.12", "172.30.3.13")
PORTS = (ServicePort(name="http", port=8080), ServicePort(name="web", port=80), ServicePort(name="grpc", port=50051))


@pytest.fixture(scope="module")
def rules():
    backend = IpvsBackend()
    return backend.render(
        plan(
            service("shop/app", "172.31.12.98", ports=PORTS),
            endpoint_slice("shop/app", *map(endpoint, REALS), ports=(EndpointPort(name="grpc", port=50051),)),
            service("shop/front", "172.31.0.7", type="LoadBalancer", balancers=["203.0.113.10"]),
            cluster_cidrs=(PODS,),
            node_addresses=NODE.addresses,
            node_port_addresses=None,
        )
    )


@pytest.mark.row("24.2", "24.6")
def test_the_four_real_servers(rules):
    """TCP 172.31.12.98:50051 rr, four real servers, Masq, weight 1."""
    (server,) = (each for each in rules.servers.values() if each.port == 50051)
    assert ipvsadm_save_text([server]).splitlines() == [
        "-A -t 172.31.12.98:50051 -s rr",
        "-a -t 172.31.12.98:50051 -r 172.30.0.12:50051 -m -w 1",
        "-a -t 172.31.12.98:50051 -r 172.30.0.16:50051 -m -w 1",
        "-a -t 172.31.12.98:50051 -r 172.30.3.12:50051 -m -w 1",
        "-a -t 172.31.12.98:50051 -r 172.30.3.13:50051 -m -w 1",
    ]


@pytest.mark.row("24.14")
def test_the_chain_of_services(rules):
    """LOAD-BALANCER, MARK-MASQ for what is no pod, NODE-PORT for local addresses, and twice ACCEPT."""
    both = ("dst", "dst")
    assert [rule.expressions for rule in rules.tables.chains["nat"]["KUBE-SERVICES"]] == [
        (MatchSet("KUBE-LOAD-BALANCER", both), Jump("KUBE-LOAD-BALANCER")),
        (Compare(Field.SADDR, (PODS,), negate=True), MatchSet("KUBE-CLUSTER-IP", both), Jump("KUBE-MARK-MASQ")),
        (IsLocal(Field.DADDR), Jump("KUBE-NODE-PORT")),
        (MatchSet("KUBE-CLUSTER-IP", both), Accept()),
        (MatchSet("KUBE-LOAD-BALANCER", both), Accept()),
    ]
    comments = [rule.comment for rule in rules.tables.chains["nat"]["KUBE-SERVICES"]][:2]
    assert comments == ["Kubernetes service lb portal", "Kubernetes service cluster ip + port for masquerade purpose"]


DUMP = """
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE
-A KUBE-SERVICES -m comment --comment "Kubernetes service lb portal" -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
-A KUBE-SERVICES ! -s 172.30.0.0/16 -m comment --comment "Kubernetes service cluster ip + port for masquerade purpose" -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j ACCEPT
COMMIT
"""
SETS = """
create KUBE-CLUSTER-IP hash:ip,port family inet hashsize 1024 maxelem 65536
add KUBE-CLUSTER-IP 172.31.12.98,tcp:50051
create KUBE-LOAD-BALANCER hash:ip,port family inet hashsize 1024 maxelem 65536
"""


@pytest.mark.parametrize(
    ("source", "iif", "from_host", "masquerade"),
    [("172.30.0.200", "cni0", False, False), ("10.7.0.11", "", True, True), ("10.7.0.99", "eth0", False, True)],
    ids=["a pod keeps its source", "the node does not", "nor do others"],
)
def test_the_walk_of_the_text(rules, source, iif, from_host, masquerade):
    """A pod's packet is rewritten by IPVS alone; anybody else's is masqueraded, too."""
    servers = ipvsadm_save_text(each for each in rules.servers.values() if each.port == 50051)
    dump = read_dumps([("iptables-save", DUMP), ("ipset", SETS), ("ipvsadm", servers)], IPFamily.IPV4).for_family(
        IPFamily.IPV4
    )
    asked = Packet(source=source, destination="172.31.12.98", port=50051, iif=iif, from_host=from_host)
    ends = walk(dump.ruleset, asked, NODE, objects=dump.objects).ends()
    quarter = Fraction(1, 4)
    assert ends == {(Disposition.DELIVERED, (real, 50051), masquerade): quarter for real in REALS}
