"""`narthex dns` asked by programs that people have: dig, kdig, drill, glibc."""

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time

import dns.message
import msgspec
import pytest
import yaml
from tests.dns.cluster import OBJECTS
from tests.dns.kernel.dns_server import ADDRESSES, COREFILE, DnsServer

from narthex.lab.encode import encode
from narthex.linux.namespaces import in_namespace
from narthex.model.objects import EndpointSlice, Pod
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import endpoint, endpoint_slice, service

pytestmark = pytest.mark.kernel
Z = "shop.svc.cluster.local"
WEB = f"web.{Z}"


def labelled(*objects):
    """Slices with the label that names their Service, as they are written down."""
    return [
        msgspec.structs.replace(each, labels=(("kubernetes.io/service-name", each.service_name),))
        if isinstance(each, EndpointSlice)
        else each
        for each in objects
        if not isinstance(each, Pod)
    ]


def write(server, *objects):
    text = "---\n".join(yaml.safe_dump(encode(each)) for each in labelled(*objects))
    fresh = server.folder / "fresh"
    fresh.write_text(text)
    fresh.rename(server.manifests / "all.yaml")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = DnsServer(tmp_path_factory.mktemp("dns"), "m")
    try:
        heads = [endpoint(f"10.64.{n // 100}.{n % 100 + 1}") for n in range(200)]
        crowd = [service("shop/crowd", "None"), endpoint_slice("shop/crowd", *heads)]
        write(made, *OBJECTS, *crowd)
        yield made.start().ready()
    finally:
        made.end()


@pytest.fixture
def fresh(tmp_path):
    made = DnsServer(tmp_path, "f")
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("transport", ["+notcp", "+tcp"])
def test_dig(server, address, transport):
    assert server.dig(WEB, "A", transport, server=address) == ["10.110.0.1"]
    assert server.dig(f"both.{Z}", "AAAA", transport, server=address) == ["fd6e::2"]
    assert server.dig(f"_http._tcp.web.{Z}", "SRV", transport, server=address) == [f"0 100 80 {WEB}."]
    assert server.run("dig", f"@{address}", "-x", "10.110.0.1", "+short", transport).strip() == f"{WEB}."


def test_dig_comes_back_by_tcp_for_what_is_long(server):
    assert len(server.dig(f"crowd.{Z}", "A", "+noedns", "+ignore")) in range(1, 200)
    assert len(server.dig(f"crowd.{Z}", "A", "+noedns")) == 200


def test_questions_are_written_down(fresh):
    """Plugin `log`: each question has its line, also one that was asked before, over UDP and TCP."""
    fresh.corefile.write_text(
        COREFILE.replace("    errors\n", "    errors\n    log\n    hosts {\n        192.0.2.9 far.example\n    }\n")
    )
    write(fresh, *OBJECTS)
    fresh.start().ready()
    asked = [(WEB, "+notcp"), (WEB, "+notcp"), (WEB, "+tcp"), (f"nope.{Z}", "+notcp"), ("far.example", "+notcp")]
    for name, transport in asked:
        fresh.dig(name, "A", transport)
    for name, times in ((WEB, 3), (f"nope.{Z}", 1), ("far.example", 1)):
        fresh.wait(lambda name=name, times=times: fresh.log.count(f'"A IN {name}. ') == times, f"lines for {name}")
    assert f"A IN {WEB}. tcp " in fresh.log and "NXDOMAIN qr,aa,rd" in fresh.log


def test_dig_search_list(server):
    said = server.run(
        "dig", f"@{ADDRESSES[0]}", "web.shop", "+search", "+short", "+domain=svc.cluster.local", "+ndots=5"
    )
    assert said.strip() == "10.110.0.1"


@pytest.mark.parametrize("program", ["kdig", "drill"])
def test_other_programs(server, program):
    said = server.run(program, f"@{ADDRESSES[0]}", WEB, "A")
    assert "10.110.0.1" in said
    assert "NOERROR" in said
    assert "NXDOMAIN" in server.run(program, f"@{ADDRESSES[0]}", f"nope.{Z}", "A")


def test_kdig_asks_much_over_one_connection(server):
    names = [part for _ in range(20) for part in (WEB, f"heads.{Z}", f"nope.{Z}")]
    said = server.run("kdig", f"@{ADDRESSES[1]}", "+tcp", "+keepopen", "+short", *names)
    assert said.split().count("10.110.0.1") == 20


