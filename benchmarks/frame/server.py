"""An API server in a process of its own, with objects as big as a real one sends them (managedFields, owner references).

with Server(5000, 10) as server:
    ... server.url ...
    server.change(1000, 1000)
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from narthex.lab.encode import encode
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import node

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
    """Be the server: print its address; for each line `COUNT RATE` that is read make so many changes, so many a second, and print
    when that was done."""
    with FaultyApiServer() as server:
        server.put_raw("Node", encode(node()))
        for number in range(services):
            server.put_raw("Service", service(number))
            server.put_raw("EndpointSlice", endpoint_slice(number, endpoints))
        print(server.url, flush=True)
        done = 0
        for line in sys.stdin:
            count, rate = map(int, line.split())
            start = time.perf_counter()
            for turn in range(count):
                time.sleep(max(0.0, start + turn / rate - time.perf_counter()))
                # One endpoint more in each round through all Services, one less in the next.
                extra = 1 - done // services % 2
                server.put_raw("EndpointSlice", endpoint_slice(done % services, endpoints, extra))
                done += 1
                if done % 1000 == 0:
                    # As etcd does: the past is not kept for ever.
                    server.do(lambda data: data.compact(data.version - 1000))
            print(time.time(), flush=True)


class Server:
    """So many Services and slices of so many endpoints, in the network namespace of the calling thread."""

    def __init__(self, services: int, endpoints: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
        program = f"from frame.server import serve; serve({services}, {endpoints})"
        argv = [sys.executable, "-c", program]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.url = self._line()

    def change(self, count: int, rate: int) -> float:
        """Change so many slices, so many a second; when the last was done (seconds since 1970)."""
        assert self._process.stdin is not None
        print(count, rate, file=self._process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit("the API server of the benchmark ended")
        return line

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
