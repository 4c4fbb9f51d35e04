"""A JSON parser and writer for plugins: strict, bounded, without duplicate keys, and fast to import.

The input comes from a container runtime and its configuration and is read by a program that runs as root. Parsers disagree
on the meaning of duplicate keys, so they are rejected.
"""

from __future__ import annotations

MOST_BYTES = 1 << 20
MOST_DEPTH = 32
_LONGEST_NUMBER = 24
_SPACE = " \t\n\r"
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WORDS = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = "0123456789"


class JsonError(ValueError):
    """Invalid JSON, or a limit exceeded; the message has the character position, counted from 1."""


def parse(data: bytes) -> object:
    """Parse one JSON value (RFC 8259) into dict, list, str, int, float, bool, or None. Raises JsonError."""
    if len(data) > MOST_BYTES:
        raise JsonError(f"longer than {MOST_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 at byte {error.start + 1}") from None
    value, at = _value(text, _past_space(text, 0), 0)
    at = _past_space(text, at)
    if at != len(text):
        raise JsonError(f"unexpected data after the value at {at + 1}")
    return value


def parse_object(data: bytes | None) -> dict[str, object] | None:
    """Parse an object from a file; None if the file is missing, empty, or no such object."""
    try:
        found = parse(data or b"")
    except JsonError:
        return None
    return found if isinstance(found, dict) else None


def _past_space(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in _SPACE:
        at += 1
    return at


def _value(text: str, at: int, depth: int) -> tuple[object, int]:
    first = text[at : at + 1]
    if first == '"':
        return _string(text, at)
    if first in ("{", "["):
        if depth >= MOST_DEPTH:
            raise JsonError(f"deeper than {MOST_DEPTH} levels at {at + 1}")
        return _object(text, at, depth + 1) if first == "{" else _array(text, at, depth + 1)
    if first in _WORDS:
        word, value = _WORDS[first]
        if text.startswith(word, at):
            return value, at + len(word)
    elif first and (first in _DIGITS or first == "-"):
        return _number(text, at)
    raise JsonError(f"no value at {at + 1}")


def _object(text: str, at: int, depth: int) -> tuple[dict[str, object], int]:
    found: dict[str, object] = {}
    at = _past_space(text, at + 1)
    if text[at : at + 1] == "}":
        return found, at + 1
    while True:
        if text[at : at + 1] != '"':
            raise JsonError(f"no key at {at + 1}")
        key, behind = _string(text, at)
        if key in found:
            raise JsonError(f"key {key[:64]!r} is a duplicate at {at + 1}")
        at = _past_space(text, behind)
        if text[at : at + 1] != ":":
            raise JsonError(f"no ':' at {at + 1}")
        found[key], at = _value(text, _past_space(text, at + 1), depth)
        at = _past_space(text, at)
        if text[at : at + 1] == "}":
            return found, at + 1
        if text[at : at + 1] != ",":
            raise JsonError(f"no ',' or '}}' at {at + 1}")
        at = _past_space(text, at + 1)


def _array(text: str, at: int, depth: int) -> tuple[list[object], int]:
    found: list[object] = []
    at = _past_space(text, at + 1)
    if text[at : at + 1] == "]":
        return found, at + 1
    while True:
        value, at = _value(text, at, depth)
        found.append(value)
        at = _past_space(text, at)
        if text[at : at + 1] == "]":
            return found, at + 1
        if text[at : at + 1] != ",":
            raise JsonError(f"no ',' or ']' at {at + 1}")
        at = _past_space(text, at + 1)


def _string(text: str, at: int) -> tuple[str, int]:
    start = at + 1
    end = text.find('"', start)
    if end >= 0 and "\\" not in (plain := text[start:end]):
        _refuse_control(plain, start)
        return plain, end + 1
    parts: list[str] = []
    at = start
    while True:
        if end < at:
            # Only after an escaped quote: from each escape, the search would cost the square of the length.
            end = text.find('"', at)
        if end < 0:
            raise JsonError(f"unterminated string at {start}")
        escape = text.find("\\", at, end)
        parts.append(text[at : end if escape < 0 else escape])
        _refuse_control(parts[-1], at)
        if escape < 0:
            return "".join(parts), end + 1
        character, at = _escape(text, escape)
        parts.append(character)


def _refuse_control(part: str, at: int) -> None:
    if part and min(part) < " ":
        raise JsonError(f"a control character in the string at {at + 1}")


def _escape(text: str, at: int) -> tuple[str, int]:
    kind = text[at + 1 : at + 2]
    if kind in _ESCAPES:
        return _ESCAPES[kind], at + 2
    if kind != "u":
        raise JsonError(f"unknown escape at {at + 1}")
    unit = _unit(text, at)
    if 0xD800 <= unit < 0xDC00 and text.startswith("\\u", at + 6):
        low = _unit(text, at + 6)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + (unit - 0xD800 << 10) + low - 0xDC00), at + 12
    if 0xD800 <= unit < 0xE000:
        raise JsonError(f"unpaired surrogate at {at + 1}")
    return chr(unit), at + 6


def _unit(text: str, at: int) -> int:
    digits = text[at + 2 : at + 6]
    if len(digits) != 4 or not _HEX.issuperset(digits):
        raise JsonError(f"\\u without four hexadecimal digits at {at + 1}")
    return int(digits, 16)


def _number(text: str, at: int) -> tuple[int | float, int]:
    start = at
    at += text[at] == "-"
    first = at
    at = _past_digits(text, at)
    if at == first or (text[first] == "0" and at > first + 1):
        raise JsonError(f"no number at {start + 1}")
    whole = True
    if text[at : at + 1] == ".":
        whole, before = False, at + 1
        at = _past_digits(text, before)
        if at == before:
            raise JsonError(f"no number at {start + 1}")
    if text[at : at + 1] in ("e", "E"):
        whole = False
        before = at + 1 + (text[at + 1 : at + 2] in ("+", "-"))
        at = _past_digits(text, before)
        if at == before:
            raise JsonError(f"no number at {start + 1}")
    if at - start > _LONGEST_NUMBER:
        raise JsonError(f"a number of more than {_LONGEST_NUMBER} characters at {start + 1}")
    return (int(text[start:at]) if whole else float(text[start:at])), at


def _past_digits(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in _DIGITS:
        at += 1
    return at


def write(value: object) -> str:
    """Return the compact ASCII JSON text of a value."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quoted(key)}:{write(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(write, value)) + "]"
    raise TypeError(f"{type(value).__name__} is not JSON")


def _quoted(text: str) -> str:
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    parts = []
    for character in text:
        number = ord(character)
        if character in '"\\':
            parts.append("\\" + character)
        elif 0x20 <= number < 0x7F:
            parts.append(character)
        elif number < 0x10000:
            parts.append(f"\\u{number:04x}")
        else:
            number -= 0x10000
            parts.append(f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}")
    return '"' + "".join(parts) + '"'
