"""Zone transfers of the cluster's zones, and names of topology zones."""

import dns.message
import dns.rrset
import pytest
from tests.dns.cluster import OBJECTS, Served, code, texts
from tests.dns.filtered import Filtered, shown

from narthex.dns.plugins import transfer
from narthex.testing.build import endpoint, endpoint_slice, service

COREFILE = """cluster.local in-addr.arpa {
    kubernetes cluster.local in-addr.arpa {
        pods insecure
    }
    transfer cluster.local {
        to %s
    }
}"""


def server(to="*"):
    return Filtered(COREFILE % to, *OBJECTS)


def test_a_transfer_has_the_names_of_all_services():
    (message,) = server().transfer("cluster.local")
    records = shown(message.answer)
    assert records[0].split()[2] == records[-1].split()[2] == "SOA"
    assert "cluster.local. 5 NS kube-dns.kube-system.svc.cluster.local." in records
    for text in (
        "web.shop.svc.cluster.local. 5 A 10.110.0.1",
        "_http._tcp.web.shop.svc.cluster.local. 5 SRV 0 100 80 web.shop.svc.cluster.local.",
        "heads.shop.svc.cluster.local. 5 A 10.64.1.11",
        "one.heads.shop.svc.cluster.local. 5 A 10.64.1.11",
        "outside.shop.svc.cluster.local. 5 CNAME www.example.org.",
    ):
        assert text in records
    assert not [text for text in records if text.startswith(("web-b.web.", "10-64-1-1.web.", "10-64-1-1.shop.pod"))]


def test_every_record_of_a_transfer_is_what_a_query_gets():
    found = server()
    (message,) = found.transfer("cluster.local")
    for rrset in message.answer:
        if rrset.rdtype not in (6, 5):
            answer = found.ask(str(rrset.name), rrset.rdtype, transport="tcp").answer
            assert set(shown([rrset])) <= set(shown(answer)), rrset


def test_a_large_zone_takes_several_messages(monkeypatch):
    monkeypatch.setattr(transfer, "MAX_MESSAGE_RECORDS", 7)
    whole = server().transfer("cluster.local")
    assert len(whole) > 3
    assert len({message.id for message in whole}) == 1
    assert sum(len(rrset) for message in whole for rrset in message.answer) > 20


@pytest.mark.parametrize(
    ("to", "zone", "client"),
    [
        ("10.0.0.1", "cluster.local", "10.0.0.2"),
        ("*", "svc.cluster.local", "10.0.0.1"),
        ("*", "in-addr.arpa", "10.0.0.1"),
    ],
)
def test_others_are_refused(to, zone, client):
    (message,) = server(to).transfer(zone, client=client)
    assert (code(message), message.answer) == ("REFUSED", [])


def test_a_transfer_over_udp_is_refused():
    assert code(server().ask("cluster.local", "AXFR")) == "REFUSED"


@pytest.mark.parametrize(("serial", "records"), [(1, 1), (0, 20)])
def test_an_incremental_transfer_is_all_or_nothing(serial, records):
    query = dns.message.make_query("cluster.local", "IXFR")
    query.authority.append(dns.rrset.from_text("cluster.local.", 0, "IN", "SOA", f"a. b. {serial} 2 3 4 5"))
    found = server()
    made = found.dispatcher.handle(query.to_wire(), "tcp")
    (data,) = made.plugin.transfer(made.query, transfer.DnsClient("10.0.0.1", "tcp"))
    assert sum(map(len, dns.message.from_wire(data).answer)) >= records
    assert records > 1 or len(dns.message.from_wire(data).answer) == 1


def in_zones(address, zone, **fields):
    return endpoint(address, zone=zone, **fields)


ZONAL = (
    service("shop/db", "None"),
    endpoint_slice("shop/db", in_zones("10.64.1.1", "eu-1a", hostname="one"), in_zones("10.64.2.1", "eu-1b"),
                   in_zones("10.64.3.1", "corp.example"), in_zones("10.64.4.1", ""), port=5432),
    service("shop/web", "10.110.0.1"),
)  # fmt: skip
ALL = ["A 10.64.1.1", "A 10.64.2.1", "A 10.64.3.1", "A 10.64.4.1"]


@pytest.mark.parametrize(
    ("name", "type_", "rcode", "answer"),
    [
        ("eu-1a.pin._zone.db", "A", "NOERROR", ["A 10.64.1.1"]),
        ("EU-1a.pin._zone.db", "A", "NOERROR", ["A 10.64.1.1"]),
        ("corp.example.pin._zone.db", "A", "NOERROR", ["A 10.64.3.1"]),
        ("eu-1a.pin._zone.db", "SRV", "NOERROR", ["SRV 0 100 5432 one.db.shop.svc.cluster.local."]),
        ("eu-1a.pin._zone.db", "TXT", "NOERROR", []),
        ("drained.pin._zone.db", "A", "NOERROR", []),
        ("eu-1b.prefer._zone.db", "A", "NOERROR", ["A 10.64.2.1"]),
        ("drained.prefer._zone.db", "A", "NOERROR", ALL),
        ("eu-1a.avoid._zone.db", "A", "NXDOMAIN", []),
        ("pin._zone.db", "A", "NXDOMAIN", []),
        ("eu-1a.pin._zone.web", "A", "NXDOMAIN", []),
        ("eu-1a.pin._zone.nx", "A", "NXDOMAIN", []),
        ("db", "A", "NOERROR", ALL),
    ],
)
def test_names_of_topology_zones(name, type_, rcode, answer):
    served = Served(*ZONAL, zonal=True, rotate=False)
    found = served.ask(f"{name}.shop.svc.cluster.local", type_)
    assert (code(found), sorted(texts(found.answer))) == (rcode, answer)
    assert code(Served(*ZONAL).ask("eu-1a.pin._zone.db.shop.svc.cluster.local")) == "NXDOMAIN"
    assert texts(served.ask("1.1.64.10.in-addr.arpa", "PTR").answer) == ["PTR one.db.shop.svc.cluster.local."]
