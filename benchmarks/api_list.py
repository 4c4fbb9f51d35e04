"""10,000 Services and 10,000 slices of 10 at an API server: list and decode, first sync from process start, a burst.

    sudo python benchmarks/api_list.py [--quick] [--size 5000x10 ...] [--mode nftables] [--burst 1000] [--runs 3]

The server is our own for tests, in a process of its own, with objects as big as a real one sends them (managedFields,
owner references). The floor reads the same bytes with http.client and decodes them with the json module, without
collecting garbage (nor does a proxy before its first sync), before each run of ours.

Bars: list and decode under 2 s; a sync within 5 s of the start of the process (with 5,000 Services: 1.5 s, and 200 MB); resident
memory under 300 MB; a burst done within a second of its last change. Needs root. Works in a network namespace of its own and
removes it.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from frame.report import Report, Table, parser
from narthex.host import netns
from narthex.lab.encode import encode
from narthex.sources.kube.access import Access
from narthex.sources.kube.resources import ENDPOINT_SLICES, SERVICES, of_a_proxy
from narthex.sources.kube.source import KubeSource
from narthex.testing.apiserver import ApiServer
from narthex.testing.build import NODE, node

LIST_BAR, BURST_BAR = 2.0, 1.0
START_BAR, MEMORY_BAR = 5.0, 300.0
START_BARS, MEMORY_BARS = {(5000, 10): 1.5}, {(5000, 10): 200.0}
"""By Services and endpoints of each, where it is another."""
LIST_RATIO, START_RATIO = 4.0, 25.0
"""To the floor; these hold on any machine, and leave room for chance."""
_MANAGED = {"manager": "kube-controller-manager", "operation": "Update", "time": "2026-05-05T10:00:00Z"}


def service(number: int) -> dict[str, Any]:
    """A Service as a server holds it."""
    name, ip = f"service-{number}", f"10.110.{number >> 8}.{number & 255}"
    return {
        "metadata": {
            **_meta(name, number),
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "x" * 400},
            "managedFields": [_MANAGED | {"fieldsV1": {"f:spec": {"f:ports": {}, "f:selector": {"f:app": {}}}}}],
        },
        "spec": {
            "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}],
            "selector": {"app": name},
            "clusterIP": ip,
            "clusterIPs": [ip],
            "type": "ClusterIP",
            "sessionAffinity": "None",
            "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster",
        },
        "status": {"loadBalancer": {}},
    }


def endpoint_slice(number: int, endpoints: int, extra: int = 0) -> dict[str, Any]:
    """The endpoints of one Service; no two Services share one."""
    name = f"service-{number}"
    return {
        "metadata": {
            **_meta(f"{name}-abcde", number),
            "generateName": f"{name}-",
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": name,
            },
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-05-05T10:00:00Z"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": name, "uid": "0", "controller": True}],
            "managedFields": [_MANAGED | {"fieldsV1": {"f:endpoints": {}, "f:metadata": {"f:labels": {".": {}}}}}],
        },
        "addressType": "IPv4",
        "endpoints": [_endpoint(name, number * 64 + index) for index in range(endpoints + extra)],
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
    }


def _meta(name: str, number: int) -> dict[str, Any]:
    uid = f"3f0ddc4a-0000-4000-8000-{number:012d}"
    created = "2026-05-05T10:00:00Z"
    return {"name": name, "namespace": "shop", "uid": uid, "creationTimestamp": created, "labels": {"app": name}}


def _endpoint(name: str, end: int) -> dict[str, Any]:
    return {
        "addresses": [f"10.{64 + (end >> 16)}.{end >> 8 & 255}.{end & 255}"],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        "targetRef": {"kind": "Pod", "namespace": "shop", "name": f"{name}-5d8f-{end % 64}", "uid": f"{end:036d}"},
        "nodeName": f"node-{end % 100}",
        "zone": "eu-1a",
    }


def serve(services: int, endpoints: int) -> None:
    """Be the server: print its address, then make a burst of so many changes for each line read."""
    with ApiServer() as server:
        server.put_raw("Node", encode(node()))
        for number in range(services):
            server.put_raw("Service", service(number))
            server.put_raw("EndpointSlice", endpoint_slice(number, endpoints))
        print(server.url, flush=True)
        for line in sys.stdin:
            count = int(line)
            start = time.perf_counter()
            for turn in range(count):
                time.sleep(max(0.0, start + turn / count - time.perf_counter()))
                server.put_raw("EndpointSlice", endpoint_slice(turn % services, endpoints, 1))
            print(time.time(), flush=True)


def floor(url: str) -> tuple[float, float]:
    """Seconds to read both lists, and to decode them; what anybody in Python pays at least."""
    reading = decoding = 0.0
    gc.disable()
    for resource in (SERVICES, ENDPOINT_SLICES):
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        start = time.perf_counter()
        connection.request("GET", resource.paths[0] + "?resourceVersion=0")
        body = connection.getresponse().read()
        read = time.perf_counter()
        json.loads(body)
        reading, decoding = reading + read - start, decoding + time.perf_counter() - read
        connection.close()
    gc.enable()
    return reading, decoding


class Figure(NamedTuple):
    """Of one run: seconds that passed, of the CPU, and of the floor just before."""

    seconds: float
    cpu: float
    floor: float


def listed(url: str, *, streaming: bool) -> Figure:
    """Until a source has all lists as events."""
    base = sum(floor(url))
    source = KubeSource(Access(master=url), of_a_proxy(NODE), streaming=streaming)
    stop = threading.Event()
    gc.disable()  # As in a proxy before its first sync.
    start, cpu = time.perf_counter(), time.process_time()
    changes = source.changes(stop)
    events = next(changes)
    figure = Figure(time.perf_counter() - start, time.process_time() - cpu, base)
    gc.enable()
    assert not source.problems, source.problems[0]
    assert len(events) > 2 * 100
    stop.set()
    changes.close()
    return figure


class Proxy:
    """`narthex proxy` as a process of its own, in the namespace of the calling thread."""

    def __init__(self, url: str, mode: str) -> None:
        self.started = time.time()
        argv = [sys.executable, "-m", "narthex", "proxy", "--master", url, "--hostname-override", NODE]
        argv += ["--proxy-mode", mode, "--cluster-cidr", "10.64.0.0/12", "--v", "2", "--healthz-bind-address", ""]
        argv += ["--metrics-bind-address", "127.0.0.1:10249"]
        self._process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append((time.time(), line))

    def wait_for(self, words: str, after: float = 0.0, seconds: float = 120.0) -> float:
        """When a line with these words came."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            for when, line in list(self.lines):
                if when >= after and words in line:
                    return when
            time.sleep(0.01)
        raise SystemExit(f"no line says {words!r}:\n" + "".join(line for _, line in self.lines[-20:]))

    def memory(self, what: str) -> float:
        """MB, now (`VmRSS`) or at most (`VmHWM`)."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(rf"{what}:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]

    def cpu(self) -> float:
        """Seconds of user and system time so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait(30)


