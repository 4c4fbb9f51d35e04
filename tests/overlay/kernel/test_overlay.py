"""The overlay between nodes of namespaces: entries, packets, repairs, other people's entries, other people's faults."""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import threading
import time

import msgspec
import pytest
from tests.overlay.kernel.overlay_place import WAIT, OverlayPlace, manifest

from narthex.kube.access import Access
from narthex.linux.links import ip_batch
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run
from narthex.model.decode.objects import load
from narthex.model.store import Synced, Upsert
from narthex.overlay.program import loop
from narthex.overlay.program.checksums import ChecksumVerdict, offloaded
from narthex.overlay.program.part import OverlayOrigin, api_origin
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.load import until

pytestmark = pytest.mark.kernel
AT_ONCE = 20.0
"""Seconds that a repair may take on a busy machine; what it took is printed. The periodic look is switched off."""
NEVER = 100_000.0
VXLAN, HOST_GW = {"Type": "vxlan"}, {"Type": "host-gw"}


@pytest.fixture
def place(tmp_path, request):
    with OverlayPlace(tmp_path, **getattr(request, "param", {})) as made:
        yield made


def took(what, condition):
    begun = time.monotonic()
    until(condition, what, AT_ONCE)
    print(f"{what}: {(time.monotonic() - begun) * 1000:.0f} ms")


@pytest.mark.parametrize("backend", [VXLAN, HOST_GW], ids=["vxlan", "host-gw"])
def test_all_pods_reach_each_other_and_go_on_when_the_process_is_killed(tmp_path, backend):
    with OverlayPlace(tmp_path, Backend=backend) as place, place.process("a") as process:
        place.start("b", "c")
        environment = tmp_path / "a.env"
        until(environment.exists, "subnet.env", AT_ONCE)
        size = 1450 if backend is VXLAN else 1500
        assert environment.read_text() == (
            f"FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU={size}\nFLANNEL_IPMASQ=true\n"
        )
        assert place.reach(1450) == set()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert place.reach(1450) == set()
        with pytest.raises(OSError, match="too long"):
            place.udp("a", 1).sendto(bytes(1450 - 28 + 1), (place.address("b", 1), 7))


def test_entries_have_flannels_form(place):
    place.start()
    macs = {name: place.ip(name, "-br link show flannel.1")[0].split()[2] for name in place.nodes}
    # As the node's neighbours have it, and as the node itself has it.
    assert "10.244.3.0/24 via 10.244.3.0 dev flannel.1 onlink" in place.ip("a", "route")
    assert "10.244.3.0/24 dev cni0 proto kernel scope link src 10.244.3.1" in place.ip("c", "route")
    assert f"10.244.3.0 dev flannel.1 lladdr {macs['c']} PERMANENT" in place.ip("a", "neigh")
    assert sorted(place.fdb("a")) == sorted(
        f"{macs[name]} dev flannel.1 dst 192.0.2.{number} self permanent" for name, number in (("b", 2), ("c", 3))
    )
    shown = " ".join(place.ip("a", "-d addr show flannel.1"))
    assert "mtu 1450" in shown
    assert "inet 10.244.1.0/32 scope global flannel.1" in shown
    assert "vxlan id 1 local 192.0.2.1 dev eth0 srcport 0 0 dstport 8472 nolearning" in shown
    saved = run(["iptables-save"], namespace=place.ns("a"))
    chain = [line for line in saved.splitlines() if line.startswith("-A FLANNEL-") or "-j FLANNEL-" in line]
    said, own, pods = '-m comment --comment "flanneld masq"', "10.244.1.0/24", "10.244.0.0/16"
    assert sorted(chain) == sorted(
        [
            f"-A POSTROUTING {said} -j FLANNEL-POSTRTG",
            f"-A FLANNEL-POSTRTG {said} -m mark --mark 0x4000/0x4000 -j RETURN",
            f"-A FLANNEL-POSTRTG -s {own} -d {pods} {said} -j RETURN",
            f"-A FLANNEL-POSTRTG -s {pods} -d {own} {said} -j RETURN",
            f"-A FLANNEL-POSTRTG ! -s {pods} -d {own} {said} -j RETURN",
            f"-A FLANNEL-POSTRTG -s {pods} ! -d 224.0.0.0/4 {said} -j MASQUERADE --random-fully",
            f"-A FLANNEL-POSTRTG ! -s {pods} -d {pods} {said} -j MASQUERADE --random-fully",
            '-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD',
            f'-A FLANNEL-FWD -s {pods} -m comment --comment "flanneld forward" -j ACCEPT',
            f'-A FLANNEL-FWD -d {pods} -m comment --comment "flanneld forward" -j ACCEPT',
        ]
    )


