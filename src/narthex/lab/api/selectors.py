"""Label and field selectors, in the words and with the meaning of `kubectl -l` and `--field-selector`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from narthex.lab.api.errors import ApiFault, bad_request

Raw = Mapping[str, Any]
Test = Callable[[Raw], bool]

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
"""What can be selected by, besides names, by kind."""

_LABEL = re.compile(
    r"\s*(?:!\s*(?P<no>[^\s!=<>,()]+)|(?P<key>[^\s!=<>,()]+)\s*(?:(?P<set>in|notin)\s*\((?P<values>[^()]*)\)"
    r"|(?P<op>==|!=|=|<|>)\s*(?P<value>[^\s!=<>,()]*))?)\s*(?:,|$)"
)


class Selector:
    """What a list or watch is limited to. Raises ApiFault (BadRequest) for what cannot be understood or selected by."""

    def __init__(self, labels: str, fields: str, known: frozenset[str]) -> None:
        self._tests = [*_label_tests(labels), *_field_tests(fields, _COMMON | known)]

    def selects(self, raw: Raw) -> bool:
        """Whether the object is in the list."""
        return all(test(raw) for test in self._tests)

    def __bool__(self) -> bool:
        """Whether it limits anything."""
        return bool(self._tests)


def _labels(raw: Raw) -> Mapping[str, Any]:
    labels = raw.get("metadata", {}).get("labels")
    return labels if isinstance(labels, Mapping) else {}


def _label_tests(text: str) -> Iterator[Test]:
    at = 0
    while at < len(text.rstrip()):
        found = _LABEL.match(text, at)
        if found is None:
            raise bad_request(f"unable to parse requirement: {text[at:]!r} is not understood as a label selector")
        yield _label_test(found)
        at = found.end()


def _label_test(found: re.Match[str]) -> Test:
    absent, key, value = found["no"], found["key"], found["value"]
    if absent:
        return lambda raw: absent not in _labels(raw)
    if found["set"]:
        values = {each.strip() for each in found["values"].split(",")}
        wanted = found["set"] == "in"
        if wanted:
            return lambda raw: key in _labels(raw) and _labels(raw)[key] in values
        return lambda raw: _labels(raw).get(key) not in values
    match found["op"]:
        case None:
            return lambda raw: key in _labels(raw)
        case "!=":
            return lambda raw: _labels(raw).get(key) != value
        case "<" | ">" as sign:
            return _number_test(key, sign, value)
    return lambda raw: _labels(raw).get(key) == value


def _number_test(key: str, sign: str, value: str) -> Test:
    if not value.lstrip("-").isdigit():
        raise bad_request(
            f"unable to parse requirement: for 'Gt', 'Lt' operators, the value must be an integer: {value!r}"
        )

    def test(raw: Raw) -> bool:
        held = str(_labels(raw).get(key, ""))
        if not held.lstrip("-").isdigit():
            return False
        return int(held) < int(value) if sign == "<" else int(held) > int(value)

    return test


def _field_tests(text: str, known: frozenset[str]) -> Iterator[Test]:
    for part in re.split(r"(?<!\\),", text):
        if not part:
            continue
        path, equal, value = part.partition("=")
        if not equal:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        unequal, path = path.endswith("!"), path.rstrip("!")
        if path not in known:
            raise ApiFault(400, "BadRequest", f"field label not supported: {path}")
        yield _field_test(path, value.removeprefix("="), unequal)


def _field_test(path: str, value: str, unequal: bool) -> Test:
    steps = path.split(".")

    def test(raw: Raw) -> bool:
        found: Any = raw
        for step in steps:
            found = found.get(step) if isinstance(found, Mapping) else None
        text = "" if found is None else str(found).lower() if isinstance(found, bool) else str(found)
        # Switches that are off are not written down.
        same = text == value or (value == "false" and text == "")
        return same is not unequal

    return test
