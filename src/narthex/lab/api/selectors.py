"""What lists and watches are limited to: the parameters `labelSelector` and `fieldSelector`, with the API server's errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from narthex.lab.api.errors import StatusError, bad_request
from narthex.model.selector import (
    FieldRequirement,
    NotAnIntegerError,
    SelectorSyntaxError,
    matches,
    parse_fields,
    parse_leniently,
)

_COMMON = frozenset({"metadata.name", "metadata.namespace"})
_POD = ("nodeName", "restartPolicy", "schedulerName", "serviceAccountName", "hostNetwork")
_OBJECT = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
FIELDS: Mapping[str, frozenset[str]] = {
    "Pod": frozenset({f"spec.{name}" for name in _POD} | {"status.phase", "status.podIP", "status.nominatedNodeName"}),
    "Node": frozenset({"spec.unschedulable"}),
    "Namespace": frozenset({"status.phase"}),
    "Service": frozenset({"spec.clusterIP", "spec.type"}),
    "Secret": frozenset({"type"}),
    "ReplicaSet": frozenset({"status.replicas"}),
    "Event": frozenset(
        {f"involvedObject.{name}" for name in _OBJECT} | {"reason", "reportingComponent", "source", "type"}
    ),
}
"""Fields that a field selector may name, by kind, in addition to name and namespace."""


class ListSelector:
    """The label and field selectors of one request."""

    def __init__(self, labels: str, fields: str, known: frozenset[str]) -> None:
        """Parse both. Raises StatusError (BadRequest) for bad syntax, and for fields that are not `known`."""
        try:
            self._labels = tuple(parse_leniently(labels))
        except SelectorSyntaxError as error:
            message = f"unable to parse requirement: {error.rest!r} is not understood as a label selector"
            raise bad_request(message) from None
        except NotAnIntegerError as error:
            message = f"for 'Gt', 'Lt' operators, the value must be an integer: {error.value!r}"
            raise bad_request(f"unable to parse requirement: {message}") from None
        self._fields = tuple(_field_requirements(fields, _COMMON | known))

    def selects(self, raw: Mapping[str, Any]) -> bool:
        """Return True if an object belongs to the list."""
        if self._labels:
            labels = raw.get("metadata", {}).get("labels")
            if not matches(labels if isinstance(labels, Mapping) else {}, self._labels):
                return False
        return all(requirement.matches(raw) for requirement in self._fields)

    def __bool__(self) -> bool:
        """Return True if it limits anything."""
        return bool(self._labels or self._fields)


def _field_requirements(text: str, known: frozenset[str]) -> Iterator[FieldRequirement]:
    try:
        for requirement in parse_fields(text):
            if requirement.path not in known:
                raise StatusError(400, "BadRequest", f"field label not supported: {requirement.path}")
            yield requirement
    except SelectorSyntaxError as error:
        raise bad_request(f"invalid selector: '{text}'; can't understand '{error.rest}'") from None
