"""The records of a cluster, row by row: D1 to D31, and (N1) what is NXDOMAIN or empty."""

import dns.message
import pytest
from tests.dns.cluster import NOW, OBJECTS, Served, code, texts

from narthex.dns.corefile.settings import KubernetesSettings
from narthex.dns.server.dispatcher import PendingQuery
from narthex.dns.zone.changes import ZoneTracker
from narthex.dns.zone.records import service_records
from narthex.model.objects import Namespace, NamespacedName, Pod
from narthex.model.selector import parse_selector
from narthex.model.store import Delete, Store, Synced, Upsert
from narthex.testing.build import endpoint, endpoint_slice, service

Z = "shop.svc.cluster.local"
SOA = f"SOA ns.dns.cluster.local. hostmaster.cluster.local. {NOW} 7200 1800 86400 5"
NX, OK = "NXDOMAIN", "NOERROR"


@pytest.fixture(scope="module")
def cluster():
    return Served(*OBJECTS)


ROWS = [
    ("D1", f"web.{Z}", "A", OK, ["A 10.110.0.1"]),
    ("D1", f"web.{Z}", "AAAA", OK, []),
    ("D1", f"both.{Z}", "AAAA", OK, ["AAAA fd6e::2"]),
    ("D2", f"nodes.{Z}", "A", OK, ["A 10.110.0.3"]),
    ("D3", f"unready.{Z}", "A", OK, ["A 10.110.0.5"]),
    ("D4", f"_http._tcp.web.{Z}", "SRV", OK, [f"SRV 0 100 80 web.{Z}."]),
    ("D5", f"_._tcp.ports.{Z}", "SRV", NX, []),
    ("D5", f"_http._udp.ports.{Z}", "SRV", NX, []),
    ("D5", f"_nope._tcp.ports.{Z}", "SRV", NX, []),
    ("D6", f"ports.{Z}", "SRV", OK, [f"SRV 0 33 {port} ports.{Z}." for port in (80, 53, 99)]),
    ("D7", f"both.{Z}", "SRV", OK, [f"SRV 0 50 80 both.{Z}."]),
    ("D8", f"heads.{Z}", "A", OK, ["A 10.64.1.10", "A 10.64.1.11"]),
    ("D8", f"silent.{Z}", "A", NX, []),
    ("D8", f"gone.{Z}", "A", NX, []),
    ("D9", f"noports.{Z}", "A", OK, ["A 10.64.1.30"]),
    ("D9", f"noports.{Z}", "SRV", OK, []),
    ("D10", f"moved.{Z}", "SRV", OK, [f"SRV 0 50 81 10-64-1-40.moved.{Z}.", f"SRV 0 50 82 10-64-1-41.moved.{Z}."]),
    ("D11", f"one.heads.{Z}", "A", OK, ["A 10.64.1.11"]),
    ("D11", f"10-64-1-10.heads.{Z}", "A", OK, ["A 10.64.1.10"]),
    ("D11", f"fd64-0-0-1--0.heads.{Z}", "AAAA", OK, ["AAAA fd64:0:0:1::"]),
    ("D12", f"10-64-1-11.heads.{Z}", "A", NX, []),
    ("D13", f"10-64-1-1.web.{Z}", "A", OK, ["A 10.64.1.1"]),
    ("D13", f"web-b.web.{Z}", "A", OK, ["A 10.64.1.2"]),
    ("D14", f"t.twins.{Z}", "A", OK, ["A 10.64.1.20", "A 10.64.1.21"]),
    ("D15", f"10-64-1-12.heads.{Z}", "A", NX, []),
    ("D15", f"10-64-1-9.unready.{Z}", "A", NX, []),
    ("D17", f"outside.{Z}", "CNAME", OK, ["CNAME www.example.org."]),
    ("D18", f"inside.{Z}", "A", OK, [f"CNAME web.{Z}.", "A 10.110.0.1"]),
    ("D18", f"chain.{Z}", "A", OK, [f"CNAME INSIDE.{Z}.", f"CNAME web.{Z}.", "A 10.110.0.1"]),
    ("D18", f"ring.{Z}", "A", OK, []),
    ("D19", f"inside.{Z}", "AAAA", OK, []),
    ("D19", f"nowhere.{Z}", "A", OK, []),
    ("D20", f"number.{Z}", "A", NX, []),
    ("D21", f"x.external.{Z}", "A", NX, []),
    ("D21", f"_http._tcp.external.{Z}", "SRV", NX, []),
    ("D21", f"outside.{Z}", "SRV", OK, []),
    ("D22", "10-64-1-10.shop.pod.cluster.local", "A", NX, []),
    ("D22", "shop.pod.cluster.local", "A", NX, []),
    ("D22", "pod.cluster.local", "A", OK, []),
    ("D25", "1.0.110.10.in-addr.arpa", "PTR", OK, [f"PTR web.{Z}."]),
    ("D26", "10.1.64.10.in-addr.arpa", "PTR", OK, [f"PTR 10-64-1-10.heads.{Z}."]),
    ("D26", "11.1.64.10.in-addr.arpa", "PTR", OK, [f"PTR one.heads.{Z}."]),
    ("D26", "12.1.64.10.in-addr.arpa", "PTR", NX, []),
    ("D26", f"{'0.' * 16}1.0.0.0.0.0.0.0.0.0.0.0.4.6.d.f.ip6.arpa", "PTR", OK, [f"PTR fd64-0-0-1--0.heads.{Z}."]),
    ("D27", "1.2.3.4.in-addr.arpa", "PTR", NX, []),
    ("D27", "4.in-addr.arpa", "PTR", NX, []),
    ("D27", "x.1.64.10.in-addr.arpa", "PTR", NX, []),
    ("D28", "dns-version.cluster.local", "TXT", OK, ['TXT "1.1.0"']),
    ("D29", "cluster.local", "SOA", OK, [SOA]),
    ("D30", "cluster.local", "NS", OK, ["NS kube-dns.kube-system.svc.cluster.local."]),
    ("D31", f"*.{Z}", "A", NX, []),
    ("D31", f"any.{Z}", "A", NX, []),
    ("N1", "svc.cluster.local", "A", OK, []),
    ("N1", "empty.svc.cluster.local", "A", OK, []),
    ("N1", "cluster.local", "A", OK, []),
    ("N1", "unknown.svc.cluster.local", "A", NX, []),
    ("N1", f"nope.{Z}", "A", NX, []),
    ("N1", "foo.cluster.local", "A", NX, []),
    ("N1", "web.shop.cluster.local", "A", NX, []),
    ("N1", f"a.b.c.web.{Z}", "A", NX, []),
    ("N1", f"_tcp.web.{Z}", "A", OK, []),
    ("N1", "cluster.local", "TXT", OK, []),
    ("N1", "1.0.110.10.in-addr.arpa", "A", OK, []),
    *(("N1", f"web.{Z}", type_, OK, []) for type_ in ("MX", "HTTPS", "CAA", "ANY", "NS", "SOA", "DS", "TXT")),
]


