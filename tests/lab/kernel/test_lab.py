"""Labs on a real kernel: what answers, what follows the manifests, what is left afterwards."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from narthex.lab import topology
from narthex.lab.program import labs as lab
from narthex.lab.program.state import StateDirectory
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace, namespace_exists, namespace_names
from narthex.linux.processes import processes_inside

pytestmark = pytest.mark.kernel

SOURCE = Path(lab.__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE)}

DEPLOYMENT = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: NAME}
spec:
  replicas: REPLICAS
  selector: {matchLabels: {app: NAME}}
  template:
    metadata: {labels: {app: NAME}}
    spec: {containers: [{name: c, ports: [{containerPort: 8080}, {name: dns, containerPort: 53, protocol: UDP}]}]}
"""
SERVICE = """\
apiVersion: v1
kind: Service
metadata: {name: NAME}
spec:
  type: NodePort
  ipFamilyPolicy: PreferDualStack
  selector: {app: NAME}
  ports:
    - {name: http, port: 80, targetPort: 8080, nodePort: 30001}
    - {name: dns, port: 53, targetPort: dns, protocol: UDP, nodePort: 30053}
"""


def manifest(text, name="web", replicas=3):
    return text.replace("NAME", name).replace("REPLICAS", str(replicas))


def command(*words):
    return [sys.executable, "-m", "narthex", "lab", *words]


