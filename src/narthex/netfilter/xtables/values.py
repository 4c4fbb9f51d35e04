"""Facts and small conversions that printing and parsing of iptables rules share."""

from __future__ import annotations

from fractions import Fraction
from math import floor

from narthex.model.net import IPFamily, address, family_of, network
from narthex.netfilter.ast import Hook

_HOOKS: dict[str, tuple[str, dict[str, int]]] = {
    "raw": ("filter", {"PREROUTING": -300, "OUTPUT": -300}),
    "mangle": (
        "filter",
        {"PREROUTING": -150, "INPUT": -150, "FORWARD": -150, "OUTPUT": -150, "POSTROUTING": -150},
    ),
    "nat": ("nat", {"PREROUTING": -100, "INPUT": 100, "OUTPUT": -100, "POSTROUTING": 100}),
    "filter": ("filter", {"INPUT": 0, "FORWARD": 0, "OUTPUT": 0}),
    "security": ("filter", {"INPUT": 50, "FORWARD": 50, "OUTPUT": 50}),
}

TABLES = tuple(_HOOKS)
"""The tables that exist, in the order in which a packet meets them."""


def builtin_chains(table: str) -> tuple[str, ...]:
    """Names of a table's built-in chains; () for a table that iptables does not have."""
    return tuple(_HOOKS[table][1]) if table in _HOOKS else ()


def hook_of(table: str, chain: str, policy: str = "ACCEPT") -> Hook | None:
    """Where a built-in chain hangs, with the kernel's priorities (`enum nf_ip_hook_priorities`); None for a chain of
    somebody's own."""
    kind, priorities = _HOOKS.get(table, ("", {}))
    if chain not in priorities:
        return None
    return Hook(type=kind, hook=chain.lower(), priority=priorities[chain], policy=policy.lower())


_SCALE = 2**31


def kernel_probability(text: str) -> str:
    """What iptables-save prints for a `--probability` given as `text`.

    The kernel keeps `lround(0x80000000 * p)` and iptables prints that number back with eleven decimals
    (extensions/libxt_statistic.c), so 0.33333 comes back as 0.33332999982. Printing the result again is lossless.
    Raises ValueError unless 0 <= p <= 1.
    """
    probability = Fraction(text)
    if not 0 <= probability <= 1:
        raise ValueError(f"{text!r} is not a probability")
    # lround takes halves away from zero, round() would take them to even.
    kept = Fraction(floor(probability * _SCALE + Fraction(1, 2)), _SCALE)
    whole, rest = divmod(floor(kept * 10**11 + Fraction(1, 2)), 10**11)
    return f"{whole}.{rest:011d}"


def equal_share(left: int) -> str:
    """The probability for the first of `left` endpoints that have not been tried, as iptables-save prints it.

    It is written with ten decimals, as kube-proxy does (row 3.9), before the kernel rounds it.
    """
    return kernel_probability(f"{1 / left:.10f}")


def plain_network(text: str) -> str:
    """Address or network text of iptables to canonical text: `10.0.0.1/32` is an address, `10.0.0.0/255.0.0.0` a
    network. Raises ValueError."""
    base, slash, length = text.partition("/")
    host = address(base)
    if not slash:
        return host
    if not length.isdigit():
        length = str(_prefix_length(length))
    return host if int(length) == family_of(host).host_bits else network(f"{host}/{length}")


def _prefix_length(mask: str) -> int:
    octets = [int(octet) for octet in address(mask).split(".")]
    bits = "".join(f"{octet:08b}" for octet in octets)
    if len(bits) != 32 or "01" in bits:
        raise ValueError(f"{mask!r} is not a netmask")
    return bits.count("1")


_REJECT_4 = {
    "port-unreachable": "icmp-port-unreachable",
    "host-unreachable": "icmp-host-unreachable",
    "net-unreachable": "icmp-net-unreachable",
    "prot-unreachable": "icmp-proto-unreachable",
    "net-prohibited": "icmp-net-prohibited",
    "host-prohibited": "icmp-host-prohibited",
    "admin-prohibited": "icmp-admin-prohibited",
    "tcp reset": "tcp-reset",
}
_REJECT_6 = {
    "port-unreachable": "icmp6-port-unreachable",
    "no-route": "icmp6-no-route",
    "addr-unreachable": "icmp6-addr-unreachable",
    "admin-prohibited": "icmp6-adm-prohibited",
    "tcp reset": "tcp-reset",
}


ICMP_TYPES = {
    (False, "any"): 255,
    (False, "echo-reply"): 0,
    (False, "pong"): 0,
    (False, "destination-unreachable"): 3,
    (False, "source-quench"): 4,
    (False, "redirect"): 5,
    (False, "echo-request"): 8,
    (False, "ping"): 8,
    (False, "router-advertisement"): 9,
    (False, "router-solicitation"): 10,
    (False, "time-exceeded"): 11,
    (False, "parameter-problem"): 12,
    (False, "timestamp-request"): 13,
    (False, "timestamp-reply"): 14,
    (False, "address-mask-request"): 17,
    (False, "address-mask-reply"): 18,
    (True, "destination-unreachable"): 1,
    (True, "packet-too-big"): 2,
    (True, "time-exceeded"): 3,
    (True, "parameter-problem"): 4,
    (True, "echo-request"): 128,
    (True, "echo-reply"): 129,
    (True, "router-solicitation"): 133,
    (True, "router-advertisement"): 134,
    (True, "neighbour-solicitation"): 135,
    (True, "neighbor-solicitation"): 135,
    (True, "neighbour-advertisement"): 136,
    (True, "neighbor-advertisement"): 136,
    (True, "redirect"): 137,
}
"""(of ICMPv6, name) to number. "any" is 255 in xt_icmp."""


def reject_words(family: IPFamily) -> dict[str, str]:
    """nft's word for a refusal to the one of `--reject-with`."""
    return _REJECT_4 if family is IPFamily.IPV4 else _REJECT_6