@pytest.fixture(params=["nft", "legacy"])
def variant(request, tmp_path, monkeypatch):
    """What the plain names of iptables are."""
    for plain in ("iptables", "ip6tables"):
        for program in (plain, f"{plain}-save", f"{plain}-restore"):
            (tmp_path / program).symlink_to(shutil.which(program.replace(plain, f"{plain}-{request.param}")))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return request.param


@pytest.mark.usefixtures("variant")
def test_what_is_removed_is_back_at_once(place):
    place.start(resync=NEVER)

    def state():
        rules = [line for line in run(["iptables-save"], namespace=place.ns("a")).splitlines() if "flannel" in line]
        device = place.ip("a", "-br addr show flannel.1") if "flannel.1" in " ".join(place.ip("a", "-br link")) else []
        return (
            place.ip("a", "route"),
            sorted(place.ip("a", "neigh show nud permanent")),
            sorted(place.fdb("a")),
            device,
            rules,
        )

    before = state()
    mac = before[2][0].split()[0]
    for what, command in (
        ("route", "ip route del 10.244.2.0/24"),
        ("changed route", "ip route replace 10.244.2.0/24 via 10.244.3.0 dev flannel.1 onlink"),
        ("neighbour", "ip neigh del 10.244.2.0 dev flannel.1"),
        ("FDB entry", f"bridge fdb del {mac} dev flannel.1"),
        ("address", "ip addr flush dev flannel.1 scope global"),
        ("device that is down", "ip link set flannel.1 down"),
        ("device", "ip link del flannel.1"),
        ("rule", "iptables -t nat -F FLANNEL-POSTRTG"),
        ("jump", "iptables -t nat -F POSTROUTING"),
        ("all rules", "iptables -F FORWARD"),
    ):
        run(command.split(), namespace=place.ns("a"))
        took(what, lambda: state() == before)
    healed = place.part("a").metrics.healed
    assert {"route", "neighbour", "fdb", "address", "device", "rules"} <= healed.keys()
    assert place.reach(1450) == set()


@pytest.mark.parametrize("place", [{"Backend": HOST_GW, "pods": 1}], indirect=True)
def test_host_gw_puts_routes_back_and_leaves_others_alone(place):
    place.start(resync=NEVER)
    place.ip("a", "route add 10.244.77.0/24 via 192.0.2.9 dev eth0")
    place.ip("a", "route del 10.244.2.0/24")
    took("route of host-gw", lambda: "10.244.2.0/24 via 192.0.2.2 dev eth0" in place.ip("a", "route"))
    # A node leaves while the overlay is not there.
    place.end("a")
    (place.manifests / "c.json").unlink()
    place.start("a")
    routes = place.ip("a", "route")
    assert "10.244.2.0/24 via 192.0.2.2 dev eth0" in routes
    assert "10.244.77.0/24 via 192.0.2.9 dev eth0" in routes
    assert not any(line.startswith("10.244.3.0/24") for line in routes)


