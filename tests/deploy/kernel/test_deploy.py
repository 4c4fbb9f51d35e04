"""The DaemonSet's containers with exactly what the manifest gives them: file systems, capabilities, arguments."""

import json
import os
import shutil
import socket
import ssl
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml
from tests.lab.kernel.container import ROOT, Container, capabilities, described, documents, pod, terminate, with_patch
from tests.proxy.kernel.small_cluster import CLUSTER_IP, HERE, THERE, SmallCluster, node_object, service, slices

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import endpoint, endpoint_slice, node
from narthex.testing.build import service as service_object
from narthex.testing.load import OpenConnection, until

pytestmark = [pytest.mark.kernel, pytest.mark.row("19.9")]

MODES = ("nftables", "iptables")
SILENCE = 0.4
CERTIFICATES = ROOT / "tests" / "kube" / "certificates"
TOKEN = "the-token-of-the-service-account"


def config_map(directory, mode, server="", **fields):
    """The files of the ConfigMap, as deploy/ has them but for the mode, the server, and what a test must not change: the
    machine's number of connections, and who is ended first when memory runs out."""
    made = directory / "config"
    made.mkdir()
    proxy, own = yaml.safe_load_all((ROOT / "deploy" / "config.conf").read_text())
    machine = {"conntrack": {"maxPerCore": 0}, "oomScoreAdj": int(Path("/proc/self/oom_score_adj").read_text())}
    (made / "config.conf").write_text(yaml.safe_dump_all([{**proxy, "mode": mode, **machine, **fields}, own]))
    access = yaml.safe_load((ROOT / "deploy" / "kubeconfig.conf").read_text())
    access["clusters"][0]["cluster"]["server"] = server
    (made / "kubeconfig.conf").write_text(yaml.safe_dump(access))
    return made


class Deployed(SmallCluster):
    """A node with pods, where the container is the proxy."""

    def __init__(self, directory, mode, **fields):
        super().__init__(directory, mode)
        self.directory = directory
        self.config = config_map(directory, mode, **fields)
        ends = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]
        pod_ranges = {"podCIDRs": ["10.64.1.0/24", "fd64:0:0:1::/64"]}
        self.put("node", {**node_object(), "spec": pod_ranges})
        self.put("web", service(), *slices(dict.fromkeys(ends, "ready")))
        self.ends = ends

    def prepare(self):
        """Let the init container run to its end."""
        container = Container("kernel-settings", self.directory, self.config)
        assert container.start(self.world.node).wait(60) == 0, container.log
        return container.log

    def start(self, *, without=(), spec=None):
        container = Container("narthex", self.directory, self.config, folders=[self.manifests], spec=spec)
        self.log_path = container.log_path
        self.process = container.start(self.world.node, "--manifests", str(self.manifests), without=without)
        return self

    def health(self):
        """Status and body of /healthz; None while nobody listens."""
        try:
            status, body = self.get(10256, "/healthz")
        except OSError:
            return None, {}
        return status, json.loads(body)

    def ways(self):
        for version in (4, 6):
            yield self.from_pod(version)
            yield self.from_outside(version)


@contextmanager
def deployed(directory, mode, **fields):
    with Deployed(directory, mode, **fields) as cluster:
        cluster.serve(*cluster.ends)
        yield cluster


def answers(way, **patience):
    line = OpenConnection(way, **patience)
    line.close()
    return line.endpoint


def assert_nothing_refused(log):
    """So nothing is needed that is not there."""
    for word in ("Permission denied", "Operation not permitted", "Read-only", "error", "Traceback"):
        assert word not in log, log


def addressed(way):
    """The address of who answers."""
    return answers(way).rpartition(":")[0].strip("[]")


