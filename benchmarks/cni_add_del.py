"""ADD and DEL of a pod: bridge with host-local and ipMasq, then portmap with one host port, beside the reference plugins.

    sudo python benchmarks/cni_add_del.py [--quick] [--rounds 30] [--pods 200] [--reference /usr/lib/cni]

Each plugin is started as a container runtime starts it. There are two nodes for each of the reference, ours with the agent,
ours without, and a floor: one is empty, the other keeps `--pods` pods. In every round all eight take turns. The floor is what
`ip` takes for the pair, the bridge's port, an address and its announcement, and nothing else: what more it takes with pods kept
is the kernel's own part, which sends each broadcast to every port of the bridge. Bars: ours is faster than the reference in both
ADD and DEL, with and without the agent, and ADD with pods kept is, but for the kernel's part, no slower than without (a tenth
is allowed to chance). A busy machine blurs the last.
Needs root, and the package containernetworking-plugins. Works in network namespaces of its own and removes them.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from frame.report import Report, parser
from narthex.cni.program.install import install
from narthex.linux.links import ip_batch, set_sysctls
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace, namespace_names

PREFIX = f"ncb{os.getpid()}"
GROWTH = 1.1
"""An ADD with pods kept may take so many times as long, without what the kernel's part takes more."""
FLOOR = "kernel alone, by ip"


class Kind(msgspec.Struct):
    """One of those that are measured: where its programs are, and on which node it works."""

    name: str
    programs: Path
    node: str
    state: Path
    pods: int = 0

    def config(self, plugin: str, number: int) -> dict[str, Any]:
        common: dict[str, Any] = {"cniVersion": "0.4.0", "name": "bench", "type": plugin}
        if plugin == "portmap":
            port = {"hostPort": 10000 + number, "containerPort": 80, "protocol": "tcp"}
            return common | {"runtimeConfig": {"portMappings": [port]}}
        ipam = {"type": "host-local", "dataDir": str(self.state / "networks"), "ranges": [[{"subnet": "10.99.0.0/16"}]]}
        return common | {"bridge": "cni0", "isGateway": True, "ipMasq": True, "hairpinMode": True, "ipam": ipam}

    def call(self, command: str, plugin: str, number: int, extra: dict[str, Any]) -> dict[str, Any]:
        """One call as a runtime makes it. The namespace of the caller is the node's."""
        environment = {
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": f"{number:064x}",
            "CNI_NETNS": f"/run/netns/{pod(self, number)}",
            "CNI_IFNAME": "eth0",
            "CNI_PATH": str(self.programs),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }
        stdin = json.dumps(self.config(plugin, number) | extra).encode()
        done = subprocess.run([self.programs / plugin], input=stdin, env=environment, capture_output=True)
        if done.returncode != 0:
            raise SystemExit(f"{self.name}: {command} {plugin}: {done.stdout.decode()}{done.stderr.decode()}")
        return json.loads(done.stdout) if done.stdout.strip() else {}

    def add(self, number: int) -> tuple[float, dict[str, Any]]:
        """Seconds that ADD of the chain takes, and its result."""
        with in_namespace(self.node):
            begin = time.perf_counter()
            result = self.call("ADD", "bridge", number, {})
            result = self.call("ADD", "portmap", number, {"prevResult": result})
            return time.perf_counter() - begin, result

    def delete(self, number: int, result: dict[str, Any]) -> float:
        """Seconds that DEL of the chain takes."""
        with in_namespace(self.node):
            begin = time.perf_counter()
            self.call("DEL", "portmap", number, {"prevResult": result})
            self.call("DEL", "bridge", number, {"prevResult": result})
            return time.perf_counter() - begin


class Floor(Kind):
    """The least that the kernel has to do."""

    def add(self, number: int) -> tuple[float, dict[str, Any]]:
        inside, place = pod(self, number), number + 2
        mac = f"02:00:00:00:{place >> 8:02x}:{place & 255:02x}"
        begin = time.perf_counter()
        ip_batch(
            self.node,
            [
                f"link add v{number} type veth peer name eth0 address {mac} netns {inside}",
                f"link set v{number} master cni0 up",
            ],
        )
        set_sysctls(inside, {"net/ipv4/conf/eth0/arp_notify": "1"})
        address = f"address add 10.99.{place >> 8}.{place & 255}/16 dev eth0"
        ip_batch(inside, [address, "link set eth0 up", f"link set eth0 address {mac}"])
        return time.perf_counter() - begin, {}

    def delete(self, number: int, result: dict[str, Any]) -> float:  # noqa: ARG002 - as those of programs
        begin = time.perf_counter()
        ip_batch(self.node, [f"link delete v{number}"])
        return time.perf_counter() - begin


def pod(kind: Kind, number: int) -> str:
    return f"{kind.node}p{number}"


