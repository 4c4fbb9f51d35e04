"""The columns that `kubectl get` prints for each kind (kubernetes/pkg/printers/internalversion), and those of custom resources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

Raw = Mapping[str, Any]
Cell = Callable[[Raw, datetime], Any]
"""Returns the value of a column for an object and the current time."""

NONE, UNKNOWN, UNSET = "<none>", "<unknown>", "<unset>"


class PrinterColumns(msgspec.Struct, frozen=True):
    """The columns of a kind."""

    definitions: list[dict[str, Any]]
    """Columns of a metav1.Table."""
    cells: tuple[Cell, ...]

    def row(self, raw: Raw, now: datetime) -> list[Any]:
        """Return the cells of an object."""
        return [cell(raw, now) for cell in self.cells]


def built_in_columns(kind: str) -> PrinterColumns:
    """Return the columns of a kind, given by its name in the registry."""
    cells = _COLUMNS.get(kind) or _common({})
    return PrinterColumns([_definition(name) for name in cells], tuple(cells.values()))


def custom_columns(columns: Sequence[Raw]) -> PrinterColumns:
    """Return the `additionalPrinterColumns` of one version of a custom resource, Age if there are none."""
    if not columns:
        return built_in_columns("")
    definitions = [_definition("Name"), *(_custom_definition(each) for each in columns)]
    return PrinterColumns(definitions, (_at("metadata.name"), *(partial(_custom_cell, each) for each in columns)))


def _definition(name: str) -> dict[str, Any]:
    bare = name.lstrip("*#")
    return {
        "name": bare,
        "type": "integer" if "#" in name else "string",
        "format": "name" if bare == "Name" else "",
        "description": "",
        "priority": 1 if name.startswith("*") else 0,
    }


def _custom_definition(column: Raw) -> dict[str, Any]:
    found = {"name": column.get("name", ""), "type": column.get("type", "string"), "format": column.get("format", "")}
    return {**found, "description": column.get("description", ""), "priority": column.get("priority", 0)}


def _custom_cell(column: Raw, raw: Raw, now: datetime) -> Any:
    found = json_path_values(raw, str(column.get("jsonPath", "")))
    if not found:
        return None
    first, type = found[0], column.get("type")
    if type == "date":
        return age(first if isinstance(first, str) else None, now)
    if type == "string":
        return ",".join(each if isinstance(each, str) else _json(each) for each in found)
    return first


def _of(raw: Raw, path: str) -> Any:
    found: Any = raw
    for step in path.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _at(path: str, default: Any = "") -> Cell:
    """Return a column with the value of a field, `default` if it is absent or empty."""

    def cell(raw: Raw, now: datetime) -> Any:
        """Return the field's value, or the default if it is absent or empty."""
        del now
        found = _of(raw, path)
        return default if found in (None, "") else found

    return cell


def _count(*fields: str) -> Cell:
    return lambda raw, _: sum(len(raw.get(field) or ()) for field in fields)


def _joined(path: str, key: str) -> Cell:
    return lambda raw, _: ",".join(each.get(key, "") for each in _of(raw, path) or ())


def _encoded(path: str) -> Cell:
    return lambda raw, _: _json(found) if (found := _of(raw, path)) else ""


def _flag(field: str, *, default: bool) -> Cell:
    return lambda raw, _: str((raw.get("spec") or {}).get(field, default)).lower()


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _age(raw: Raw, now: datetime) -> str:
    return age(raw["metadata"].get("creationTimestamp"), now)


_OPERATORS = {"In": "{} in ({})", "NotIn": "{} notin ({})", "Exists": "{}", "DoesNotExist": "!{}"}


def selector_text(selector: Any, order: Callable[[Any], Iterable[str]] = sorted) -> str:
    """Format a LabelSelector with ordered values, empty if it selects everything."""
    words = _pairs(selector.get("matchLabels")) if selector else []
    for each in (selector or {}).get("matchExpressions") or ():
        values = ",".join(order(each.get("values") or ()))
        words.append(_OPERATORS.get(each.get("operator"), "{}").format(each.get("key", ""), values))
    return ",".join(words)


def _pairs(labels: Any) -> list[str]:
    return [f"{key}={value}" for key, value in sorted((labels or {}).items())]


def _deployment_ready(raw: Raw, now: datetime) -> str:
    return f"{_at('status.readyReplicas', 0)(raw, now)}/{_at('spec.replicas', 1)(raw, now)}"


