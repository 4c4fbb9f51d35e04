"""Counters of new connections in what tools print."""

import json

import msgspec
import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.proxy.backends.sockets.document import SocketConnections, SocketDocument, SocketFrontend
from narthex.trace.follow.views import TrackedConnection
from narthex.trace.node.layout import BundleManifest
from narthex.trace.program.bundle import write_file
from narthex.trace.reports.counting import (
    ConnectionCounter,
    CounterReading,
    count,
    of_connections,
    of_iptables,
    of_ipvs,
    of_nft,
    ordered,
    rows,
)

IPTABLES = """\
*nat
:PREROUTING ACCEPT [0:0]
[9:540] -A KUBE-SERVICES -d 10.96.0.9/32 -p tcp -m comment --comment "shop/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-AAAA
[1:60] -A KUBE-NODEPORTS -p tcp -m comment --comment "shop/web:http" -m tcp --dport 30080 -j KUBE-SVC-AAAA
[6:360] -A KUBE-SVC-AAAA -m comment --comment "shop/web:http -> 10.244.1.7:8080" -m statistic --mode random --probability 0.5 -j KUBE-SEP-ONE
[4:240] -A KUBE-SVC-AAAA -j KUBE-SEP-TWO
[6:360] -A KUBE-SEP-ONE -p tcp -m comment --comment "shop/web:http" -m tcp -j DNAT --to-destination 10.244.1.7:8080
[4:240] -A KUBE-SEP-TWO -p tcp -m tcp -j DNAT --to-destination 10.244.2.7:8080
[3:180] -A DOCKER -p tcp -m tcp --dport 5000 -j DNAT --to-destination 172.17.0.2:5000
COMMIT
"""
NFT = """\
table ip narthex {
\tmap services {
\t\ttype ipv4_addr . inet_proto . inet_service : verdict
\t\tcounter
\t\telements = { 10.96.0.9 . tcp . 80 counter packets 9 bytes 540 : goto pick-2,
\t\t\t     10.96.0.10 . udp . 53 counter packets 2 bytes 120 : goto pick-1 }
\t}
\tmap endpoints {
\t\ttype ipv4_addr . inet_proto . inet_service . integer : ipv4_addr . inet_service
\t\telements = { 10.96.0.9 . tcp . 80 . 0 counter packets 5 bytes 300 : 10.244.1.7 . 8080,
\t\t\t     10.96.0.9 . tcp . 80 . 1 counter packets 4 bytes 240 : 10.244.2.7 . 8080 }
\t}
}
"""
IPVS = """\
IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port               Conns   InPkts  OutPkts  InBytes OutBytes
  -> RemoteAddress:Port
TCP  10.96.0.9:80                       10      100      100    10000    10000
  -> 10.244.1.7:8080                     6       60       60     6000     6000
  -> 10.244.2.7:8080                     4       40       40     4000     4000
UDP  [fd00::a]:53                        3        3        3      100      100
  -> [fd01::7]:53                        3        3        3      100      100
"""
NAMES = {("10.96.0.9", "tcp", 80): "shop/web:http", ("", "tcp", 30080): "shop/web:http"}


def by_endpoint(counts) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for one in counts:
        found[one.service, one.endpoint] = found.get((one.service, one.endpoint), 0) + one.connections
    return found


def test_counters_of_iptables_rules_with_names_from_their_comments() -> None:
    assert by_endpoint(of_iptables(IPTABLES)) == {
        ("shop/web:http", "10.244.1.7:8080"): 6,
        ("shop/web:http", "10.244.2.7:8080"): 4,
    }


def test_counters_of_nft_elements() -> None:
    assert by_endpoint(of_nft(NFT, NAMES)) == {
        ("shop/web:http", ""): 9,
        ("10.96.0.10:53/udp", ""): 2,
        ("shop/web:http", "10.244.1.7:8080"): 5,
        ("shop/web:http", "10.244.2.7:8080"): 4,
    }


def test_counters_of_ipvs() -> None:
    assert by_endpoint(of_ipvs(IPVS, NAMES)) == {
        ("shop/web:http", "10.244.1.7:8080"): 6,
        ("shop/web:http", "10.244.2.7:8080"): 4,
        ("[fd00::a]:53/udp", "[fd01::7]:53"): 3,
    }


def connection(source: str, source_port: int, to: str, port: int, reply: str, reply_port: int) -> TrackedConnection:
    return TrackedConnection(
        protocol="tcp",
        source=source,
        source_port=source_port,
        destination=to,
        port=port,
        reply_source=reply,
        reply_source_port=reply_port,
        reply_destination=source,
    )


