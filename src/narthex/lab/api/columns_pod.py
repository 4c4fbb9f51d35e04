"""What `kubectl get pods` shows: the words for a pod's state (printPod in kubernetes/pkg/printers/internalversion)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from narthex.lab.api.ages import age

Raw = Mapping[str, Any]


def pod_cells(raw: Raw, now: datetime) -> Sequence[Any]:
    """Name, Ready, Status, Restarts, Age, IP, Node, Nominated Node, Readiness Gates."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    containers = spec.get("containers") or ()
    ips = status.get("podIPs") or ()
    ip = (ips[0].get("ip") if ips else status.get("podIP")) or "<none>"
    reason, restarts, ready, last = _state(spec, status)
    if meta.get("deletionTimestamp"):
        reason = "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    again = f"{restarts} ({age(last, now)} ago)" if restarts and last else str(restarts)
    return (
        meta.get("name", ""),
        f"{ready}/{len(containers)}",
        reason,
        again,
        age(meta.get("creationTimestamp"), now),
        ip,
        spec.get("nodeName") or "<none>",
        status.get("nominatedNodeName") or "<none>",
        _gates(spec, status),
    )


def _state(spec: Raw, status: Raw) -> tuple[str, int, int, str | None]:
    """The word, restarts, containers that are ready, and when one was last restarted."""
    reason = status.get("reason") or status.get("phase") or "Pending"
    if _condition(status, "PodScheduled").get("reason") == "SchedulingGated":
        reason = "SchedulingGated"
    restarts, ready = 0, 0
    last: str | None = None
    beginning = False
    first = status.get("initContainerStatuses") or ()
    for index, each in enumerate(first):
        restarts += each.get("restartCount", 0)
        state = each.get("state") or {}
        terminated, waiting = state.get("terminated"), state.get("waiting")
        if terminated is not None and not terminated.get("exitCode"):
            continue
        if terminated is not None:
            reason = f"Init:{_ended(terminated)}"
        elif waiting is not None and waiting.get("reason") not in (None, "", "PodInitializing"):
            reason = f"Init:{waiting['reason']}"
        else:
            reason = f"Init:{index}/{len(spec.get('initContainers') or first)}"
        beginning = True
        break
    if beginning:
        return reason, restarts, ready, last
    restarts, running = 0, False
    for each in reversed(status.get("containerStatuses") or ()):
        restarts += each.get("restartCount", 0)
        before = ((each.get("lastState") or {}).get("terminated") or {}).get("finishedAt")
        last = max(filter(None, (last, before)), default=None)
        state = each.get("state") or {}
        waiting, terminated = state.get("waiting") or {}, state.get("terminated")
        if waiting.get("reason"):
            reason = waiting["reason"]
        elif terminated is not None:
            reason = _ended(terminated)
        elif each.get("ready") and state.get("running") is not None:
            running = True
            ready += 1
    if reason == "Completed" and running:
        reason = "Running" if _condition(status, "Ready").get("status") == "True" else "NotReady"
    return reason, restarts, ready, last


def _ended(terminated: Raw) -> str:
    if terminated.get("reason"):
        return str(terminated["reason"])
    if terminated.get("signal"):
        return f"Signal:{terminated['signal']}"
    return f"ExitCode:{terminated.get('exitCode', 0)}"


def _condition(status: Raw, type: str) -> Raw:
    return next((each for each in status.get("conditions") or () if each.get("type") == type), {})


def _gates(spec: Raw, status: Raw) -> str:
    gates = spec.get("readinessGates") or ()
    if not gates:
        return "<none>"
    true = sum(_condition(status, gate.get("conditionType", "")).get("status") == "True" for gate in gates)
    return f"{true}/{len(gates)}"
