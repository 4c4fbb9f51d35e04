"""What the loop logs, and how often."""

import pytest
from tests.proxy.program.loop.bench import CART, CART_SLICE, THE_NODE, WEB, WEB_SLICE, Bench, said

from narthex.model.net import IPFamily
from narthex.model.objects import Node
from narthex.model.problem import Problem
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.loop import Proxy
from narthex.proxy.program.schedule import SyncPeriods
from narthex.proxy.program.sync import FamilySync
from narthex.testing.build import CONFIG, NODE, endpoint, endpoint_slice, plan, service
from narthex.testing.fakes import FakeClock, FakeInbox, FakeTarget


def test_ready_is_said_once_when_all_families_are(log):
    bench = Bench(WEB)
    bench.run_for(100)
    bench.change(CART)
    bench.run_for(100)
    assert said(log, "ready:") == ["ready: the first sync is done (IPv4 and IPv6)"]


def test_a_sync_says_what_changed_and_how_long_it_took(log):
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4])
    bench.proxy.turn()
    log.clear()
    bench.change(CART, CART_SLICE)
    bench.proxy.turn()
    (line,) = said(log, "synced IPv4", "INFO")
    assert "1 Service port changed (shop/cart:http) of 2 Service ports" in line
    assert "apply 0 ms" in line
    (record,) = log.records
    assert record.narthex["changed"] == 1


def test_conflicts_are_said_when_they_come_and_when_they_go(log):
    one = service("a/one", "10.110.0.3", external_ips=("203.0.113.5",))
    two = service("b/two", "10.110.0.4", external_ips=("203.0.113.5",))
    bench = Bench(two, families=[IPFamily.IPV4])
    bench.proxy.turn()
    bench.change(one)
    bench.run_for(100)
    (line,) = said(log, "cannot have", "WARNING")
    assert line.startswith("Service port b/two:http cannot have external IP 203.0.113.5:80/TCP: a/one:http has it")
    bench.inbox.remove(one)
    bench.proxy.notice()
    bench.run_for(1)
    assert said(log, "settled: b/two:http", "INFO")


def test_a_conflict_of_both_families_is_said_once(log):
    one = service("a/one", "10.110.0.3", "fd6e::3", type="NodePort", node_port=30001)
    two = service("b/two", "10.110.0.4", "fd6e::4", type="NodePort", node_port=30001)
    bench = Bench(one, two)
    bench.run_for(1)
    assert len(said(log, "cannot have node port 30001/TCP", "WARNING")) == 1
    bench.inbox.remove(one)
    bench.proxy.notice()
    bench.run_for(1)
    assert len(said(log, "settled:")) == 1


def test_problems_are_said_once_and_once_again_when_mended(log):
    bench = Bench(WEB)
    bench.inbox.problems = (
        Problem(origin="web.yaml:3", object="Service shop/web", field="spec.ports[0].port", message="0 is no port"),
    )
    bench.run_for(100)
    assert len(said(log, "0 is no port", "ERROR")) == 1
    bench.inbox.problems = ()
    bench.proxy.notice()
    bench.run_for(1)
    assert len(said(log, "mended: web.yaml:3", "INFO")) == 1


def test_an_unknown_node_is_said_once(log):
    bench = Bench(WEB)
    bench.inbox._waiting.pop(0)
    bench.inbox.put(Node(name="worker-b"))
    bench.run_for(1)
    bench.change(CART)
    bench.run_for(1)
    (line,) = said(log, "no Node object is named 'worker-a'", "WARNING")
    assert "there are: worker-b" in line
    bench.change(THE_NODE)
    bench.run_for(1)
    assert said(log, "the Node object 'worker-a' is there now")


@pytest.mark.row("16.1")
def test_a_balancer_without_a_health_check_port_is_said_once(log):
    local = {"type": "LoadBalancer", "external_policy_local": True}
    bench = Bench(service("shop/web", "10.110.0.1", **local))
    bench.run_for(1)
    bench.change(WEB_SLICE)
    bench.run_for(1)
    (line,) = said(log, "healthCheckNodePort", "WARNING")
    assert line.startswith("Service shop/web has no healthCheckNodePort")
    bench.change(service("shop/web", "10.110.0.1", health_check_node_port=32000, **local))
    bench.run_for(1)
    bench.change(service("shop/web", "10.110.0.1", **local))
    bench.run_for(1)
    assert len(said(log, "healthCheckNodePort", "WARNING")) == 2


def test_external_ips_that_belong_to_the_node_or_an_api_server_are_reported(log):
    """They are served, as kube-proxy does, and as clusters need that have no load balancer."""
    api = endpoint_slice("default/kubernetes", endpoint("10.20.0.5"), port=6443)
    bench = Bench(service("shop/web", "10.110.0.1", external_ips=("10.20.0.11", "203.0.113.1")), WEB_SLICE)
    bench.run_for(1)
    (line,) = said(log, "externalIPs", "WARNING")
    assert "Service shop/web" in line and "10.20.0.11 is an address of this node" in line
    assert "10.20.0.11:80/TCP" in bench.kernel
    bench.change(service("shop/web", "10.110.0.1", external_ips=("203.0.113.1",)))
    bench.change(service("shop/cart", "10.110.0.2", port=6443, external_ips=("10.20.0.5",)))
    bench.run_for(1)
    assert said(log, "mended")
    assert said(log, "externalIPs", "ERROR") == []
    bench.change(api)
    bench.run_for(1)
    (line,) = said(log, "externalIPs", "ERROR")
    assert "10.20.0.5 is the address of an API server" in line and "also those to the API server" in line
    bench.run_for(100)
    assert len(said(log, "spec.externalIPs")) == 3


def test_a_first_list_without_services_is_reported_and_healthy(log):
    """The kernel has the rules of an earlier process, which are kept for a while."""
    clock, backend, family, events = FakeClock(), BACKENDS["nftables"], IPFamily.IPV4, []
    names = [f"shop/a{number}" for number in range(4)]
    earlier = [service(name, f"10.110.0.{number}") for number, name in enumerate(names, 10)]
    earlier += [endpoint_slice(name, endpoint("10.64.1.5")) for name in names]
    rules = backend.render(plan(*earlier))
    target = FakeTarget(backend, backend.render(plan()), rules)
    inbox = FakeInbox(THE_NODE)
    sync = FamilySync(family, Planner(CONFIG, family), backend, target, clock, doubt=300.0)
    proxy = Proxy(inbox, [sync], clock, SyncPeriods(), node_name=NODE, record=events.append)
    for _ in range(3):
        clock.sleep(proxy.turn())
    assert not target.applied and proxy.health.healthz()[0] == 200
    assert len(said(log, "the lists of the source have no Services", "ERROR")) == 1
    assert [event.reason for event in events] == ["ObjectsMissingFromList"]
    end = clock.now() + 300.0
    while clock.now() < end:
        clock.sleep(proxy.turn())
    proxy.turn()
    assert backend.served(target.rules) == 0
