"""On which addresses node ports answer, loopback above all, and what must not be reached for safety."""

import itertools
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from tests.proxy.kernel.small_cluster import (
    CALLERS,
    HERE,
    NODE_PORT,
    POD,
    THERE,
    SmallCluster,
    node_object,
    service,
    slices,
)

from narthex.linux.links import ip_batch, set_sysctls
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run
from narthex.testing.load import PATIENCE, OpenConnection

pytestmark = pytest.mark.kernel

MODES = ("nftables", "iptables")
ENDPOINTS = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]
NODE_V4 = ("10.20.0.11", "10.20.1.11")
SILENCE = 0.4
SETTING = "net/ipv4/conf/all/route_localnet"


@pytest.fixture
def make(tmp_path):
    """Makes a running cluster: mode, flags, configuration."""
    with ExitStack() as stack:

        def cluster(mode, *flags, config=None, before=None, **spec):
            directory = tmp_path / str(next(numbers))
            directory.mkdir()
            made = stack.enter_context(SmallCluster(directory, mode))
            made.serve(*ENDPOINTS)
            made.put("web", service(**spec), *slices(dict.fromkeys(ENDPOINTS, "ready")))
            if before:
                before(made)
            if config is not None:
                path = directory / "config.yaml"
                head = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
                path.write_text(yaml.safe_dump({**head, "mode": mode, **config}))
                flags = ("--config", str(path), *flags)
            return made.start(*flags).ready()

        numbers = itertools.count()
        yield cluster


def tried(way, patience=PATIENCE):
    """Who answers, or how it ends."""
    try:
        line = OpenConnection(way, patience)
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "silence"
    line.close()
    return line.endpoint


def answered(way):
    return tried(way) not in ("refused", "silence")


def localhost(cluster, address="127.0.0.1", port=NODE_PORT):
    """A process on the node calls a loopback address."""
    return cluster.from_node(6 if ":" in address else 4, address, port, source=address)


def to_localhost(cluster, port):
    """Somebody outside sends a packet that names the node's loopback."""
    return cluster.from_outside(4, "127.0.0.1", port)


def route_localnet(cluster):
    with in_namespace(cluster.world.node):
        return (Path("/proc/sys") / SETTING).read_text().strip()


@pytest.mark.row("9.9")
def test_iptables_mode_answers_on_localhost(make):
    cluster = make("iptables")
    met = {tried(localhost(cluster)) for _ in range(40)}
    assert met == {f"{address}:8080" for address in ENDPOINTS[:2]}, "this node's endpoint and the other's"
    assert answered(localhost(cluster, "127.0.0.1", NODE_PORT))
    assert answered(cluster.from_node(4, "127.1.2.3", source="127.1.2.3")), "all of 127.0.0.0/8"
    assert route_localnet(cluster) == "1"


@pytest.mark.row("9.9")
def test_localhost_alone(make):
    """A list that holds loopback and nothing else."""
    cluster = make("iptables", "--nodeport-addresses", "127.0.0.0/8")
    assert answered(localhost(cluster))
    assert not answered(cluster.from_outside())
    assert not answered(cluster.from_node())


@pytest.mark.row("9.9", "9.10")
@pytest.mark.parametrize(
    ("mode", "flags", "config"),
    [
        ("nftables", (), None),
        ("nftables", ("--nodeport-addresses", "0.0.0.0/0,::/0"), None),
        ("iptables", (), {"iptables": {"localhostNodePorts": False}}),
        ("iptables", ("--nodeport-addresses", "10.20.0.0/16,fd20::/64"), None),
        ("iptables", ("--nodeport-addresses", "primary"), None),
    ],
    ids=["nftables", "nftables-every-address", "switched-off", "list-without-loopback", "primary"],
)
def test_where_localhost_is_not_served_nothing_is_opened(make, mode, flags, config):
    """No answer, no setting, no guard needed; the node's own address answers all the same."""
    cluster = make(mode, *flags, config=config)
    assert tried(localhost(cluster)) == "refused"
    assert tried(localhost(cluster, "::1")) == "refused"
    assert answered(cluster.from_outside(4)) and answered(cluster.from_outside(6))
    assert route_localnet(cluster) == "0"
    assert "KUBE-FIREWALL" not in cluster.rules()


@pytest.mark.row("9.10")
def test_ipv6_localhost_never_answers(make):
    cluster = make("iptables", "--nodeport-addresses", "::/0,0.0.0.0/0")
    assert answered(localhost(cluster))
    assert tried(localhost(cluster, "::1")) == "refused"


@pytest.mark.row("9.11")
def test_neighbours_cannot_reach_the_nodes_loopback(make):
    """route_localnet would let them in; the guard keeps them out, and only them. Without the guard they do get in,
    so it is the guard that this test sees."""
    cluster = make("iptables")
    cluster.answers.open(cluster.world.node, "127.0.0.1", 9999)
    assert tried(localhost(cluster, port=9999)) == "127.0.0.1:9999", "the host's own daemon serves the host"
    assert tried(to_localhost(cluster, 9999), SILENCE) == "silence"
    assert tried(cluster.way("pod", CALLERS, POD[4], "127.0.0.1", 9999), SILENCE) in ("silence", "refused")
    assert answered(localhost(cluster)), "the guard lets pass what was sent on"
    cluster.kill()
    run(["iptables", "-F", "KUBE-FIREWALL"], namespace=cluster.world.node)
    assert tried(to_localhost(cluster, 9999)) == "127.0.0.1:9999"
    cluster.start().ready()
    assert tried(to_localhost(cluster, 9999), SILENCE) == "silence", "the next start puts the guard back"


