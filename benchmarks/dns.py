"""5,000 Services asked by dnsperf with 8 clients, one question in four for a name that does not exist and was never asked.

    sudo python benchmarks/dns.py [--quick] [--services 5000] [--seconds 5] [--workers 1]

Printed: answers a second and a CPU second (user and system time of all of the server's processes), beside knot with the
same names in a zone file and beside an echo loop in Python, which is what the kernel and recvfrom and sendto alone cost;
99th percentile of the latency at half of that load; memory (proportional set size of all processes, after the load); time
from the start of the process to the first right answer, median of several, and the CPU seconds until then; time from the
moment an API server sends an event to the right answer. Modules are compiled beforehand, as in whatever is installed.

Bars, on the quiet two-core machine for which they are meant: 115,000 answers a CPU second, which is twice what CoreDNS 1.13.1 gave
there (58,000), and on any machine 0.7 of the echo loop's; 2 ms, 80 MB, 1 s, 2 ms. Needs root, dnsperf and knot. Works in a network namespace of its own and removes it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from frame.report import Report, parser
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.model import EndpointSlice, Service
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import endpoint, endpoint_slice, service

CLIENTS = 8
ANSWERS_RATIO, LATENCY_BAR, MEMORY_BAR, START_BAR, CHANGE_BAR = 0.7, 0.002, 80.0, 1.0, 0.002
_CHANGES = 50
_STARTS = 5
_PATIENCE = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = Path(__file__).parents[1] / "src"
COREFILE = """
.:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
    prometheus :9153
    loadbalance
}
"""
ECHO = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
sock.bind(("127.0.0.1", 53))
receive, send = sock.recvfrom, sock.sendto
rest = bytes.fromhex("c00c00010001000000050004") + bytes(4)
while True:
    packet, client = receive(4096)
    send(packet[:2] + b"\\x85\\x00\\0\\1\\0\\1\\0\\0\\0\\0" + packet[12:] + rest, client)
"""


class Load(NamedTuple):
    """What dnsperf and the server's processes say of a run."""

    answers: int
    per_second: float
    cpu: float
    latencies: list[float]

    @property
    def per_cpu(self) -> float:
        return self.answers / self.cpu


class Start(NamedTuple):
    """From the process to the first right answer."""

    seconds: float
    cpu: list[float]
    """CPU seconds until then of the process that reads and of those that answer."""


class Change(NamedTuple):
    """Seconds to the right answer since an address was changed at the API server, and since that has sent the event."""

    after_edit: float
    after_event: float


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--services", type=int, default=0)
    options.add_argument("--seconds", type=int, default=0)
    options.add_argument("--workers", type=int, default=0, help="0: as narthex dns chooses")
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    told = options.parse_args()
    told.services = told.services or (500 if told.quick else 5000)
    told.seconds = told.seconds or (2 if told.quick else 5)
    if told.serve:
        _serve(told.services)
        return 0
    report = Report("dns", told)
    name = f"nxdnsb-{os.getpid()}"
    create_namespace(name)
    try:
        run(["ip", "link", "set", "lo", "up"], namespace=name)
        with tempfile.TemporaryDirectory() as folder, in_namespace(name):
            _measure(report, Path(folder), told.services, told.seconds, told.workers)
    finally:
        delete_namespace(name)
    return report.end()


def _measure(report: Report, folder: Path, services: int, seconds: int, workers: int) -> None:
    questions = _questions(folder, services)
    with _process([sys.executable, "-c", ECHO]) as echo:
        _until(lambda: bool(_ask("svc-0.ns-0.svc.cluster.local")), "the echo")
        floor = _load(questions, seconds, [echo])
    with _process(_knot(folder, services)) as knot:
        _until(lambda: _ask("svc-1.ns-1.svc.cluster.local")[-4:] == _packed(1), "knot")
        static = _load(questions, seconds, [knot])
    # In a process of its own: in ours, the two would take turns at Python's one lock.
    argv = [sys.executable, __file__, "--services", str(services), "--serve"]
    environment = {**os.environ, "PYTHONPATH": str(_PAGE)}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as api:
        try:
            _ours(report, folder, api, questions, seconds, workers, floor, static)
        finally:
            api.kill()