def narthex(*words, status=0):
    done = subprocess.run(command(*words), env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def fresh_name(suffix):
    return f"nxt-{os.getpid()}-{suffix}"


def left_of(name):
    """Everything on this machine that belongs to the lab."""
    namespaces = [each for each in namespace_names() if topology.owns(name, each)]
    directory = StateDirectory(name)
    files = [path for path in (directory.path, directory.programs) if path.exists()]
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [
        *namespaces,
        *processes_inside(namespaces),
        *running_for(name),
        *files,
        *(mount for mount in mounts if topology.owns(name, mount.rpartition("/")[2])),
    ]


def running_for(name):
    """Processes of the lab that are in none of its namespaces: its own, and the one that forks."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = each.read_bytes().split(b"\0")
            if b"up" in words and name.encode() in words:
                found.append(each)
    return found


@contextlib.contextmanager
def running(name, directory, *options):
    try:
        narthex("up", str(directory), "--name", name, *options)
        yield lab.open_lab(name)
    finally:
        narthex("down", "--name", name)
    assert left_of(name) == []


def ask(namespace, host, port, kind=socket.SOCK_STREAM):
    """Who answers, on which node, and whom it saw: ("web-x", "node-1", "10.244.1.1"). Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with in_namespace(namespace):
        sock = socket.socket(family, kind)
    with sock:
        sock.settimeout(30)
        sock.connect((host, port))
        sock.send(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n" if kind == socket.SOCK_STREAM else b"?")
        answer = b""
        while part := sock.recv(65536):
            answer += part
            if kind == socket.SOCK_DGRAM:
                break
    pod, _, node, _, _, peer = answer.decode().splitlines()[-1].split()
    return pod, node.rstrip(","), peer.rpartition(":")[0].strip("[]")


def cluster_ips(name, service="web"):
    found = next(each for each in lab.read(name).services if each.name == service)
    return list(dict.fromkeys(each.address for each in found.frontends if each.kind == "cluster IP"))


@pytest.fixture(scope="module", params=["nftables", "iptables"])
def web(request, tmp_path_factory):
    """A lab of two nodes with three pods behind one Service; tests leave it as it was."""
    directory = tmp_path_factory.mktemp("manifests")
    (directory / "web.yaml").write_text(manifest(DEPLOYMENT) + "---\n" + manifest(SERVICE))
    with running(fresh_name(request.param[0]), directory, "--mode", request.param) as found:
        yield found, directory


def test_every_node_port_answers_outside_in_both_families(web):
    found, _ = web
    for node in found.nodes:
        for address in node.addresses:
            assert ask(found.outside, address, 30001)[0].startswith("web-")
        assert ask(found.outside, node.addresses[0], 30053, socket.SOCK_DGRAM)[0].startswith("web-")


def test_pods_and_nodes_call_the_cluster_ip(web):
    found, _ = web
    for address in cluster_ips(found.name):
        for namespace in (found.pods[0].network_namespace, *(node.namespace for node in found.nodes)):
            assert ask(namespace, address, 80)[0].startswith("web-")
    assert ask(found.pods[0].network_namespace, cluster_ips(found.name)[0], 53, socket.SOCK_DGRAM)


def test_all_pods_answer_and_see_the_pod_that_asks_or_the_node_for_itself(web):
    found, _ = web
    asking = found.pods[0]
    gateways = {address for node in found.nodes for address in node.gateways}
    for family, address in enumerate(cluster_ips(found.name)):
        answers = met(lambda: ask(asking.network_namespace, address, 80), len(found.pods))  # noqa: B023
        assert {pod for pod, _, _ in answers} == {pod.name for pod in found.pods}
        for pod, node, seen in answers:
            assert node == next(each.node for each in found.pods if each.name == pod)
            if pod == asking.name:
                assert seen in gateways
            else:
                assert seen == asking.addresses[family]


def test_outside_reaches_no_pod_and_no_cluster_ip(web):
    found, _ = web
    for address, port in ((found.pods[0].addresses[0], 8080), (cluster_ips(found.name)[0], 80)):
        with pytest.raises(OSError, match="unreachable"):
            ask(found.outside, address, port)


def test_status_tells_all(web):
    found, _ = web
    data = json.loads(narthex("status", "--name", found.name, "-o", "json"))
    assert (data["running"], data["healthy"]) == (True, True)
    assert [node["node"] for node in data["nodes"]] == ["node-1", "node-2"]
    assert data["state"]["services"][0]["endpoints"] == 3
    text = narthex("status", "--name", found.name)
    assert "every node, port 30001/TCP (node port)" in text
    assert all(pod.name in text for pod in found.pods)
    assert found.name in narthex("list")


def test_exec_runs_in_the_network_of_the_target(web):
    found, _ = web
    pod = found.pods[0]
    places = {
        "outside": topology.OUTSIDE_ADDRESSES[0],
        "node-2": "192.168.49.12",
        pod.name: pod.addresses[0],
        f"default/{pod.name}": pod.addresses[0],
    }
    for target, address in places.items():
        said = narthex("exec", "--name", found.name, target, "--", "ip", "-brief", "address", "show", "eth0")
        assert f" {address}/" in said
    narthex("exec", "--name", found.name, "outside", "--", "sh", "-c", "exit 7", status=7)
    assert "has no 'nowhere'; there are: outside, node-1" in narthex(
        "exec", "--name", found.name, "nowhere", "true", status=1
    )


def test_scale_up_and_down(web):
    found, _ = web
    node = found.nodes[0].addresses[0]
    try:
        narthex("scale", "deployment/web", "5", "--name", found.name)
        # The command waits for the rules within a limit, which a busy machine may reach.
        eventually(lambda: len(met(lambda: ask(found.outside, node, 30001)[0], 5)) == 5)
        narthex("scale", "deployment/web", "1", "--name", found.name)
        assert len({ask(found.outside, node, 30001)[0] for _ in range(20)}) == 1
        narthex("scale", "deployment/web", "0", "--name", found.name)
        with pytest.raises(ConnectionRefusedError):
            ask(found.outside, node, 30001)
    finally:
        narthex("scale", "deployment/web", "3", "--name", found.name)
    assert len([name for name in namespace_names() if name.startswith(f"nx-{found.name}.")]) == 3
    assert "there is no Deployment default/nope" in narthex(
        "scale", "deployment/nope", "3", "--name", found.name, status=1
    )


def test_no_call_is_lost_while_pods_are_replaced(web):
    found, directory = web
    file = directory / "web.yaml"
    before = file.read_text()
    changed = subprocess.Popen(
        ["sh", "-c", 'sed "s/name: c,/name: changed,/" "$1" > "$1.new" && mv "$1.new" "$1"', "sh", str(file)]
    )
    try:
        answers = []
        waiting = None
        end = time.monotonic() + 120
        while time.monotonic() < end:
            answers.append(ask(found.outside, found.nodes[1].addresses[0], 30001)[0])
            if waiting is None and changed.poll() is not None:
                waiting = subprocess.Popen(command("wait", "--name", found.name), env=ENVIRONMENT, stdout=-3)
            if waiting is not None and waiting.poll() is not None:
                break
        assert waiting is not None
        assert waiting.wait(60) == 0
        assert answers[0].split("-")[1] != ask(found.outside, found.nodes[1].addresses[0], 30001)[0].split("-")[1]
    finally:
        file.write_text(before)
        narthex("wait", "--name", found.name)


def test_edits_take_effect_by_themselves(web):
    found, directory = web
    extra = directory / "extra.yaml"
    service = manifest(SERVICE, "extra").replace("30001", "30002").replace("30053", "30054")
    extra.write_text(manifest(DEPLOYMENT, "extra", 1) + "---\n" + service)
    node = found.nodes[1].addresses[0]
    eventually(lambda: ask(found.outside, node, 30002)[0].startswith("extra-"))
    extra.unlink()
    eventually(lambda: refused(found.outside, node, 30002))
    eventually(lambda: not any("extra" in name for name in namespace_names() if topology.owns(found.name, name)))
    assert ask(found.outside, node, 30001)[0].startswith("web-")


def test_a_broken_manifest_harms_nothing_else(web):
    found, directory = web
    broken = directory / "broken.yaml"
    broken.write_text("apiVersion: v1\nkind: Service\nmetadata: {name: bad}\nspec: {ports: [{port: 70000}]}\n")
    try:
        narthex("wait", "--name", found.name)
        assert "70000" in narthex("status", "--name", found.name)
        assert ask(found.outside, found.nodes[0].addresses[0], 30001)
    finally:
        broken.unlink()
        narthex("wait", "--name", found.name)


def test_a_name_is_taken_once(web):
    found, directory = web
    assert "already exists" in narthex("up", str(directory), "--name", found.name, status=1)
    assert lab.open_lab(found.name)


def met(draw, count):
    """What many draws come to: at least as many as miss one of so many things once in ten billion runs."""
    return {draw() for _ in range(25 * count)}


def eventually(condition, patience=60.0):
    deadline = time.monotonic() + patience
    while True:
        try:
            if condition():
                return
        except OSError as error:
            last = error
        else:
            last = None
        assert time.monotonic() < deadline, f"not in {patience} s ({last})"
        time.sleep(0.05)


def refused(namespace, host, port):
    try:
        ask(namespace, host, port)
    except ConnectionRefusedError:
        return True
    return False


def test_labs_side_by_side(tmp_path):
    directories = {}
    for which in ("one", "two"):
        directories[which] = tmp_path / which
        directories[which].mkdir()
        (directories[which] / "web.yaml").write_text(
            manifest(DEPLOYMENT, which, 1) + "---\n" + manifest(SERVICE, which)
        )
    with running(fresh_name("a"), directories["one"], "--nodes", "1") as one:
        with running(fresh_name("b"), directories["two"], "--nodes", "1") as two:
            assert one.nodes[0].addresses == two.nodes[0].addresses
            assert ask(one.outside, one.nodes[0].addresses[0], 30001)[0].startswith("one-")
            assert ask(two.outside, two.nodes[0].addresses[0], 30001)[0].startswith("two-")
        assert ask(one.outside, one.nodes[0].addresses[0], 30001)[0].startswith("one-")


def test_host_network_pods_and_pods_without_room_for_their_port(tmp_path):
    shared = DEPLOYMENT.replace("spec: {containers", "spec: {hostNetwork: true, containers")
    (tmp_path / "taken.yaml").write_text(manifest(shared.replace("8080", "8081"), "taken", 1))
    without = shared.replace(", {name: dns, containerPort: 53, protocol: UDP}", "")
    (tmp_path / "host.yaml").write_text(manifest(without, "host", 2))
    with running(fresh_name("h"), tmp_path, "--nodes", "1") as found:
        assert sorted(pod.ready for pod in found.pods) == [False, False, True]
        # The scheduler knows of ports: the second pod gets no node, and no address.
        assert {pod.addresses for pod in found.pods} == {found.nodes[0].addresses, ()}
        assert "port 53 of node-1 is the lab's DNS's" in narthex("status", "--name", found.name)
        assert "free ports" in narthex("status", "--name", found.name)
        assert ask(found.outside, found.nodes[0].addresses[0], 8080)[1] == "node-1"


def test_without_manifests_it_makes_a_directory_and_says_where():
    name = fresh_name("e")
    try:
        assert str(StateDirectory(name).input) in narthex("up", "--name", name, "--nodes", "1")
        (StateDirectory(name).input / "web.yaml").write_text(manifest(DEPLOYMENT, replicas=1))
        narthex("wait", "--name", name)
        assert [pod.ready for pod in lab.open_lab(name).pods] == [True]
    finally:
        narthex("down", "--name", name)
    assert left_of(name) == []


@pytest.fixture
def crashing(tmp_path):
    (tmp_path / "web.yaml").write_text(manifest(DEPLOYMENT, replicas=1) + "---\n" + manifest(SERVICE))
    name = fresh_name("c")
    yield name, tmp_path
    narthex("down", "--name", name)
    assert left_of(name) == []


def test_after_a_crash_of_the_lab_process(crashing):
    name, directory = crashing
    narthex("up", str(directory), "--name", name, "--nodes", "1")
    os.kill(lab.read(name).controller.pid, signal.SIGKILL)
    eventually(lambda: not lab.is_running(lab.read(name)))
    assert "narthex lab down" in narthex("scale", "deployment/web", "2", "--name", name, status=1)
    done = subprocess.run(
        command("status", "--name", name), env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "CRASHED" in done.stdout
    narthex("down", "--name", name)
    assert left_of(name) == []
    assert "There is no lab" in narthex("down", "--name", name)


def test_up_clears_what_a_crash_has_left(crashing):
    name, directory = crashing
    narthex("up", str(directory), "--name", name, "--nodes", "2")
    os.kill(lab.read(name).controller.pid, signal.SIGKILL)
    eventually(lambda: not lab.is_running(lab.read(name)))
    assert "Removed the remains of lab" in narthex("up", str(directory), "--name", name, "--nodes", "1")
    assert not namespace_exists(f"nx-{name}-node-2")
    assert ask(topology.outside_namespace(name), "192.168.49.11", 30001)


@pytest.mark.parametrize("how", ["front only", "front and lab", "interrupt"])
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3])
def test_up_is_ended_halfway(crashing, how, delay):
    name, directory = crashing
    front = subprocess.Popen(
        command("up", str(directory), "--name", name, "--nodes", "2"),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    eventually(lambda: StateDirectory(name).path.exists())
    time.sleep(delay)
    state = StateDirectory(name).read()
    front.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    if how == "front and lab" and state is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.controller.pid, signal.SIGKILL)
    front.wait(60)
    if how == "interrupt":
        assert left_of(name) == []


def test_down_ends_what_runs_inside(crashing):
    name, directory = crashing
    narthex("up", str(directory), "--name", name, "--nodes", "1")
    sleeper = subprocess.Popen(command("exec", "--name", name, "outside", "--", "sleep", "1000"), env=ENVIRONMENT)
    eventually(lambda: len(processes_inside([topology.outside_namespace(name)])) == 1)
    narthex("down", "--name", name)
    assert sleeper.wait(60) == -signal.SIGKILL


def test_down_works_from_names_alone(crashing):
    name, _ = crashing
    for namespace in (topology.fabric_namespace(name), f"nx-{name}-node-7", f"nx-{name}.default.x"):
        create_namespace(namespace)
    stranger = f"nx-{name}-b-node-1"
    create_namespace(stranger)
    try:
        assert name in lab.all_names()
        narthex("down", "--name", name)
        assert left_of(name) == []
        assert namespace_exists(stranger)
    finally:
        delete_namespace(stranger)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "/no/such/directory"], "no directory '/no/such/directory'"),
        (["up", "--name", "Not_A_Name"], "is not a valid name of a lab"),
        (["up", "--nodes", "1000"], "1 to 200 nodes"),
        (["status", "--name", "nxt-nothing"], "there is no lab 'nxt-nothing'"),
    ],
)
def test_what_cannot_be_is_said(arguments, message):
    said = narthex(*arguments, status=1)
    assert message in said
    assert "Traceback" not in said
