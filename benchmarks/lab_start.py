"""A lab from the command to the first answer through a Service, and its end, beside the bare network.

    sudo python benchmarks/lab_start.py [--quick] [--rounds 3]

The floor makes the same namespaces, bridges, cables, addresses and routes, pods' among them, by `ip -batch` alone: without
API, controllers, proxies, CNI plugins or servers. Bars: 3 nodes and 12 pods answer within 2 s of the command, 10 nodes and 100
pods within 8 s, and either is gone within 1 s. A machine that does other things at the same time blurs them.
Needs root. Works in network namespaces of its own and removes them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from frame.report import Report, Row, parser
from narthex.lab import topology
from narthex.lab.program.network import make_network
from narthex.linux.links import ip_batch
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import with_package

NAME = f"ncb{os.getpid()}"
SIZES = ((3, 12, 2.0), (10, 100, 8.0))
"""Nodes, pods, seconds until the first answer."""
DOWN_SECONDS = 1.0
PORT = 30001
MANIFESTS = f"""\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: web}}
spec:
  replicas: REPLICAS
  selector: {{matchLabels: {{app: web}}}}
  template:
    metadata: {{labels: {{app: web}}}}
    spec: {{containers: [{{name: c, image: echo, ports: [{{containerPort: 8080}}]}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: web}}
spec: {{type: NodePort, selector: {{app: web}}, ports: [{{port: 80, targetPort: 8080, nodePort: {PORT}}}]}}
"""


def narthex(*words: str) -> None:
    """Run a command of the lab."""
    argv = [sys.executable, "-m", "narthex", "lab", *words, "--name", NAME]
    subprocess.run(argv, env=with_package(os.environ), check=True, capture_output=True)


def answer() -> bytes:
    """What a client outside is told by the Service."""
    with in_namespace(topology.outside_namespace(NAME)):
        sock = socket.socket()
    with sock:
        sock.settimeout(10)
        sock.connect((topology.nodes(NAME, 1)[0].addresses[0], PORT))
        sock.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        return sock.recv(4096)


def lab(nodes: int, pods: int) -> tuple[float, float]:
    """Seconds from the command to the first answer, and to the end of `down`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "web.yaml").write_text(MANIFESTS.replace("REPLICAS", str(pods)))
        begin = time.perf_counter()
        try:
            narthex("up", folder, "--nodes", str(nodes))
            if b" on node-" not in answer():
                raise SystemExit("the Service did not answer")
            up = time.perf_counter() - begin
        finally:
            begin = time.perf_counter()
            narthex("down")
        return up, time.perf_counter() - begin


def floor(nodes: int, pods: int) -> tuple[float, float]:
    """The same for the network alone."""
    members = topology.nodes(NAME, nodes)
    names = [topology.fabric_namespace(NAME), topology.outside_namespace(NAME), *(each.namespace for each in members)]
    begin = time.perf_counter()
    try:
        make_network(NAME, members, "none")
        for index, node in enumerate(members):
            mine = [f"nx-{NAME}.bench.pod-{number}" for number in range(index, pods, nodes)]
            names += mine
            ip_batch(node.namespace, ["link add cni0 type bridge", "link set cni0 up"])
            for number, pod in enumerate(mine):
                create_namespace(pod)
                host = f"veth{number}"
                ip_batch(
                    node.namespace,
                    [f"link add {host} type veth peer name eth0 netns {pod}", f"link set {host} master cni0 up"],
                )
                four, six = (cidr.partition("/")[0] for cidr in node.pod_cidrs)
                ip_batch(
                    pod,
                    [
                        f"address add {four[:-1]}{number + 2}/24 dev eth0",
                        f"address add {six}{number + 2:x}/64 dev eth0 nodad",
                        "link set eth0 up",
                        f"route add default via {node.gateways[0]}",
                    ],
                )
        up = time.perf_counter() - begin
    finally:
        begin = time.perf_counter()
        for name in names:
            delete_namespace(name)
    return up, time.perf_counter() - begin


def main() -> int:
    """Measure both sizes, taking turns."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=0)
    asked = options.parse_args()
    rounds = asked.rounds or (1 if asked.quick else 3)
    report = Report("lab_start", asked)
    for nodes, pods, most in SIZES[:1] if asked.quick else SIZES:
        bare, full = [], []
        for _ in range(rounds):
            bare.append(floor(nodes, pods))
            full.append(lab(nodes, pods))
        title = f"{nodes} nodes, {pods} pods"
        for words, which, limit in (("up, to the first answer", 0, most), ("down", 1, DOWN_SECONDS)):
            table = report.table(f"{title}: {words}", unit="s", floor="ip -batch alone")
            least: Row = table.row("the bare network", [each[which] for each in bare])
            table.row("narthex lab", [each[which] for each in full], floor=least, most=limit)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
