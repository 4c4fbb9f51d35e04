"""Decoders of `metadata` and of fields that several kinds share."""

from __future__ import annotations

from collections.abc import Callable
from sys import intern
from typing import Any, TypedDict

from narthex.model.net import Protocol, family_of
from narthex.model.objects import Labels
from narthex.model.problem import ProblemCollector, quoted, wrong_type
from narthex.model.validate import DNS_LABEL, LABEL_KEY, LABEL_VALUE, Syntax
from narthex.model.wire import WireMeta

MAX_ANNOTATION_BYTES = 256 * 1024

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""A copy of the whole object for kubectl. Dropped: nothing here reads it, and it doubles the object's size."""

_is_key, _is_value = LABEL_KEY.holds, LABEL_VALUE.holds

PROTOCOLS = {word.value: word for word in (Protocol.TCP, Protocol.UDP, Protocol.SCTP)}


class ObjectFields(TypedDict):
    """Fields that every object has."""

    name: str
    namespace: str
    labels: Labels
    annotations: Labels
    uid: str
    resource_version: str
    deletion_timestamp: str
    origin: str


def object_fields(
    meta: WireMeta | None, report: ProblemCollector, names: Syntax, *, namespaced: bool = True
) -> ObjectFields:
    """Return validated `metadata`. `names` is the syntax of the object's name."""
    meta = meta if meta is not None else WireMeta()
    if not meta.name:
        report.reject("metadata.name", "is required")
    elif not names.holds(meta.name):
        report.reject("metadata.name", f"{quoted(meta.name)} is not {names.name}: {names.allowed}")
    namespace = (meta.namespace or "default") if namespaced else ""
    if namespaced and not DNS_LABEL.holds(namespace):
        report.reject("metadata.namespace", f"{quoted(namespace)} is not {DNS_LABEL.name}: {DNS_LABEL.allowed}")
    elif meta.namespace and not namespaced:
        report.warning("metadata.namespace", "is ignored, this kind has no namespace")
    stamp = meta.deletionTimestamp
    return {
        # Equal names are one text: that of a Service stands in its labels, its selector and its slices, too.
        "name": intern(meta.name or ""),
        "namespace": intern(namespace),
        "labels": labels("metadata.labels", meta.labels, report),
        "annotations": _annotations(meta.annotations, report),
        "uid": meta.uid or "",
        "resource_version": meta.resourceVersion or "",
        "deletion_timestamp": "" if stamp is None else str(stamp),
        "origin": report.origin,
    }


def labels(field: str, value: Any, report: ProblemCollector) -> Labels:
    """Return labels or a selector, sorted by key."""
    if not value and (value is None or isinstance(value, dict)):
        return ()
    if isinstance(value, dict) and all(map(_is_label, value, value.values())):
        return tuple([(intern(key), intern(value[key])) for key in sorted(value)])
    found = []
    for key, text in _pairs(field, value, report):
        if not _is_key(key):
            report.error(field, f"{quoted(key)} is not {LABEL_KEY.name}: {LABEL_KEY.allowed}")
        elif text is None:
            found.append((key, ""))
        elif not isinstance(text, str):
            report.error(f"{field}[{key}]", wrong_type(text, "text"))
        elif _is_value(text):
            found.append((key, text))
        else:
            report.check(f"{field}[{key}]", text, LABEL_VALUE)
    return tuple(sorted(found))


def _is_label(key: Any, text: Any) -> bool:
    return isinstance(key, str) and isinstance(text, str) and _is_key(key) and _is_value(text)


def _annotations(value: Any, report: ProblemCollector) -> Labels:
    if value is None:
        return ()
    found, size = [], 0
    for key, text in _pairs("metadata.annotations", value, report):
        if not (_is_key(key) or _is_key(key.lower())):
            report.error("metadata.annotations", f"{quoted(key)} is not an annotation key: {LABEL_KEY.allowed}")
        elif text is None:
            found.append((key, ""))
        elif not isinstance(text, str):
            report.error(f"metadata.annotations[{key}]", wrong_type(text, "text"))
        else:
            if key != LAST_APPLIED:
                found.append((intern(key), text))
            size += len(key) + len(text)
    if size > MAX_ANNOTATION_BYTES:
        report.error("metadata.annotations", f"hold {size} bytes together, at most {MAX_ANNOTATION_BYTES} are allowed")
    return tuple(sorted(found))


def _pairs(field: str, value: Any, report: ProblemCollector) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        report.error(field, wrong_type(value, "a mapping of text to text"))
        return []
    if bad := [key for key in value if not isinstance(key, str)]:
        report.error(field, f"the key {quoted(bad[0])} is not text")
        return []
    return list(value.items())


def protocol(field: str, value: str | None, report: ProblemCollector) -> Protocol:
    """Return the protocol of a port; TCP if absent."""
    if not value:
        return Protocol.TCP
    if found := PROTOCOLS.get(value):
        return found
    report.choice(field, value, PROTOCOLS)
    return Protocol.TCP


def valid_text(
    field: str, value: str, report: ProblemCollector, read: Callable[[str], str], *, lenient: bool = False
) -> str:
    """Convert a value with `read`, which raises ValueError: an error for an invalid one, or a warning if `lenient`, and ""."""
    try:
        return read(value)
    except ValueError as error:
        (report.warning if lenient else report.error)(field, f"{quoted(value)} {error}" + ", ignored" * lenient)
        return ""


def texts(
    field: str, values: list[str] | None, report: ProblemCollector, read: Callable[[str], str], *, lenient: bool = False
) -> tuple[str, ...]:
    """Return the valid ones of several values, converted as by `valid_text`."""
    found = [valid_text(f"{field}[{i}]", each, report, read, lenient=lenient) for i, each in enumerate(values or ())]
    return tuple(filter(None, found))


def family_pair(field: str, values: tuple[str, ...], report: ProblemCollector, what: str) -> tuple[str, ...]:
    """Return the first value of each family, and add an error if there are others."""
    first = {family_of(value): value for value in reversed(values)}
    if len(first) == len(values):
        return values
    report.error(field, f"at most one {what} of each IP family is allowed")
    return tuple(value for value in dict.fromkeys(values) if value in first.values())
