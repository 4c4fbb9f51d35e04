"""Decoders of Node, Namespace, ServiceCIDR, Pod, and Deployment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from narthex.model.decode.meta import family_pair, labels, object_fields, protocol, texts, valid_text
from narthex.model.objects import (
    Container,
    ContainerPort,
    Deployment,
    Labels,
    Namespace,
    Node,
    Pod,
    PodSpec,
    ServiceCIDR,
)
from narthex.model.problem import ProblemCollector, quoted
from narthex.model.validate import (
    DNS_LABEL,
    DNS_SUBDOMAIN,
    LABEL_KEY,
    PORT_NAME,
    any_address,
    any_network,
    host_address,
)
from narthex.model.wire import (
    WireContainer,
    WireContainerPort,
    WireDeployment,
    WireDeploymentSpec,
    WireLabelSelector,
    WireMeta,
    WireNamespace,
    WireNode,
    WireNodeAddress,
    WireNodeSpec,
    WirePod,
    WirePodSpec,
    WirePodStatus,
    WirePodTemplate,
    WireServiceCIDR,
)


def node(raw: WireNode, report: ProblemCollector) -> Node | None:
    """Decode a Node; None if it has an error."""
    fields = object_fields(raw.metadata, report, DNS_SUBDOMAIN, namespaced=False)
    spec = raw.spec if raw.spec is not None else WireNodeSpec()
    addresses = (raw.status.addresses if raw.status is not None else None) or []
    raw_conditions = (raw.status.conditions if raw.status is not None else None) or []
    conditions = {each.type: each.status for each in raw_conditions}
    made = Node(
        **fields,
        pod_cidrs=_pod_cidrs(spec, report),
        internal_ips=_addresses("InternalIP", addresses, report),
        external_ips=_addresses("ExternalIP", addresses, report),
        taints=_taints(spec, report),
        ready=conditions.get("Ready", "True") == "True",
        network_unavailable=conditions.get("NetworkUnavailable") == "True",
    )
    return None if report.failed else made


def _pod_cidrs(spec: WireNodeSpec, report: ProblemCollector) -> tuple[str, ...]:
    """Return `podCIDRs`, or `podCIDR` alone."""
    several = [cidr for cidr in spec.podCIDRs or () if cidr]
    if spec.podCIDR and several and spec.podCIDR != several[0]:
        report.error("spec.podCIDRs", f"the first is {quoted(several[0])}, but spec.podCIDR is {quoted(spec.podCIDR)}")
    if several or not spec.podCIDR:
        found = texts("spec.podCIDRs", several, report, any_network)
        return family_pair("spec.podCIDRs", found, report, "CIDR")
    return tuple(filter(None, [valid_text("spec.podCIDR", spec.podCIDR, report, any_network)]))


def _addresses(type_: str, addresses: list[WireNodeAddress], report: ProblemCollector) -> tuple[str, ...]:
    """Return the Node addresses of one type. Written by a cloud controller: an invalid one is skipped with a warning."""
    found = [
        valid_text(f"status.addresses[{index}].address", entry.address, report, any_address, lenient=True)
        for index, entry in enumerate(addresses)
        if entry.type == type_ and entry.address
    ]
    return tuple(filter(None, found))


def _taints(spec: WireNodeSpec, report: ProblemCollector) -> tuple[str, ...]:
    found = []
    for index, taint in enumerate(spec.taints or ()):
        if not taint.key:
            report.error(f"spec.taints[{index}].key", "is required")
        elif report.check(f"spec.taints[{index}].key", taint.key, LABEL_KEY):
            found.append(taint.key)
    return tuple(found)


def service_cidr(raw: WireServiceCIDR, report: ProblemCollector) -> ServiceCIDR | None:
    """Decode a ServiceCIDR; None if it has an error."""
    fields = object_fields(raw.metadata, report, DNS_SUBDOMAIN, namespaced=False)
    report.served = False  # Nothing is left of it without its ranges.
    given = raw.spec.cidrs if raw.spec is not None else None
    if not given:
        report.error("spec.cidrs", "is required: one CIDR, or one of each IP family")
    cidrs = family_pair("spec.cidrs", texts("spec.cidrs", given, report, any_network), report, "CIDR")
    return None if report.failed else ServiceCIDR(**fields, cidrs=cidrs)


def namespace(raw: WireNamespace, report: ProblemCollector) -> Namespace | None:
    """Decode a Namespace; None if it has an error."""
    fields = object_fields(raw.metadata, report, DNS_LABEL, namespaced=False)
    return None if report.failed else Namespace(**fields)


PHASES = ("Pending", "Running", "Succeeded", "Failed", "Unknown")
MAX_REPLICAS = 2**31 - 1


def pod(raw: WirePod, report: ProblemCollector) -> Pod | None:
    """Decode a Pod; None if it has an error."""
    fields = object_fields(raw.metadata, report, DNS_SUBDOMAIN)
    spec = _pod_spec("spec", raw.spec, report)
    status = raw.status if raw.status is not None else WirePodStatus()
    ready = any(entry.type == "Ready" and entry.status == "True" for entry in status.conditions or ())
    made = Pod(
        **fields,
        spec=spec,
        phase=status.phase if status.phase in PHASES else "",
        ready=ready,
        ips=_pod_ips(status, report),
    )
    return None if report.failed else made


def _pod_ips(status: WirePodStatus, report: ProblemCollector) -> tuple[str, ...]:
    several = [(f"status.podIPs[{i}].ip", entry.ip) for i, entry in enumerate(status.podIPs or ())]
    given = several or [("status.podIP", status.podIP)]
    return tuple(filter(None, [valid_text(field, text, report, host_address) for field, text in given if text]))


def deployment(raw: WireDeployment, report: ProblemCollector) -> Deployment | None:
    """Decode a Deployment; None if it has an error."""
    fields = object_fields(raw.metadata, report, DNS_SUBDOMAIN)
    spec = raw.spec if raw.spec is not None else WireDeploymentSpec()
    replicas = 1 if spec.replicas is None else spec.replicas
    if not report.number("spec.replicas", replicas, 0, MAX_REPLICAS, "a number of pods"):
        replicas = 1
    selector = _selector(spec.selector, report)
    template = spec.template if spec.template is not None else WirePodTemplate()
    meta = template.metadata if template.metadata is not None else WireMeta()
    template_labels = labels("spec.template.metadata.labels", meta.labels, report)
    if not report.failed and not set(selector) <= set(template_labels):
        report.error("spec.template.metadata.labels", "must hold all of spec.selector.matchLabels")
    made = Deployment(
        **fields,
        replicas=replicas,
        selector=selector,
        template_labels=template_labels,
        template=_pod_spec("spec.template.spec", template.spec, report),
    )
    return None if report.failed else made


def _selector(raw: WireLabelSelector | None, report: ProblemCollector) -> Labels:
    if raw is None or not (raw.matchLabels or raw.matchExpressions):
        report.error("spec.selector", "is required: matchLabels with at least one label")
        return ()
    if raw.matchExpressions:
        report.warning("spec.selector.matchExpressions", "is ignored, only matchLabels counts here")
    return labels("spec.selector.matchLabels", raw.matchLabels, report)


def _pod_spec(field: str, raw: WirePodSpec | None, report: ProblemCollector) -> PodSpec:
    raw = raw if raw is not None else WirePodSpec()
    texts_ = {
        name: text if text and report.check(f"{field}.{of_api}", text, syntax) else ""
        for name, of_api, text, syntax in (
            ("node_name", "nodeName", raw.nodeName, DNS_SUBDOMAIN),
            ("hostname", "hostname", raw.hostname, DNS_LABEL),
            ("hostname_override", "hostnameOverride", raw.hostnameOverride, DNS_SUBDOMAIN),
            ("subdomain", "subdomain", raw.subdomain, DNS_LABEL),
        )
    }
    if not raw.containers and not report.served:
        report.error(f"{field}.containers", "is required: at least one container")
    return PodSpec(
        **texts_,
        node_selector=labels(f"{field}.nodeSelector", raw.nodeSelector, report),
        host_network=bool(raw.hostNetwork),
        containers=tuple(report.without_error(_containers(field, raw.containers or (), report))),
    )


def _containers(field: str, raw: Iterable[WireContainer], report: ProblemCollector) -> Iterator[Container]:
    names: dict[str, int] = {}
    for index, entry in enumerate(raw):
        where = f"{field}.containers[{index}]"
        made = _container(where, entry, report)
        if entry.name and (first := names.setdefault(entry.name, index)) != index:
            report.error(f"{where}.name", f"{quoted(entry.name)} is the name of containers[{first}] already")
        yield made


def _container(field: str, raw: WireContainer, report: ProblemCollector) -> Container:
    if not raw.name:
        report.error(f"{field}.name", "is required")
    else:
        report.check(f"{field}.name", raw.name, DNS_LABEL)
    ports = tuple(_container_port(f"{field}.ports[{i}]", port, report) for i, port in enumerate(raw.ports or ()))
    names: dict[str, int] = {}
    for index, port in enumerate(ports):
        if port.name and (first := names.setdefault(port.name, index)) != index:
            report.error(f"{field}.ports[{index}].name", f"{quoted(port.name)} is the name of ports[{first}] already")
    return Container(
        name=raw.name or "",
        image=raw.image or "",
        command=tuple(raw.command or ()),
        args=tuple(raw.args or ()),
        ports=ports,
    )


def _container_port(field: str, raw: WireContainerPort, report: ProblemCollector) -> ContainerPort:
    if raw.containerPort is None:
        report.error(f"{field}.containerPort", "is required")
    else:
        report.number(f"{field}.containerPort", raw.containerPort, 1, 65535)
    if raw.name:
        report.check(f"{field}.name", raw.name, PORT_NAME)
    host_port = raw.hostPort or 0
    report.number(f"{field}.hostPort", host_port, 0, 65535)
    return ContainerPort(
        port=raw.containerPort or 0,
        name=raw.name or "",
        protocol=protocol(f"{field}.protocol", raw.protocol, report),
        host_port=host_port,
    )
