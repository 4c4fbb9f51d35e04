"""Reading a dump of 200,000 rules with kube-proxy's layout, and tracing one packet through it.

    python benchmarks/trace_dump.py [--quick] [--rules 200000] [--rounds 3] [--json FILE]

Each measurement is a process of its own: its processor seconds from the file to the trace, without loading modules, and the
largest memory it had. The floor is reading the file and splitting it into lines. Bars: 3 s, 500 MB.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from frame import big_dump
from frame.report import Report, Table, parser
from narthex.linux.run import run
from narthex.model import Disposition, Host, IPFamily, Packet
from narthex.netfilter.dump.read import read_dump
from narthex.netfilter.walk.walk import walk

_CHILD = "--child"
_ENDPOINTS = 3


class Measured(msgspec.Struct):
    """What one process saw."""

    floor: float
    seconds: float
    megabytes: float


def measure(path: Path, destination: str) -> Measured:
    """Read and trace, in this process."""
    begin = time.process_time()
    data = path.read_bytes()
    lines = data.split(b"\n")
    floor = time.process_time() - begin
    del data, lines
    begin = time.process_time()
    dump = read_dump(path.read_bytes(), path.name)
    rules = dump.for_family(IPFamily.IPV4)
    packet = Packet(source="192.0.2.1", destination=destination, port=80, iif="eth0")
    trace = walk(rules.ruleset, packet, Host(addresses=("192.0.2.9",)), objects=rules.objects)
    seconds = time.process_time() - begin
    if dump.problems or len(trace.ends()) != _ENDPOINTS or {end[0] for end in trace.ends()} != {Disposition.DELIVERED}:
        raise RuntimeError(f"{path.name} was not read: {dump.problems[:1]} {trace.ends()}")
    return Measured(floor, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> int:
    """Write the dumps, measure, and judge."""
    if sys.argv[1:2] == [_CHILD]:
        sys.stdout.write(msgspec.json.encode(measure(Path(sys.argv[2]), sys.argv[3])).decode())
        return 0
    options = parser(__doc__)
    options.add_argument("--rules", type=int, default=200_000)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    rules, rounds = (20_000, 1) if asked.quick else (asked.rules, asked.rounds)
    report = Report("trace_dump", asked)
    times = report.table(
        f"Reading {rules:,} rules and tracing one packet", unit="s", floor="reading and splitting the file"
    )
    found: dict[str, list[Measured]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, lines, services in (
            ("iptables-save", big_dump.save_lines, big_dump.save_services),
            ("nft list ruleset", big_dump.nft_lines, big_dump.nft_services),
        ):
            path = Path(folder) / f"{name.split()[0]}.txt"
            with path.open("w") as file:
                file.writelines(line + "\n" for line in lines(rules, _ENDPOINTS))
            last = big_dump.cluster_ip(services(rules, _ENDPOINTS) - 1)
            found[name] = [
                msgspec.json.decode(run([sys.executable, __file__, _CHILD, str(path), last]), type=Measured)
                for _ in range(rounds)
            ]
            _tell(times, name, found[name])
    memory = report.table("The largest memory", unit="MB")
    for name, measured in found.items():
        memory.row(name, [each.megabytes for each in measured], most=500)
    return report.end()


def _tell(times: Table, name: str, measured: list[Measured]) -> None:
    floor = times.row(f"{name}: floor", [each.floor for each in measured])
    times.row(name, [each.seconds for each in measured], floor=floor, most=3.0)


if __name__ == "__main__":
    sys.exit(main())
