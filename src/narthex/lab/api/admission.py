"""What is done to every object before it is held: completed, checked, and put only where there is a namespace for it.

What Services are given of addresses and ports is another's: `lab/controllers/service/admission.py` goes behind this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narthex.lab.api import errors as faults
from narthex.lab.api.checks import object_wrongs
from narthex.lab.api.defaults import begun, defaulted
from narthex.lab.api.errors import ApiFault
from narthex.lab.api.kinds import Kind
from narthex.lab.api.registry import Registry
from narthex.lab.api.store import Raw


def admit(registry: Registry, kind: Kind, held: Mapping[str, Any] | None, new: Raw, subresource: str) -> Raw:
    """The object as it will be held. Raises ApiFault."""
    if subresource == "status":
        return new
    new = defaulted(kind.name, new)
    if held is None:
        _home(registry, kind, new)
        new = begun(kind.name, new, registry.stamp())
    if found := object_wrongs(kind, held, new):
        raise faults.invalid(kind.kind, kind.group, str(new["metadata"].get("name", "")), found)
    return new


def _home(registry: Registry, kind: Kind, new: Raw) -> None:
    """Objects are made in namespaces that are there, and stay."""
    if not kind.namespaced:
        return
    name = new["metadata"].get("namespace", "")
    if not name:
        raise faults.bad_request("an empty namespace may not be set during creation")
    home = registry.get("Namespace", "", name)
    if home is None:
        raise faults.not_found("namespaces", "", name)
    if home["metadata"].get("deletionTimestamp"):
        why = f"unable to create new content in namespace {name} because it is being terminated"
        fault = faults.forbidden(kind.plural, kind.group, str(new["metadata"].get("name", "")), why)
        cause = {
            "reason": "NamespaceTerminating",
            "message": f"namespace {name} is being terminated",
            "field": "metadata.namespace",
        }
        raise ApiFault(fault.code, fault.reason, fault.message, {**fault.details, "causes": [cause]})