def _node_status(raw: Raw, _: datetime) -> str:
    ready = _condition(raw, "Ready")
    word = "Ready" if ready.get("status") == "True" else "NotReady" if ready else "Unknown"
    return f"{word},SchedulingDisabled" if _of(raw, "spec.unschedulable") else word


def _node_roles(raw: Raw, _: datetime) -> str:
    prefix = "node-role.kubernetes.io/"
    labels = raw["metadata"].get("labels") or {}
    return ",".join(sorted({key.removeprefix(prefix) for key in labels if key.startswith(prefix)} - {""})) or NONE


def _node_address(type: str) -> Cell:
    return lambda raw, _: next(
        (each.get("address") for each in _of(raw, "status.addresses") or () if each.get("type") == type), NONE
    )


def _cluster_ip(raw: Raw, _: datetime) -> str:
    spec = raw.get("spec") or {}
    return str((spec.get("clusterIPs") or [spec.get("clusterIP") or NONE])[0])


def _external_ip(raw: Raw, _: datetime) -> str:
    spec = raw.get("spec") or {}
    external = list(spec.get("externalIPs") or ())
    if spec.get("type") == "LoadBalancer":
        entries = _of(raw, "status.loadBalancer.ingress") or ()
        given = [each.get("ip") or each.get("hostname", "") for each in entries]
        return ",".join([*dict.fromkeys(given), *external]) or "<pending>"
    if spec.get("type") == "ExternalName":
        return str(spec.get("externalName", ""))
    return ",".join(external) or NONE


def _service_ports(raw: Raw, _: datetime) -> str:
    words = []
    for port in _of(raw, "spec.ports") or ():
        node = f":{port['nodePort']}" if port.get("nodePort") else ""
        words.append(f"{port.get('port')}{node}/{port.get('protocol') or 'TCP'}")
    return ",".join(words) or NONE


def _listed(words: Sequence[str], nothing: str) -> str:
    """Join the first three words (formatEndpoints)."""
    more = f" + {len(words) - 3} more..." if len(words) > 3 else ""
    return ",".join(words[:3]) + more if words else nothing


def _endpoints(raw: Raw, _: datetime) -> str:
    words = []
    for subset in raw.get("subsets") or ():
        ports = [port.get("port") for port in subset.get("ports") or ()]
        for each in subset.get("addresses") or ():
            ip = f"[{each['ip']}]" if ":" in each.get("ip", "") else each.get("ip", "")
            words += [f"{ip}:{port}" for port in ports] or [ip]
    return _listed(words, NONE)


def _slice_ports(raw: Raw, _: datetime) -> str:
    return _listed(["*" if port.get("port") is None else str(port["port"]) for port in raw.get("ports") or ()], UNSET)


def _slice_addresses(raw: Raw, _: datetime) -> str:
    return _listed([address for each in raw.get("endpoints") or () for address in each.get("addresses") or ()], UNSET)


def _first_seen(raw: Raw, now: datetime) -> str:
    return age(raw.get("firstTimestamp") or raw.get("eventTime"), now)


def _last_seen(raw: Raw, now: datetime) -> str:
    first = raw.get("firstTimestamp") or raw.get("eventTime")
    seen = age(_of(raw, "series.lastObservedTime") or raw.get("lastTimestamp") or first, now)
    times = _event_count(raw, now)
    return f"{seen} (x{times} over {age(first, now)})" if times > 1 and first else seen


def _event_count(raw: Raw, _: datetime) -> int:
    return int(_of(raw, "series.count") or raw.get("count") or 1)


def _event_object(raw: Raw, _: datetime) -> str:
    of = raw.get("involvedObject") or {}
    return f"{of.get('kind', '').lower()}/{of.get('name', '')}"


def _event_source(raw: Raw, _: datetime) -> str:
    source = raw.get("source") or {}
    return ", ".join(filter(None, (source.get("component") or raw.get("reportingComponent"), source.get("host"))))


_MOST_HOSTS = 3


def _ingress_hosts(raw: Raw, _: datetime) -> str:
    rules = _of(raw, "spec.rules") or ()
    hosts = [str(each["host"]) for each in rules if each.get("host")]
    if not hosts:
        return "*"
    more = f" + {len(rules) - _MOST_HOSTS} more..." if len(rules) > _MOST_HOSTS else ""
    return ",".join(hosts[:_MOST_HOSTS]) + more


def _ingress_address(raw: Raw, _: datetime) -> str:
    found = _of(raw, "status.loadBalancer.ingress") or ()
    return ",".join(sorted({str(each.get("ip") or each.get("hostname") or "") for each in found} - {""}))


