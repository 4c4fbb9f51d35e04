"""Subresources other than `status`: binding, eviction, log, exec, and scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from narthex.lab.api import errors
from narthex.lab.api.columns import json_path_values, selector_text
from narthex.lab.api.errors import FieldError
from narthex.lab.api.kinds import ApiResource
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import (
    ApiPath,
    ApiRequest,
    ExecRequest,
    LogRequest,
    PortForwardRequest,
    is_true,
    whole_number,
)
from narthex.lab.api.store import Raw

SUCCESS = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


def bind(registry: Registry, where: ApiPath, given: Mapping[str, Any]) -> Raw:
    """Assign a pod to a node (Binding). Raises StatusError."""
    pod = _pod(registry, where)
    target = given.get("target") or {}
    if target.get("kind") not in (None, "", "Node") or not target.get("name"):
        raise errors.bad_request("target.name: Required value: a Binding names the node")
    node, now = str(target["name"]), registry.stamp()
    if pod["metadata"].get("deletionTimestamp"):
        why = f"pod {where.name} is being deleted, cannot be assigned to a host"
        raise errors.conflict("pods/binding", "", where.name, why)
    held = (pod.get("spec") or {}).get("nodeName")
    if held:
        raise errors.conflict("pods/binding", "", where.name, f'pod {where.name} is already assigned to node "{held}"')
    bound = registry.update("Pod", {**pod, "spec": {**(pod.get("spec") or {}), "nodeName": node}})
    status = bound.get("status") or {}
    others = [each for each in status.get("conditions") or () if each.get("type") != "PodScheduled"]
    scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": now}
    registry.update("Pod", {**bound, "status": {**status, "conditions": [*others, scheduled]}}, subresource="status")
    return {**SUCCESS, "code": 201}


def evict(registry: Registry, where: ApiPath, given: Mapping[str, Any]) -> Raw:
    """Delete a pod (Eviction). There are no disruption budgets. Raises StatusError."""
    _pod(registry, where)
    options = given.get("deleteOptions") or {}
    grace = options.get("gracePeriodSeconds")
    registry.delete("Pod", where.namespace, where.name, grace=grace, preconditions=options.get("preconditions"))
    return {**SUCCESS, "code": 201}


def log_request(registry: Registry, where: ApiPath, request: ApiRequest) -> LogRequest:
    """Return which log a request asks for. Raises StatusError."""
    container = _container(_pod(registry, where), request.query.get("container", ""))
    return log_options(where.namespace, where.name, container, request.query, lambda: registry.now().timestamp())


def log_options(
    namespace: str, pod: str, container: str, query: Mapping[str, str], wall: Callable[[], float]
) -> LogRequest:
    """Return the log of a container that the parameters of a request select (`PodLogOptions`). Raises StatusError."""
    since = None
    if (seconds := whole_number(query, "sinceSeconds")) is not None:
        since = wall() - seconds
    elif query.get("sinceTime"):
        try:
            since = datetime.fromisoformat(query["sinceTime"].replace("Z", "+00:00")).timestamp()
        except ValueError:
            raise errors.bad_request(f"sinceTime: {query['sinceTime']!r} is not a time") from None
    return LogRequest(
        namespace=namespace,
        pod=pod,
        container=container,
        tail=whole_number(query, "tailLines"),
        follow=is_true(query, "follow"),
        since=since,
        previous=is_true(query, "previous"),
        timestamps=is_true(query, "timestamps"),
        limit=whole_number(query, "limitBytes"),
    )


def exec_request(registry: Registry, where: ApiPath, request: ApiRequest) -> ExecRequest:
    """Return which program a request starts. Raises StatusError."""
    pod, query = _pod(registry, where), request.query
    argv = tuple(request.all("command"))
    if where.subresource == "exec" and not argv:
        raise errors.bad_request("you must specify at least 1 command for the container")
    tty = is_true(query, "tty")
    return ExecRequest(
        namespace=where.namespace,
        pod=where.name,
        container=_container(pod, query.get("container", "")),
        argv=argv,
        stdin=is_true(query, "stdin"),
        stdout=is_true(query, "stdout"),
        stderr=is_true(query, "stderr") and not tty,
        tty=tty,
    )


def port_forward_request(registry: Registry, where: ApiPath, request: ApiRequest) -> PortForwardRequest:
    """Return which pod a request connects to. Raises StatusError."""
    pod, ports = _pod(registry, where), [word for each in request.all("ports") for word in each.split(",")]
    if (pod.get("status") or {}).get("phase") != "Running":
        phase = (pod.get("status") or {}).get("phase", "")
        raise errors.bad_request(f"unable to forward port because pod is not running. Current status={phase}")
    if not all(each.isdigit() and 0 < int(each) < 65536 for each in ports):
        raise errors.bad_request(f"ports: {','.join(ports)!r} are not numbers of ports")
    return PortForwardRequest(namespace=where.namespace, pod=where.name, ports=tuple(map(int, ports)))


def _pod(registry: Registry, where: ApiPath) -> Raw:
    pod = registry.get("Pod", where.namespace, where.name)
    if pod is None:
        raise where.not_found()
    return pod


def _container(pod: Raw, requested: str) -> str:
    spec = pod.get("spec") or {}
    names = [each.get("name", "") for each in spec.get("containers") or ()]
    others = [each.get("name", "") for each in spec.get("initContainers") or ()]
    name = pod["metadata"].get("name", "")
    added = [each.get("name", "") for each in spec.get("ephemeralContainers") or ()]
    if requested:
        if requested not in names + others + added:
            raise errors.bad_request(f"container {requested} is not valid for pod {name}")
        return requested
    if len(names) != 1:
        listed = f"[{' '.join(names)}]"
        more = f" or one of the init containers: [{' '.join(others)}]" if others else ""
        raise errors.bad_request(f"a container name must be specified for pod {name}, choose one of: {listed}{more}")
    return str(names[0])


_SPEC, _STATUS, _SELECTOR = "specReplicasPath", "statusReplicasPath", "labelSelectorPath"


def read_scale(kind: ApiResource, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object's `autoscaling/v1` Scale."""
    shown = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    status: dict[str, Any] = {"replicas": _found(raw, kind.scale.get(_STATUS, ".status.replicas")) or 0}
    if selector := _selector(kind, raw):
        status["selector"] = selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: raw["metadata"][name] for name in shown if raw["metadata"].get(name) is not None},
        "spec": {"replicas": _found(raw, kind.scale.get(_SPEC, ".spec.replicas")) or 0},
        "status": status,
    }