@pytest.mark.parametrize("mode", MODES)
def test_with_its_capabilities_and_no_others_traffic_works_and_changes_are_taken_in(tmp_path, mode):
    with deployed(tmp_path, mode) as cluster:
        cluster.prepare()
        cluster.start().ready()
        for probe in ("readinessProbe", "livenessProbe"):
            asked = described("narthex")[probe]["httpGet"]
            (port,) = [each for each in described("narthex")["ports"] if each["name"] == asked["port"]]
            assert cluster.get(port["containerPort"], asked["path"])[0] == 200
        assert {addressed(way) for way in cluster.ways() for _ in range(8)} <= {*cluster.ends}
        run(["nft", "flush", "ruleset"], namespace=cluster.world.node)
        cluster.wait(lambda: "another program changed our IPv4 rules" in cluster.log, "the mending")
        cluster.put("web", service(), *slices({cluster.ends[0]: "ready", cluster.ends[2]: "ready"}))
        gone = [cluster.ends[1], cluster.ends[3]]
        cluster.wait(lambda: not any(end in cluster.rules() for end in gone), "the end of two endpoints")
        assert {addressed(way) for way in cluster.ways()} == {cluster.ends[0], cluster.ends[2]}
        assert "kubeproxy_network_programming" in cluster.get(10249, "/metrics")[1]
        before = cluster.rules()
        assert terminate(cluster.process) == 0
        assert cluster.rules() == before
        cluster.process = None
        assert_nothing_refused(cluster.log)
        assert answers(cluster.from_pod())


def test_the_relay_of_mode_userspace_needs_no_more(tmp_path):
    with deployed(tmp_path, "userspace") as cluster:
        cluster.prepare()
        cluster.start().ready()
        assert {addressed(way) for way in cluster.ways() for _ in range(8)} <= {*cluster.ends}
        assert terminate(cluster.process) == 0
        cluster.process = None
        assert_nothing_refused(cluster.log)


def nobody_answers(cluster):
    with pytest.raises(OSError):
        OpenConnection(cluster.from_pod(), patience=SILENCE)
    return True


def no_rules(cluster):
    return "10.110.0.1" not in cluster.rules() and nobody_answers(cluster)


NEEDED = {"NET_ADMIN": ("needs root (CAP_NET_ADMIN)", no_rules)}
"""What a capability is for: what the part that fails without it says, and what is amiss."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("capability", capabilities(described("narthex")))
def test_each_capability_is_needed(tmp_path, mode, capability):
    said, amiss = NEEDED[capability]
    with deployed(tmp_path, mode) as cluster:
        cluster.prepare()
        cluster.start(without=[capability])
        cluster.wait(lambda: cluster.health()[1].get("parts", {}).get("proxy", {}).get("failures"), "the failure")
        status, body = cluster.health()
        assert status == 503
        assert said in body["parts"]["proxy"]["error"]
        assert amiss(cluster)
        # The process goes on: a new one could do no better, and other parts may.
        assert cluster.get(10256, "/livez")[0] == 200


@pytest.fixture
def patched(tmp_path):
    return pod(with_patch(tmp_path / "deploy"))


def legacy_rules(cluster):
    return run(["iptables-legacy-save", "-t", "nat"], namespace=cluster.world.node)


def test_the_patch_for_iptables_legacy(tmp_path, patched):
    with deployed(tmp_path, "iptables") as cluster:
        cluster.prepare()
        cluster.start(spec=patched).ready()
        assert {addressed(way) for way in cluster.ways() for _ in range(8)} <= {*cluster.ends}
        assert CLUSTER_IP[4] in legacy_rules(cluster)
        assert terminate(cluster.process) == 0
        cluster.process = None
        assert_nothing_refused(cluster.log)


WITHOUT = {"NET_ADMIN": "needs root (CAP_NET_ADMIN)", "NET_RAW": "unable to initialize table"}
"""What goes wrong without a capability of the patch: iptables-legacy opens raw sockets."""


@pytest.mark.parametrize("capability", WITHOUT)
def test_each_capability_of_the_patch_is_needed(tmp_path, patched, capability):
    assert capabilities(described("narthex", patched)) == [*WITHOUT]
    with deployed(tmp_path, "iptables") as cluster:
        cluster.prepare()
        cluster.start(spec=patched, without=[capability])
        cluster.wait(lambda: WITHOUT[capability] in cluster.log, "the refusal")
        assert CLUSTER_IP[4] not in legacy_rules(cluster)
        assert cluster.health()[0] == 503


def test_what_the_init_container_is_privileged_for(tmp_path):
    """Kernel settings, iptables mode's guard of localhost node ports among them, cannot be written without."""
    setting = "/proc/sys/net/ipv4/conf/all/route_localnet"
    with deployed(tmp_path, "iptables", nodePortAddresses=[]) as cluster:
        cluster.start().ready()
        assert "net/ipv4/conf/all/route_localnet could not be set to 1 (Read-only file system)" in cluster.log
        assert answers(cluster.from_pod())
        with pytest.raises(OSError):
            answers(cluster.from_node(address="127.0.0.1", source="127.0.0.1"), patience=2.0)
        cluster.kill()
        assert run(["cat", setting], namespace=cluster.world.node) == "0\n"
        assert "kernel settings are made" in cluster.prepare()
        assert run(["cat", setting], namespace=cluster.world.node) == "1\n"
        cluster.start().ready()
        assert "route_localnet" not in cluster.log
        assert cluster.health()[0] == 200
        way = cluster.from_node(address="127.0.0.1", source="127.0.0.1")
        assert answers(way)


