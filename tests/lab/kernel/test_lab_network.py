"""The pods' network in a lab: made by the installed CNI plugins, between nodes by routes or an overlay."""

import contextlib
import errno
import json
import re
import socket
import subprocess
import sys

import pytest
from tests.lab.kernel.test_lab import ENVIRONMENT, ask, eventually, fresh_name, left_of, narthex

from narthex.lab.program import labs
from narthex.lab.program import node_client as status
from narthex.lab.program.state import StateDirectory
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run

pytestmark = pytest.mark.kernel

PODS = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 12
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: c, image: echo, ports: [{containerPort: 8080}, {containerPort: 5353, protocol: UDP}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080, nodePort: 30001}]
"""
DONT_FRAGMENT = (socket.IPPROTO_IP, 10, 2)
"""IP_MTU_DISCOVER, IP_PMTUDISC_DO."""


@contextlib.contextmanager
def lab(suffix, directory, *options):
    name = fresh_name(suffix)
    try:
        narthex("up", str(directory), "--name", name, *options)
        yield labs.open_lab(name)
    finally:
        narthex("down", "--name", name)
    assert left_of(name) == []


@pytest.fixture(scope="module", params=["none", "vxlan", "host-gw"])
def web(request, tmp_path_factory):
    """A lab of three nodes with twelve pods; tests leave it as it was."""
    directory = tmp_path_factory.mktemp("manifests")
    (directory / "web.yaml").write_text(PODS)
    with lab(request.param[0], directory, "--nodes", "3", "--overlay", request.param) as found:
        yield found, request.param


def of(found, node):
    return next(each for each in found.nodes if each.name == node)


def told(found, node):
    """What the overlay has told a node's plugins."""
    text = StateDirectory(found.name).node(node).subnet_file.read_text()
    return dict(line.split("=", 1) for line in text.splitlines())


def test_routes_to_pods_here_and_elsewhere(web):
    """What `ip route` says on a pod's node and on another one."""
    found, overlay = web
    said = {node.name: run(["ip", "route"], namespace=node.namespace) for node in found.nodes}
    shown = {name: [line.strip() for line in text.splitlines()] for name, text in said.items()}
    assert "10.244.3.0/24 dev cni0 proto kernel scope link src 10.244.3.1" in shown["node-3"]
    way = {
        "none": "10.244.3.0/24 via 192.168.49.13 dev eth0",
        "vxlan": "10.244.3.0/24 via 10.244.3.0 dev flannel.1 onlink",
        "host-gw": "10.244.3.0/24 via 192.168.49.13 dev eth0",
    }[overlay]
    assert way in shown["node-1"] and way in shown["node-2"]


def test_from_a_pods_interface_to_the_bridge(web):
    """eth0 in the pod, its other end on the node, whose master is cni0."""
    found, _ = web
    for pod in found.pods:
        node = of(found, pod.node)
        number = narthex("exec", "--name", found.name, pod.name, "--", "cat", "/sys/class/net/eth0/iflink").strip()
        shown = json.loads(run(["ip", "-j", "link", "show"], namespace=node.namespace))
        (end,) = [link for link in shown if link["ifindex"] == int(number)]
        assert end["ifname"].startswith("veth") and end["master"] == "cni0" and end["operstate"] == "UP"
        if pod is found.pods[2]:
            break
    (bridge,) = json.loads(run(["ip", "-j", "addr", "show", "cni0"], namespace=node.namespace))
    assert node.gateways[0] in [each["local"] for each in bridge["addr_info"]]


def test_all_pods_reach_each_other(web):
    found, overlay = web
    assert len({pod.addresses for pod in found.pods}) == 12
    for asking in found.pods:
        for pod in found.pods:
            for family, address in enumerate(pod.addresses):
                if asking is not pod:
                    assert ask(asking.network_namespace, address, 8080) == (
                        pod.name,
                        pod.node,
                        asking.addresses[family],
                    ), (overlay, asking.node, pod.node)


def test_a_service_leads_to_all_of_them_also_to_neighbours_and_to_the_one_that_asks(web):
    found, _ = web
    service = next(each for each in labs.read(found.name).services if each.namespace == "default")
    for address in {each.address for each in service.frontends if each.kind == "cluster IP"}:
        seen = set()
        for _ in range(400):
            seen.add(ask(found.pods[0].network_namespace, address, 80)[0])
            if len(seen) == 12:
                break
        assert len(seen) == 12, address
    for node in found.nodes:
        for address in node.addresses:
            assert ask(found.outside, address, 30001)[0].startswith("web-")


def test_the_largest_packet_goes_from_pod_to_pod_whole(web):
    found, overlay = web
    here = found.pods[0]
    there = next(pod for pod in found.pods if pod.node != here.node)
    (link,) = json.loads(run(["ip", "-j", "link", "show", "eth0"], namespace=here.network_namespace))
    largest = link["mtu"]
    assert largest == (1500 if overlay == "none" else int(told(found, here.node)["FLANNEL_MTU"]))
    assert (largest < 1500) == (overlay == "vxlan")
    with in_namespace(here.network_namespace):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sock:
        sock.setsockopt(*DONT_FRAGMENT)
        sock.settimeout(20)
        sock.connect((there.addresses[0], 5353))
        with pytest.raises(OSError) as refused:
            sock.send(bytes(largest - 28 + 1))
        assert refused.value.errno == errno.EMSGSIZE
        sock.send(bytes(largest - 28))
        assert there.name.encode() in sock.recv(1000)