@pytest.mark.row("9.11")
def test_the_setting_comes_after_its_guard_and_is_never_taken_from_others(make):
    """What somebody else has switched on stays on."""
    cluster = make(
        "iptables",
        config={"iptables": {"localhostNodePorts": False}},
        before=lambda made: set_sysctls(made.world.node, {SETTING: "1"}),
    )
    assert route_localnet(cluster) == "1"
    assert tried(localhost(cluster)) == "refused"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.row("9.2", "9.8")
def test_a_list_of_networks(make, mode):
    """Addresses inside answer, others do not; one that comes later counts at once."""
    cluster = make(mode, "--nodeport-addresses", "10.20.1.0/24,fd20::/64")
    assert answered(cluster.from_outside(4, "10.20.1.11")) and answered(cluster.from_outside(6))
    assert tried(cluster.from_outside(4)) == "refused"
    ip_batch(cluster.world.node, ["address add 10.20.1.77/32 dev eth0", "address add 10.20.2.77/32 dev eth0"])
    assert answered(cluster.from_outside(4, "10.20.1.77"))
    assert tried(cluster.from_outside(4, "10.20.2.77")) == "refused"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.row("9.3", "15.6", "15.8", "29.2", "29.12")
def test_primary_follows_the_node(make, mode):
    """The Node's address changes while the proxy runs: node ports move with it, the process stays."""
    cluster = make(mode, "--nodeport-addresses", "primary")
    assert answered(cluster.from_outside(4)) and tried(cluster.from_outside(4, "10.20.1.11")) == "refused"
    process = cluster.process.pid
    cluster.put("node", node_object(("10.20.1.11", "fd20::11")))
    cluster.wait(lambda: answered(cluster.from_outside(4, "10.20.1.11")), "node ports at the new address")
    assert tried(cluster.from_outside(4)) == "refused"
    assert answered(cluster.from_outside(6))
    assert cluster.process.pid == process and cluster.process.poll() is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.row("9.4", "9.5", "29.2", "29.17")
def test_what_is_not_known_stays_closed(make, mode):
    """A Node without an IPv6 address has no primary one: nothing opens there. A list of IPv4 networks names none of IPv6: every address
    of that family opens, as upstream, and none if the list is taken strictly."""
    by_name = make(mode, "--nodeport-addresses", "primary", before=lambda made: made.put("node", node_object(NODE_V4)))
    assert answered(by_name.from_outside(4))
    assert tried(by_name.from_outside(6)) == "refused"
    by_list = make(mode, "--nodeport-addresses", "10.20.0.0/16")
    assert answered(by_list.from_outside(4)) and answered(by_list.from_outside(4, "10.20.1.11"))
    assert answered(by_list.from_outside(6))
    strict = make(mode, "--nodeport-addresses", "10.20.0.0/16", "--strict-node-port-addresses")
    assert answered(strict.from_outside(4))
    assert tried(strict.from_outside(6)) == "refused"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.row("9.7")
def test_a_range_without_an_address_opens_nothing(make, mode):
    cluster = make(mode, "--nodeport-addresses", "192.0.2.0/24,2001:db8:99::/64")
    for version in (4, 6):
        assert tried(cluster.from_outside(version)) == "refused"
        assert tried(cluster.from_node(version)) == "refused"
        assert answered(cluster.from_pod(version)), "the ClusterIP is not concerned"


@pytest.mark.row("9.14")
@pytest.mark.parametrize("mode", MODES)
def test_no_socket_holds_a_node_port(make, mode):
    """A daemon of the host may own the number; on addresses with node ports its traffic is taken away."""
    cluster = make(mode, "--nodeport-addresses", "primary")
    cluster.answers.open(cluster.world.node, "0.0.0.0", NODE_PORT)
    assert tried(cluster.from_outside(4)).startswith("10.64.")
    assert tried(cluster.from_outside(4, "10.20.1.11")) == f"0.0.0.0:{NODE_PORT}"


LOCALHOST_FLAGS = (
    *("--nodeport-addresses", "primary,localhost"),
    *("--feature-gates", "KubeProxyNFTablesLocalhostNodePorts=true"),
)


@pytest.mark.row("9.13")
def test_nftables_mode_answers_on_localhost_through_the_relay(make):
    """TCP and UDP, both families; the rules open nothing, and the setting stays off."""
    cluster = make("nftables", *LOCALHOST_FLAGS)
    for address, endpoints in (("127.0.0.1", ENDPOINTS[:2]), ("::1", ENDPOINTS[2:])):
        cluster.wait(lambda address=address: answered(localhost(cluster, address)), f"a relay on {address}")
        met = {tried(localhost(cluster, address)) for _ in range(20)}
        assert len(met) == 2 and {one.rpartition(":")[0].strip("[]") for one in met} == set(endpoints)
    assert answered(cluster.from_outside(4)) and answered(cluster.from_outside(6))
    assert tried(to_localhost(cluster, NODE_PORT), SILENCE) in ("silence", "refused"), "nobody else"
    assert route_localnet(cluster) == "0"
    metric = 'kubeproxy_nftables_localhost_nodeport_listeners{ip_family="IPv4"} 1.0'
    cluster.wait(lambda: metric in cluster.get(10249, "/metrics")[1], "the metric of listeners")
    process = cluster.process.pid
    cluster.put("web", *slices({}))
    cluster.wait(lambda: tried(localhost(cluster)) == "refused", "a closed port without endpoints")
    assert cluster.process.pid == process


@pytest.mark.row("9.13")
def test_localhost_needs_the_gate_in_nftables_mode(make):
    cluster = make("nftables", *LOCALHOST_FLAGS[:2])
    assert answered(cluster.from_outside(4))
    assert tried(localhost(cluster)) == "refused"
