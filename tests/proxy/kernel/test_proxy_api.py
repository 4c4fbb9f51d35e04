"""A node proxy that follows an API server, as a process: what reaches the kernel when, and what never does."""

import os
import re
import time
from contextlib import ExitStack

import pytest
from tests.proxy.kernel.test_proxy_surface import Running

from narthex.lab.api.store import ObjectStore
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.testing.apiserver import FaultyApiServer, Refuse
from narthex.testing.build import NODE_IPS, endpoint, endpoint_slice, node, service

pytestmark = pytest.mark.kernel

OWNER = (("kubernetes.io/service-name", "web"),)
WEB = service("shop/web", "10.110.0.1", port=80, node_port=30080, type="NodePort")


def ends(*ips, **fields):
    return endpoint_slice("shop/web", *(endpoint(ip, **fields) for ip in ips), labels=OWNER)


class Cluster:
    """A server and a proxy in one namespace."""

    def __init__(self, server, running):
        self.server = server
        self.running = running
        self.wait = running.wait

    def start(self, *flags):
        flags = flags or ("--cluster-cidr=10.64.0.0/12",)
        self.running.start(f"--master={self.server.url}", "--v=2", *flags)
        return self

    def table(self, *what):
        return run(["nft", "--numeric", "list", *what], namespace=self.running.namespace)

    @property
    def tables(self):
        return self.table("tables")

    @property
    def rules(self):
        """All rules, without what packets count."""
        return re.sub(r"packets \d+ bytes \d+", "", self.table("ruleset"))

    def syncs(self):
        return self.running.log.count("synced IPv4")


@pytest.fixture
def cluster(tmp_path):
    name = f"nxapi-{os.getpid()}"
    create_namespace(name)
    running = Running(name, tmp_path / "log")
    try:
        with ExitStack() as stack:
            with in_namespace(name):
                server = stack.enter_context(FaultyApiServer())
            server.put(node(), WEB, ends("10.64.1.5"))
            yield Cluster(server, running)
    finally:
        if running.process is not None and running.process.poll() is None:
            running.process.kill()
            running.process.wait()
        delete_namespace(name)


@pytest.mark.row("1.15")
@pytest.mark.parametrize("path", ["/api/v1/nodes", "/apis/discovery.k8s.io/v1/endpointslices"])
def test_nothing_is_written_before_all_lists_are_there(cluster, path):
    cluster.server.faults = lambda seen: Refuse(500) if seen.path == path else None
    cluster.start()
    cluster.wait(lambda: f"{path}: the server answers 500" in cluster.running.log, "the problem")
    cluster.wait(lambda: sum(seen.path == path for seen in cluster.server.requests) > 3, "more attempts")
    assert cluster.tables == ""
    assert cluster.running.status("/healthz") == 503
    cluster.server.faults = lambda _: None
    cluster.running.ready()
    assert "table ip narthex" in cluster.tables
    cluster.wait(lambda: cluster.running.status("/healthz") == 200, "health")


def test_a_server_that_is_not_there_at_the_start_is_waited_for(cluster):
    cluster.server.stop()
    cluster.start()
    cluster.wait(lambda: "API server, /api/v1/services" in cluster.running.log, "the problem")
    assert cluster.tables == ""
    cluster.server.start()
    cluster.running.ready()


def test_an_outage_changes_nothing(cluster):
    cluster.start().running.ready()
    before, syncs = cluster.rules, cluster.syncs()
    cluster.server.stop()
    cluster.wait(lambda: cluster.running.log.count("what is known stays in force") >= 4, "the problem")
    assert cluster.rules == before and cluster.syncs() == syncs
    assert cluster.running.status("/healthz") == 200
    cluster.server.put(ends("10.64.1.6"))
    cluster.server.start()
    cluster.wait(lambda: "10.64.1.6 . 80" in cluster.rules, "the change that was made meanwhile")
    assert "10.64.1.5 . 80" not in cluster.rules
    cluster.wait(lambda: cluster.running.log.count("mended: API server") >= 4, "the end of the problem")


def test_a_server_that_has_forgotten_all_takes_the_rules_away_only_when_it_says_so(cluster):
    """An empty list is an answer; no answer is none."""
    cluster.start().running.ready()
    cluster.server.faults = lambda _: Refuse(503)
    cluster.server.drop()
    cluster.server.delete(WEB)
    cluster.wait(lambda: "the server answers 503" in cluster.running.log, "the problem")
    assert "10.110.0.1" in cluster.rules
    cluster.server.faults = lambda _: None
    cluster.wait(lambda: "10.110.0.1" not in cluster.rules, "the end of the Service")