@pytest.mark.parametrize("place", [{"pods": 1}], indirect=True)
def test_nodes_come_change_and_leave_without_a_restart(place):
    place.start(resync=NEVER)
    mac = place.ip("a", "-br link show flannel.1")
    place.ip("a", "route add 10.244.77.0/24 via 192.0.2.9 dev eth0")
    # One leaves.
    (place.manifests / "c.json").unlink()
    until(lambda: len(place.fdb("a")) == 1, "one FDB entry", AT_ONCE)
    until(
        lambda: not any("10.244.3.0" in line for line in (*place.ip("a", "route"), *place.ip("a", "neigh"))),
        "c to be gone",
        AT_ONCE,
    )
    assert place.reach(nodes=("a", "b")) == set()
    # One gets another address: its Node says so, and its own overlay makes the device anew.
    ip_batch(
        place.ns("b"),
        ["addr del 192.0.2.2/24 dev eth0", "addr add 192.0.2.22/24 dev eth0", "route replace default via 192.0.2.254"],
    )
    place.put(manifest("b", 2, ip="192.0.2.22"))
    until(lambda: " dst 192.0.2.22 " in place.fdb("a")[0], "the new address", AT_ONCE)
    until(lambda: "local 192.0.2.22 " in " ".join(place.ip("b", "-d link")), "the new device", AT_ONCE)
    assert place.reach(nodes=("a", "b")) == set()
    # One comes that flannel runs on, beside one with another backend.
    prefix = "flannel.alpha.coreos.com/"
    flannels = {
        f"{prefix}backend-data": '{"VNI":1,"VtepMAC":"8a:2b:1c:00:00:04"}',
        f"{prefix}backend-type": "vxlan",
        f"{prefix}kube-subnet-manager": "true",
        f"{prefix}public-ip": "192.0.2.44",
    }
    place.put(manifest("d", 4, annotations=flannels))
    direct = {f"{prefix}backend-type": "host-gw", f"{prefix}public-ip": "192.0.2.55", f"{prefix}backend-data": "null"}
    place.put(manifest("e", 5, annotations={**flannels, **direct}))
    until(
        lambda: "10.244.4.0/24 via 10.244.4.0 dev flannel.1 onlink" in place.ip("a", "route"), "flannel's node", AT_ONCE
    )
    assert "8a:2b:1c:00:00:04 dev flannel.1 dst 192.0.2.44 self permanent" in place.fdb("a")
    assert "10.244.4.0 dev flannel.1 lladdr 8a:2b:1c:00:00:04 PERMANENT" in place.ip("a", "neigh")
    until(
        lambda: any("node e: its backend is host-gw" in one for one in place.part("a").metrics.problems),
        "the word",
        AT_ONCE,
    )
    assert "10.244.5.0/24 via 192.0.2.55 dev eth0" in place.ip("a", "route")
    # Two with one address.
    place.put(manifest("e", 5, ip="192.0.2.1"))
    until(
        lambda: any(
            "nodes a and e both have the public address 192.0.2.1" in one for one in place.part("a").metrics.problems
        ),
        "the word",
        AT_ONCE,
    )
    # Its own pod range goes and comes.
    place.put({**manifest("a", 1), "spec": {}})
    until(lambda: "node a: spec.podCIDRs has no network" in place.part("a").metrics.failure, "the word", AT_ONCE)
    assert place.part("a").healthy
    assert not place.part("a").ready
    assert place.fdb("a")
    place.put(manifest("a", 1))
    until(lambda: place.part("a").ready, "the range", AT_ONCE)
    assert place.ip("a", "-br link show flannel.1") == mac
    # The link between the nodes takes less.
    ip_batch(place.ns("a"), ["link set eth0 mtu 1400"])
    environment = place.directory / "a" / "subnet.env"
    until(lambda: "FLANNEL_MTU=1350\n" in environment.read_text(), "the narrower link", AT_ONCE)
    assert "mtu 1350" in place.ip("a", "link show flannel.1")[0]
    # A faulty edit of the configuration changes nothing.
    place.conf.write_text("{")
    place.ip("a", "route del 10.244.2.0/24")
    until(lambda: any("is not JSON" in one for one in place.part("a").metrics.problems), "the word", AT_ONCE)
    assert "10.244.2.0/24 via 10.244.2.0 dev flannel.1 onlink" in place.ip("a", "route")
    assert "10.244.77.0/24 via 192.0.2.9 dev eth0" in place.ip("a", "route")


@pytest.mark.parametrize("place", [{"pods": 1}], indirect=True)
def test_an_incompatible_device_is_made_anew_and_a_good_one_kept(place):
    ip_batch(place.ns("a"), ["link add flannel.1 type bridge"])
    ip_batch(place.ns("b"), ["link add flannel.1 type vxlan id 1 local 192.0.2.2 dev eth0 dstport 4789 nolearning"])
    place.start()
    assert place.reach() == set()
    index = place.ip("a", "-br link show flannel.1"), place.ip("a", "-o link show flannel.1")[0].split(":")[0]
    place.end("a")
    run(
        ["ip", "route", "add", "10.244.9.0/24", "via", "10.244.9.0", "dev", "flannel.1", "onlink"],
        namespace=place.ns("a"),
    )
    run(
        ["ip", "neigh", "add", "10.244.9.0", "lladdr", "02:00:00:00:00:09", "dev", "flannel.1"], namespace=place.ns("a")
    )
    place.start("a")
    assert index == (place.ip("a", "-br link show flannel.1"), place.ip("a", "-o link show flannel.1")[0].split(":")[0])
    # What a node left that is no more.
    assert not any("10.244.9.0" in line for line in (*place.ip("a", "route"), *place.ip("a", "neigh")))


