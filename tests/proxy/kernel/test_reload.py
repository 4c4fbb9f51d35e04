"""A configuration file edited while the proxy runs: it takes effect in place, and no connection notices."""

import json
from pathlib import Path

import pytest
import yaml
from tests.proxy.kernel.small_cluster import HERE, THERE, SmallCluster, service, slices

from narthex.linux.namespaces import in_namespace
from narthex.testing.load import Load

pytestmark = [pytest.mark.kernel, pytest.mark.row("27.25", "29.12")]

MODES = ("nftables", "iptables")
ENDPOINTS = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]


class Configured(SmallCluster):
    """A cluster whose proxy has a configuration file."""

    def __init__(self, directory, mode):
        super().__init__(directory, mode)
        self.file = directory / "config.yaml"

    def configure(self, text=None, **fields):
        head = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text or yaml.safe_dump({**head, **fields}))
        fresh.rename(self.file)

    def setting(self, path):
        with in_namespace(self.world.node):
            return Path("/proc/sys", path).read_text().strip()

    def configz(self):
        return json.loads(self.get(10249, "/configz")[1])["kubeproxy.config.k8s.io"]


@pytest.fixture(params=MODES)
def cluster(request, tmp_path):
    with Configured(tmp_path, request.param) as made:
        made.serve(*ENDPOINTS)
        made.put("web", service(), *slices(dict.fromkeys(ENDPOINTS, "ready")))
        made.configure(mode=request.param, nodePortAddresses=["primary"])
        yield made.start("--config", str(made.file)).ready()


@pytest.fixture
def load(cluster):
    made = Load([cluster.from_pod(4), cluster.from_outside(4), cluster.from_pod(6), cluster.from_outside(6)])
    made.hold(40)
    yield made
    made.close()


def settled(load):
    load.exchange()
    assert load.failures == []
    assert load.resent == 0


def test_decisions_change_in_the_running_process(cluster, load):
    """Node ports move to more addresses, at once; nothing else is touched."""
    process = cluster.process.pid
    with load.streaming():
        cluster.configure(mode=cluster.mode, nodePortAddresses=["10.20.0.0/16", "fd20::/64"])
        other = Load([cluster.from_outside(4, "10.20.1.11")])

        def reached():
            other.failures.clear()
            other.hold(1)
            return bool(other.held)

        cluster.wait(reached, "node ports on the second address")
        other.close()
    settled(load)
    assert cluster.process.pid == process
    assert "the configuration has changed: nodePortAddresses; now in force" in cluster.log
    assert cluster.log.count("ready: ") == 1
    assert cluster.configz()["nodePortAddresses"] == ["10.20.0.0/16", "fd20::/64"]


def test_a_file_that_cannot_be_used_changes_nothing(cluster, load):
    before = cluster.rules(handles=True)
    cluster.configure("kind: KubeProxyConfiguration\napiVersion: kubeproxy.config.k8s.io/v1alpha1\nclusterCIDR: here\n")
    cluster.wait(lambda: "the previous one stays in force" in cluster.log, "the word about it")
    cluster.configure(mode="ipvs")
    cluster.wait(lambda: cluster.log.count("the previous one stays in force") == 2, "the word about the mode")
    assert cluster.rules(handles=True) == before
    cluster.configure(mode=cluster.mode, nodePortAddresses=["10.20.0.0/16", "fd20::/64"])
    cluster.wait(lambda: "now in force" in cluster.log, "the file that can be used")
    settled(load)


def test_ports_logging_and_kernel_settings_change_in_the_running_process(cluster, load):
    process = cluster.process.pid
    with load.streaming():
        cluster.configure(
            mode=cluster.mode,
            nodePortAddresses=["primary"],
            metricsBindAddress="127.0.0.1:20249",
            logging={"format": "json", "verbosity": 4},
            conntrack={"tcpCloseWaitTimeout": "77s"},
        )
        cluster.wait(lambda: "now in force" in cluster.log, "the word about it")
    settled(load)
    assert cluster.process.pid == process
    assert cluster.log.count("ready: ") == 1
    assert cluster.get(20249, "/proxyMode") == (200, cluster.mode)
    with pytest.raises(ConnectionRefusedError):
        cluster.get(10249, "/proxyMode")
    last = json.loads(cluster.log.splitlines()[-1])
    assert last["level"] in ("info", "debug")
    assert cluster.setting("net/netfilter/nf_conntrack_tcp_timeout_close_wait") == "77"


def test_what_needs_a_new_process_gets_one_in_its_place(cluster, load):
    """The same process id; rules stay in force all the time, and the new start writes nothing."""
    before = cluster.rules(handles=True)
    with load.streaming():
        client = {"kubeconfig": "/nowhere"}
        cluster.configure(mode=cluster.mode, nodePortAddresses=["primary"], clientConnection=client)
        cluster.wait(lambda: cluster.log.count("ready: ") == 2, "the new process")
    settled(load)
    assert cluster.process.poll() is None
    assert "has changed: clientConnection.kubeconfig; the process replaces itself" in cluster.log
    assert cluster.get(10249, "/proxyMode") == (200, cluster.mode)
    assert cluster.rules(handles=True) == before


def test_the_other_mode(cluster):
    """Asked for in the file; the rules of the mode before are gone in the end (row 26.1)."""
    other = next(mode for mode in MODES if mode != cluster.mode)
    cluster.configure(mode=other, nodePortAddresses=["primary"])
    cluster.wait(lambda: cluster.log.count("ready: ") == 2, "the new process")
    assert cluster.get(10249, "/proxyMode") == (200, other)
    was = cluster.mode
    load = Load([cluster.from_pod(4), cluster.from_outside(4), cluster.from_pod(6), cluster.from_outside(6)])
    load.hold(8)
    settled(load)
    load.close()
    trace = {"nftables": "narthex", "iptables": "KUBE-SVC-"}[was]
    cluster.wait(lambda: trace not in cluster.rules(), f"the end of the {was} rules")