@pytest.mark.parametrize(
    ("name", "type_", "rcode", "answer"),
    [pytest.param(*rest, marks=pytest.mark.row(row), id=f"{row}-{rest[0]}-{rest[1]}") for row, *rest in ROWS],
)
def test_rows(cluster, name, type_, rcode, answer):
    said = cluster.ask(name, type_, use_edns=False)
    assert (code(said), sorted(texts(said.answer))) == (rcode, sorted(answer))
    zone = next(zone for zone in ("cluster.local", "in-addr.arpa", "ip6.arpa") if name.endswith(zone))
    beside = [] if answer else [SOA.replace("cluster.local", zone)]
    assert texts(said.authority) == beside
    assert all(rrset.ttl == 5 for rrset in said.answer) or type_ == "TXT"


def test_an_srv_brings_its_targets_addresses(cluster):
    assert texts(cluster.ask(f"_http._tcp.both.{Z}", "SRV").additional) == ["A 10.110.0.2", "AAAA fd6e::2"]
    both = cluster.ask(f"heads.{Z}", "SRV", transport="tcp")
    assert sorted(texts(both.additional)) == ["A 10.64.1.10", "A 10.64.1.11", "AAAA fd64:0:0:1::"]
    # Four pairs: one endpoint stands in two slices (row D7).
    assert {text.split()[2] for text in texts(both.answer)} == {"25"}


@pytest.mark.row("D3")
def test_d3_an_empty_service_can_be_hidden():
    served = Served(*OBJECTS, ignore_empty_service=True)
    assert code(served.ask(f"unready.{Z}")) == NX
    assert code(served.ask(f"web.{Z}")) == OK


@pytest.mark.row("D11")
def test_d11_endpoints_can_have_their_pods_names():
    served = Served(*OBJECTS, endpoint_pod_names=True)
    assert texts(served.ask(f"heads-0.heads.{Z}").answer) == ["A 10.64.1.10"]
    assert code(served.ask(f"10-64-1-10.heads.{Z}")) == NX
    long = Served(service("shop/l", "None"), endpoint_slice("shop/l", endpoint("10.64.1.1", target="p" * 64)))
    assert code(long.ask(f"10-64-1-1.l.{Z}")) == OK


