"""Stale connections on the kernel: what is removed, what must stay, and where the next packet goes.

`conntrack -L` is the witness: another program's view of the same table.
"""

import contextlib
import errno
import re
import select
import socket

import pytest

from narthex.host import netns
from narthex.host.run import run
from narthex.testing.load import until
from netns.small_cluster import (
    CALLERS,
    CLIENTS,
    CLUSTER_IP,
    HERE,
    NODE_IP,
    OUTSIDE,
    POD,
    PORT,
    THERE,
    SmallCluster,
    service,
    slices,
)

pytestmark = pytest.mark.kernel

MODES = ("nftables", "iptables")
UDP, TCP, SCTP = "UDP", "TCP", "SCTP"
NODE_PORT = 30053
OLD, NEW = (HERE[4][0], HERE[6][0]), (THERE[4][0], THERE[6][0])
FLOW = re.compile(
    r"(?P<protocol>udp|tcp|sctp) .*?src=(?P<source>\S+) dst=(?P<destination>\S+) sport=(?P<sport>\d+) dport=(?P<port>\d+)"
    r".*?src=(?P<end>\S+) dst=\S+ sport=(?P<end_port>\d+) dport=\d+"
)


def objects(protocol, states, name="web", number=1, node_port=NODE_PORT, **spec):
    """A Service with one port of the protocol, and its slices."""
    web = service(name, number, node_port, **spec)
    web["spec"]["ports"][0]["protocol"] = protocol
    made = slices(states, name)
    for one in made:
        one["ports"][0]["protocol"] = protocol
    return web, *made


class Network:
    """A small cluster whose endpoints answer nothing: it matters where packets arrive."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.world = cluster.world
        self._open = contextlib.ExitStack()
        self._servers = {}

    def close(self):
        self._open.close()

    def bound(self, site, address, kind, port=0):
        """A bound socket in a site's namespace, None is the node."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with netns.entered(self.world.node if site is None else self.world.namespace(site)):
            made = self._open.enter_context(socket.socket(family, kind))
        made.settimeout(5)
        made.bind((address, port))
        return made

    def serve(self, *addresses, port=PORT):
        """Endpoints for UDP and TCP; the kernel accepts connections by itself."""
        for address in addresses:
            site = self.world.layout.homes[address]
            self._servers[self.bound(site, address, socket.SOCK_DGRAM, port)] = address
            self.bound(site, address, socket.SOCK_STREAM, port).listen()

    def client(self, site, source, destination, port, kind=socket.SOCK_DGRAM):
        made = self.bound(site, source, kind)
        made.connect((destination, port))
        return made

    def reached(self, client, patience=5):
        """The endpoint at which one packet of the client arrives."""
        client.send(b"hello")
        there, _, _ = select.select(list(self._servers), [], [], patience)
        assert there, f"a packet to {client.getpeername()} arrived nowhere:\n{self.flows(4)}\n{self.cluster.log}"
        (server,) = there
        server.recv(100)
        return self._servers[server]

    def flows(self, version, protocol=""):
        """Tracked connections of the node, without what changes by itself: protocol, zone, both ways."""
        argv = ["conntrack", "-L", "-f", f"ipv{version}", *(["-p", protocol.lower()] if protocol else [])]
        lines = run(argv, namespace=self.world.node).splitlines()
        return {(*found.groups(), "zone" in line) for line in lines if (found := FLOW.search(line))}

    def ends(self, version, protocol):
        """Where connections of a protocol are answered from."""
        return {flow[5] for flow in self.flows(version, protocol)}

    def insert(self, protocol, destination, port, end, sport, *more):
        """An entry as a connection from the pod leaves it."""
        source = POD[6 if ":" in end else 4]
        state = {TCP: ["--state", "ESTABLISHED"], SCTP: ["--state", "ESTABLISHED"], UDP: []}[protocol]
        if protocol == SCTP:
            state += ["--orig-vtag", "1", "--reply-vtag", "2"]
        argv = ["conntrack", "-I", "-p", protocol.lower(), "-s", source, "-d", destination, "--sport", str(sport)]
        argv += ["--dport", str(port), "-r", end, "-q", source, "--reply-port-src", str(PORT)]
        argv += ["--reply-port-dst", str(sport), "-t", "600", *state, *more]
        run(argv, namespace=self.world.node)

    def wait(self, condition, what):
        self.cluster.wait(condition, what)


