"""Random faults of a lab and random packets: the trace, a probe, and a real packet have to agree."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from narthex.lab.program import labs
from narthex.lab.program.trace import LabTrace, namespace_of, trace_lab
from narthex.trace.follow.align import is_relayed
from narthex.trace.model import Fate, PathEnd, PathLeaf, Stage, WeightedEnd, branch_ends
from narthex.trace.program.kernel_probe import ProbeComparison, send
from narthex.trace.program.travel import TraceRequest

MANIFESTS = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - {name: web, image: none, ports: [{containerPort: 8080}, {containerPort: 8081, protocol: UDP}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  ipFamilyPolicy: PreferDualStack
  selector: {app: web}
  ports:
  - {name: http, port: 80, targetPort: 8080, nodePort: 30001}
  - {name: dgram, port: 81, protocol: UDP, targetPort: 8081, nodePort: 30002}
---
apiVersion: v1
kind: Service
metadata: {name: near}
spec: {internalTrafficPolicy: Local, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: balanced}
spec: {type: LoadBalancer, selector: {app: web}, ports: [{port: 80, targetPort: 8080, nodePort: 30003}]}
---
apiVersion: v1
kind: Service
metadata: {name: local}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080, nodePort: 30004}]
---
apiVersion: v1
kind: Service
metadata: {name: nobody}
spec: {type: NodePort, selector: {app: nobody}, ports: [{port: 80, targetPort: 8080, nodePort: 30005}]}
---
apiVersion: v1
kind: Service
metadata: {name: once}
spec: {selector: {app: once}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: once, labels: {app: once}}
spec: {restartPolicy: Never, nodeName: node-2, containers: [{name: c, image: none, ports: [{containerPort: 8080}]}]}
"""
TARGETS = [
    "web:80", "web:80", "web:80", "web:81/udp", "near:80", "local:80", "balanced:80", "nobody:80", "once:80", "web:99",
    "kubernetes", "kube-system/kube-dns:53/udp", "kube-system/kube-dns:53/tcp", "10.96.200.200:80", "10.244.1.200:80",
    "192.168.49.77:80", "192.168.49.2:6443", "203.0.113.9:80", "@pod:8080", "@pod:9", "@pod:8081/udp", "@pod6:8080",
    "once:8080@pod", "@client:8080", "@balanced:80", "@local:80", "@balanced:81", "@web6:80",
]  # fmt: skip
"""Destinations as a person names them; those that begin with @ are addresses that the lab's state tells."""
PORTS = ("30001", "30002/udp", "30004", "30005", "9")


def senders(lab: Any) -> list[str]:
    names = [node.name for node in lab.nodes]
    return ["outside", *names, *(f"client-{name.rpartition('-')[2]}" for name in names)]


def targets(lab: Any) -> list[str]:
    names = [node.name for node in lab.nodes]
    own = [f"{name}:{port}" for name in names for port in PORTS]
    return [*TARGETS, *own, *(f"@node6-{name.rpartition('-')[2]}:30001" for name in names)]


MODES = ("nftables", "iptables", "userspace")
OVERLAYS = ("none", "vxlan", "host-gw")
PATIENCE, SILENCE = 30.0, 0.4
"""Seconds to wait for an answer that is sure to come, and for one that is not to come."""
RESENT = (1.1, 2.2, 4.4, 8.8, 17.6)
"""Seconds to wait for the answer to a datagram before it is sent again: the kernel sends an address one ICMP error a second."""
BAD = (Fate.DROPPED, Fate.LOST, Fate.REJECTED)
SETTLED_SECONDS = 180.0
"""Several times as long as the lab itself waits at most."""


def manifests(directory: Path, nodes: int) -> Path:
    """Write the Services, their pods, and a client on each node."""
    clients = "".join(
        f"---\napiVersion: v1\nkind: Pod\nmetadata: {{name: client-{n}}}\n"
        f"spec: {{nodeName: node-{n}, containers: [{{name: c, image: none}}]}}\n"
        for n in range(1, nodes + 1)
    )
    (directory / "all.yaml").write_text(MANIFESTS + clients)
    return directory


class Fault(msgspec.Struct, frozen=True):
    """A fault to draw: its request, or what is killed, and the causes that may be named first."""

    words: str
    causes: tuple[str, ...] = ()
    request: Any = None

    @property
    def kind(self) -> str:
        """The first word, and for what is killed the kind of it."""
        word, _, rest = self.words.partition(" ")
        if word == "kill":
            return "pod ended" if rest.endswith("and wait") else "pod killed" if "/" in rest else "node killed"
        return word


