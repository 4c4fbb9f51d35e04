"""Printer for the text of iptables-save, which iptables-restore reads.

Every value is checked here, whatever its origin. A chain, interface, address, or list name that is not a single word raises
`Unprintable`, and comments are quoted. No name can therefore become syntax.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from narthex.model import IPFamily, join_port
from narthex.netfilter import ast
from narthex.netfilter.lazy import LazyRules
from narthex.netfilter.xtables.values import TABLES, builtin_chains, reject_words

MAX_COMMENT = 255
"""Longest comment of xt_comment in bytes."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]{0,27}", re.ASCII)
_NAMES = re.compile(rf"{_NAME.pattern}(?:\n{_NAME.pattern})*", re.ASCII)
_LIST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,198}", re.ASCII)
_INTERFACE = re.compile(r"[A-Za-z0-9_.:@][A-Za-z0-9_.:@-]{0,14}", re.ASCII)
_NETWORK = re.compile(r"[0-9A-Fa-f:.]+(?:/\d{1,3})?", re.ASCII)
_SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,30}", re.ASCII)
_PROTOCOL = re.compile(r"[a-z0-9][a-z0-9-]{0,15}", re.ASCII)
_PROBABILITY = re.compile(r"[01]\.\d{1,11}", re.ASCII)
_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_ESCAPED = re.compile(r"""(["'\\])""")

_MAX_DIMENSIONS = 6
"""Largest number of dimensions of an ipset (IPSET_DIM_MAX without the reserved one)."""
_CT_STATES = {"new", "established", "related", "invalid", "untracked"}
_CT_BITS = {"dnat", "snat"}


def quoted(text: str) -> str:
    """Quote a word as iptables-save does. Raises Unprintable for control characters, which quotes do not escape."""
    if not text.isprintable():
        raise ast.Unprintable(f"{text!r} contains control characters")
    return text if _BARE.fullmatch(text) else '"' + _ESCAPED.sub(r"\\\1", text) + '"'


def chain_word(name: str) -> str:
    """Return a chain name: at most 28 characters, without anything that reads as an option or second word. Raises Unprintable."""
    return _word(_NAME, name, "chain name")


def chain_words(names: Sequence[str]) -> Sequence[str]:
    """Return chain names after checking them all with one regular expression. Raises Unprintable."""
    lines = "\n".join(names)
    # A name with a line break would count as two.
    if names and (_NAMES.fullmatch(lines) is None or lines.count("\n") != len(names) - 1):
        for name in names:
            chain_word(name)
    return names


def save_text(ruleset: ast.Ruleset) -> str:
    """Return what iptables-save would print for these tables, without counters. iptables-restore reads it.

    Raises Unprintable for an expression that iptables does not support, such as a set.
    """
    lines: list[str] = []
    for table in ruleset.tables:
        lines += _table_lines(table)
    return "".join(line + "\n" for line in lines)


def _table_lines(table: ast.Table) -> Iterator[str]:
    if table.name not in TABLES:
        raise ast.Unprintable(f"iptables has no table {table.name!r}")
    if table.sets or table.family is None:
        raise ast.Unprintable(f"table {table.name} has sets or contains both families, which only nftables supports")
    yield f"*{table.name}"
    for chain in table.chains.values():
        yield f":{chain_word(chain.name)} {_policy(table.name, chain)} [0:0]"
    for chain in table.chains.values():
        yield from chain_lines(chain.name, chain.rules, table.family)
    yield "COMMIT"


def _policy(table: str, chain: ast.Chain) -> str:
    if (chain.name in builtin_chains(table)) is not (chain.hook is not None):
        raise ast.Unprintable(f"{chain.name} in table {table}: only built-in chains of iptables have a hook")
    return chain.hook.policy.upper() if chain.hook else "-"


def chain_lines(chain: str, rules: Iterable[ast.Rule], family: IPFamily) -> list[str]:
    """Return the `-A` lines of a chain. Raises Unprintable."""
    word = chain_word(chain)
    if isinstance(rules, LazyRules):
        return rules.lines(word, family)
    return [f"-A {word}{rule_text(rule, family)}" for rule in rules]


