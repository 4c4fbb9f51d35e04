"""iptables targets (`-j …`) to nodes of the AST. A target that no node expresses becomes `Unknown` with its text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from narthex.model import IPFamily, split_port
from narthex.netfilter import ast
from narthex.netfilter.xtables.lexer import NoEquivalentNode, Option, Options, extension_text, only
from narthex.netfilter.xtables.values import destination_range, plain_network, reject_words, value_and_mask

# fmt: off
_EXTENSIONS = frozenset((
    "AUDIT", "CHECKSUM", "CLASSIFY", "CLUSTERIP", "CONNMARK", "CONNSECMARK", "CT", "DNAT", "DNPT", "DSCP", "ECN", "HL",
    "HMARK", "IDLETIMER", "LED", "LOG", "MARK", "MASQUERADE", "NETMAP", "NFLOG", "NFQUEUE", "NOTRACK", "QUEUE", "RATEEST",
    "REDIRECT", "REJECT", "SECMARK", "SET", "SNAT", "SNPT", "SYNPROXY", "TARPIT", "TCPMSS", "TCPOPTSTRIP", "TEE", "TOS",
    "TPROXY", "TRACE", "TTL", "ULOG",
))
"""Targets that are kernel modules. Any other word after `-j` is a chain."""
_IGNORED = frozenset((
    "LOG", "NFLOG", "ULOG", "TRACE", "TCPMSS", "CHECKSUM", "CLASSIFY", "DSCP", "TOS", "TTL", "HL", "ECN", "AUDIT",
    "IDLETIMER", "LED", "TEE", "RATEEST", "SECMARK", "CONNSECMARK", "TCPOPTSTRIP",
))
"""Targets that never affect the path of a packet and continue with the next rule."""
# fmt: on
_VERDICTS: dict[str, ast.Verdict] = {"ACCEPT": ast.Accept(), "DROP": ast.DropPacket(), "RETURN": ast.Return()}


def read_target(flag: str, name: str, options: list[Option], family: IPFamily) -> ast.Expression:
    """Return the node for `-j name …` or `-g name`."""
    try:
        if flag in ("-g", "--goto"):
            return ast.Goto(name)
        if name in _VERDICTS:
            return _VERDICTS[name]
        if name in _IGNORED:
            return ast.IgnoredStatement(extension_text("-j", name, options))
        for reader in _READERS.get(name, ()):
            with contextlib.suppress(NoEquivalentNode, ValueError, KeyError):
                return reader({each.name: each for each in options}, family)
        if name not in _EXTENSIONS and not options:
            return ast.Jump(name)
    except ValueError:
        pass
    return ast.Unknown(extension_text("-j", name, options))


def _reject(options: Options, family: IPFamily) -> ast.Expression:
    only(options, "--reject-with")
    if not options:
        return ast.RejectPacket()
    kinds = {word: kind for kind, word in reject_words(family).items()}
    return ast.RejectPacket(kinds[options["--reject-with"].value])


def _set_mark(options: Options, connection: bool = False) -> ast.Expression:
    """Read `--set-xmark VALUE/MASK` or one of its older forms."""
    only(options, "--set-xmark", "--set-mark", "--and-mark", "--or-mark", "--xor-mark")
    ((name, option),) = options.items()
    value, mask = value_and_mask(option.value)
    if name == "--and-mark":
        return ast.SetMark(0, ~value & 0xFFFFFFFF, connection)
    if name == "--set-mark":
        return ast.SetMark(value, mask | value, connection)
    if name == "--or-mark":
        mask = value
    elif name == "--xor-mark":
        mask = 0
    if not connection and value == mask and name != "--xor-mark":
        return ast.MarkOr(value)
    if not connection and mask == 0:
        return ast.MarkXor(value)
    return ast.SetMark(value, mask, connection)


def _connmark(options: Options, _family: IPFamily) -> ast.Expression:
    for verb, to_connection in (("--save-mark", True), ("--restore-mark", False)):
        if verb in options:
            only(options, verb, "--mask", "--nfmask", "--ctmask")
            both = int(options["--mask"].value, 0) if "--mask" in options else 0xFFFFFFFF
            packet = int(options["--nfmask"].value, 0) if "--nfmask" in options else both
            connection = int(options["--ctmask"].value, 0) if "--ctmask" in options else both
            return ast.CopyMark(True, packet, connection) if to_connection else ast.CopyMark(False, connection, packet)
    return _set_mark(options, connection=True)


def _ct(options: Options, _family: IPFamily) -> ast.Expression:
    if "--notrack" in options:
        return ast.NoTrack()
    raise NoEquivalentNode


def _snat(options: Options, _family: IPFamily) -> ast.Expression:
    only(options, "--to-source", "--random", "--random-fully", "--persistent")
    first, last, *_ = destination_range(options["--to-source"].value)
    if not first:
        raise NoEquivalentNode
    return ast.Snat(first, last, fully_random="--random-fully" in options)


def _dnat(options: Options, family: IPFamily) -> ast.Expression:
    """Read `--to-destination` with one address."""
    only(options, "--to-destination")
    destination = options["--to-destination"].value
    if (family is IPFamily.IPV4 and ":" in destination) or destination.startswith("["):
        return ast.Dnat(*split_port(destination))
    return ast.Dnat(plain_network(destination))


def _dnat_range(options: Options, _family: IPFamily) -> ast.Expression:
    """Read `--to-destination` with ranges, or with `--random` or `--persistent`."""
    only(options, "--to-destination", "--random", "--persistent")
    return ast.DnatRange(*destination_range(options["--to-destination"].value))


def _redirect(options: Options, _family: IPFamily) -> ast.Expression:
    only(options, "--to-ports", "--random", "--random-fully")
    if "--to-ports" not in options:
        return ast.RedirectRange()
    ports = options["--to-ports"].value
    if ports.isdecimal() and len(options) == 1:
        return ast.Redirect(int(ports))
    first, dash, last = ports.partition("-")
    return ast.RedirectRange(int(first), int(last if dash else first))


def _masquerade(options: Options, _family: IPFamily) -> ast.Expression:
    only(options, "--to-ports", "--random", "--random-fully")
    return ast.Masquerade(fully_random="--random-fully" in options)


_READERS: dict[str, tuple[Callable[[Options, IPFamily], ast.Expression], ...]] = {
    "REJECT": (_reject,),
    "MARK": (lambda options, _family: _set_mark(options),),
    "CONNMARK": (_connmark,),
    "CT": (_ct,),
    "NOTRACK": (lambda _options, _family: ast.NoTrack(),),
    "SNAT": (_snat,),
    "DNAT": (_dnat, _dnat_range),
    "REDIRECT": (_redirect,),
    "MASQUERADE": (_masquerade,),
}
"""Readers to try, in order."""
