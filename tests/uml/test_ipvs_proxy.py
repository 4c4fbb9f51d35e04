"""`narthex proxy`, `narthex cleanup` and a lab in mode ipvs, with real connections."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lab.kernel.requests_on_lab import Requests, ask
from tests.proxy.kernel.small_cluster import CLUSTER_IP, HERE, NODE_IP, SOURCE, THERE, SmallCluster, service, slices
from tests.uml.test_ipvs_servers import timeouts

from narthex.lab.program import labs as lab
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run
from narthex.model.net import Protocol
from narthex.netfilter.ipvs import parse_ipvsadm
from narthex.proxy.backends.ipvs.names import LINK, SETS
from narthex.proxy.kernel import ipvs_link
from narthex.proxy.kernel.ipset import read_ipsets
from narthex.testing.load import Load, OpenConnection, until

ENDPOINTS = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]
HELD = 24
PAUSE = 0.1
"""Seconds between two new connections: this machine has one slow processor, which the proxy needs, too."""


@pytest.fixture
def cluster(tmp_path):
    with SmallCluster(tmp_path, "ipvs") as made:
        made.serve(*ENDPOINTS)
        made.put("web", service(), *slices(dict.fromkeys(ENDPOINTS, "ready")))
        yield made


@pytest.fixture
def load(cluster):
    made = Load([cluster.from_pod(4), cluster.from_outside(4), cluster.from_pod(6), cluster.from_outside(6)])
    yield made
    made.close()


def narthex(cluster, *words):
    """A command in the node's namespace: status, standard output and error."""
    with in_namespace(cluster.world.node):
        done = subprocess.run(
            [sys.executable, "-m", "narthex", *words],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    return done.returncode, done.stdout, done.stderr


def servers(cluster):
    return parse_ipvsadm(run(["ipvsadm", "-S", "-n"], namespace=cluster.world.node)).servers


def weights(cluster, address):
    held = next((each for key, each in servers(cluster).items() if key[0] == address), None)
    return {real.address: real.weight for real in held.reals} if held else {}


def kube_chains(cluster):
    text = run(["iptables-save"], namespace=cluster.world.node) + run(["ip6tables-save"], namespace=cluster.world.node)
    return {line[1:].split()[0] for line in text.splitlines() if line.startswith(":KUBE-")}


def settled(load):
    load.exchange()
    assert load.failures == []
    assert len(load.held) == HELD


@pytest.mark.row("24.9", "21.16", "21.20")
def test_kill_and_restart_without_harm(cluster, load):
    """In both families, by ClusterIP and node port; a weight 0 that the crash has left is mended."""
    cluster.start().ready()
    load.hold(HELD)
    with load.streaming(PAUSE):
        cluster.kill()
        before, made = servers(cluster), load.made
        cluster.wait(lambda: load.made > made + 4, "new connections without a proxy")
        where = f"{CLUSTER_IP[4]}:80"
        run(["ipvsadm", "-e", "-t", where, "-r", f"{HERE[4][0]}:8080", "-m", "-w", "0"], namespace=cluster.world.node)
        cluster.start().ready()
        cluster.wait(lambda: weights(cluster, CLUSTER_IP[4]) == {HERE[4][0]: 1, THERE[4][0]: 1}, "the weights")
    settled(load)
    assert set(load.endpoints) <= {f"[{a}]:8080" if ":" in a else f"{a}:8080" for a in ENDPOINTS}
    assert servers(cluster) == before


@pytest.mark.row("24.8", "18.4")
def test_an_endpoint_that_goes_keeps_its_connections(cluster):
    cluster.start().ready()
    lines = [OpenConnection(cluster.from_pod(4)) for _ in range(4)]
    # Masqueraded ones would not find back without their entry in the table of connections.
    lines += [OpenConnection(cluster.from_outside(4)) for _ in range(2)]
    gone = HERE[4][0]
    held = [line for line in lines if line.endpoint.startswith(gone)]
    assert len(held) == 3, "turns are taken"
    cluster.put("web", service(), *slices(dict.fromkeys(ENDPOINTS[1:], "ready")))
    cluster.wait(lambda: weights(cluster, CLUSTER_IP[4]).get(gone) == 0, "the endpoint's leaving")
    new = [OpenConnection(cluster.from_pod(4)) for _ in range(4)]
    assert {line.endpoint for line in new} == {f"{THERE[4][0]}:8080"}
    # One more sync: what comes after the first is over, stale connections were looked for.
    cluster.put("other", service("other", number=2, node_port=30081))
    cluster.wait(lambda: ("10.110.0.2", Protocol.TCP, 80) in servers(cluster), "the next sync")
    lines += new
    for line in lines:
        line.exchange()
        line.close()


@pytest.mark.row("24.5", "24.7", "24.10", "24.13")
def test_what_the_configuration_says(cluster, tmp_path):
    """The section ipvs, and the settings that the mode relies on."""
    (tmp_path / "config.yaml").write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
        "mode: ipvs\nclusterCIDR: 10.64.0.0/12,fd64::/48\nhostnameOverride: worker-a\n"
        "ipvs: {scheduler: mh, strictARP: true, tcpFinTimeout: 33s, excludeCIDRs: [10.110.0.96/28], syncPeriod: 1s}\n"
    )
    node = cluster.world.node
    before = timeouts(node)
    ipvs_link.bind(["10.110.0.99"], node)
    for address in ("10.110.0.99", "192.0.2.1"):
        run(["ipvsadm", "-A", "-t", f"{address}:80", "-s", "lc"], namespace=node)
    cluster.start("--config", str(tmp_path / "config.yaml")).ready()
    held = servers(cluster)
    assert {each.scheduler for each in held.values()} == {"mh", "lc"}
    assert {key[0] for key, each in held.items() if each.scheduler == "lc"} == {"10.110.0.99", "192.0.2.1"}
    assert all(each.hash_ports for each in held.values() if each.scheduler == "mh")
    assert timeouts(node) == before._replace(tcp_fin=33)
    wanted = {
        "net.ipv4.vs.conntrack": "1",
        "net.ipv4.vs.expire_nodest_conn": "1",
        "net.ipv4.vs.expire_quiescent_template": "1",
        "net.ipv4.ip_forward": "1",
        "net.ipv4.conf.all.arp_ignore": "1",
        "net.ipv4.conf.all.arp_announce": "2",
    }
    assert {name: run(["sysctl", "-n", name], namespace=node).strip() for name in wanted} == wanted
    assert "mode ipvs is deprecated in Kubernetes" in cluster.log