def rule_text(rule: ast.Rule, family: IPFamily) -> str:
    """Return the part of a rule after the chain name, with a leading space; empty for a rule without expressions.

    Address, interface, and protocol come first, then the comment, as in kube-proxy's rules, then all others in order.
    """
    words: list[str] = []
    early = True
    protocol = ""
    for position, expression in enumerate(rule.expressions):
        kind = type(expression)
        basic = kind is ast.Compare and expression.field in _BASIC  # type: ignore[union-attr]
        if early and not basic:
            early = False
            words += _comment(rule.comment)
        elif basic and not early:
            raise ast.Unprintable("iptables reads address, interface and protocol before anything else")
        if basic and expression.field is ast.Field.L4PROTO:  # type: ignore[union-attr]
            protocol = str(expression.values[0])  # type: ignore[union-attr]
        if kind is ast.CtStatus and position and type(rule.expressions[position - 1]) is ast.CtState:
            words[-1] += _joined_status(rule.expressions[position - 1], expression)
            continue
        printer = _PRINTERS.get(kind)
        if printer is None:
            raise ast.Unprintable(f"iptables has no {kind.__name__}")
        words.append(printer(expression, family, protocol))
    if early:
        words += _comment(rule.comment)
    return "".join(f" {word}" for word in words if word)


def _comment(comment: str) -> list[str]:
    if not comment:
        return []
    word = quoted(comment)
    if len(comment.encode()) > MAX_COMMENT:
        raise ast.Unprintable(f"a comment of {len(comment.encode())} bytes: iptables keeps {MAX_COMMENT}")
    return [f"-m comment --comment {word}"]


def _word(shape: re.Pattern[str], text: str, what: str) -> str:
    if not shape.fullmatch(text):
        raise ast.Unprintable(f"{text!r} is not a valid {what} for iptables")
    return text


def _not(negate: bool) -> str:
    return "! " if negate else ""


def _single(values: tuple[ast.Atom, ...]) -> ast.Atom:
    if len(values) != 1:
        raise ast.Unprintable("iptables compares this with one value only")
    return values[0]


def comment_words(comment: str) -> str:
    """Return the options for a comment with a leading space; empty for no comment. Raises Unprintable."""
    return "".join(f" {word}" for word in _comment(comment)) if comment else ""


def network_word(value: ast.Atom, family: IPFamily) -> str:
    """Return an address or network with its prefix length. Raises Unprintable."""
    text = _word(_NETWORK, str(value), "address or network")
    return text if "/" in text else f"{text}/{family.host_bits}"


def _interface(value: ast.Atom, _family: IPFamily) -> str:
    text = str(value)
    if text.endswith("*"):
        return _word(_INTERFACE, text[:-1], "interface prefix") + "+"
    return _word(_INTERFACE, text, "interface name")


def _protocol(value: ast.Atom, _family: IPFamily) -> str:
    return _word(_PROTOCOL, str(value), "protocol")


_BASIC: dict[ast.Field, tuple[str, Callable[[ast.Atom, IPFamily], str]]] = {
    ast.Field.SADDR: ("-s", network_word),
    ast.Field.DADDR: ("-d", network_word),
    ast.Field.IIFNAME: ("-i", _interface),
    ast.Field.OIFNAME: ("-o", _interface),
    ast.Field.L4PROTO: ("-p", _protocol),
}
_PORT_OPTION = {ast.Field.SPORT: "--sport", ast.Field.DPORT: "--dport"}


def _port(value: ast.Atom) -> int:
    if not isinstance(value, int) or not 0 <= value <= 65535:
        raise ast.Unprintable(f"{value!r} is not a port")
    return value


