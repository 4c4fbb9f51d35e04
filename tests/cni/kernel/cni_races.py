"""Workers that add and delete one container at the same time, each request alone or through the agent.

    python cni_races.py SCRATCH NAMESPACE CALLS SEED

Runs in a node's network namespace; NAMESPACE is a pod's. Prints the number of calls by outcome: `done`, `refused`
(the container is attached already), or the error.
"""

import json
import os
import random
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from narthex.cni.json import parse, write
from narthex.cni.program import launcher, run

SCRATCH, POD, CALLS, SEED = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
WORKERS = 6
PREVIOUS = {
    "cniVersion": "1.1.0",
    "interfaces": [{"name": "eth0", "sandbox": POD}],
    "ips": [{"address": "10.77.0.9/24", "interface": 0}],
}


def config(plugin: str, before: Any = None) -> dict[str, Any]:
    ipam = {"type": "host-local", "dataDir": str(SCRATCH / "networks"), "ranges": [[{"subnet": "10.77.0.0/24"}]]}
    common = {"cniVersion": "1.1.0", "name": "net", "type": plugin, "prevResult": before}
    if plugin == "portmap":
        return common | {"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]}}
    return common | {"bridge": "cni0", "isGateway": True, "ipMasq": True, "ipam": ipam}


def call(agent: bool, command: str, plugin: str, before: Any) -> str:
    environment = {"CNI_COMMAND": command, "CNI_CONTAINERID": "a", "CNI_NETNS": POD, "CNI_IFNAME": "eth0"}
    stdin = write(config(plugin, before)).encode()
    if agent:
        said = launcher._ask(plugin, environment, stdin)
        assert said is not None, "the agent does not answer"
        status, text = said[0], said[1].decode()
    else:
        text, status = run.answer(plugin, environment, stdin, str(SCRATCH / "state"))
    if status == 0:
        return "done"
    error: Any = parse(text.encode())
    return "refused" if error["code"] == 100 else text


def worker(number: int, calls: int) -> list[str]:
    chance = random.Random(f"{SEED} {number}")
    outcomes = []
    for _ in range(calls):
        command = chance.choice(("ADD", "DEL"))
        plugin = chance.choice(("bridge", "bridge", "portmap"))
        outcomes.append(call(number % 2 == 1, command, plugin, PREVIOUS if plugin == "portmap" else None))
    return outcomes


def main() -> None:
    launcher.SOCKET = str(SCRATCH / "cni.sock")
    reader, writer = os.pipe()
    children = []
    for number in range(WORKERS):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for outcome in worker(number, CALLS // WORKERS):
                    os.write(writer, outcome.encode() + b"\n")
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    os.close(writer)
    with os.fdopen(reader) as lines:
        print(json.dumps(Counter(line.rstrip("\n") for line in lines)))
    assert not any(status for _, status in (os.waitpid(child, 0) for child in children)), "a worker failed"


main()
