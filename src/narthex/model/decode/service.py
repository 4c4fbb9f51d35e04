"""Decoder of v1 Service."""

from __future__ import annotations

from collections.abc import Iterator

from narthex.model.decode.meta import family_pair, labels, object_fields, protocol, texts, valid_text
from narthex.model.net import IPFamily, family_of
from narthex.model.objects import LoadBalancerIngress, Service, ServicePort
from narthex.model.problem import ProblemCollector, quoted
from narthex.model.validate import DNS_LABEL, EXTERNAL_NAME, LABEL_KEY, PORT_NAME, any_network, host_address
from narthex.model.wire import WireService, WireServicePort, WireServiceSpec, WireServiceStatus

TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
POLICIES = ("Cluster", "Local")
FAMILY_POLICIES = ("SingleStack", "PreferDualStack", "RequireDualStack")
DISTRIBUTIONS = ("PreferClose", "PreferSameZone", "PreferSameNode")
UNKNOWN_CLASS = "invalid"
"""Stands for a `loadBalancerClass` that is not one."""
DEFAULT_AFFINITY_SECONDS = 10800
MAX_AFFINITY_SECONDS = 86400

_FAMILIES = {"IPv4": IPFamily.IPV4, "IPv6": IPFamily.IPV6}


def service(raw: WireService, report: ProblemCollector) -> Service | None:
    """Decode a Service; None if it has an error."""
    # Newer API servers allow a leading digit: a DNS label (RFC 1123) instead of RFC 1035.
    fields = object_fields(raw.metadata, report, DNS_LABEL)
    spec = raw.spec if raw.spec is not None else WireServiceSpec()
    if raw.spec is None:
        report.reject("spec", "is required")
    type_ = _word("spec.type", spec.type, TYPES, report) or "ClusterIP"
    cluster_ips = _cluster_ips(spec, report)
    made = Service(
        **fields,
        type=type_,
        cluster_ips=cluster_ips,
        ip_families=_ip_families(spec, cluster_ips, report),
        ip_family_policy=_word("spec.ipFamilyPolicy", spec.ipFamilyPolicy, FAMILY_POLICIES, report),
        external_ips=texts("spec.externalIPs", spec.externalIPs, report, host_address),
        ingress=_ingress(raw.status, report),
        ingress_names=_ingress_names(raw.status),
        source_ranges=_source_ranges(spec, report),
        ports=_ports(spec, type_, cluster_ips, report),
        selector=labels("spec.selector", spec.selector, report),
        external_policy_local=_local("spec.externalTrafficPolicy", spec.externalTrafficPolicy, report),
        internal_policy_local=_local("spec.internalTrafficPolicy", spec.internalTrafficPolicy, report),
        affinity_seconds=_affinity(spec, report),
        health_check_node_port=_health_check_port(spec, report),
        publish_not_ready=bool(spec.publishNotReadyAddresses),
        external_name=_external_name(spec, type_, report),
        load_balancer_class=_load_balancer_class(spec, report),
        load_balancer_ip=_load_balancer_ip(spec, report),
        allocate_node_ports=spec.allocateLoadBalancerNodePorts is not False,
        traffic_distribution=_distribution(spec, report),
    )
    return None if report.failed else made


def _cluster_ips(spec: WireServiceSpec, report: ProblemCollector) -> tuple[str, ...]:
    first, several = spec.clusterIP or "", [ip for ip in spec.clusterIPs or () if ip]
    if first and several and first != several[0]:
        report.error("spec.clusterIPs", f"the first is {quoted(several[0])}, but spec.clusterIP is {quoted(first)}")
    given, field = (several, "spec.clusterIPs") if several else ([first] if first else [], "spec.clusterIP")
    if "None" in given:
        if len(given) > 1:
            report.error("spec.clusterIPs", "'None' (headless) must be the only value")
        return ("None",)
    if field == "spec.clusterIP":
        try:
            found = tuple(host_address(ip) for ip in given)
        except ValueError as error:
            report.error(field, f"{quoted(first)} {error}; allowed: an address, None or nothing")
            return ()
    else:
        found = texts(field, given, report, host_address)
    return family_pair(field, found, report, "address") if len(found) > 1 else found