@pytest.mark.parametrize("backend", [VXLAN, {"Type": "vxlan", "DirectRouting": True}], ids=["vxlan", "direct"])
def test_two_families(tmp_path, backend):
    with OverlayPlace(tmp_path, pods=2, six=True, Backend=backend) as place:
        place.start()
        assert place.reach(1430, socket.AF_INET6) == set()
        assert place.reach(1430) == set()
        assert "FLANNEL_MTU=1430\n" in (tmp_path / "a" / "subnet.env").read_text()
        way = (
            "via fd44:2:: dev flannel-v6.1 metric 1024 onlink"
            if backend is VXLAN
            else "via fd02::2 dev eth0 metric 1024"
        )
        assert any(f"fd44:2::/64 {way}" in line for line in place.ip("a", "-6 route"))
        assert bool(place.fdb("a")) is (backend is VXLAN)


@pytest.mark.parametrize("nftables", [False, True], ids=["iptables", "nftables"])
def test_who_is_masqueraded(tmp_path, nftables):
    with OverlayPlace(tmp_path, nodes=("a", "b"), pods=1, EnableNFTables=nftables) as place:
        ip_batch(place.ns("link"), ["addr add 192.0.2.254/24 dev br0", "route add 10.244.1.0/24 via 192.0.2.1"])
        place.start()
        if nftables:
            listed = run(["nft", "list", "table", "ip", "flannel-ipv4"], namespace=place.ns("a"))
            assert listed.count("masquerade") == 2
            assert "FLANNEL" not in run(["iptables-save"], namespace=place.ns("a"))
            run(["nft", "flush", "ruleset"], namespace=place.ns("a"))
            took("table", lambda: "flannel-ipv4" in run(["nft", "list", "ruleset"], namespace=place.ns("a")))
        one, other = place.udp("a", 1), place.udp("b", 1)

        def sender(source, namespace, destination, receiver):
            with in_namespace(namespace), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.bind((source, 0))
                for number in range(100):
                    sock.sendto(f"{source} {number}".encode(), (destination, 7))
                    while select.select([receiver], [], [], 0.2)[0]:
                        data, (seen, _) = receiver.recvfrom(100)
                        if data.startswith(f"{source} ".encode()):
                            return seen
            return None

        # A node to a pod elsewhere; from outside to an own pod; a pod to a pod; a pod to the outside.
        assert sender("192.0.2.1", place.ns("a"), "10.244.2.2", other) == "10.244.1.0"
        assert sender("192.0.2.254", place.ns("link"), "10.244.1.2", one) == "192.0.2.254"
        assert sender("10.244.1.2", place.ns("a1"), "10.244.2.2", other) == "10.244.1.2"
        with in_namespace(place.ns("link")), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
            outside.bind(("192.0.2.254", 7))
            assert sender("10.244.1.2", place.ns("a1"), "192.0.2.254", outside) == "192.0.2.1"


@pytest.mark.parametrize("place", [{"nodes": ("a", "b"), "pods": 1}], indirect=True)
def test_a_node_has_it_as_a_part(place):
    config, environment = place.directory / "config.yaml", place.directory / "a.env"
    config.write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n---\n"
        "apiVersion: narthex/v1alpha1\nkind: NarthexConfiguration\n"
        f"overlay: {{netConf: {place.conf}, subnetFile: {environment}, interfaces: [eth0]}}\n"
    )
    place.start("b")
    options = ("--no-proxy", "--overlay", "--config", config, "--hostname-override", "a")
    with place.process("a", "node", *options) as process:
        until(environment.exists, "subnet.env", 60.0)
        assert place.reach() == set()

        def get(port, path):
            with in_namespace(place.ns("a")), socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
                sock.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                return b"".join(iter(lambda: sock.recv(65536), b"")).decode()

        answer = get(10256, "/healthz")
        assert answer.startswith(("HTTP/1.1 200", "HTTP/1.0 200"))
        assert '"overlay":{"running":true,"healthy":true' in answer
        until(lambda: "narthex_overlay_nodes 1.0" in get(10249, "/metrics"), "the metric", AT_ONCE)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert place.reach() == set()


