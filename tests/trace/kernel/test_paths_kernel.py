"""Followed packets against the kernel: its own answer to `ip route get`, and real datagrams through real namespaces."""

import itertools
import os
import random
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import CommandError, run
from narthex.model.store import Snapshot
from narthex.trace.follow.routing import RouteQuery, check_source, look_up
from narthex.trace.follow.views import NodeView
from narthex.trace.model import Fate, PathLeaf
from narthex.trace.program.travel import KnownCluster, TraceRequest, live, travel

pytestmark = pytest.mark.kernel

PREFIX = f"nxpk{os.getpid()}"
NODE, A, B, OUT = (f"{PREFIX}-{name}" for name in ("node", "a", "b", "out"))
POD_A, POD_B, CLIENT, UPLINK = "10.244.7.2", "10.244.7.3", "203.0.113.9", "203.0.113.1"
VIP, PORT, NODE_PORT = "10.96.7.7", 80, 30080
PATIENCE = 30.0
SYSCTLS = Path("/proc/sys/net")


def ip(words: str, namespace: str = NODE) -> str:
    return run(["ip", *words.split()], namespace=namespace)


def setting(name: str, value: str, namespace: str = NODE) -> None:
    with in_namespace(namespace):
        (SYSCTLS / name).write_text(value)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A node with two pods on a bridge, and somebody outside."""
    names = (NODE, A, B, OUT)
    try:
        for name in names:
            create_namespace(name)
        ip("link add cni0 type bridge")
        ip("link set cni0 up")
        ip("addr add 10.244.7.1/24 dev cni0")
        for pod, address, port in ((A, POD_A, "va"), (B, POD_B, "vb")):
            ip(f"link add {port} type veth peer name eth0 netns {pod}")
            ip(f"link set {port} master cni0 up")
            ip(f"addr add {address}/24 dev eth0", pod)
            ip("link set eth0 up", pod)
            ip("route add default via 10.244.7.1", pod)
            setting("ipv4/conf/all/rp_filter", "0", pod)
        ip(f"link add eth0 type veth peer name eth0 netns {OUT}")
        ip("link set eth0 up")
        ip(f"addr add {UPLINK}/24 dev eth0")
        ip("link set eth0 up", OUT)
        ip(f"addr add {CLIENT}/24 dev eth0", OUT)
        ip(f"route add default via {UPLINK}", OUT)
        ip(f"link add eth1 type veth peer name eth1 netns {OUT}")
        ip("link set eth1 up")
        ip("addr add 198.51.100.1/24 dev eth1")
        ip("link set eth1 up", OUT)
        ip("addr add 198.51.100.9/24 dev eth1", OUT)
        setting("ipv4/ip_forward", "1")
        for name in ("all", "default", "eth0", "eth1", "cni0"):
            setting(f"ipv4/conf/{name}/rp_filter", "0")
        for name in (A, B, OUT):
            setting("ipv4/conf/all/accept_redirects", "0", name)
        setting("ipv4/conf/all/send_redirects", "0")
        setting("ipv4/conf/cni0/send_redirects", "0")
        yield
    finally:
        for name in names:
            delete_namespace(name)


# ---- routing -------------------------------------------------------------------------------------------------------


def view() -> NodeView:
    return live("node", NODE)


def told_by_kernel(question: RouteQuery) -> str:
    words = ["route", "get", question.destination]
    if question.iif:
        words += ["from", question.source, "iif", question.iif]
    elif question.source:
        words += ["from", question.source]
    if question.mark:
        words += ["mark", str(question.mark)]
    try:
        said = run(["ip", *words], namespace=NODE).split()
    except CommandError:
        return "lost"
    if said[0] in ("local", "broadcast", "unreachable", "blackhole", "prohibit"):
        return said[0]
    via = said[said.index("via") + 1] if "via" in said else ""
    return f"{said[said.index('dev') + 1]} {via}".strip()


def told_by_us(known: NodeView, question: RouteQuery) -> list[str]:
    found = look_up(known, question)
    if found.kind in ("unicast", "local") and question.iif:
        out = found.hops[0][0].link if found.hops else "lo"
        if check_source(known, question, out).passed is False:
            return ["lost"]
    if found.kind == "unicast":
        return [f"{hop.link} {hop.via}".strip() for hop, _ in found.hops]
    return [found.kind, "unreachable", "blackhole", "prohibit"] if found.kind == "lost" else [found.kind]


def test_random_tables_and_rules_route_as_the_kernel_does() -> None:
    draw = random.Random(20)
    links = {"cni0": "10.244.7.", "eth0": "203.0.113.", "eth1": "198.51.100."}
    made: list[str] = []
    try:
        for number in range(60):
            prefix = draw.choice((8, 12, 16, 20, 24, 28, 32))
            base = f"10.{draw.randrange(4) * 64}.{draw.randrange(4) * 64}.{draw.randrange(4) * 64}"
            value = int.from_bytes(socket.inet_aton(base), "big") >> (32 - prefix) << (32 - prefix)
            where = f"{socket.inet_ntoa(value.to_bytes(4, 'big'))}/{prefix}"
            link, net = draw.choice(list(links.items()))
            kind = draw.choice(("", "", "", "", "blackhole ", "unreachable ", "prohibit ", "throw "))
            via = f" via {net}{draw.randrange(2, 250)} dev {link}" if not kind else ""
            table = draw.choice(("main", "main", "77", "78"))
            words = f"{kind}{where}{via} table {table} metric {number + 1}"
            try:
                ip(f"route add {words}")
            except CommandError:
                continue
            made.append(f"route del {words}")
        for number, rule in enumerate(
            (
                "from 10.64.0.0/16 lookup 77",
                "fwmark 0x10/0x30 lookup 78",
                "iif eth1 lookup 77",
                "not to 10.0.0.0/9 lookup 78",
                "from 10.128.0.0/16 to 10.64.0.0/16 prohibit",
                "lookup main suppress_prefixlength 8",
            )
        ):
            ip(f"rule add pref {100 + number} {rule}")
            made.append(f"rule del pref {100 + number}")
        wrong = []
        for mode in ("0", "1", "2"):
            setting("ipv4/conf/all/rp_filter", mode)
            known = view()
            for _ in range(80):
                iif = draw.choice(("", "eth0", "eth1", "cni0"))
                question = RouteQuery(
                    destination=f"10.{draw.randrange(4) * 64}.{draw.randrange(4) * 64}.{draw.randrange(256)}",
                    source=f"10.{draw.randrange(4) * 64}.{draw.randrange(4) * 64}.{draw.randrange(1, 255)}"
                    if iif
                    else "",
                    iif=iif,
                    mark=draw.choice((0, 0, 0x10, 0x30)),
                )
                told, ours = told_by_kernel(question), told_by_us(known, question)
                if told not in ours:
                    wrong.append((mode, question, told, ours))
        assert not wrong, wrong
    finally:
        setting("ipv4/conf/all/rp_filter", "0")
        for words in made:
            ip(words)


# ---- datagrams -----------------------------------------------------------------------------------------------------


class Server:
    """Answers each datagram with its own name and the source it saw."""

    def __init__(self, namespace: str, name: str, address: str, port: int) -> None:
        with in_namespace(namespace):
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((address, port))
        self.name = name

    def serve(self) -> list[tuple[str, str]]:
        seen = []
        while select.select([self.socket], [], [], 0)[0]:
            data, peer = self.socket.recvfrom(100)
            seen.append((data.decode(), peer[0]))
            self.socket.sendto(f"{self.name} {data.decode()}".encode(), peer)
        return seen


_numbers = itertools.count(1)


def send(namespace: str, to: tuple[str, int], servers: list[Server], comes: bool, port: int = 0):
    """What the servers saw of a datagram, and who answered it: ((server, source), answered by). `comes`: wait for it."""
    with in_namespace(namespace):
        client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with client:
        if port:
            client.bind(("0.0.0.0", port))
        word = f"probe-{next(_numbers)}"
        seen, answered = None, ""
        waits = int(PATIENCE / 0.1) if comes else 3
        for round_ in range(waits):
            if round_ % 20 == 0 and seen is None:
                with suppress(OSError):
                    client.sendto(word.encode(), to)
            for server in servers:
                for said, source in server.serve():
                    if said == word:
                        seen = (server.name, source)
            if select.select([client], [], [], 0.1 if seen is None else 0.3)[0]:
                try:
                    answered = client.recvfrom(100)[1][0]
                except OSError:
                    answered = "refused"
            if seen is not None or answered:
                break
        return seen, answered


@contextmanager
def rules(text: str) -> Iterator[None]:
    run(["iptables-restore"], stdin=text, namespace=NODE)
    try:
        yield
    finally:
        run(
            ["iptables-restore"], stdin="*nat\nCOMMIT\n*filter\nCOMMIT\n*raw\nCOMMIT\n*mangle\nCOMMIT\n", namespace=NODE
        )
        run(["conntrack", "-F"], namespace=NODE)


def predicted(source: str, destination: str, **more: object) -> list[PathLeaf]:
    known = KnownCluster(views=(view(),), snapshot=Snapshot())
    journey = travel(known, TraceRequest(source=source, destination=destination, **more))
    assert sum(leaf.probability for leaf in journey.leaves()) == 1
    return list(journey.leaves())


SERVICE = """\
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:SVC - [0:0]
-A PREROUTING -d {vip}/32 -p udp -m udp --dport 80 -j SVC
-A OUTPUT -d {vip}/32 -p udp -m udp --dport 80 -j SVC
-A PREROUTING -p udp -m udp --dport 30080 -m addrtype --dst-type LOCAL -j SVC
{svc}
{post}
COMMIT
*filter
:FORWARD {policy} [0:0]
{forward}
COMMIT
"""
BOTH = (
    "-A SVC -p udp -m statistic --mode random --probability 0.50000000000 -j DNAT --to-destination 10.244.7.2:8080\n"
    "-A SVC -p udp -j DNAT --to-destination 10.244.7.3:8080"
)
ONLY_A = "-A SVC -p udp -j DNAT --to-destination 10.244.7.2:8080"
ONLY_B = "-A SVC -p udp -j DNAT --to-destination 10.244.7.3:8080"
MASQUERADE = "-A POSTROUTING -j MASQUERADE"


def service(svc: str = BOTH, post: str = "", policy: str = "ACCEPT", forward: str = "") -> str:
    return SERVICE.format(vip=VIP, svc=svc, post=post, policy=policy, forward=forward)


SENDERS = {CLIENT: OUT, "198.51.100.9": OUT, POD_A: A, POD_B: B, UPLINK: NODE}
CASES = {
    "outside, node port": (CLIENT, f"{UPLINK}:{NODE_PORT}/udp", service(), {}, ""),
    "outside, node port, masqueraded": (CLIENT, f"{UPLINK}:{NODE_PORT}/udp", service(post=MASQUERADE), {}, ""),
    "a pod, another pod": (POD_A, f"{VIP}:80/udp", service(ONLY_B), {}, ""),
    "a pod, another pod, br_netfilter": (POD_A, f"{VIP}:80/udp", service(ONLY_B), {"bridge/bridge-nf-call-iptables": "1"}, ""),
    "a pod, another pod, masqueraded": (POD_A, f"{VIP}:80/udp", service(ONLY_B, MASQUERADE), {}, ""),
    "a pod, itself, masqueraded": (POD_A, f"{VIP}:80/udp", service(ONLY_A, MASQUERADE), {}, ""),
    "a pod, itself, br_netfilter, no hairpin": (
        POD_A, f"{VIP}:80/udp", service(ONLY_A, MASQUERADE), {"bridge/bridge-nf-call-iptables": "1"}, "",
    ),
    "a pod, itself, br_netfilter, hairpin": (
        POD_A, f"{VIP}:80/udp", service(ONLY_A, MASQUERADE), {"bridge/bridge-nf-call-iptables": "1"}, "hairpin",
    ),
    "the node itself": (UPLINK, f"{VIP}:80/udp", service(ONLY_A), {}, ""),
    "no forwarding": (CLIENT, f"{UPLINK}:{NODE_PORT}/udp", service(), {"ipv4/ip_forward": "0"}, ""),
    "forward drops": (CLIENT, f"{UPLINK}:{NODE_PORT}/udp", service(policy="DROP"), {}, ""),
    "forward lets new ones pass and no answers": (
        CLIENT, f"{UPLINK}:{NODE_PORT}/udp", service(ONLY_B, policy="DROP", forward="-A FORWARD -m conntrack --ctstate NEW -j ACCEPT"), {}, "",
    ),
    "a rule rejects": (CLIENT, f"{UPLINK}:{NODE_PORT}/udp", service(forward="-A FORWARD -p udp -j REJECT"), {}, ""),
    "strict source check": (
        "198.51.100.9", f"{VIP}:80/udp", service(), {"ipv4/conf/all/rp_filter": "1", "ipv4/ip_forward": "1"}, "asymmetric",
    ),
    "loose source check": (
        "198.51.100.9", f"{VIP}:80/udp", service(), {"ipv4/conf/all/rp_filter": "2", "ipv4/ip_forward": "1"}, "asymmetric",
    ),
    "a blackhole route": (CLIENT, f"{UPLINK}:{NODE_PORT}/udp", service(ONLY_B), {}, "blackhole"),
}  # fmt: skip


@contextmanager
def place(settings: dict[str, str], extra: str) -> Iterator[None]:
    before = {}
    for name, value in settings.items():
        with in_namespace(NODE):
            before[name] = (SYSCTLS / name).read_text().strip()
        setting(name, value)
    done, undo = {
        "hairpin": ("link set va type bridge_slave hairpin on", "link set va type bridge_slave hairpin off"),
        # What comes in by eth0 with this source would be answered by eth1.
        "asymmetric": ("route add 192.0.2.0/24 dev eth1", "route del 192.0.2.0/24 dev eth1"),
        "blackhole": ("route add blackhole 10.244.7.3/32", "route del blackhole 10.244.7.3/32"),
        "": ("link show lo", "link show lo"),
    }[extra]
    ip(done)
    if extra == "asymmetric":
        ip("route add 10.96.0.0/16 via 203.0.113.1", OUT)
    try:
        yield
    finally:
        if extra == "asymmetric":
            ip("route del 10.96.0.0/16 via 203.0.113.1", OUT)
        ip(undo)
        for name, value in before.items():
            setting(name, value)


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_does_what_was_predicted(case: str) -> None:
    source, destination, text, settings, extra = CASES[case]
    servers = [Server(A, "a", POD_A, 8080), Server(B, "b", POD_B, 8080)]
    named = {POD_A: "a", POD_B: "b"}
    host, _, rest = destination.partition(":")
    to = (host, int(rest.partition("/")[0]))
    bound = source if extra == "asymmetric" else ""
    setting("bridge/bridge-nf-call-iptables", "0")
    try:
        with rules(text), place(settings, extra):
            # Neighbours that the bridge has not met yet would be asked for while the view is taken.
            for pod in (A, B):
                run(["ip", "neigh", "flush", "all"], namespace=pod)
                with in_namespace(pod), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hello:
                    hello.sendto(b"x", ("10.244.7.1", 9))
            wish = {"node": "node", "iif": "eth0"} if bound else {}
            leaves = predicted(source, destination, **wish)
            ends = {leaf.end.fate for leaf in leaves}
            comes = ends == {Fate.DELIVERED}
            seen, answered = send_from(SENDERS[source], bound, to, servers, comes)
            if not comes:
                assert seen is None, (leaves[0].end.reason, seen)
                return
            assert seen is not None, f"predicted {leaves[0].end}, and nobody saw it"
            met = [leaf for leaf in leaves if named.get(leaf.end.address) == seen[0]]
            assert met, (seen, [leaf.end for leaf in leaves])
            assert seen[1] == met[0].end.source
            reply = met[0].end.reply
            assert reply is not None
            good = reply.end is not None and reply.end.fate is Fate.DELIVERED
            assert (answered == host) is good, (answered, reply.end)
    finally:
        for server in servers:
            server.socket.close()


def send_from(namespace: str, bound: str, to: tuple[str, int], servers: list[Server], comes: bool):
    if not bound:
        return send(namespace, to, servers, comes)
    # A source of its own, sent out by the other link.
    with in_namespace(namespace):
        client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with client:
        client.bind((bound, 0))
        word = f"probe-{next(_numbers)}"
        for round_ in range(int(PATIENCE / 0.1) if comes else 3):
            if round_ % 20 == 0:
                client.sendto(word.encode(), to)
            for server in servers:
                for said, source in server.serve():
                    if said == word:
                        got = select.select([client], [], [], 0.5)[0]
                        return (server.name, source), client.recvfrom(100)[1][0] if got else ""
            select.select([client], [], [], 0.1)
    return None, ""


def test_a_known_connection_goes_where_it_went() -> None:
    """Its rules are gone and others lead elsewhere; the kernel keeps to its entry, and so do we, with the port."""
    servers = [Server(A, "a", POD_A, 8080), Server(B, "b", POD_B, 8080)]
    try:
        with rules(service(ONLY_A)):
            seen, _ = send(OUT, (VIP, 80), servers, comes=True, port=40404)
            assert seen is not None
            assert seen[0] == "a"
            run(["iptables-restore"], stdin=service(ONLY_B), namespace=NODE)
            (old,) = predicted(CLIENT, f"{VIP}:80/udp", source_port=40404)
            (new,) = predicted(CLIENT, f"{VIP}:80/udp")
            assert (old.end.address, new.end.address) == (POD_A, POD_B)
            seen, _ = send(OUT, (VIP, 80), servers, comes=True, port=40404)
            assert seen is not None
            assert seen[0] == "a"
            seen, _ = send(OUT, (VIP, 80), servers, comes=True)
            assert seen is not None
            assert seen[0] == "b"
    finally:
        for server in servers:
            server.socket.close()
