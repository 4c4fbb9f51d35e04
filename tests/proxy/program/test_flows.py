"""When the kernel's connections are looked at, what is removed, and what happens when that fails."""

import logging
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from narthex.model.net import ConntrackFlow, IPFamily, Protocol
from narthex.model.objects import EndpointPort, ServicePort
from narthex.netfilter.netlink.conntrack import ConntrackEntry
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.flows import StaleFlowRemover
from narthex.proxy.program.loop import Proxy
from narthex.proxy.program.metrics import ProxyMetrics
from narthex.proxy.program.schedule import SyncPeriods
from narthex.proxy.program.sync import FamilySync
from narthex.testing.build import CONFIG, NODE, NODE_IPS, endpoint, endpoint_slice, node, service
from narthex.testing.fakes import FakeBackend, FakeClock, FakeInbox, FakeRules, FakeTarget

A, B = "10.64.1.5", "10.64.1.6"
WEB = service("shop/web", "10.110.0.1", ports=(ServicePort(name="http", port=80, protocol=Protocol.UDP),))


def ends(*addresses):
    made = [endpoint(address) for address in addresses]
    return endpoint_slice("shop/web", *made, ports=(EndpointPort(name="http", port=80, protocol=Protocol.UDP),))


class FakeTable:
    """A kernel's table in memory. Each error in `failures` is raised once."""

    def __init__(self):
        self.held = {}
        self.listed = 0
        self.failures = []
        self.vanishing = False

    def put(self, number, end, destination="10.110.0.1"):
        flow = ConntrackFlow(Protocol.UDP, "10.64.1.200", number, destination, 80, end, 80)
        self.held[number] = ConntrackEntry(flow, str(number).encode())

    def entries(self, family, towards):
        self.listed += 1
        if self.failures:
            raise self.failures.pop(0)
        assert family is IPFamily.IPV4
        return [each for each in self.held.values() if (each.flow.protocol, each.flow.port) in towards]

    def remove(self, family, entries):
        assert family is IPFamily.IPV4
        there = [not self.vanishing and int(each.handle) in self.held for each in entries]
        for each in entries:
            self.held.pop(int(each.handle), None)
        return there


class Bench:
    """A proxy of one family with everything around it faked."""

    def __init__(self, *objects, sockets=None):
        self.sockets = sockets
        self.clock, backend = FakeClock(), FakeBackend()
        self.target = FakeTarget(backend, FakeRules())
        self.inbox = FakeInbox(node(), *objects)
        self.table, self.metrics = FakeTable(), ProxyMetrics("nftables")
        sync = FamilySync(IPFamily.IPV4, Planner(CONFIG, IPFamily.IPV4), backend, self.target, self.clock)
        flows = StaleFlowRemover(self.table, lambda: NODE_IPS, self.clock, self.metrics, sockets=sockets)
        self.proxy = Proxy(
            self.inbox, [sync], self.clock, SyncPeriods(), node_name=NODE, metrics=self.metrics, after_sync=flows.after
        )

    def change(self, *objects):
        self.inbox.put(*objects)
        self.proxy.turn()

    def count(self, name):
        families = text_string_to_metric_families(self.metrics.exposition().decode())
        return {
            sample.labels.get("reason", ""): sample.value
            for family in families
            for sample in family.samples
            if sample.name == name
        }


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, "narthex")
    return caplog


def test_what_a_change_leaves_stale_is_removed_and_counted(log):
    bench = Bench(WEB, ends(A))
    bench.proxy.turn()
    bench.table.put(1, A)
    bench.table.put(2, "10.110.0.1")
    bench.table.put(3, A, "10.110.0.9")
    bench.table.put(4, B)
    bench.change(ends(B))
    assert list(bench.table.held) == [3, 4]
    assert "removed 2 stale connections of IPv4: 1 endpoint-gone, 1 black-hole" in log.messages
    assert bench.count("narthex_stale_flows_removed_total") == {"endpoint-gone": 1, "frontend-gone": 0, "black-hole": 1}
    assert bench.count("kubeproxy_conntrack_reconciler_deleted_entries_total") == {"": 2}
    assert bench.count("kubeproxy_conntrack_reconciler_sync_duration_seconds_count") == {"": 2}


def test_at_the_start_all_are_looked_at():
    bench = Bench(WEB, ends(A))
    bench.table.put(1, B)
    bench.proxy.turn()
    assert bench.table.held == {}


def test_what_can_leave_nothing_stale_does_not_list_the_table():
    bench = Bench(WEB, ends(A))
    bench.proxy.turn()
    bench.change(ends(A, B))
    bench.clock.advance(100)
    bench.proxy.turn()
    assert bench.table.listed == 1


def test_without_services_there_is_nothing_to_look_for():
    bench = Bench()
    bench.proxy.turn()
    assert bench.table.listed == 0


