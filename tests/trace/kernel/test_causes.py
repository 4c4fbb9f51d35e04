"""Faults built with real rules, links and packets: the kernel loses the packet, and the first cause that is named is the
right one. The same worlds whole: the packet arrives, and nothing is found."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import msgspec
import pytest
from tests.proxy.kernel.small_cluster import BEYOND, CLIENTS, HERE, NODE_IPS, OUTSIDE, POD, SERVERS, THERE
from tests.trace.kernel.fault_stand import (
    BALANCER,
    PATIENCE,
    SILENCE,
    THIRD_IP,
    ClientRoute,
    Stand,
    cluster_ip,
    from_node,
    pod,
    service,
    slices,
    snapshot,
    to_node_port,
    to_service,
)

from narthex.model.net import Protocol
from narthex.model.objects import ServiceCIDR

pytestmark = pytest.mark.kernel

Undo = Callable[[], None]
Make = Callable[[Stand], AbstractContextManager[None]]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """How to break it, how to see that it is broken, and what must be said."""

    cause: str
    way: ClientRoute
    make: object = None
    """A function of the stand that gives a context manager; None: the cluster's objects are the fault."""
    mode: str = "nftables"
    cluster: tuple[object, ...] = ()
    """Changes to the cluster that it is explained with."""
    gone: object = None
    """What `arrives` says of it, when something answers that is the wrong one."""
    evidence: str = ""
    objects: bool = True
    """Explain it with the cluster's objects, else by the node alone."""
    alone: bool = False
    """It cannot be undone: it gets a stand of its own."""
    pods: bool = False
    """Explain it with the pods' namespaces known."""
    name: str = ""


def commands(*pairs: tuple[str, str], site: int | None = None) -> Make:
    """Commands on the node, each with the one that undoes it."""

    @contextmanager
    def make(stand: Stand) -> Iterator[None]:
        with ExitStack() as undo:
            for do, back in pairs:
                stand.run(do, site=site)
                undo.callback(stand.run, back, site=site)
            yield

    return make


def settings(*pairs: str) -> Make:
    return lambda stand: stand.settings(*pairs)


def both(*makes: Make) -> Make:
    @contextmanager
    def make(stand: Stand) -> Iterator[None]:
        with ExitStack() as stack:
            for each in makes:
                stack.enter_context(each(stand))
            yield

    return make


@contextmanager
def firewalld(stand: Stand) -> Iterator[None]:
    stand.nft(
        "table inet firewalld {\n chain filter_FORWARD {\n type filter hook forward priority 10; policy drop;\n"
        " ct state established,related accept\n }\n}\n"
    )
    yield
    stand.run("nft delete table inet firewalld")


@contextmanager
def gone_rules(stand: Stand) -> Iterator[None]:
    """The node's rules are those of a cluster that was."""
    stand.load(snapshot(*slices("web", HERE[4][7], HERE[6][7])))
    yield
    stand.load(snapshot())


@contextmanager
def no_rules(stand: Stand) -> Iterator[None]:
    stand.clean()
    yield
    stand.load(snapshot())


@contextmanager
def second_proxy(stand: Stand) -> Iterator[None]:
    """Somebody's former proxy in the other mode, whose rules stand still and come first."""
    stand.clean()
    stand.load(snapshot(*slices("web", HERE[4][7], HERE[6][7])), "nftables")
    stand.load(snapshot())
    yield
    stand.clean("nftables")


@contextmanager
def overlay_without_entry(stand: Stand) -> Iterator[None]:
    stand.run(
        "ip link add flannel.1 type vxlan id 1 dev eth0 dstport 8472 nolearning",
        "ip addr add 10.64.1.0/32 dev flannel.1",
        "ip link set flannel.1 up",
        "ip neigh add 10.64.2.0 dev flannel.1 lladdr 02:00:00:00:00:99 nud permanent",
        f"ip route replace {THERE[4][0]}/32 via 10.64.2.0 dev flannel.1 onlink",
    )
    yield
    stand.run(f"ip route replace {THERE[4][0]}/32 dev eth0", "ip link del flannel.1")


