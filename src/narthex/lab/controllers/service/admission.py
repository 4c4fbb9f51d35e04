"""What the API server fills into a Service as it is written: cluster IPs, families, node ports, the health check's port.

kube-apiserver allocates within create and update, so this is part of admission and no controller: `ServiceAllocator.admit` has the
shape of the Registry's `admit` and goes behind defaults and validation:

    allocation = Allocation()
    def admit(registry, kind, held, new, subresource):
        return allocation.admit(registry, kind, held, defaulted(...), subresource)

Kubernetes: `pkg/registry/core/service/storage/{alloc,storage}.go`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from narthex.lab.api import admission as api
from narthex.lab.api import errors as faults
from narthex.lab.api.errors import ApiFault, Wrong
from narthex.lab.api.kinds import Kind
from narthex.lab.api.registry import Admit, Registry
from narthex.lab.api.store import Raw
from narthex.lab.controllers.interfaces import Object, ObjectKey, RegistryView
from narthex.lab.controllers.objects import integer_or, key_of, spec_of
from narthex.lab.controllers.service.allocator import ServiceAllocations
from narthex.lab.controllers.service.ip_families import default_ip_families, go_strings
from narthex.lab.controllers.service.strategy import (
    has_node_ports,
    needs_health_check,
    normalize_cluster_ips,
    take_over,
    validate_type,
)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class ServiceAllocator:
    """Addresses and ports of all Services of one registry."""

    def __init__(self) -> None:
        self._allocated = ServiceAllocations()

    def admit(
        self, view: RegistryView, kind: _Named, held: Mapping[str, Any] | None, new: Object, subresource: str
    ) -> Object:
        """The object as it is to be stored; anything but a Service is left as it is. Raises ApiFault."""
        if kind.name != "Service" or subresource:
            return new
        return self.admit_service(new, dict(held) if held is not None else None, view)

    def admit_service(self, new: Object, old: Object | None, view: RegistryView) -> Object:
        """`new` with all that it is given, which is what it had where it still may have that. Raises ApiFault: 422 for what
        it asks for and cannot have, 500 when nothing is left."""
        self._allocated.follow(view)
        try:
            spec = dict(spec_of(new))
            before = spec_of(old) if old is not None else None
            normalize_cluster_ips(spec)
            if before is not None:
                take_over(spec, before)
            validate_type(spec, before)
            spec = default_ip_families(spec, before, self._allocated.families())
            key = key_of(new)
            self._addresses(key, spec)
            self._ports(key, spec)
            self._health_check(key, spec)
        except Wrong as wrong:
            raise faults.invalid("Service", "", new["metadata"].get("name") or "", [wrong]) from None
        return {**new, "spec": spec}

    def _addresses(self, key: ObjectKey, spec: Object) -> None:
        if spec.get("type") == "ExternalName" or spec.get("clusterIP") == "None":
            return
        given = list(spec.get("clusterIPs") or ())
        found = []
        for index, family in enumerate(spec["ipFamilies"]):
            asked = given[index] if index < len(given) else ""
            if asked:
                why = self._allocated.why_not_address(asked, key)
                if why:
                    field = "spec.clusterIPs"
                    raise Wrong(
                        field,
                        "FieldValueInvalid",
                        f"Invalid value: {go_strings(given)}: failed to allocate IP {asked}: {why}",
                    )
                found.append(asked)
                continue
            drawn = self._allocated.draw_address(key, family)
            if drawn is None:
                raise _full("failed to allocate a serviceIP: range is full")
            found.append(drawn)
        spec["clusterIP"], spec["clusterIPs"] = found[0], found

    def _ports(self, key: ObjectKey, spec: Object) -> None:
        if not has_node_ports(spec):
            return
        ports = [dict(port) for port in spec.get("ports") or ()]
        wanted: dict[int, set[str]] = {}
        for index, port in enumerate(ports):
            asked, protocol = integer_or(port.get("nodePort")), port.get("protocol") or "TCP"
            if not asked:
                continue
            why = self._allocated.why_not_port(protocol, asked, key)
            if not why and protocol in wanted.get(asked, ()):
                why = "provided port is already allocated"
            if why:
                raise Wrong(f"spec.ports[{index}].nodePort", "FieldValueInvalid", f"Invalid value: {asked}: {why}")
            wanted.setdefault(asked, set()).add(protocol)
        for port in ports:
            if integer_or(port.get("nodePort")):
                continue
            protocol = port.get("protocol") or "TCP"
            # A port of two protocols has one number where it can be had.
            twin = next(
                (
                    other["nodePort"]
                    for other in ports
                    if other.get("port") == port.get("port")
                    and integer_or(other.get("nodePort"))
                    and protocol not in wanted[other["nodePort"]]
                    and not self._allocated.why_not_port(protocol, other["nodePort"], key)
                ),
                None,
            )
            drawn = twin or self._allocated.draw_port(f"{key} {port.get('name') or ''} {port.get('port')}", wanted)
            if drawn is None:
                raise _full("failed to allocate a nodePort: range is full")
            port["nodePort"] = drawn
            wanted.setdefault(drawn, set()).add(protocol)
        spec["ports"] = ports

    def _health_check(self, key: ObjectKey, spec: Object) -> None:
        if not needs_health_check(spec):
            return
        asked = integer_or(spec.get("healthCheckNodePort"))
        taken = {port["nodePort"]: {"TCP"} for port in spec.get("ports") or () if integer_or(port.get("nodePort"))}
        if asked:
            why = self._allocated.why_not_port("TCP", asked, key)
            if why or asked in taken:
                said = why or "provided port is already allocated"
                raise Wrong(
                    "spec.healthCheckNodePort",
                    "FieldValueInvalid",
                    f"Invalid value: {asked}: failed to allocate requested HealthCheck NodePort {asked}: {said}",
                )
            return
        drawn = self._allocated.draw_port(f"{key} health check", taken)
        if drawn is None:
            raise _full("failed to allocate a HealthCheck NodePort port: range is full")
        spec["healthCheckNodePort"] = drawn


def _full(what: str) -> ApiFault:
    return ApiFault(500, "InternalError", f"Internal error occurred: {what}")


def admission() -> Admit:
    """For one registry."""
    allocation = ServiceAllocator()

    def admit(registry: Registry, kind: Kind, held: Mapping[str, Any] | None, new: Raw, subresource: str) -> Raw:
        return allocation.admit(registry, kind, held, api.admit(registry, kind, held, new, subresource), subresource)

    return admit