def _ingress_parameters(raw: Raw, _: datetime) -> str:
    found = _of(raw, "spec.parameters")
    if not found:
        return "<none>"
    group = f".{found['apiGroup']}" if found.get("apiGroup") else ""
    return f"{found.get('kind', '')}{group}/{found.get('name', '')}"


def _controller(raw: Raw, _: datetime) -> str:
    owner = next((each for each in raw["metadata"].get("ownerReferences") or () if each.get("controller")), None)
    if owner is None:
        return NONE
    group = str(owner.get("apiVersion", "")).rpartition("/")[0]
    return f"{owner.get('kind', '').lower()}{'.' * bool(group)}{group}/{owner.get('name', '')}"


def _job_status(raw: Raw, _: datetime) -> str:
    words = ("Complete", "Failed", "Terminating", "Suspended", "FailureTarget", "SuccessCriteriaMet")
    for word in words:
        if word == "Terminating" and raw["metadata"].get("deletionTimestamp"):
            return word
        if _condition(raw, word).get("status") == "True":
            return word
    return "Running"


def _job_completions(raw: Raw, _: datetime) -> str:
    succeeded, desired = _of(raw, "status.succeeded") or 0, _of(raw, "spec.completions")
    if desired is not None:
        return f"{succeeded}/{desired}"
    parallel = _of(raw, "spec.parallelism") or 0
    return f"{succeeded}/1 of {parallel}" if parallel > 1 else f"{succeeded}/1"


def _job_duration(raw: Raw, now: datetime) -> str:
    began, ended = _of(raw, "status.startTime"), _of(raw, "status.completionTime")
    return age(began, datetime.fromisoformat(ended) if ended else now) if began else ""


def _parent(raw: Raw, _: datetime) -> str:
    of = _of(raw, "spec.parentRef") or {}
    return "/".join(filter(None, (of.get(field) for field in ("resource", "namespace", "name"))))


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


def _pod_ready(raw: Raw, _: datetime) -> str:
    ready = 0 if _initializing(raw) else sum(map(_runs, _of(raw, "status.containerStatuses") or ()))
    ready += sum(bool(each.get("ready")) for each in _started_sidecars(raw))
    return f"{ready}/{len(_of(raw, 'spec.containers') or ()) + len(_sidecars(raw))}"


def _sidecars(raw: Raw) -> set[str]:
    """Return the names of the init containers that run in addition to the main containers."""
    return {each["name"] for each in _of(raw, "spec.initContainers") or () if each.get("restartPolicy") == "Always"}


def _started_sidecars(raw: Raw) -> list[Raw]:
    names = _sidecars(raw)
    statuses = _of(raw, "status.initContainerStatuses") or ()
    return [each for each in statuses if each.get("name") in names and each.get("started")]


def _pod_status(raw: Raw, _: datetime) -> str:
    status = raw.get("status") or {}
    if raw["metadata"].get("deletionTimestamp"):
        return "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    if initializing := _initializing(raw):
        return initializing[0]
    reason = str(status.get("reason") or status.get("phase") or "Pending")
    if _condition(raw, "PodScheduled").get("reason") == "SchedulingGated":
        reason = "SchedulingGated"
    containers = status.get("containerStatuses") or ()
    reason = next(filter(None, map(_stopped, containers)), reason)
    if reason == "Completed" and any(map(_runs, containers)):
        return "Running" if _condition(raw, "Ready").get("status") == "True" else "NotReady"
    return reason


def _pod_restarts(raw: Raw, now: datetime) -> str:
    if initializing := _initializing(raw):
        return str(initializing[1])
    containers = (*(_of(raw, "status.containerStatuses") or ()), *_started_sidecars(raw))
    restarts = sum(each.get("restartCount", 0) for each in containers)
    last = max(filter(None, (_of(each, "lastState.terminated.finishedAt") for each in containers)), default=None)
    return f"{restarts} ({age(last, now)} ago)" if restarts and last else str(restarts)


