"""Every decision for one Service, in the log."""

import logging

import pytest

from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import NamespacedName, ServicePortName
from narthex.proxy.program.explain_service import ServiceExplainer
from narthex.proxy.program.sync import SyncResult
from narthex.testing.build import endpoint, endpoint_slice, plan, service, snapshot


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "narthex")
    return caplog


WEB = ServicePortName(NamespacedName("shop", "web"), "http", Protocol.TCP)


def done(made, *changed):
    return SyncResult(family=made.family, plan=made, first=False, changed=frozenset(changed), seconds={})


def explained(log, *objects, name="shop/web"):
    made = plan(*objects)
    ServiceExplainer(name, lambda: snapshot(*objects)).after(done(made, *made.services))
    return [record.getMessage().removeprefix("explain IPv4: ") for record in log.records]


@pytest.mark.row("29.11")
def test_each_way_in_and_each_endpoint_is_explained(log):
    objects = (
        service(
            "shop/web",
            "10.110.0.1",
            node_port=30001,
            type="LoadBalancer",
            balancers=("203.0.113.9",),
            source_ranges=("198.51.100.0/24",),
            affinity_seconds=60,
            external_policy_local=True,
            health_check_node_port=31000,
        ),
        endpoint_slice(
            "shop/web",
            endpoint("10.64.1.5"),
            endpoint("10.64.2.5", node="worker-b", for_zones=("a",), for_nodes=("worker-b",)),
            endpoint("10.64.1.6", ready=False, serving=False),
            endpoint("10.64.1.7", ready=False, terminating=True),
            port=8080,
        ),
    )
    said = explained(log, *objects)
    assert said == [
        "shop/web:http: cluster IP 10.110.0.1:80/TCP: pods: cluster; this node: cluster, masquerade; "
        "others: cluster, masquerade",
        "shop/web:http: load balancer IP 203.0.113.9:80/TCP: only from 198.51.100.0/24; pods: cluster; "
        "this node: cluster, masquerade; others: local",
        "shop/web:http: node port 30001/TCP: pods: cluster; this node: cluster, masquerade; others: local",
        "shop/web:http: pool cluster: 10.64.1.5:8080*, 10.64.2.5:8080 (ready)",
        "shop/web:http: pool local: 10.64.1.5:8080* (ready on this node)",
        "shop/web:http: a client keeps its endpoint for 60 s",
        "slice web-1: 10.64.1.5:8080 is ready, on node worker-a: in the pools cluster of http and local of http",
        "slice web-1: 10.64.2.5:8080 is ready, on node worker-b, hinted for zone a, hinted for node worker-b: "
        "in the pools cluster of http",
        "slice web-1: 10.64.1.6:8080 is not ready, not serving, on node worker-a: in no pool",
        "slice web-1: 10.64.1.7:8080 is not ready, serving, terminating, on node worker-a: in no pool",
        "health check port 31000: 1 ready on this node",
    ]


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ((), "there is no Service shop/web"),
        ((service("shop/web", "None"),), "it is headless"),
        ((service("shop/web", type="ExternalName"),), "it is of type ExternalName"),
        ((service("shop/web"),), "it has no cluster IP yet"),
        ((service("shop/web", "fd6e::1"),), "it has no IPv4 address or no port"),
    ],
)
def test_why_there_is_no_way_in(log, objects, said):
    (line,) = explained(log, *objects)
    assert said in line


def test_who_else_claims_it(log):
    said = explained(
        log,
        service("shop/web", "10.110.0.1"),
        service("shop/thief", "10.110.0.2", external_ips=("10.110.0.1",)),
        name="shop/thief",
    )
    assert "external IP 10.110.0.1:80/TCP is claimed by shop/web:http and shop/thief:http: shop/web:http has it" in said


def test_it_is_said_again_only_when_it_changes(log):
    web, cart = service("shop/web", "10.110.0.1"), service("shop/cart", "10.110.0.2")
    objects = [web, cart]
    explainer = ServiceExplainer("shop/web", lambda: snapshot(*objects))
    first = plan(*objects)
    explainer.after(done(first, *first.services))
    count = len(log.records)
    assert count > 0
    objects[1] = service("shop/cart", "10.110.0.3")
    second = plan(*objects)
    explainer.after(done(second, ServicePortName(NamespacedName("shop", "cart"), "http", Protocol.TCP)))
    assert len(log.records) == count
    objects.append(endpoint_slice("shop/web", endpoint("10.64.1.5")))
    explainer.after(done(plan(*objects), WEB))
    assert "10.64.1.5:80 is ready" in log.text


def test_another_service_may_be_asked_for_and_none(log):
    objects = service("shop/web", "10.110.0.1"), service("shop/cart", "10.110.0.2")
    made = plan(*objects)
    explainer = ServiceExplainer("", lambda: snapshot(*objects))
    explainer.after(done(made, *made.services))
    assert log.records == []
    explainer.name = "shop/cart"
    explainer.after(done(made))
    assert "shop/cart:http: cluster IP" in log.text
    assert "shop/web" not in log.text
    count = len(log.records)
    explainer.name = ""
    explainer.after(done(made))
    explainer.name = "shop/cart"
    explainer.after(done(made))
    assert len(log.records) == 2 * count


def test_each_family_speaks_for_itself(log):
    web = service("shop/web", "10.110.0.1", "fd6e::1")
    explainer = ServiceExplainer("shop/web", lambda: snapshot(web))
    for family in IPFamily:
        made = plan(web, family=family)
        explainer.after(done(made, *made.services))
    assert "explain IPv4: shop/web:http: cluster IP 10.110.0.1:80" in log.text
    assert "explain IPv6: shop/web:http: cluster IP [fd6e::1]:80" in log.text