def _serve(services: int) -> None:
    """Be the API server: print its URL, and give `svc-1` each address that comes in; for an empty line say when the last
    event was sent."""
    with FaultyApiServer() as api:
        objects: list[Service | EndpointSlice] = []
        for number in range(services):
            objects += _objects(number)
        api.put(*objects)
        print(api.url, flush=True)
        for line in sys.stdin:
            if address := line.strip():
                api.put(service("ns-1/svc-1", address))
            else:
                print(api.sent_at, flush=True)


def _ours(
    report: Report,
    folder: Path,
    api: subprocess.Popen[str],
    questions: Path,
    seconds: int,
    workers: int,
    floor: Load,
    static: Load,
) -> None:
    assert api.stdout is not None
    corefile = folder / "Corefile"
    corefile.write_text(COREFILE)
    argv = [
        sys.executable,
        "-m",
        "narthex",
        "dns",
        f"--conf={corefile}",
        f"--master={api.stdout.readline().strip()}",
        f"--workers={workers}",
    ]
    # The first one compiles the modules.
    starts = [_start(argv, folder) for _ in range(1 + _STARTS)][1:]
    with _process(argv, folder) as server:
        _first_answer()
        load = _load(questions, seconds, _family(server))
        half = _load(questions, seconds, _family(server), rate=int(load.per_second / 2))
        memory = sum(map(_pss, _family(server)))
        changes = _changes(api)
    with _process([sys.executable, "-c", ECHO]) as echo:
        _until(lambda: bool(_ask("svc-0.ns-0.svc.cluster.local")), "the echo")
        bare = _load(questions, seconds, [echo], rate=int(load.per_second / 2))
    table = report.table(f"Answers a CPU second, {CLIENTS} clients", unit="per s", floor="an echo loop in Python")
    base = table.row("echo loop, recvfrom and sendto", floor.per_cpu, note=f"{floor.per_second:,.0f} a second")
    knot = table.row("knot, zone file", static.per_cpu, floor=base, note=f"{static.per_second:,.0f} a second")
    table.row(
        "narthex dns",
        load.per_cpu,
        floor=base,
        peer=knot,
        least_ratio=ANSWERS_RATIO,
        note=f"{load.per_second:,.0f} a second",
    )
    table = report.table("Latency at half of that load", unit="ms", floor="the echo loop")
    for label, of in (("median", statistics.median), ("99th percentile", _last)):
        base = table.row(f"echo loop, {label}", of(bare.latencies) * 1e3)
        most = LATENCY_BAR * 1e3 if of is _last else None
        table.row(f"narthex dns, {label}", of(half.latencies) * 1e3, floor=base, most=most)
    report.table("Memory of all processes, proportional", unit="MB").row("narthex dns", memory, most=MEMORY_BAR)
    table = report.table("From the start to the first right answer", unit="s")
    table.row("start to first answer", [start.seconds for start in starts], most=START_BAR)
    table.row("CPU of the process that reads", [start.cpu[0] for start in starts])
    table.row("CPU of one that answers", [start.cpu[1] for start in starts])
    table = report.table("From a change to the right answer", unit="ms")
    table.row("since the server's event", [each.after_event * 1e3 for each in changes], most=CHANGE_BAR * 1e3)
    table.row("since the edit at the server", [each.after_edit * 1e3 for each in changes])


def _last(latencies: list[float]) -> float:
    return statistics.quantiles(latencies, n=100)[98] if len(latencies) > 1 else latencies[0]


def _first_answer() -> None:
    _until(lambda: _ask("svc-1.ns-1.svc.cluster.local")[-4:] == _packed(1), "the first answer", pause=0.002)


def _start(argv: Sequence[str], folder: Path) -> Start:
    begun = time.monotonic()
    with _process(argv, folder) as server:
        _first_answer()
        return Start(time.monotonic() - begun, [_cpu(pid) for pid in _family(server)])


def _objects(number: int) -> list[Service | EndpointSlice]:
    made = endpoint_slice(f"ns-{number % 10}/svc-{number}", endpoint(f"10.64.{number >> 8}.{number & 255}"))
    owner = (("kubernetes.io/service-name", made.service_name),)
    return [
        service(f"ns-{number % 10}/svc-{number}", socket.inet_ntoa(_packed(number))),
        msgspec.structs.replace(made, labels=owner),
    ]


def _packed(number: int) -> bytes:
    return bytes((10, 110, number >> 8, number & 255))


