"""Memory of a node's process with all parts, beside its DNS worker.

    sudo python benchmarks/node_memory.py [--quick] [--services 100] [--endpoints 3] [--json FILE]

`narthex node` with the proxy, the CNI agent, the overlay, node-local DNS, and the announcer as a process, and an API server with TLS
in another. Memory is resident memory and the proportional share of it, after the first sync and after changes. Bars: 60 MB without the
DNS worker, and 80 MB with it. Needs root. Works in a network namespace of its own.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import yaml

from frame.report import Report, parser
from frame.server import endpoint_slice, service
from narthex.lab.encode import encode
from narthex.lab.server import certificate
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import NODE, NODE_IPS, node

NODE_MB, ALL_MB = 60.0, 80.0
_READY_SECONDS = 180.0
_SETTLE_SECONDS = 3.0
_CHANGES = 500
PARTS = ("--cni", "--overlay", "--dns", "--announcer")
_PASSES = ("", "after changes")


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--services", type=int, default=100)
    options.add_argument("--endpoints", type=int, default=3)
    options.add_argument("--hold", action="store_true", help="keep it running until Enter")
    asked = options.parse_args()
    report = Report("node_memory", asked)
    name = f"nxbench-{os.getpid()}-memory"
    create_namespace(name)
    try:
        with tempfile.TemporaryDirectory(prefix="nxbench-") as folder:
            _wire(name)
            _measure(report, Path(folder), name, asked)
    finally:
        delete_namespace(name)
    return report.end()


def _wire(namespace: str) -> None:
    for command in (
        "link set lo up",
        "link add eth0 type veth peer name eth1",
        f"address add {NODE_IPS[0]}/24 dev eth0",
        "link set eth0 up",
        "link set eth1 up",
        "route add default dev eth0",
    ):
        run(["ip", *command.split()], namespace=namespace)


def _measure(report: Report, folder: Path, namespace: str, asked: object) -> None:
    made = certificate.make(["127.0.0.1"])
    services, endpoints = asked.services, asked.endpoints
    with in_namespace(namespace), FaultyApiServer(tls=made.context()) as server:
        server.put_raw("Node", encode(node()))
        for number in range(services):
            server.put_raw("Service", service(number))
            server.put_raw("EndpointSlice", endpoint_slice(number, endpoints))
        _write_files(folder, server.url, made.certificate)
        argv = [sys.executable, "-m", "narthex", "node", *PARTS, f"--config={folder / 'config'}"]
        argv += [f"--hostname-override={NODE}", f"--announcer-key-file={folder / 'key'}"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL)
        try:
            _await_parts(process, folder / "log")
            for label in _PASSES:
                time.sleep(_SETTLE_SECONDS)
                _report_memory(report, process.pid, f"{services:,} Services x {endpoints}{label and f', {label}'}")
                for turn in range(_CHANGES):
                    server.put_raw("EndpointSlice", endpoint_slice(turn % services, endpoints, turn // services % 2))
            if asked.hold:
                print(process.pid, folder)
                input()
        finally:
            process.terminate()
            process.wait(30)


def _write_files(folder: Path, url: str, authority: str) -> None:
    user = {"name": "node", "user": {"token": "none"}}
    data = base64.b64encode(authority.encode()).decode()
    cluster = {"name": "bench", "cluster": {"server": url, "certificate-authority-data": data}}
    context = {"name": "bench", "context": {"cluster": "bench", "user": "node"}}
    access = {"current-context": "bench", "clusters": [cluster], "users": [user], "contexts": [context]}
    (folder / "kubeconfig").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **access}))
    (folder / "net-conf.json").write_text('{"Network": "10.64.0.0/12", "Backend": {"Type": "vxlan"}}')
    (folder / "key").write_text("a key that all nodes share\n")
    proxy = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(folder / "kubeconfig")},
        "detectLocalMode": "NodeCIDR",
        "conntrack": {"maxPerCore": 0},
    }
    own = {
        "apiVersion": "narthex/v1alpha1",
        "kind": "NarthexConfiguration",
        "cni": {"socket": str(folder / "agent.sock"), "stateDirectory": str(folder / "cni")},
        "overlay": {"netConf": str(folder / "net-conf.json"), "subnetFile": str(folder / "subnet.env")},
        "dns": {"listen": ["169.254.20.10"]},
    }
    (folder / "config").write_text(yaml.safe_dump_all([proxy, own]))


def _await_parts(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen("http://127.0.0.1:10256/healthz", timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit(f"the node's process is not well:\n{log.read_text()[-4000:]}")


def _report_memory(report: Report, pid: int, size: str) -> None:
    table = report.table(f"Memory of narthex node with all parts, {size}", unit="MB")
    # Each thread has children of its own.
    workers = [word for each in Path(f"/proc/{pid}/task").glob("*/children") for word in each.read_text().split()]
    for kind in ("Rss", "Pss"):
        own = _memory(pid, kind)
        others = sum(_memory(int(worker), kind) for worker in workers)
        table.row(f"{kind}, the node's process", own, most=NODE_MB)
        table.row(f"{kind}, with the DNS worker", own + others, most=ALL_MB)


def _memory(pid: int, kind: str) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(rf"{kind}:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
