"""Admission of objects: defaults, validation, and the check of the namespace.

`lab/controllers/service/admission.py` then allocates the addresses and ports of Services.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narthex.lab.api import errors
from narthex.lab.api.defaults import apply_defaults, initialize
from narthex.lab.api.kinds import ApiResource
from narthex.lab.api.registry import Registry
from narthex.lab.api.store import Raw
from narthex.lab.api.validation import field_errors_of


def admit(registry: Registry, kind: ApiResource, held: Mapping[str, Any] | None, new: Raw, subresource: str) -> Raw:
    """Return an object as it will be stored. Raises StatusError."""
    if subresource == "status":
        return new
    new = apply_defaults(kind, new)
    if held is None:
        _home(registry, kind, new)
        new = initialize(kind.name, new, registry.stamp())
        if kind.name == "Ingress":
            new = _with_default_class(registry, new)
    if found := field_errors_of(kind, held, new):
        raise errors.invalid(kind.kind, kind.group, str(new["metadata"].get("name", "")), found)
    return new


def _home(registry: Registry, kind: ApiResource, new: Raw) -> None:
    """Check that the namespace exists and is not terminating. Raises StatusError."""
    if not kind.namespaced:
        return
    name = new["metadata"].get("namespace", "")
    if not name:
        raise errors.bad_request("an empty namespace may not be set during creation")
    home = registry.get("Namespace", "", name)
    if home is None:
        raise errors.not_found("namespaces", "", name)
    if home["metadata"].get("deletionTimestamp"):
        why = f"unable to create new content in namespace {name} because it is being terminated"
        fault = errors.forbidden(kind.plural, kind.group, str(new["metadata"].get("name", "")), why)
        message = f"namespace {name} is being terminated"
        cause = {"reason": "NamespaceTerminating", "message": message, "field": "metadata.namespace"}
        fault.details["causes"] = [cause]
        raise fault


_IS_DEFAULT, _OLD_CLASS = "ingressclass.kubernetes.io/is-default-class", "kubernetes.io/ingress.class"


def _with_default_class(registry: Registry, new: Raw) -> Raw:
    """Return an Ingress with the default class unless it has its own. Of several defaults, the newest counts, then the first name."""
    given = new["metadata"].get("annotations") or {}
    marked = [
        each["metadata"]
        for each in registry.list("IngressClass")
        if (each["metadata"].get("annotations") or {}).get(_IS_DEFAULT) == "true"
    ]
    if not marked or _OLD_CLASS in given or (new.get("spec") or {}).get("ingressClassName") is not None:
        return new
    newest = max(each["creationTimestamp"] for each in marked)
    name = min(each["name"] for each in marked if each["creationTimestamp"] == newest)
    return {**new, "spec": {**new["spec"], "ingressClassName": name}}