@pytest.mark.row("24.12")
def test_what_others_change_is_mended(cluster):
    cluster.start("--ipvs-sync-period", "1s").ready()
    before = servers(cluster)
    node = cluster.world.node
    run(["ipvsadm", "-C"], namespace=node)
    run(["ip", "link", "del", LINK], namespace=node)
    run(["ipset", "flush", "KUBE-CLUSTER-IP"], namespace=node)
    cluster.wait(lambda: servers(cluster) == before, "the virtual servers")
    cluster.wait(lambda: set(CLUSTER_IP.values()) <= ipvs_link.addresses(None, node), "the addresses")
    cluster.wait(
        lambda: read_ipsets(lambda name: name == "KUBE-CLUSTER-IP", node)["KUBE-CLUSTER-IP"].entries, "the set"
    )
    OpenConnection(cluster.from_pod(4)).close()
    OpenConnection(cluster.from_outside(6)).close()


def test_a_scheduler_that_the_kernel_lacks_ends_the_start(cluster):
    status, _, said = narthex(
        cluster, "proxy", "--manifests", str(cluster.manifests), "--proxy-mode", "ipvs", "--ipvs-scheduler", "best"
    )
    assert status == 1
    assert "mode ipvs cannot run: this kernel has no IPVS scheduler 'best' (module ip_vs_best)" in said