def test_nothing_is_removed_before_the_rules_are_there():
    bench = Bench(WEB, ends(A))
    bench.proxy.turn()
    bench.table.put(1, A)
    bench.target.failures = ["no"]
    bench.change(ends(B))
    assert list(bench.table.held) == [1]
    bench.clock.advance(1)
    bench.proxy.turn()
    assert bench.table.held == {}


def test_while_rules_were_gone_connections_went_past_them():
    bench = Bench(WEB, ends(A))
    bench.proxy.turn()
    bench.table.put(1, "10.110.0.1")
    bench.target.rules = FakeRules()
    bench.clock.advance(100)
    bench.proxy.turn()
    assert bench.table.held == {}


def test_a_table_that_cannot_be_listed_is_looked_at_again(log):
    bench = Bench(WEB, ends(A))
    bench.proxy.turn()
    bench.table.put(1, A)
    bench.table.failures = [OSError(1, "not now"), OSError(1, "not now")]
    bench.change(ends(B))
    bench.change(ends(B, "10.64.1.7"))
    assert list(bench.table.held) == [1]
    assert len([text for text in log.messages if "could not be removed" in text]) == 1
    assert bench.proxy.health.healthz()[0] == 200
    bench.clock.advance(100)
    bench.proxy.turn()
    assert bench.table.held == {}


def test_what_is_gone_already_is_not_counted(log):
    bench = Bench(WEB, ends(A))
    bench.proxy.turn()
    bench.table.put(1, A)
    bench.table.vanishing = True
    bench.change(ends(B))
    assert bench.count("kubeproxy_conntrack_reconciler_deleted_entries_total") == {"": 0}
    assert not [text for text in log.messages if "removed" in text]


class FakeSockets:
    """Connected sockets by number: where they wanted to go, and the endpoint they have."""

    def __init__(self):
        self.held = {}
        self.asked = []
        self.failures = []

    def put(self, number, end, destination="10.110.0.1"):
        self.held[number] = ConntrackFlow(Protocol.UDP, "10.64.1.200", number, destination, 80, end, 80)

    def close_stale(self, family, endpoints, reason):
        assert family is IPFamily.IPV4
        self.asked.append(endpoints)
        if self.failures:
            raise self.failures.pop(0)
        near = {
            number: flow
            for number, flow in self.held.items()
            if endpoints is None or (flow.reply_source, flow.reply_port) in endpoints
        }
        closed = Counter()
        for number, flow in near.items():
            if why := reason(flow):
                closed[why] += 1
                del self.held[number]
        return closed


@pytest.fixture
def bench():
    """A proxy with socket load balancing whose first sync is done."""
    made = Bench(WEB, ends(A), sockets=FakeSockets())
    made.proxy.turn()
    return made


def test_sockets_of_an_endpoint_that_left_are_closed_and_counted(bench, log):
    assert bench.sockets.asked == [None]
    assert bench.count("narthex_stale_sockets_closed_total") == {"endpoint-gone": 0, "frontend-gone": 0}
    bench.sockets.put(1, A)
    bench.sockets.put(2, B)
    bench.sockets.put(3, A, "10.110.0.9")
    bench.change(ends(B))
    assert bench.sockets.asked[1:] == [{(A, 80)}]
    assert list(bench.sockets.held) == [2, 3]
    assert "closed 1 stale UDP socket of IPv4: 1 endpoint-gone" in log.messages
    assert bench.count("narthex_stale_sockets_closed_total") == {"endpoint-gone": 1, "frontend-gone": 0}


def test_sockets_are_not_searched_for_what_leaves_nothing_stale(bench):
    bench.change(ends(A, B))
    assert bench.sockets.asked == [None]


def test_sockets_of_a_deleted_service_are_closed(bench):
    bench.sockets.put(1, A)
    bench.inbox.remove(WEB)
    bench.proxy.turn()
    assert bench.sockets.held == {}
    assert bench.count("narthex_stale_sockets_closed_total") == {"endpoint-gone": 0, "frontend-gone": 1}


def test_sockets_that_could_not_be_closed_are_looked_for_again(bench, log):
    bench.sockets.put(1, A)
    bench.sockets.failures = [OSError(1, "not now")]
    bench.change(ends(B))
    assert list(bench.sockets.held) == [1]
    assert len([text for text in log.messages if "could not be removed" in text]) == 1
    bench.change(ends(B, "10.64.1.7"))
    assert bench.sockets.asked[2:] == [{(A, 80)}]
    assert bench.sockets.held == {}


def test_without_socket_load_balancing_no_socket_is_counted():
    bench = Bench(WEB, ends(A))
    bench.proxy.turn()
    assert bench.count("narthex_stale_sockets_closed_total") == {}
