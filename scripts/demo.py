"""Demo of the main task: a Deployment and a NodePort Service on two nodes, with requests that pods answer.

The printed story explains each step to readers who know Docker but not Kubernetes. Each line that begins with `$` is a
command that works as printed while the lab runs. The exit status is 0 only if all requests got the expected answer. The
demo removes its lab, however it ends.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
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
    """A result differs from the expected one."""


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
            title("5. Remove everything")
            say("`narthex lab down` stops all processes of the lab and deletes its network namespaces.")
            narthex("lab", "down", "--name", name)
            check(name not in labs.all_names(), "the lab still exists after `narthex lab down`")
    except KeyboardInterrupt:
        print("\nInterrupted.")
        return 130
    except (Failure, LabError, CommandError) as failure:
        print(f"\nThe demo FAILED: {failure}", file=sys.stderr)
        return 1
    say(
        f"The demo took {time.monotonic() - begin:.1f} s. To keep such a lab and try your own commands, run "
        "`narthex lab up examples/hello-world`."
    )
    return 0


def show(name: str) -> None:
    """Tell the whole story on a lab that the caller removes."""
    state = start(name)
    first, second = (node.addresses[0] for node in state.nodes)
    title("2. Send requests to the Service")
    say(
        f"The Service opens port {NODE_PORT} on every node, as `docker run --publish {NODE_PORT}:8080` opens a port on one machine. "
        "`outside` is a machine outside the cluster. It sends a request to each node. Only one node has the pod, but both requests "
        "reach it: the other node forwards its request. The answer names the pod, its node, and the client address that the pod saw."
    )
    for node in (first, second):
        expect_pods(state, call(name, "outside", f"{node}:{NODE_PORT}"))
    cluster_ip = next(each for each in state.services if each.name == SERVICE).frontends[0]
    place = f"{cluster_ip.address}:{cluster_ip.port}"
    say(
        f"Inside the cluster, clients use the cluster IP of the Service, {cluster_ip.address}. No network interface has this address: "
        "the kernel of the sender's node replaces it by the address of a pod. A pod and a node send a request to it."
    )
    expect_pods(state, call(name, state.pods[0].name, place))
    expect_pods(state, call(name, state.nodes[1].name, place))

    title("3. Run three pods instead of one")
    say(
        "The Deployment now starts two more pods. Each node updates its rules, so that each of the three pods gets a third of the new "
        "connections, at random."
    )
    narthex("lab", "scale", f"deployment/{DEPLOYMENT}", "3", "--name", name)
    state = labs.read(name)
    spread(state, f"{first}:{NODE_PORT}")

    title("4. Explain the path of a packet, and compare it with the kernel")
    explain(name, state, f"{first}:{NODE_PORT}")


def start(name: str) -> LabState:
    """Show the manifests and start the lab."""
    title("1. Start a cluster of two nodes on this machine")
    say(
        "With Docker, you start a container and publish a port of your machine. Kubernetes does the same for many machines, called nodes. "
        "You describe what you want in files. The first file below is a Deployment: it requests one copy of a container, which Kubernetes "
        f"calls a pod. The second file is a Service: it requests that port {NODE_PORT} of every node leads to the pods of the Deployment."
    )
    for file in sorted(MANIFESTS.glob("*.yaml")):
        print(f"# {file.relative_to(MANIFESTS.parents[1])}\n{indented(file.read_text())}")
    say(
        "This demo needs neither Kubernetes nor Docker. `narthex lab up` creates the nodes and pods as network namespaces of this machine. "
        "The program in each pod is a small server that answers with the name of its pod. Narthex writes rules into the kernel of each "
        "node. These rules forward the packets for the Service."
    )
    narthex("lab", "up", str(MANIFESTS), "--nodes", "2", "--name", name)
    return labs.read(name)


def call(name: str, source: str, place: str) -> str:
    """Send one request, show it, and return the answer."""
    return narthex("lab", "exec", "--name", name, source, "--", "curl", "-s", "-m", "5", f"http://{place}/")


def expect_pods(state: LabState, body: str) -> None:
    """Raise Failure unless one of the lab's pods has answered."""
    check(body.split(" ")[0] in {pod.name for pod in state.pods}, f"the answer comes from no pod of the lab: {body!r}")


