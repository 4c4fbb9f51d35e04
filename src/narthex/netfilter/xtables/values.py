"""Constants and conversions that the printer and the parsers of iptables rules share."""

from __future__ import annotations

import re
from fractions import Fraction
from math import floor

from narthex.model import IPFamily, address, family_of, network
from narthex.netfilter.ast import Hook

_HOOKS: dict[str, tuple[str, dict[str, int]]] = {
    "raw": ("filter", {"PREROUTING": -300, "OUTPUT": -300}),
    "mangle": ("filter", {"PREROUTING": -150, "INPUT": -150, "FORWARD": -150, "OUTPUT": -150, "POSTROUTING": -150}),
    "nat": ("nat", {"PREROUTING": -100, "INPUT": 100, "OUTPUT": -100, "POSTROUTING": 100}),
    "filter": ("filter", {"INPUT": 0, "FORWARD": 0, "OUTPUT": 0}),
    "security": ("filter", {"INPUT": 50, "FORWARD": 50, "OUTPUT": 50}),
}

TABLES = tuple(_HOOKS)
"""The iptables tables in the order in which a packet passes them."""


def builtin_chains(table: str) -> tuple[str, ...]:
    """Return the names of the built-in chains of a table, () for an unknown table."""
    return tuple(_HOOKS[table][1]) if table in _HOOKS else ()


def default_policy(table: str, chain: str) -> str:
    """Return the policy of a chain that a dump does not declare: ACCEPT, or "-" for a chain that is not built-in."""
    return "ACCEPT" if chain in builtin_chains(table) else "-"


def hook_of(table: str, chain: str, policy: str = "ACCEPT") -> Hook | None:
    """Return the hook of a built-in chain with the kernel's priority (`enum nf_ip_hook_priorities`); None for other chains."""
    kind, priorities = _HOOKS.get(table, ("", {}))
    if chain not in priorities:
        return None
    return Hook(type=kind, hook=chain.lower(), priority=priorities[chain], policy=policy.lower())


_PORT_NAMES = {
    name: tuple(map(int, ports.split("/")))
    for name, _, ports in (
        pair.partition(" ")
        for pair in [
            "ftp-data 20",
            "ftp 21",
            "ssh 22",
            "telnet 23",
            "smtp 25",
            "time 37",
            "tacacs 49",
            "domain 53",
            "bootps 67",
            "bootpc 68",
            "tftp 69",
            "http 80",
            "kerberos 88",
            "kerberos-sec 88",
            "pop3 110",
            "sunrpc 111",
            "auth 113",
            "nntp 119",
            "ntp 123",
            "epmap 135",
            "netbios-ns 137",
            "netbios-dgm 138",
            "netbios-ssn 139",
            "imap 143",
            "imap2 143",
            "snmp 161",
            "snmp-trap 162",
            "snmptrap 162",
            "bgp 179",
            "ldap 389",
            "svrloc 427",
            "https 443",
            "microsoft-ds 445",
            "kpasswd 464",
            "submissions 465",
            "isakmp 500",
            "login 513",
            "shell 514",
            "syslog 514",
            "printer 515",
            "route 520",
            "dhcpv6-client 546",
            "dhcpv6-server 547",
            "rtsp 554",
            "submission 587",
            "ipp 631",
            "ldaps 636",
            "domain-s 853",
            "rsync 873",
            "imaps 993",
            "pop3s 995",
            "socks 1080",
            "openvpn 1194",
            "ms-sql-s 1433",
            "ms-sql-m 1434",
            "radius 1812",
            "radius-acct 1813",
            "mqtt 1883",
            "nfs 2049",
            "etcd-client 2379",
            "etcd-server 2380",
            "iscsi-target 3260",
            "mysql 3306",
            "ms-wbt-server 3389",
            "stun 3478",
            "epmd 4369",
            "ipsec-nat-t 4500",
            "sip 5060",
            "sip-tls 5061",
            "sips 5061",
            "xmpp-client 5222",
            "xmpp-server 5269",
            "mdns 5353",
            "postgres 5432",
            "postgresql 5432",
            "amqps 5671",
            "amqp 5672",
            "x11 6000",
            "redis 6379",
            "sun-sr-https 6443",
            "syslog-tls 6514",
            "ircd 6667",
            "http-alt 8080/8008",
            "webcache 8080",
            "pcsync-https 8443",
            "git 9418",
            "webmin 10000",
            "zabbix-agent 10050",
            "zabbix-trapper 10051",
            "memcache 11211",
        ]
    )
}
"""Names of ports that distributions agree on, and those that have different ports on different distributions."""


