"""Printer for nft. Where possible, the text is the same as that of `nft list` of nft 1.0.6.

The form of every name, address, and number is checked here, since this is the last step before the kernel tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from narthex.model import IPFamily, family_of
from narthex.netfilter import ast

NAME_LIMIT = 127
"""Longest chain name in characters (NFT_CHAIN_MAXNAMELEN without the terminating byte)."""

Family = IPFamily | None

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*", re.ASCII)
_WORD = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_NETWORK = re.compile(r"[0-9a-f.:]+(/\d{1,3})?", re.ASCII)
_INTERFACE = re.compile(r"[A-Za-z0-9_.:@+-]{1,15}\*?", re.ASCII)
_COMMENT = re.compile(r"[ !#-~]{0,128}", re.ASCII)
_PRIORITIES = {"raw": -300, "mangle": -150, "dstnat": -100, "filter": 0, "security": 50, "srcnat": 100}
_ONLY_IN = {"dstnat": "prerouting", "srcnat": "postrouting"}


def nft_script(table: ast.Table) -> str:
    """Return a complete table with its elements as a block for `nft -f`."""
    lines = [f"table {_family_word(table.family)} {name_text(table.name)} {{"]
    lines += [set_text(one, table.family) for one in table.sets.values()]
    lines += [chain_text(one, table.family) for one in table.chains.values()]
    return "\n".join([*lines, "}", ""])


def chain_text(chain: ast.Chain, family: Family) -> str:
    """Return a chain as a block inside a table block."""
    lines = [f"\tchain {name_text(chain.name)} {{"]
    if chain.hook is not None:
        lines.append(f"\t\t{_hook_text(chain.hook)}")
    lines += [f"\t\t{rule_text(rule, family)}" for rule in chain.rules]
    return "\n".join([*lines, "\t}"])


def set_text(one: ast.Set, family: Family) -> str:
    """Return a set or map with its elements as a block inside a table block."""
    datatype = {"": "", "verdict": " : verdict"}.get(one.data)
    if datatype is None:
        if one.data != "endpoint":
            raise ast.Unprintable(f"map {one.name}: unsupported data {one.data!r}")
        datatype = f" : {key_text((ast.Field.DADDR, ast.Field.DPORT), family)}"
    flags = [
        word for word, on in (("interval", one.interval), ("dynamic", one.dynamic), ("timeout", one.timeout)) if on
    ]
    lines = [
        f"\t{'map' if one.data else 'set'} {name_text(one.name)} {{",
        f"\t\ttypeof {key_text(one.key, family)}{datatype}",
    ]
    if one.size:
        lines.append(f"\t\tsize {one.size:d}")
    if flags:
        lines.append(f"\t\tflags {','.join(flags)}")
    if one.timeout:
        lines.append(f"\t\ttimeout {duration_text(one.timeout)}")
    if one.counter:
        lines.append("\t\tcounter")
    if one.elements:
        elements = ",\n\t\t\t".join(element_text(key, data) for key, data in one.elements.items())
        lines.append(f"\t\telements = {{ {elements} }}")
    return "\n".join([*lines, "\t}"])


def element_text(key: ast.ElementKey, data: ast.ElementData) -> str:
    """Return an element such as `10.0.0.1 . tcp . 80 : goto send-c2`."""
    text = " . ".join(_atom_text(atom) for atom in key)
    if data is None:
        return text
    if isinstance(data, tuple):
        return f"{text} : {_address_text(data[0])} . {data[1]:d}"
    return f"{text} : {_expression_text(data, None)}"


def rule_text(rule: ast.Rule, family: Family) -> str:
    """Return a rule on one line."""
    words = [_expression_text(expression, family) for expression in rule.expressions]
    if rule.comment:
        if not _COMMENT.fullmatch(rule.comment):
            raise ast.Unprintable(f"comment {rule.comment!r}")
        words.append(f'comment "{rule.comment}"')
    return " ".join(words)


def key_text(key: ast.Key, family: Family) -> str:
    """Return a key such as `ip daddr . meta l4proto . th dport`."""
    return " . ".join(_key_part_text(part, family) for part in key)


def _key_part_text(part: ast.KeyPart, family: Family) -> str:
    if isinstance(part, ast.Slot):
        return f"numgen random mod {part.mod:d}"
    if isinstance(part, ast.HashedFields):
        if not part.fields:
            raise ast.Unprintable("a hash of unknown fields")
        seed = "" if part.seed is None else f" seed 0x{part.seed:x}"
        offset = f" offset {part.offset:d}" if part.offset else ""
        return f"jhash {key_text(part.fields, family)} mod {part.mod:d}{seed}{offset}"
    return _field_text(part, family)


def name_text(name: str) -> str:
    """Return the name of a table, chain, or set if nft can read it without quotes. Raises Unprintable."""
    if len(name) > NAME_LIMIT or not _NAME.fullmatch(name):
        raise ast.Unprintable(f"{name!r} is not a valid nft name")
    return name


def duration_text(seconds: int) -> str:
    """Return seconds as nft writes them: `3h`, `1d10m5s`."""
    text = ""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def _expression_text(one: ast.Expression, family: Family) -> str:
    """Print comparisons of a key, then other matches and statements by type."""
    match one:
        case ast.Compare(field, values, negate):
            return f"{_compared_field(field, values, family)} {'!= ' if negate else ''}{_values_text(field, values)}"
        case ast.PortRange(field, first, last, negate):
            return f"{_field_text(field, family)} {'!= ' if negate else ''}{first:d}-{last:d}"
        case ast.InSet(key, name, negate):
            return f"{key_text(key, family)} {'!= ' if negate else ''}@{name_text(name)}"
        case ast.VerdictMap(key, name):
            return f"{key_text(key, family)} vmap @{name_text(name)}"
        case ast.DnatMap(key, name):
            return f"dnat {_family_word(family)} to {key_text(key, family)} map @{name_text(name)}"
        case ast.UpdateSet(key, name):
            return f"update @{name_text(name)} {{ {key_text(key, family)} }}"
        case ast.RandomGoto(chains):
            targets = ", ".join(f"{slot} : goto {name_text(chain)}" for slot, chain in enumerate(chains))
            return f"numgen random mod {len(chains)} vmap {{ {targets} }}"
    return _match_text(one) or _statement_text(one, family)


def _match_text(one: ast.Expression) -> str:
    match one:
        case ast.IsLocal(field, negate):
            if field not in (ast.Field.SADDR, ast.Field.DADDR):
                raise ast.Unprintable(f"fib of {field.value}")
            return f"fib {field.value} type {'!= ' if negate else ''}local"
        case ast.CtState(states, negate):
            return f"ct state {'! ' if negate else ''}{','.join(map(_word_text, states))}"
        case ast.CtStatus(bits, negate):
            return f"ct status {'! ' if negate else ''}{','.join(map(_word_text, bits))}"
        case ast.TcpReset():
            return "tcp flags rst"
        case ast.MarkIs(value, mask, negate):
            masked = "" if mask == 0xFFFFFFFF else f"& 0x{mask:08x} "
            return f"meta mark {masked}{'!=' if negate else '=='} 0x{value:08x}"
    return ""


def _statement_text(one: ast.Expression, family: Family) -> str:
    match one:
        case ast.Jump(chain):
            return f"jump {name_text(chain)}"
        case ast.Goto(chain):
            return f"goto {name_text(chain)}"
        case ast.Return():
            return "return"
        case ast.Accept():
            return "accept"
        case ast.DropPacket():
            return "drop"
        case ast.RejectPacket(kind):
            return _reject_text(kind, family)
        case ast.MarkOr(bits):
            return f"meta mark set meta mark | 0x{bits:08x}"
        case ast.MarkXor(bits):
            return f"meta mark set meta mark ^ 0x{bits:08x}"
        case ast.Masquerade(fully_random):
            return "masquerade fully-random" if fully_random else "masquerade"
        case ast.Snat(first, last, fully_random):
            target = "-".join(map(_address_text, dict.fromkeys((first, last))))
            return f"snat to {target}{' fully-random' if fully_random else ''}"
        case ast.Dnat(address, port):
            return f"dnat to {_target_text(address, port)}"
        case ast.Counter():
            return "counter"
    raise ast.Unprintable(f"{type(one).__name__} is not supported by nft")


def _reject_text(kind: str, family: Family) -> str:
    if kind == "port-unreachable":
        return "reject"
    if kind == "tcp reset":
        return "reject with tcp reset"
    icmp = {IPFamily.IPV4: "icmp", IPFamily.IPV6: "icmpv6", None: "icmpx"}[family]
    return f"reject with {icmp} {_word_text(kind)}"


def _target_text(address: str, port: int | None) -> str:
    target = _address_text(address)
    if port is None:
        return target
    return f"[{target}]:{port:d}" if ":" in target else f"{target}:{port:d}"


def _hook_text(hook: ast.Hook) -> str:
    if hook.policy not in ("accept", "drop"):
        raise ast.Unprintable(f"policy {hook.policy!r}")
    where = f"type {_word_text(hook.type)} hook {_word_text(hook.hook)}"
    return f"{where} priority {priority_text(hook.priority, hook.hook)}; policy {hook.policy};"


def priority_text(priority: int, hook: str) -> str:
    """Return a priority as nft lists it: by name if one is within ten, and only in the hooks that have the name."""
    for name, value in _PRIORITIES.items():
        if _ONLY_IN.get(name, hook) != hook or abs(priority - value) > 10:
            continue
        offset = priority - value
        return name if not offset else f"{name} {'-' if offset < 0 else '+'} {abs(offset)}"
    return f"{priority:d}"


def priority_number(words: Sequence[str]) -> int:
    """Parse the words of a priority, the inverse of `priority_text`. Raises ValueError, KeyError, or IndexError."""
    if words[0].lstrip("-").isdigit():
        return int(words[0])
    base = _PRIORITIES[words[0]]
    return base + int("".join(words[1:3])) if len(words) > 1 else base


def _field_text(field: ast.Field, family: Family) -> str:
    if field in (ast.Field.SADDR, ast.Field.DADDR):
        if family is None:
            raise ast.Unprintable("an address in an inet table needs its family")
        return f"{family.nft} {field.value}"
    if field.name.startswith("ORIG_"):
        raise ast.Unprintable(f"{field.value} is not supported here")
    return str(field.value)


def _compared_field(field: ast.Field, values: tuple[ast.Atom, ...], family: Family) -> str:
    if family is None and field in (ast.Field.SADDR, ast.Field.DADDR):
        families = {family_of(str(value)) for value in values}
        return _field_text(field, families.pop() if len(families) == 1 else None)
    return _field_text(field, family)


def _values_text(field: ast.Field, values: Iterable[ast.Atom]) -> str:
    quoted = field in (ast.Field.IIFNAME, ast.Field.OIFNAME)
    texts = [_interface_text(value) if quoted else _atom_text(value) for value in values]
    if not texts:
        raise ast.Unprintable("a comparison with no value")
    return texts[0] if len(texts) == 1 else f"{{ {', '.join(texts)} }}"


def _atom_text(atom: ast.Atom) -> str:
    """Print a number, an address or network, or a protocol."""
    if isinstance(atom, int):
        return f"{atom:d}"
    if atom in _PROTOCOLS or (_NETWORK.fullmatch(atom) and ("." in atom or ":" in atom)):
        return atom
    raise ast.Unprintable(f"{atom!r} is not an address, network, or protocol")


def _interface_text(atom: ast.Atom) -> str:
    if not isinstance(atom, str) or not _INTERFACE.fullmatch(atom):
        raise ast.Unprintable(f"{atom!r} is not a valid interface name for nft")
    return f'"{atom}"'


_PROTOCOLS = frozenset({"tcp", "udp", "sctp", "icmp", "ipv6-icmp", "udplite", "dccp", "esp", "ah", "comp"})


def _address_text(address: str) -> str:
    if not _NETWORK.fullmatch(address):
        raise ast.Unprintable(f"{address!r} is not an address")
    return address


def _word_text(word: str) -> str:
    if not _WORD.fullmatch(word):
        raise ast.Unprintable(f"{word!r} is not an nft keyword")
    return word


def _family_word(family: Family) -> str:
    return "inet" if family is None else family.nft