def spread(state: LabState, place: str) -> None:
    """Send many requests, and compare the answers of each pod with the counters in the kernel of the node."""
    say(
        f"`outside` sends {CALLS} requests to {place}. For each pod, the table shows the number of its answers, and the number of new "
        "connections that the node's kernel counted for this pod. Both must be equal."
    )
    before = kernel_counts(state)
    bodies = [run(["curl", "-s", "-m", "5", f"http://{place}/"], namespace=state.outside) for _ in range(CALLS)]
    after = kernel_counts(state)
    answered = Counter(body.split(" ")[0] for body in bodies)
    for pod in state.pods:
        counted = after[pod.addresses[0]] - before[pod.addresses[0]]
        calls = answered[pod.name]
        print(f"    {pod.name} on {pod.node}  {calls:3} answers  {counted:3} connections in the kernel  {'#' * calls}")
        check(calls == counted, f"{pod.name} answered {calls} requests, but the kernel counted {counted}")
        check(calls > 0, f"{pod.name} got no request")
    check(answered.total() == sum(answered[pod.name] for pod in state.pods), "an answer came from no pod of the lab")
    print()
    say(
        "The kernel keeps these counters in an nftables map. Each element maps the protocol, the port, and a number to a pod. For a new connection, "
        "the kernel draws a random number and looks up the pod. The counters also contain the earlier requests of this demo."
    )
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
    say(
        "`narthex trace` reads the rules in the kernel and computes what happens to a packet, without sending one. It shows each step, and "
        "each pod that the packet can reach with its probability."
    )
    narthex(*arguments)
    predicted: dict[str, Any] = msgspec.json.decode(run([*COMMAND, *arguments, "-o", "json"]))
    endpoints = {f"{end['address']}:{end['port']}": end["name"] for end in predicted["ends"]}
    check(predicted["plan"]["agree"], "the plan and the rules in the kernel differ")
    node = state.nodes[0].name
    say(
        "Now `outside` sends a real packet. The second command shows how the kernel of the node remembers the connection. The first pair of "
        "`src` and `dst` contains the addresses of the request. The second pair contains those of the expected reply."
    )
    run(["conntrack", "-F"], namespace=state.nodes[0].namespace)
    expect_pods(state, call(name, "outside", place))
    entry = narthex(
        *("lab", "exec", "--name", name, node, "--"),
        *("conntrack", "-L", "-p", "tcp", "--orig-port-dst", str(NODE_PORT), "-o", "extended"),
    )
    reply = re.search(r"dport=\d+ (?:\[\S+\] )?src=(\S+) dst=(\S+) sport=(\d+)", entry)
    check(reply is not None, "the connection table of the node does not contain the connection")
    assert reply is not None
    chosen = f"{reply[1]}:{reply[3]}"
    check(chosen in endpoints, f"the kernel selected {chosen}, but the trace does not contain this pod")
    say(
        f"The kernel expects the reply from {chosen}, so it sent the packet to {endpoints[chosen]}. It expects the reply at {reply[2]}, an "
        "address of the node, so the node replaced the source address. The trace predicted both: the source is rewritten, and the packet "
        f"goes to one of {', '.join(sorted(endpoints))}."
    )


COMMAND = (sys.executable, "-m", "narthex")


def narthex(*arguments: str) -> str:
    """Run a command of Narthex, print it and its output, and return the output."""
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


def say(text: str) -> None:
    """Print a paragraph."""
    print(textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n", flush=True)


def indented(text: str) -> str:
    """Return the text indented, without trailing spaces."""
    return "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())


def check(fine: bool, otherwise: str) -> None:
    """Raise Failure unless all is fine."""
    if not fine:
        raise Failure(otherwise)


if __name__ == "__main__":
    sys.exit(main())