GETADDRINFO = """
import json, socket, sys
found = []
for name in sys.argv[1:]:
    try:
        found.append(sorted({each[4][0] for each in socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)}))
    except socket.gaierror as error:
        found.append(error.errno)
print(json.dumps(found))
"""


def test_glibc_in_a_pods_namespace(server, tmp_path):
    """A and AAAA at once, out of one socket, with the resolv.conf that a kubelet writes (row S22)."""
    lines = "search shop.svc.cluster.local svc.cluster.local cluster.local", "options ndots:5"
    resolv = tmp_path / "resolv.conf"
    resolv.write_text("\n".join((f"nameserver {ADDRESSES[0]}", *lines, "")))
    names = ["web", "web.shop", "both", "heads.shop.svc", "nope", "inside"]
    program = tmp_path / "ask.py"
    program.write_text(GETADDRINFO)
    hosts = tmp_path / "nsswitch.conf"
    hosts.write_text("hosts: dns\n")
    bound = f"mount --bind {resolv} /etc/resolv.conf && mount --bind {hosts} /etc/nsswitch.conf"
    said = server.run("unshare", "-m", "sh", "-c", f'{bound} && exec "$@"', "sh", sys.executable, str(program), *names)
    web, dotted, both, heads, nope, inside = json.loads(said)
    assert web == dotted == inside == ["10.110.0.1"]
    assert both == ["10.110.0.2", "fd6e::2"]
    assert heads == ["10.64.1.10", "10.64.1.11", "fd64:0:0:1::"]
    # Nobody is asked for names of the world here, and refuses the last one of the search.
    assert nope == socket.EAI_AGAIN


def connection(server, address=ADDRESSES[0]):
    with in_namespace(server.namespace):
        return socket.create_connection((address, 53), timeout=30)


def framed(*names):
    packets = [dns.message.make_query(name, "A", id=number).to_wire() for number, name in enumerate(names)]
    return b"".join(struct.pack(">H", len(packet)) + packet for packet in packets)


def received(sock):
    """One message, as it came."""

    def exactly(size):
        held = b""
        while len(held) < size:
            data = sock.recv(size - len(held))
            if not data:
                raise EOFError
            held += data
        return held

    return exactly(struct.unpack(">H", exactly(2))[0])


def receive(sock):
    return dns.message.from_wire(received(sock))


def test_tcp_in_pieces_and_in_heaps(server):
    with connection(server) as sock:
        data = framed(WEB, f"heads.{Z}", f"nope.{Z}")
        for byte in data[:40]:
            sock.sendall(bytes((byte,)))
        sock.sendall(data[40:] + framed(*[WEB] * 200))
        assert [receive(sock).id for _ in range(203)] == [0, 1, 2, *range(200)]


def test_tcp_more_than_is_sent_at_once(server):
    """A heap whose answers are a megabyte: none is forgotten while others wait to be sent."""
    with connection(server) as sock:
        sock.sendall(framed(*[f"crowd.{Z}"] * 400))
        messages = [received(sock) for _ in range(400)]
    assert [int.from_bytes(message[:2], "big") for message in messages] == list(range(400))
    assert len(dns.message.from_wire(messages[-1]).answer[0]) == 200
    assert {len(message) for message in messages} == {len(messages[-1])}


@pytest.mark.parametrize(
    "data",
    [b"\0\0", b"\0\x01a", b"\xff\xff" + b"\xc0" * 65535, b"\0\x0c" + bytes(12), b"\0\x14" + b"\xc0\x0c" * 10],
    ids=["empty", "one", "longest", "no question", "loops"],
)
def test_tcp_garbage_does_not_stop_the_next_question(server, data):
    with connection(server) as sock:
        sock.sendall(data + framed(WEB))
        while (said := receive(sock)).rcode() != dns.rcode.NOERROR:
            assert not said.answer