class MemoryCluster:
    """Nodes that are kept here, and written to by the nodes themselves."""

    def __init__(self, *nodes):
        self.objects = {node["metadata"]["name"]: node for node in nodes}
        self.patches = []
        self._changed = threading.Condition()

    def origin(self):
        return OverlayOrigin(_Watch(self), self)

    def nodes(self):
        text = "\n".join(msgspec.json.encode(node).decode() for node in self.objects.values())
        loaded = load(text.encode(), "memory")
        assert not loaded.problems
        return loaded.objects

    def patch(self, node, body):
        with self._changed:
            self.patches.append((node, body))
            self.objects[node]["metadata"]["annotations"] |= body.get("metadata", {}).get("annotations", {})
            self._changed.notify_all()

    def wait(self):
        with self._changed:
            self._changed.wait(0.2)


class _Watch:
    problems = ()

    def __init__(self, cluster):
        self._cluster = cluster

    def scan(self):
        return []

    def changes(self, stop):
        yield [*map(Upsert, self._cluster.nodes()), Synced()]
        while not stop.is_set():
            self._cluster.wait()
            yield [Upsert(node) for node in self._cluster.nodes()]


@pytest.mark.parametrize("place", [{"pods": 1}], indirect=True)
def test_nodes_tell_each_other_by_annotations(place):
    cluster = MemoryCluster(*(manifest(name, number) for name, number in place.nodes.items()))
    for name in place.nodes:
        place.start(name, origin=cluster.origin())
    assert place.reach() == set()
    prefix = "flannel.alpha.coreos.com/"
    macs = {name: place.ip(name, "-br link show flannel.1")[0].split()[2] for name in place.nodes}
    for name, number in place.nodes.items():
        assert cluster.objects[name]["metadata"]["annotations"] == {
            f"{prefix}kube-subnet-manager": "true",
            f"{prefix}backend-type": "vxlan",
            f"{prefix}backend-data": f'{{"VNI":1,"VtepMAC":"{macs[name]}"}}',
            f"{prefix}public-ip": f"192.0.2.{number}",
        }
    conditions = [body["status"]["conditions"][0] for _, body in cluster.patches if "status" in body]
    assert {(one["type"], one["status"], one["reason"]) for one in conditions} == {
        ("NetworkUnavailable", "False", "FlannelIsUp")
    }
    # A reboot: the device is gone, the annotation is not.
    place.end("a")
    run(["ip", "link", "del", "flannel.1"], namespace=place.ns("a"))
    place.start("a", origin=cluster.origin())
    assert place.ip("a", "-br link show flannel.1")[0].split()[2] == macs["a"]


@pytest.mark.parametrize("place", [{"pods": 1}], indirect=True)
def test_no_request_fails_while_nodes_change_their_backend_one_after_the_other(place, monkeypatch):
    monkeypatch.setattr(loop, "_RETAINED_SECONDS", 2.0)
    cluster = MemoryCluster(*(manifest(name, number) for name, number in place.nodes.items()))
    conf = {name: place.directory / f"{name}.json" for name in place.nodes}

    def write(name, backend):
        conf[name].write_text(json.dumps({"Network": "10.244.0.0/16", "Backend": backend}))

    def routes(name):
        return {line.split()[0]: line for line in place.ip(name, "route") if line.startswith("10.244.")}

    for name in place.nodes:
        write(name, VXLAN)
        place.start(name, origin=cluster.origin(), net_conf=str(conf[name]), resync=0.2)
    assert place.reach() == set()
    with place.requests() as requests:
        for backend, dev in ((HOST_GW, "eth0"), (VXLAN, "flannel.1")):
            for name, number in place.nodes.items():
                write(name, backend)
                others = [other for other in place.nodes if other != name]
                subnet = f"10.244.{number}.0/24"
                if backend is HOST_GW:
                    # Others send to it directly, as soon as it says so; it keeps the tunnel to those that have not changed.
                    until(lambda: all(" dev eth0" in routes(one)[subnet] for one in others), "the others", AT_ONCE)  # noqa: B023
            until(
                lambda: all(sum(f" dev {dev}" in line for line in routes(name).values()) == 2 for name in place.nodes),  # noqa: B023
                dev,
                AT_ONCE,
            )
            there = backend is VXLAN
            until(
                lambda: all(bool(place.ip(name, "link show type vxlan")) is there for name in place.nodes),  # noqa: B023
                "flannel.1 to be gone, or there",
                AT_ONCE,
            )
    assert requests.sent > 300
    assert requests.lost() == 0
    print(f"{requests.sent} requests")


