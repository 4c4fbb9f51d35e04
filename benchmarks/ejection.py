"""Passive ejection: the share of slow connections with one black hole among ten endpoints, before and after.

    sudo python benchmarks/ejection.py [--quick] [--rate 100] [--seconds 30] [--json FILE]

Four clients, the node, and the endpoints are in network namespaces of their own; one endpoint swallows all packets. Each client
begins connections through a Service at a fixed rate; a connection is slow if it is not made within half a second. Bars: three
seconds after the first connection, at most 0.5 % are slow, trials included, and no other endpoint is ejected. Needs root and
cgroup v2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import create_server
from typing import NamedTuple

from frame.report import Report, parser
from narthex.linux.bpf import mount_bpf_file_system, unmount
from narthex.linux.cgroups import cgroup_mount, create_cgroup, move_process, remove_cgroup
from narthex.linux.clock import SystemClock
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.model import IPFamily
from narthex.proxy.kernel.sockets import remove_pins
from narthex.proxy.plan.ejection import EjectionPolicy
from narthex.proxy.plan.ir import Plan
from narthex.proxy.program.ejection import EjectionReporter, PassiveEjection
from narthex.proxy.program.sockets import SocketAccelerator
from narthex.testing.build import endpoint, endpoint_slice, plan, service, snapshot

_NAME = f"nxbench-{os.getpid()}"
_PINS = Path(f"/run/{_NAME}-bpf")
_CLIENTS = 4
_ENDPOINTS = [f"10.64.2.{number}" for number in range(10, 20)]
_HOLE = _ENDPOINTS[3]
_VIP = "10.110.0.5"
_SETTLED = 3.0

_CLIENT = r"""
import json, select, socket, sys, time

SLOW, GIVEN_UP = 0.5, 3.0
address, port, rate, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
sys.stdin.readline()
start, begun, waiting, poll, done = time.monotonic(), 0, {}, select.poll(), []
while True:
    now = time.monotonic() - start
    while begun / rate <= now < seconds:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex((address, port))
        poll.register(sock, select.POLLOUT)
        waiting[sock.fileno()] = sock, now
        begun += 1
    for number, (sock, at) in list(waiting.items()):
        if now - at > GIVEN_UP:
            done.append((at, True))
            poll.unregister(number)
            waiting.pop(number)[0].close()
    if now >= seconds and not waiting:
        break
    for number, _ in poll.poll(max(0.0, min(begun / rate - now if now < seconds else 0.05, 0.05)) * 1000):
        poll.unregister(number)
        sock, at = waiting.pop(number)
        failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        done.append((at, bool(failed) or time.monotonic() - start - at > SLOW))
        sock.close()
