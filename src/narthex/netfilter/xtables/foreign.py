"""Matches and targets of iptables that only other people's rules have, to nodes of the AST."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from fractions import Fraction

from narthex.model.net import IPFamily
from narthex.netfilter.ast import (
    AddressType,
    AnyOf,
    Compare,
    ConnMarkIs,
    CopyMark,
    CtDirection,
    CtState,
    CtStatus,
    DnatRange,
    EveryNth,
    Expression,
    Field,
    IcmpType,
    IgnoredStatement,
    Masquerade,
    NoTrack,
    PortRange,
    RandomMatch,
    RecentCheck,
    RedirectRange,
    SetMark,
    Snat,
    TcpFlags,
    UndecidableMatch,
)
from narthex.netfilter.netlink.elements import networks_between
from narthex.netfilter.xtables.print import quoted
from narthex.netfilter.xtables.values import ICMP_TYPES, kernel_probability, plain_network
from narthex.netfilter.xtables.words import Misread, Option

Options = dict[str, Option]

# ---- matches -------------------------------------------------------------------------------------------------------

_FLAG_BITS = {"FIN": 1, "SYN": 2, "RST": 4, "PSH": 8, "ACK": 16, "URG": 32, "ECE": 64, "CWR": 128, "ALL": 63, "NONE": 0}


def _bits(text: str) -> int:
    if not _FLAG_BITS.keys() >= set(text.split(",")):
        raise Misread
    return sum({_FLAG_BITS[word] for word in text.split(",")})


def _tcp(option: Option) -> Iterator[Expression]:
    if option.name == "--syn":
        yield TcpFlags(0x17, 0x02, option.negate)
    elif option.name == "--tcp-flags" and len(option.values) == 2:
        mask, value = map(_bits, map(str, option.values))
        yield TcpFlags(mask, value, option.negate)
    else:
        raise Misread


_SIDES = {
    "--dports": (Field.DPORT,),
    "--destination-ports": (Field.DPORT,),
    "--sports": (Field.SPORT,),
    "--source-ports": (Field.SPORT,),
    "--ports": (Field.SPORT, Field.DPORT),
}


def _multiport(option: Option) -> Iterator[Expression]:
    sides = _SIDES.get(option.name)
    if sides is None:
        raise Misread
    ways: list[tuple[Expression, ...]] = []
    for field in sides:
        for text in option.value.split(","):
            first, colon, last = text.partition(":")
            ways.append((PortRange(field, int(first), int(last)) if colon else Compare(field, (int(first),)),))
    yield AnyOf(tuple(ways), option.negate)


def _iprange(option: Option) -> Iterator[Expression]:
    field = {"--src-range": Field.SADDR, "--dst-range": Field.DADDR}.get(option.name)
    if field is None:
        raise Misread
    first, dash, last = option.value.partition("-")
    yield Compare(field, networks_between(first, last if dash else first), option.negate)


def _addrtype(option: Option) -> Iterator[Expression]:
    if option.name in ("--limit-iface-in", "--limit-iface-out"):
        yield UndecidableMatch("which interface has the address", f"-m addrtype {option.text()}")
        return
    field = {"--dst-type": Field.DADDR, "--src-type": Field.SADDR}.get(option.name)
    if field is None:
        raise Misread
    yield AddressType(field, tuple(option.value.lower().split(",")), option.negate)


_STATUS = {"EXPECTED": "expected", "SEEN_REPLY": "seen-reply", "ASSURED": "assured", "CONFIRMED": "confirmed"}
_ORIGINAL = {
    "--ctorigsrc": Field.ORIG_SADDR,
    "--ctorigdst": Field.ORIG_DADDR,
    "--ctorigsrcport": Field.ORIG_SPORT,
    "--ctorigdstport": Field.ORIG_DPORT,
}


def _conntrack(option: Option) -> Iterator[Expression]:
    name = option.name
    if name in _ORIGINAL:
        field = _ORIGINAL[name]
        if field in (Field.ORIG_SADDR, Field.ORIG_DADDR):
            yield Compare(field, (plain_network(option.value),), option.negate)
            return
        first, colon, last = option.value.partition(":")
        yield (
            PortRange(field, int(first), int(last), option.negate)
            if colon
            else Compare(field, (int(first),), option.negate)
        )
    elif name == "--ctproto":
        yield Compare(Field.L4PROTO, (_protocol(option.value),), option.negate)
    elif name == "--ctdir":
        yield CtDirection((option.value == "ORIGINAL") is not option.negate)
    elif name in ("--ctstate", "--state"):
        words = option.value.lower().split(",")
        bits = tuple(word for word in words if word in ("dnat", "snat"))
        states = tuple(word for word in words if word not in bits)
        if option.negate or not bits or not states:
            raise Misread
        yield AnyOf(((CtState(states),), (CtStatus(bits),)))
    elif name == "--ctstatus" and option.value != "NONE":
        words = option.value.split(",")
        yield CtStatus(tuple(_STATUS.get(word, word.lower()) for word in words), option.negate)
    elif name == "--ctexpire":
        yield UndecidableMatch("how old the connection is", f"-m conntrack {option.text()}")
    else:
        raise Misread


def _protocol(text: str) -> str | int:
    return int(text) if text.isdigit() else text.lower()


def _icmp(option: Option) -> Iterator[Expression]:
    if option.name not in ("--icmp-type", "--icmpv6-type"):
        raise Misread
    kind, slash, code = option.value.partition("/")
    number = ICMP_TYPES.get((option.name == "--icmpv6-type", kind), kind)
    if str(number) in ("any", "255") and not slash:
        return
    codes = (int(code), int(code)) if slash else None
    yield IcmpType((int(number),), codes, option.negate)


def _connmark(option: Option) -> Iterator[Expression]:
    if option.name != "--mark":
        raise Misread
    value, mask = value_and_mask(option.value)
    yield ConnMarkIs(value, mask, option.negate)


SINGLE: dict[str, Callable[[Option], Iterator[Expression]]] = {
    "tcp": _tcp,
    "multiport": _multiport,
    "iprange": _iprange,
    "addrtype": _addrtype,
    "conntrack": _conntrack,
    "state": _conntrack,
    "icmp": _icmp,
    "icmp6": _icmp,
    "icmpv6": _icmp,
    "ipv6-icmp": _icmp,
    "connmark": _connmark,
}
"""Matches whose options each ask for something more."""


def _statistic(options: Options) -> Expression:
    mode = options["--mode"].value if "--mode" in options else ""
    if mode == "nth" and options.keys() <= {"--mode", "--every", "--packet"} and not options["--every"].negate:
        return EveryNth(int(options["--every"].value))
    if mode == "random" and options.keys() == {"--mode", "--probability"}:
        share = Fraction(kernel_probability(options["--probability"].value))
        return RandomMatch(kernel_probability(str(float(1 - share))))
    raise Misread


def _recent(options: Options) -> Expression:
    # A first packet is in no list unless somebody has put it there; hits are not counted here.
    verbs = options.keys() & {"--rcheck", "--update"}
    options = {name: one for name, one in options.items() if name not in ("--mask", "--rsource", "--reap", "--rttl")}
    if verbs and "--hitcount" in options and not any(one.negate for one in options.values()):
        text = " ".join(("-m recent", *(one.text() for one in options.values())))
        return UndecidableMatch("how often the sender came before", text)
    if (
        len(verbs) != 1
        or options.keys() - verbs - {"--seconds", "--name"}
        or any(one.negate for one in options.values())
    ):
        raise Misread
    seconds = int(options["--seconds"].value) if "--seconds" in options else 2**31
    return RecentCheck(options["--name"].value if "--name" in options else "DEFAULT", seconds)


WHOLE: dict[str, Callable[[Options], Expression]] = {"statistic": _statistic, "recent": _recent}
"""Matches whose options only make sense together."""

CIRCUMSTANCES: dict[str, tuple[str, bool, bool]] = {
    "limit": ("how many packets came before", True, True),
    "hashlimit": ("how many packets came before", True, True),
    "connlimit": ("how many connections there are", True, True),
    "connbytes": ("how much the connection has carried", True, True),
    "quota": ("how much has been carried", True, True),
    "rateest": ("how much is carried", True, True),
    "owner": ("which process sends", False, True),
    "cgroup": ("which process sends", False, True),
    "socket": ("whether a socket waits for it", True, True),
    "physdev": ("which port of a bridge it passes", True, False),
    "mac": ("the sender's hardware address", True, False),
    "length": ("the packet's length", True, True),
    "ttl": ("the packet's time to live", True, True),
    "hl": ("the packet's hop limit", True, True),
    "dscp": ("the packet's class of service", True, True),
    "tos": ("the packet's class of service", True, True),
    "ecn": ("the packet's congestion bits", True, True),
    "pkttype": ("how the link addressed it", True, True),
    "rpfilter": ("the route back to the sender", True, False),
    "time": ("the time of day", True, True),
    "cpu": ("the processor that takes it", True, True),
    "devgroup": ("the group of the interface", True, True),
    "policy": ("IPsec policies", True, True),
    "realm": ("the route's realm", True, True),
    "helper": ("helpers of connection tracking", True, True),
}
"""Matches of which no dump tells whether they match: what they depend on, and whether a packet that came in over a link, or
one that was made on the node, can match at all."""


def circumstance(name: str, options: list[Option]) -> UndecidableMatch:
    """A match of CIRCUMSTANCES."""
    about, forwarded, made_here = CIRCUMSTANCES[name]
    text = " ".join((f"-m {quoted(name)}", *(option.text() for option in options)))
    if any(option.negate for option in options):
        # What a packet cannot have, it does not have.
        forwarded = made_here = True
    return UndecidableMatch(about, text, forwarded, made_here)


# ---- targets -------------------------------------------------------------------------------------------------------


def value_and_mask(text: str) -> tuple[int, int]:
    """`0x4000/0x4000`; a value alone means all bits."""
    value, slash, mask = text.partition("/")
    return int(value, 0), int(mask, 0) if slash else 0xFFFFFFFF


def _allowed(options: Options, *names: str) -> None:
    if not options.keys() <= set(names) or any(option.negate for option in options.values()):
        raise Misread


def set_mark(options: Options, connection: bool = False) -> Expression:
    """`--set-xmark VALUE/MASK` and its older forms. Raises Misread."""
    _allowed(options, "--set-xmark", "--set-mark", "--and-mark", "--or-mark", "--xor-mark")
    ((name, option),) = options.items()
    value, mask = value_and_mask(option.value)
    if name == "--and-mark":
        value, mask = 0, ~value & 0xFFFFFFFF
    elif name == "--or-mark":
        mask = value
    elif name == "--xor-mark":
        mask = 0
    elif name == "--set-mark":
        mask |= value
    return SetMark(value, mask, connection)


def _connmark_target(options: Options, _family: IPFamily) -> Expression:
    for verb, to_connection in (("--save-mark", True), ("--restore-mark", False)):
        if verb in options:
            _allowed(options, verb, "--mask", "--nfmask", "--ctmask")
            both = int(options["--mask"].value, 0) if "--mask" in options else 0xFFFFFFFF
            packet = int(options["--nfmask"].value, 0) if "--nfmask" in options else both
            connection = int(options["--ctmask"].value, 0) if "--ctmask" in options else both
            return CopyMark(True, packet, connection) if to_connection else CopyMark(False, connection, packet)
    return set_mark(options, connection=True)


def _ct(options: Options, _family: IPFamily) -> Expression:
    if "--notrack" in options:
        return NoTrack()
    raise Misread


def _snat(options: Options, family: IPFamily) -> Expression:
    _allowed(options, "--to-source", "--random", "--random-fully", "--persistent")
    first, last, *_ = _ends(options["--to-source"].value, family)
    if not first:
        raise Misread
    return Snat(first, last)


def dnat_range(options: Options, family: IPFamily) -> Expression:
    """`--to-destination` with ranges, or with `--random` and `--persistent`. Raises Misread."""
    _allowed(options, "--to-destination", "--random", "--persistent")
    return DnatRange(*_ends(options["--to-destination"].value, family))


def _ends(text: str, family: IPFamily) -> tuple[str, str, int | None, int | None]:
    """First and last address, first and last port: `10.0.0.1-10.0.0.3:80-90`, `[fd00::1]:80`."""
    if family is IPFamily.IPV6:
        inside, closed, ports = text.partition("]")
        addresses, ports = (inside.lstrip("["), ports.lstrip(":")) if closed else (text, "")
    else:
        addresses, _, ports = text.partition(":")
    first, dash, last = addresses.partition("-")
    low, port_dash, high = ports.partition("-")
    # `80-90/8080` shifts ports by a base.
    if "/" in ports:
        raise Misread
    ends = [str(ipaddress.ip_address(each)) if each else "" for each in (first, last if dash else first)]
    return (
        ends[0],
        ends[1],
        int(low) if low else None,
        int(high if port_dash else low) if low else None,
    )


def _redirect(options: Options, _family: IPFamily) -> Expression:
    _allowed(options, "--to-ports", "--random", "--random-fully")
    if "--to-ports" not in options:
        return RedirectRange()
    first, dash, last = options["--to-ports"].value.partition("-")
    return RedirectRange(int(first), int(last if dash else first))


def _masquerade(options: Options, _family: IPFamily) -> Expression:
    _allowed(options, "--to-ports", "--random", "--random-fully")
    return Masquerade(fully_random="--random-fully" in options)


TARGETS: dict[str, Callable[[Options, IPFamily], Expression]] = {
    "MARK": lambda options, _family: set_mark(options),
    "CONNMARK": _connmark_target,
    "CT": _ct,
    "NOTRACK": lambda _options, _family: NoTrack(),
    "SNAT": _snat,
    "DNAT": dnat_range,
    "REDIRECT": _redirect,
    "MASQUERADE": _masquerade,
}
"""What a target can be besides what our own rules have of it."""

SILENT = frozenset(
    (
        "LOG",
        "NFLOG",
        "ULOG",
        "TRACE",
        "TCPMSS",
        "CHECKSUM",
        "CLASSIFY",
        "DSCP",
        "TOS",
        "TTL",
        "HL",
        "ECN",
        "AUDIT",
        "IDLETIMER",
        "LED",
        "TEE",
        "RATEEST",
        "SECMARK",
        "CONNSECMARK",
        "TCPOPTSTRIP",
    )
)
"""Targets behind which the next rule is asked, and that change no packet's way."""


def aside(name: str, options: list[Option]) -> IgnoredStatement:
    """A target of SILENT."""
    return IgnoredStatement(" ".join((f"-j {quoted(name)}", *(option.text() for option in options))))
