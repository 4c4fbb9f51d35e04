"""The relay of mode userspace beside a direct connection: one bulk stream, new connections, a dead endpoint, company.

    sudo python benchmarks/userspace_relay.py [--quick] [--megabytes 4000] [--connections 3000] [--seconds 5]

Three network namespaces: client, node, endpoints. "Direct" is the same client and endpoint with the node only routing; "relayed" goes to a cluster IP on the node, through its rules and its
relay, which hands bulk connections over to the kernel ("copied": it cannot, because of TCP timestamps). Ratios are of one
run on one machine. A dead endpoint among the live ones must cost no error: the exit status is
1 when it does. The last part asks why the relay is a process of its own: the time that a request and its answer take
through a relay while the proxy renders thousands of Services, once with the relay in another process and once in another
thread. Needs root. Works in network namespaces of its own and removes them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable

from frame.path import BULK, ENDPOINTS, FAR, NODE, SHORT, Endpoints, bulk, connect, world
from frame.report import Report, parser
from narthex.linux.namespaces import in_namespace
from narthex.model import IPFamily
from narthex.proxy.backends.userspace.backend import UserspaceBackend
from narthex.proxy.kernel.userspace import UserspaceTarget
from narthex.proxy.relay.process import RelayProcess, RelaySetup
from narthex.proxy.relay.relay import Relay
from narthex.proxy.relay.wire import RelayOrder, RelayPort
from narthex.testing.build import endpoint, endpoint_slice, plan, service

DEAD = "10.64.2.99"
CLUSTER_IP = "10.110.0.5"


def short(where: tuple[str, int], count: int) -> tuple[float, float, int]:
    """Connections per second one after the other (connect, read the answer to its end, close), the 99th percentile of
    their times in ms, and how many failed."""
    times, errors = [], 0
    start = time.perf_counter()
    for _ in range(count):
        before = time.perf_counter()
        try:
            with connect(where) as sock:
                said = sock.recv(100)
                errors += said != b"word"
        except OSError:
            errors += 1
        times.append(time.perf_counter() - before)
    total = time.perf_counter() - start
    return count / total, statistics.quantiles(times, n=100)[98] * 1e3, errors


def relayed(ends: list[str], *, plain_tcp: bool = True) -> UserspaceTarget:
    """Rules and relay on the node for a Service with these endpoints."""
    backend, target = UserspaceBackend(plain_tcp=plain_tcp), UserspaceTarget(IPFamily.IPV4, NODE)
    made = plan(
        service("shop/bulk", CLUSTER_IP, port=80),
        endpoint_slice("shop/bulk", *(endpoint(end) for end in ENDPOINTS), port=BULK),
        service("shop/short", "10.110.0.6", port=80),
        endpoint_slice("shop/short", *(endpoint(end) for end in ends), port=SHORT),
    )
    target.apply(backend.diff(None, backend.render(made)))
    return target


# ---- company -------------------------------------------------------------------------------------------------------


def busy(ended: threading.Event, rounds: list[float]) -> None:
    """What a proxy does with a big cluster, again and again; `rounds` gets the time of each."""
    backend = UserspaceBackend()
    objects = [
        each
        for number in range(300)
        for each in (
            service(f"shop/s-{number}", f"10.111.{number >> 8}.{number & 255}"),
            endpoint_slice(f"shop/s-{number}", *(endpoint(f"10.65.{number >> 8}.{end}") for end in range(5))),
        )
    ]
    while not ended.is_set():
        start = time.perf_counter()
        backend.render(plan(*objects))
        rounds.append(time.perf_counter() - start)


def in_thread(entry: RelayPort) -> tuple[Callable[[], None], int]:
    """A relay in a thread of this process; how to end it, and its port."""
    loop = asyncio.new_event_loop()
    ready, ports = threading.Event(), []
    relays: list[Relay] = []

    def serve() -> None:
        relays.append(Relay(loop, socket.AF_INET))
        relays[0].obey(RelayOrder(listen=(entry,)))
        ports.append(relays[0].port_of(entry.key))
        loop.call_soon(ready.set)
        loop.run_forever()
        relays[0].close()
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait()

    def end() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    return end, ports[0]


def in_process(entry: RelayPort) -> tuple[Callable[[], None], int]:
    """The same in a process of its own."""
    relay = RelayProcess(RelaySetup(socket.AF_INET), NODE)
    relay.ask(RelayOrder(listen=(entry,)))
    return relay.close, entry.port


def company(
    make: Callable[[RelayPort], tuple[Callable[[], None], int]], seconds: float
) -> tuple[list[float], list[float]]:
    """Times of connect, answer and close through a relay while this process is busy, and of this process' rounds, in
    ms. Clients are processes of their own."""
    entry = RelayPort("tcp", 61000, ("shop", "web", ""), ((ENDPOINTS[0], SHORT),))
    with in_namespace(NODE):
        end, port = make(entry)
    ended = threading.Event()
    rounds: list[float] = []
    worker = threading.Thread(target=busy, args=(ended, rounds))
    worker.start()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        stop, times = time.perf_counter() + seconds, []
        while time.perf_counter() < stop:
            before = time.perf_counter()
            with connect(("198.51.100.1", port)) as sock:
                while sock.recv(100):
                    pass
            times.append((time.perf_counter() - before) * 1e3)
        os.write(writer, " ".join(f"{each:.3f}" for each in times[:4000]).encode())
        os._exit(0)
    os.close(writer)
    said = b""
    while part := os.read(reader, 1 << 16):
        said += part
    os.close(reader)
    os.waitpid(child, 0)
    ended.set()
    worker.join()
    end()
    return [float(word) for word in said.split()], [each * 1e3 for each in rounds]


def main() -> int:
    """Measure and print; 1 when a client met an error or a bar is missed."""
    options = parser(__doc__)
    options.add_argument("--megabytes", type=int, default=0)
    options.add_argument("--connections", type=int, default=0)
    options.add_argument("--seconds", type=float, default=0.0)
    asked = options.parse_args()
    megabytes = asked.megabytes or (1000 if asked.quick else 4000)
    connections = asked.connections or (500 if asked.quick else 3000)
    report = Report("userspace_relay", asked)
    with world():
        endpoints = Endpoints(FAR)
        endpoints.start()
        target = relayed(ENDPOINTS)
        rates: dict[str, list[float]] = {"direct": [], "relayed": [], "copied": []}
        # In turn, so that other work on the machine meets all of them.
        for _ in range(3 if asked.quick else 5):
            rates["direct"].append(bulk((ENDPOINTS[0], BULK), megabytes))
            rates["relayed"].append(bulk((CLUSTER_IP, 80), megabytes))
        handed_over = target.counts.handed_over
        target.clean()
        target = relayed(ENDPOINTS, plain_tcp=False)
        rates["copied"] = [bulk((CLUSTER_IP, 80), megabytes) for _ in rates["direct"]]
        target.clean()
        target = relayed(ENDPOINTS)
        table = report.table("One bulk stream", unit="MB/s", floor="direct")
        direct = table.row("direct", rates["direct"])
        told = f"{handed_over} of {len(rates['relayed'])} streams handed over"
        table.row("relayed", rates["relayed"], floor=direct, least_ratio=0.8, note=told)
        table.row("relayed, with TCP timestamps", rates["copied"], floor=direct, note="copied by the relay")
        plain, plain_99, failed = short((ENDPOINTS[0], SHORT), connections)
        made, made_99, errors = short(("10.110.0.6", 80), connections)
        target.clean()
        target = relayed([*ENDPOINTS, DEAD])
        rate, slowest, dead_errors = short(("10.110.0.6", 80), connections)
        retries = target.counts.retries
        target.clean()
        target.close()
        table = report.table("New connections", unit="per s", floor="direct")
        direct = table.row("direct", plain, note=f"99th percentile {plain_99:.2f} ms")
        table.row("relayed", made, floor=direct, note=f"99th percentile {made_99:.2f} ms")
        table.row("one of three endpoints dead", rate, floor=direct, note=f"{slowest:.2f} ms, {retries} retries")
        report.table("Errors that clients met", unit="errors").row(
            "all of these", failed + errors + dead_errors, most=0
        )
        table = report.table("Connect to close beside a proxy that renders", unit="ms", floor="relay in a thread of it")
        times = {}
        for label, make in (("relay in a thread of it", in_thread), ("relay in a process of its own", in_process)):
            times[label], rounds = company(make, asked.seconds or (1.0 if asked.quick else 5.0))
            told = f"the proxy's round {statistics.median(rounds):.0f} ms"
            table.row(label, times[label], floor=table.data.rows[0] if table.data.rows else None, note=told)
        endpoints.end()
        endpoints.join()
    return report.end() or (0 if retries else 1)


if __name__ == "__main__":
    sys.exit(main())