print(json.dumps(done))
"""


class Attempt(NamedTuple):
    """One connection: when it began, in seconds from the start, and whether it was slow."""

    at: float
    slow: bool


class EjectionRun(NamedTuple):
    """What came of one run."""

    attempts: list[Attempt]
    ejected_at: dict[str, float]
    """Seconds from the start until an endpoint got no new connections."""


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--rate", type=float, default=100.0)
    options.add_argument("--seconds", type=float, default=0.0)
    asked = options.parse_args()
    seconds = asked.seconds or (12.0 if asked.quick else 30.0)
    report = Report("ejection", asked)
    with world() as cgroup:
        before = _run(cgroup, asked.rate, seconds / 2, ejects=False)
        after = _run(cgroup, asked.rate, seconds, ejects=True)
    table = report.table(f"Slow connections, one black hole among ten, {asked.rate:.0f} per second", unit="%")
    table.row("without ejection", _share(before.attempts, 0.0, seconds))
    table.row(f"with ejection, the first {_SETTLED:.0f} s", _share(after.attempts, 0.0, _SETTLED))
    table.row(f"with ejection, later, up to {seconds:.0f} s", _share(after.attempts, _SETTLED, seconds), most=0.5)
    times = report.table("From the first connection to the ejection", unit="s")
    times.row("the black hole", after.ejected_at.get(_HOLE, seconds))
    others = report.table("Ejected endpoints that answer", unit="endpoints")
    others.row("of nine", len(after.ejected_at.keys() - {_HOLE}), most=0)
    return report.end()


def _share(attempts: list[Attempt], start: float, end: float) -> float:
    chosen = [each.slow for each in attempts if start <= each.at < end]
    return 100 * sum(chosen) / len(chosen)


@contextmanager
def world() -> Iterator[Path]:
    """The namespaces, with servers at all endpoints but one; yields the cgroup of the clients."""
    mount = cgroup_mount()
    assert mount is not None, "no cgroup v2 hierarchy is mounted"
    cgroup = mount / _NAME
    node, far = f"{_NAME}-node", f"{_NAME}-far"
    with ExitStack() as stack:
        create_cgroup(cgroup)
        stack.callback(remove_cgroup, cgroup)
        mount_bpf_file_system(_PINS)
        stack.callback(_PINS.rmdir)
        stack.callback(unmount, _PINS)
        for name in (node, far, *_clients()):
            create_namespace(name)
            stack.callback(delete_namespace, name)
        for number, name in enumerate((*_clients(), far)):
            net = f"10.20.{number}"
            run(
                [
                    "ip",
                    "link",
                    "add",
                    f"to{number}",
                    "netns",
                    node,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    name,
                ]
            )
            _ip(node, f"addr add {net}.1/24 dev to{number}", f"link set to{number} up")
            _ip(name, f"addr add {net}.2/24 dev eth0", "link set eth0 up", f"route add default via {net}.1")
        _ip(node, f"route add 10.64.2.0/24 via 10.20.{_CLIENTS}.2")
        run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], namespace=node)
        # Packets to an address that this host does not have, and does not forward, are lost.
        run(["sysctl", "-qw", "net.ipv4.ip_forward=0"], namespace=far)
        for address in _ENDPOINTS:
            if address != _HOLE:
                _ip(far, f"addr add {address}/32 dev eth0")
        with in_namespace(far):
            # The kernel completes handshakes by itself, up to the backlog.
            servers = [
                stack.enter_context(create_server((each, 8080), backlog=4096)) for each in _ENDPOINTS if each != _HOLE
            ]
        stack.enter_context(_accepting(servers))
        yield cgroup


def _clients() -> list[str]:
    return [f"{_NAME}-client{number}" for number in range(_CLIENTS)]


def _ip(namespace: str, *commands: str) -> None:
    for command in commands:
        run(["ip", *command.split()], namespace=namespace)


@contextmanager
def _accepting(servers: list) -> Iterator[None]:
    """A process that accepts connections and closes them."""
    process = os.fork()
    if not process:
        import selectors

        chosen = selectors.DefaultSelector()
        for server in servers:
            server.setblocking(False)
            chosen.register(server, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in chosen.select():
                    with suppress(OSError):
                        key.fileobj.accept()[0].close()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)


def _plan() -> Plan:
    return plan(service("shop/web", _VIP), endpoint_slice("shop/web", *map(endpoint, _ENDPOINTS), port=8080))


def _run(cgroup: Path, rate: float, seconds: float, *, ejects: bool) -> EjectionRun:
    """Let all clients connect, while the loop takes turns."""
    clock, node, ejected = SystemClock(), f"{_NAME}-node", {}
    with in_namespace(node):
        accelerator = SocketAccelerator(str(cgroup), _PINS)
        if ejects:
            reporter = EjectionReporter(lambda _: None, snapshot)
            accelerator.ejection = PassiveEjection(reporter, clock.watch_files, EjectionPolicy())
        accelerator.follow(_plan())
    assert not accelerator.reason, accelerator.reason
    processes = []
    try:
        for name in _clients():
            argv = [sys.executable, "-S", "-c", _CLIENT, _VIP, "80", str(rate / _CLIENTS), str(seconds)]
            with in_namespace(name):
                process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            move_process(cgroup, process.pid)
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        start = clock.now()
        while clock.now() < start + seconds + 4:
            delay = accelerator.tend(clock.now())
            for out in accelerator.ejection.out.values() if accelerator.ejection else ():
                for address, _ in frozenset().union(*out.values()):
                    ejected.setdefault(address, clock.now() - start)
            clock.sleep(min(delay, 0.5))
        attempts = [Attempt(*each) for process in processes for each in json.loads(process.communicate(timeout=60)[0])]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        accelerator.close()
        with in_namespace(node):
            for family in IPFamily:
                remove_pins(family, _PINS)
    return EjectionRun(attempts, ejected)


if __name__ == "__main__":
    sys.exit(main())
