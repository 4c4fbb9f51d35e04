"""Validation errors of fields in the words of the API server (apimachinery's util/validation)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from narthex.lab.api.errors import FieldError

Raw = Mapping[str, Any]
_LABEL, _QUALIFIED = "[a-z0-9]([-a-z0-9]*[a-z0-9])?", "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_OLD_LABEL = "[a-z]([-a-z0-9]*[a-z0-9])?"
_PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_USED = "regex used for validation is"
_SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end "
    f"with an alphanumeric character (e.g. 'example.com', {_USED} '{_SUBDOMAIN}')"
)
_LABEL_TEXT = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an "
    f"alphanumeric character (e.g. 'my-name',  or '123-abc', {_USED} '{_LABEL}')"
)
_OLD_LABEL_TEXT = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and "
    f"end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', {_USED} '{_OLD_LABEL}')"
)
_KEY_TEXT = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    f"character (e.g. 'MyName',  or 'my.name',  or '123-abc', {_USED} '{_QUALIFIED}')"
)
_VALUE_TEXT = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end "
    f"with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', {_USED} '({_QUALIFIED})?')"
)
_ANNOTATIONS = 256 * 1024


def bad(field: str, value: Any, text: str) -> FieldError:
    """Return an error for an invalid value."""
    return FieldError(field, "FieldValueInvalid", f"Invalid value: {shown(value)}: {text}")


def required(field: str, text: str = "") -> FieldError:
    """Return an error for a missing value."""
    return FieldError(field, "FieldValueRequired", f"Required value: {text}" if text else "Required value")


def unsupported(field: str, value: Any, known: Sequence[str]) -> FieldError:
    """Return an error for a value outside an enumeration."""
    words = ", ".join(f'"{each}"' for each in sorted(known))
    return FieldError(field, "FieldValueNotSupported", f"Unsupported value: {shown(value)}: supported values: {words}")


def duplicate(field: str, value: Any) -> FieldError:
    """Return an error for a value that occurs twice."""
    return FieldError(field, "FieldValueDuplicate", f"Duplicate value: {shown(value)}")


def forbidden(field: str, text: str) -> FieldError:
    """Return an error for a value that must be absent or unchanged."""
    return FieldError(field, "FieldValueForbidden", f"Forbidden: {text}")


def shown(value: Any) -> str:
    """Return a value as messages print it."""
    return msgspec.json.encode(value).decode()


def subdomain(field: str, value: str) -> Iterator[FieldError]:
    """Check a DNS subdomain (RFC 1123)."""
    if len(value) > 253:
        yield bad(field, value, "must be no more than 253 characters")
    if not re.fullmatch(_SUBDOMAIN, value):
        yield bad(field, value, _SUBDOMAIN_TEXT)


def dns_label(field: str, value: str) -> Iterator[FieldError]:
    """Check a DNS label (RFC 1123)."""
    if len(value) > 63:
        yield bad(field, value, "must be no more than 63 characters")
    if not re.fullmatch(_LABEL, value):
        yield bad(field, value, _LABEL_TEXT)


def old_label(field: str, value: str) -> Iterator[FieldError]:
    """Check a DNS label (RFC 1035)."""
    if len(value) > 63:
        yield bad(field, value, "must be no more than 63 characters")
    if not re.fullmatch(_OLD_LABEL, value):
        yield bad(field, value, _OLD_LABEL_TEXT)


def qualified_name(field: str, key: str) -> Iterator[FieldError]:
    """Check the key of a label or annotation."""
    prefix, slash, name = key.rpartition("/")
    if slash and not prefix:
        yield bad(field, key, "prefix part must be non-empty")
    elif slash and not re.fullmatch(_SUBDOMAIN, prefix):
        yield bad(field, key, f"prefix part {_SUBDOMAIN_TEXT}")
    if not name:
        yield bad(field, key, "name part must be non-empty")
    elif len(name) > 63:
        yield bad(field, key, "name part must be no more than 63 characters")
    if not re.fullmatch(_QUALIFIED, name):
        yield bad(field, key, _KEY_TEXT)


def labels(field: str, found: Any) -> Iterator[FieldError]:
    """Check labels, or a map of them that selects."""
    for key, value in (found or {}).items():
        yield from qualified_name(field, key)
        if len(str(value)) > 63:
            yield bad(field, value, "must be no more than 63 characters")
        if not re.fullmatch(f"({_QUALIFIED})?", str(value)):
            yield bad(field, value, _VALUE_TEXT)


def notes(field: str, found: Any) -> Iterator[FieldError]:
    """Check annotations."""
    total = 0
    for key, value in (found or {}).items():
        yield from qualified_name(field, key.lower())
        total += len(key) + len(str(value))
    if total > _ANNOTATIONS:
        yield FieldError(field, "FieldValueTooLong", f"Too long: may not be more than {_ANNOTATIONS} bytes")


def port_number(field: str, value: Any) -> Iterator[FieldError]:
    """Check a port number: 1 to 65535."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 65535:
        yield bad(field, value if value is not None else 0, "must be between 1 and 65535, inclusive")


def port_name(field: str, value: str) -> Iterator[FieldError]:
    """Check the name of a container port, an IANA service name (RFC 6335)."""
    if len(value) > 15:
        yield bad(field, value, "must be no more than 15 characters")
    elif not _PORT_NAME.fullmatch(value):
        yield bad(
            field,
            value,
            "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-), and at least one letter",
        )


def address(field: str, value: Any) -> Iterator[FieldError]:
    """Check an IP address."""
    try:
        ipaddress.ip_address(value if isinstance(value, str) else "")
    except ValueError:
        yield bad(field, value, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")


def network(field: str, value: Any) -> Iterator[FieldError]:
    """Check a CIDR."""
    try:
        ipaddress.ip_network(value if isinstance(value, str) and "/" in value else "", strict=False)
    except ValueError:
        yield bad(field, value, "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)")


def at_least_zero(field: str, value: Any) -> Iterator[FieldError]:
    """Check that a number is not negative."""
    if isinstance(value, int) and value < 0:
        yield bad(field, value, "must be greater than or equal to 0")