def _ip_families(spec: WireServiceSpec, cluster_ips: tuple[str, ...], report: ProblemCollector) -> tuple[IPFamily, ...]:
    """Return `ipFamilies`. Without them the consumer uses the family of the first cluster IP (row 1.4)."""
    named = spec.ipFamilies or []
    families = tuple([_FAMILIES[word] for word in named if word in _FAMILIES])
    if len(families) < len(named):
        for index, word in enumerate(named):
            report.choice(f"spec.ipFamilies[{index}]", word, _FAMILIES)
    if len(families) > 1 and len(set(families)) != len(families):
        report.error("spec.ipFamilies", "a family is named twice")
        families = tuple(dict.fromkeys(families))
    if spec.ipFamilyPolicy == "SingleStack" and max(len(families), len(cluster_ips)) > 1:
        report.error("spec.ipFamilyPolicy", "is SingleStack, but the Service has two families")
    if cluster_ips[:1] == ("None",):
        return families
    for index, (family, ip) in enumerate(zip(families, cluster_ips, strict=False)):
        if family_of(ip) is not family:
            field = f"spec.clusterIPs[{index}]" if spec.clusterIPs else "spec.clusterIP"
            report.error(
                field, f"{quoted(ip)} is {family_of(ip).label}, but spec.ipFamilies[{index}] is {family.label}"
            )
            return tuple(map(family_of, cluster_ips))
    return families


def _ports(
    spec: WireServiceSpec, type_: str, cluster_ips: tuple[str, ...], report: ProblemCollector
) -> tuple[ServicePort, ...]:
    raw = spec.ports or []
    if not raw and type_ != "ExternalName" and cluster_ips != ("None",):
        report.error("spec.ports", "is required: at least one port")
    if len(raw) == 1:
        return tuple(report.without_error(_port("spec.ports[0]", each, type_, report) for each in raw))
    return tuple(report.without_error(_several_ports(raw, type_, report)))


def _several_ports(raw: list[WireServicePort], type_: str, report: ProblemCollector) -> Iterator[ServicePort]:
    names: dict[str, int] = {}
    numbers: dict[tuple[str, int], int] = {}
    node_ports: dict[tuple[str, int], int] = {}
    for index, given in enumerate(raw):
        port = _port(f"spec.ports[{index}]", given, type_, report)
        field, word = f"spec.ports[{index}]", port.protocol.value
        if not port.name:
            report.error(f"{field}.name", "is required when there are several ports")
        elif (first := names.setdefault(port.name, index)) != index:
            report.error(f"{field}.name", f"{quoted(port.name)} is the name of spec.ports[{first}] already")
        if (first := numbers.setdefault((word, port.port), index)) != index:
            report.error(field, f"{port.port}/{word} is spec.ports[{first}] already")
        if port.node_port and (first := node_ports.setdefault((word, port.node_port), index)) != index:
            report.error(f"{field}.nodePort", f"{port.node_port}/{word} is used by spec.ports[{first}] already")
        yield port


def _port(field: str, raw: WireServicePort, type_: str, report: ProblemCollector) -> ServicePort:
    if raw.name:
        report.check(f"{field}.name", raw.name, DNS_LABEL)
    if raw.port is None:
        report.error(f"{field}.port", "is required")
    else:
        report.number(f"{field}.port", raw.port, 1, 65535)
    node_port = raw.nodePort or 0
    if node_port and not report.number(f"{field}.nodePort", node_port, 1, 65535, optional=True):
        node_port = 0
    elif node_port and type_ in ("ClusterIP", "ExternalName"):
        # The API server clears it when the type changes, so `kubectl apply` accepts such a manifest.
        report.warning(f"{field}.nodePort", f"is ignored: a {type_} Service has no node ports")
        node_port = 0
    return ServicePort(
        name=raw.name or "",
        protocol=protocol(f"{field}.protocol", raw.protocol, report),
        port=raw.port or 0,
        target_port=_target_port(f"{field}.targetPort", raw.targetPort, report),
        node_port=node_port,
    )


def _target_port(field: str, value: int | str | None, report: ProblemCollector) -> int | str | None:
    if not value:
        return None
    if isinstance(value, str):
        return value if report.check(field, value, PORT_NAME, optional=True) else None
    return value if report.number(field, value, 1, 65535, optional=True) else None


