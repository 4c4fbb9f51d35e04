"""Least connections of two choices: open connections by endpoint, beside endpoints that are selected at random.

    sudo python benchmarks/least_connections.py [--quick] [--open 1000] [--json FILE]

A client keeps so many connections open through a Service with ten endpoints: it closes one and opens another. Evenness is the number
of the endpoint with the most relative to the mean, over many moments. In the second table one endpoint is slow: its connections last
four times as long. At random, its number is four times that of the others. Bars: at most 1.1 with the least of two, and 2.0 for the
slow endpoint. Afterwards no connection is counted. Needs root and cgroup v2.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from frame.report import Report, parser
from narthex.linux.bpf import mount_bpf_file_system, unmount
from narthex.linux.cgroups import cgroup_mount, create_cgroup, move_process, remove_cgroup
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.privileges import allow_many_files
from narthex.linux.run import run
from narthex.model import IPFamily
from narthex.proxy.backends.sockets.document import socket_document
from narthex.proxy.kernel.sockets import pinned_sockets, remove_pins
from narthex.proxy.plan.balancing import LOAD_BALANCING
from narthex.proxy.program.sockets import SocketAccelerator
from narthex.testing.build import endpoint, endpoint_slice, plan, service

_NAME = f"nxbench-{os.getpid()}"
_PINS = Path(f"/run/{_NAME}-bpf")
_ENDPOINTS = [f"10.64.2.{number}" for number in range(10, 20)]
_SLOW = _ENDPOINTS[0]
_VIPS = {"random": "10.110.0.5", "least-connections": "10.110.0.6"}


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--open", type=int, default=1000)
    asked = options.parse_args()
    count = asked.open // 4 if asked.quick else asked.open
    report = Report("least_connections", asked)
    allow_many_files()
    with world():
        even = {name: _churn(vip, count, slow="") for name, vip in _VIPS.items()}
        slow = {name: _churn(vip, count, slow=_SLOW) for name, vip in _VIPS.items()}
        left = sum(sum(front.cluster_open) for front in socket_document(pinned_sockets(_PINS)).frontends)
    table = report.table(f"Most open connections of an endpoint, relative to the mean, {count:,} open", unit="x")
    table.row("random", [max(each.values()) * len(_ENDPOINTS) / count for each in even["random"]])
    least = [max(each.values()) * len(_ENDPOINTS) / count for each in even["least-connections"]]
    table.row("least of two", least, most=1.1)
    table = report.table(f"Open connections of an endpoint that takes four times as long, {count:,} open", unit="x")
    for name, bar in (("random", {}), ("least-connections", {"most": 2.0})):
        others = [(count - each[_SLOW]) / (len(_ENDPOINTS) - 1) for each in slow[name]]
        table.row(
            "random" if not bar else "least of two",
            [each[_SLOW] / mean for each, mean in zip(slow[name], others, strict=True)],
            **bar,
        )
    counted = report.table("Connections that are counted after all have ended", unit="connections")
    counted.row("of both Services", left, most=0)
    return report.end()


@contextmanager
def world() -> Iterator[None]:
    """A cgroup with this process in it, its own network namespace with all endpoints, and both Services."""
    mount = cgroup_mount()
    assert mount is not None, "no cgroup v2 hierarchy is mounted"
    cgroup = mount / _NAME
    with ExitStack() as stack:
        create_cgroup(cgroup)
        stack.callback(remove_cgroup, cgroup)
        stack.callback(move_process, mount)
        mount_bpf_file_system(_PINS)
        stack.callback(_PINS.rmdir)
        stack.callback(unmount, _PINS)
        create_namespace(_NAME)
        stack.callback(delete_namespace, _NAME)
        for address in _ENDPOINTS:
            run(["ip", "address", "add", address, "dev", "lo"], namespace=_NAME)
        stack.enter_context(in_namespace(_NAME))
        servers = [stack.enter_context(socket.create_server((each, 8080), backlog=4096)) for each in _ENDPOINTS]
        for server in servers:
            threading.Thread(target=_serve, args=(server,), daemon=True).start()
        accelerator = SocketAccelerator(str(cgroup), _PINS)
        objects = []
        for name, vip in _VIPS.items():
            objects.append(service(f"shop/{name}", vip, annotations=((LOAD_BALANCING, name),)))
            objects.append(endpoint_slice(f"shop/{name}", *map(endpoint, _ENDPOINTS), port=8080))
        accelerator.follow(plan(*objects))
        assert not accelerator.reason, accelerator.reason
        stack.callback(lambda: [remove_pins(family, _PINS) for family in IPFamily])
        stack.callback(accelerator.close)
        move_process(cgroup)
        yield


def _serve(server: socket.socket) -> None:
    """Tell each client which endpoint it has reached, and keep the connection until the client ends it."""
    taken = []
    while True:
        try:
            peer, _ = server.accept()
            peer.send(server.getsockname()[0].encode())
        except OSError:
            return
        taken.append(peer)
        if len(taken) > 600:
            taken.pop(0).close()


def _churn(vip: str, count: int, *, slow: str) -> list[Counter[str]]:
    """Replace connections one by one; return how many each endpoint had, at several moments."""
    order = random.Random(1)
    held: list[tuple[socket.socket, str]] = []
    moments = []
    for step in range(12 * count):
        if len(held) >= count:
            place = order.randrange(count)
            while held[place][1] == slow and order.random() < 0.75:
                place = order.randrange(count)
            held[place], held[-1] = held[-1], held[place]
            held.pop()[0].close()
        sock = socket.create_connection((vip, 80))
        held.append((sock, sock.recv(64).decode()))
        if step > 6 * count and step % (count // 4) == 0:
            moments.append(Counter(name for _, name in held))
    for sock, _ in held:
        sock.close()
    return moments


if __name__ == "__main__":
    sys.exit(main())