@contextmanager
def wrong_node(stand: Stand) -> Iterator[None]:
    stand.run(
        f"ip neigh replace {THIRD_IP} dev eth0 lladdr 02:6e:78:01:01:02 nud permanent",
        f"ip route replace {THERE[4][0]}/32 via {THIRD_IP} dev eth0 onlink",
    )
    yield
    stand.run(f"ip route replace {THERE[4][0]}/32 dev eth0", f"ip neigh del {THIRD_IP} dev eth0")


@contextmanager
def dead_pod(stand: Stand, address: str) -> Iterator[None]:
    """The pod's address is nobody's any more, though its endpoint is still listed."""
    found = [line.split() for line in _neighbours(stand) if line.startswith(f"{address} ")]
    mac = found[0][found[0].index("lladdr") + 1]
    stand.run(f"ip addr del {address}/32 dev lo", site=SERVERS)
    stand.run(f"ip neigh del {address} dev cni0")
    yield
    stand.run(f"ip addr add {address}/32 dev lo", site=SERVERS)
    stand.run(f"ip neigh replace {address} dev cni0 lladdr {mac} nud permanent")


def _neighbours(stand: Stand) -> list[str]:
    from narthex.linux.run import run

    return run(["ip", "neigh", "show", "dev", "cni0"], namespace=stand.world.node).splitlines()


def web_pod_dies(stand: Stand) -> AbstractContextManager[None]:
    return dead_pod(stand, HERE[4][0])


@contextmanager
def pinned_to_a_dead_pod(stand: Stand) -> Iterator[None]:
    """The client's affinity is at a pod that dies."""
    kept = stand.arrives(to_service("sticky"), PATIENCE).rpartition(":")[0]
    assert kept in HERE[4]
    with dead_pod(stand, kept):
        yield


@contextmanager
def old_flow(stand: Stand) -> Iterator[None]:
    """A flow whose first datagram came when the Service had another endpoint."""
    stand.load(snapshot(*slices("dns", HERE[4][5], HERE[6][5], protocol=Protocol.UDP)))
    stand.arrives(SAME_FLOW, SILENCE)
    stand.load(snapshot())
    yield
    stand.run("conntrack -F")


@contextmanager
def local_pods(stand: Stand) -> Iterator[None]:
    stand.load(snapshot(*LOCAL_HERE))
    yield
    stand.load(snapshot())


@contextmanager
def neighbours_on_the_bridge(stand: Stand) -> Iterator[None]:
    """Pods with a network of their own on the bridge, as most plugins make them: neighbours talk without the node."""
    stand.run("ip addr add 10.64.1.1/24 dev cni0")
    stand.run(f"ip neigh replace {POD[4]} dev eth0 lladdr 02:6e:78:01:02:02 nud permanent", site=SERVERS)
    stand.run(f"ip route add {POD[4]}/32 dev eth0", site=SERVERS)
    yield
    stand.run(f"ip route del {POD[4]}/32 dev eth0", f"ip neigh del {POD[4]} dev eth0", site=SERVERS)
    stand.run("ip addr del 10.64.1.1/24 dev cni0")


@contextmanager
def answers_straight(stand: Stand) -> Iterator[None]:
    """The other node reaches the client without this one, as on any network with several nodes."""
    client = OUTSIDE[4]
    stand.run(f"ip neigh replace {client} dev eth0 lladdr 02:6e:78:01:01:02 nud permanent", site=BEYOND)
    stand.run(f"ip route add {client}/32 dev eth0", site=BEYOND)
    yield
    stand.run(f"ip route del {client}/32 dev eth0", f"ip neigh del {client} dev eth0", site=BEYOND)


@contextmanager
def forgetful(stand: Stand) -> Iterator[None]:
    """The client forgets afterwards what it was told of the way's size."""
    yield
    stand.run("ip route flush cache", site=CLIENTS)


def iptables(table: str, chain: str, rule: str) -> tuple[str, str]:
    """A rule put first, and the command that takes it out."""
    return f"iptables -t {table} -I {chain} {rule}", f"iptables -t {table} -D {chain} {rule}"


