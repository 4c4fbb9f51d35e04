"""The columns that `kubectl get` prints for each kind (kubernetes/pkg/printers/internalversion), and those of custom resources."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

Raw = Mapping[str, Any]
Cells = Callable[[Raw, datetime], Sequence[Any]]
NONE, UNKNOWN = "<none>", "<unknown>"


class PrinterColumns(msgspec.Struct, frozen=True):
    """The columns of a kind."""

    names: tuple[str, ...]
    """`*` precedes those that only `-o wide` prints, `#` those with numbers."""
    cells: Cells

    def definitions(self) -> list[dict[str, Any]]:
        """Return the columns of a metav1.Table."""
        return [_definition(name) for name in self.names]


def _definition(name: str) -> dict[str, Any]:
    bare = name.lstrip("*#")
    return {
        "name": bare,
        "type": "integer" if "#" in name else "string",
        "format": "name" if bare == "Name" else "",
        "description": "",
        "priority": 1 if name.startswith("*") else 0,
    }


def _name(raw: Raw) -> str:
    return str(raw["metadata"].get("name", ""))


def _age(raw: Raw, now: datetime) -> str:
    return age(raw["metadata"].get("creationTimestamp"), now)


def _of(raw: Raw, *steps: str) -> Any:
    found: Any = raw
    for step in steps:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _pairs(labels: Any) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted((labels or {}).items())) or NONE


def _selector(raw: Raw) -> str:
    """Format a LabelSelector (FormatLabelSelector)."""
    selector = _of(raw, "spec", "selector") or {}
    words = [f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items())]
    for each in selector.get("matchExpressions") or ():
        key, json_path_values = each.get("key", ""), ",".join(sorted(each.get("values") or ()))
        form = {"In": "{} in ({})", "NotIn": "{} notin ({})", "Exists": "{}", "DoesNotExist": "!{}"}
        words.append(form.get(each.get("operator"), "{}").format(key, json_path_values))
    return ",".join(words) or NONE


def _containers(raw: Raw) -> tuple[str, str]:
    found = _of(raw, "spec", "template", "spec", "containers") or ()
    return ",".join(each.get("name", "") for each in found), ",".join(each.get("image", "") for each in found)


def _node(raw: Raw, now: datetime) -> Sequence[Any]:
    conditions = {each.get("type"): each.get("status") for each in _of(raw, "status", "conditions") or ()}
    words = [{"True": "Ready"}.get(conditions["Ready"], "NotReady")] if "Ready" in conditions else ["Unknown"]
    words += ["SchedulingDisabled"] if _of(raw, "spec", "unschedulable") else []
    prefix = "node-role.kubernetes.io/"
    labels = raw["metadata"].get("labels") or {}
    roles = sorted({key.removeprefix(prefix) for key in labels if key.startswith(prefix)} - {""})
    addresses = {each.get("type"): each.get("address") for each in reversed(_of(raw, "status", "addresses") or [])}
    info = _of(raw, "status", "nodeInfo") or {}
    return (
        _name(raw),
        ",".join(words),
        ",".join(roles) or NONE,
        _age(raw, now),
        info.get("kubeletVersion", ""),
        addresses.get("InternalIP", NONE),
        addresses.get("ExternalIP", NONE),
        info.get("osImage") or UNKNOWN,
        info.get("kernelVersion") or UNKNOWN,
        info.get("containerRuntimeVersion") or UNKNOWN,
    )


def _service(raw: Raw, now: datetime) -> Sequence[Any]:
    spec = raw.get("spec") or {}
    type = spec.get("type") or "ClusterIP"
    ips = spec.get("clusterIPs") or ([spec["clusterIP"]] if spec.get("clusterIP") else [])
    external = list(spec.get("externalIPs") or ())
    if type == "LoadBalancer":
        entries = _of(raw, "status", "loadBalancer", "ingress") or ()
        given = [each.get("ip") or each.get("hostname", "") for each in entries]
        text = ",".join([*dict.fromkeys(given), *external]) or "<pending>"
    elif type == "ExternalName":
        text = spec.get("externalName", "")
    else:
        text = ",".join(external) or NONE
    ports = ",".join(_port(each) for each in spec.get("ports") or ()) or NONE
    return _name(raw), type, (ips or [NONE])[0], text, ports, _age(raw, now), _pairs(spec.get("selector"))


def _port(port: Raw) -> str:
    node = f":{port['nodePort']}" if port.get("nodePort") else ""
    return f"{port.get('port')}{node}/{port.get('protocol') or 'TCP'}"


def _deployment(raw: Raw, now: datetime) -> Sequence[Any]:
    status = raw.get("status") or {}
    replicas_desired = _of(raw, "spec", "replicas")
    ready = f"{status.get('readyReplicas', 0)}/{1 if replicas_desired is None else replicas_desired}"
    counts = status.get("updatedReplicas", 0), status.get("availableReplicas", 0)
    return _name(raw), ready, *counts, _age(raw, now), *_containers(raw), _selector(raw)


def _replica_set(raw: Raw, now: datetime) -> Sequence[Any]:
    status, replicas_desired = raw.get("status") or {}, _of(raw, "spec", "replicas")
    counts = (
        (1 if replicas_desired is None else replicas_desired),
        status.get("replicas", 0),
        status.get("readyReplicas", 0),
    )
    return _name(raw), *counts, _age(raw, now), *_containers(raw), _selector(raw)


def _listed(words: Sequence[str], most: int) -> str:
    """Join the first words of many (formatEndpoints)."""
    if not words:
        return NONE
    more = f" + {len(words) - most} more..." if len(words) > most else ""
    return ",".join(words[:most]) + more


def _endpoints(raw: Raw, now: datetime) -> Sequence[Any]:
    words = []
    for subset in raw.get("subsets") or ():
        ports = [port.get("port") for port in subset.get("ports") or ()]
        for each in subset.get("addresses") or ():
            ip = f"[{each['ip']}]" if ":" in each.get("ip", "") else each.get("ip", "")
            words += [f"{ip}:{port}" for port in ports] or [ip]
    return _name(raw), _listed(words, 3), _age(raw, now)


def _slice(raw: Raw, now: datetime) -> Sequence[Any]:
    ports = [str(port["port"]) if port.get("port") is not None else "*" for port in raw.get("ports") or ()]
    addresses = [address for each in raw.get("endpoints") or () for address in each.get("addresses") or ()]
    shown = _listed(addresses, 3) if addresses else "<unset>"
    return _name(raw), raw.get("addressType", ""), _listed(ports, 3) if ports else "<unset>", shown, _age(raw, now)


def _event(raw: Raw, now: datetime) -> Sequence[Any]:
    first = raw.get("firstTimestamp") or raw.get("eventTime")
    series = raw.get("series") or {}
    last = series.get("lastObservedTime") or raw.get("lastTimestamp") or first
    times = series.get("count") or raw.get("count") or 1
    of, source = raw.get("involvedObject") or {}, raw.get("source") or {}
    seen = age(last, now)
    if times > 1 and first:
        seen = f"{seen} (x{times} over {age(first, now)})"
    words = [source.get("component") or raw.get("reportingComponent") or "", source.get("host") or ""]
    return (
        seen,
        raw.get("type", ""),
        raw.get("reason", ""),
        f"{of.get('kind', '').lower()}/{of.get('name', '')}",
        of.get("fieldPath", ""),
        ", ".join(word for word in words if word),
        str(raw.get("message", "")).strip(),
        age(first, now),
        times,
        _name(raw),
    )


def _parent(raw: Raw, now: datetime) -> Sequence[Any]:
    of = _of(raw, "spec", "parentRef") or {}
    parts = [of.get("resource", ""), of.get("namespace", ""), of.get("name", "")]
    return _name(raw), "/".join(part for part in parts if part), _age(raw, now)


def _pool(raw: Raw, now: datetime) -> Sequence[Any]:
    del now
    spec = raw.get("spec") or {}
    assign, avoid = spec.get("autoAssign", True), spec.get("avoidBuggyIPs", False)
    return _name(raw), str(assign).lower(), str(avoid).lower(), _json(spec.get("addresses"))


def _advertisement(raw: Raw, now: datetime) -> Sequence[Any]:
    del now
    spec = raw.get("spec") or {}
    names = ("ipAddressPools", "ipAddressPoolSelectors", "interfaces", "nodeSelectors")
    return _name(raw), *(_json(spec.get(name)) for name in names)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode() if value else ""


def _counted(field: str) -> Cells:
    return lambda raw, now: (_name(raw), len(raw.get(field) or ()), _age(raw, now))


PLAIN = PrinterColumns(("Name", "Age"), lambda raw, now: (_name(raw), _age(raw, now)))
"""Columns of kinds that have none of their own."""
_WORKLOAD = ("*Containers", "*Images", "*Selector")


def age(since: str | None, now: datetime) -> str:
    """Return the age of a metav1.Time, `<unknown>` if there is none."""
    if not since:
        return "<unknown>"
    try:
        then = datetime.fromisoformat(since.replace("Z", "+00:00"))
    except ValueError:
        return "<invalid>"
    return human_duration((now - then).total_seconds())


def human_duration(seconds: float) -> str:
    """Format a duration in its one or two largest units (apimachinery's util/duration.HumanDuration)."""
    if seconds < -1:
        return "<invalid>"
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 120:
        return f"{whole}s"
    if minutes < 10:
        return _two(minutes, "m", whole % 60, "s")
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return _two(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return _two(days, "d", hours % 24, "h")
    if days < 365 * 2:
        return f"{days}d"
    if days < 365 * 8:
        return _two(days // 365, "y", days % 365, "d")
    return f"{days // 365}y"


def _two(first: int, unit: str, second: int, below: str) -> str:
    return f"{first}{unit}{second}{below}" if second else f"{first}{unit}"


def pod_cells(raw: Raw, now: datetime) -> Sequence[Any]:
    """Return Name, Ready, Status, Restarts, Age, IP, Node, Nominated Node, and Readiness Gates (printPod)."""
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
    """Return a pod's status word, its restarts, its ready containers, and the time of the last restart."""
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


_STEP = re.compile(r"\.((?:\\.|[^.\[\\])+)|\[(?:'((?:\\.|[^'\\])*)'|\"((?:\\.|[^\"\\])*)\"|(-?\d+|\*)|\?\(([^)]*)\))\]")
_TEST = re.compile(r"\s*@\.([\w.-]+)\s*==\s*[\"']([^\"']*)[\"']\s*")


class CustomColumns:
    """The `additionalPrinterColumns` of one version of a custom resource."""

    def __init__(self, columns: Sequence[Raw]) -> None:
        """Use these columns, or Age if there are none."""
        self._columns = columns

    def definitions(self) -> list[dict[str, Any]]:
        """Return the columns of a metav1.Table."""
        if not self._columns:
            return PLAIN.definitions()
        name = PLAIN.definitions()[0]
        return [name, *(_custom_definition(each) for each in self._columns)]

    def cells(self, raw: Raw, now: datetime) -> Sequence[Any]:
        """Return an object's row."""
        if not self._columns:
            return PLAIN.cells(raw, now)
        return [raw["metadata"].get("name", ""), *(_cell(each, raw, now) for each in self._columns)]


def _custom_definition(column: Raw) -> dict[str, Any]:
    found = {"name": column.get("name", ""), "type": column.get("type", "string"), "format": column.get("format", "")}
    return {**found, "description": column.get("description", ""), "priority": column.get("priority", 0)}


def _cell(column: Raw, raw: Raw, now: datetime) -> Any:
    found = json_path_values(raw, str(column.get("jsonPath", "")))
    if not found:
        return None
    first, type = found[0], column.get("type")
    if type == "date":
        return age(first if isinstance(first, str) else None, now)
    if type == "string":
        return ",".join(each if isinstance(each, str) else _text(each) for each in found)
    return first


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def json_path_values(raw: Any, path: str) -> list[Any]:
    """Return what a simple JSONPath selects: names, indexes, `[*]`, and `[?(@.x=="y")]`. Empty for any other path."""
    found, at = [raw], 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            return []
        name = step[1] or step[2] or step[3]
        if name is not None:
            key = re.sub(r"\\(.)", r"\1", name)
            found = [each[key] for each in found if isinstance(each, Mapping) and each.get(key) is not None]
        elif step[5] is not None:
            found = _filtered(found, step[5])
        elif step[4] == "*":
            found = [one for each in found for one in (each.values() if isinstance(each, Mapping) else each)]
        else:
            index = int(step[4])
            found = [each[index] for each in found if isinstance(each, list) and -len(each) <= index < len(each)]
        at = step.end()
    return found


def _filtered(found: list[Any], condition: str) -> list[Any]:
    test = _TEST.fullmatch(condition)
    if test is None:
        return []
    return [
        one
        for each in found
        if isinstance(each, list)
        for one in each
        if json_path_values(one, f".{test[1]}") == [test[2]]
    ]


COLUMNS: Mapping[str, PrinterColumns] = {
    "Pod": PrinterColumns(
        ("Name", "Ready", "Status", "Restarts", "Age", "*IP", "*Node", "*Nominated Node", "*Readiness Gates"), pod_cells
    ),
    "Service": PrinterColumns(("Name", "Type", "Cluster-IP", "External-IP", "Port(s)", "Age", "*Selector"), _service),
    "Node": PrinterColumns(
        (
            *("Name", "Status", "Roles", "Age", "Version", "*Internal-IP", "*External-IP", "*OS-Image"),
            *("*Kernel-Version", "*Container-Runtime"),
        ),
        _node,
    ),
    "Namespace": PrinterColumns(
        ("Name", "Status", "Age"),
        lambda raw, now: (_name(raw), _of(raw, "status", "phase") or "Active", _age(raw, now)),
    ),
    "Deployment": PrinterColumns(("Name", "Ready", "#Up-to-date", "#Available", "Age", *_WORKLOAD), _deployment),
    "ReplicaSet": PrinterColumns(("Name", "#Desired", "#Current", "#Ready", "Age", *_WORKLOAD), _replica_set),
    "Endpoints": PrinterColumns(("Name", "Endpoints", "Age"), _endpoints),
    "EndpointSlice": PrinterColumns(("Name", "AddressType", "Ports", "Endpoints", "Age"), _slice),
    "ConfigMap": PrinterColumns(
        ("Name", "#Data", "Age"),
        lambda raw, now: (_name(raw), len(raw.get("data") or ()) + len(raw.get("binaryData") or ()), _age(raw, now)),
    ),
    "Secret": PrinterColumns(
        ("Name", "Type", "#Data", "Age"),
        lambda raw, now: (_name(raw), raw.get("type") or "Opaque", len(raw.get("data") or ()), _age(raw, now)),
    ),
    "ServiceAccount": PrinterColumns(("Name", "#Secrets", "Age"), _counted("secrets")),
    "Lease": PrinterColumns(
        ("Name", "Holder", "Age"),
        lambda raw, now: (_name(raw), _of(raw, "spec", "holderIdentity") or "", _age(raw, now)),
    ),
    "Event": PrinterColumns(
        (
            *("Last Seen", "Type", "Reason", "Object", "*Subobject", "*Source", "Message", "*First Seen", "*#Count"),
            "*Name",
        ),
        _event,
    ),
    "ServiceCIDR": PrinterColumns(
        ("Name", "CIDRs", "Age"),
        lambda raw, now: (_name(raw), ",".join(_of(raw, "spec", "cidrs") or ()), _age(raw, now)),
    ),
    "IPAddress": PrinterColumns(("Name", "ParentRef", "Age"), _parent),
    "CustomResourceDefinition": PrinterColumns(
        ("Name", "Created At"), lambda raw, _: (_name(raw), raw["metadata"].get("creationTimestamp", ""))
    ),
    "IPAddressPool": PrinterColumns(("Name", "Auto Assign", "Avoid Buggy IPs", "Addresses"), _pool),
    "L2Advertisement": PrinterColumns(
        ("Name", "IPAddressPools", "IPAddressPool Selectors", "Interfaces", "*Node Selectors"), _advertisement
    ),
}
"""Columns by the registry's name of the kind."""