def write_scale(kind: ApiResource, raw: Mapping[str, Any], scale: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with the replicas of a Scale. Raises StatusError."""
    name = str(raw["metadata"].get("name", ""))
    requested = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(requested, int) or isinstance(requested, bool) or requested < 0:
        text = f"Invalid value: {requested}: must be greater than or equal to 0"
        raise errors.invalid("Scale", "autoscaling", name, [FieldError("spec.replicas", "FieldValueInvalid", text)])
    version = (scale.get("metadata") or {}).get("resourceVersion")
    meta = {key: value for key, value in raw["metadata"].items() if key != "resourceVersion"}
    new = {**raw, "metadata": {**meta, **({"resourceVersion": version} if version else {})}}
    *parents, last = kind.scale.get(_SPEC, ".spec.replicas").strip(".").split(".")
    at = new
    for step in parents:
        at[step] = dict(at.get(step) or {})
        at = at[step]
    at[last] = requested
    return new


def _found(raw: Mapping[str, Any], path: str) -> Any:
    return next(iter(json_path_values(raw, path)), None)


def _selector(kind: ApiResource, raw: Mapping[str, Any]) -> str:
    if kind.custom:
        return str(_found(raw, kind.scale.get(_SELECTOR, "")) or "") if kind.scale.get(_SELECTOR) else ""
    return selector_text((raw.get("spec") or {}).get("selector"), order=list)