def draw_fault(rng: random.Random, lab: Any, *, deadly: bool) -> Fault:
    """Return a fault; `deadly` ones cannot be undone."""
    nodes = [node.name for node in lab.nodes if node.name not in lab.killed]
    pods = [f"{pod.namespace}/{pod.name}" for pod in lab.pods if pod.containers and pod.node in nodes]
    if deadly:
        node = rng.choice(nodes)
        return Fault(f"kill {node}", ("node-dead",), {"kill": node})
    kind = rng.choice(["none", "loss", "partition", "partition", "loss", "api", "process", "pod", "ended"])
    if kind in ("loss", "partition"):
        targets = (
            rng.sample(nodes, rng.choice([1, 1, min(2, len(nodes))])) if rng.random() < 0.6 else [rng.choice(pods)]
        )
        percent = rng.choice([100, 100, 50])
        begin = {"kind": kind, "targets": targets, **({"percent": percent} if kind == "loss" else {})}
        return Fault(f"{kind} {' '.join(targets)} {percent}", (f"fault-{kind}",), {"begin": begin})
    if kind == "api":
        return Fault("api down", ("fault-api",), {"begin": {"kind": "api"}})
    if kind == "process":
        return Fault(f"process {rng.choice(nodes)}", ("node-process-down",))
    if kind == "pod":
        return Fault("kill default/once", ("pod-not-running",), {"kill": "default/once"})
    if kind == "ended":
        pod = rng.choice(pods)
        return Fault(f"kill {pod} and wait", (), {"kill": pod})
    return Fault("none")


@contextlib.contextmanager
def in_force(name: str, fault: Fault) -> Iterator[None]:
    """Have a fault while the block lasts."""
    if fault.words.startswith("process"):
        node = fault.words.split()[1]
        process = next(each.process for each in labs.read(name).processes if each.node == node)
        os.kill(process.pid, signal.SIGKILL)
    elif fault.request is not None:
        labs.request(name, {"fault": fault.request})
    if fault.words.endswith("and wait"):
        labs.settle(name)
    try:
        yield
    finally:
        if fault.words.startswith("process"):
            labs.request(name, {"fault": {"kill": f"process/{node}"}})
        labs.request(name, {"fault": {"end": None}})
        settle(name)


def settle(name: str) -> None:
    """Wait until no trace of a fault is left: all nodes healthy and ready, all rules written."""
    end = time.monotonic() + SETTLED_SECONDS
    while time.monotonic() < end:
        labs.settle(name)
        found = labs.inspect_lab(name)
        if all(node.killed or (node.healthy and node.ready) for node in found.nodes):
            return
        time.sleep(0.1)
    raise AssertionError(
        f"the lab does not settle: {[node for node in found.nodes if not (node.healthy and node.ready)]}"
    )


def address_of(rng: random.Random, lab: Any, target: str) -> str:
    """Return the destination for `narthex trace`."""
    if not target.startswith("@") and not target.endswith("@pod"):
        return target
    word, _, port = target.removeprefix("@").removesuffix("@pod").rpartition(":")
    webs = [pod for pod in lab.pods if pod.name.startswith("web-") and pod.addresses]
    if word in ("pod", "pod6"):
        address = rng.choice(webs).addresses[word == "pod6"]
    elif word in ("client", "once"):
        name = f"client-{rng.randint(1, len(lab.nodes))}" if word == "client" else "once"
        address = next(pod for pod in lab.pods if pod.name == name).addresses[0]
    elif word.startswith("node6-"):
        address = next(node for node in lab.nodes if node.name == f"node-{word[6:]}").addresses[1]
    elif word == "web6":
        address = next(
            each.address
            for service in lab.services
            if service.name == "web"
            for each in service.frontends
            if each.kind == "cluster IP" and ":" in each.address
        )
    else:
        service = next(service for service in lab.services if service.name == word)
        address = next(each.address for each in service.frontends if each.kind == "load balancer IP")
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# ---- what a path promises --------------------------------------------------------------------------------------------


def answers(leaf: PathLeaf, traced: LabTrace) -> set[str]:
    """Return the answers that a sender may see on one alternative."""
    end = leaf.end
    if traced.path.packet.protocol == "tcp" and is_relayed(leaf):
        return {"connected"}
    if end.fate is Fate.DELIVERED:
        replies = list(branch_ends(end.reply)) if end.reply is not None else []
        if replies and all(each.fate in BAD for each in replies):
            return {"nothing", "unreachable"}
        seen = {"connected", "answered"}
        if any(found.cause.id == "not-listening" for found in traced.findings):
            seen = {"refused"} if alone(traced) else {*seen, "refused"}
        if any(each.fate in BAD for each in replies):
            seen |= {"nothing"}
        if traced.path.packet.protocol == "udp" and not alone(traced):
            seen |= {"nothing"}
        return seen
    if end.fate is Fate.REJECTED:
        # The kernel limits the rate of the errors that it sends to one address.
        return {"refused", "unreachable", "nothing"}
    if end.fate is Fate.DROPPED:
        return {"nothing"}
    if end.fate is Fate.LOST:
        stage = leaf.steps[-1].stage
        return {"unreachable", "nothing"} if stage in (Stage.ROUTING, Stage.NEIGHBOUR) else {"nothing", "unreachable"}
    return set()


def ends_of(leaf: PathLeaf) -> list[PathEnd]:
    """Return the end of an alternative and those of its reply."""
    return [leaf.end, *(branch_ends(leaf.end.reply) if leaf.end.reply is not None else ())]