@pytest.fixture(params=MODES)
def network(request, tmp_path):
    with SmallCluster(tmp_path, request.param) as cluster:
        made = Network(cluster)
        try:
            made.serve(*OLD, *NEW)
            yield made
        finally:
            made.close()


def clients(network):
    """One of each kind, in both families."""
    made = []
    for version in (4, 6):
        made += [
            network.client(CALLERS, POD[version], CLUSTER_IP[version], 80),
            network.client(CLIENTS, OUTSIDE[version], NODE_IP[version], NODE_PORT),
            network.client(None, NODE_IP[version], NODE_IP[version], NODE_PORT),
            network.client(None, NODE_IP[version], CLUSTER_IP[version], 80),
        ]
    return made


@pytest.mark.row("18.1", "18.2", "18.3", "29.4", "30.8", "20.20", "20.21")
def test_udp_goes_to_the_new_endpoint_with_the_next_packet_and_nobody_else_is_touched(network):
    cluster = network.cluster
    cluster.put("web", *objects(UDP, dict.fromkeys(OLD, "ready")))
    cluster.start().ready()
    talkers = clients(network)
    assert [network.reached(client) for client in talkers] == [OLD[0]] * 4 + [OLD[1]] * 4

    # To the node port's number elsewhere, to the pod itself, in a zone of somebody else's, of another protocol.
    for version, old in zip((4, 6), OLD, strict=True):
        network.client(CLIENTS, OUTSIDE[version], THERE[version][3], NODE_PORT).send(b"x")
        network.client(CALLERS, POD[version], THERE[version][3], 80).send(b"x")
        assert network.reached(network.client(CLIENTS, OUTSIDE[version], old, PORT)) == old
        network.insert(UDP, CLUSTER_IP[version], 80, old, 7001, "--zone", "5")
        network.insert(TCP, CLUSTER_IP[version], 80, old, 7002)
    ours = {OLD[0]: 4, OLD[1]: 4}
    others = {version: {flow for flow in network.flows(version) if not is_ours(flow)} for version in (4, 6)}
    assert [len(others[version]) for version in (4, 6)] == [5, 5]

    cluster.put("web", *objects(UDP, dict.fromkeys(NEW, "ready")))
    network.wait(lambda: "removed 4 stale connections of IPv6: 4 endpoint-gone" in cluster.log, "the removal")
    for version in (4, 6):
        assert network.flows(version) == others[version]
    assert [network.reached(client) for client in talkers] == [NEW[0]] * 4 + [NEW[1]] * 4
    metrics = cluster.get(10249, "/metrics")[1]
    for family, old in zip(("IPv4", "IPv6"), OLD, strict=True):
        assert f'kubeproxy_conntrack_reconciler_deleted_entries_total{{ip_family="{family}"}} {ours[old]}.0' in metrics
        assert (
            f'narthex_stale_flows_removed_total{{ip_family="{family}",reason="endpoint-gone"}} {ours[old]}.0' in metrics
        )
        searches = re.search(
            rf'kubeproxy_conntrack_reconciler_sync_duration_seconds_count{{ip_family="{family}"}} (\d+)', metrics
        )
        assert searches and int(searches[1]) == 2


def is_ours(flow):
    protocol, _, destination, _, port, _, _, zone = flow
    ours = {(CLUSTER_IP[4], "80"), (CLUSTER_IP[6], "80"), (NODE_IP[4], str(NODE_PORT)), (NODE_IP[6], str(NODE_PORT))}
    return protocol == "udp" and not zone and (destination, port) in ours