def test_a_server_that_lost_its_data_takes_no_rules_away(cluster):
    cluster.start().running.ready()
    before = cluster.rules
    cluster.server.stop()
    cluster.server.go_back(ObjectStore(5))
    cluster.server.faults = lambda request: Refuse(410) if "watch" in request.query else None
    cluster.server.start()
    cluster.wait(lambda: cluster.running.log.count("the server has lost objects") >= 3, "the doubt")
    assert cluster.rules == before
    cluster.wait(lambda: any(b"ObjectsMissingFromList" in each.body for each, _ in cluster.server.writes), "the Event")
    cluster.server.faults = lambda _: None
    cluster.server.put(WEB)
    cluster.server.put(service("shop/later", "10.110.0.7"))
    cluster.wait(lambda: "10.110.0.7" in cluster.rules, "a Service of the new store")
    # A deletion that the server reports is one.
    cluster.server.delete(WEB)
    cluster.wait(lambda: "10.110.0.1" not in cluster.rules, "the end of the Service")


@pytest.mark.row("21.1", "21.2")
def test_a_burst_is_few_syncs(cluster):
    cluster.start("--min-sync-period=0s", "--cluster-cidr=10.64.0.0/12").running.ready()
    syncs, start = cluster.syncs(), time.monotonic()
    for turn in range(1000):
        cluster.server.put(ends(f"10.64.{2 + turn // 250}.{1 + turn % 250}"))
    cluster.wait(lambda: "10.64.5.250 . 80" in cluster.rules, "the last change")
    seconds = time.monotonic() - start
    assert cluster.syncs() - syncs <= 3 + seconds / 0.1


def test_a_broken_slice_is_named_and_the_others_are_programmed(cluster):
    broken = {"metadata": {"name": "web-2", "namespace": "shop", "labels": dict(OWNER)}, "addressType": "IPv5"}
    cluster.server.put_raw("EndpointSlice", broken)
    cluster.start().running.ready()
    assert "10.64.1.5 . 80" in cluster.rules
    assert "EndpointSlice shop/web-2: addressType: 'IPv5' is not IPv4, IPv6 or FQDN" in cluster.running.log


@pytest.mark.row("6.4", "29.12")
def test_the_nodes_pod_ranges_are_taken_in_place(cluster):
    cluster.start("--detect-local-mode=NodeCIDR").running.ready()
    cluster.wait(lambda: "10.64.1.0/24" in cluster.rules, "the pod range")
    pid = cluster.running.process.pid
    cluster.server.put(node(pod_cidrs=("10.64.9.0/24",)))
    cluster.wait(lambda: "10.64.9.0/24" in cluster.rules and "10.64.1.0/24" not in cluster.rules, "the new range")
    assert cluster.running.process.poll() is None and cluster.running.process.pid == pid


@pytest.mark.row("15.6", "15.8", "29.2", "29.12")
def test_the_nodes_addresses_are_taken_in_place(cluster):
    cluster.start("--nodeport-addresses=primary", "--cluster-cidr=10.64.0.0/12").running.ready()
    cluster.wait(lambda: NODE_IPS[0] in cluster.rules, "the node's address")
    cluster.server.put(node(internal_ips=("10.20.0.77",)))
    cluster.wait(lambda: "10.20.0.77" in cluster.rules and NODE_IPS[0] not in cluster.rules, "the new address")


@pytest.mark.row("4.1", "29.12")
def test_the_nodes_zone_is_taken_in_place(cluster):
    cluster.server.put(
        endpoint_slice(
            "shop/web",
            endpoint("10.64.1.5", for_zones=("east",)),
            endpoint("10.64.1.6", for_zones=("west",)),
            labels=OWNER,
        )
    )
    cluster.start().running.ready()
    cluster.wait(
        lambda: "10.64.1.5 . 80" in cluster.rules and "10.64.1.6 . 80" in cluster.rules, "both, without a zone"
    )
    cluster.server.put(node(zone="west"))
    cluster.wait(lambda: "10.64.1.5 . 80" not in cluster.rules, "the zone's own endpoint alone")
    assert "10.64.1.6 . 80" in cluster.rules