def _initializing(raw: Raw) -> tuple[str, int] | None:
    """Return the status word and the restarts of a pod whose init containers have not ended, otherwise None."""
    first, restarts = _of(raw, "status.initContainerStatuses") or (), 0
    started = _started_sidecars(raw)
    for index, each in enumerate(first):
        restarts += each.get("restartCount", 0)
        state = each.get("state") or {}
        terminated, waiting = state.get("terminated"), state.get("waiting")
        if each in started or (terminated is not None and not terminated.get("exitCode")):
            continue
        if terminated is not None:
            return f"Init:{_ended(terminated)}", restarts
        if waiting is not None and waiting.get("reason") not in (None, "", "PodInitializing"):
            return f"Init:{waiting['reason']}", restarts
        return f"Init:{index}/{len(_of(raw, 'spec.initContainers') or first)}", restarts
    return None


def _stopped(container: Raw) -> str:
    """Return why a container waits or has ended, empty if it runs."""
    terminated = _of(container, "state.terminated")
    return _of(container, "state.waiting.reason") or ("" if terminated is None else _ended(terminated))


def _runs(container: Raw) -> bool:
    """Return True if a container is ready and runs."""
    return bool(container.get("ready") and _of(container, "state.running") is not None and not _stopped(container))


def _ended(terminated: Raw) -> str:
    if terminated.get("reason"):
        return str(terminated["reason"])
    if terminated.get("signal"):
        return f"Signal:{terminated['signal']}"
    return f"ExitCode:{terminated.get('exitCode', 0)}"


def _condition(raw: Raw, type: str) -> Raw:
    return next((each for each in _of(raw, "status.conditions") or () if each.get("type") == type), {})


def _pod_ip(raw: Raw, _: datetime) -> str:
    ips = _of(raw, "status.podIPs")
    return (ips[0].get("ip") if ips else _of(raw, "status.podIP")) or NONE


def _readiness_gates(raw: Raw, _: datetime) -> str:
    gates = _of(raw, "spec.readinessGates") or ()
    true = sum(_condition(raw, gate.get("conditionType", "")).get("status") == "True" for gate in gates)
    return f"{true}/{len(gates)}" if gates else NONE


_STEP = re.compile(r"\.((?:\\.|[^.\[\\])+)|\[(?:'((?:\\.|[^'\\])*)'|\"((?:\\.|[^\"\\])*)\"|(-?\d+|\*)|\?\(([^)]*)\))\]")
_TEST = re.compile(r"\s*@\.([\w.-]+)\s*==\s*[\"']([^\"']*)[\"']\s*")


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


def _common(cells: dict[str, Cell]) -> dict[str, Cell]:
    """Return columns with the name before and the age behind them."""
    return {"Name": _at("metadata.name"), **cells, "Age": _age}