def _ingress(status: WireServiceStatus | None, report: ProblemCollector) -> tuple[LoadBalancerIngress, ...]:
    """Return the load balancer addresses. Written by a controller: an invalid one must not reject the whole Service."""
    load_balancer = status.loadBalancer if status is not None else None
    if load_balancer is None or not load_balancer.ingress:
        return ()
    found = []
    for index, entry in enumerate(load_balancer.ingress):
        field = f"status.loadBalancer.ingress[{index}]"
        if entry.ipMode and not report.choice(f"{field}.ipMode", entry.ipMode, ("VIP", "Proxy")):
            continue
        if entry.ip and (address := valid_text(f"{field}.ip", entry.ip, report, host_address, lenient=True)):
            found.append(LoadBalancerIngress(ip=address, proxy=entry.ipMode == "Proxy"))
    return tuple(found)


def _ingress_names(status: WireServiceStatus | None) -> tuple[str, ...]:
    load_balancer = status.loadBalancer if status is not None else None
    if load_balancer is None or not load_balancer.ingress:
        return ()
    return tuple(entry.hostname for entry in load_balancer.ingress if entry.hostname)


def _source_ranges(spec: WireServiceSpec, report: ProblemCollector) -> tuple[str, ...]:
    if not spec.loadBalancerSourceRanges:
        return ()
    return texts(
        "spec.loadBalancerSourceRanges",
        spec.loadBalancerSourceRanges,
        report,
        lambda text: any_network(text.strip()),
        lenient=True,
    )


def _affinity(spec: WireServiceSpec, report: ProblemCollector) -> int | None:
    word = _word("spec.sessionAffinity", spec.sessionAffinity, ("None", "ClientIP"), report)
    config = spec.sessionAffinityConfig
    client = config.clientIP if config is not None else None
    if word != "ClientIP":
        # The API server clears it when the affinity changes; what an older one has stored means nothing.
        if client is not None and not report.served:
            report.error("spec.sessionAffinityConfig", "is allowed with sessionAffinity ClientIP only")
        return None
    seconds = client.timeoutSeconds if client is not None else None
    if seconds is None:
        return DEFAULT_AFFINITY_SECONDS
    field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
    valid = report.number(field, seconds, 1, MAX_AFFINITY_SECONDS, "a number of seconds")
    return seconds if valid else DEFAULT_AFFINITY_SECONDS


def _health_check_port(spec: WireServiceSpec, report: ProblemCollector) -> int:
    port = spec.healthCheckNodePort or 0
    return port if not port or report.number("spec.healthCheckNodePort", port, 0, 65535) else 0


def _external_name(spec: WireServiceSpec, type_: str, report: ProblemCollector) -> str:
    name = spec.externalName or ""
    if type_ != "ExternalName":
        return ""
    if not name:
        report.error("spec.externalName", "is required for type ExternalName")
    elif not report.check("spec.externalName", name, EXTERNAL_NAME):
        return ""
    return name.rstrip(".")


def _load_balancer_class(spec: WireServiceSpec, report: ProblemCollector) -> str:
    given = spec.loadBalancerClass or ""
    # A class that cannot be used selects no controller; an absent one would select the default.
    return given if not given or report.check("spec.loadBalancerClass", given, LABEL_KEY) else UNKNOWN_CLASS


def _load_balancer_ip(spec: WireServiceSpec, report: ProblemCollector) -> str:
    """Return the address requested from the load balancer controller; the proxy ignores it (row 1.10)."""
    given = spec.loadBalancerIP
    return valid_text("spec.loadBalancerIP", given, report, host_address, lenient=True) if given else ""


def _local(field: str, word: str | None, report: ProblemCollector) -> bool:
    return _word(field, word, POLICIES, report) == "Local"


def _word(field: str, word: str | None, allowed: tuple[str, ...], report: ProblemCollector) -> str:
    return word if word and report.choice(field, word, allowed) else ""


def _distribution(spec: WireServiceSpec, report: ProblemCollector) -> str:
    word = spec.trafficDistribution or ""
    if word and word not in DISTRIBUTIONS:
        # The proxy does not use it (row 4.1), so unknown values of a newer API are harmless.
        report.warning("spec.trafficDistribution", f"{quoted(word)} is not known, ignored")
        return ""
    return word
