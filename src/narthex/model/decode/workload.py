"""v1 Pod and apps/v1 Deployment, for the lab."""

from __future__ import annotations

from narthex.model import validate
from narthex.model.decode.meta import labels, object_fields, protocol
from narthex.model.objects import Container, ContainerPort, Deployment, Labels, Pod, PodSpec
from narthex.model.problem import Report, quoted
from narthex.model.validate import DNS_LABEL, DNS_SUBDOMAIN, PORT_NAME
from narthex.model.wire import (
    WireContainer,
    WireContainerPort,
    WireDeployment,
    WireDeploymentSpec,
    WireLabelSelector,
    WireMeta,
    WirePod,
    WirePodSpec,
    WirePodStatus,
    WirePodTemplate,
)

PHASES = ("Pending", "Running", "Succeeded", "Failed", "Unknown")
MOST_REPLICAS = 2**31 - 1


def pod(raw: WirePod, report: Report) -> Pod | None:
    """A Pod, None when it has an error."""
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


def _pod_ips(status: WirePodStatus, report: Report) -> tuple[str, ...]:
    several = [(f"status.podIPs[{i}].ip", entry.ip) for i, entry in enumerate(status.podIPs or ())]
    found = []
    for field, text in several or [("status.podIP", status.podIP)]:
        if not text:
            continue
        try:
            found.append(validate.host_address(text))
        except ValueError as error:
            report.error(field, f"{quoted(text)} {error}")
    return tuple(found)


def deployment(raw: WireDeployment, report: Report) -> Deployment | None:
    """A Deployment, None when it has an error."""
    fields = object_fields(raw.metadata, report, DNS_SUBDOMAIN)
    spec = raw.spec if raw.spec is not None else WireDeploymentSpec()
    replicas = 1 if spec.replicas is None else spec.replicas
    report.number("spec.replicas", replicas, 0, MOST_REPLICAS, "a number of pods")
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


def _selector(raw: WireLabelSelector | None, report: Report) -> Labels:
    if raw is None or not (raw.matchLabels or raw.matchExpressions):
        report.error("spec.selector", "is required: matchLabels with at least one label")
        return ()
    if raw.matchExpressions:
        report.warning("spec.selector.matchExpressions", "is ignored, only matchLabels counts here")
    return labels("spec.selector.matchLabels", raw.matchLabels, report)


def _pod_spec(field: str, raw: WirePodSpec | None, report: Report) -> PodSpec:
    raw = raw if raw is not None else WirePodSpec()
    for name, text, syntax in (
        ("nodeName", raw.nodeName, DNS_SUBDOMAIN),
        ("hostname", raw.hostname, DNS_LABEL),
        ("subdomain", raw.subdomain, DNS_LABEL),
    ):
        if text:
            report.check(f"{field}.{name}", text, syntax)
    if not raw.containers:
        report.error(f"{field}.containers", "is required: at least one container")
    names: dict[str, int] = {}
    containers = []
    for index, entry in enumerate(raw.containers or ()):
        where = f"{field}.containers[{index}]"
        containers.append(_container(where, entry, report))
        if entry.name and (first := names.setdefault(entry.name, index)) != index:
            report.error(f"{where}.name", f"{quoted(entry.name)} is the name of containers[{first}] already")
    return PodSpec(
        node_name=raw.nodeName or "",
        node_selector=labels(f"{field}.nodeSelector", raw.nodeSelector, report),
        host_network=bool(raw.hostNetwork),
        hostname=raw.hostname or "",
        subdomain=raw.subdomain or "",
        containers=tuple(containers),
    )


def _container(field: str, raw: WireContainer, report: Report) -> Container:
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


def _container_port(field: str, raw: WireContainerPort, report: Report) -> ContainerPort:
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