def settled(proxy: Proxy, since: float, quiet: float = 2.0) -> tuple[int, float]:
    """Number of syncs that wrote since a time, and when the last one ended."""
    while True:
        times = [when for when, line in list(proxy.lines) if when >= since and "synced IPv4" in line]
        if times and time.time() - times[-1] > quiet:
            return len(times), times[-1]
        time.sleep(0.05)


def main() -> int:
    """Measure and print; 1 when a bar is missed."""
    options = parser(__doc__)
    options.add_argument("--size", action="append", metavar="SERVICESxENDPOINTS")
    options.add_argument("--mode", default="nftables")
    options.add_argument("--burst", type=int, default=1000)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    sizes = [tuple(map(int, each.split("x"))) for each in given.size or ()]
    if given.serve:
        serve(*sizes[0])
        return 0
    report = Report("api_list", given)
    namespace = f"nxbench-{os.getpid()}-api"
    netns.create(namespace)
    try:
        with netns.entered(namespace):
            for services, endpoints in sizes or ([(1000, 10)] if given.quick else [(5000, 10), (10_000, 10)]):
                measure(report, services, endpoints, given)
                subprocess.run(["nft", "flush", "ruleset"], check=True)
    finally:
        netns.delete(namespace)
    return report.end()


def measure(report: Report, services: int, endpoints: int, given: argparse.Namespace) -> None:
    """Everything of one size, in the namespace of the calling thread."""
    argv = [sys.executable, __file__, "--serve", f"--size={services}x{endpoints}"]
    server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    size = f"{services:,} Services, {services:,} slices of {endpoints}"
    try:
        url = server.stdout.readline().strip()
        table = report.table(f"From an API server, {size}", unit="s", floor="http.client and json.loads")
        for name in ("list", "streaming list"):
            figures = [listed(url, streaming=name == "streaming list") for _ in range(given.runs)]
            _timed(table, f"{name}, decoded and checked", figures, LIST_BAR, LIST_RATIO)
        starts = []
        for _ in range(given.runs - 1):
            proxy, figure = started(url, given.mode)
            starts.append(figure)
            proxy.end()
            subprocess.run(["nft", "flush", "ruleset"], check=True)
        proxy, figure = started(url, given.mode)
        try:
            bar = START_BARS.get((services, endpoints), START_BAR)
            _timed(table, "process start to first sync", [*starts, figure], bar, START_RATIO)
            memory = report.table(f"Memory of the process, {size}", unit="MB")
            memory.row("resident", proxy.memory("VmRSS"), most=MEMORY_BARS.get((services, endpoints), MEMORY_BAR))
            memory.row("at most it was", proxy.memory("VmHWM"))
            began = time.time()
            print(given.burst, file=server.stdin, flush=True)
            last = float(server.stdout.readline())
            syncs, done = settled(proxy, began)
            burst = report.table(f"A burst of {given.burst:,} changes in a second, {size}", unit="s")
            burst.row(
                "from the last change to the last sync", max(0.0, done - last), most=BURST_BAR, note=f"{syncs} syncs"
            )
        finally:
            proxy.end()
    finally:
        server.kill()
        server.wait()


def started(url: str, mode: str) -> tuple[Proxy, Figure]:
    """A proxy that has just done its first sync."""
    base = sum(floor(url))
    proxy = Proxy(url, mode)
    ready = proxy.wait_for("ready: the first sync is done")
    return proxy, Figure(ready - proxy.started, proxy.cpu(), base)


def _timed(table: Table, what: str, figures: list[Figure], bar: float, ratio: float) -> None:
    """The floor of these runs, and they."""
    floor = table.row(f"{what}: floor", [figure.floor for figure in figures])
    seconds = [figure.seconds for figure in figures]
    table.row(what, seconds, floor=floor, most=bar, most_ratio=ratio)
    table.row(f"{what}: CPU", [figure.cpu for figure in figures], floor=floor)


if __name__ == "__main__":
    sys.exit(main())
