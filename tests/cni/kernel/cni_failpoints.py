"""Kills a plugin at each failpoint, one after another, and looks at what the next calls make of it.

    python cni_failpoints.py SCRATCH NAMESPACE KILLS

Runs in a node's network namespace; NAMESPACE is a pod's. Prints the number of kills by failpoint, and what was left behind.
"""

import itertools
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from narthex.cni.json import parse, write
from narthex.cni.program import run
from narthex.cni.program.garbage import collect
from narthex.linux import failpoints
from narthex.linux.rtnetlink import RtNetlink
from narthex.linux.run import run as execute

SCRATCH, POD, KILLS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
STATE, NETWORKS = str(SCRATCH / "state"), str(SCRATCH / "networks")
BACKENDS = ("nftables", "iptables")
NOBODY: dict[str, Any] = {"cni.dev/valid-attachments": []}
KILLED, MISSED = 9, 0


def config(plugin: str, backend: str, **more: Any) -> dict[str, Any]:
    common = {"cniVersion": "1.1.0", "name": f"net-{backend}", "type": plugin, **more}
    if plugin == "portmap":
        return common | {
            "backend": backend,
            "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]},
        }
    return common | {"subnetFile": str(SCRATCH / "subnet.env"), "dataDir": str(SCRATCH / "flannel"),
                     "ipam": {"dataDir": NETWORKS}, "delegate": {"ipMasq": True, "ipMasqBackend": backend}}  # fmt: skip


def call(command: str, plugin: str, backend: str, **more: Any) -> Any:
    environment = {"CNI_COMMAND": command, "CNI_CONTAINERID": "a", "CNI_NETNS": POD, "CNI_IFNAME": "eth0"}
    text, status = run.answer(plugin, environment, write(config(plugin, backend, **more)).encode(), STATE)
    assert status == 0, (command, plugin, text)
    return parse(text.encode()) if text else None


def add(backend: str) -> None:
    call("ADD", "portmap", backend, prevResult=call("ADD", "flannel", backend))


def delete(backend: str) -> None:
    call("DEL", "portmap", backend)
    call("DEL", "flannel", backend)


def gc(backend: str) -> None:
    call("GC", "portmap", backend, **NOBODY)
    call("GC", "flannel", backend, **NOBODY)


def flush(backend: str) -> None:
    """Remove the tables, so that the next ADD makes them."""
    assert backend
    execute(["nft", "flush", "ruleset"])


def command_gc(backend: str) -> None:
    assert backend
    collect(STATE, NETWORKS)


def nothing(backend: str) -> None:
    assert backend


OPERATIONS: dict[str, tuple[Callable[[str], None], Callable[[str], None], Callable[[str], None]]] = {
    "ADD": (nothing, add, delete),
    "ADD after a flush": (flush, add, delete),
    "DEL": (add, delete, delete),
    "GC": (add, gc, gc),
    "ADD without DEL": (nothing, add, gc),
}
"""For each operation: what is done before, the operation, and what a runtime does after a kill."""


def remaining() -> frozenset[str]:
    """Return all links, files, elements, and chains."""
    links = RtNetlink()
    found = [link.name for link in links.links()]
    links.close()
    paths = [
        path for path in SCRATCH.rglob("*") if path.is_file() and path.suffix != ".pyc" and "bin" not in path.parts
    ]
    # The last address that was assigned counts on.
    found += [str(path.relative_to(SCRATCH)) for path in paths if not path.name.startswith("last_reserved")]
    rules = execute(["nft", "list", "ruleset"])
    found += [line.strip() for line in rules.splitlines() if "elements" in line or "CNI-" in line]
    return frozenset(found)


def killed(work: Callable[[str], None], backend: str, point: str, times: int) -> int:
    """Do the work in a process that a failpoint kills; return the signal, 0 if it was not passed as often."""
    child = os.fork()
    if child == 0:
        failpoints.arm(point, times)
        try:
            work(backend)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, (point, times, status)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else MISSED


def passed(work: Callable[[str], None], backend: str) -> Counter[str]:
    """Do the work without a kill; return how often it passes each point."""
    counts = Counter[str]()
    failpoints.watch(lambda name: counts.update([name]))
    work(backend)
    failpoints.watch(None)
    return counts


def cases(backend: str) -> list[tuple[int, str, str]]:
    """Return time, operation, and point of each possible kill; the first time of each comes first."""
    every = []
    for name, (before, work, after) in OPERATIONS.items():
        before(backend)
        for point, times in passed(work, backend).items():
            every += [(time, name, point) for time in range(1, times + 1)]
        after(backend)
    return sorted(every, key=lambda each: each[0])


def round_trip(name: str, backend: str, point: str, times: int) -> None:
    """Kill the operation; do what a runtime does after that, the whole life of a pod again, and GC."""
    before, work, after = OPERATIONS[name]
    before(backend)
    assert killed(work, backend, point, times) == KILLED, (name, backend, point, times)
    after(backend)
    where = f"{name} with {backend}, killed at {point} ({times})"
    assert remaining() <= CLEAN[backend], f"{where}: {remaining() - CLEAN[backend]}"
    add(backend)
    delete(backend)
    assert remaining() == CLEAN[backend], f"{where}, then ADD and DEL: {remaining() ^ CLEAN[backend]}"
    gc(backend)
    assert remaining() == COLLECTED[backend], f"{where}, then GC: {remaining() ^ COLLECTED[backend]}"


CLEAN: dict[str, frozenset[str]] = {}
COLLECTED: dict[str, frozenset[str]] = {}
"""What is there after ADD and DEL, and after GC, without a kill."""


def kill_all(backend: str, number: int) -> Counter[str]:
    """Kill plugins for a number of times; return how often by point."""
    # The first ADD makes tables and the bridge, which stay.
    flush(backend)
    add(backend)
    delete(backend)
    CLEAN[backend] = remaining()
    gc(backend)
    COLLECTED[backend] = remaining()
    kills = Counter[str]()
    for time, name, point in itertools.islice(itertools.cycle(cases(backend)), number):
        round_trip(name, backend, point, time)
        kills[point] += 1
    return kills


def main() -> None:
    (SCRATCH / "subnet.env").write_text(
        "FLANNEL_NETWORK=10.77.0.0/16\nFLANNEL_SUBNET=10.77.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n"
    )
    kills = sum((kill_all(backend, KILLS // len(BACKENDS)) for backend in BACKENDS), Counter())
    print(json.dumps({"kills": kills, "left": msgspec.to_builtins(collect(STATE, NETWORKS))}))


main()
