"""`narthex node` as a process: parts that fail and come back, ports, settings, signals."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.proxy.kernel.small_cluster import HERE, SOURCE, SmallCluster, service, slices

from narthex.kube.manifests import ManifestSource
from narthex.kube.source import Origin
from narthex.linux.namespaces import in_namespace
from narthex.model.backoff import Backoff
from narthex.node.process import NodeProgram
from narthex.proxy.program.settings import settings
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import node
from narthex.testing.load import OpenConnection, until

pytestmark = pytest.mark.kernel

MODES = ("nftables", "iptables")
HEAD = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
OWN = {"apiVersion": "narthex/v1alpha1", "kind": "NarthexConfiguration"}


class NodeProcess(SmallCluster):
    """A node with pods, where `narthex node` runs."""

    def __init__(self, directory, mode):
        super().__init__(directory, mode)
        self.put("web", service(), *slices({HERE[4][0]: "ready", HERE[6][0]: "ready"}))
        self.config = directory / "config.yaml"

    def configure(self, own=None, **fields):
        told = {**HEAD, "mode": self.mode, "clusterCIDR": "10.64.0.0/12,fd64::/48", "conntrack": {"maxPerCore": 0}}
        fresh = self.config.with_suffix(".fresh")
        fresh.write_text(yaml.safe_dump_all([{**told, **fields}, {**OWN, **(own or {})}]))
        fresh.rename(self.config)

    def start(self, *flags, path=os.environ["PATH"], origin=None):
        origin = origin or ("--manifests", str(self.manifests))
        argv = [sys.executable, "-m", "narthex", "node", *origin, "--config", str(self.config)]
        argv += ["--hostname-override", "worker-a", *flags]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PATH": path}
        with self.log_path.open("wb") as log, in_namespace(self.world.node):
            self.process = subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        return self

    def asked(self, path, port=10256):
        """Status and body; (0, "") while nobody listens."""
        try:
            return self.get(port, path)
        except OSError:
            return 0, ""

    def part(self):
        """What /healthz says of the proxy."""
        _, body = self.asked("/healthz")
        return json.loads(body)["parts"]["proxy"] if body else None

    def numbers(self):
        families = text_string_to_metric_families(self.asked("/metrics", 10249)[1])
        return {
            sample.name: sample.value for family in families for sample in family.samples if "part" in sample.labels
        }


@pytest.fixture
def cluster(tmp_path, request):
    with NodeProcess(tmp_path, getattr(request, "param", "nftables")) as made:
        made.configure()
        yield made


@pytest.mark.parametrize("cluster", MODES, indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_rules_come_with_it_and_stay_after_it(cluster, number):
    cluster.start().ready()
    assert cluster.asked("/healthz")[0] == cluster.asked("/livez")[0] == 200
    assert cluster.part() == {"running": True, "healthy": True, "failures": 0, "error": ""}
    before = cluster.rules()
    assert "10.110.0.1" in before
    cluster.process.send_signal(number)
    assert cluster.process.wait(20) == 0
    assert "stopped; the rules stay in force" in cluster.log
    assert cluster.rules() == before


@pytest.mark.parametrize("cluster", MODES, indirect=True)
def test_a_proxy_that_cannot_start_is_tried_again_until_it_can(cluster, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    cluster.start(path=str(tools))
    cluster.wait(lambda: (cluster.part() or {}).get("failures"), "the failure")
    status, body = cluster.asked("/healthz")
    assert (status, json.loads(body)["healthy"]) == (503, False)
    assert "StartError: mode " in cluster.part()["error"] and "not found on the PATH" in cluster.part()["error"]
    # The process itself does what it can.
    assert cluster.asked("/livez")[0] == 200
    numbers = cluster.numbers()
    assert numbers["narthex_part_failures_total"] >= 1
    assert numbers["narthex_part_healthy"] == 0
    for name in ("nft", *(f"{tool}-{what}" for tool in ("iptables", "ip6tables") for what in ("save", "restore"))):
        (tools / name).symlink_to(shutil.which(name))
    cluster.ready()
    cluster.wait(lambda: cluster.asked("/healthz")[0] == 200, "health")
    assert cluster.part()["running"] and cluster.part()["error"] == ""
    assert cluster.numbers()["narthex_part_healthy"] == 1
    assert "10.110.0.1" in cluster.rules()
    # What the loop keeps up is kept up by the proxy that came late, too.
    cluster.put("cart", service("cart", 2, node_port=30081), *slices({HERE[4][1]: "ready"}, "cart"))
    cluster.synced("10.110.0.2")


class Poisoned(ManifestSource):
    """Manifests, and on demand something that no proxy can digest."""

    def __init__(self, path, poison):
        super().__init__(path)
        self.poison = poison

    def changes(self, stop):
        while not stop.is_set():
            if self.poison.wait(0.01):
                self.poison.clear()
                yield ["no event"]


def test_a_proxy_that_fails_while_it_runs_begins_anew_and_frees_what_it_had(cluster, monkeypatch):
    monkeypatch.setattr("narthex.node.parts.RESTART_BACKOFF", Backoff(0.05, 60.0))
    balanced = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 31000}
    cluster.put("web", service(**balanced), *slices({HERE[4][0]: "ready", HERE[6][0]: "ready"}))
    cluster.serve(HERE[4][0], HERE[6][0])
    cluster.configure(nodePortAddresses=["0.0.0.0/0", "::/0"])
    told = settings({}, cluster.config, "worker-a")
    poison = threading.Event()
    work = NodeProgram(told, lambda: Origin(Poisoned(cluster.manifests, poison)))
    # Threads are where the thread is that starts them.
    with in_namespace(cluster.world.node):
        running = threading.Thread(target=work.run)
        running.start()
        work.status.serve(told)

    def open_files():
        return len(list(Path("/proc/self/fd").iterdir()))

    def serves():
        return cluster.asked("/healthz")[0] == 200 and cluster.asked("/", 31000)[0] == 200

    try:
        until(serves, "the first run")
        way = cluster.from_pod()
        line, rules, files = OpenConnection(way), cluster.rules(), []
        for failures in (1, 2, 3):
            poison.set()
            until(lambda: work.report()["proxy"].failures == failures, "the failure")  # noqa: B023
            until(serves, "the next run")
            files.append(open_files())
            OpenConnection(way).close()
        assert cluster.rules() == rules
        # A connection to the status server closes a moment after its answer.
        until(lambda: open_files() <= files[0] + 1, "the end of what each run had open")
        line.close()
    finally:
        work.stop()
        running.join(30)
        work.status.stop()
    assert not running.is_alive()


def test_edits_of_the_file_are_taken_over_or_begin_a_new_process(cluster):
    cluster.start().ready()
    cluster.configure(metricsBindAddress="127.0.0.1:20249")
    cluster.wait(lambda: cluster.asked("/proxyMode", 20249) == (200, "nftables"), "the other port")
    assert "now in force" in cluster.log
    before = cluster.process.pid
    cluster.configure(mode="iptables")
    cluster.wait(lambda: cluster.asked("/proxyMode", 10249) == (200, "iptables"), "the other mode")
    assert "the process replaces itself" in cluster.log
    assert cluster.process.pid == before
    cluster.wait(lambda: cluster.asked("/healthz")[0] == 200, "health")


def test_parts_that_the_file_switches_off_end(cluster):
    cluster.start().ready()
    before = cluster.rules()
    cluster.configure({"parts": {"proxy": False}})
    assert cluster.process.wait(20) == 1
    assert "every part is switched off, so there is nothing to do" in cluster.log
    assert cluster.rules() == before


@pytest.mark.row("17.8", "26.4")
def test_a_taken_port_that_must_be_had_ends_it_and_is_told(cluster):
    with in_namespace(cluster.world.node):
        server = FaultyApiServer()
        server.start()
        holder = socket.create_server(("0.0.0.0", 10256))
    cluster.configure(bindAddressHardFail=True)
    with holder:
        try:
            server.put(node())
            cluster.start(origin=("--master", server.url))
            assert cluster.process.wait(20) == 1
        finally:
            server.__exit__(None, None, None)
    (event,) = [json.loads(seen.body) for seen in server.requests if seen.method == "POST"]
    assert event["reason"] == "FailedToStartProxierHealthcheck"


def test_an_api_server_that_comes_late(cluster):
    with in_namespace(cluster.world.node), FaultyApiServer() as server:
        server.put(node())
        server.stop()
        cluster.start(origin=("--master", server.url))
        cluster.wait(lambda: cluster.part() and cluster.part()["running"], "the part")
        assert cluster.asked("/healthz")[0] == 503
        server.start()
        cluster.ready()
        cluster.wait(lambda: cluster.asked("/healthz")[0] == 200, "health")
        assert cluster.part()["failures"] == 0
        cluster.kill()