@pytest.fixture
def server(place):
    with contextlib.ExitStack() as stack:
        # Its thread is in the node's namespace, and so is where it listens.
        with in_namespace(place.ns("a")):
            made = stack.enter_context(FaultyApiServer())
        yield made


@pytest.mark.parametrize("place", [{"nodes": ("a",), "pods": 1}], indirect=True)
def test_an_api_server_that_comes_and_goes(place, server):
    prefix = "flannel.alpha.coreos.com/"
    flannels = {
        f"{prefix}backend-data": '{"VNI":1,"VtepMAC":"8a:2b:1c:00:00:04"}',
        f"{prefix}backend-type": "vxlan",
        f"{prefix}kube-subnet-manager": "true",
        f"{prefix}public-ip": "192.0.2.44",
    }
    server.put_raw("Node", manifest("a", 1))
    server.put_raw("Node", manifest("d", 4, annotations=flannels))
    theirs = "10.244.4.0/24 via 10.244.4.0 dev flannel.1 onlink"
    place.start("a", origin=api_origin(Access(master=server.url)))
    assert theirs in place.ip("a", "route")

    def own():
        return server.do(lambda data: data.get("Node", ("", "a"))).raw

    until(lambda: f"{prefix}backend-data" in own()["metadata"].get("annotations", {}), "the annotation", AT_ONCE)
    mac = place.ip("a", "-br link show flannel.1")[0].split()[2]
    assert own()["metadata"]["annotations"][f"{prefix}backend-data"] == f'{{"VNI":1,"VtepMAC":"{mac}"}}'
    assert [one["reason"] for one in own()["status"]["conditions"]] == ["FlannelIsUp"]
    # While it is away nothing is forgotten.
    server.stop()
    place.ip("a", "route del 10.244.4.0/24")
    took("route", lambda: theirs in place.ip("a", "route"))
    place.end("a")
    place.ip("a", "route del 10.244.4.0/24")
    part = place.begin("a", origin=api_origin(Access(master=server.url)))
    until(lambda: part.metrics.failure != "", "the word", AT_ONCE)
    assert place.fdb("a")
    assert not part.ready
    # It comes back, and a node has left meanwhile.
    server.do(lambda data: data.delete("Node", "", "d"))
    with in_namespace(place.ns("a")):
        server.start()
    until(lambda: part.ready, "the list", 60.0)
    assert not place.fdb("a")
    assert place.ip("a", "-br link show flannel.1")[0].split()[2] == mac


@contextlib.contextmanager
def a_link_that_forgets_checksums(place, name):
    """Between a node and the others: it completes the checksum of the outer packet, as links do, and not of the inner."""
    link = place.ns("link")
    ip_batch(
        link,
        [
            f"link set to-{name} nomaster",
            "link add in0 type veth peer name in1",
            "link set in1 master br0 up",
            "link set in0 up",
        ],
    )
    with in_namespace(link):
        socks = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) for _ in range(2)]
        for sock, device in zip(socks, (f"to-{name}", "in0"), strict=True):
            sock.bind((device, 0))
    stop = os.eventfd(0)

    def pass_on():
        while stop not in (ready := select.select([*socks, stop], [], [])[0]):
            for sock in ready:
                frame, (_, _, kind, *_) = sock.recvfrom(65536)
                if kind == socket.PACKET_OUTGOING:
                    continue
                if frame[12:14] == b"\x08\x00" and frame[23] == 17 and struct.unpack_from(">H", frame, 36)[0] == 8472:
                    frame = frame[:40] + b"\0\0" + frame[42:]
                with contextlib.suppress(OSError):
                    socks[sock is socks[0]].send(frame)

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(stop, 1)
        thread.join()
        os.close(stop)
        for sock in socks:
            sock.close()


