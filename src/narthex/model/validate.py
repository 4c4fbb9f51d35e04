"""Syntax of names, labels, and addresses in Kubernetes objects, as the API server validates it.

Accepted text consists of letters, digits, `-`, `_`, `.`, `:`, and `/` only. User-supplied text can therefore never act
as syntax in a rule, a path, or a command.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton

import msgspec

import narthex.model.net as net
from narthex.model.net import IPFamily


class Syntax(msgspec.Struct, frozen=True):
    """The syntax of one kind of text."""

    name: str
    """Name with its article: "a DNS label"."""
    allowed: str
    """Description of the allowed text, for error messages."""
    holds: Callable[[str], bool]
    """Returns True if text has this syntax."""


def _form(pattern: str, longest: int) -> Callable[[str], bool]:
    matches = re.compile(pattern).fullmatch
    return lambda text: len(text) <= longest and matches(text) is not None


_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_QUALIFIED = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"

DNS_LABEL = Syntax(
    "a DNS label",
    "at most 63 lower case letters, digits and '-', beginning and ending with a letter or digit",
    _form(_LABEL, 63),
)
DNS_SUBDOMAIN = Syntax(
    "a DNS name",
    "at most 253 lower case letters, digits, '-' and '.', each part beginning and ending with a letter or digit",
    _form(_SUBDOMAIN, 253),
)
FQDN = Syntax(
    "a domain name",
    "at least two DNS labels joined by '.', such as db.example.com",
    _form(rf"{_LABEL}(?:\.{_LABEL})+\.?", 254),
)
EXTERNAL_NAME = Syntax(
    "a domain name", "DNS labels joined by '.', such as db.example.com", _form(rf"{_LABEL}(?:\.{_LABEL})*\.?", 254)
)
PORT_NAME = Syntax(
    "a port name",
    "at most 15 lower case letters, digits and single '-', with a letter in it, such as http",
    _form(r"(?=.*[a-z])[a-z0-9]+(?:-[a-z0-9]+)*", 15),
)
LABEL_VALUE = Syntax(
    "a label value",
    "empty, or at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit",
    _form(rf"(?:{_QUALIFIED})?", 63),
)
_is_key_name = _form(_QUALIFIED, 63)


@lru_cache(maxsize=8192)
def _is_key(text: str) -> bool:
    """Return True if text is `name` or `prefix/name`; each part has its own limit.

    Cached: a cluster has few keys, on very many objects.
    """
    prefix, slash, name = text.rpartition("/")
    return _is_key_name(name) and (not slash or DNS_SUBDOMAIN.holds(prefix))


LABEL_KEY = Syntax(
    "a label key",
    "a name of at most 63 letters, digits, '-', '_' and '.', with a DNS name and '/' before it if need be",
    _is_key,
)


def cached_syntax(syntax: Syntax, most: int) -> Callable[[str], str | None]:
    """Return a function that returns valid text interned, and None for invalid text.

    Results are cached (LRU, `most` entries): endpoints repeat few node names very often.
    """
    holds = syntax.holds
    return lru_cache(most)(lambda text: text if holds(text) else None)


_names_in_lines = re.compile(rf"{_SUBDOMAIN}(?:\n{_SUBDOMAIN})*").fullmatch


def are_subdomains(texts: Sequence[str]) -> bool:
    """Return True if every text (at least one) is a DNS name (`DNS_SUBDOMAIN`), with a single regex match."""
    lines = "\n".join(texts)
    # A text with a line break would count as two.
    return lines.count("\n") == len(texts) - 1 and max(map(len, texts)) <= 253 and _names_in_lines(lines) is not None


BROADCAST = "255.255.255.255"
"""The limited broadcast address. The API server accepts it, although no packet to a Service may go to all hosts."""


def special_use(address: str) -> str:
    """Return why a canonical address belongs to no single host on a network; empty if it may."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        return "an IPv4 address written as IPv6"
    if ip.is_unspecified:
        return "the unspecified address"
    if address == BROADCAST:
        return "the broadcast address"
    if ip.is_loopback:
        return "a loopback address"
    if ip.is_link_local:
        return "a link-local address"
    return "a multicast address" if ip.is_multicast else ""


_ORDINARY_4 = frozenset(range(1, 224)) - {127, 169}
_ORDINARY_6 = frozenset(range(1, 0xFE))
"""First bytes of addresses that cannot be special-use addresses."""


def is_plain_host(text: str, family: IPFamily) -> bool:
    """Return True if text is a canonical, not special-use address of this family.

    A fast path: the C library is a hundred times faster than `ipaddress`. False means "not sure".
    """
    try:
        if family is IPFamily.IPV4:
            return inet_pton(AF_INET, text)[0] in _ORDINARY_4  # Rejects leading zeros.
        raw = inet_pton(AF_INET6, text)
        return raw[0] in _ORDINARY_6 and inet_ntop(AF_INET6, raw) == text
    except (OSError, ValueError):
        return False


def are_plain_hosts(texts: Sequence[str], family: IPFamily) -> bool:
    """Return True if `is_plain_host` holds for every text; a slice has up to a thousand."""
    if family is not IPFamily.IPV4:
        return all(is_plain_host(text, family) for text in texts)
    try:
        return _ORDINARY_4.issuperset(b"".join(map(inet_pton, repeat(AF_INET), texts))[::4])
    except (OSError, ValueError):
        return False


def host_address(text: str) -> str:
    """Return the canonical form of an address that a host can have. Raises ValueError, also for special-use addresses.

    The error message describes the problem without repeating the value; this also holds for the functions below.
    """
    return text if is_plain_host(text, net.family_of(text)) else _unusual_address(text)


@lru_cache(maxsize=8192)
def _unusual_address(text: str) -> str:
    address = any_address(text)
    if why := special_use(address):
        raise ValueError(f"is {why}, which no other host can reach")
    return address


def any_address(text: str) -> str:
    """Return the canonical form of any address. Raises ValueError."""
    try:
        return net.address(text)
    except ValueError:
        raise ValueError("is not an IP address") from None


def family_address(text: str, family: IPFamily) -> str:
    """Return the canonical form of a host address of one family. Raises ValueError."""
    address = host_address(text)
    if (":" in address) is not (family is IPFamily.IPV6):
        raise ValueError(f"is {net.family_of(address).label}, but {family.label} is needed here")
    return address


def any_network(text: str) -> str:
    """Return the canonical form of a CIDR. Raises ValueError."""
    try:
        return net.network(text)
    except ValueError:
        raise ValueError("is not a CIDR such as 10.0.0.0/8 or fd00::/64") from None


_ANNOTATION_PREFIX = re.compile(r"(?:[a-z0-9_-]+\.)+[a-z0-9_-]+(?:/(?!-$)[a-z0-9_-]*)?")


def annotation_prefix(text: str) -> str:
    """Return `text` if annotation names can begin with it: a domain, `domain/`, or `domain/name`. Raises ValueError."""
    if not _ANNOTATION_PREFIX.fullmatch(text):
        raise ValueError("is not an annotation prefix: write a domain, optionally followed by /NAME")
    return text


_ZONE_LABEL = re.compile(r"[-A-Za-z0-9_*/+=:~^%&!?,|\[\]{}<>#'`]{1,63}")


def dns_zone(text: str) -> str:
    """Return a DNS zone in lower case with a dot at its end. Raises ValueError."""
    zone = text.lower().removesuffix(".") + "."
    if text != "." and not (len(zone) < 255 and all(map(_ZONE_LABEL.fullmatch, zone[:-1].split(".")))):
        raise ValueError("is not the name of a DNS zone, such as cluster.local")
    return "." if text == "." else zone
