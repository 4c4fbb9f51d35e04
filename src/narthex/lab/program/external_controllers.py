"""The controllers of an external control plane, as the lab sees them: it does not run them, and knows their work by the objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from narthex.lab.api.registry import Registry
from narthex.lab.controllers.objects import Object, is_pod_finished, is_terminating, labels_of, spec_of, status_of
from narthex.lab.faults import InjectedFault
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.program.state import LabError

_SERVICE = "kubernetes.io/service-name"


class ExternalControllers:
    """Takes the place of a ControllerLoop."""

    problems: tuple[str, ...] = ()

    def __init__(self, registry: SharedRegistry) -> None:
        self._registry = registry

    @property
    def idle(self) -> bool:
        """True if Deployments have their pods, pods their nodes, and Services their endpoints."""
        with self._registry.held() as registry:
            return not any(_unfinished(registry))

    def start_recording(self, path: Path, lab: str, faults: Iterable[InjectedFault]) -> Path:
        """Raise LabError: a replay needs the lab's own controllers."""
        del path, lab, faults
        raise LabError("a lab with --control-plane cannot record its history: a replay needs the lab's own controllers")

    def stop_recording(self) -> Path:
        """Raise LabError."""
        raise LabError("no recording is running")

    def record_fault(self, fault: InjectedFault, started: bool) -> None:
        """Do nothing."""


def _unfinished(registry: Registry) -> Iterable[bool]:
    """Yield True for work that controllers or the scheduler have not done."""
    for deployment in registry.list("Deployment"):
        meta, status = deployment["metadata"], status_of(deployment)
        yield status.get("observedGeneration", 0) < meta.get("generation", 0)
        yield status.get("replicas", 0) != spec_of(deployment).get("replicas", 1)
    pods = registry.list("Pod")
    for pod in pods:
        yield not spec_of(pod).get("nodeName") and not _is_unschedulable(pod)
    listed: dict[tuple[str, str], set[str]] = {}
    for each in registry.list("EndpointSlice"):
        key = each["metadata"]["namespace"], labels_of(each).get(_SERVICE, "")
        listed.setdefault(key, set()).update(_ready_pods(each))
    for service in registry.list("Service"):
        selector = spec_of(service).get("selector")
        if selector and spec_of(service).get("type") != "ExternalName":
            key = service["metadata"]["namespace"], service["metadata"]["name"]
            tolerant = bool(spec_of(service).get("publishNotReadyAddresses"))
            ready = {each["metadata"]["name"] for each in pods if _serves(each, key[0], selector)}
            yield not tolerant and ready != listed.get(key, set())


def _is_unschedulable(pod: Object) -> bool:
    conditions = status_of(pod).get("conditions") or ()
    return any(each["type"] == "PodScheduled" and each.get("status") == "False" for each in conditions)


def _ready_pods(endpoint_slice: Object) -> Iterable[str]:
    for endpoint in endpoint_slice.get("endpoints") or ():
        if (endpoint.get("conditions") or {}).get("ready") is not False and endpoint.get("targetRef"):
            yield str(endpoint["targetRef"].get("name"))


def _serves(pod: Object, namespace: str, selector: Mapping[str, Any]) -> bool:
    """Return True if a ready pod is an endpoint of a Service."""
    conditions = status_of(pod).get("conditions") or ()
    return (
        pod["metadata"]["namespace"] == namespace
        and selector.items() <= labels_of(pod).items()
        and not is_terminating(pod)
        and not is_pod_finished(pod)
        and any(each["type"] == "Ready" and each.get("status") == "True" for each in conditions)
    )
