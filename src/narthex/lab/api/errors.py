"""Errors of the API as Status objects, in the words of kube-apiserver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


class StatusError(Exception):
    """A request that fails. `code` is the HTTP status; `reason` and `details` are those of `metav1.Status`."""

    def __init__(self, code: int, reason: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        """Create an error with the fields of its Status."""
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = dict(details or {})

    def status(self) -> dict[str, Any]:
        """Return the Status object."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


class FieldError(Exception):
    """A validation error of one field, independent of the object that contains it.

    `kind` is a cause of Kubernetes: FieldValueInvalid, FieldValueRequired, FieldValueNotSupported, FieldValueForbidden,
    FieldValueDuplicate, FieldValueTooLong. `message` is what upstream prints after the field's path.
    """

    def __init__(self, field: str, kind: str, message: str) -> None:
        """Create an error of a field, given by its path."""
        super().__init__(f"{field}: {message}")
        self.field = field
        self.kind = kind
        self.message = message


def not_found(resource: str, group: str, name: str) -> StatusError:
    """Return the error for an object that does not exist. `resource` is the plural in lower case."""
    return StatusError(404, "NotFound", f'{qualified(resource, group)} "{name}" not found', _of(resource, group, name))


def already_exists(resource: str, group: str, name: str) -> StatusError:
    """Return the error for a name that is taken."""
    message = f'{qualified(resource, group)} "{name}" already exists'
    return StatusError(409, "AlreadyExists", message, _of(resource, group, name))


def conflict(resource: str, group: str, name: str, why: str = MODIFIED) -> StatusError:
    """Return the error for a write that is based on an old version."""
    message = f'Operation cannot be fulfilled on {qualified(resource, group)} "{name}": {why}'
    return StatusError(409, "Conflict", message, _of(resource, group, name))


def forbidden(resource: str, group: str, name: str, why: str) -> StatusError:
    """Return the error for a request that is not allowed."""
    message = f'{qualified(resource, group)} "{name}" is forbidden: {why}'
    return StatusError(403, "Forbidden", message, _of(resource, group, name))


def bad_request(message: str) -> StatusError:
    """Return the error for a request that cannot be parsed."""
    return StatusError(400, "BadRequest", message)


def unknown_path() -> StatusError:
    """Return the error for a path at which nothing is served."""
    return StatusError(404, "NotFound", "the server could not find the requested resource")


def method_not_allowed() -> StatusError:
    """Return the error for a method that a resource does not have."""
    return StatusError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def unsupported_media_type(*known: str) -> StatusError:
    """Return the error for a body in a format that is not among the known ones."""
    message = "the body of the request was in an unknown format - accepted media types include: " + ", ".join(known)
    return StatusError(415, "UnsupportedMediaType", message)


def not_implemented(message: str) -> StatusError:
    """Return the error for a feature of Kubernetes that a lab does not have."""
    return StatusError(501, "NotImplemented", message)


def invalid(kind: str, group: str, name: str, field_errors: list[FieldError]) -> StatusError:
    """Return the error for an object with validation errors (422), with one cause per field."""
    texts = [str(error) for error in field_errors]
    joined = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    causes = [{"reason": each.kind, "message": each.message, "field": each.field} for each in field_errors]
    message = f'{qualified(kind, group)} "{name}" is invalid: {joined}'
    return StatusError(422, "Invalid", message, {**_of(kind, group, name), "causes": causes})


def expired(message: str = "The resourceVersion for the provided watch is too old.") -> StatusError:
    """Return the error for a resourceVersion that has been compacted."""
    return StatusError(410, "Expired", message)


def qualified(resource: str, group: str) -> str:
    """Return a resource or kind with its group, as messages name it."""
    return f"{resource}.{group}" if group else resource


def _of(resource: str, group: str, name: str) -> dict[str, Any]:
    found = {"name": name, "group": group, "kind": resource}
    return {key: value for key, value in found.items() if value}