@pytest.mark.parametrize("place", [{"nodes": ("a", "b"), "pods": 1}], indirect=True)
def test_a_link_that_does_not_complete_checksums_is_found_and_worked_around(place):
    with a_link_that_forgets_checksums(place, "a"):
        place.start(repair_checksums=False)
        until(
            lambda: (
                [place.part(name).metrics.checksums.get("flannel.1") for name in "ab"] == [ChecksumVerdict.BROKEN] * 2
            ),
            "the finding",
            60.0,
        )
        assert len(place.reach(seconds=0.5)) == 2
        for name in "ab":
            place.end(name)
        place.start()
        until(lambda: all(place.part(name).metrics.repaired for name in "ab"), "the repair", 60.0)
        assert place.reach() == set()
        until(lambda: place.part("a").metrics.checksums["flannel.1"] is ChecksumVerdict.FINE, "the second test", 60.0)
        with in_namespace(place.ns("a")):
            assert not offloaded("flannel.1")


_NODE_PORT = """
table {family} proxy {{
  chain pre {{
    type nat hook prerouting priority dstnat
    fib daddr type local tcp dport 30080 meta mark set meta mark | 0x4000 dnat to {server}
  }}
  chain post {{ type nat hook postrouting priority srcnat; meta mark & 0x4000 != 0 jump out; }}
  chain out {{ meta mark set meta mark ^ 0x4000; masquerade fully-random; }}
}}
"""


@pytest.mark.parametrize("place", [{"pods": 1, "six": True, "nodes": ("a", "b")}], indirect=True)
@pytest.mark.parametrize("nftables", [False, True], ids=["iptables", "nftables"])
def test_connections_that_are_masqueraded_outlive_a_change_of_the_backend(place, nftables):
    # From outside through a node port of one node to a pod of the other one; and to a pod's address, over a node as router.
    cluster = MemoryCluster(*(manifest(name, number, six=True) for name, number in place.nodes.items()))
    usual = json.loads(place.conf.read_text()) | {"EnableNFTables": nftables}
    outside = place.ns("link")
    ip_batch(outside, ["addr add 192.0.2.200/24 dev br0", "addr add fd02::200/64 dev br0 nodad", "link set lo up"])
    ip_batch(outside, ["route add 10.244.2.0/24 via 192.0.2.1", "route add fd44:2::/64 via fd02::1"])
    for family, server in (("ip", "10.244.2.2:8080"), ("ip6", "[fd44:2::2]:8080")):
        run(["nft", "-f", "-"], stdin=_NODE_PORT.format(family=family, server=server), namespace=place.ns("a"))

    def change(backend, device):
        place.write_conf(**usual, Backend=backend)
        for six, subnet in ((), "10.244.2.0/24"), (("-6",), "fd44:2::/64"):
            until(
                lambda six=six, subnet=subnet: (
                    f" dev {device[len(six)]} "
                    in run(["ip", *six, "route", "show", subnet], namespace=place.ns("a")) + " "
                ),
                f"{subnet} over {device[len(six)]}",
                AT_ONCE,
            )

    place.write_conf(**usual, Backend=VXLAN)
    place.start(origin=cluster.origin(), resync=0.2)
    with in_namespace(place.ns("b1")):
        listener = socket.create_server(("::", 8080), family=socket.AF_INET6, dualstack_ipv6=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        pairs = []
        for backend, device in (
            (HOST_GW, ("eth0", "eth0")),
            (VXLAN, ("flannel.1", "flannel-v6.1")),
            (HOST_GW, ("eth0", "eth0")),
        ):
            for address in (("192.0.2.1", 30080), ("fd02::1", 30080), ("10.244.2.2", 8080), ("fd44:2::2", 8080)):
                with in_namespace(outside):
                    client = stack.enter_context(socket.create_connection(address, WAIT))
                server, seen = listener.accept()
                stack.enter_context(server).settimeout(WAIT)
                assert seen[0].removeprefix("::ffff:") not in ("192.0.2.200", "fd02::200")
                pairs.append((client, server))
            change(backend, device)
            for client, server in pairs:
                client.sendall(b"?")
                assert server.recv(9) == b"?"
                server.sendall(b"!")
                assert client.recv(9) == b"!"
