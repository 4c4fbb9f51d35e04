"""ADD and DEL of a pod: bridge with host-local and ipMasq, then portmap with one host port, beside the reference plugins.

    sudo python benchmarks/cni_add_del.py [--rounds 30] [--pods 200] [--reference /usr/lib/cni]

Each plugin is started as a container runtime starts it. In every round the three take turns: the reference, ours with the
agent, ours without. Then the same again with `--pods` pods kept on each node. Bars: ours is faster than the reference in both
ADD and DEL, with and without the agent, and ADD with pods kept is no slower than without (a tenth is allowed to chance).
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

from narthex.apps.cni_install import install
from narthex.host import netns

PREFIX = f"ncb{os.getpid()}"


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


def pod(kind: Kind, number: int) -> str:
    return f"{kind.node}p{number}"


def measure(kinds: list[Kind], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """ADD and DEL of each kind, in turns."""
    times: dict[str, tuple[list[float], list[float]]] = {kind.name: ([], []) for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            number = kind.pods
            netns.create(pod(kind, number))
            seconds, result = kind.add(number)
            times[kind.name][0].append(seconds)
            times[kind.name][1].append(kind.delete(number, result))
            netns.delete(pod(kind, number))
    return times


def fill(kind: Kind, pods: int) -> None:
    """Put pods on the node that stay."""
    while kind.pods < pods:
        netns.create(pod(kind, kind.pods))
        kind.add(kind.pods)
        kind.pods += 1


def show(title: str, times: dict[str, tuple[list[float], list[float]]]) -> dict[str, tuple[float, float]]:
    """Print medians and ratios; the medians."""
    medians = {name: (statistics.median(add), statistics.median(delete)) for name, (add, delete) in times.items()}
    base = medians["reference"]
    print(f"\n{title}")
    print(f"{'':24}{'ADD ms':>8}{'ratio':>8}{'DEL ms':>8}{'ratio':>8}")
    for name, (add, delete) in medians.items():
        print(f"{name:24}{add * 1e3:8.1f}{add / base[0]:8.2f}{delete * 1e3:8.1f}{delete / base[1]:8.2f}")
    return medians


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


def judged(empty: dict[str, tuple[float, float]], full: dict[str, tuple[float, float]]) -> list[str]:
    """What misses its bar."""
    missed = []
    for when, medians in (("no pods", empty), ("pods kept", full)):
        for name, both in medians.items():
            for what, ours, theirs in zip(("ADD", "DEL"), both, medians["reference"], strict=True):
                if name != "reference" and ours >= theirs:
                    missed.append(f"{what}, {name}, {when}: {ours * 1e3:.1f} ms, reference {theirs * 1e3:.1f} ms")
    growth = {name: full[name][0] / empty[name][0] for name in empty if name != "reference"}
    return missed + [f"ADD, {name}: {one:.2f} times as long with pods kept" for name, one in growth.items() if one > 1.1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pods", type=int, default=200)
    parser.add_argument("--reference", type=Path, default=Path("/usr/lib/cni"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        kinds = [Kind("reference", arguments.reference, f"{PREFIX}r", place / "reference")]
        for name, letter in (("narthex, agent", "a"), ("narthex, no agent", "n")):
            state = place / letter
            install(state / "bin", None, socket=str(state / "cni.sock"), state=str(state / "state"), subnet="")
            kinds.append(Kind(name, state / "bin", f"{PREFIX}{letter}", state))
        agent = None
        try:
            for kind in kinds:
                netns.create(kind.node)
            with netns.entered(kinds[1].node):
                options = ["--socket", str(place / "a" / "cni.sock"), "--state-dir", str(place / "a" / "state")]
                agent = subprocess.Popen(
                    [sys.executable, "-m", "narthex", "cni", "agent", *options], stdout=subprocess.PIPE, text=True
                )
            assert agent.stdout is not None
            agent.stdout.readline()
            measure(kinds, 3)
            empty = show(f"median of {arguments.rounds}, no pods on the node", measure(kinds, arguments.rounds))
            for kind in kinds:
                fill(kind, arguments.pods)
            title = f"median of {arguments.rounds}, {arguments.pods} pods kept on the node"
            full = show(title, measure(kinds, arguments.rounds))
            start_times(kinds[2].programs, arguments.rounds)
            missed = judged(empty, full)
            print("\n" + ("\n".join(f"MISSED {line}" for line in missed) or "All bars are met."))
            if missed:
                raise SystemExit(1)
        finally:
            if agent is not None:
                agent.send_signal(signal.SIGTERM)
                agent.wait(timeout=30)
            for name in netns.names():
                if name.startswith(PREFIX):
                    netns.delete(name)


if __name__ == "__main__":
    main()