DATAGRAM = ClientRoute(destination=cluster_ip("dns"), protocol=Protocol.UDP)
SAME_FLOW = msgspec.structs.replace(DATAGRAM, source_port=45353)
LARGE = ClientRoute(
    source=OUTSIDE[4], destination=NODE_IPS[0], port=to_node_port("dns").port, protocol=Protocol.UDP, size=1500
)
LOCAL_HERE = slices("local", HERE[4][0], HERE[6][0])
RANGE = ServiceCIDR(name="kubernetes", cidrs=("10.110.0.0/16",))
TWIN = service("twin", cluster_ips=(cluster_ip("web"),))
NEW = (service("twin"), *slices("twin", HERE[4][0]))
RANGED = ClientRoute(source=OUTSIDE[4], destination="203.0.113.11")
FORWARD_DROP = ("iptables -P FORWARD DROP", "iptables -P FORWARD ACCEPT")
POLICY_RULES = (
    ("iptables -N KUBE-NWPLCY-X", "iptables -X KUBE-NWPLCY-X"),
    ("iptables -A KUBE-NWPLCY-X -j DROP", "iptables -F KUBE-NWPLCY-X"),
    iptables("filter", "FORWARD", f"-d {HERE[4][0]} -j KUBE-NWPLCY-X"),
)

