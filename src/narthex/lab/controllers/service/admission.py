"""Allocation of cluster IPs, IP families, node ports, and health check ports during admission of Services.

As in kube-apiserver, allocation is part of create and update, after defaulting and validation. Kubernetes:
`pkg/registry/core/service/storage/{alloc,storage}.go`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narthex.lab.api import admission as api
from narthex.lab.api import errors
from narthex.lab.api.errors import FieldError, StatusError
from narthex.lab.api.field_errors import bad
from narthex.lab.api.kinds import ApiResource
from narthex.lab.api.registry import Admit, Registry
from narthex.lab.api.store import Raw
from narthex.lab.controllers.objects import Object, ObjectKey, integer_or, key_of, spec_of
from narthex.lab.controllers.service.allocator import PORT_TAKEN, ServiceAllocations
from narthex.lab.controllers.service.strategy import (
    bad_addresses,
    default_ip_families,
    has_node_ports,
    inherit_allocated,
    needs_health_check,
    normalize_cluster_ips,
    validate_type,
)


class ServiceAllocator:
    """Allocates addresses and ports for the Services of one registry."""

    def __init__(self) -> None:
        self._allocated = ServiceAllocations()

    def admit(
        self, registry: Registry, kind: ApiResource, held: Mapping[str, Any] | None, new: Object, subresource: str
    ) -> Object:
        """Return the object to store. Objects other than Services are unchanged.

        A Service gets allocated values, and keeps those of `held` that its type still allows. Raises StatusError 422 for a value
        that is invalid or taken, and 500 when a range is full.
        """
        if kind.name != "Service" or subresource:
            return new
        self._allocated.sync(registry)
        try:
            spec = dict(spec_of(new))
            before = spec_of(dict(held)) if held is not None else None
            normalize_cluster_ips(spec)
            if before is not None:
                inherit_allocated(spec, before)
            validate_type(spec, before)
            spec = default_ip_families(spec, before, self._allocated.families())
            key = key_of(new)
            self._addresses(key, spec)
            self._ports(key, spec)
            self._health_check(key, spec)
        except FieldError as wrong:
            raise errors.invalid("Service", "", new["metadata"].get("name") or "", [wrong]) from None
        return {**new, "spec": spec}

    def _addresses(self, key: ObjectKey, spec: Object) -> None:
        if spec.get("type") == "ExternalName" or spec.get("clusterIP") == "None":
            return
        requested_addresses = list(spec.get("clusterIPs") or ())
        addresses = []
        for index, family in enumerate(spec["ipFamilies"]):
            requested = requested_addresses[index] if index < len(requested_addresses) else ""
            if requested:
                error = self._allocated.address_error(requested, key)
                if error:
                    why = f"failed to allocate IP {requested}: {error}"
                    raise bad_addresses("spec.clusterIPs", requested_addresses, why)
                addresses.append(requested)
                continue
            allocated = self._allocated.allocate_address(key, family)
            if allocated is None:
                raise _range_full("failed to allocate a serviceIP: range is full")
            addresses.append(allocated)
        spec["clusterIP"], spec["clusterIPs"] = addresses[0], addresses

    def _ports(self, key: ObjectKey, spec: Object) -> None:
        if not has_node_ports(spec):
            return
        ports = [dict(port) for port in spec.get("ports") or ()]
        desired: dict[int, set[str]] = {}
        for index, port in enumerate(ports):
            requested, protocol = integer_or(port.get("nodePort")), port.get("protocol") or "TCP"
            if not requested:
                continue
            error = self._allocated.port_error(protocol, requested, key)
            if not error and protocol in desired.get(requested, ()):
                error = PORT_TAKEN
            if error:
                raise bad(f"spec.ports[{index}].nodePort", requested, error)
            desired.setdefault(requested, set()).add(protocol)
        for port in ports:
            if integer_or(port.get("nodePort")):
                continue
            protocol = port.get("protocol") or "TCP"
            # Use one node port for both protocols of a port if possible.
            numbers = [integer_or(other.get("nodePort")) for other in ports if other.get("port") == port.get("port")]
            free = (
                number
                for number in numbers
                if number and protocol not in desired[number] and not self._allocated.port_error(protocol, number, key)
            )
            seed = f"{key} {port.get('name') or ''} {port.get('port')}"
            allocated = next(free, None) or self._allocated.allocate_port(seed, desired)
            if allocated is None:
                raise _range_full("failed to allocate a nodePort: range is full")
            port["nodePort"] = allocated
            desired.setdefault(allocated, set()).add(protocol)
        spec["ports"] = ports

    def _health_check(self, key: ObjectKey, spec: Object) -> None:
        if not needs_health_check(spec):
            return
        requested = integer_or(spec.get("healthCheckNodePort"))
        taken = {port["nodePort"]: {"TCP"} for port in spec.get("ports") or () if integer_or(port.get("nodePort"))}
        if requested:
            error = self._allocated.port_error("TCP", requested, key)
            if error or requested in taken:
                why = f"failed to allocate requested HealthCheck NodePort {requested}: {error or PORT_TAKEN}"
                raise bad("spec.healthCheckNodePort", requested, why)
            return
        allocated = self._allocated.allocate_port(f"{key} health check", taken)
        if allocated is None:
            raise _range_full("failed to allocate a HealthCheck NodePort port: range is full")
        spec["healthCheckNodePort"] = allocated


def _range_full(what: str) -> StatusError:
    return StatusError(500, "InternalError", f"Internal error occurred: {what}")


def admission() -> Admit:
    """Return the admission function of a lab's registry: defaults, validation, then Service allocation."""
    allocation = ServiceAllocator()

    def admit(registry: Registry, kind: ApiResource, held: Mapping[str, Any] | None, new: Raw, subresource: str) -> Raw:
        """Admit an object by the rules of the API, then allocate its addresses and ports."""
        return allocation.admit(registry, kind, held, api.admit(registry, kind, held, new, subresource), subresource)

    return admit
