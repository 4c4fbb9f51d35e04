"""ADD and DEL of a pod: bridge with host-local and ipMasq, then portmap with one host port, beside the reference plugins.

    sudo python benchmarks/cni_add_del.py [--rounds 30] [--pods 200] [--reference /usr/lib/cni]

Each plugin is started as a container runtime starts it. There are two nodes for each of the reference, ours with the agent,
ours without, and a floor: one is empty, the other keeps `--pods` pods. In every round all eight take turns. The floor is what
`ip` takes for the pair, the bridge's port, an address and its announcement, and nothing else: what more it takes with pods kept
is the kernel's own part, which sends each broadcast to every port of the bridge. Bars: ours is faster than the reference in both
ADD and DEL, with and without the agent, and ADD with pods kept is, but for the kernel's part, no slower than without (a tenth
is allowed to chance). A busy machine blurs the last.
Needs root, and the package containernetworking-plugins. Works in network namespaces of its own and removes them.
"""

from __future__ import annotations

import argparse
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

from narthex.apps.cni.install import install
from narthex.host import links, netns

PREFIX = f"ncb{os.getpid()}"
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
        with netns.entered(self.node):
            begin = time.perf_counter()
            result = self.call("ADD", "bridge", number, {})
            result = self.call("ADD", "portmap", number, {"prevResult": result})
            return time.perf_counter() - begin, result

    def delete(self, number: int, result: dict[str, Any]) -> float:
        """Seconds that DEL of the chain takes."""
        with netns.entered(self.node):
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
        links.batch(
            self.node,
            [
                f"link add v{number} type veth peer name eth0 address {mac} netns {inside}",
                f"link set v{number} master cni0 up",
            ],
        )
        links.set_sysctls(inside, {"net/ipv4/conf/eth0/arp_notify": "1"})
        address = f"address add 10.99.{place >> 8}.{place & 255}/16 dev eth0"
        links.batch(inside, [address, "link set eth0 up", f"link set eth0 address {mac}"])
        return time.perf_counter() - begin, {}

    def delete(self, number: int, result: dict[str, Any]) -> float:  # noqa: ARG002 - as those of programs
        begin = time.perf_counter()
        links.batch(self.node, [f"link delete v{number}"])
        return time.perf_counter() - begin


def pod(kind: Kind, number: int) -> str:
    return f"{kind.node}p{number}"