FAULTS = [
    # The objects.
    Fault(cause="selector-matches-nothing", way=to_service("nobody"), evidence="nearest: pod near has app=nobody-v2"),
    Fault(cause="endpoints-missing", way=to_service("manual"), evidence="no selector"),
    Fault(cause="endpoints-missing", way=to_service("nobody"), cluster=(pod("one", app="nobody"),), name="pods without"),
    Fault(cause="endpoints-not-ready", way=to_service("unready"), evidence="ready=false"),
    Fault(cause="port-name", way=to_service("portname"), evidence="metrics 8080/tcp"),
    Fault(cause="wrong-family", way=to_service("six"), evidence=HERE[6][0]),
    Fault(cause="no-such-service", way=ClientRoute(destination="10.110.0.200"), cluster=(RANGE,), evidence="10.110.0.0/16"),
    Fault(cause="port-not-served", way=msgspec.structs.replace(to_service("web"), port=81), evidence="80/tcp (http)"),
    Fault(cause="local-policy", way=ClientRoute(source=OUTSIDE[4], destination=BALANCER), evidence="worker-b"),
    Fault(cause="local-policy", way=to_service("inside"), evidence="internalTrafficPolicy: Local", name="internal"),
    Fault(cause="source-range", way=RANGED, evidence="192.0.2.0/24", mode="iptables"),
    Fault(cause="duplicate-cluster-ip", way=to_service("web"), cluster=(TWIN,), gone=f"{HERE[4][0]}:8080"),
    Fault(
        cause="health-check", way=ClientRoute(source=OUTSIDE[4], destination=BALANCER), gone=f"{HERE[4][0]}:8080",
        make=both(local_pods, commands(iptables("filter", "INPUT", "-p tcp --dport 32000 -j DROP"))),
        cluster=tuple(LOCAL_HERE), evidence="32000",
    ),
    Fault(cause="no-endpoints", way=to_service("nobody"), mode="iptables", objects=False, evidence="has no endpoints"),
    # What is remembered.
    Fault(cause="conntrack-stale", way=SAME_FLOW, make=old_flow, evidence=HERE[4][5]),
    Fault(cause="affinity-dead-pod", way=to_service("sticky"), make=pinned_to_a_dead_pod, evidence="ClientIP"),
    # The proxies.
    Fault(cause="no-proxy", way=to_service("web"), make=no_rules, mode="iptables"),
    Fault(cause="two-proxies", way=to_service("web"), make=second_proxy, mode="iptables", evidence="table narthex"),
    Fault(
        cause="two-iptables", way=to_service("away"), mode="iptables", evidence="table filter has rules in both",
        make=commands(("iptables -A FORWARD -j ACCEPT", "iptables -D FORWARD -j ACCEPT"),
                      ("iptables-legacy -P FORWARD DROP", "iptables-legacy -P FORWARD ACCEPT")),
    ),
    Fault(cause="stale-rules", way=to_service("twin"), cluster=NEW),
    Fault(cause="stale-endpoint", way=to_service("web"), make=gone_rules),
    Fault(cause="node-port-address", way=to_node_port("web", address=NODE_IPS[1]), evidence=NODE_IPS[0]),
    Fault(
        cause="localhost-node-port",
        way=ClientRoute(source="127.0.0.1", destination="127.0.0.1", port=to_node_port("web").port),
    ),
    Fault(
        cause="rule-in-the-way", way=to_service("web"), mode="iptables", evidence="PREROUTING",
        make=commands(
            iptables("nat", "PREROUTING", f"-d {cluster_ip('web')} -p tcp -j DNAT --to-destination {HERE[4][0]}:81")
        ),
    ),
    Fault(
        cause="mark-clash", way=to_node_port("away"), evidence="fwmark 0x4000",
        make=commands(("ip rule add fwmark 0x4000/0x4000 blackhole", "ip rule del fwmark 0x4000/0x4000 blackhole")),
    ),
    Fault(
        cause="mark-clash", way=to_node_port("away"), mode="iptables", name="cleared", evidence="FORWARD",
        make=both(answers_straight, commands(iptables("mangle", "FORWARD", "-j MARK --set-xmark 0x0/0x4000"))),
    ),
    # Who drops it.
    Fault(cause="network-policy", way=to_service("web"), make=commands(*POLICY_RULES), evidence="KUBE-NWPLCY-X"),
    Fault(cause="forward-drop", way=to_service("away"), make=commands(FORWARD_DROP)),
    Fault(cause="forward-drop", way=to_service("away"), make=commands(FORWARD_DROP), mode="iptables", name="other mode"),
    Fault(
        cause="input-drop", way=to_service("host"), evidence="9000",
        make=commands(iptables("filter", "INPUT", "-p tcp --dport 9000 -j DROP")),
    ),
    Fault(cause="foreign-table", way=to_service("web"), make=firewalld, evidence="filter_FORWARD"),
    Fault(
        cause="rule-drops", way=to_service("web"), evidence="raw PREROUTING",
        make=commands(iptables("raw", "PREROUTING", f"-d {cluster_ip('web')} -j DROP")),
    ),
    # The node.
    Fault(cause="ip-forward-off", way=to_service("web"), make=settings("net/ipv4/ip_forward=0")),
    Fault(
        cause="rp-filter", way=to_node_port("web"), evidence="rp_filter",
        make=both(
            settings("net/ipv4/conf/eth0/rp_filter=1"),
            commands((f"ip route replace {OUTSIDE[4]}/32 dev cni0", f"ip route replace {OUTSIDE[4]}/32 dev eth0")),
        ),
    ),
    Fault(
        cause="route-missing", way=to_service("away"), evidence="podCIDR",
        make=commands(
            (f"ip route del {THERE[4][0]}/32 dev eth0", f"ip route add {THERE[4][0]}/32 dev eth0"),
            ("ip route del default", "ip route add default via 100.127.255.254 dev eth0 onlink"),
        ),
    ),
    Fault(
        cause="route-forbids", way=to_service("away"), evidence="blackhole",
        make=commands((f"ip route replace blackhole {THERE[4][0]}/32", f"ip route replace {THERE[4][0]}/32 dev eth0")),
    ),
    Fault(
        cause="link-down", way=to_node_port("web"), evidence="cni0", alone=True,
        make=commands(("ip addr add 10.64.1.1/24 dev cni0", "true"), ("ip link set cni0 down", "true")),
    ),
    Fault(
        cause="mtu", way=LARGE, evidence="1500 bytes",
        make=both(forgetful, commands(("ip link set cni0 mtu 1400", "ip link set cni0 mtu 1500"))),
    ),
    Fault(cause="wrong-pod-route", way=to_service("away"), make=wrong_node, evidence="worker-b"),
    Fault(cause="neighbour-missing", way=to_service("web"), make=web_pod_dies, evidence=HERE[4][0]),
    Fault(cause="fdb-missing", way=to_service("away"), make=overlay_without_entry, evidence="02:00:00:00:00:99"),
    # The answer.
    Fault(cause="not-listening", way=to_service("deaf"), pods=True, evidence="8080"),
    Fault(cause="not-listening", way=ClientRoute(destination=NODE_IPS[0], port=9001), name="node", evidence="9000"),
    Fault(
        cause="missing-hairpin", way=to_service("self"), mode="iptables",
        make=commands(iptables("nat", "POSTROUTING", f"-s {POD[4]} -d {POD[4]} -j ACCEPT")),
    ),
    Fault(
        cause="missing-masquerade", way=to_node_port("away"), mode="iptables",
        make=both(answers_straight, commands(iptables("nat", "POSTROUTING", f"-s {OUTSIDE[4]} -j ACCEPT"))),
    ),
    Fault(cause="br-netfilter-off", way=to_service("web"), make=neighbours_on_the_bridge, pods=True,
          evidence="bridge-nf-call-iptables"),
]  # fmt: skip


