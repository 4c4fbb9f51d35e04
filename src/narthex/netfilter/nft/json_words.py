"""Objects of nft's JSON in the words of nft's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec


class _Strange(ValueError):
    """There are no words here for an object."""


def rule_words(expressions: Sequence[Any]) -> str:
    """A rule. An object without words stays as JSON in `xt`, which no reader understands."""
    return " ".join(filter(None, map(_statement, expressions)))


def _statement(one: Any) -> str:
    try:
        return _statement_words(one)
    except (_Strange, KeyError, TypeError, ValueError, AttributeError, IndexError):
        text = msgspec.json.encode(one).decode()
        return "xt json " + "".join(" " if letter in '{},;"\n#' else letter for letter in text)


def _statement_words(one: Any) -> str:
    if not isinstance(one, dict) or len(one) != 1:
        raise _Strange
    ((kind, held),) = one.items()
    if kind in _PLAIN:
        return str(kind)
    words = _STATEMENTS.get(kind)
    if words is None:
        raise _Strange
    return words(held)


_PLAIN = frozenset(("accept", "drop", "return", "continue", "notrack"))


_PLAIN_WORD = re.compile(r"[A-Za-z0-9_.:*-]+|@[A-Za-z0-9_./-]+", re.ASCII)


def _match(held: Any) -> str:
    operator = held["op"]
    if held["right"] is False:
        return f"{_value(held['left'])} missing"
    left, right = _value(held["left"]), _value(held["right"])
    if operator == "in":
        return f"{left} & {_grouped(held['right'])} != 0" if "flags" in left else f"{left} {right}"
    if isinstance(held["right"], list):
        right = _grouped(held["right"])
    if operator == "==" and not left.endswith(")") and "&" not in left:
        return f"{left} {right}"
    return f"{left} {operator} {right}"


def _grouped(values: Any) -> str:
    if isinstance(values, list):
        return f"({' | '.join(map(_value, values))})"
    return _value(values)


def _value(one: Any) -> str:
    if isinstance(one, bool) or one is None:
        raise _Strange
    if isinstance(one, int):
        return str(one)
    if isinstance(one, str):
        return one if _PLAIN_WORD.fullmatch(one) else f'"{_safe(one)}"'
    if isinstance(one, list):
        return ",".join(map(_value, one))
    ((kind, held),) = one.items()
    words = _VALUES.get(kind)
    if words is None:
        raise _Strange
    return words(held)


def _safe(text: str) -> str:
    if '"' in text or "\n" in text:
        raise _Strange
    return text


def _name(text: Any) -> str:
    name = str(text)
    if not name or any(letter in '{},;"\n# ' for letter in name):
        raise _Strange
    return name


def _payload(held: Any) -> str:
    if "protocol" not in held:
        raise _Strange
    return f"{_name(held['protocol'])} {_name(held['field'])}"


def _ct(held: Any) -> str:
    # The family may stand in front of the key, in the same word.
    family = [held["family"]] if "family" in held else []
    words = ["ct", *([held["dir"]] if "dir" in held else []), *family, *str(held["key"]).split()]
    return " ".join(map(_name, words))


def _fib(held: Any) -> str:
    flags = held.get("flags", [])
    return f"fib {' . '.join(flags if isinstance(flags, list) else [flags])} {_name(held['result'])}"


def _numgen(held: Any) -> str:
    offset = f" offset {int(held['offset'])}" if held.get("offset") else ""
    return f"numgen {_name(held['mode'])} mod {int(held['mod'])}{offset}"


def _prefix(held: Any) -> str:
    return f"{_value(held['addr'])}/{int(held['len'])}"


def _set_of(held: Any) -> str:
    return "{ " + ", ".join(_element(each) for each in (held if isinstance(held, list) else [held])) + " }"


def _element(one: Any) -> str:
    if isinstance(one, list):
        # An element of a map: key and data.
        return f"{_element(one[0])} : {_data(one[1])}"
    if isinstance(one, dict) and "elem" in one:
        return _value(one["elem"]["val"])
    return _value(one)


def _data(one: Any) -> str:
    if isinstance(one, dict) and next(iter(one)) in ("accept", "drop", "return", "continue", "jump", "goto"):
        return _statement_words(one)
    return _value(one)


def _operator(sign: str) -> Callable[[Any], str]:
    def words(held: Any) -> str:
        left, right = held[0], held[1]
        return f"{_value(left)} {sign} {_grouped(right)}"

    return words


_VALUES: dict[str, Callable[[Any], str]] = {
    "payload": _payload,
    "meta": lambda held: f"meta {_name(held['key'])}",
    "ct": _ct,
    "fib": _fib,
    "numgen": _numgen,
    "prefix": _prefix,
    "range": lambda held: f"{_value(held[0])}-{_value(held[1])}",
    "set": _set_of,
    "concat": lambda held: " . ".join(map(_value, held)),
    "elem": lambda held: _value(held["val"]),
    "map": lambda held: f"{_value(held['key'])} map {_data(held['data'])}",
    "&": _operator("&"),
    "|": _operator("|"),
    "^": _operator("^"),
}


def _nat(kind: str) -> Callable[[Any], str]:
    def words(held: Any) -> str:
        held = held or {}
        text = kind
        if "addr" in held:
            address = _value(held["addr"])
            text += f" {_name(held['family'])} to " if "family" in held else " to "
            if "port" in held and ":" in address and not isinstance(held["addr"], dict):
                address = f"[{address}]"
            text += address
        elif "port" in held:
            text += " to "
        if "port" in held:
            text += f":{_value(held['port'])}"
        flags = held.get("flags", [])
        return " ".join((text, ",".join(flags if isinstance(flags, list) else [flags]))).strip()

    return words


def _mangle(held: Any) -> str:
    return f"{_value(held['key'])} set {_value(held['value'])}"


def _reject(held: Any) -> str:
    if not held:
        return "reject"
    if held.get("type") == "tcp reset":
        return "reject with tcp reset"
    return f"reject with {_name(held['type'])} {_name(held['expr'])}"


def _limit(held: Any) -> str:
    return f"limit rate {'over ' if held.get('inv') else ''}{int(held['rate'])}/{_name(held['per'])}"


def _log(held: Any) -> str:
    prefix = (held or {}).get("prefix", "")
    return f'log prefix "{_safe(str(prefix))}"' if prefix else "log"


def _set_statement(held: Any) -> str:
    if held.get("stmt"):
        raise _Strange
    return f"{_name(held['op'])} {_name(held['set'])} {{ {_element(held['elem'])} }}"


_STATEMENTS: dict[str, Callable[[Any], str]] = {
    "match": _match,
    "counter": lambda _: "counter",
    "jump": lambda held: f"jump {_name(held['target'])}",
    "goto": lambda held: f"goto {_name(held['target'])}",
    "vmap": lambda held: f"{_value(held['key'])} vmap {_data(held['data'])}",
    "mangle": _mangle,
    "reject": _reject,
    "masquerade": _nat("masquerade"),
    "redirect": _nat("redirect"),
    "dnat": _nat("dnat"),
    "snat": _nat("snat"),
    "limit": _limit,
    "log": _log,
    "set": _set_statement,
    "xt": lambda held: f"xt {_name(held['type'])} {_name(held['name'])}",
}


def _types(types: Any) -> str:
    """`["ipv4_addr", "inet_service"]`, or the same with dots in one text."""
    return " . ".join(map(_name, types if isinstance(types, list) else str(types).split(" . ")))


def set_words(kind: str, held: dict[str, Any]) -> Iterator[str]:
    """The lines of a set or map. Raises KeyError, TypeError or ValueError for what has no words."""
    text = _types(held["type"])
    if kind == "map":
        text += f" : {_types(held['map'])}"
    yield f"type {text}"
    flags = held.get("flags", [])
    if flags:
        yield f"flags {','.join(map(_name, flags))}"
    if "timeout" in held:
        yield f"timeout {int(held['timeout'])}s"
    if "size" in held:
        yield f"size {int(held['size'])}"
    try:
        elements = [_element(each) for each in held.get("elem", [])]
    except (_Strange, AttributeError) as error:
        raise ValueError(str(error) or "an element") from None
    if elements:
        yield "elements = { " + ", ".join(elements) + " }"