def measure(kinds: list[Kind], rounds: int) -> dict[str, dict[bool, Medians]]:
    """ADD and DEL of each kind on its empty and its full node, in turns."""
    times: dict[str, tuple[list[float], list[float]]] = {kind.node: ([], []) for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            number = kind.pods
            netns.create(pod(kind, number))
            seconds, result = kind.add(number)
            times[kind.node][0].append(seconds)
            times[kind.node][1].append(kind.delete(number, result))
            netns.delete(pod(kind, number))
    medians: dict[str, dict[bool, Medians]] = {}
    for kind in kinds:
        add, delete = times[kind.node]
        medians.setdefault(kind.name, {})[kind.pods > 0] = statistics.median(add), statistics.median(delete)
    return medians


Medians = tuple[float, float]
"""Of ADD and of DEL, seconds."""


def fill(kind: Kind, pods: int) -> None:
    """Put pods on the node that stay."""
    while kind.pods < pods:
        netns.create(pod(kind, kind.pods))
        kind.add(kind.pods)
        kind.pods += 1


def show(medians: dict[str, dict[bool, Medians]], rounds: int, pods: int) -> None:
    """Print medians and ratios."""
    for full, title in ((False, "no pods on the node"), (True, f"{pods} pods kept on the node")):
        base = medians["reference"][full]
        print(f"\nmedian of {rounds}, {title}")
        print(f"{'':24}{'ADD ms':>8}{'ratio':>8}{'DEL ms':>8}{'ratio':>8}")
        for name, both in medians.items():
            add, delete = both[full]
            print(f"{name:24}{add * 1e3:8.1f}{add / base[0]:8.2f}{delete * 1e3:8.1f}{delete / base[1]:8.2f}")
    print("\nADD with pods kept, beside without: ratio, ms more")
    for name, both in medians.items():
        print(f"{name:24}{both[True][0] / both[False][0]:8.2f}{(both[True][0] - both[False][0]) * 1e3:8.1f}")


def start_times(ours: Path, rounds: int) -> None:
    """Print how long the program takes to answer VERSION without doing anything, beside /bin/true and the reference."""
    print(f"\n{'start, VERSION':24}{'ms':>8}")
    for name, argv in (
        ("/bin/true", ["/bin/true"]),
        ("python -ISE -c pass", [sys.executable, "-ISE", "-c", "pass"]),
        ("ours, without agent", [ours / "loopback"]),
    ):
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            subprocess.run(argv, env={"CNI_COMMAND": "VERSION"}, stdout=subprocess.DEVNULL, check=True)
            times.append(time.perf_counter() - begin)
        print(f"{name:24}{statistics.median(times) * 1e3:8.1f}")


def judged(medians: dict[str, dict[bool, Medians]]) -> list[str]:
    """What misses its bar."""
    missed = []
    ours = {name: both for name, both in medians.items() if name.startswith("narthex")}
    floor = medians[FLOOR][True][0] - medians[FLOOR][False][0]
    for name, both in ours.items():
        for full in (False, True):
            for what, mine, theirs in zip(("ADD", "DEL"), both[full], medians["reference"][full], strict=True):
                if mine >= theirs:
                    missed.append(f"{what}, {name}: {mine * 1e3:.1f} ms, reference {theirs * 1e3:.1f} ms")
    growth = {name: (both[True][0] - max(floor, 0.0)) / both[False][0] for name, both in ours.items()}
    return missed + [
        f"ADD, {name}: {one:.2f} times as long with pods kept, without the kernel's part"
        for name, one in growth.items()
        if one > 1.1
    ]


def agent(kind: Kind) -> subprocess.Popen[str]:
    """Start the agent of a node, and wait until it listens."""
    options = ["--socket", str(kind.state / "cni.sock"), "--state-dir", str(kind.state / "state")]
    argv = [sys.executable, "-m", "narthex", "cni", "agent", *options]
    with netns.entered(kind.node):
        started = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    started.stdout.readline()
    return started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pods", type=int, default=200)
    parser.add_argument("--reference", type=Path, default=Path("/usr/lib/cni"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        kinds = []
        for letter in "ef":
            kinds.append(Kind("reference", arguments.reference, f"{PREFIX}r{letter}", place / f"r{letter}"))
            for name, kind in (("narthex, agent", "a"), ("narthex, no agent", "n")):
                state = place / (kind + letter)
                install(state / "bin", None, socket=str(state / "cni.sock"), state=str(state / "state"), subnet="")
                kinds.append(Kind(name, state / "bin", f"{PREFIX}{kind}{letter}", state))
            kinds.append(Floor(FLOOR, place, f"{PREFIX}k{letter}", place))
        agents = []
        try:
            for kind in kinds:
                netns.create(kind.node)
                if kind.name == FLOOR:
                    links.batch(
                        kind.node,
                        ["link add cni0 type bridge", "address add 10.99.0.1/16 dev cni0", "link set cni0 up"],
                    )
                if kind.name == "narthex, agent":
                    agents.append(agent(kind))
            measure(kinds, 2)
            for kind in kinds[len(kinds) // 2 :]:
                fill(kind, arguments.pods)
            medians = measure(kinds, arguments.rounds)
            show(medians, arguments.rounds, arguments.pods)
            start_times(kinds[2].programs, arguments.rounds)
            missed = judged(medians)
            print("\n" + ("\n".join(f"MISSED {line}" for line in missed) or "All bars are met."))
            if missed:
                raise SystemExit(1)
        finally:
            for one in agents:
                one.send_signal(signal.SIGTERM)
                one.wait(timeout=30)
            for name in netns.names():
                if name.startswith(PREFIX):
                    netns.delete(name)


if __name__ == "__main__":
    main()