@pytest.fixture(scope="module")
def stands() -> Iterator[Callable[..., Stand]]:
    """One for each mode, made when it is asked for; or one that nobody else gets."""
    made: dict[str, Stand] = {}
    with ExitStack() as stack:

        def get(mode: str, alone: bool = False) -> Stand:
            if alone or mode not in made:
                fresh = stack.enter_context(Stand(mode))
                if alone:
                    return fresh
                made[mode] = fresh
            return made[mode]

        yield get


MODES = pytest.mark.parametrize("mode", ["nftables", "iptables"])


@pytest.mark.parametrize(
    "fault", FAULTS, ids=[f"{fault.cause}{'-' if fault.name else ''}{fault.name}" for fault in FAULTS]
)
def test_the_first_cause_of_a_fault_is_the_right_one(stands: Callable[..., Stand], fault: Fault) -> None:
    stand = stands(fault.mode, fault.alone)
    cluster = snapshot(*fault.cluster)
    with ExitStack() as undo:
        if fault.make is not None:
            undo.enter_context(fault.make(stand))
        assert stand.arrives(fault.way, SILENCE) == (fault.gone or ""), "the kernel must lose it"
        found = stand.explain(fault.way, cluster, stand.view(fault.pods), fault.objects)
    assert found, "nothing was found"
    told = "\n".join(
        f"{each.cause.id} {each.certain} {each.explains}: {each.sentence} {each.evidence}" for each in found
    )
    assert found[0].cause.id == fault.cause, told
    assert found[0].advice
    assert fault.evidence in "\n".join((*found[0].evidence, found[0].sentence)), told


HEALTHY = {
    "pod to cluster IP": lambda version: to_service("web", version),
    "pod to another node's pod": lambda version: to_service("away", version),
    "pod to itself": lambda version: to_service("self", version),
    "pod to the host's network": lambda version: to_service("host", version),
    "node to cluster IP": lambda version: from_node("web", version),
    "node to another node's pod": lambda version: from_node("away", version),
    "outside to node port": lambda version: to_node_port("web", version),
    "outside to node port, pod elsewhere": lambda version: to_node_port("away", version),
    "datagram": lambda _: DATAGRAM,
    "large datagram": lambda _: LARGE,
    "pod to node port": lambda version: ClientRoute(
        source=POD[version], destination=NODE_IPS[0 if version == 4 else 2], port=to_node_port("web").port
    ),
}


@MODES
@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_path_has_no_findings(stands: Callable[..., Stand], mode: str, name: str, version: int) -> None:
    stand = stands(mode)
    way = HEALTHY[name](version)
    assert stand.arrives(way, PATIENCE)
    assert stand.explain(way) == []


@MODES
def test_healthy_policies_have_no_findings(stands: Callable[..., Stand], mode: str) -> None:
    """Affinity with a client that is known, Local policy with a pod here, source ranges that let it in."""
    stand = stands(mode)
    allowed = service("ranged", type="LoadBalancer", ingress=RANGED_HERE.ingress, source_ranges=("198.51.100.0/24",))
    cluster = snapshot(*LOCAL_HERE, allowed)
    stand.load(cluster)
    ways = [to_service("sticky"), ClientRoute(source=OUTSIDE[4], destination=BALANCER), RANGED]
    for way in ways:
        assert stand.arrives(way, PATIENCE)
    view = stand.view()
    for way in ways:
        assert stand.explain(way, cluster, view) == [], way
    stand.load(snapshot())


RANGED_HERE = next(each for each in snapshot().services.values() if each.name == "ranged")