def alone(traced: LabTrace) -> bool:
    """Return True if all alternatives end at one address."""
    return len({leaf.end.address for leaf in traced.path.leaves()}) == 1


def expected(traced: LabTrace) -> set[str]:
    return set().union(*(answers(leaf, traced) for leaf in traced.path.leaves()))


def sure(traced: LabTrace) -> bool:
    """Return True if an answer has to come."""
    return not expected(traced) & {"nothing"}


def summary(traced: LabTrace) -> list[Any]:
    ends = [(str(end.probability), end.fate.value, end.address, end.port) for end in traced.path.weighted_ends()]
    return [sorted(ends), [found.cause.id for found in traced.findings if found.explains]]


def text_of(end: WeightedEnd) -> str:
    return f"{end.fate.value} {end.address}:{end.port} {end.reason}"


# ---- one case ------------------------------------------------------------------------------------------------------


def probe_once(name: str, traced: LabTrace) -> ProbeComparison:
    """Send one packet, or some if it is a datagram whose answer may be lost."""
    waits = (SILENCE,) if not sure(traced) else RESENT if traced.path.packet.protocol == "udp" else (PATIENCE,)
    for patience in waits:
        tried = send(
            traced.path,
            sender=namespace_of(name, traced.path.packet.source),
            node=namespace_of(name, traced.node),
            node_name=traced.node,
            patience=patience,
        )
        if tried.probed.answer != "nothing":
            break
    return tried


def check(name: str, source: str, destination: str, fault: Fault, well: bool) -> str:
    """Trace and probe one packet; return what was wrong, empty if nothing, `moved` if the lab changed meanwhile."""
    request = TraceRequest(source=source, destination=destination)
    before = trace_lab(name, request)
    tried = probe_once(name, before)
    wrong = judge(before, tried, fault, well)
    if wrong and summary(trace_lab(name, request)) != summary(before):
        return "moved"
    return wrong


def judge(traced: LabTrace, tried: ProbeComparison, fault: Fault, well: bool) -> str:
    path = traced.path
    ends = path.weighted_ends()
    said = "; ".join(text_of(end) for end in ends)
    causes = [found.cause.id for found in traced.findings if found.explains]
    unknown = [end for end in ends if end.fate in (Fate.LEAVES, Fate.UNKNOWN)]
    if unknown:
        return f"unknown: {said}"
    if not tried.alignment.agrees:
        return f"probe parts: {tried.alignment.parting} ({said})"
    if tried.probed.answer not in expected(traced):
        return f"answer {tried.probed.answer}, expected {sorted(expected(traced))} ({said}; {causes})"
    fails = any(each.fate in BAD for leaf in path.leaves() for each in ends_of(leaf)) or tried.probed.answer not in (
        "connected",
        "answered",
    )
    if fails and not causes:
        return f"no cause: {said}"
    if fails and well and fault.causes and causes[0] not in fault.causes:
        return f"first cause {causes[0]} instead of {fault.causes}: {said}"
    # Of several endpoints, one that nothing listens at is a cause also if another one answered.
    if not fails and causes and ("not-listening" not in causes or alone(traced)):
        return f"a cause of a healthy path: {causes} ({said})"
    return ""


def is_well(name: str, source: str, destination: str) -> bool:
    """Return True if the packet arrives without a fault."""
    traced = trace_lab(name, TraceRequest(source=source, destination=destination))
    return all(leaf.end.fate is Fate.DELIVERED for leaf in traced.path.leaves()) and not any(
        found.explains for found in traced.findings
    )


class Tally(msgspec.Struct):
    """What was tried: cases by the kind of fault, those that changed meanwhile, and those in which something was wrong."""

    kinds: Counter[str] = msgspec.field(default_factory=Counter)
    moved: int = 0
    wrong: list[str] = []

    @property
    def cases(self) -> int:
        return self.kinds.total()


def run(name: str, rng: random.Random, cases: int, packets: int = 4, *, deadly: bool = False, label: str = "") -> Tally:
    """Run cases: a fault at a time, some packets under each. The first node dies last, if `deadly`."""
    tally = Tally()
    settle(name)
    while tally.cases < cases:
        lab = labs.read(name)
        fault = draw_fault(rng, lab, deadly=deadly)
        chosen = []
        for _ in range(min(packets, cases - tally.cases)):
            source, target = rng.choice(senders(lab)), address_of(rng, lab, rng.choice(targets(lab)))
            chosen.append((source, target, is_well(name, source, target)))
        delay = rng.choice([0.0, 0.0, 3.5])
        with in_force(name, fault):
            time.sleep(delay)
            for source, target, well in chosen:
                wrong = "moved"
                for _ in range(4):
                    try:
                        wrong = check(name, source, target, fault, well)
                    except Exception as error:
                        wrong = f"{type(error).__name__}: {error}"
                    if wrong != "moved":
                        break
                tally.kinds[fault.kind] += 1
                tally.moved += wrong == "moved"
                if wrong and wrong != "moved":
                    tally.wrong.append(f"{label} [{fault.words}, {delay} s] {source} -> {target}: {wrong}")
        if deadly:
            break
    return tally