def test_connections_through_services_count_and_others_do_not() -> None:
    held = [
        connection("10.0.0.9", 1, "10.96.0.9", 80, "10.244.1.7", 8080),
        connection("10.0.0.9", 2, "10.0.0.1", 30080, "10.244.1.7", 8080),
        connection("10.0.0.9", 3, "10.0.0.1", 22, "10.0.0.1", 22),
    ]
    assert by_endpoint(of_connections(held, NAMES)) == {("shop/web:http", "10.244.1.7:8080"): 2}


@pytest.mark.parametrize(
    ("rules", "nft", "ipvs", "source"),
    [
        ((IPTABLES,), NFT, "", "counters of iptables rules"),
        ((), NFT, IPVS, "counters of nftables elements"),
        ((), "", IPVS, "counters of IPVS"),
        ((), "", "", "the connection table"),
    ],
)
def test_the_best_source_there_is(rules, nft, ipvs, source) -> None:
    assert count(rules, nft, ipvs, lambda: (), NAMES).source.startswith(source)


def look(*figures: int) -> CounterReading:
    return CounterReading(
        source="x",
        counts=tuple(ConnectionCounter(f"c{n}", f"s{n % 2}", f"e{n}", figure) for n, figure in enumerate(figures)),
    )


def test_rates_between_two_looks_and_counters_that_begin_anew() -> None:
    found = rows(look(10, 20, 5), look(4, 20, 90), 2.0)
    assert [(row.service, row.endpoint, row.connections, row.per_second) for row in found] == [
        ("s0", "", 15, 5.5),
        ("s0", "e0", 10, 3.0),
        ("s0", "e2", 5, 2.5),
        ("s1", "", 20, 0.0),
        ("s1", "e1", 20, 0.0),
    ]
    assert [row.per_second for row in rows(look(1), None, 0.0)] == [None, None]


def test_orders() -> None:
    found = rows(look(10, 50, 5), look(0, 50, 0), 1.0)
    assert [row.service for row in ordered(found, "rate")] == ["s0", "s0", "s0", "s1", "s1"]
    assert [row.service for row in ordered(found, "total")] == ["s1", "s1", "s0", "s0", "s0"]
    assert [row.endpoint for row in ordered(found, "name")] == ["", "e0", "e2", "", "e1"]


def test_the_command_over_a_bundle(tmp_path) -> None:
    write_file(tmp_path / "b.tgz", BundleManifest(node="n", writer="test"), {"rules/iptables-nft.txt": IPTABLES})
    done = CliRunner().invoke(main, ["top", "--bundle", str(tmp_path / "b.tgz"), "-o", "json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert data["source"] == "counters of iptables rules"
    assert [(row["service"], row["endpoint"], row["connections"]) for row in data["rows"]] == [
        ("shop/web:http", "", 10),
        ("shop/web:http", "10.244.1.7:8080", 6),
        ("shop/web:http", "10.244.2.7:8080", 4),
    ]
    told = CliRunner().invoke(main, ["top", "--bundle", str(tmp_path / "b.tgz"), "--services"]).output
    assert told.splitlines()[0] == "from counters of iptables rules"
    assert "10.244.1.7" not in told


def test_connections_of_sockets_are_added_to_those_of_rules() -> None:
    front = SocketFrontend(address="10.96.0.9", port=80, protocol="TCP", pods="cluster", node="cluster", number=3)
    sockets = SocketDocument(
        frontends=(front, msgspec.structs.replace(front, address="10.96.0.10", number=4)),
        connections=(
            SocketConnections(number=3, address="10.244.1.7", port=8080, connections=5),
            SocketConnections(number=4, address="10.244.1.7", port=8080, connections=1),
            SocketConnections(number=9, address="10.244.1.7", port=8080, connections=7),
        ),
        ejected=(("10.244.1.7", 8080), ("10.244.1.8", 8080)),
    )
    alone = count((), "", "", None, NAMES, sockets)
    assert alone.source == "counters of socket load balancing"
    found = {(row.service, row.endpoint): (row.connections, row.ejected) for row in rows(alone, None, 0.0)}
    assert found == {
        ("shop/web:http", ""): (5, False),
        ("shop/web:http", "10.244.1.7:8080"): (5, True),
        ("10.96.0.10:80/tcp", ""): (1, False),
        ("10.96.0.10:80/tcp", "10.244.1.7:8080"): (1, True),
    }
    both = count((), NFT, "", None, NAMES, sockets)
    assert both.source == "counters of nftables elements and of socket load balancing"
    assert len(both.counts) == len(count((), NFT, "", None, NAMES).counts) + 4
