"""What balancers and kubelets are told, asked of a proxy process in a namespace while its manifests change."""

import json
import socket

import pytest
from tests.proxy.kernel.small_cluster import (
    CLIENTS,
    HERE,
    NODE_IP,
    OUTSIDE,
    THERE,
    SmallCluster,
    node_object,
    service,
    slices,
)

from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run
from narthex.model.net import family_of
from narthex.testing.kernel.client import ADDRESS_FAMILY

pytestmark = pytest.mark.kernel

MODES = ("nftables", "iptables")
CHECK, OTHER_CHECK = 32000, 32001
PODS = (*HERE[4][:2], HERE[6][0], THERE[4][0], THERE[6][0])
"""Two of this node and one elsewhere with IPv4, one and one with IPv6."""


@pytest.fixture
def cluster(request, tmp_path):
    with SmallCluster(tmp_path, request.param) as running:
        yield running


each_mode = pytest.mark.parametrize("cluster", MODES, indirect=True)
in_nftables_mode = pytest.mark.parametrize("cluster", ["nftables"], indirect=True)


def balanced(check=CHECK, name="web", **spec):
    spec = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": check, **spec}
    return service(name, **spec)


def ready(*addresses):
    return slices(dict.fromkeys(addresses, "ready"))


class Answer:
    """Status, headers and body of what a balancer gets."""

    def __init__(self, raw):
        head, _, body = raw.decode().partition("\r\n\r\n")
        first, *lines = head.split("\r\n")
        self.status = int(first.split()[1])
        self.headers = dict(line.split(": ", 1) for line in lines)
        self.text = body

    @property
    def body(self):
        return json.loads(self.text)


def ask(cluster, version=4, address=None, port=CHECK, request="GET / HTTP/1.1\r\nHost: node\r\n\r\n"):
    """Ask as a balancer does, from outside. Raises OSError."""
    destination = address or NODE_IP[version]
    with in_namespace(cluster.world.namespace(CLIENTS)):
        sock = socket.socket(ADDRESS_FAMILY[family_of(destination)], socket.SOCK_STREAM)
    with sock:
        sock.settimeout(30)
        sock.bind((OUTSIDE[version], 0))
        sock.connect((destination, port))
        sock.sendall(request.encode())
        return Answer(b"".join(iter(lambda: sock.recv(65536), b"")))


def status(cluster, version=4, **where):
    """The status of an answer; 0: refused, or cut off as the port closes."""
    try:
        return ask(cluster, version, **where).status
    except ConnectionError:
        return 0


def listeners(cluster):
    """Sockets of the node that listen on the health check node port."""
    return run(["ss", "-Hltn", f"sport = {CHECK}"], namespace=cluster.world.node)


def wait_for(cluster, wanted, what, **where):
    """Wait until IPv4 and IPv6 answer with these statuses."""
    cluster.wait(lambda: tuple(status(cluster, version, **where) for version in (4, 6)) == wanted, what)


@each_mode
@pytest.mark.row("16.1", "16.2", "16.3", "16.4", "16.5", "16.6", "16.10")
def test_each_family_answers_for_its_own_ready_endpoints_here(cluster):
    cluster.put("web", balanced(), *ready(*PODS))
    cluster.start().ready()
    wait_for(cluster, (200, 200), "the first answers")
    for version, count in ((4, 2), (6, 1)):
        for method, path in (("GET", "/"), ("POST", "/any?path=1")):
            answer = ask(cluster, version, request=f"{method} {path} HTTP/1.1\r\n\r\n")
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "application/json"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == str(count)
            assert answer.body == {
                "service": {"namespace": "shop", "name": "web"},
                "localEndpoints": count,
                "serviceProxyHealthy": True,
            }
    # Terminating endpoints still get connections, but balancers are to look elsewhere.
    cluster.put("web", balanced(), *slices(dict.fromkeys(PODS[:2], "terminating") | {PODS[2]: "ready"}))
    wait_for(cluster, (503, 200), "503 for IPv4 alone")
    answer = ask(cluster)
    assert (answer.headers["X-Load-Balancing-Endpoint-Weight"], answer.body["localEndpoints"]) == ("0", 0)