@pytest.mark.row("D16")
def test_d16_only_readiness_counts():
    """Whoever writes slices has already made the endpoints of such a Service ready."""
    slices = [endpoint_slice("shop/db", endpoint("10.64.1.1", ready=False))]
    assert service_records(service("shop/db", "None", publish_not_ready=True), slices) is None


@pytest.mark.row("D17")
def test_d17_outside_names_are_left_to_others():
    served = Served(*OBJECTS, resolver=object())
    made = served.dispatcher.handle(dns.message.make_query(f"outside.{Z}", "A").to_wire(), "udp")
    assert isinstance(made, PendingQuery)
    assert made.external.target == b"\x03www\x07example\x03org\0"
    assert len(made.external.links) == 1


@pytest.mark.row("D17")
def test_d17_without_anybody_to_ask_there_is_the_cname():
    assert texts(Served(*OBJECTS).ask(f"outside.{Z}").answer) == ["CNAME www.example.org."]


@pytest.mark.row("D18")
def test_d18_eleven_links_are_too_many():
    def served(links):
        chain = [
            service(f"shop/c{n}", type="ExternalName", external_name=f"c{n + 1}.shop.svc.cluster.local")
            for n in range(links)
        ]
        return Served(*chain, service(f"shop/c{links}", "10.110.0.9"))

    assert texts(served(10).ask(f"c0.{Z}", transport="tcp").answer)[-1] == "A 10.110.0.9"
    assert texts(served(11).ask(f"c0.{Z}", transport="tcp").answer) == []


@pytest.mark.row("D23")
def test_d23_pods_insecure():
    served = Served(*OBJECTS, pods="insecure")
    assert texts(served.ask("192-0-2-1.shop.pod.cluster.local").answer) == ["A 192.0.2.1"]
    assert texts(served.ask("fd00--1.shop.pod.cluster.local", "AAAA").answer) == ["AAAA fd00::1"]
    assert code(served.ask("192-0-2-1.unknown.pod.cluster.local")) == NX
    assert code(served.ask("192-0-2-999.shop.pod.cluster.local")) == NX
    assert code(served.ask("shop.pod.cluster.local")) == OK


@pytest.mark.row("D24")
def test_d24_pods_verified():
    served = Served(*OBJECTS, pods="verified")
    assert texts(served.ask("10-64-1-10.shop.pod.cluster.local").answer) == ["A 10.64.1.10"]
    assert texts(served.ask("fd64-0-0-1--.shop.pod.cluster.local", "AAAA").answer) == ["AAAA fd64:0:0:1::"]
    for name in ("10-64-1-10.empty", "10-64-1-50.shop", "10-64-1-51.shop", "192-0-2-1.shop"):
        assert code(served.ask(f"{name}.pod.cluster.local")) == NX, name
    served.store.apply(
        Upsert(Pod(name="heads-0", namespace="shop", phase="Running", ips=("10.64.1.10",), deletion_timestamp="x"))
    )
    served.update()
    assert code(served.ask("10-64-1-10.shop.pod.cluster.local")) == OK
    served.store.apply(Delete("Pod", NamespacedName("shop", "heads-0")))
    served.update()
    assert code(served.ask("10-64-1-10.shop.pod.cluster.local")) == NX


@pytest.mark.row("D25")
def test_d25_a_cluster_ip_wins_over_an_endpoint():
    served = Served(*OBJECTS, service("shop/front", "None"), endpoint_slice("shop/front", endpoint("10.110.0.1")))
    assert texts(served.ask("1.0.110.10.in-addr.arpa", "PTR").answer) == [f"PTR web.{Z}."]


@pytest.mark.row("D26")
def test_d26_each_service_of_an_endpoint():
    served = Served(*OBJECTS, service("shop/more", "10.110.0.77"), endpoint_slice("shop/more", endpoint("10.64.1.10")))
    names = texts(served.ask("10.1.64.10.in-addr.arpa", "PTR").answer)
    assert sorted(names) == [f"PTR 10-64-1-10.heads.{Z}.", f"PTR 10-64-1-10.more.{Z}."]


@pytest.mark.row("D27")
def test_d27_falls_through_to_others():
    served = Served(*OBJECTS, resolver=object(), fallthrough=("in-addr.arpa.",))
    for name, asked in (("9.9.9.9.in-addr.arpa", True), ("1.0.110.10.in-addr.arpa", False), ("x.cluster.local", False)):
        made = served.dispatcher.handle(dns.message.make_query(name, "PTR").to_wire(), "udp")
        assert isinstance(made, PendingQuery) == asked, name


@pytest.mark.row("D28")
def test_d28_the_version_has_its_own_ttl(cluster):
    assert cluster.ask("dns-version.cluster.local", "TXT").answer[0].ttl == 28800


