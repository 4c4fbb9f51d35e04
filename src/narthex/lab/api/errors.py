"""Refusals of the API, as `Status` objects say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


class StatusError(Exception):
    """A request that is not done. `code` is HTTP's, `reason` and `details` are those of `metav1.Status`."""

    def __init__(self, code: int, reason: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = dict(details or {})

    def status(self) -> dict[str, Any]:
        """The Status object."""
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
    """What is wrong with one field, before it is known which object it belongs to.

    `kind` is one of Kubernetes' causes: FieldValueInvalid, FieldValueRequired, FieldValueNotSupported,
    FieldValueForbidden, FieldValueDuplicate, FieldValueTooLong; `message` is as upstream prints it behind the field's path.
    """

    def __init__(self, field: str, kind: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.kind = kind
        self.message = message


def not_found(resource: str, group: str, name: str) -> StatusError:
    """There is no such object. `resource` is the plural, in lower case."""
    return StatusError(404, "NotFound", f'{qualified(resource, group)} "{name}" not found', _of(resource, group, name))


def already_exists(resource: str, group: str, name: str) -> StatusError:
    """The name is taken."""
    message = f'{qualified(resource, group)} "{name}" already exists'
    return StatusError(409, "AlreadyExists", message, _of(resource, group, name))


def conflict(resource: str, group: str, name: str, why: str = MODIFIED) -> StatusError:
    """It is not any more what the writer believes it to be."""
    message = f'Operation cannot be fulfilled on {qualified(resource, group)} "{name}": {why}'
    return StatusError(409, "Conflict", message, _of(resource, group, name))


def forbidden(resource: str, group: str, name: str, why: str) -> StatusError:
    """It must not be done."""
    message = f'{qualified(resource, group)} "{name}" is forbidden: {why}'
    return StatusError(403, "Forbidden", message, _of(resource, group, name))


def bad_request(message: str) -> StatusError:
    """The request cannot be understood."""
    return StatusError(400, "BadRequest", message)


def invalid(kind: str, group: str, name: str, wrongs: list[FieldError]) -> StatusError:
    """Fields that must not be so: 422, one cause for each."""
    texts = [str(wrong) for wrong in wrongs]
    said = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    causes = [{"reason": each.kind, "message": each.message, "field": each.field} for each in wrongs]
    message = f'{qualified(kind, group)} "{name}" is invalid: {said}'
    return StatusError(422, "Invalid", message, {**_of(kind, group, name), "causes": causes})


def expired(message: str = "The resourceVersion for the provided watch is too old.") -> StatusError:
    """The past that is asked for has been forgotten."""
    return StatusError(410, "Expired", message)


def qualified(resource: str, group: str) -> str:
    """A resource or kind with its group, as messages name it."""
    return f"{resource}.{group}" if group else resource


def _of(resource: str, group: str, name: str) -> dict[str, Any]:
    found = {"name": name, "group": group, "kind": resource}
    return {key: value for key, value in found.items() if value}