def _questions(folder: Path, services: int) -> Path:
    rng = random.Random(4)
    path = folder / "questions"
    with path.open("w") as file:
        for number in range(1_000_000):
            which = rng.randrange(services)
            name = f"nope-{number}.ns-{which % 10}" if number % 4 == 3 else f"svc-{which}.ns-{which % 10}"
            file.write(f"{name}.svc.cluster.local A\n")
    return path


def _knot(folder: Path, services: int) -> Sequence[str]:
    """knotd with all names in a zone file, one UDP worker for each processor, as it comes."""
    zone = folder / "zone"
    lines = ["@ 30 SOA ns.dns hostmaster 1 7200 1800 86400 30", "@ 30 NS ns.dns", "ns.dns 30 A 127.0.0.1"]
    lines += [f"svc-{n}.ns-{n % 10}.svc 30 A {socket.inet_ntoa(_packed(n))}" for n in range(services)]
    zone.write_text("\n".join(lines) + "\n")
    conf = folder / "knot.conf"
    conf.write_text(
        f"server:\n  listen: 127.0.0.1@53\n  rundir: {folder}\n  background-workers: 1\ndatabase:\n  storage: {folder}\n"
        f"log:\n  - target: stderr\n    any: error\nzone:\n  - domain: cluster.local\n    file: {zone}\n"
    )
    return ["knotd", "-c", str(conf)]


@contextmanager
def _process(argv: Sequence[str], compiled: Path | None = None) -> Iterator[int]:
    """A program while it runs; a Python one keeps its compiled modules in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(_PAGE)}
    if compiled is not None:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(compiled)
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def _load(questions: Path, seconds: int, pids: Sequence[int], rate: int = 0) -> Load:
    before = sum(map(_cpu, pids))
    argv = ["dnsperf", "-s", "127.0.0.1", "-d", str(questions), "-c", str(CLIENTS), "-l", str(seconds)]
    said = run([*argv, *(["-Q", str(rate), "-v"] if rate else [])])
    cpu = sum(map(_cpu, pids)) - before
    answers = int(_found(r"Queries completed:\s+(\d+)", said))
    lost = int(_found(r"Queries lost:\s+(\d+)", said))
    if lost > answers / 1000:
        raise SystemExit(f"{lost} of {answers} questions were not answered: nothing can be told from that")
    each = [float(text) for text in re.findall(r"^> .* (\d+\.\d+)$", said, re.MULTILINE)]
    mean = float(_found(r"Average Latency \(s\):\s+([\d.]+)", said))
    return Load(answers, float(_found(r"Queries per second:\s+([\d.]+)", said)), cpu, each or [mean])


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise SystemExit(f"dnsperf did not say {pattern}:\n{text[-2000:]}")
    return match[1]


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _pss(pid: int) -> float:
    return int(_found(r"Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())) / 1024


def _ask(name: str) -> bytes:
    """One question over UDP; empty when nobody answers at once."""
    labels = b"".join(bytes((len(word),)) + word.encode() for word in name.split("."))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.5)
        sock.connect(("127.0.0.1", 53))
        try:
            sock.send(b"\x12\x34\x01\x00\0\1\0\0\0\0\0\0" + labels + b"\0\0\1\0\1")
            return sock.recv(4096)
        except OSError:
            return b""


def _until(condition: Callable[[], bool], what: str, pause: float = 0.05) -> None:
    latest = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > latest:
            raise SystemExit(f"waited {_PATIENCE:g} s in vain for {what}")
        time.sleep(pause)


def _changes(api: subprocess.Popen[str]) -> list[Change]:
    """From the moment the API server is told of a change to the first answer that shows it."""
    assert api.stdin is not None and api.stdout is not None
    took = []
    for number in range(_CHANGES):
        time.sleep(0.15)
        ip = bytes((10, 111, 0, number + 1))
        begun = time.monotonic()
        print(socket.inet_ntoa(ip), file=api.stdin, flush=True)
        _until(lambda ip=ip: _ask("svc-1.ns-1.svc.cluster.local")[-4:] == ip, "a change", pause=0.0)  # type: ignore[misc]
        answered = time.monotonic()
        print(file=api.stdin, flush=True)
        took.append(Change(answered - begun, answered - float(api.stdout.readline())))
    return took


if __name__ == "__main__":
    sys.exit(main())