@pytest.mark.row("18.3", "18.6", "30.8")
def test_internal_local_and_what_still_serves(network):
    cluster = network.cluster
    second = HERE[4][1]
    network.serve(second)
    cluster.put("web", *objects(UDP, {OLD[0]: "ready"}, internalTrafficPolicy="Local"))
    cluster.start().ready()
    client = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    assert network.reached(client) == OLD[0]

    # Terminating but serving: new connections go to the other one, this one stays.
    cluster.put("web", *objects(UDP, {OLD[0]: "terminating", second: "ready"}, internalTrafficPolicy="Local"))
    fresh = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    cluster.synced(second)
    assert network.reached(fresh) == second
    assert network.reached(client) == OLD[0]
    cluster.put("web", *objects(UDP, {second: "ready"}, internalTrafficPolicy="Local"))
    network.wait(lambda: OLD[0] not in network.ends(4, UDP), "the removal")
    assert network.reached(client) == second


@pytest.mark.row("18.4", "30.8")
def test_another_target_port(network):
    cluster = network.cluster
    network.serve(OLD[0], port=PORT + 1)
    cluster.put("web", *objects(UDP, {OLD[0]: "ready"}))
    cluster.start().ready()
    client = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    assert network.reached(client) == OLD[0]
    changed = objects(UDP, {OLD[0]: "ready"})
    for one in changed[1:]:
        one["ports"][0]["port"] = PORT + 1
    cluster.put("web", *changed)
    network.wait(lambda: not network.flows(4, UDP), "the removal")
    assert network.reached(client) == OLD[0]
    assert {flow[6] for flow in network.flows(4, UDP)} == {str(PORT + 1)}


@pytest.mark.row("18.5", "30.8")
def test_udp_that_was_there_before_the_service(network):
    cluster = network.cluster
    cluster.start().ready()
    talkers = [
        network.client(CALLERS, POD[4], CLUSTER_IP[4], 80),
        network.client(None, NODE_IP[4], CLUSTER_IP[4], 80),
        network.client(CALLERS, POD[6], CLUSTER_IP[6], 80),
    ]
    for client in talkers:
        client.send(b"into nothing")
    assert network.ends(4, UDP) == {CLUSTER_IP[4]}
    cluster.put("web", *objects(UDP, dict.fromkeys(OLD, "ready")))
    network.wait(lambda: "1 black-hole" in cluster.log and "2 black-hole" in cluster.log, "the removal")
    assert [network.reached(client) for client in talkers] == [OLD[0], OLD[0], OLD[1]]


@pytest.mark.row("18.7", "29.3")
def test_the_last_endpoint_goes(network):
    cluster = network.cluster
    cluster.put("udp", *objects(UDP, {OLD[0]: "ready"}))
    cluster.put("tcp", *objects(TCP, {OLD[0]: "ready"}, "tcp", 2, 30080))
    cluster.put("sctp", *objects(SCTP, {OLD[0]: "ready"}, "sctp", 3, 30081))
    cluster.start().ready()
    client = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    assert network.reached(client) == OLD[0]
    talker = network.client(CALLERS, POD[4], "10.110.0.2", 80, socket.SOCK_STREAM)
    network.insert(SCTP, "10.110.0.3", 80, OLD[0], 7003)
    network.insert(SCTP, NODE_IP[4], 30081, OLD[0], 7004)
    assert len(network.flows(4)) == 4

    for protocol, number, node_port in ((UDP, 1, NODE_PORT), (TCP, 2, 30080), (SCTP, 3, 30081)):
        name = protocol.lower() if number > 1 else "web"
        cluster.put(protocol.lower(), *objects(protocol, {}, name, number, node_port))
    network.wait(lambda: not network.flows(4), "the removal")
    client.send(b"anybody?")
    with pytest.raises(ConnectionRefusedError):
        client.recv(1)
    talker.close()


@pytest.mark.row("18.8", "29.3", "3.11")
@pytest.mark.parametrize("protocol", [TCP, SCTP])
def test_of_tcp_and_sctp_only_what_leads_to_vanished_pods(network, protocol):
    cluster = network.cluster
    ends = {HERE[4][n]: n for n in range(5)}
    states = ["ready", "ready", "terminating", "unready", "ready"]
    cluster.put("web", *objects(protocol, dict(zip(ends, states, strict=True))))
    cluster.start().ready()
    for end, number in ends.items():
        network.insert(protocol, CLUSTER_IP[4], 80, end, 7100 + number)
        network.insert(protocol, NODE_IP[4], NODE_PORT, end, 7200 + number)
    network.insert(protocol, THERE[4][5], NODE_PORT, HERE[4][0], 7300)
    network.insert(protocol, CLUSTER_IP[4], 81, HERE[4][0], 7301)
    before = network.flows(4)

    # The first pod vanishes, the second stops being ready, the third is still terminating, and so on.
    states = ["unready", "terminating", "unready", "ready"]
    cluster.put("web", *objects(protocol, dict(zip(list(ends)[1:], states, strict=True))))
    network.wait(lambda: "removed 2 stale connections of IPv4: 2 endpoint-gone" in cluster.log, "the removal")
    assert {flow[3] for flow in before - network.flows(4)} == {"7100", "7200"}


