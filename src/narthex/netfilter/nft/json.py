"""Parser for `nft -j list ruleset`: translates the JSON into nft's syntax, so that one parser reads both.

The JSON is that of libnftables-json(5). Rules are translated when their chain is accessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from narthex.model import BoundedProblems, omitted_text
from narthex.netfilter.ast import Chain, Set, Table
from narthex.netfilter.lazy import LazyChains, LazyMapping, LineProblem
from narthex.netfilter.nft.parse import FAMILIES, parse_chain, parse_set


class _Names(msgspec.Struct):
    """The attributes that name an object and its parent."""

    family: str = ""
    table: str = ""
    name: str = ""
    chain: str = ""


_ABSENT = msgspec.Raw(b"")


class _Object(msgspec.Struct):
    table: msgspec.Raw = _ABSENT
    chain: msgspec.Raw = _ABSENT
    rule: msgspec.Raw = _ABSENT
    set: msgspec.Raw = _ABSENT
    map: msgspec.Raw = _ABSENT


class _Listing(msgspec.Struct):
    nftables: list[_Object]


_LISTINGS, _NAMES = msgspec.json.Decoder(_Listing), msgspec.json.Decoder(_Names)


class _TableObjects:
    """The untranslated objects of one table."""

    def __init__(self) -> None:
        self.chains: dict[str, Any] = {}
        self.rules: dict[str, list[msgspec.Raw]] = {}
        self.sets: dict[str, tuple[str, msgspec.Raw]] = {}


def read(text: str) -> tuple[list[tuple[Table, int]], list[LineProblem]]:
    """Return the tables, each with the number of its rules, and the problems."""
    try:
        listing = _LISTINGS.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        return [], [(0, f"the JSON of nft is invalid: {error}")]
    tables: dict[tuple[str, str], _TableObjects] = {}
    problems: BoundedProblems[LineProblem] = BoundedProblems(lambda count: (0, omitted_text(count)))
    for number, each in enumerate(listing.nftables):
        raw = next((one for one in (each.table, each.chain, each.rule, each.set, each.map) if bytes(one)), None)
        if raw is None:
            continue
        try:
            named = _NAMES.decode(raw)
            key = named.family, named.table or named.name
            objects = tables.setdefault(key, _TableObjects())
            if bytes(each.chain):
                objects.chains[named.name] = msgspec.json.decode(raw)
            elif bytes(each.rule):
                objects.rules.setdefault(named.chain, []).append(raw)
            elif bytes(each.set) or bytes(each.map):
                objects.sets[named.name] = ("map" if bytes(each.map) else "set", raw)
        except (msgspec.DecodeError, RecursionError) as error:
            problems.append((0, f"object {number} of the JSON: {error}"))
    found = [
        (_table(family, name, objects), sum(map(len, objects.rules.values())))
        for (family, name), objects in tables.items()
        if family in FAMILIES
    ]
    return found, [*problems]


def _table(family: str, name: str, objects: _TableObjects) -> Table:
    def build_chain(chain: str) -> Chain:
        """Translate one chain to nft text and parse that."""
        lines = [_hook_text(objects.chains[chain])] if chain in objects.chains else []
        lines += [_rule_text(raw) for raw in objects.rules.get(chain, ())]
        return parse_chain("\n".join((*lines, "}", "")), chain)

    def build_set(one: str) -> Set:
        """Translate one set to nft text and parse that; an unreadable set names its error in `unsupported`."""
        kind, raw = objects.sets[one]
        try:
            return parse_set("\n".join((*_set_lines(kind, msgspec.json.decode(raw)), "}", "")), one)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            return Set(name=one, key=(), unsupported=f"its JSON: {error}")

    known = dict.fromkeys((*objects.chains, *objects.rules))
    bases = tuple(chain for chain, value in objects.chains.items() if "hook" in value)
    return Table(
        family=FAMILIES[family],
        name=name,
        chains=LazyChains(known, build_chain, bases, lambda _chain: [], str),
        sets=LazyMapping(objects.sets, build_set),
    )


def _hook_text(chain: dict[str, Any]) -> str:
    if "hook" not in chain:
        return ""
    return (
        f"type {chain.get('type', 'filter')} hook {chain['hook']} priority {int(chain.get('prio', 0))}; "
        f"policy {chain.get('policy', 'accept')};"
    )


def _rule_text(raw: msgspec.Raw) -> str:
    try:
        value: dict[str, Any] = msgspec.json.decode(raw)
    except RecursionError:
        return "xt json nested too deep"
    expressions: Sequence[Any] = value.get("expr", ())
    return " ".join(filter(None, map(_statement, expressions))) + _comment(value)


def _comment(value: dict[str, Any]) -> str:
    comment = str(value.get("comment", "")).replace('"', "'").replace("\n", " ")
    return f' comment "{comment}"' if comment else ""


# ---- translation ---------------------------------------------------------------------------------------------------


class _Untranslatable(ValueError):
    """An object that the translation does not support."""


def _statement(one: Any) -> str:
    """Translate a statement. An unsupported one stays as JSON after `xt`, which no parser understands."""
    try:
        return _translate_statement(one)
    except (_Untranslatable, KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError):
        try:
            text = msgspec.json.encode(one).decode()
        except RecursionError:
            text = "nested too deep"
        return "xt json " + "".join(" " if letter in '{},;"\n#' else letter for letter in text)


def _translate_statement(one: Any) -> str:
    if not isinstance(one, dict) or len(one) != 1:
        raise _Untranslatable
    ((kind, value),) = one.items()
    if kind in _PLAIN:
        return str(kind)
    translate = _STATEMENTS.get(kind)
    if translate is None:
        raise _Untranslatable
    return translate(value)


_PLAIN = frozenset(("accept", "drop", "return", "continue", "notrack"))
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_.:*-]+|@[A-Za-z0-9_./-]+", re.ASCII)


def _match(value: Any) -> str:
    operator = value["op"]
    if value["right"] is False:
        return f"{_value(value['left'])} missing"
    left, right = _value(value["left"]), _value(value["right"])
    if operator == "in":
        return f"{left} & {_grouped(value['right'])} != 0" if "flags" in left else f"{left} {right}"
    if isinstance(value["right"], list):
        right = _grouped(value["right"])
    if operator == "==" and not left.endswith(")") and "&" not in left:
        return f"{left} {right}"
    return f"{left} {operator} {right}"


def _grouped(values: Any) -> str:
    if isinstance(values, list):
        return f"({' | '.join(map(_value, values))})"
    return _value(values)


def _value(one: Any) -> str:
    if isinstance(one, bool) or one is None:
        raise _Untranslatable
    if isinstance(one, int):
        return str(one)
    if isinstance(one, str):
        return one if _PLAIN_WORD.fullmatch(one) else f'"{_safe(one)}"'
    if isinstance(one, list):
        return ",".join(map(_value, one))
    ((kind, value),) = one.items()
    translate = _VALUES.get(kind)
    if translate is None:
        raise _Untranslatable
    return translate(value)


def _safe(text: str) -> str:
    if '"' in text or "\n" in text:
        raise _Untranslatable
    return text


def _name(text: Any) -> str:
    name = str(text)
    if not name or any(letter in '{},;"\n# ' for letter in name):
        raise _Untranslatable
    return name


def _payload(value: Any) -> str:
    if "protocol" not in value:
        raise _Untranslatable
    return f"{_name(value['protocol'])} {_name(value['field'])}"


def _ct(value: Any) -> str:
    # The family may precede the key in the same string.
    family = [value["family"]] if "family" in value else []
    words = ["ct", *([value["dir"]] if "dir" in value else []), *family, *str(value["key"]).split()]
    return " ".join(map(_name, words))


def _listed(value: Any) -> list[Any]:
    """Return a list. nft writes a list of one element as that element."""
    return value if isinstance(value, list) else [value]


def _fib(value: Any) -> str:
    return f"fib {' . '.join(_listed(value.get('flags', [])))} {_name(value['result'])}"


def _numgen(value: Any) -> str:
    offset = f" offset {int(value['offset'])}" if value.get("offset") else ""
    return f"numgen {_name(value['mode'])} mod {int(value['mod'])}{offset}"


def _hash(kind: str) -> Callable[[Any], str]:
    def translate(value: Any) -> str:
        """Return the hash as nft text."""
        fields = f" {_value(value['expr'])}" if "expr" in value else ""
        seed = f" seed {int(value['seed']):#x}" if "seed" in value else ""
        offset = f" offset {int(value['offset'])}" if value.get("offset") else ""
        return f"{kind}{fields} mod {int(value['mod'])}{seed}{offset}"

    return translate


def _prefix(value: Any) -> str:
    return f"{_value(value['addr'])}/{int(value['len'])}"


def _set_of(value: Any) -> str:
    return "{ " + ", ".join(map(_element, _listed(value))) + " }"


def _element(one: Any) -> str:
    if isinstance(one, list):
        # A map element: key and data.
        return f"{_element(one[0])} : {_data(one[1])}"
    if isinstance(one, dict) and "elem" in one:
        return _value(one["elem"]["val"]) + _comment(one["elem"])
    return _value(one)


def _data(one: Any) -> str:
    if isinstance(one, dict) and next(iter(one)) in ("accept", "drop", "return", "continue", "jump", "goto"):
        return _translate_statement(one)
    return _value(one)


def _operator(sign: str) -> Callable[[Any], str]:
    def translate(value: Any) -> str:
        """Return the comparison or calculation as nft text."""
        left, right = value[0], value[1]
        return f"{_value(left)} {sign} {_grouped(right)}"

    return translate


_VALUES: dict[str, Callable[[Any], str]] = {
    "payload": _payload,
    "meta": lambda value: f"meta {_name(value['key'])}",
    "ct": _ct,
    "fib": _fib,
    "numgen": _numgen,
    "jhash": _hash("jhash"),
    "symhash": _hash("symhash"),
    "prefix": _prefix,
    "range": lambda value: f"{_value(value[0])}-{_value(value[1])}",
    "set": _set_of,
    "concat": lambda value: " . ".join(map(_value, value)),
    "elem": lambda value: _value(value["val"]),
    "map": lambda value: f"{_value(value['key'])} map {_data(value['data'])}",
    "&": _operator("&"),
    "|": _operator("|"),
    "^": _operator("^"),
}


def _nat(kind: str) -> Callable[[Any], str]:
    def translate(value: Any) -> str:
        """Return the statement as nft text, with its address, port, and flags if it has them."""
        value = value or {}
        text = kind
        if "addr" in value:
            address = _value(value["addr"])
            text += f" {_name(value['family'])} to " if "family" in value else " to "
            if "port" in value and ":" in address and not isinstance(value["addr"], dict):
                address = f"[{address}]"
            text += address
        elif "port" in value:
            text += " to "
        if "port" in value:
            text += f":{_value(value['port'])}"
        return " ".join((text, ",".join(_listed(value.get("flags", []))))).strip()

    return translate


def _mangle(value: Any) -> str:
    return f"{_value(value['key'])} set {_value(value['value'])}"


def _reject(value: Any) -> str:
    if not value:
        return "reject"
    if value.get("type") == "tcp reset":
        return "reject with tcp reset"
    return f"reject with {_name(value['type'])} {_name(value['expr'])}"


def _limit(value: Any) -> str:
    return f"limit rate {'over ' if value.get('inv') else ''}{int(value['rate'])}/{_name(value['per'])}"


def _log(value: Any) -> str:
    prefix = (value or {}).get("prefix", "")
    return f'log prefix "{_safe(str(prefix))}"' if prefix else "log"


def _set_statement(value: Any) -> str:
    if value.get("stmt"):
        raise _Untranslatable
    return f"{_name(value['op'])} {_name(value['set'])} {{ {_element(value['elem'])} }}"


_STATEMENTS: dict[str, Callable[[Any], str]] = {
    "match": _match,
    "counter": lambda _: "counter",
    "jump": lambda value: f"jump {_name(value['target'])}",
    "goto": lambda value: f"goto {_name(value['target'])}",
    "vmap": lambda value: f"{_value(value['key'])} vmap {_data(value['data'])}",
    "mangle": _mangle,
    "reject": _reject,
    "masquerade": _nat("masquerade"),
    "redirect": _nat("redirect"),
    "dnat": _nat("dnat"),
    "snat": _nat("snat"),
    "limit": _limit,
    "log": _log,
    "set": _set_statement,
    "xt": lambda value: f"xt {_name(value['type'])} {_name(value['name'])}",
}


def _types(types: Any) -> str:
    """Translate `["ipv4_addr", "inet_service"]`, or the same with dots in one string."""
    return " . ".join(map(_name, types if isinstance(types, list) else str(types).split(" . ")))


def _set_lines(kind: str, value: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a set or map. Raises KeyError, TypeError, or ValueError for an unsupported one."""
    text = _types(value["type"])
    if kind == "map":
        text += f" : {_types(value['map'])}"
    yield f"type {text}"
    flags = value.get("flags", [])
    if flags:
        yield f"flags {','.join(map(_name, flags))}"
    if "timeout" in value:
        yield f"timeout {int(value['timeout'])}s"
    if "size" in value:
        yield f"size {int(value['size'])}"
    try:
        elements = [_element(each) for each in value.get("elem", [])]
    except (_Untranslatable, AttributeError) as error:
        raise ValueError(str(error) or "an element") from None
    if elements:
        yield "elements = { " + ", ".join(elements) + " }"
