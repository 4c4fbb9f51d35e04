"""The main job, shown: a Deployment and a NodePort Service on a network of two nodes, answered from pods.

Every line that begins with `$` is a command that works as printed while the lab runs. Ends with status 0 only if
everything answered as it must, and leaves nothing behind, however it ends.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from narthex.lab.program import labs
from narthex.lab.program.state import LabError, LabState
from narthex.linux.run import CommandError, run

MANIFESTS = Path(__file__).parents[1] / "examples" / "hello-world"
DEPLOYMENT = "hello-world-deployment"
SERVICE = "hello-world-service"
NODE_PORT = 30001
CALLS = 60


class Failure(RuntimeError):
    """Something did not answer as it must."""


def main() -> int:
    """Run the demo; returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin = time.monotonic()
    name = "demo" if "demo" not in labs.all_names() else f"demo-{os.getpid()}"
    try:
        try:
            show(name)
        finally:
            # A second Ctrl-C must not leave half a lab behind.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            title("The end: nothing is left")
            narthex("lab", "down", "--name", name)
            check(name not in labs.all_names(), "something of the lab is left")
    except KeyboardInterrupt:
        print("\nInterrupted.")
        return 130
    except (Failure, LabError, CommandError) as failure:
        print(f"\nThe demo FAILED: {failure}", file=sys.stderr)
        return 1
    print(f"\nAll of it took {time.monotonic() - begin:.1f} s. `narthex lab up examples/hello-world` keeps such a lab.")
    return 0


def show(name: str) -> None:
    """Everything, on a lab that somebody else takes away."""
    title("Two nodes, one Deployment, one Service; no Kubernetes, no containers")
    for file in sorted(MANIFESTS.glob("*.yaml")):
        print(f"# {file.relative_to(MANIFESTS.parents[1])}\n{indented(file.read_text())}")
    narthex("lab", "up", str(MANIFESTS), "--nodes", "2", "--name", name)
    state = labs.read(name)
    first, second = (node.addresses[0] for node in state.nodes)
    pod = state.pods[0]

    title("Anyone may call any node; only one of the two has the pod")
    for node in (first, second):
        expect_pods(state, call(name, "outside", f"{node}:{NODE_PORT}"))

    title("A pod and a node call the cluster IP")
    cluster_ip = next(each for each in state.services if each.name == SERVICE).frontends[0]
    place = f"{cluster_ip.address}:{cluster_ip.port}"
    expect_pods(state, call(name, pod.name, place))
    expect_pods(state, call(name, state.nodes[1].name, place))

    title("Three replicas: new pods, and every node knows")
    narthex("lab", "scale", f"deployment/{DEPLOYMENT}", "3", "--name", name)
    state = labs.read(name)
    spread(state, f"{first}:{NODE_PORT}")

    title("Why a packet goes where it goes, and what the kernel says")
    explain(name, state, f"{first}:{NODE_PORT}")


def call(name: str, source: str, place: str) -> str:
    """One request, shown."""
    return narthex("lab", "exec", "--name", name, source, "--", "curl", "-s", "-m", "5", f"http://{place}/")


def expect_pods(state: LabState, body: str) -> None:
    """Whether one of the lab's pods has answered."""
    check(body.split(" ")[0] in {pod.name for pod in state.pods}, f"no pod has answered, but this: {body!r}")


def spread(state: LabState, place: str) -> None:
    """Many calls, counted by who has answered and by the kernel of the node that was called."""
    print(f"{CALLS} calls from outside to {place}. Who answered, and what the node's kernel counted meanwhile:\n")
    before = kernel_counts(state)
    bodies = [run(["curl", "-s", "-m", "5", f"http://{place}/"], namespace=state.outside) for _ in range(CALLS)]
    after = kernel_counts(state)
    answered = Counter(body.split(" ")[0] for body in bodies)
    for pod in state.pods:
        counted = after[pod.addresses[0]] - before[pod.addresses[0]]
        calls = answered[pod.name]
        print(f"    {pod.name} on {pod.node}  {calls:3} answers  {counted:3} in the kernel  {'#' * calls}")
        check(calls == counted, "the pods and the kernel do not count the same")
        check(calls > 0, f"{pod.name} has had no call")
    check(answered.total() == sum(answered[pod.name] for pod in state.pods), "somebody else has answered")
    print("\nThe kernel keeps that count beside each endpoint of the node port, in an nftables map:\n")
    for element in map_elements(state):
        print(f"    {element}")


def kernel_counts(state: LabState) -> Counter[str]:
    """Return the number of new connections of the node port so far, by pod address."""
    found = (re.search(r"packets (\d+) .* : (\S+)", element) for element in map_elements(state))
    return Counter({each[2]: int(each[1]) for each in found if each})


def map_elements(state: LabState) -> list[str]:
    """Return the endpoints of the node port as nft lists them on the first node."""
    listing = run(["nft", "list", "map", "ip", "narthex", "nodeport-endpoints"], namespace=state.nodes[0].namespace)
    return re.findall(rf"tcp \. {NODE_PORT} \. [^,}}]*[^,}}\s]", listing)


def explain(name: str, state: LabState, place: str) -> None:
    """Show the trace of a packet, then send a real one and show its entry in the connection table."""
    arguments = ("trace", "outside", place, "--lab", name)
    narthex(*arguments)
    predicted: dict[str, Any] = msgspec.json.decode(run([*COMMAND, *arguments, "-o", "json"]))
    endpoints = {f"{end['address']}:{end['port']}": end["name"] for end in predicted["ends"]}
    check(predicted["plan"]["agree"], "the plan and the rules do not say the same")
    node = state.nodes[0].name
    run(["conntrack", "-F"], namespace=state.nodes[0].namespace)
    expect_pods(state, call(name, "outside", place))
    entry = narthex(
        *("lab", "exec", "--name", name, node, "--"),
        *("conntrack", "-L", "-p", "tcp", "--orig-port-dst", str(NODE_PORT), "-o", "extended"),
    )
    reply = re.search(r"dport=\d+ (?:\[\S+\] )?src=(\S+) dst=(\S+) sport=(\d+)", entry)
    check(reply is not None, "the kernel does not know the connection")
    assert reply is not None
    chosen = f"{reply[1]}:{reply[3]}"
    check(chosen in endpoints, f"the kernel has chosen {chosen}, which the trace does not name")
    print(
        f"The kernel's second half, the expected reply, says what became of the packet: it went to {chosen},\n"
        f"{endpoints[chosen]}, and the reply comes back to {reply[2]}, the node. The trace had said so:\n"
        f"one of {', '.join(sorted(endpoints))}, source rewritten."
    )


COMMAND = (sys.executable, "-m", "narthex")


def narthex(*arguments: str) -> str:
    """Run a command of Narthex and show it, as typed and as answered."""
    sys.stdout.flush()
    print(f"$ narthex {shlex.join(arguments)}")
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    print(indented(done.stdout))
    if done.returncode != 0:
        raise Failure(done.stderr.strip() or f"exit status {done.returncode}")
    return done.stdout


def title(text: str) -> None:
    """Print a heading."""
    print(f"\n== {text}\n", flush=True)


def indented(text: str) -> str:
    """Return the text indented, without trailing spaces."""
    return "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())


def check(fine: bool, otherwise: str) -> None:
    """Raise Failure unless all is fine."""
    if not fine:
        raise Failure(otherwise)


if __name__ == "__main__":
    sys.exit(main())