def _compare(e: ast.Compare, family: IPFamily, protocol: str) -> str:
    if e.field in _BASIC:
        option, text = _BASIC[e.field]
        return f"{_not(e.negate)}{option} {text(_single(e.values), family)}"
    if e.field not in _PORT_OPTION:
        raise ast.Unprintable(f"{e.field.value} is not supported for iptables")
    option = _PORT_OPTION[e.field]
    if len(e.values) > 1:
        ports = ",".join(str(_port(value)) for value in e.values)
        return f"-m multiport {_not(e.negate)}{option}s {ports}"
    return f"-m {_with_ports(protocol)} {_not(e.negate)}{option} {_port(_single(e.values))}"


def _with_ports(protocol: str) -> str:
    if protocol not in ("tcp", "udp", "sctp", "dccp", "udplite"):
        raise ast.Unprintable(
            f"protocol {protocol!r} has no ports in iptables; a match of a protocol with ports must come first"
        )
    return protocol


def _port_range(e: ast.PortRange, _family: IPFamily, protocol: str) -> str:
    ports = f"{_port(e.first)}:{_port(e.last)}"
    return f"-m {_with_ports(protocol)} {_not(e.negate)}{_PORT_OPTION[e.field]} {ports}"


def _is_local(e: ast.IsLocal, _family: IPFamily, _protocol: str) -> str:
    side = "src" if e.field is ast.Field.SADDR else "dst"
    return f"-m addrtype {_not(e.negate)}--{side}-type LOCAL"


def _states(words: tuple[str, ...], known: set[str]) -> str:
    if not words or not known.issuperset(words):
        raise ast.Unprintable(f"{', '.join(words)}: not connection states of iptables")
    return ",".join(words).upper()


def _ct_state(e: ast.CtState, _family: IPFamily, _protocol: str) -> str:
    return f"-m conntrack {_not(e.negate)}--ctstate {_states(e.states, _CT_STATES)}"


def _ct_status(e: ast.CtStatus, _family: IPFamily, _protocol: str) -> str:
    return f"-m conntrack {_not(e.negate)}--ctstate {_states(e.bits, _CT_BITS)}"


def _joined_status(state: ast.Expression, status: ast.Expression) -> str:
    """Print a state and a status. iptables counts DNAT and SNAT as states, so two negations become one list."""
    assert isinstance(state, ast.CtState) and isinstance(status, ast.CtStatus)
    if state.negate and status.negate:
        return "," + _states(status.bits, _CT_BITS)
    return " " + _ct_status(status, IPFamily.IPV4, "")


def _mark_is(e: ast.MarkIs, _family: IPFamily, _protocol: str) -> str:
    mask = "" if e.mask == 0xFFFFFFFF else f"/{e.mask:#x}"
    return f"-m mark {_not(e.negate)}--mark {e.value:#x}{mask}"


def _match_set(e: ast.MatchSet, _family: IPFamily, _protocol: str) -> str:
    if not 0 < len(e.sides) <= _MAX_DIMENSIONS or not {"src", "dst"}.issuperset(e.sides):
        raise ast.Unprintable(f"{','.join(e.sides)!r} is not a list of src and dst")
    return f"-m set {_not(e.negate)}--match-set {_word(_SET_NAME, e.name, 'set name')} {','.join(e.sides)}"


def _by_ipvs(e: ast.IpvsMatch, _family: IPFamily, _protocol: str) -> str:
    words = []
    if e.address is not None:
        words.append(f"--vaddr {_word(_NETWORK, e.address, 'address')}")
    if e.protocol is not None:
        words.append(f"--vproto {_word(_PROTOCOL, e.protocol, 'protocol')}")
    if e.port is not None:
        words.append(f"--vport {_port(e.port)}")
    if words and e.negate:
        raise ast.Unprintable("the properties of a virtual server cannot be negated together")
    return " ".join(("-m ipvs", *(words or [f"{_not(e.negate)}--ipvs"])))


def _random(e: ast.RandomMatch, _family: IPFamily, _protocol: str) -> str:
    return f"-m statistic --mode random --probability {_word(_PROBABILITY, e.probability, 'probability')}"


