"""Validation errors of fields in the words of the API server (apimachinery's util/validation)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from narthex.lab.api.errors import FieldError

FieldCheck = Callable[[str, Any], Iterable[FieldError]]
"""Yields the errors of a value. Arguments: path of the field, value."""
_LABEL, _QUALIFIED = "[a-z0-9]([-a-z0-9]*[a-z0-9])?", "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
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
_KEY_TEXT = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    f"character (e.g. 'MyName',  or 'my.name',  or '123-abc', {_USED} '{_QUALIFIED}')"
)
_VALUE_TEXT = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end "
    f"with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', {_USED} '({_QUALIFIED})?')"
)
_ANNOTATIONS = 256 * 1024
IMMUTABLE = "field is immutable"


def bad(field: str, value: Any, text: str) -> FieldError:
    """Return an error for an invalid value."""
    return FieldError(field, "FieldValueInvalid", f"Invalid value: {_shown(value)}: {text}")


def required(field: str, text: str = "") -> FieldError:
    """Return an error for a missing value."""
    return FieldError(field, "FieldValueRequired", f"Required value: {text}" if text else "Required value")


def duplicate(field: str, value: Any) -> FieldError:
    """Return an error for a value that occurs twice."""
    return FieldError(field, "FieldValueDuplicate", f"Duplicate value: {_shown(value)}")


def not_found(field: str, value: Any) -> FieldError:
    """Return an error for a name that refers to nothing."""
    return FieldError(field, "FieldValueNotFound", f"Not found: {_shown(value)}")


def forbidden(field: str, text: str) -> FieldError:
    """Return an error for a value that must be absent or unchanged."""
    return FieldError(field, "FieldValueForbidden", f"Forbidden: {text}")


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def one_of(field: str, value: Any, known: Sequence[str], *, optional: bool = False) -> Iterator[FieldError]:
    """Check a value of an enumeration, which may be absent if it is `optional`."""
    if value not in known and not (optional and value is None):
        words = ", ".join(f'"{each}"' for each in sorted(known))
        yield FieldError(
            field, "FieldValueNotSupported", f"Unsupported value: {_shown(value)}: supported values: {words}"
        )


def check_each(check: FieldCheck, field: str, values: Any) -> Iterator[FieldError]:
    """Check the entries of a list, which may be absent."""
    for index, value in enumerate(values or ()):
        yield from check(f"{field}[{index}]", value)


def _text_check(pattern: str, most: int, text: str) -> FieldCheck:
    """Return a check of a value's length and characters."""

    def check(field: str, value: Any) -> Iterator[FieldError]:
        """Yield an error for a text that is too long, and one for a text that does not match the pattern."""
        if len(str(value)) > most:
            yield bad(field, value, f"must be no more than {most} characters")
        if not re.fullmatch(pattern, str(value)):
            yield bad(field, value, text)

    return check


subdomain = _text_check(_SUBDOMAIN, 253, _SUBDOMAIN_TEXT)
"""Checks a DNS subdomain (RFC 1123)."""
dns_label = _text_check(_LABEL, 63, _LABEL_TEXT)
"""Checks a DNS label (RFC 1123)."""
_label_value = _text_check(f"({_QUALIFIED})?", 63, _VALUE_TEXT)


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
        yield from _label_value(field, value)


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
        text = "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-), and at least one letter"
        yield bad(field, value, text)


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


def at_least_zero(at: str, given: Mapping[str, Any], *fields: str) -> Iterator[FieldError]:
    """Check that numbers are not negative, given by the names of their fields."""
    for field in fields:
        if isinstance(given.get(field), int) and given[field] < 0:
            yield bad(f"{at}.{field}", given[field], "must be greater than or equal to 0")
