"""Short descriptions of rules for traces: close to nft's syntax, and the same for both tools.

They are for display only. The `print` modules of `nft` and `xtables` produce text for the kernel tools.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narthex.model import join_port
from narthex.netfilter import ast

_FIELDS = {
    ast.Field.SADDR: "source",
    ast.Field.DADDR: "destination",
    ast.Field.L4PROTO: "protocol",
    ast.Field.SPORT: "source port",
    ast.Field.DPORT: "port",
    ast.Field.IIFNAME: "in",
    ast.Field.OIFNAME: "out",
    ast.Field.NFPROTO: "family",
    ast.Field.ORIG_SADDR: "original source",
    ast.Field.ORIG_DADDR: "original destination",
    ast.Field.ORIG_SPORT: "original source port",
    ast.Field.ORIG_DPORT: "original port",
}


def one_of(number: int, thing: str) -> str:
    """Return `one of 3 endpoints`, or `the only endpoint`."""
    return f"the only {thing}" if number == 1 else f"one of {number} {thing}s"


def describe_rule(rule: ast.Rule) -> str:
    """Describe a rule on one line: its matches, then its statements. The comment is not included."""
    return ", ".join(text for text in map(describe, rule.expressions) if text) or "every packet"


def describe(expression: ast.Expression) -> str:
    """Describe one expression. Empty for an expression without any effect."""
    return _PRINTERS[type(expression)](expression)


def describe_key(key: ast.Key) -> str:
    """Describe the parts of a key."""
    return " . ".join(map(_key_part, key))


def _key_part(part: ast.KeyPart) -> str:
    if isinstance(part, ast.Slot):
        return f"random of {part.mod}"
    return _hashed(part) if isinstance(part, ast.HashedFields) else _FIELDS[part]


def _hashed(part: ast.HashedFields) -> str:
    return f"hash of {describe_key(part.fields) or 'the connection'} of {part.mod}"


def describe_element(name: str, key: tuple[ast.Atom, ...], data: ast.Verdict | tuple[str, int] | None) -> str:
    """Describe an element of a named set or map."""
    text = f"{name} {{ {' . '.join(map(str, key))}"
    if isinstance(data, tuple):
        text += f" : {join_port(*data)}"
    elif data is not None:
        text += f" : {describe(data)}"
    return text + " }"


def _values(values: tuple[ast.Atom, ...]) -> str:
    shown = ", ".join(map(str, values[:4]))
    return f"{shown} and {len(values) - 4} more" if len(values) > 4 else shown


def _not(negate: bool) -> str:
    return "not " if negate else ""


def _mark(expression: ast.MarkIs) -> str:
    sign = "!=" if expression.negate else "="
    return f"mark & {expression.mask:#x} {sign} {expression.value:#x}"


def _dnat(expression: ast.Dnat) -> str:
    to = expression.address if expression.port is None else join_port(expression.address, expression.port)
    return f"dnat to {to}"


def _by_ipvs(expression: ast.IpvsMatch) -> str:
    properties = [
        f"{name} {value}"
        for name, value in zip(
            ("address", "protocol", "port"), (expression.address, expression.protocol, expression.port), strict=True
        )
        if value is not None
    ]
    server = f" for the virtual server with {', '.join(properties)}" if properties else ""
    return f"{_not(expression.negate)}forwarded by IPVS{server}"


def _any_of(e: ast.AnyOf) -> str:
    count = len(e.alternatives)
    shown = [" and ".join(map(describe, each)) for each in e.alternatives[:4]]
    text = " or ".join([*shown, *([f"{count - 4} more"] if count > 4 else [])])
    return f"{_not(e.negate)}({text})" if e.negate or count > 1 else text


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last}"


def _dnat_range(e: ast.DnatRange) -> str:
    ports = "" if e.first_port is None else f" port {_range(str(e.first_port), str(e.last_port))}"
    return f"dnat to {_range(e.first, e.last)}{ports}"


def _flags(bits: int) -> str:
    return "|".join(name for bit, name in enumerate(ast.TCP_FLAGS) if bits >> bit & 1) or "none"


_PRINTERS: dict[type, Callable[[Any], str]] = {
    ast.Compare: lambda e: f"{_FIELDS[e.field]} {_not(e.negate)}{_values(e.values)}",
    ast.PortRange: lambda e: f"{_FIELDS[e.field]} {_not(e.negate)}{e.first}-{e.last}",
    ast.IsLocal: lambda e: f"{_FIELDS[e.field]} is {_not(e.negate)}a local address",
    ast.CtState: lambda e: f"connection is {_not(e.negate)}{' or '.join(e.states)}",
    ast.CtStatus: lambda e: f"connection has {_not(e.negate)}{' or '.join(e.bits)}",
    ast.TcpReset: lambda _: "TCP reset",
    ast.MarkIs: _mark,
    ast.InSet: lambda e: f"{describe_key(e.key)} {_not(e.negate)}in {e.name}",
    ast.MatchSet: lambda e: f"{','.join(e.sides)} {_not(e.negate)}in {e.name}",
    ast.IpvsMatch: _by_ipvs,
    ast.RandomMatch: lambda e: f"with probability {e.probability}",
    ast.RecentCheck: lambda e: f"source seen by {e.name} within {e.seconds} s",
    ast.AnyOf: _any_of,
    ast.AddressType: lambda e: f"{_FIELDS[e.field]} is {_not(e.negate)}{' or '.join(e.types)}",
    ast.TcpFlags: lambda e: f"TCP flags {_flags(e.mask)} are {_not(e.negate)}{_flags(e.value)}",
    ast.IcmpType: lambda e: f"ICMP type {_not(e.negate)}{_values(e.types)}",
    ast.ConnMarkIs: lambda e: f"connection mark & {e.mask:#x} {'!=' if e.negate else '='} {e.value:#x}",
    ast.CtDirection: lambda e: f"direction {'original' if e.original else 'reply'}",
    ast.EveryNth: lambda e: f"one of {e.every} in turn",
    ast.UndecidableMatch: lambda e: e.text,
    ast.OmittedMatch: lambda _: "",
    ast.Assumed: lambda _: "",
    ast.SetMark: lambda e: f"set {'connection ' if e.connection else ''}mark & {e.mask:#x} to {e.value:#x}",
    ast.CopyMark: lambda e: (
        "save the mark to the connection" if e.to_connection else "restore the mark from the connection"
    ),
    ast.NoTrack: lambda _: "do not track",
    ast.IgnoredStatement: lambda e: e.text,
    ast.Snat: lambda e: f"snat to {_range(e.first, e.last)}",
    ast.DnatRange: _dnat_range,
    ast.RedirectRange: lambda e: "redirect to this machine" + (f"'s ports {e.first}-{e.last}" if e.first else ""),
    ast.InlineVerdictMap: lambda e: f"{one_of(len(e.arms), 'verdict')} by the first match",
    ast.RandomMap: lambda e: _hashed(e.by) if e.by else f"random number below {e.mod}",
    ast.Unknown: lambda e: e.text,
    ast.Undecoded: lambda e: e.text,
    ast.RuleGap: lambda e: e.text,
    ast.Jump: lambda e: f"jump {e.chain}",
    ast.Goto: lambda e: f"goto {e.chain}",
    ast.Return: lambda _: "return",
    ast.Accept: lambda _: "accept",
    ast.DropPacket: lambda _: "drop",
    ast.RejectPacket: lambda e: f"reject with {e.kind}",
    ast.MarkOr: lambda e: f"set mark bits {e.bits:#x}",
    ast.MarkXor: lambda e: f"toggle mark bits {e.bits:#x}",
    ast.Masquerade: lambda _: "masquerade",
    ast.Dnat: _dnat,
    ast.Redirect: lambda e: f"redirect to this machine's port {e.port}",
    ast.DnatMap: lambda e: f"dnat to {e.map} [ {describe_key(e.key)} ]",
    ast.VerdictMap: lambda e: f"do {e.map} [ {describe_key(e.key)} ]",
    ast.RandomGoto: lambda e: f"goto {one_of(len(e.chains), 'chain')}",
    ast.UpdateSet: lambda e: f"remember {describe_key(e.key)} in {e.set}",
    ast.RecentSet: lambda e: f"remember source in {e.name}",
    ast.Counter: lambda _: "",
}