@pytest.mark.row("29.3")
def test_a_client_of_a_vanished_pod_is_told_at_once(network):
    cluster = network.cluster
    cluster.put("web", *objects(TCP, {OLD[0]: "ready"}))
    cluster.start().ready()
    talker = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80, socket.SOCK_STREAM)
    cluster.put("web", *objects(TCP, {NEW[0]: "ready"}))
    network.wait(lambda: not network.flows(4, TCP), "the removal")
    # What is there now knows nothing of this connection and says so; the client need not wait for its timeout.
    with pytest.raises(OSError) as refusal:
        talker.send(b"hello")
        talker.recv(1)
    assert refusal.value.errno == errno.ECONNRESET


@pytest.mark.row("29.3")
def test_what_led_to_a_deleted_service_and_to_an_address_that_moved_on(network):
    cluster = network.cluster
    cluster.put("web", *objects(UDP, {OLD[0]: "ready"}, externalIPs=["203.0.113.5"]))
    cluster.put("other", *objects(UDP, {NEW[0]: "ready"}, "other", 2, 30054))
    cluster.start().ready()
    moving = network.client(CALLERS, POD[4], "203.0.113.5", 80)
    gone = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    staying = network.client(CALLERS, POD[4], "10.110.0.2", 80)
    assert [network.reached(client) for client in (moving, gone, staying)] == [OLD[0], OLD[0], NEW[0]]
    # Another's rewriting to another place, from the very node port that goes.
    network.insert(TCP, CLUSTER_IP[4], 80, HERE[4][5], 7001)
    network.insert(UDP, CLUSTER_IP[4], 80, HERE[4][5], 7001)

    cluster.put("other", *objects(UDP, {NEW[0]: "ready"}, "other", 2, 30054, externalIPs=["203.0.113.5"]))
    cluster.remove("web")
    network.wait(lambda: OLD[0] not in network.ends(4, UDP), "the removal")
    assert network.ends(4, UDP) == {NEW[0], HERE[4][5]}
    assert network.ends(4, TCP) == {HERE[4][5]}
    assert network.reached(moving) == NEW[0]


@pytest.mark.row("18.1", "21.20")
def test_what_became_stale_while_nobody_looked(network):
    cluster = network.cluster
    cluster.put("web", *objects(UDP, {OLD[0]: "ready"}))
    cluster.start().ready()
    client = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    assert network.reached(client) == OLD[0]
    cluster.kill()
    cluster.put("web", *objects(UDP, {NEW[0]: "ready"}))
    assert network.reached(client) == OLD[0]
    cluster.start().ready()
    network.wait(lambda: "1 endpoint-gone" in cluster.log, "the removal")
    assert network.reached(client) == NEW[0]


@pytest.mark.row("29.9", "18.5")
def test_what_went_past_rules_that_somebody_had_flushed(network):
    cluster = network.cluster
    cluster.put("web", *objects(UDP, {OLD[0]: "ready"}))
    cluster.start().ready()
    client = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    # As a connection that began in the moment without rules.
    network.insert(UDP, CLUSTER_IP[4], 80, CLUSTER_IP[4], client.getsockname()[1], "--reply-port-src", "80")
    if cluster.mode == "nftables":
        run(["nft", "flush", "ruleset"], namespace=cluster.world.node)
    else:
        run(["iptables", "-t", "nat", "-F"], namespace=cluster.world.node)
    network.wait(lambda: "1 black-hole" in cluster.log, "the removal")
    until(lambda: CLUSTER_IP[4] in cluster.rules(), "the rules")
    assert network.reached(client) == OLD[0]
