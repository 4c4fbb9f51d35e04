"""Pod status, derived from the state of its containers.

Follows Kubernetes 1.34: kubelet_pods.go (getPhase, convertToAPIContainerStatuses), status/generate.go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from narthex.lab.controllers.objects import Object
from narthex.lab.kubelet.eviction import REASON as EVICTED

IMAGE_ID = "narthex://"


class Waiting(msgspec.Struct, frozen=True):
    """A container that does not run."""

    reason: str = "ContainerCreating"
    message: str = ""


class Running(msgspec.Struct, frozen=True):
    """A container that runs."""

    started: str
    """As `metav1.Time`."""


class Terminated(msgspec.Struct, frozen=True):
    """A container that has ended."""

    exit_code: int
    reason: str
    started: str
    finished: str
    signal: int = 0
    message: str = ""
    container_id: str = ""


class ContainerFacts(msgspec.Struct, kw_only=True):
    """The observed state of a container."""

    name: str
    image: str
    state: Waiting | Running | Terminated = Waiting()
    last: Terminated | None = None
    """The previous end, if the container was restarted."""
    restarts: int = 0
    started: bool = False
    """The startup probe has succeeded, or there is none."""
    ready: bool = False
    container_id: str = ""
    init: bool = False
    sidecar: bool = False
    """An init container with `restartPolicy: Always`, which runs in addition to the main containers."""
    ephemeral: bool = False

    @property
    def succeeded(self) -> bool:
        """True if it has ended with exit status 0."""
        return isinstance(self.state, Terminated) and self.state.exit_code == 0

    @property
    def initialized(self) -> bool:
        """True if the container after this init container may start."""
        return self.started if self.sidecar else self.succeeded


class PodFacts(msgspec.Struct, kw_only=True):
    """The observed state of a pod."""

    containers: list[ContainerFacts]
    """Init containers first."""
    host_ips: tuple[str, ...] = ()
    ips: tuple[str, ...] = ()
    start_time: str = ""
    networked: bool = False
    """Its namespaces and addresses exist."""
    evicted: str = ""
    """Why its node has ended it for good; empty if it has not."""

    @property
    def init(self) -> list[ContainerFacts]:
        """The init containers."""
        return [each for each in self.containers if each.init]

    @property
    def main(self) -> list[ContainerFacts]:
        """The containers other than init and ephemeral containers."""
        return [each for each in self.containers if not each.init and not each.ephemeral]

    @property
    def ephemeral(self) -> list[ContainerFacts]:
        """The ephemeral containers, which affect neither phase nor conditions."""
        return [each for each in self.containers if each.ephemeral]

    @property
    def initialized(self) -> bool:
        """True if all init containers have succeeded and all sidecars have started, or if they had before."""
        return any(each.container_id for each in self.main) or all(each.initialized for each in self.init)

    @property
    def serving(self) -> list[ContainerFacts]:
        """The containers that make the pod ready: sidecars and main containers."""
        return [each for each in self.containers if each.sidecar] + self.main

    @property
    def ready(self) -> bool:
        """True if all containers are ready."""
        return self.initialized and bool(self.main) and all(each.ready for each in self.serving)


def phase(facts: PodFacts, policy: str) -> str:
    """Return Pending, Running, Succeeded, or Failed."""
    failed_init = any(
        isinstance(each.state, Terminated) and each.state.exit_code for each in facts.init if not each.sidecar
    )
    if not facts.initialized:
        return "Failed" if failed_init and policy == "Never" else "Pending"
    states = [each.state for each in facts.main]
    if any(isinstance(each.state, Waiting) and each.last is None for each in facts.main):
        return "Pending"
    if any(isinstance(state, Running) for state in states):
        return "Running"
    ended = [state for state in states if isinstance(state, Terminated)]
    if policy == "Always" or len(ended) < len(states):
        return "Running"
    if all(state.exit_code == 0 for state in ended):
        return "Succeeded"
    return "Running" if policy == "OnFailure" else "Failed"


def status(pod: Mapping[str, Any], facts: PodFacts, now: str) -> Object:
    """Return the complete status. Conditions of other writers are kept."""
    before = pod.get("status") or {}
    policy = pod["spec"].get("restartPolicy") or "Always"
    found = "Failed" if facts.evicted else phase(facts, policy)
    over = found in ("Succeeded", "Failed")
    own = {
        "phase": found,
        "conditions": _conditions(pod, facts, over, found, now),
        "hostIP": next(iter(facts.host_ips), ""),
        "hostIPs": [{"ip": ip} for ip in facts.host_ips],
        "podIP": next(iter(facts.ips), ""),
        "podIPs": [{"ip": ip} for ip in facts.ips],
        "startTime": facts.start_time,
        "initContainerStatuses": [_container(each) for each in facts.init],
        "ephemeralContainerStatuses": [_container(each) for each in facts.ephemeral],
        "reason": EVICTED if facts.evicted else "",
        "message": facts.evicted,
    }
    others = {name: value for name, value in before.items() if name not in own}
    statuses = [_container(each) for each in facts.main]
    return {"qosClass": "BestEffort", **others, **_filled(**own), "containerStatuses": statuses}


def _conditions(pod: Mapping[str, Any], facts: PodFacts, over: bool, found: str, now: str) -> list[Object]:
    held = {each["type"]: each for each in (pod.get("status") or {}).get("conditions") or ()}
    unready = [each.name for each in facts.serving if not each.ready]
    message = f"containers with unready status: [{' '.join(unready)}]"
    not_ready: Object = {"reason": "ContainersNotReady", "message": message}
    if over:
        not_ready = {"reason": "PodCompleted" if found == "Succeeded" else "PodFailed"}
    gates = [str(each["conditionType"]) for each in pod["spec"].get("readinessGates") or ()]
    closed = [gate for gate in gates if held.get(gate, {}).get("status") != "True"]
    incomplete = [each.name for each in facts.init if not each.initialized]
    not_initialized = f"containers with incomplete status: [{' '.join(incomplete)}]"
    desired: dict[str, tuple[bool, Object]] = {
        "PodReadyToStartContainers": (facts.networked and not over, {}),
        "Initialized": (facts.initialized, {"reason": "ContainersNotInitialized", "message": not_initialized}),
        "Ready": (facts.ready and not over and not closed, _gates(closed) if facts.ready and closed else not_ready),
        "ContainersReady": (facts.ready and not over, not_ready),
        "PodScheduled": (True, {}),
    }
    if found == "Succeeded":
        desired["Initialized"] = (True, {"reason": "PodCompleted"})
    made = [_condition(kind, *state, held.get(kind), now) for kind, state in desired.items()]
    return [*made, *(each for kind, each in held.items() if kind not in desired)]


def _gates(closed: Sequence[str]) -> Object:
    words = "\n".join(f'corresponding condition of pod readiness gate "{gate}" does not exist.' for gate in closed)
    return {"reason": "ReadinessGatesNotReady", "message": words}


def _condition(kind: str, holds: bool, why_not: Object, before: Mapping[str, Any] | None, now: str) -> Object:
    state = "True" if holds else "False"
    since = before.get("lastTransitionTime", now) if before is not None and before.get("status") == state else now
    made: Object = {"type": kind, "status": state, "lastProbeTime": None, "lastTransitionTime": since}
    if not holds or why_not.get("reason") == "PodCompleted":
        made |= why_not
    return made


def _container(facts: ContainerFacts) -> Object:
    made: Object = {
        "name": facts.name,
        "state": _state(facts.state),
        "lastState": _state(facts.last) if facts.last is not None else {},
        "ready": facts.ready,
        "restartCount": facts.restarts,
        "image": facts.image,
        "imageID": f"{IMAGE_ID}{facts.image}" if facts.container_id else "",
        "started": facts.started,
    }
    if facts.container_id:
        made["containerID"] = facts.container_id
    return made


def _state(state: Waiting | Running | Terminated) -> Object:
    if isinstance(state, Waiting):
        return {"waiting": _filled(reason=state.reason, message=state.message)}
    if isinstance(state, Running):
        return {"running": {"startedAt": state.started}}
    ended: Object = {"exitCode": state.exit_code, "reason": state.reason}
    ended |= _filled(signal=state.signal, message=state.message)
    ended |= {"startedAt": state.started, "finishedAt": state.finished}
    return {"terminated": {**ended, **_filled(containerID=state.container_id)}}


def _filled(**values: Any) -> Object:
    return {name: value for name, value in values.items() if value}