@pytest.mark.row("26.1", "26.2", "29.15")
def test_modes_take_over_from_each_other(cluster, load):
    """No open connection is lost on the way, and nothing of the other mode is left."""
    cluster.mode = "iptables"
    cluster.start().ready()
    load.hold(HELD)
    cluster.kill()
    cluster.mode = "ipvs"
    cluster.start().ready()
    cluster.wait(lambda: not any(name.startswith("KUBE-SVC-") for name in kube_chains(cluster)), "the end of iptables")
    assert {name for name in kube_chains(cluster) if "SVC" in name or "SEP" in name or "EXT" in name} == set()
    settled(load)
    OpenConnection(cluster.from_pod(4)).close()
    OpenConnection(cluster.from_outside(6)).close()
    cluster.kill()
    cluster.mode = "iptables"
    cluster.start().ready()
    cluster.wait(lambda: not ipvs_link.exists(cluster.world.node), "the end of ipvs")
    assert servers(cluster) == {}
    assert read_ipsets(lambda _: True, cluster.world.node) == {}
    assert not {"KUBE-LOAD-BALANCER", "KUBE-IPVS-FILTER", "KUBE-NODE-PORT"} & kube_chains(cluster)
    OpenConnection(cluster.from_pod(6)).close()
    OpenConnection(cluster.from_outside(4)).close()


@pytest.mark.row("26.3")
def test_cleanup_leaves_what_others_have(cluster):
    cluster.start().ready()
    cluster.kill()
    node = cluster.world.node
    run(["ipvsadm", "-A", "-t", "192.0.2.1:80", "-s", "lc"], namespace=node)
    run(["ipset", "create", "mine", "hash:ip"], namespace=node)
    status, text, said = narthex(cluster, "cleanup", "-o", "json")
    assert status == 0, said
    removed = {each["kind"]: set() for each in json.loads(text)["removed"]}
    for each in json.loads(text)["removed"]:
        removed[each["kind"]].update(each["names"])
    assert (
        f"{CLUSTER_IP[4]}:80/TCP" in removed["IPVS service"] and f"[{CLUSTER_IP[6]}]:80/TCP" in removed["IPVS service"]
    )
    assert f"{NODE_IP[4]}:30080/TCP" in removed["IPVS service"]
    assert removed["link"] == {LINK}
    assert removed["ipset"] == {name for names in SETS.values() for name in names}
    assert [key[0] for key in servers(cluster)] == ["192.0.2.1"]
    assert set(read_ipsets(lambda _: True, node)) == {"mine"}
    assert kube_chains(cluster) == set() and not ipvs_link.exists(node)


DEPLOYMENT = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  strategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: c, image: "web:1", ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  ipFamilyPolicy: PreferDualStack
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: 8080, nodePort: 30001}]
"""


@pytest.mark.row("30.13")
def test_a_lab_in_mode_ipvs(tmp_path):
    """All addresses of its nodes answer, and no request fails while a Deployment is updated."""
    (tmp_path / "web.yaml").write_text(DEPLOYMENT)
    name = f"nxu-{os.getpid()}"
    command = [sys.executable, "-m", "narthex", "lab"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    try:
        up = [*command, "up", str(tmp_path), "--name", name, "--mode", "ipvs"]
        done = subprocess.run(up, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found = lab.open_lab(name)
        for node in found.nodes:
            for address in node.addresses:
                until(lambda to=address: answers(found.outside, to), f"an answer of {address}")
        before = {pod.name for pod in found.pods}
        ways = [(found.outside, address, 30001) for node in found.nodes for address in node.addresses]
        with Requests(ways, pause=PAUSE) as load:
            (tmp_path / "web.yaml").write_text(DEPLOYMENT.replace("web:1", "web:2"))
            until(lambda: (after := ready(name)) and not before & after and len(after) == 3, "other pods", 180)
            until(lambda: ready(name) <= set(load.answered), "an answer of each new pod", 180)
        assert load.failures == []
    finally:
        subprocess.run([*command, "down", "--name", name], env=environment, capture_output=True, timeout=60, check=True)


def answers(namespace, address):
    """Whether anybody does."""
    try:
        return bool(ask(namespace, address, 30001))
    except OSError:
        return False


def ready(name):
    """Names of the pods there are, when all of them are ready and none goes away."""
    pods = lab.open_lab(name).pods
    return {pod.name for pod in pods} if all(pod.ready and not pod.terminating for pod in pods) else set()


def test_scenarios_by_command():
    file = Path(__file__).parents[1] / "scenarios" / "nodeport-hairpin.yaml"
    argv = [sys.executable, "-m", "narthex", "scenario", "run", str(file), "--mode", "ipvs", "--against", "kernel"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([*argv, "-o", "json"], env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == b'{"scenarios":1,"flows":2,"ok":2,"failed":0,"invalid":0}'
