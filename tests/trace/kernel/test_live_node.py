"""A node made by hand, with pods on a bridge and a proxy's rules: `narthex trace --live` begins at the sender and names the fault."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import CommandError, run
from narthex.testing.load import EchoEndpoints

pytestmark = pytest.mark.kernel

NODE, CLIENT, WEB, OUT = (f"nxl-{os.getpid()}-{name}" for name in ("node", "client", "web", "out"))
CLUSTER = """
apiVersion: v1
kind: Node
metadata: {name: worker}
spec: {podCIDR: 10.80.1.0/24, podCIDRs: [10.80.1.0/24]}
status: {addresses: [{type: InternalIP, address: 172.31.80.11}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client}
spec: {nodeName: worker, containers: [{name: c, image: none}]}
status: {phase: Running, podIP: 10.80.1.2, podIPs: [{ip: 10.80.1.2}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, clusterIP: 10.99.0.10, clusterIPs: [10.99.0.10], ports: [{port: 80, targetPort: 8080, nodePort: 30080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.80.1.3], nodeName: worker, targetRef: {kind: Pod, name: web}, conditions: {ready: true}}]
"""
WIRING = {
    NODE: ("link add cni0 type bridge", "addr add 10.80.1.1/24 dev cni0", "link set cni0 up",
           f"link add veth1 type veth peer name eth0 netns {CLIENT}", f"link add veth2 type veth peer name eth0 netns {WEB}",
           f"link add eth0 type veth peer name eth0 netns {OUT}", "link set veth1 master cni0 up", "link set veth2 master cni0 up",
           "addr add 172.31.80.11/24 dev eth0", "link set eth0 up"),
    CLIENT: ("addr add 10.80.1.2/32 dev eth0", "link set eth0 up", "route add 10.80.1.1 dev eth0",
             "route add default via 10.80.1.1"),
    WEB: ("addr add 10.80.1.3/32 dev eth0", "link set eth0 up", "route add 10.80.1.1 dev eth0", "route add default via 10.80.1.1"),
    OUT: ("addr add 172.31.80.1/24 dev eth0", "addr add 203.0.113.50/32 dev lo", "link set eth0 up"),
}  # fmt: skip


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The node, its pods, and somebody outside; the cluster's objects."""
    file = tmp_path_factory.mktemp("live-node") / "cluster.yaml"
    file.write_text(CLUSTER)
    try:
        for name in WIRING:
            create_namespace(name)
        for name, commands in WIRING.items():
            for words in ("link set lo up", *commands):
                ip(name, words)
        ip(NODE, "route add default via 172.31.80.1")
        with in_namespace(NODE):
            for setting, value in (("ip_forward", "1"), ("conf/all/rp_filter", "0"), ("conf/eth0/rp_filter", "0")):
                Path(f"/proc/sys/net/ipv4/{setting}").write_text(value)
        rules = CliRunner().invoke(
            main,
            ["render", "--manifests", str(file), "--node", "worker", "--cluster-cidr", "10.80.0.0/16", "--family", "4"],
        )
        assert rules.exit_code == 0, rules.output
        run(["nft", "-f", "-"], stdin=rules.output, namespace=NODE)
        with EchoEndpoints() as answers:
            answers.open(WEB, "10.80.1.3", 8080)
            yield file
    finally:
        for name in WIRING:
            with suppress(OSError):
                delete_namespace(name)


def ip(namespace: str, words: str) -> None:
    run(["ip", *words.split()], namespace=namespace)


def traced(manifests: Path, source: str, destination: str, *more: str) -> Any:
    words = [
        "trace",
        source,
        destination,
        "--live",
        "--netns",
        NODE,
        "--manifests",
        str(manifests),
        "-o",
        "json",
        *more,
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code in (0, 3), done.output
    return json.loads(done.stdout)


SERVICE, NODE_PORT = ("10.80.1.2", "10.99.0.10:80"), ("203.0.113.50", "172.31.80.11:30080")
FAULTS: dict[str, tuple[Any, str, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]] = {
    "no route in the sender": (SERVICE, "route-missing", ((CLIENT, "ip route del default"),),
                               ((CLIENT, "ip route add default via 10.80.1.1"),)),
    "no route back": (SERVICE, "route-missing", ((WEB, "ip route del default"),), ((WEB, "ip route add default via 10.80.1.1"),)),
    "no route to pods": (SERVICE, "route-missing", ((NODE, "ip route del 10.80.1.0/24"),),
                         ((NODE, "ip route add 10.80.1.0/24 dev cni0 src 10.80.1.1"),)),
    "source check": (NODE_PORT, "rp-filter", ((NODE, "sysctl -q net.ipv4.conf.all.rp_filter=1"), (NODE, "ip route add 203.0.113.50 dev cni0")),
                     ((NODE, "sysctl -q net.ipv4.conf.all.rp_filter=0"), (NODE, "ip route del 203.0.113.50 dev cni0"))),
    "no forwarding": (SERVICE, "ip-forward-off", ((NODE, "sysctl -q net.ipv4.ip_forward=0"),), ((NODE, "sysctl -q net.ipv4.ip_forward=1"),)),
    "policy": (SERVICE, "forward-drop", ((NODE, "iptables-nft -P FORWARD DROP"),), ((NODE, "iptables-nft -P FORWARD ACCEPT"),)),
    "gateway": (("10.80.1.2", "198.51.100.9:80"), "neighbour-missing",
                ((NODE, "ip route replace default via 172.31.80.99"), (NODE, "ip neigh replace 172.31.80.99 dev eth0 nud failed")),
                ((NODE, "ip route replace default via 172.31.80.1"),)),
    "size": (SERVICE, "mtu", ((NODE, "ip link set cni0 mtu 1300"),), ((NODE, "ip link set cni0 mtu 1500"),)),
    "port": (("10.80.1.2", "10.80.1.3:9"), "not-listening", (), ()),
    "link of the pod": (SERVICE, "link-down", ((WEB, "ip link set eth0 down"),),
                        ((WEB, "ip link set eth0 up"), (WEB, "ip route add 10.80.1.1 dev eth0"), (WEB, "ip route add default via 10.80.1.1"))),
}  # fmt: skip


def test_a_healthy_path_begins_at_the_sender_and_ends_in_the_pod(manifests: Path) -> None:
    data = traced(manifests, *SERVICE)
    assert [(end["fate"], end["address"]) for end in data["ends"]] == [("delivered", "10.80.1.3")]
    assert data["findings"] == []
    assert data["start"] == "worker"


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_the_cause(manifests: Path, name: str) -> None:
    (source, destination), cause, breaking, mending = FAULTS[name]
    try:
        for place, command in breaking:
            run(command.split(), namespace=place)
        data = traced(manifests, source, destination, *(("--size", "1500") if name == "size" else ()))
    finally:
        for place, command in mending:
            with suppress(CommandError):
                run(command.split(), namespace=place)
    assert [each["cause"] for each in data["findings"] if each["explains"]][:1] == [cause]


def test_a_listener_on_loopback_only(manifests: Path) -> None:
    with EchoEndpoints() as answers:
        answers.open(WEB, "127.0.0.1", 9090)
        found = traced(manifests, "10.80.1.2", "10.80.1.3:9090")["findings"][0]
    assert found["cause"] == "not-listening"
    assert "only at 127.0.0.1" in found["sentence"]
