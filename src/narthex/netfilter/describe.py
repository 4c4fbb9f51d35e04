"""Rules as people read them in a trace: short, close to nft's words, the same for both tools.

This is for reading only; what a kernel tool reads is printed by `nft` and `xtables`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narthex.model.net import join_port
from narthex.netfilter.ast import (
    Accept,
    AddressType,
    AnyOf,
    Atom,
    Compare,
    ConnMarkIs,
    CopyMark,
    Counter,
    CtDirection,
    CtState,
    CtStatus,
    Dnat,
    DnatMap,
    DnatRange,
    DropPacket,
    EveryNth,
    Expression,
    Field,
    Goto,
    IcmpType,
    IgnoredStatement,
    InlineVerdictMap,
    InSet,
    IpvsMatch,
    IsLocal,
    Jump,
    Key,
    MarkIs,
    MarkOr,
    MarkXor,
    Masquerade,
    MatchSet,
    NoTrack,
    OmittedMatch,
    PortRange,
    RandomGoto,
    RandomMap,
    RandomMatch,
    RecentCheck,
    RecentSet,
    Redirect,
    RedirectRange,
    RejectPacket,
    Return,
    Rule,
    SetMark,
    Slot,
    Snat,
    TcpFlags,
    TcpReset,
    UndecidableMatch,
    Unknown,
    UpdateSet,
    Verdict,
    VerdictMap,
)

_FIELDS = {
    Field.SADDR: "source",
    Field.DADDR: "destination",
    Field.L4PROTO: "protocol",
    Field.SPORT: "source port",
    Field.DPORT: "port",
    Field.IIFNAME: "in",
    Field.OIFNAME: "out",
    Field.NFPROTO: "family",
    Field.ORIG_SADDR: "original source",
    Field.ORIG_DADDR: "original destination",
    Field.ORIG_SPORT: "original source port",
    Field.ORIG_DPORT: "original port",
}


def describe_rule(rule: Rule) -> str:
    """The rule on one line: its matches, then what it does. The comment is left to the caller."""
    return ", ".join(text for text in map(describe, rule.expressions) if text) or "every packet"


def describe(expression: Expression) -> str:
    """One expression; empty for what changes nothing."""
    return _PRINTERS[type(expression)](expression)


def describe_key(key: Key) -> str:
    """The parts that a key is built of."""
    return " . ".join(f"random of {part.mod}" if isinstance(part, Slot) else _FIELDS[part] for part in key)


def describe_element(name: str, key: tuple[Atom, ...], data: Verdict | tuple[str, int] | None) -> str:
    """An element of a named set or map, as it was met."""
    text = f"{name} {{ {' . '.join(map(str, key))}"
    if isinstance(data, tuple):
        text += f" : {join_port(*data)}"
    elif data is not None:
        text += f" : {describe(data)}"
    return text + " }"


def _values(values: tuple[Atom, ...]) -> str:
    shown = ", ".join(map(str, values[:4]))
    return f"{shown} and {len(values) - 4} more" if len(values) > 4 else shown


def _not(negate: bool) -> str:
    return "not " if negate else ""


def _mark(expression: MarkIs) -> str:
    sign = "!=" if expression.negate else "="
    return f"mark & {expression.mask:#x} {sign} {expression.value:#x}"


def _dnat(expression: Dnat) -> str:
    to = expression.address if expression.port is None else join_port(expression.address, expression.port)
    return f"dnat to {to}"


def _by_ipvs(expression: IpvsMatch) -> str:
    asked = [
        f"{name} {value}"
        for name, value in zip(
            ("address", "protocol", "port"), (expression.address, expression.protocol, expression.port), strict=True
        )
        if value is not None
    ]
    server = f" for the virtual server with {', '.join(asked)}" if asked else ""
    return f"{_not(expression.negate)}sent on by IPVS{server}"


def _any_of(e: AnyOf) -> str:
    count = len(e.alternatives)
    shown = [" and ".join(map(describe, each)) for each in e.alternatives[:4]]
    text = " or ".join([*shown, *([f"{count - 4} more"] if count > 4 else [])])
    return f"{_not(e.negate)}({text})" if e.negate or count > 1 else text


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last}"


def _dnat_range(e: DnatRange) -> str:
    ports = "" if e.first_port is None else f" port {_range(str(e.first_port), str(e.last_port))}"
    return f"dnat to {_range(e.first, e.last)}{ports}"


def _flags(bits: int) -> str:
    return "|".join(name for bit, name in enumerate(_FLAGS) if bits >> bit & 1) or "none"


_FLAGS = ("fin", "syn", "rst", "psh", "ack", "urg", "ece", "cwr")

_PRINTERS: dict[type, Callable[[Any], str]] = {
    Compare: lambda e: f"{_FIELDS[e.field]} {_not(e.negate)}{_values(e.values)}",
    PortRange: lambda e: f"{_FIELDS[e.field]} {_not(e.negate)}{e.first}-{e.last}",
    IsLocal: lambda e: f"{_FIELDS[e.field]} is {_not(e.negate)}an own address",
    CtState: lambda e: f"connection is {_not(e.negate)}{' or '.join(e.states)}",
    CtStatus: lambda e: f"connection has {_not(e.negate)}{' or '.join(e.bits)}",
    TcpReset: lambda _: "TCP reset",
    MarkIs: _mark,
    InSet: lambda e: f"{describe_key(e.key)} {_not(e.negate)}in {e.name}",
    MatchSet: lambda e: f"{','.join(e.sides)} {_not(e.negate)}in {e.name}",
    IpvsMatch: _by_ipvs,
    RandomMatch: lambda e: f"with probability {e.probability}",
    RecentCheck: lambda e: f"source seen by {e.name} within {e.seconds} s",
    AnyOf: _any_of,
    AddressType: lambda e: f"{_FIELDS[e.field]} is {_not(e.negate)}{' or '.join(e.types)}",
    TcpFlags: lambda e: f"TCP flags {_flags(e.mask)} are {_not(e.negate)}{_flags(e.value)}",
    IcmpType: lambda e: f"ICMP type {_not(e.negate)}{_values(e.types)}",
    ConnMarkIs: lambda e: f"connection mark & {e.mask:#x} {'!=' if e.negate else '='} {e.value:#x}",
    CtDirection: lambda e: f"direction {'original' if e.original else 'reply'}",
    EveryNth: lambda e: f"one of {e.every} in turn",
    UndecidableMatch: lambda e: e.text,
    OmittedMatch: lambda _: "",
    SetMark: lambda e: f"set {'connection ' if e.connection else ''}mark & {e.mask:#x} to {e.value:#x}",
    CopyMark: lambda e: "save the mark to the connection" if e.to_connection else "take the mark from the connection",
    NoTrack: lambda _: "do not track",
    IgnoredStatement: lambda e: e.text,
    Snat: lambda e: f"snat to {_range(e.first, e.last)}",
    DnatRange: _dnat_range,
    RedirectRange: lambda e: "redirect to this machine" + (f"'s ports {e.first}-{e.last}" if e.first else ""),
    InlineVerdictMap: lambda e: f"one of {len(e.arms)} ways by what the packet is",
    RandomMap: lambda e: f"draw one of {e.mod}",
    Unknown: lambda e: e.text,
    Jump: lambda e: f"jump {e.chain}",
    Goto: lambda e: f"goto {e.chain}",
    Return: lambda _: "return",
    Accept: lambda _: "accept",
    DropPacket: lambda _: "drop",
    RejectPacket: lambda e: f"reject with {e.kind}",
    MarkOr: lambda e: f"set mark bits {e.bits:#x}",
    MarkXor: lambda e: f"turn mark bits {e.bits:#x}",
    Masquerade: lambda _: "masquerade",
    Dnat: _dnat,
    Redirect: lambda e: f"redirect to this machine's port {e.port}",
    DnatMap: lambda e: f"dnat to {e.map} [ {describe_key(e.key)} ]",
    VerdictMap: lambda e: f"do {e.map} [ {describe_key(e.key)} ]",
    RandomGoto: lambda e: f"goto one of {len(e.chains)} chains",
    UpdateSet: lambda e: f"remember {describe_key(e.key)} in {e.set}",
    RecentSet: lambda e: f"remember source in {e.name}",
    Counter: lambda _: "",
}