_WORKLOAD: dict[str, Cell] = {
    "*Containers": _joined("spec.template.spec.containers", "name"),
    "*Images": _joined("spec.template.spec.containers", "image"),
    "*Selector": lambda raw, _: selector_text(_of(raw, "spec.selector")) or NONE,
}
_COLUMNS: Mapping[str, Mapping[str, Cell]] = {
    "Pod": {
        **_common({"Ready": _pod_ready, "Status": _pod_status, "Restarts": _pod_restarts}),
        "*IP": _pod_ip,
        "*Node": _at("spec.nodeName", NONE),
        "*Nominated Node": _at("status.nominatedNodeName", NONE),
        "*Readiness Gates": _readiness_gates,
    },
    "Service": {
        **_common(
            {
                "Type": _at("spec.type", "ClusterIP"),
                "Cluster-IP": _cluster_ip,
                "External-IP": _external_ip,
                "Port(s)": _service_ports,
            }
        ),
        "*Selector": lambda raw, _: ",".join(_pairs(_of(raw, "spec.selector"))) or NONE,
    },
    "Node": {
        **_common({"Status": _node_status, "Roles": _node_roles}),
        "Version": _at("status.nodeInfo.kubeletVersion"),
        "*Internal-IP": _node_address("InternalIP"),
        "*External-IP": _node_address("ExternalIP"),
        "*OS-Image": _at("status.nodeInfo.osImage", UNKNOWN),
        "*Kernel-Version": _at("status.nodeInfo.kernelVersion", UNKNOWN),
        "*Container-Runtime": _at("status.nodeInfo.containerRuntimeVersion", UNKNOWN),
    },
    "Namespace": _common({"Status": _at("status.phase", "Active")}),
    "Deployment": _common(
        {
            "Ready": _deployment_ready,
            "#Up-to-date": _at("status.updatedReplicas", 0),
            "#Available": _at("status.availableReplicas", 0),
        }
    )
    | _WORKLOAD,
    "ReplicaSet": _common(
        {
            "#Desired": _at("spec.replicas", 1),
            "#Current": _at("status.replicas", 0),
            "#Ready": _at("status.readyReplicas", 0),
        }
    )
    | _WORKLOAD,
    "DaemonSet": _common(
        {
            "#Desired": _at("status.desiredNumberScheduled", 0),
            "#Current": _at("status.currentNumberScheduled", 0),
            "#Ready": _at("status.numberReady", 0),
            "#Up-to-date": _at("status.updatedNumberScheduled", 0),
            "#Available": _at("status.numberAvailable", 0),
            "Node Selector": lambda raw, _: ",".join(_pairs(_of(raw, "spec.template.spec.nodeSelector"))) or NONE,
        }
    )
    | _WORKLOAD,
    "StatefulSet": _common({"Ready": _deployment_ready})
    | {name: _WORKLOAD[name] for name in ("*Containers", "*Images")},
    "ControllerRevision": _common({"Controller": _controller, "Revision": _at("revision", 0)}),
    "Job": _common({"Status": _job_status, "Completions": _job_completions, "Duration": _job_duration}) | _WORKLOAD,
    "CronJob": _common(
        {
            "Schedule": _at("spec.schedule"),
            "Timezone": _at("spec.timeZone", NONE),
            "Suspend": lambda raw, _: UNSET if (of := _of(raw, "spec.suspend")) is None else str(bool(of)),
            "#Active": lambda raw, _: len(_of(raw, "status.active") or ()),
            "Last Schedule": lambda raw, now: age(of, now) if (of := _of(raw, "status.lastScheduleTime")) else NONE,
        }
    )
    | {
        "*Containers": _joined("spec.jobTemplate.spec.template.spec.containers", "name"),
        "*Images": _joined("spec.jobTemplate.spec.template.spec.containers", "image"),
        "*Selector": lambda raw, _: selector_text(_of(raw, "spec.jobTemplate.spec.selector")) or NONE,
    },
    "Endpoints": _common({"Endpoints": _endpoints}),
    "EndpointSlice": _common({"AddressType": _at("addressType"), "Ports": _slice_ports, "Endpoints": _slice_addresses}),
    "ConfigMap": _common({"#Data": _count("data", "binaryData")}),
    "Secret": _common({"Type": _at("type", "Opaque"), "#Data": _count("data")}),
    "ServiceAccount": _common({"#Secrets": _count("secrets")}),
    "Lease": _common({"Holder": _at("spec.holderIdentity")}),
    "Event": {
        "Last Seen": _last_seen,
        "Type": _at("type"),
        "Reason": _at("reason"),
        "Object": _event_object,
        "*Subobject": _at("involvedObject.fieldPath"),
        "*Source": _event_source,
        "Message": lambda raw, _: str(raw.get("message", "")).strip(),
        "*First Seen": _first_seen,
        "*#Count": _event_count,
        "*Name": _at("metadata.name"),
    },
    "Ingress": _common(
        {
            "Class": lambda raw, _: _of(raw, "spec.ingressClassName") or "<none>",
            "Hosts": _ingress_hosts,
            "Address": _ingress_address,
            "Ports": lambda raw, _: "80, 443" if _of(raw, "spec.tls") else "80",
        }
    ),
    "IngressClass": _common({"Controller": _at("spec.controller"), "Parameters": _ingress_parameters}),
    "NetworkPolicy": _common({"Pod-Selector": lambda raw, _: selector_text(_of(raw, "spec.podSelector")) or NONE}),
    "ServiceCIDR": _common({"CIDRs": lambda raw, _: ",".join(_of(raw, "spec.cidrs") or ())}),
    "IPAddress": _common({"ParentRef": _parent}),
    "CustomResourceDefinition": {"Name": _at("metadata.name"), "Created At": _at("metadata.creationTimestamp")},
    "IPAddressPool": {
        "Name": _at("metadata.name"),
        "Auto Assign": _flag("autoAssign", default=True),
        "Avoid Buggy IPs": _flag("avoidBuggyIPs", default=False),
        "Addresses": _encoded("spec.addresses"),
    },
    "L2Advertisement": {
        "Name": _at("metadata.name"),
        "IPAddressPools": _encoded("spec.ipAddressPools"),
        "IPAddressPool Selectors": _encoded("spec.ipAddressPoolSelectors"),
        "Interfaces": _encoded("spec.interfaces"),
        "*Node Selectors": _encoded("spec.nodeSelectors"),
    },
}
"""Columns by the registry's name of the kind. `*` precedes those that only `-o wide` prints, `#` those with numbers."""
