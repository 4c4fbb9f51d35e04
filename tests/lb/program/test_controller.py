"""The controller against an API server that speaks real HTTP: what it writes, tells and survives."""

import json
import threading
import time
from contextlib import contextmanager

import pytest

from narthex.kube.access import Access
from narthex.kube.leader_election import Leader, LeaseTimes
from narthex.lab.api.reads import ServerFeatures
from narthex.lb.program.controller import ControllerMetrics, LoadBalancerController, LoadBalancerSettings
from narthex.linux.clock import SystemClock
from narthex.runtime.configuration.values import ClientConnection
from narthex.testing.apiserver import DropConnection, FaultyApiServer, Refuse
from narthex.testing.build import node, service

QUICK = LeaseTimes(lease=3.0, renew=2.0, retry=0.2)
LIMIT = 40.0
POOL = "metallb.io/ip-allocated-from-pool"


class Told:
    """Keeps Events."""

    def __init__(self):
        self.all = []

    def record(self, event):
        self.all.append((str(event.object), event.reason, event.note))

    def reasons(self, name):
        return [reason for whom, reason, _ in self.all if whom == name]


class Cluster:
    """A server, with short ways to ask and change it."""

    def __init__(self, server):
        self.server = server

    def pool(self, name, *addresses, **spec):
        meta = {"name": name, "namespace": "metallb-system"}
        self.server.put_raw("IPAddressPool", {"metadata": meta, "spec": {"addresses": list(addresses), **spec}})

    def raw(self, name):
        return self.server.do(lambda data: data.get("Service", tuple(name.split("/")))).raw

    def held(self, name):
        balancer = self.raw(name).get("status", {}).get("loadBalancer") or {}
        return [entry["ip"] for entry in balancer.get("ingress") or ()]

    def note(self, name):
        return (self.raw(name)["metadata"].get("annotations") or {}).get(POOL)

    def edit(self, name, change):
        def do(data):
            raw = json.loads(json.dumps(data.get("Service", tuple(name.split("/"))).raw))
            change(raw)
            data.put("Service", raw)

        self.server.do(do)

    def status_writes(self):
        return [seen for seen, code in self.server.writes if seen.path.endswith("/status") and code == 200]

    def wait(self, what):
        end = time.monotonic() + LIMIT
        while not what():
            assert time.monotonic() < end, [seen.path for seen, _ in self.server.writes[-5:]]
            time.sleep(0.02)


@pytest.fixture
def cluster():
    with FaultyApiServer() as server:
        server.put(node(), service("shop/web", "10.110.0.1", type="LoadBalancer"))
        yield Cluster(server)


@contextmanager
def running(cluster, identity="one", **settings):
    connection = ClientConnection(qps=-1.0)
    access = Access(connection=connection, master=cluster.server.url)
    leader = Leader(access, "kube-system", "lb", identity, QUICK)
    told, clock = Told(), SystemClock()
    controller = LoadBalancerController(access, LoadBalancerSettings(**settings), leader, told, clock)
    controller.told, controller.metrics = told, ControllerMetrics(controller, leader, clock)
    thread = threading.Thread(target=controller.run)
    thread.start()
    try:
        yield controller
    finally:
        controller.stop()
        thread.join()


def test_an_address_is_given_kept_and_taken_back(cluster):
    cluster.pool("lan", "192.168.15.0/28")
    with running(cluster) as controller:
        cluster.wait(lambda: cluster.note("shop/web") == "lan")
        assert cluster.raw("shop/web")["status"]["loadBalancer"]["ingress"] == [{"ip": "192.168.15.0", "ipMode": "VIP"}]
        cluster.server.put(service("shop/more", "10.110.0.2", type="LoadBalancer"))
        cluster.wait(lambda: cluster.held("shop/more") == ["192.168.15.1"])
        cluster.edit("shop/web", lambda raw: raw["spec"].update(type="ClusterIP"))
        cluster.wait(lambda: cluster.held("shop/web") == [] and cluster.note("shop/web") is None)
        cluster.server.put(service("shop/third", "10.110.0.3", type="LoadBalancer"))
        # What another Service has just had comes last.
        cluster.wait(lambda: cluster.held("shop/third") == ["192.168.15.2"])
        assert controller.told.reasons("shop/web") == ["IPAllocated", "ClearAssignment"]
    assert len(cluster.status_writes()) == 4


def test_after_a_restart_nothing_is_written(cluster):
    cluster.pool("lan", "192.168.15.0/28")
    with running(cluster):
        cluster.wait(lambda: cluster.note("shop/web") == "lan")
    written = len(cluster.status_writes())
    with running(cluster, "two") as controller:
        cluster.wait(lambda: controller.counts.given == 1)
    assert len(cluster.status_writes()) == written
    assert controller.told.all == []


def test_pools_come_later_and_refusals_are_told_once(cluster):
    with running(cluster) as controller:
        cluster.wait(lambda: controller.told.all)
        for number in range(3):
            cluster.server.put(service("shop/other", f"10.110.0.{number + 5}"))
            cluster.wait(lambda: controller.counts.waiting == 1)
        assert controller.told.reasons("shop/web") == ["AllocationFailed"]
        cluster.pool("bad", "192.168.15.0/0")
        cluster.wait(lambda: controller.told.reasons("metallb-system/bad") == ["PoolRefused"])
        cluster.pool("bad", "192.168.15.0/28")
        cluster.wait(lambda: cluster.held("shop/web") == ["192.168.15.0"])