def _source_list(name: str, family: IPFamily) -> str:
    mask = "255.255.255.255" if family is IPFamily.IPV4 else "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
    return f"--name {_word(_LIST_NAME, name, 'list name')} --mask {mask} --rsource"


def _recent(e: ast.RecentCheck, family: IPFamily, _protocol: str) -> str:
    return f"-m recent --rcheck --seconds {int(e.seconds)} --reap {_source_list(e.name, family)}"


def _recent_set(e: ast.RecentSet, family: IPFamily, _protocol: str) -> str:
    return f"-m recent --set {_source_list(e.name, family)}"


def _reject(e: ast.RejectPacket, family: IPFamily, _protocol: str) -> str:
    words = reject_words(family)
    if e.kind not in words:
        raise ast.Unprintable(f"iptables has no reject type {e.kind!r} for {family.label}")
    return f"-j REJECT --reject-with {words[e.kind]}"


def _dnat(e: ast.Dnat, _family: IPFamily, protocol: str) -> str:
    to = destination_word(e.address, e.port)
    return (
        f"-j DNAT --to-destination {to}"
        if e.port is None
        else f"-m {_with_ports(protocol)} -j DNAT --to-destination {to}"
    )


def host_words(address: str, port: int, family: IPFamily) -> tuple[str, str]:
    """Return a host as a source, and with a port as a destination. Raises Unprintable."""
    if not _NETWORK.fullmatch(address) or "/" in address or not 0 <= port <= 65535:
        return network_word(address, family), destination_word(address, port)
    to = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"{address}/{family.host_bits}", to


def destination_word(address: str, port: int | None) -> str:
    """Return the destination of a NAT rule. Raises Unprintable."""
    _word(_NETWORK, address, "address")
    if "/" in address:
        raise ast.Unprintable(f"{address}: a DNAT target is a single address")
    return address if port is None else join_port(address, _port(port))


def _redirect(e: ast.Redirect, _family: IPFamily, protocol: str) -> str:
    _with_ports(protocol)
    return f"-j REDIRECT --to-ports {_port(e.port)}"


def _unknown(e: ast.Unknown | ast.UndecidableMatch | ast.IgnoredStatement, _family: IPFamily, _protocol: str) -> str:
    if not e.text.isprintable():
        raise ast.Unprintable(f"{e.text!r} contains control characters")
    return e.text


_PRINTERS: dict[type, Callable[[Any, IPFamily, str], str]] = {
    ast.Compare: _compare,
    ast.PortRange: _port_range,
    ast.IsLocal: _is_local,
    ast.CtState: _ct_state,
    ast.CtStatus: _ct_status,
    ast.MarkIs: _mark_is,
    ast.MatchSet: _match_set,
    ast.IpvsMatch: _by_ipvs,
    ast.RandomMatch: _random,
    ast.RecentCheck: _recent,
    ast.RecentSet: _recent_set,
    ast.Unknown: _unknown,
    ast.UndecidableMatch: _unknown,
    ast.IgnoredStatement: _unknown,
    ast.Counter: lambda _e, _family, _protocol: "",
    ast.Jump: lambda e, _family, _protocol: f"-j {chain_word(e.chain)}",
    ast.Goto: lambda e, _family, _protocol: f"-g {chain_word(e.chain)}",
    ast.Return: lambda _e, _family, _protocol: "-j RETURN",
    ast.Accept: lambda _e, _family, _protocol: "-j ACCEPT",
    ast.DropPacket: lambda _e, _family, _protocol: "-j DROP",
    ast.RejectPacket: _reject,
    ast.MarkOr: lambda e, _family, _protocol: f"-j MARK --set-xmark {e.bits:#x}/{e.bits:#x}",
    ast.MarkXor: lambda e, _family, _protocol: f"-j MARK --set-xmark {e.bits:#x}/0x0",
    ast.Masquerade: lambda e, _family, _protocol: "-j MASQUERADE" + (" --random-fully" if e.fully_random else ""),
    ast.Dnat: _dnat,
    ast.Redirect: _redirect,
}
