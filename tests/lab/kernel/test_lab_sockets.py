"""A lab whose nodes balance sockets: connections of pods and nodes to Services need no rule and no tracking for them."""

import contextlib
import json

import pytest
from tests.lab.kernel.lab_cluster import eventually, narthex, running

from narthex.lab.program import labs
from narthex.lab.program.node_cgroups import node_cgroup
from narthex.linux.cgroups import cgroup_mount, processes_in
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run
from narthex.proxy.kernel.sockets import PINS, netns_cookie, pinned_sockets

pytestmark = pytest.mark.kernel

VIP, IDLE = "10.96.7.7", "10.96.7.8"
WEB = f"""\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: web}}
spec:
  replicas: 3
  selector: {{matchLabels: {{app: web}}}}
  template:
    metadata: {{labels: {{app: web}}}}
    spec: {{containers: [{{name: c, image: web, ports: [{{containerPort: 8080}}]}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: web}}
spec: {{clusterIP: {VIP}, selector: {{app: web}}, ports: [{{port: 80, targetPort: 8080}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: idle}}
spec: {{clusterIP: {IDLE}, selector: {{app: none}}, ports: [{{port: 80}}]}}
---
apiVersion: v1
kind: Pod
metadata: {{name: client}}
spec: {{nodeName: node-1, containers: [{{name: c, image: /bin/sleep, args: ["100000"]}}]}}
---
apiVersion: v1
kind: Pod
metadata: {{name: fetcher}}
spec:
  nodeName: node-2
  restartPolicy: Never
  containers: [{{name: c, image: /bin/sh, args: [-c, "until curl -sS -m 5 http://{VIP}; do sleep 0.2; done"]}}]
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sockets")
    (folder / "web.yaml").write_text(WEB)
    with running("sk", "--socket-load-balancing", directory=folder) as made:
        yield made
    assert not (cgroup_mount() / "narthex-lab" / made.name).exists()


def tracked(lab, address):
    """The entries of connection tracking to an address, on all nodes."""
    found = (run(["conntrack", "-L", "-d", address], namespace=node.namespace) for node in lab.lab.nodes)
    return [line for text in found for line in text.splitlines()]


def connections(node):
    """How often sockets of a node and its pods were sent to an endpoint."""
    with in_namespace(node.namespace):
        return sum(sum(each.values()) for each in pinned_sockets().connections.values())


def fetch(lab, client, url=f"http://{VIP}"):
    return narthex("lab", "exec", "--name", lab.name, client, "--", "curl", "-sS", "-m", "20", url)


def test_each_node_has_a_control_group_with_its_programs(lab):
    for node in lab.lab.nodes:
        held = processes_in(node_cgroup(lab.name, node.name))
        record = next(each for each in lab.lab.processes if each.node == node.name)
        assert record.process.pid in held
        with in_namespace(node.namespace):
            assert len(pinned_sockets().hooks) == 8
    client = next(each for each in lab.lab.pods if each.name == "client")
    assert next(iter(client.containers.values())) in processes_in(node_cgroup(lab.name, "node-1"))


@pytest.mark.parametrize("client", ["client", "web", "node-1"])
def test_a_connection_to_a_service_is_tracked_for_no_service(lab, client):
    name = next(each.name for each in lab.lab.pods if each.name.startswith(client)) if client == "web" else client
    node = next(each.node for each in lab.lab.pods if each.name == name) if client != "node-1" else client
    place = next(each for each in lab.lab.nodes if each.name == node)
    before = connections(place)
    answers = {fetch(lab, name).split()[0] for _ in range(3)}

    assert all(each.startswith("web-") for each in answers)
    assert connections(place) - before == 3
    assert tracked(lab, VIP) == []


def test_kubectl_exec_is_in_the_control_group_of_the_node(lab):
    node = next(each for each in lab.lab.nodes if each.name == "node-1")
    before = connections(node)
    assert lab.kubectl("exec", "client", "--", "curl", "-sS", "-m", "20", f"http://{VIP}").startswith("web-")
    assert connections(node) - before == 1 and tracked(lab, VIP) == []


def test_a_program_of_a_pod_uses_the_service(lab):
    """It may start before the Service has endpoints, and is then refused."""
    assert eventually(lambda: "web-" in lab.kubectl("logs", "fetcher"))


def test_a_service_without_endpoints_refuses_sockets_at_once(lab):
    words = ("lab", "exec", "--name", lab.name, "client", "--", "curl", "-sS", "-m", "20", f"http://{IDLE}")
    assert "Failed to connect" in narthex(*words, status=7)


def test_trace_check_and_top_know_the_maps(lab):
    def checked():
        with contextlib.suppress(AssertionError):
            return "the same" in narthex("check", "--lab", lab.name)

    assert eventually(checked)
    path = narthex("trace", "--lab", lab.name, "client", f"{VIP}:80")
    assert "connect chooses" in path
    fetch(lab, "client")
    table = json.loads(
        narthex("top", "--lab", lab.name, "--node", "node-1", "--once", "--interval", "0.1", "-o", "json")
    )
    assert "socket load balancing" in table["source"]
    row = next(each for each in table["rows"] if each["service"] == "default/web" and not each["endpoint"])
    ends = [each for each in table["rows"] if each["service"] == "default/web" and each["endpoint"]]
    assert row["connections"] == sum(each["connections"] for each in ends) > 0


def test_a_new_process_of_a_node_goes_on(lab):
    """Sockets are balanced while it is gone, and it adopts what is pinned."""
    node = next(each for each in lab.lab.nodes if each.name == "node-1")
    narthex("lab", "fault", "kill", "--name", lab.name, "proxy/node-1")
    before = connections(node)
    assert fetch(lab, "client").startswith("web-")
    assert connections(node) - before == 1


def test_pins_and_control_groups_go_with_the_lab(tmp_path):
    with running("sk1", "--socket-load-balancing", "--nodes", "1", directory=tmp_path) as made:
        (node,) = made.lab.nodes
        with in_namespace(node.namespace):
            pins = PINS / f"netns-{netns_cookie()}"
        assert pins.is_dir()
    assert not pins.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mode", "iptables"), "--socket-load-balancing works in mode nftables only, not in mode iptables"),
        (("--kube-proxy", "/bin/true"), "--socket-load-balancing is for the nodes' own proxy: omit --kube-proxy"),
    ],
)
def test_labs_that_cannot_balance_sockets_say_why(options, said):
    assert said in narthex("lab", "up", "--name", "nxt-never", "--socket-load-balancing", *options, status=1)
    assert "nxt-never" not in labs.all_names()