def test_pools_from_a_file(cluster, tmp_path):
    file = tmp_path / "lb.yaml"
    head = "apiVersion: narthex/v1alpha1\nkind: LoadBalancerConfiguration\npools:\n"
    file.write_text(head + "- {name: seeds, addresses: [172.6.6.6/32]}\n")
    cluster.server.abilities = ServerFeatures(missing=frozenset({"IPAddressPool", "L2Advertisement"}))
    with running(cluster, config=file):
        cluster.wait(lambda: cluster.held("shop/web") == ["172.6.6.6"])
        file.write_text(head + "- {name: seeds, addresses: nonsense}\n")
        cluster.server.put(service("shop/other", "10.110.0.5", type="LoadBalancer"))
        time.sleep(0.3)
        file.write_text(head + "- {name: seeds, addresses: [172.6.6.6/31]}\n")
        cluster.wait(lambda: cluster.held("shop/other") == ["172.6.6.7"])
        assert cluster.held("shop/web") == ["172.6.6.6"]


def test_without_the_custom_resources_nothing_is_taken_away(cluster):
    cluster.pool("lan", "192.168.15.0/28")
    cluster.edit("shop/web", lambda raw: raw.update(status={"loadBalancer": {"ingress": [{"ip": "192.168.15.9"}]}}))
    cluster.server.abilities = ServerFeatures(missing=frozenset({"IPAddressPool"}))
    with running(cluster) as controller:
        cluster.wait(lambda: any(each.trouble for each in controller.followed))
        assert cluster.held("shop/web") == ["192.168.15.9"]
        assert cluster.status_writes() == []


def test_what_an_unreadable_service_holds_is_not_given_away(cluster):
    cluster.server.put_raw(
        "Service",
        {
            "metadata": {"name": "odd", "namespace": "shop"},
            "spec": {"type": "LoadBalancer", "ports": [{"port": 70000}]},
            "status": {"loadBalancer": {"ingress": [{"ip": "192.168.15.0"}]}},
        },
    )
    cluster.pool("lan", "192.168.15.0/28")
    with running(cluster):
        cluster.wait(lambda: cluster.held("shop/web") == ["192.168.15.1"])


def test_a_foreign_writer_is_not_fought(cluster):
    cluster.pool("lan", "192.168.15.0/28")

    def overwrite(raw):
        raw["status"] = {"loadBalancer": {"ingress": [{"ip": "198.51.100.7"}]}}

    with running(cluster) as controller:
        cluster.wait(lambda: cluster.note("shop/web") == "lan")
        cluster.wait(lambda: controller.counts.given == 1)
        cluster.edit("shop/web", overwrite)
        cluster.wait(lambda: controller.told.reasons("shop/web")[-1:] == ["ForeignStatus"])
        cluster.server.put(service("shop/more", "10.110.0.2", type="LoadBalancer"))
        cluster.wait(lambda: cluster.held("shop/more"))
        assert cluster.held("shop/web") == ["198.51.100.7"]
        assert controller.counts.foreign == 1


@pytest.mark.parametrize("fault", [Refuse(500), Refuse(429, 1), DropConnection(), DropConnection(30)])
def test_writes_that_fail_are_made_again(cluster, fault):
    cluster.pool("lan", "192.168.15.0/28")
    failed = []

    def faults(seen):
        if seen.method == "PATCH" and "/services/" in seen.path and len(failed) < 3:
            failed.append(seen)
            return fault
        return None

    cluster.server.faults = faults
    with running(cluster):
        cluster.wait(lambda: cluster.held("shop/web") == ["192.168.15.0"] and cluster.note("shop/web") == "lan")
    assert failed


def test_a_write_from_an_old_version_changes_nothing(cluster):
    cluster.pool("lan", "192.168.15.0/28")
    raced = []

    def faults(seen):
        # Somebody is faster, each time until the third.
        if seen.path.endswith("/status") and len(raced) < 3:
            raced.append(seen)
            cluster.edit("shop/web", lambda raw: raw["metadata"].update(labels={"race": str(len(raced))}))

    cluster.server.faults = faults
    with running(cluster) as controller:
        cluster.wait(lambda: cluster.note("shop/web") == "lan")
    assert [code for seen, code in cluster.server.writes if seen.path.endswith("/status")] == [409, 409, 409, 200]
    assert controller.results["conflict"] == 3
    assert cluster.raw("shop/web")["metadata"]["labels"] == {"race": "3"}


def test_two_controllers_and_a_server_that_goes_away(cluster):
    """Whoever leads afterwards goes on with what there is."""
    cluster.pool("lan", "192.168.15.0/24")

    with running(cluster, "one") as one, running(cluster, "two") as two:
        for number in range(6):
            cluster.server.put(service(f"shop/s{number}", f"10.110.1.{number}", type="LoadBalancer"))
            cluster.wait(lambda number=number: cluster.held(f"shop/s{number}"))
            if number in (1, 3):
                cluster.server.stop()
                time.sleep(2.5)
                cluster.server.start()
        assert {one._leader.holder, two._leader.holder} <= {"one", "two"}
    holders = [cluster.held(f"shop/s{number}")[0] for number in range(6)]
    assert len(set(holders)) == 6


def test_metrics(cluster):
    cluster.pool("lan", "192.168.15.0/28")
    cluster.pool("bad", "::/0")
    with running(cluster) as controller:
        cluster.wait(lambda: controller.counts.given == controller.counts.allocations == 1)
        text = controller.metrics.exposition().decode()
    for line in (
        'metallb_allocator_addresses_total{pool="lan"} 16.0',
        'metallb_allocator_addresses_in_use_total{pool="lan"} 1.0',
        'narthex_lb_pool_refused{pool="bad"} 1.0',
        'narthex_lb_services{state="given"} 1.0',
        "narthex_lb_leader 1.0",
        "narthex_lb_allocations_total 1.0",
    ):
        assert line in text