def ports_named(text: str) -> tuple[int, ...]:
    """Return the port that a number or a name stands for, several if distributions disagree. Raises ValueError."""
    if text.isascii() and text.isdigit():
        return (int(text),)
    if text not in _PORT_NAMES:
        raise ValueError(f"{text} is not the name of a port that is known")
    return _PORT_NAMES[text]


def port_named(text: str) -> int:
    """Return the port that a number or a name stands for. Raises ValueError, also for a name that is ambiguous."""
    (port,) = ports_named(text)
    return port


_SCALE = 2**31
_PROBABILITY = re.compile(r"\d*\.?\d*(?:[eE][-+]?\d{1,2})?", re.ASCII)
_LONGEST_PROBABILITY = 64


def kernel_probability(text: str) -> str:
    """Return what iptables-save prints for a `--probability` given as `text`.

    The kernel keeps `lround(0x80000000 * p)` and iptables prints that number back with eleven decimals
    (extensions/libxt_statistic.c), so 0.33333 comes back as 0.33332999982. Printing the result again is lossless.
    Raises ValueError unless 0 <= p <= 1.
    """
    if len(text) > _LONGEST_PROBABILITY or not _PROBABILITY.fullmatch(text):
        # An exponent of nine digits would be a number of a gigabyte.
        raise ValueError(f"{text[:40]!r} is not a probability")
    probability = Fraction(text)
    if not 0 <= probability <= 1:
        raise ValueError(f"{text!r} is not a probability")
    # lround rounds halves away from zero, round() to even.
    kept = Fraction(floor(probability * _SCALE + Fraction(1, 2)), _SCALE)
    whole, rest = divmod(floor(kept * 10**11 + Fraction(1, 2)), 10**11)
    return f"{whole}.{rest:011d}"


def equal_share(left: int) -> str:
    """Return the probability 1/`left` as iptables-save prints it.

    kube-proxy writes ten decimals (row 3.9), which the kernel then rounds.
    """
    return kernel_probability(f"{1 / left:.10f}")


def plain_network(text: str) -> str:
    """Return an iptables address or network in canonical form: `10.0.0.1/32` is an address, `10.0.0.0/255.0.0.0` a network.

    Raises ValueError.
    """
    base, slash, length = text.partition("/")
    host = address(base)
    if not slash or (length == "32" and ":" not in host):
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


def destination_range(text: str) -> tuple[str, str, int | None, int | None]:
    """Parse the addresses and ports of a NAT target, in the syntax of iptables or nft.

    Examples are `10.0.0.1-10.0.0.3:80-90`, `[fd00::1]:80`, and `[fd00::1]-[fd00::3]`. Returns first and last address, ""
    if there is none, and first and last port. Raises ValueError, also for a port range with a base (`80-90/8080`).
    """
    ports = ""
    if text.startswith("["):
        text, _, ports = text.rpartition("]:") if "]:" in text else (text, "", "")
        text = text.replace("[", "").replace("]", "")
    elif text.count(":") == 1:
        text, _, ports = text.partition(":")
    first, dash, last = text.partition("-")
    low, high = (address(each) if each else "" for each in (first, last if dash else first))
    if not ports:
        return low, high, None, None
    first_port, dash, last_port = ports.partition("-")
    return low, high, int(first_port), int(last_port if dash else first_port)


def value_and_mask(text: str) -> tuple[int, int]:
    """Parse a mark such as `0x4000/0x4000`. Without a mask, all bits count. Raises ValueError."""
    value, slash, mask = text.partition("/")
    return int(value, 0), int(mask, 0) if slash else 0xFFFFFFFF


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
"""ICMP type numbers by (is ICMPv6, name). "any" is 255 in xt_icmp."""


def reject_words(family: IPFamily) -> dict[str, str]:
    """Return the values of `--reject-with` by the reject kind in nft."""
    return _REJECT_4 if family is IPFamily.IPV4 else _REJECT_6
