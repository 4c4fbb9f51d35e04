"""External addresses of Services in a zone of their own (row S20)."""

import dns.message
import pytest
from tests.dns.cluster import OBJECTS, Served

from narthex.dns.corefile.settings import K8sExternalSettings
from narthex.dns.plugins.k8s_external import K8sExternalPlugin
from narthex.dns.server.dispatcher import BlockPlugins, Dispatcher, LocalAnswer
from narthex.model.objects import ServicePort
from narthex.model.store import Upsert
from narthex.testing.build import endpoint, endpoint_slice, service

pytestmark = pytest.mark.row("S20")

MORE = (
    service(
        "shop/front",
        "10.110.1.1",
        type="LoadBalancer",
        ports=(ServicePort(name="http", port=80), ServicePort(name="https", port=443)),
        external_ips=("198.51.100.9", "2001:db8::9"),
        balancers=("203.0.113.5", "198.51.100.9"),
    ),
    endpoint_slice("shop/front", endpoint("10.64.2.2", hostname="inner")),
    service("shop/bare", "None", external_ips=("198.51.100.20",)),
    endpoint_slice("shop/bare", endpoint("10.64.2.3")),
)


class Outward(Served):
    def __init__(self, synced=True, zone="example.org.", **settings):
        super().__init__(*OBJECTS, *MORE, synced=synced)
        cluster = next(iter(self.dispatcher._by_zone.values()))[0].kubernetes
        external = K8sExternalPlugin(
            K8sExternalSettings(zones=(zone,), **settings), self.zone, ("10.20.0.11", "fd20::11")
        )
        self.dispatcher = Dispatcher([BlockPlugins((".",), cluster, None, None, external)])

    def ask(self, name, type_="A", **options):
        query = dns.message.make_query(name, type_, **options)
        made = self.dispatcher.handle(query.to_wire(), "tcp")
        assert isinstance(made, LocalAnswer)
        message = dns.message.from_wire(query.to_wire()[:2] + made.response.tail)
        self.plugin = made.labels.plugin
        return message


def lines(section):
    return sorted(line for each in section for line in each.to_text().split("\n"))


def test_addresses():
    served = Outward(ttl=60)
    message = served.ask("Front.shop.Example.org")
    assert lines(message.answer) == [
        "Front.shop.Example.org. 60 IN A 198.51.100.9",
        "Front.shop.Example.org. 60 IN A 203.0.113.5",
    ]
    assert message.flags & dns.flags.AA and served.plugin == "k8s_external"
    assert lines(served.ask("front.shop.example.org", "AAAA").answer) == [
        "front.shop.example.org. 60 IN AAAA 2001:db8::9"
    ]
    assert len(served.ask("nodes.shop.example.org").answer) == 1
    assert len(served.ask("bare.shop.example.org").answer) == 1


def test_services():
    served = Outward()
    message = served.ask("front.shop.example.org", "SRV")
    assert lines(message.answer) == [
        "front.shop.example.org. 5 IN SRV 0 50 443 front.shop.example.org.",
        "front.shop.example.org. 5 IN SRV 0 50 80 front.shop.example.org.",
    ]
    assert len(lines(message.additional)) == 3
    (line,) = lines(served.ask("_https._tcp.front.shop.example.org", "SRV").answer)
    assert line.endswith("SRV 0 100 443 front.shop.example.org.")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("web.shop.example.org", 3),
        ("heads.shop.example.org", 3),
        ("outside.shop.example.org", 3),
        ("nope.shop.example.org", 3),
        ("inner.front.shop.example.org", 3),
        ("_nope._tcp.front.shop.example.org", 3),
        ("a.b.c.front.shop.example.org", 3),
        ("shop.example.org", 0),
        ("empty.example.org", 0),
        ("nowhere.example.org", 3),
        ("example.org", 0),
        ("dns.example.org", 0),
        ("x.dns.example.org", 3),
        ("_tcp.front.shop.example.org", 0),
    ],
)
def test_names_without_addresses(name, code):
    message = Outward().ask(name)
    assert (message.rcode(), message.answer) == (code, [])
    (soa,) = lines(message.authority)
    assert soa.startswith("example.org. 5 IN SOA ns1.dns.example.org. hostmaster.dns.example.org. ")
    assert Outward().ask("front.shop.example.org", "TXT").authority


def test_the_apex():
    served = Outward(apex="ns")
    assert lines(served.ask("example.org", "SOA").answer)[0].split()[4] == "ns1.ns.example.org."
    message = served.ask("example.org", "NS")
    assert lines(message.answer) == ["example.org. 5 IN NS ns1.ns.example.org."]
    assert lines(message.additional) == [
        "ns1.ns.example.org. 5 IN A 10.20.0.11",
        "ns1.ns.example.org. 5 IN AAAA fd20::11",
    ]
    assert lines(served.ask("ns1.ns.example.org").answer) == ["ns1.ns.example.org. 5 IN A 10.20.0.11"]
    assert served.ask("example.org", "AXFR").rcode() == 5


def test_headless():
    served = Outward(headless=True)
    assert lines(served.ask("heads.shop.example.org").answer) == [
        "heads.shop.example.org. 5 IN A 10.64.1.10",
        "heads.shop.example.org. 5 IN A 10.64.1.11",
    ]
    assert len(served.ask("one.heads.shop.example.org").answer) == 1
    message = served.ask("heads.shop.example.org", "SRV")
    assert any(line.endswith(" 8080 one.heads.shop.example.org.") for line in lines(message.answer))
    assert len(lines(message.additional)) == 3
    assert served.ask("web.shop.example.org").rcode() == 3, "that one is not headless"


def test_before_the_first_sync_and_fallthrough():
    assert Outward(synced=False).ask("nope.shop.example.org").rcode() == 2
    served = Outward(fallthrough=(".",))
    assert served.ask("nope.shop.example.org").rcode() == 5, "nobody comes next here"
    assert served.ask("front.shop.example.org").rcode() == 0


def test_beside_and_below_the_clusters_zone():
    served = Outward(zone="ext.cluster.local.")
    for _ in range(2):
        assert served.ask("x.cluster.local").rcode() == 3 and served.plugin == "kubernetes"
        assert served.ask("ext.cluster.local").rcode() == 0 and served.plugin == "k8s_external"
    assert served.ask("web.shop.svc.cluster.local").rcode() == 0


def test_addresses_that_change():
    served = Outward()
    served.store.apply(Upsert(service("shop/web", "10.110.0.1", type="LoadBalancer", balancers=("203.0.113.77",))))
    served.update()
    assert len(served.ask("web.shop.example.org").answer) == 1