@each_mode
@pytest.mark.row("16.2", "16.8", "16.11")
def test_scaled_to_zero_switched_and_gone(cluster):
    cluster.put("web", balanced(), *ready(*PODS))
    cluster.start().ready()
    wait_for(cluster, (200, 200), "the first answers")
    cluster.put("web", balanced(), *ready())
    wait_for(cluster, (503, 503), "503 after scaling to zero")
    cluster.put("web", balanced(), *ready(*PODS))
    wait_for(cluster, (200, 200), "200 again")

    cluster.put("web", service(type="LoadBalancer"), *ready(*PODS))
    wait_for(cluster, (0, 0), "refusal with policy Cluster")
    cluster.put("web", balanced(OTHER_CHECK), *ready(*PODS))
    wait_for(cluster, (200, 200), "the other number", port=OTHER_CHECK)
    assert status(cluster) == status(cluster, 6) == 0

    cluster.remove("web")
    wait_for(cluster, (0, 0), "refusal without the Service", port=OTHER_CHECK)


@each_mode
@pytest.mark.row("16.9")
def test_a_firewall_of_the_node_lets_balancers_in_with_iptables_mode_only(cluster):
    for tool in ("iptables", "ip6tables"):
        run([tool, "-A", "INPUT", "-p", "tcp", "--dport", str(CHECK), "-j", "REJECT"], namespace=cluster.world.node)
    cluster.put("web", balanced(), *ready(*PODS))
    cluster.start().ready()
    cluster.wait(lambda: listeners(cluster).count(f":{CHECK} ") == 2, "the ports")
    wanted = 200 if cluster.mode == "iptables" else 0
    assert (status(cluster), status(cluster, 6)) == (wanted, wanted)
    assert ("health check node port" in cluster.rules()) is (cluster.mode == "iptables")
    cluster.remove("web")
    cluster.wait(lambda: "health check node port" not in cluster.rules(), "the end of the rule")


@in_nftables_mode
@pytest.mark.row("16.6")
def test_it_listens_on_node_port_addresses_only(cluster):
    cluster.put("web", balanced(), *ready(*PODS))
    cluster.start("--nodeport-addresses", "10.20.0.0/24,fd20::/64").ready()
    wait_for(cluster, (200, 200), "the answers")
    assert status(cluster, address="10.20.1.11") == 0
    # An address that comes later counts too.
    run(["ip", "address", "add", "10.20.0.77/32", "dev", "lo"], namespace=cluster.world.node)
    cluster.put("other", service("other", 2, 30082))
    cluster.wait(lambda: "10.20.0.77:" in listeners(cluster), "the new address")


@in_nftables_mode
@pytest.mark.row("16.7")
def test_a_taken_port_is_reported_and_tried_again_while_others_go_on(cluster):
    with in_namespace(cluster.world.node):
        holder = socket.create_server(("0.0.0.0", CHECK))
    with holder:
        both = [balanced(), *ready(*PODS), balanced(OTHER_CHECK, "cart", number=2, node_port=30081)]
        cluster.put("web", *both)
        cluster.start().ready()
        wait_for(cluster, (503, 503), "the other Service's answers", port=OTHER_CHECK)
        cluster.wait(lambda: status(cluster, 6) == 200, "IPv6 alone")
        wanted = f"Service shop/web: cannot listen on health check node port 10.20.0.11:{CHECK}: Address already in use"
        cluster.wait(lambda: wanted in cluster.log, "the warning")
    wait_for(cluster, (200, 200), "the port once it is free")
    assert cluster.log.count("shop/web: cannot listen on health check node port") == 1


@in_nftables_mode
@pytest.mark.row("16.1")
def test_a_missing_number_is_said(cluster):
    cluster.put("web", balanced(0), *ready(*PODS))
    cluster.start().ready()
    assert "Service shop/web has no healthCheckNodePort" in cluster.log


@in_nftables_mode
@pytest.mark.row("17.1", "17.3", "17.4", "17.5", "16.12")
def test_a_node_that_leaves_says_so_to_balancers_of_the_cluster_only(cluster):
    cluster.put("web", balanced(), *ready(*PODS))
    cluster.start().ready()
    healthz = lambda: cluster.get(10256, "/healthz")  # noqa: E731
    code, body = healthz()
    assert code == 200
    body = json.loads(body)
    assert body.keys() == {"lastUpdated", "currentTime", "nodeEligible", "healthy", "status"}
    assert body["status"].keys() == {"IPv4", "IPv6"}

    leaving, drained = node_object(), node_object()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    drained["spec"] = {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule", "value": "1"}]}
    for node in (leaving, drained):
        cluster.put("node", node)
        cluster.wait(lambda: healthz()[0] == 503, "503 of a node that leaves")
        assert json.loads(healthz()[1])["nodeEligible"] is False
        code, body = cluster.get(10256, "/livez")
        assert (code, json.loads(body)["healthy"]) == (200, True)
        assert "nodeEligible" not in json.loads(body)
        assert status(cluster) == status(cluster, 6) == 200
        cluster.put("node", node_object())
        cluster.wait(lambda: healthz()[0] == 200, "200 of a node that stays")
