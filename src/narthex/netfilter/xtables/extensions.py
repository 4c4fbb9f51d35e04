"""Matches and targets of iptables (`-m …`, `-j …`) to nodes of the AST.

One without a node that says the same becomes `Unknown` with its text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from narthex.model.net import IPFamily, split_port
from narthex.netfilter.ast import (
    Accept,
    Compare,
    Counter,
    CtState,
    CtStatus,
    Dnat,
    DropPacket,
    Expression,
    Field,
    Goto,
    IpvsMatch,
    IsLocal,
    Jump,
    MarkIs,
    MarkOr,
    MarkXor,
    Masquerade,
    MatchSet,
    PortRange,
    RandomMatch,
    RecentCheck,
    RecentSet,
    Redirect,
    RejectPacket,
    Return,
    Unknown,
    Verdict,
)
from narthex.netfilter.xtables import foreign as xtables_foreign
from narthex.netfilter.xtables.print import quoted
from narthex.netfilter.xtables.values import kernel_probability, plain_network, reject_words
from narthex.netfilter.xtables.words import Misread, Option

# fmt: off
EXTENSION_TARGETS = frozenset((
    "AUDIT", "CHECKSUM", "CLASSIFY", "CLUSTERIP", "CONNMARK", "CONNSECMARK", "CT", "DNAT", "DNPT", "DSCP", "ECN", "HL",
    "HMARK", "IDLETIMER", "LED", "LOG", "MARK", "MASQUERADE", "NETMAP", "NFLOG", "NFQUEUE", "NOTRACK", "QUEUE", "RATEEST",
    "REDIRECT", "REJECT", "SECMARK", "SET", "SNAT", "SNPT", "SYNPROXY", "TARPIT", "TCPMSS", "TCPOPTSTRIP", "TEE", "TOS",
    "TPROXY", "TRACE", "TTL", "ULOG",
))
# fmt: on
"""Targets that are kernel modules; any other word behind `-j` is a chain."""


# ---- matches -------------------------------------------------------------------------------------------------------


def read_match(name: str, options: list[Option]) -> Iterator[Expression]:
    """The nodes of `-m name …`; what is not understood comes back as one Unknown behind them."""
    if name in xtables_foreign.CIRCUMSTANCES:
        yield xtables_foreign.circumstance(name, options)
        return
    if name in _WHOLE:
        yield _whole_match(name, options)
        return
    readers = [reader for reader in (_SINGLE.get(name), xtables_foreign.SINGLE.get(name)) if reader is not None]
    if not readers:
        yield _unknown_match(name, options)
        return
    unsupported: list[Option] = []
    for option in options:
        for reader in readers:
            try:
                found = tuple(reader(option))
            except (Misread, ValueError, KeyError):
                continue
            yield from found
            break
        else:
            unsupported.append(option)
    if unsupported:
        yield _unknown_match(name, unsupported)


def _whole_match(name: str, options: list[Option]) -> Expression:
    for reader in (_WHOLE[name], xtables_foreign.WHOLE.get(name)):
        if reader is not None:
            with contextlib.suppress(Misread, ValueError, KeyError):
                return reader({option.name: option for option in options})
    return _unknown_match(name, options)


def _unknown_match(name: str, options: Iterable[Option]) -> Unknown:
    return Unknown(" ".join((f"-m {quoted(name)}", *(option.text() for option in options))))


_PORTS = {
    "--dport": Field.DPORT,
    "--destination-port": Field.DPORT,
    "--dports": Field.DPORT,
    "--sport": Field.SPORT,
    "--source-port": Field.SPORT,
    "--sports": Field.SPORT,
}


def _ports(option: Option) -> Iterator[Expression]:
    field = _PORTS.get(option.name)
    if field is None:
        raise Misread
    first, colon, last = option.value.partition(":")
    if colon:
        yield PortRange(field, int(first or 0), int(last or 65535), option.negate)
    else:
        yield Compare(field, tuple(int(port) for port in first.split(",")), option.negate)


def _addrtype(option: Option) -> Iterator[Expression]:
    field = {"--dst-type": Field.DADDR, "--src-type": Field.SADDR}.get(option.name)
    if field is None or option.value != "LOCAL":
        raise Misread
    yield IsLocal(field, option.negate)


def _conntrack(option: Option) -> Iterator[Expression]:
    if option.name not in ("--ctstate", "--state"):
        raise Misread
    words = tuple(option.value.lower().split(","))
    bits = tuple(word for word in words if word in ("dnat", "snat"))
    states = tuple(word for word in words if word not in bits)
    if bits and states and not option.negate:
        # "This state, or rewritten" is no conjunction of nodes.
        raise Misread
    if states:
        yield CtState(states, option.negate)
    if bits:
        yield CtStatus(bits, option.negate)


def _mark(option: Option) -> Iterator[Expression]:
    if option.name != "--mark":
        raise Misread
    value, mask = xtables_foreign.value_and_mask(option.value)
    yield MarkIs(value, mask, option.negate)


def _nfacct(option: Option) -> Iterator[Expression]:
    # Without a quota an accounting object only counts.
    if option.name != "--nfacct-name":
        raise Misread
    yield Counter()


def _statistic(options: dict[str, Option]) -> Expression:
    if options.keys() != {"--mode", "--probability"} or options["--mode"].value != "random":
        raise Misread
    probability = options["--probability"]
    if probability.negate:
        raise Misread
    return RandomMatch(kernel_probability(probability.value))


_RECENT_MASKS = ("255.255.255.255", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")


def _recent(options: dict[str, Option]) -> Expression:
    mask = options.pop("--mask", None)
    options.pop("--rsource", None)
    name = options.pop("--name").value if "--name" in options else "DEFAULT"
    if (mask and mask.value not in _RECENT_MASKS) or any(option.negate for option in options.values()):
        raise Misread
    if options.keys() == {"--set"}:
        return RecentSet(name)
    if options.keys() == {"--rcheck", "--seconds", "--reap"}:
        return RecentCheck(name, int(options["--seconds"].value))
    raise Misread


def _set(options: dict[str, Option]) -> Expression:
    # With other options (counters, return-nomatch) a match depends on more than what is in the set.
    if options.keys() != {"--match-set"}:
        raise Misread
    option = options["--match-set"]
    name, sides = map(str, option.values)
    if not {"src", "dst"}.issuperset(sides.split(",")):
        raise Misread
    return MatchSet(name, tuple(sides.split(",")), option.negate)


def _ipvs(options: dict[str, Option]) -> Expression:
    if options.keys() == {"--ipvs"} and not options["--ipvs"].values:
        return IpvsMatch(negate=options["--ipvs"].negate)
    if not options or any(option.negate for option in options.values()):
        raise Misread
    if not options.keys() <= {"--ipvs", "--vaddr", "--vproto", "--vport"}:
        raise Misread
    said = {name: option.value for name, option in options.items() if name != "--ipvs"}
    return IpvsMatch(
        address=plain_network(said["--vaddr"]) if "--vaddr" in said else None,
        protocol=said["--vproto"].lower() if "--vproto" in said else None,
        port=int(said["--vport"]) if "--vport" in said else None,
    )


_SINGLE: dict[str, Callable[[Option], Iterator[Expression]]] = {
    "tcp": _ports,
    "udp": _ports,
    "sctp": _ports,
    "multiport": _ports,
    "addrtype": _addrtype,
    "conntrack": _conntrack,
    "state": _conntrack,
    "mark": _mark,
    "nfacct": _nfacct,
}
"""Matches whose options each ask for something more: read one by one."""

_WHOLE: dict[str, Callable[[dict[str, Option]], Expression]] = {
    "statistic": _statistic,
    "recent": _recent,
    "set": _set,
    "ipvs": _ipvs,
}
"""Matches whose options only make sense together."""


# ---- targets -------------------------------------------------------------------------------------------------------

_PLAIN: dict[str, Verdict] = {"ACCEPT": Accept(), "DROP": DropPacket(), "RETURN": Return()}


def read_target(option: str, name: str, options: list[Option], family: IPFamily) -> Expression:
    try:
        if option in ("-g", "--goto"):
            return Goto(name)
        if name in _PLAIN:
            return _PLAIN[name]
        if name in xtables_foreign.SILENT:
            return xtables_foreign.aside(name, options)
        for readers in (_TARGETS, xtables_foreign.TARGETS):
            if name in readers:
                with contextlib.suppress(Misread, ValueError, KeyError):
                    return readers[name]({each.name: each for each in options}, family)
        if name in EXTENSION_TARGETS or options:
            raise Misread
        return Jump(name)
    except (Misread, ValueError):
        return Unknown(" ".join((f"-j {quoted(name)}", *(each.text() for each in options))))


Options = dict[str, Option]


def _only(options: Options, *names: str) -> None:
    if not options.keys() <= set(names) or any(option.negate for option in options.values()):
        raise Misread


def _reject(options: Options, family: IPFamily) -> Expression:
    _only(options, "--reject-with")
    if not options:
        return RejectPacket()
    kinds = {word: kind for kind, word in reject_words(family).items()}
    word = options["--reject-with"].value
    if word not in kinds:
        raise Misread
    return RejectPacket(kinds[word])


def _set_mark(options: Options, _family: IPFamily) -> Expression:
    _only(options, "--set-xmark", "--or-mark", "--xor-mark")
    (option,) = options.values()
    value, mask = xtables_foreign.value_and_mask(option.value)
    if option.name == "--or-mark" or (option.name == "--set-xmark" and value == mask):
        return MarkOr(value)
    if option.name == "--xor-mark" or mask == 0:
        return MarkXor(value)
    raise Misread


def _masquerade(options: Options, _family: IPFamily) -> Expression:
    _only(options, "--random-fully")
    return Masquerade(fully_random="--random-fully" in options)


def _dnat(options: Options, family: IPFamily) -> Expression:
    _only(options, "--to-destination")
    (option,) = options.values()
    to = option.value
    if family is IPFamily.IPV4 and ":" not in to:
        return Dnat(plain_network(to))
    if family is IPFamily.IPV6 and not to.startswith("["):
        return Dnat(plain_network(to))
    return Dnat(*split_port(to))


def _redirect(options: Options, _family: IPFamily) -> Expression:
    _only(options, "--to-ports")
    (option,) = options.values()
    # A range, or a port of any kind of number, stays as it is written.
    if not option.value.isdecimal():
        raise Misread
    return Redirect(int(option.value))


_TARGETS: dict[str, Callable[[Options, IPFamily], Expression]] = {
    "REJECT": _reject,
    "MARK": _set_mark,
    "MASQUERADE": _masquerade,
    "DNAT": _dnat,
    "REDIRECT": _redirect,
}