def test_udp_garbage_ends_no_worker(server):
    rng = random.Random(7)
    seeds = [dns.message.make_query(name, "A").to_wire() for name in (WEB, f"nope.{Z}", f"crowd.{Z}", "x.y.z")]
    before = server.workers
    with in_namespace(server.namespace):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sock:
        sock.connect((ADDRESSES[0], 53))
        for seed in seeds:
            for length in range(len(seed) + 1):
                sock.send(seed[:length])
        for _ in range(3000):
            data = bytearray(rng.choice(seeds))
            data[rng.randrange(len(data))] = rng.randrange(256)
            sock.send(data + rng.randbytes(rng.choice((0, 0, 1, 5000))))
    for _ in range(10):
        assert server.dig(WEB) == ["10.110.0.1"]
    assert server.workers == before


def test_a_slow_reader_holds_up_nobody(server):
    with connection(server) as slow:
        slow.setblocking(False)
        question = framed(*[f"crowd.{Z}"] * 50)
        sent = 0
        # It asks and asks and reads nothing, until it is not read any more either.
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                sent += slow.send(question)
            except BlockingIOError:
                break
        assert sent
        assert server.dig(WEB, "A", "+tcp") == ["10.110.0.1"]
        assert server.dig(WEB) == ["10.110.0.1"]


def test_many_connections_of_one_client_are_bounded(server):
    socks = [connection(server) for _ in range(200)]
    try:
        # A connection may be answered and then closed for a later one, so only the second round counts.
        for _ in range(2):
            answered = 0
            for sock in socks:
                try:
                    sock.sendall(framed(WEB))
                    answered += bool(receive(sock))
                except (EOFError, OSError):
                    continue
        # Sixty-four for each of two workers.
        assert 0 < answered <= 128
    finally:
        for sock in socks:
            sock.close()
    server.wait(lambda: server.dig(WEB, "A", "+tcp") == ["10.110.0.1"], "room for others")


def test_metrics_and_readiness(server):
    server.dig(WEB)
    server.dig(f"nope.{Z}")
    status, text = server.http(9153, "/metrics")
    assert status == 200
    for part in (
        'coredns_dns_requests_total{family="1",proto="udp",server="dns://",type="A",view="",zone="."}',
        'coredns_dns_responses_total{plugin="kubernetes",rcode="NXDOMAIN",server="dns://",view="",zone="."}',
        "coredns_dns_request_duration_seconds_bucket",
        'coredns_dns_response_size_bytes_bucket{le="511.0",proto="udp"',
        "coredns_panics_total 0.0",
        "coredns_build_info",
        "narthex_dns_workers 2.0",
        "narthex_dns_synced 1.0",
    ):
        assert part in text, part
    assert server.http(8181, "/ready") == (200, "OK")
    assert server.http(8080, "/health") == (200, "OK")
    assert server.http(8181, "/other")[0] == 404


def test_a_worker_that_dies_is_made_anew(server):
    before = server.workers
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    server.wait(lambda: len(server.workers) == 2 and not {*before} & {*server.workers}, "other workers")
    # All that is known now is known to workers that were told when they were made.
    for _ in range(20):
        server.wait(lambda: server.dig(WEB) == ["10.110.0.1"], "an answer")
    server.wait(lambda: "coredns_panics_total 2.0" in server.http(9153, "/metrics")[1], "both deaths counted")


def test_edits_of_manifests_and_of_the_corefile(fresh):
    write(fresh, service("shop/web", "10.110.0.1"))
    fresh.start().ready()
    assert fresh.dig(WEB) == ["10.110.0.1"]
    write(fresh, service("shop/web", "10.110.0.2"), service("shop/more", "10.110.0.3"))
    fresh.wait(lambda: fresh.dig(WEB) == ["10.110.0.2"] and fresh.dig(f"more.{Z}") == ["10.110.0.3"], "the edit")
    fresh.corefile.write_text("nonsense {")
    fresh.wait(lambda: "the previous one stays in force" in fresh.log, "a word about it")
    assert fresh.dig(WEB) == ["10.110.0.2"]
    asked = fresh.http(9153, "/metrics")[1].count("coredns_dns_requests_total{")
    fresh.corefile.write_text(COREFILE.replace("cluster.local", "corp.example").replace("lameduck 0s", "lameduck 1s"))
    fresh.wait(lambda: fresh.dig("web.shop.svc.corp.example") == ["10.110.0.2"], "the new zone")
    assert fresh.dig(WEB) == []
    assert fresh.http(9153, "/metrics")[1].count("coredns_dns_requests_total{") >= asked
    fresh.process.send_signal(signal.SIGTERM)
    fresh.wait(lambda: fresh.http(8181, "/ready")[0] == 503, "the end of readiness")
    assert fresh.dig("web.shop.svc.corp.example") == ["10.110.0.2"]
    assert fresh.process.wait(60) == 0


