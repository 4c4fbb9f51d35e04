"""What a lab knows to be broken: its active faults, dead nodes, processes that ended, and pods that do not run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fractions import Fraction

import msgspec

from narthex.lab.faults import FaultKind, InjectedFault
from narthex.lab.program.state import LabState, PodRecord
from narthex.lab.topology import FABRIC
from narthex.trace.follow.views import Impairment

_CAUSES = {
    FaultKind.LOSS: "fault-loss",
    FaultKind.PARTITION: "fault-partition",
    FaultKind.DELAY: "fault-delay",
    FaultKind.API: "fault-api",
}


def impairments(lab: LabState, running: Collection[str], now: float) -> tuple[Impairment, ...]:
    """Return what is broken in a lab.

    Args:
        lab: The lab.
        running: Names of the nodes whose process runs.
        now: Seconds since 1970.
    """
    return (
        *_dead_nodes(lab),
        *(each for fault in lab.faults for each in _fault(lab, fault, now)),
        *_ended_processes(lab, running),
        *(_stopped_pod(lab, pod) for pod in lab.pods if _is_stopped(pod)),
    )


def _dead_nodes(lab: LabState) -> Iterator[Impairment]:
    for node in lab.killed:
        dead = Impairment(
            cause="node-dead",
            places=frozenset({node}),
            text=f"{node} is dead, killed",
            advice="A dead node stays dead until `narthex lab down`. Controllers replace its pods on other nodes.",
            lost=Fraction(1),
            unserved=True,
            stale=True,
        )
        pods = frozenset(f"{pod.namespace}/{pod.name}" for pod in lab.pods if pod.node == node)
        yield dead
        yield msgspec.structs.replace(dead, places=pods, lost=Fraction(0), stale=False)


def _fault(lab: LabState, fault: InjectedFault, now: float) -> Iterator[Impairment]:
    nodes = {node.name for node in lab.nodes}
    text = f"{fault.text(now)} (fault {fault.number})"
    advice = f"`narthex lab fault end {fault.number} --name {lab.name}` ends it."
    if fault.kind is FaultKind.API:
        cause = _CAUSES[fault.kind]
        yield Impairment(cause=cause, places=frozenset({FABRIC}), text=text, advice=advice, unserved=True)
        yield Impairment(cause=cause, places=frozenset(nodes), text=text, advice=advice, stale=True)
        return
    lost = {FaultKind.LOSS: Fraction(fault.percent, 100), FaultKind.PARTITION: Fraction(1)}.get(fault.kind, Fraction(0))
    cut_off = nodes.intersection(fault.targets)
    apart = [cut_off, *({target} for target in fault.targets if target not in nodes)]
    for places in filter(None, apart):
        yield Impairment(
            cause=_CAUSES[fault.kind],
            places=frozenset(places),
            text=text,
            advice=advice,
            lost=lost,
            together=fault.kind is FaultKind.PARTITION,
            stale=places is cut_off and bool(lost),
        )


def _ended_processes(lab: LabState, running: Collection[str]) -> Iterator[Impairment]:
    for node in lab.nodes:
        if node.name not in running and node.name not in lab.killed:
            yield Impairment(
                cause="node-process-down",
                places=frozenset({node.name}),
                text=f"the process of {node.name} (proxy, DNS, CNI) does not run",
                advice=f"`narthex lab fault kill process/{node.name} --name {lab.name}` starts it again; see its log below "
                f"/run/narthex/lab/{lab.name}/log.",
                unserved=True,
                stale=True,
            )


def _is_stopped(pod: PodRecord) -> bool:
    return bool(pod.node and (pod.problem or not pod.containers))


def _stopped_pod(lab: LabState, pod: PodRecord) -> Impairment:
    name = f"{pod.namespace}/{pod.name}"
    return Impairment(
        cause="pod-not-running",
        places=frozenset({name}),
        text=f"no container of pod {name} runs" + (f": {pod.problem}" if pod.problem else ""),
        advice=f"See `narthex lab kubectl --name {lab.name} -n {pod.namespace} describe pod {pod.name}`.",
        unserved=True,
    )