@pytest.mark.row("D29")
def test_d29_the_serial_follows_services_and_endpoints():
    served = Served(*OBJECTS)
    served.store.apply(Upsert(Namespace(name="later")))
    served.update(NOW + 5)
    assert str(NOW) in texts(served.ask("cluster.local", "SOA").answer)[0]
    served.store.apply(Upsert(service("shop/new", "10.110.9.9")))
    served.update(NOW + 9)
    assert str(NOW + 9) in texts(served.ask("cluster.local", "SOA").answer)[0]


@pytest.mark.row("D30")
def test_d30_name_servers():
    headless = Served(
        service("kube-system/dns", "None"), endpoint_slice("kube-system/dns", endpoint("10.64.9.9")), own=("10.64.9.9",)
    )
    said = headless.ask("cluster.local", "NS")
    assert texts(said.answer) == ["NS 10-64-9-9.dns.kube-system.svc.cluster.local."]
    assert texts(said.additional) == ["A 10.64.9.9"]
    alone = Served(own=("192.0.2.53", "fd00::53")).ask("cluster.local", "NS")
    assert texts(alone.answer) == ["NS ns.dns.cluster.local."]
    assert sorted(texts(alone.additional)) == ["A 192.0.2.53", "AAAA fd00::53"]


@pytest.mark.row("S19")
def test_s19_selection():
    by_name = Served(*OBJECTS, namespaces=("kube-system",))
    assert code(by_name.ask(f"web.{Z}")) == NX
    assert code(by_name.ask("shop.svc.cluster.local")) == NX
    assert code(by_name.ask("kube-dns.kube-system.svc.cluster.local")) == OK
    by_labels = Served(*OBJECTS, namespace_labels=parse_selector("team=a"))
    assert code(by_labels.ask(f"web.{Z}")) == OK
    assert code(by_labels.ask("kube-dns.kube-system.svc.cluster.local")) == NX
    by_labels.store.apply(Upsert(Namespace(name="kube-system", labels=(("team", "a"),))))
    by_labels.update()
    assert code(by_labels.ask("kube-dns.kube-system.svc.cluster.local")) == OK
    labelled = service("shop/tagged", "10.110.3.3", labels=(("dns", "yes"),))
    by_label = Served(*OBJECTS, labelled, labels=parse_selector("dns=yes"))
    assert code(by_label.ask(f"tagged.{Z}")) == OK
    assert code(by_label.ask(f"web.{Z}")) == NX


def test_several_zones_share_the_names():
    served = Served(*OBJECTS, zones=("cluster.local.", "corp.example.", "10.in-addr.arpa."))
    assert texts(served.ask("_http._tcp.web.shop.svc.corp.example", "SRV").answer) == [
        "SRV 0 100 80 web.shop.svc.corp.example."
    ]
    assert texts(served.ask("1.0.110.10.in-addr.arpa", "PTR").answer) == [f"PTR web.{Z}."]


def test_one_change_compiles_one_service():
    made = []

    def counted(service, slices, **options):
        made.append(service.name)
        return service_records(service, slices, **options)

    store, recorder = Store(), ZoneTracker(KubernetesSettings(zones=("cluster.local.",)), counted)
    for number in range(500):
        store.apply(Upsert(service(f"shop/s{number}", f"10.110.{number // 250}.{number % 250 + 1}")))
    store.apply(Synced())
    recorder.update(store.snapshot, store.take_changed(), (), NOW)
    assert len(made) == 500
    made.clear()
    store.apply(Upsert(endpoint_slice("shop/s7", endpoint("10.64.1.1"))))
    change = recorder.update(store.snapshot, store.take_changed(), (), NOW)
    assert made == ["s7"]
    assert list(change.services) == [b"\x02s7\x04shop\x03svc"]
    store.apply(Delete("Service", NamespacedName("shop", "s7")))
    assert recorder.update(store.snapshot, store.take_changed(), (), NOW).services == {b"\x02s7\x04shop\x03svc": None}


def test_a_new_worker_is_told_what_the_old_ones_know():
    served = Served(*OBJECTS, pods="verified")
    served.store.apply(Delete("Service", NamespacedName("shop", "heads")))
    served.store.apply(Upsert(service("shop/web", "10.110.0.99")))
    served.update()
    fresh = type(served.zone)("verified")
    fresh.apply(served.recorder.whole())
    for name in (b"\x03web\x04shop\x03svc", b"\x05heads\x04shop\x03svc", b"\x05empty\x03svc", b"\x03pod"):
        assert fresh.find(name) == served.zone.find(name)
    assert fresh.names_of(bytes((10, 64, 1, 10))) == served.zone.names_of(bytes((10, 64, 1, 10)))
    assert fresh.serial == served.zone.serial