def test_without_the_init_container_it_works_when_nothing_is_asked_of_the_kernel(tmp_path):
    as_is = {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    settings = {"conntrack": as_is, "iptables": {"localhostNodePorts": False}, "nodePortAddresses": []}
    with deployed(tmp_path, "iptables", **settings) as cluster:
        cluster.start().ready()
        assert answers(cluster.from_pod())
        for word in ("Read-only", "could not be set", "error"):
            assert word not in cluster.log


def test_kubectl_makes_of_the_files_what_is_tried_here():
    made = {each["kind"]: each for each in yaml.safe_load_all(run(["kubectl", "kustomize", str(ROOT / "deploy")]))}
    (plan,) = documents("kustomization.yaml").values()
    names = plan["configMapGenerator"][0]["files"]
    assert made.pop("ConfigMap")["data"] == {name: (ROOT / "deploy" / name).read_text() for name in names}
    expected = {**documents("rbac.yaml"), **documents("daemonset.yaml")}
    for kind in ("ServiceAccount", "DaemonSet"):
        expected[kind]["metadata"]["namespace"] = plan["namespace"]
    expected["ClusterRoleBinding"]["subjects"][0]["namespace"] = plan["namespace"]
    spec = expected["DaemonSet"]["spec"]["template"]["spec"]
    for each in (*spec["initContainers"], *spec["containers"]):
        each["image"] = f"narthex:{plan['images'][0]['newTag']}"
    assert made == expected


@pytest.fixture
def api(tmp_path):
    """A namespace with an API server on its loopback address, and what kubelet shows of the service account."""
    name = f"nxdep-{os.getpid()}-api"
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "token").write_text(TOKEN)
    shutil.copyfile(CERTIFICATES / "ca.pem", secrets / "ca.crt")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    with ExitStack() as stack:
        create_namespace(name)
        stack.callback(delete_namespace, name)
        with in_namespace(name):
            server = stack.enter_context(FaultyApiServer(tls=tls, token=TOKEN))
        yield name, server, secrets


def slice_object(name, address):
    labels = (("kubernetes.io/service-name", name),)
    return endpoint_slice(f"shop/{name}", endpoint(address), labels=labels)


def posted(server):
    return [json.loads(seen.body) for seen in server.requests if seen.method == "POST"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.row("26.4", "26.7")
def test_over_an_api_server_with_the_service_account(tmp_path, api, mode):
    namespace, server, secrets = api
    server.put(node(pod_cidrs=("10.64.1.0/24",)))
    server.put(service_object("shop/web", CLUSTER_IP[4]), slice_object("web", HERE[4][0]))
    config = config_map(tmp_path, mode, server.url)
    init = Container("kernel-settings", tmp_path, config)
    assert init.start(namespace).wait(60) == 0, init.log
    container = Container("narthex", tmp_path, config, secrets)
    process = container.start(namespace)
    try:
        until(lambda: "ready: the first sync is done" in container.log, "the first sync", also=lambda: container.log)
        server.put(service_object("shop/cart", "10.110.0.9"), slice_object("cart", THERE[4][0]))
        listing = ["nft", "list", "ruleset"]
        until(lambda: THERE[4][0] in run(listing, namespace=namespace), "the change", also=lambda: container.log)
        with in_namespace(namespace):
            sock = socket.create_connection(("127.0.0.1", 10256))
        with sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert sock.recv(64).startswith(b"HTTP/1.1 200 ")
        until(lambda: posted(server), "the event")
        assert posted(server)[0]["reason"] == "Starting"
        assert terminate(process) == 0
    finally:
        process.kill()
        process.wait()
    assert {seen.headers["authorization"] for seen in server.requests} == {f"Bearer {TOKEN}"}
    assert CLUSTER_IP[4] in run(listing, namespace=namespace)
    assert_nothing_refused(container.log)