def measure(kinds: list[Kind], rounds: int) -> dict[str, dict[bool, Times]]:
    """ADD and DEL of each kind on its empty and its full node, in turns."""
    times: dict[str, tuple[list[float], list[float]]] = {kind.node: ([], []) for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            number = kind.pods
            create_namespace(pod(kind, number))
            seconds, result = kind.add(number)
            times[kind.node][0].append(seconds)
            times[kind.node][1].append(kind.delete(number, result))
            delete_namespace(pod(kind, number))
    found: dict[str, dict[bool, Times]] = {}
    for kind in kinds:
        found.setdefault(kind.name, {})[kind.pods > 0] = times[kind.node]
    return found


Times = tuple[list[float], list[float]]
"""Of ADD and of DEL, seconds."""


def fill(kind: Kind, pods: int) -> None:
    """Put pods on the node that stay."""
    while kind.pods < pods:
        create_namespace(pod(kind, kind.pods))
        kind.add(kind.pods)
        kind.pods += 1


def show(report: Report, found: dict[str, dict[bool, Times]], pods: int) -> None:
    """Tables of ADD and DEL, without pods and with some kept, and of what they make of an ADD."""
    for full, title in ((False, "no pods on the node"), (True, f"{pods} pods kept on the node")):
        for what, place in (("ADD", 0), ("DEL", 1)):
            table = report.table(f"{what}, {title}", unit="ms", floor="the reference plugins")
            base = table.row("reference", _ms(found["reference"][full][place]))
            for name, both in found.items():
                if name != "reference":
                    bar = 1.0 if name.startswith("narthex") else None
                    table.row(name, _ms(both[full][place]), peer=base, most_ratio=bar)
    table = report.table(f"ADD with {pods} pods kept beside none, without the kernel's part", unit="times")
    add = {name: [statistics.median(both[full][0]) for full in (False, True)] for name, both in found.items()}
    kernel = max(0.0, add[FLOOR][1] - add[FLOOR][0])
    for name, (without, kept) in add.items():
        bar = GROWTH if name.startswith("narthex") else None
        told = f"{(kept - without) * 1e3:.1f} ms more, the kernel's part among them"
        table.row(name, (kept - kernel) / without, most=bar, note=told)


def _ms(seconds: list[float]) -> list[float]:
    return [each * 1e3 for each in seconds]


def start_times(report: Report, ours: Path, rounds: int) -> None:
    """How long the program takes to answer VERSION without doing anything, beside /bin/true and the interpreter."""
    table = report.table("Start, VERSION", unit="ms", floor="python -ISE -c pass")
    floor = None
    for name, argv in (
        ("/bin/true", ["/bin/true"]),
        ("python -ISE -c pass", [sys.executable, "-ISE", "-c", "pass"]),
        ("ours, without agent", [ours / "loopback"]),
    ):
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            subprocess.run(argv, env={"CNI_COMMAND": "VERSION"}, stdout=subprocess.DEVNULL, check=True)
            times.append((time.perf_counter() - begin) * 1e3)
        row = table.row(name, times, floor=floor)
        floor = row if argv[0] == sys.executable else floor


def agent(kind: Kind) -> subprocess.Popen[str]:
    """Start the agent of a node, and wait until it listens."""
    options = ["--socket", str(kind.state / "cni.sock"), "--state-dir", str(kind.state / "state")]
    argv = [sys.executable, "-m", "narthex", "cni", "agent", *options]
    with in_namespace(kind.node):
        started = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    started.stdout.readline()
    return started


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=0)
    options.add_argument("--pods", type=int, default=0)
    options.add_argument("--reference", type=Path, default=Path("/usr/lib/cni"))
    arguments = options.parse_args()
    rounds = arguments.rounds or (5 if arguments.quick else 30)
    pods = arguments.pods or (20 if arguments.quick else 200)
    report = Report("cni_add_del", arguments)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        kinds = []
        for letter in "ef":
            kinds.append(Kind("reference", arguments.reference, f"{PREFIX}r{letter}", place / f"r{letter}"))
            for name, kind in (("narthex, agent", "a"), ("narthex, no agent", "n")):
                state = place / (kind + letter)
                install(state / "bin", None, socket=str(state / "cni.sock"), state=str(state / "state"))
                kinds.append(Kind(name, state / "bin", f"{PREFIX}{kind}{letter}", state))
            kinds.append(Floor(FLOOR, place, f"{PREFIX}k{letter}", place))
        agents = []
        try:
            for kind in kinds:
                create_namespace(kind.node)
                if kind.name == FLOOR:
                    ip_batch(
                        kind.node,
                        ["link add cni0 type bridge", "address add 10.99.0.1/16 dev cni0", "link set cni0 up"],
                    )
                if kind.name == "narthex, agent":
                    agents.append(agent(kind))
            measure(kinds, 2)
            for kind in kinds[len(kinds) // 2 :]:
                fill(kind, pods)
            show(report, measure(kinds, rounds), pods)
            start_times(report, kinds[2].programs, rounds)
        finally:
            for one in agents:
                one.send_signal(signal.SIGTERM)
                one.wait(timeout=30)
            for name in namespace_names():
                if name.startswith(PREFIX):
                    delete_namespace(name)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
