"""Typed access to the fields of a configuration.

Reading continues after an error, so that one run reports all errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from narthex.model import ProblemCollector, quoted, wrong_type
from narthex.model.duration import duration

LARGEST_NUMBER = 2**31 - 1

S = TypeVar("S", bound=msgspec.Struct)

TextReader = Callable[[str], str]
"""Returns the value of a text. Raises ValueError with the reason."""

_NO_READERS: Mapping[str, TextReader] = {}

_SPELLED = {"cidr": "CIDR", "cidrs": "CIDRs", "ips": "IPs", "arp": "ARP", "dsr": "DSR"}


def camel_case(name: str) -> str:
    """Return the name of a Struct's field as it is written in a file."""
    first, *rest = name.split("_")
    return first + "".join(_SPELLED.get(word, word.capitalize()) for word in rest)


class Fields:
    """The fields of one mapping. Fields that were never read are unknown, and `unknown` reports them."""

    def __init__(self, raw: Any, report: ProblemCollector, path: str = "") -> None:
        self.report = report
        self._path = path
        if raw is not None and not isinstance(raw, dict):
            report.error(path, wrong_type(raw, "a mapping"))
        self._raw: dict[str, Any] = raw if isinstance(raw, dict) else {}
        self._asked: set[str] = set()
        self._sections: list[Fields] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all fields."""
        return tuple(self._raw)

    def path(self, name: str) -> str:
        """Return the full path of a field."""
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """Return the value as it was read; None if absent."""
        self._asked.add(name)
        return self._raw.get(name)

    def section(self, name: str) -> Fields:
        """Return a nested mapping."""
        inner = Fields(self.raw(name), self.report, self.path(name))
        self._sections.append(inner)
        return inner

    def struct(self, kind: type[S], readers: Mapping[str, TextReader] = _NO_READERS, **given: Any) -> S:
        """Return a Struct with the `given` values. All other fields are read by the types of their defaults.

        A float is a duration, an integer is not negative, and a Struct is a section. `readers` are for texts, and for those
        in lists, by the name of the Struct's field.
        """
        for name, default in msgspec.structs.asdict(kind()).items():
            if name not in given:
                given[name] = self._of_type(camel_case(name), default, readers.get(name, str))
        return kind(**given)

    def _of_type(self, name: str, default: Any, reader: TextReader) -> Any:
        match default:
            case bool():
                return self.flag(name, default)
            case int():
                return self.whole(name, default, 0, LARGEST_NUMBER)
            case float():
                return self.seconds(name, default)
            case str():
                return self.read(name, reader, default)
            case tuple():
                return default if self.raw(name) is None else self.texts(name, reader)
        return self.section(name).struct(type(default))

    def text(self, name: str) -> str:
        """Return text; empty without one."""
        return self._typed(name, str, "text") or ""

    def read(self, name: str, reader: TextReader, default: str = "") -> str:
        """Return text through a reader."""
        text = self.text(name)
        try:
            return reader(text) if text else default
        except ValueError as error:
            self.error(name, f"{quoted(text)} {error}")
            return default

    def word(self, name: str, allowed: Collection[str], default: str = "") -> str:
        """Return one of the allowed words."""
        text = self.text(name)
        return text if text and self.report.choice(self.path(name), text, allowed) else default

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._typed(name, bool, "true or false")
        return default if value is None else bool(value)

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        """Return an integer, low <= number <= high."""
        value = self._typed(name, int, "a whole number")
        if value is None or not self.report.number(self.path(name), value, low, high, "a number in range"):
            return default
        return int(value)

    def decimal(self, name: str, default: float) -> float:
        """Return a number between -1e9 and 1e9."""
        value = self._typed(name, (int, float), "a number")
        if value is None:
            return default
        if not -1e9 <= value <= 1e9:
            self.error(name, f"{quoted(value)} is not a number between -1e9 and 1e9")
            return default
        return float(value)

    def seconds(self, name: str, default: float, *, zero_is_default: bool = False) -> float:
        """Return a duration that is not negative, in seconds."""
        text = self._typed(name, str, 'a duration in quotes, such as "30s"')
        if not text:
            return default
        try:
            value = duration(text)
        except ValueError as error:
            self.error(name, f"{quoted(text)} {error}")
            return default
        if value < 0:
            self.error(name, f"{quoted(text)} is negative, must be 0s or more")
            return default
        return default if zero_is_default and value == 0 else value

    def texts(self, name: str, reader: TextReader = str) -> tuple[str, ...]:
        """Return a list of texts, each through a reader."""
        found = []
        for index, value in enumerate(self._typed(name, list, "a list") or ()):
            field = f"{name}[{index}]"
            if not isinstance(value, str):
                self.error(field, wrong_type(value, "text"))
                continue
            try:
                found.append(reader(value))
            except ValueError as error:
                self.error(field, f"{quoted(value)} {error}")
        return tuple(found)

    def error(self, name: str, message: str) -> None:
        """Report an error of a field."""
        self.report.error(self.path(name), message)

    def warning(self, name: str, message: str) -> None:
        """Report a warning about a field."""
        self.report.warning(self.path(name), message)

    def unknown(self) -> None:
        """Warn of fields that were never read, here and in all sections."""
        for name in self._raw:
            if name not in self._asked:
                shown = name if re.fullmatch(r"\w{1,60}", name, re.ASCII) else quoted(name)
                self.report.warning(self.path(shown), "is not a known field, ignored")
        for section in self._sections:
            section.unknown()

    def _typed(self, name: str, types: type | tuple[type, ...], must: str) -> Any:
        value = self.raw(name)
        if value is None or (isinstance(value, types) and (types is bool or not isinstance(value, bool))):
            return value
        self.error(name, wrong_type(value, must))
        return None
