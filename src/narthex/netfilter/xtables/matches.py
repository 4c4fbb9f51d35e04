"""iptables matches (`-m …`) to nodes of the AST. A match that no node expresses becomes `Unknown` with its text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from fractions import Fraction

from narthex.model import networks_between
from narthex.netfilter import ast
from narthex.netfilter.xtables.lexer import NoEquivalentNode, Option, Options, extension_text
from narthex.netfilter.xtables.values import ICMP_TYPES, kernel_probability, plain_network, port_named, value_and_mask

_UNDECIDABLE: dict[str, tuple[str, bool, bool]] = {
    "limit": ("the number of earlier packets", True, True),
    "hashlimit": ("the number of earlier packets", True, True),
    "connlimit": ("the number of connections", True, True),
    "connbytes": ("the traffic of the connection", True, True),
    "quota": ("the traffic so far", True, True),
    "rateest": ("the current rate", True, True),
    "owner": ("the sending process", False, True),
    "cgroup": ("the sending process", False, True),
    "socket": ("a matching local socket", True, True),
    "physdev": ("the bridge port", True, False),
    "mac": ("the source MAC address", True, False),
    "length": ("the packet length", True, True),
    "ttl": ("the TTL", True, True),
    "hl": ("the hop limit", True, True),
    "dscp": ("the DSCP field", True, True),
    "tos": ("the DSCP field", True, True),
    "ecn": ("the ECN bits", True, True),
    "pkttype": ("the link-layer packet type", True, True),
    "rpfilter": ("the reverse path", True, False),
    "time": ("the time", True, True),
    "cpu": ("the CPU that handles the packet", True, True),
    "devgroup": ("the interface group", True, True),
    "policy": ("IPsec policies", True, True),
    "realm": ("the routing realm", True, True),
    "helper": ("the conntrack helper", True, True),
}
"""Matches that depend on something that no dump contains: what it is, and whether a packet that arrived on an interface, or
one that a local process sent, can match at all."""


def read_match(name: str, options: list[Option]) -> Iterator[ast.Expression]:
    """Yield the nodes for `-m name …`, then one `Unknown` for all options that are not understood."""
    if name in _UNDECIDABLE:
        yield _undecidable(name, options)
        return
    if name in _WHOLE_READERS:
        with contextlib.suppress(NoEquivalentNode, ValueError, KeyError):
            yield _WHOLE_READERS[name]({option.name: option for option in options})
            return
        yield ast.Unknown(extension_text("-m", name, options))
        return
    readers = _OPTION_READERS.get(name, ())
    unknown: list[Option] = []
    for option in options:
        for reader in readers:
            try:
                nodes = tuple(reader(option))
            except (NoEquivalentNode, ValueError, KeyError):
                continue
            yield from nodes
            break
        else:
            unknown.append(option)
    if unknown or not readers:
        yield ast.Unknown(extension_text("-m", name, unknown))


def _undecidable(name: str, options: list[Option]) -> ast.UndecidableMatch:
    subject, forwarded, sent_locally = _UNDECIDABLE[name]
    if any(option.negate for option in options):
        # A packet that cannot have the property matches the negation.
        forwarded = sent_locally = True
    return ast.UndecidableMatch(subject, extension_text("-m", name, options), forwarded, sent_locally)


# ---- matches with independent options ------------------------------------------------------------------------------

_PORT_OPTIONS = {
    "--dport": ast.Field.DPORT,
    "--destination-port": ast.Field.DPORT,
    "--dports": ast.Field.DPORT,
    "--sport": ast.Field.SPORT,
    "--source-port": ast.Field.SPORT,
    "--sports": ast.Field.SPORT,
}


def _ports(option: Option) -> Iterator[ast.Expression]:
    field = _PORT_OPTIONS[option.name]
    first, colon, last = option.value.partition(":")
    if colon:
        yield ast.PortRange(field, port_named(first or "0"), port_named(last or "65535"), option.negate)
    else:
        yield ast.Compare(field, tuple(port_named(port) for port in first.split(",")), option.negate)


_MULTIPORT_OPTIONS = {
    "--dports": (ast.Field.DPORT,),
    "--destination-ports": (ast.Field.DPORT,),
    "--sports": (ast.Field.SPORT,),
    "--source-ports": (ast.Field.SPORT,),
    "--ports": (ast.Field.SPORT, ast.Field.DPORT),
}


def _multiport(option: Option) -> Iterator[ast.Expression]:
    alternatives: list[tuple[ast.Expression, ...]] = []
    for field in _MULTIPORT_OPTIONS[option.name]:
        for text in option.value.split(","):
            first, colon, last = text.partition(":")
            alternatives.append(
                (ast.PortRange(field, port_named(first), port_named(last)),)
                if colon
                else (ast.Compare(field, (port_named(first),)),)
            )
    yield ast.AnyOf(tuple(alternatives), option.negate)


_FLAG_BITS = {**{name.upper(): 1 << bit for bit, name in enumerate(ast.TCP_FLAGS)}, "ALL": 63, "NONE": 0}


def _flag_bits(text: str) -> int:
    return sum({_FLAG_BITS[word] for word in text.split(",")})


def _tcp_flags(option: Option) -> Iterator[ast.Expression]:
    if option.name == "--syn":
        yield ast.TcpFlags(0x17, 0x02, option.negate)
    elif option.name == "--tcp-flags" and len(option.values) == 2:
        mask, value = map(_flag_bits, map(str, option.values))
        yield ast.TcpFlags(mask, value, option.negate)
    else:
        raise NoEquivalentNode


def _iprange(option: Option) -> Iterator[ast.Expression]:
    field = {"--src-range": ast.Field.SADDR, "--dst-range": ast.Field.DADDR}[option.name]
    first, dash, last = option.value.partition("-")
    yield ast.Compare(field, networks_between(first, last if dash else first), option.negate)


def _addrtype(option: Option) -> Iterator[ast.Expression]:
    if option.name in ("--limit-iface-in", "--limit-iface-out"):
        yield ast.UndecidableMatch("the interface of the address", f"-m addrtype {option.text()}")
        return
    field = {"--dst-type": ast.Field.DADDR, "--src-type": ast.Field.SADDR}[option.name]
    if option.value == "LOCAL":
        yield ast.IsLocal(field, option.negate)
    else:
        yield ast.AddressType(field, tuple(option.value.lower().split(",")), option.negate)


_STATUS_BITS = {"EXPECTED": "expected", "SEEN_REPLY": "seen-reply", "ASSURED": "assured", "CONFIRMED": "confirmed"}
_ORIGINAL_FIELDS = {
    "--ctorigsrc": ast.Field.ORIG_SADDR,
    "--ctorigdst": ast.Field.ORIG_DADDR,
    "--ctorigsrcport": ast.Field.ORIG_SPORT,
    "--ctorigdstport": ast.Field.ORIG_DPORT,
}


def _conntrack(option: Option) -> Iterator[ast.Expression]:
    name, negate = option.name, option.negate
    if name in ("--ctstate", "--state"):
        yield from _states(option.value.lower().split(","), negate)
    elif name in _ORIGINAL_FIELDS:
        yield _original(_ORIGINAL_FIELDS[name], option)
    elif name == "--ctproto":
        yield ast.Compare(
            ast.Field.L4PROTO, (int(option.value) if option.value.isdigit() else option.value.lower(),), negate
        )
    elif name == "--ctdir":
        yield ast.CtDirection((option.value == "ORIGINAL") is not negate)
    elif name == "--ctstatus" and option.value != "NONE":
        yield ast.CtStatus(tuple(_STATUS_BITS.get(word, word.lower()) for word in option.value.split(",")), negate)
    elif name == "--ctexpire":
        yield ast.UndecidableMatch("the remaining lifetime of the connection", f"-m conntrack {option.text()}")
    else:
        raise NoEquivalentNode


def _states(words: list[str], negate: bool) -> Iterator[ast.Expression]:
    """Yield the nodes of `--ctstate`. iptables counts DNAT and SNAT as states, the kernel as status bits."""
    bits = tuple(word for word in words if word in ("dnat", "snat"))
    states = tuple(word for word in words if word not in bits)
    if bits and states and not negate:
        yield ast.AnyOf(((ast.CtState(states),), (ast.CtStatus(bits),)))
        return
    if states:
        yield ast.CtState(states, negate)
    if bits:
        yield ast.CtStatus(bits, negate)


def _original(field: ast.Field, option: Option) -> ast.Expression:
    if field in (ast.Field.ORIG_SADDR, ast.Field.ORIG_DADDR):
        return ast.Compare(field, (plain_network(option.value),), option.negate)
    first, colon, last = option.value.partition(":")
    if colon:
        return ast.PortRange(field, int(first), int(last), option.negate)
    return ast.Compare(field, (int(first),), option.negate)


def _icmp(option: Option) -> Iterator[ast.Expression]:
    if option.name not in ("--icmp-type", "--icmpv6-type"):
        raise NoEquivalentNode
    kind, slash, code = option.value.partition("/")
    number = ICMP_TYPES.get((option.name == "--icmpv6-type", kind), kind)
    if str(number) in ("any", "255") and not slash:
        return
    codes = (int(code), int(code)) if slash else None
    yield ast.IcmpType((int(number),), codes, option.negate)


def _mark(node: type[ast.MarkIs] | type[ast.ConnMarkIs]) -> Callable[[Option], Iterator[ast.Expression]]:
    def read(option: Option) -> Iterator[ast.Expression]:
        """Yield the node for `--mark value/mask`. Raise `NoEquivalentNode` for any other option."""
        if option.name != "--mark":
            raise NoEquivalentNode
        value, mask = value_and_mask(option.value)
        yield node(value, mask, option.negate)

    return read


def _nfacct(option: Option) -> Iterator[ast.Expression]:
    # Without a quota, an accounting object only counts.
    if option.name != "--nfacct-name":
        raise NoEquivalentNode
    yield ast.Counter()


_OPTION_READERS: dict[str, tuple[Callable[[Option], Iterator[ast.Expression]], ...]] = {
    "tcp": (_ports, _tcp_flags),
    "udp": (_ports,),
    "sctp": (_ports,),
    "multiport": (_ports, _multiport),
    "iprange": (_iprange,),
    "addrtype": (_addrtype,),
    "conntrack": (_conntrack,),
    "state": (_conntrack,),
    "mark": (_mark(ast.MarkIs),),
    "connmark": (_mark(ast.ConnMarkIs),),
    "nfacct": (_nfacct,),
    "icmp": (_icmp,),
    "icmp6": (_icmp,),
    "icmpv6": (_icmp,),
    "ipv6-icmp": (_icmp,),
}
"""Matches whose options are independent: for each option, the readers to try in order."""


# ---- matches whose options belong together -------------------------------------------------------------------------


def _statistic(options: Options) -> ast.Expression:
    match options["--mode"].value if "--mode" in options else "":
        case "nth" if options.keys() <= {"--mode", "--every", "--packet"} and not options["--every"].negate:
            return ast.EveryNth(int(options["--every"].value))
        case "random" if options.keys() == {"--mode", "--probability"}:
            return _random(options)
        case _:
            raise NoEquivalentNode


def _random(options: Options) -> ast.Expression:
    probability = kernel_probability(options["--probability"].value)
    if options["--probability"].negate:
        probability = kernel_probability(str(float(1 - Fraction(probability))))
    return ast.RandomMatch(probability)


_RECENT_MASKS = ("255.255.255.255", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")


def _recent(options: Options) -> ast.Expression:
    name = options["--name"].value if "--name" in options else "DEFAULT"
    if options.keys() - {"--mask", "--rsource", "--name"} == {"--set"}:
        if options["--set"].negate or ("--mask" in options and options["--mask"].value not in _RECENT_MASKS):
            raise NoEquivalentNode
        return ast.RecentSet(name)
    # The first packet of a connection is in a list only if another rule added it. Hits are not counted.
    verbs = options.keys() & {"--rcheck", "--update"}
    options = {key: one for key, one in options.items() if key not in ("--mask", "--rsource", "--reap", "--rttl")}
    if any(one.negate for one in options.values()):
        raise NoEquivalentNode
    if verbs and "--hitcount" in options:
        return ast.UndecidableMatch(
            "the number of earlier packets from the source", extension_text("-m", "recent", [*options.values()])
        )
    if len(verbs) != 1 or options.keys() - verbs - {"--seconds", "--name"}:
        raise NoEquivalentNode
    return ast.RecentCheck(name, int(options["--seconds"].value) if "--seconds" in options else 2**31)


def _set(options: Options) -> ast.Expression:
    # With other options (counters, return-nomatch) a match depends on more than the elements of the set.
    if options.keys() != {"--match-set"}:
        raise NoEquivalentNode
    option = options["--match-set"]
    name, sides = map(str, option.values)
    if not {"src", "dst"}.issuperset(sides.split(",")):
        raise NoEquivalentNode
    return ast.MatchSet(name, tuple(sides.split(",")), option.negate)


def _ipvs(options: Options) -> ast.Expression:
    if options.keys() == {"--ipvs"} and not options["--ipvs"].values:
        return ast.IpvsMatch(negate=options["--ipvs"].negate)
    if not options or any(option.negate for option in options.values()):
        raise NoEquivalentNode
    if not options.keys() <= {"--ipvs", "--vaddr", "--vproto", "--vport"}:
        raise NoEquivalentNode
    values = {name: option.value for name, option in options.items() if name != "--ipvs"}
    return ast.IpvsMatch(
        address=plain_network(values["--vaddr"]) if "--vaddr" in values else None,
        protocol=values["--vproto"].lower() if "--vproto" in values else None,
        port=int(values["--vport"]) if "--vport" in values else None,
    )


_WHOLE_READERS: dict[str, Callable[[Options], ast.Expression]] = {
    "statistic": _statistic,
    "recent": _recent,
    "set": _set,
    "ipvs": _ipvs,
}
"""Matches whose options only make sense together."""