def test_a_port_that_is_taken(fresh):
    holder = "import socket,time; s=socket.socket(2,2); s.bind(('0.0.0.0',53)); print('x',flush=True); time.sleep(60)"
    with in_namespace(fresh.namespace):
        taker = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE)
    try:
        taker.stdout.readline()
        fresh.start()
        assert fresh.process.wait(60) == 1
        assert "UDP 0.0.0.0 port 53; another server uses it" in fresh.log
    finally:
        taker.kill()
        taker.wait()
        taker.stdout.close()


@pytest.fixture
def api(fresh):
    with in_namespace(fresh.namespace):
        server = FaultyApiServer()
        server.__enter__()
    try:
        yield server
    finally:
        server.__exit__(None, None, None)


def test_an_api_server_that_goes_and_comes_back(fresh, api):
    """Rows S12 to S15: answers go on, readiness and metrics tell the age, new names come without a restart."""
    api.put(*labelled(*OBJECTS))
    api.stop()
    fresh.corefile.write_text(COREFILE.replace("pods insecure", "startup_timeout 1s"))
    fresh.start(f"--master={api.url}", "--workers=1")
    fresh.wait(lambda: fresh.http(8181, "/ready") == (503, "kubernetes"), "what is missing")
    fresh.ready()
    assert "SERVFAIL" in fresh.run("kdig", f"@{ADDRESSES[0]}", WEB)
    assert fresh.dig("dns-version.cluster.local", "TXT") == ['"1.1.0"']
    with in_namespace(fresh.namespace):
        api.start()
    fresh.wait(lambda: fresh.http(8181, "/ready") == (200, "OK"), "readiness")
    assert fresh.dig(WEB) == ["10.110.0.1"]
    assert fresh.dig(f"heads.{Z}") == ["10.64.1.10", "10.64.1.11"]
    api.stop()
    fresh.wait(lambda: "last message from the API server" in fresh.http(8181, "/ready")[1], "a word about the age")
    assert fresh.http(8181, "/ready")[0] == 200
    assert fresh.dig(WEB) == ["10.110.0.1"]
    assert "narthex_dns_heard_age_seconds" in fresh.http(9153, "/metrics")[1]
    api.put(service("shop/later", "10.110.0.88"))
    with in_namespace(fresh.namespace):
        api.start()
    fresh.wait(lambda: fresh.dig(f"later.{Z}") == ["10.110.0.88"], "the name that is new")


WORLD = """
world.:5300 {
    bind 127.0.0.1
    hosts {
        192.0.2.7 www.world
    }
}
"""


def test_the_world_by_others_and_not_for_everybody(fresh):
    """Rows D17 and S6: an ExternalName's end, and recursion for private networks only."""
    fresh.run("ip", "address", "add", "198.51.100.9/32", "dev", "lo")
    fresh.corefile.write_text(COREFILE.replace("loadbalance", "forward world 127.0.0.1:5300\n    cache 30") + WORLD)
    write(fresh, service("shop/outside", type="ExternalName", external_name="www.world"))
    fresh.start().ready()
    assert fresh.dig("www.world") == ["192.0.2.7"]
    for more in ("+notcp", "+tcp"):
        assert fresh.dig(f"outside.{Z}", "A", more) == ["192.0.2.7", "www.world."]
    assert "REFUSED" in fresh.run("kdig", f"@{ADDRESSES[0]}", "www.elsewhere")
    assert "REFUSED" in fresh.run("dig", "-b", "198.51.100.9", f"@{ADDRESSES[0]}", "www.world")
    said = fresh.run("dig", "-b", "198.51.100.9", f"@{ADDRESSES[0]}", f"outside.{Z}", "CNAME", "+short")
    assert said == "www.world.\n"
    text = fresh.http(9153, "/metrics")[1]
    for part in ('plugin="acl",rcode="REFUSED"', 'plugin="forward",rcode="NOERROR"', "coredns_cache_hits_total"):
        assert part in text, part