def test_pods_of_an_overlay_reach_outside_by_their_nodes_address(web):
    """The overlay masquerades, as flannel does. Without one nobody does: the network around knows no pods."""
    found, overlay = web
    pod = found.pods[0]
    if overlay == "none":
        assert "10.244." not in run(["ip", "route"], namespace=f"nx-{found.name}-fabric")
        return
    with in_namespace(found.outside):
        server = socket.create_server(("192.0.2.2", 0))
    with in_namespace(pod.network_namespace):
        sock = socket.socket()
    with server, sock:
        server.settimeout(20)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(server.getsockname())
        connection, peer = server.accept()
        connection.close()
    assert peer[0] == of(found, pod.node).addresses[0]


def test_the_agents_of_the_nodes_have_done_the_work(web):
    found, _ = web
    counted = 0
    for node in found.nodes:
        _, body = status.get(node.namespace, status.METRICS_PORT, "/metrics")
        pattern = rb'narthex_cni_requests_total\{command="ADD",outcome="ok",plugin="(\w+)"\} (\S+)'
        counted += sum(float(count) for _, count in re.findall(pattern, body))
    # One plugin for each pod: none has a host port.
    assert counted == 12


def test_host_ports_and_what_is_left_of_pods_that_go(tmp_path):
    pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: NAME}\nspec: {containers: [{name: c, image: echo, ports: [PORT]}]}\n"
    port = "{containerPort: 8080, hostPort: 9090}"
    first = tmp_path / "first.yaml"
    first.write_text(pod.replace("NAME", "first").replace("PORT", port))
    with lab("p", tmp_path, "--nodes", "1") as found:
        (node,) = found.nodes
        places = StateDirectory(found.name).node(node.name)
        for address in node.addresses:
            assert ask(found.outside, address, 9090)[0] == "first"
        # The scheduler would not put it there.
        given = pod.replace("spec: {", "spec: {nodeName: node-1, ")
        (tmp_path / "second.yaml").write_text(given.replace("NAME", "second").replace("PORT", port))
        narthex("wait", "--name", found.name)
        told = narthex("status", "--name", found.name)
        assert "Pod default/second: host port tcp 9090 is taken by container default.first" in told
        first.unlink()
        narthex("wait", "--name", found.name)
        # It is tried again until it can be had.
        eventually(lambda: ask(found.outside, node.addresses[0], 9090)[0] == "second", patience=30.0)
        (tmp_path / "second.yaml").unlink()
        narthex("wait", "--name", found.name)
        links = json.loads(run(["ip", "-j", "link", "show", "type", "veth"], namespace=node.namespace))
        assert [link["ifname"] for link in links] == ["eth0"]
        for folder in (places.attached, *places.records.iterdir()):
            assert folder.is_file() or list(folder.iterdir()) == [], folder
        reserved = [path.name for path in places.reservations.glob("*/*") if path.name[:4] not in ("lock", "last")]
        assert reserved == []


def test_a_lab_whose_node_cannot_start_says_why_and_leaves_nothing(tmp_path):
    """Here something that ends at once stands where the node would."""
    name = fresh_name("f")
    program = (
        "import sys; sys.argv[1:] = ['lab', 'up', sys.argv[1], '--name', sys.argv[2]];"
        "from narthex.lab.program import node_process; node_process.run_node = lambda *_: sys.exit(1);"
        "from narthex.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), name],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "the process of node-1 ended (status 1):\n(its log is empty)" in done.stderr
    assert left_of(name) == []


def test_a_node_that_crashes_at_its_start_is_started_again(tmp_path):
    """Here the first process of each node ends by a fault, as those of C libraries do."""
    name = fresh_name("g")
    program = f"""
import os, signal, sys
from narthex.lab.program import node_process
real = node_process.run_node
def run_node(control, order, files):
    try:
        os.mkdir({str(tmp_path)!r} + "/" + node_process.msgspec.json.decode(order, type=node_process.NodeStartRequest).namespace)
    except FileExistsError:
        real(control, order, files)
    os.kill(os.getpid(), signal.SIGSEGV)
node_process.run_node = run_node
sys.argv[1:] = ["lab", "up", {str(tmp_path / "manifests")!r}, "--name", {name!r}, "--nodes", "2"]
from narthex.cli import main
main()
"""
    (tmp_path / "manifests").mkdir()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert '"healthy":true' in narthex("status", "--name", name, "-o", "json").replace(" ", "")
        log = (StateDirectory(name).logs / "node-1.log").read_text()
        assert "the process ended (SIGSEGV); the lab starts another one" in log
    finally:
        narthex("down", "--name", name)
    assert left_of(name) == []
