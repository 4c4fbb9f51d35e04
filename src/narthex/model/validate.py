"""Syntax of names, labels and addresses in Kubernetes objects, as the API server checks it.

What passes here consists of letters, digits, `-`, `_`, `.`, `:` and `/` only. That is the gate that keeps a stranger's
text from ever being syntax in a rule, a path or a command.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

import msgspec

from narthex.model import net
from narthex.model.net import IPFamily


class Syntax(msgspec.Struct, frozen=True):
    """A form that text must have."""

    name: str
    """With its article: "a DNS label"."""
    allowed: str
    """What is allowed, for a person who got it wrong."""
    pattern: re.Pattern[str]
    longest: int

    def holds(self, text: str) -> bool:
        """Whether the text has this form."""
        return len(text) <= self.longest and self.pattern.fullmatch(text) is not None


_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_QUALIFIED = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"

DNS_LABEL = Syntax(
    "a DNS label",
    "at most 63 lower case letters, digits and '-', beginning and ending with a letter or digit",
    re.compile(_LABEL),
    63,
)
DNS_SUBDOMAIN = Syntax(
    "a DNS name",
    "at most 253 lower case letters, digits, '-' and '.', each part beginning and ending with a letter or digit",
    re.compile(rf"{_LABEL}(?:\.{_LABEL})*"),
    253,
)
FQDN = Syntax(
    "a domain name",
    "at least two DNS labels joined by '.', such as db.example.com",
    re.compile(rf"{_LABEL}(?:\.{_LABEL})+\.?"),
    254,
)
EXTERNAL_NAME = Syntax(
    "a domain name",
    "DNS labels joined by '.', such as db.example.com",
    re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?"),
    254,
)
PORT_NAME = Syntax(
    "a port name",
    "at most 15 lower case letters, digits and single '-', with a letter in it, such as http",
    re.compile(r"(?=.*[a-z])[a-z0-9]+(?:-[a-z0-9]+)*"),
    15,
)
LABEL_VALUE = Syntax(
    "a label value",
    "empty, or at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit",
    re.compile(rf"(?:{_QUALIFIED})?"),
    63,
)
_KEY_NAME = Syntax("", "", re.compile(_QUALIFIED), 63)


class _Key(Syntax, frozen=True):
    """An optional DNS name and '/', then a name: each part has a limit of its own."""

    def holds(self, text: str) -> bool:
        """Whether the text is `name` or `prefix/name`."""
        return _is_key(text)


@lru_cache(maxsize=8192)
def _is_key(text: str) -> bool:
    """Remembered: a cluster has few keys, on very many objects."""
    prefix, slash, name = text.rpartition("/")
    return _KEY_NAME.holds(name) and (not slash or DNS_SUBDOMAIN.holds(prefix))


LABEL_KEY = _Key(
    "a label key",
    "a name of at most 63 letters, digits, '-', '_' and '.', with a DNS name and '/' before it if need be",
    re.compile(""),
    317,
)


def special(address: str) -> str:
    """Why a canonical address belongs to no single host on a network, empty when it does."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        return "an IPv4 address written as IPv6"
    if ip.is_unspecified:
        return "the unspecified address"
    if ip.is_loopback:
        return "a loopback address"
    if ip.is_link_local:
        return "a link-local address"
    return "a multicast address" if ip.is_multicast else ""


_OCTET = r"(?:\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])"
_PLAIN = re.compile(rf"(?!127\.|169\.254\.)(?:[1-9]\d?|1\d\d|2[01]\d|22[0-3])\.{_OCTET}\.{_OCTET}\.{_OCTET}", re.ASCII)
"""Canonical IPv4 addresses that are not special: nearly all there are, and known for that without being taken apart."""


def host_address(text: str) -> str:
    """Canonical form of an address that one host can have. Raises ValueError, also for special addresses.

    The error's text tells what is wrong with the value without repeating it, here and in the next functions.
    """
    return text if _PLAIN.fullmatch(text) else _unusual_address(text)


@lru_cache(maxsize=65536)
def _unusual_address(text: str) -> str:
    address = any_address(text)
    if why := special(address):
        raise ValueError(f"is {why}, which no other host can reach")
    return address


def any_address(text: str) -> str:
    """Canonical form of any address. Raises ValueError."""
    try:
        return net.address(text)
    except ValueError:
        raise ValueError("is not an IP address") from None


def family_address(text: str, family: IPFamily) -> str:
    """`host_address` of one family. Raises ValueError."""
    address = host_address(text)
    if net.family_of(address) is not family:
        raise ValueError(f"is {net.family_of(address).label}, but {family.label} is needed here")
    return address


def network(text: str) -> str:
    """Canonical form of a CIDR. Raises ValueError."""
    try:
        return net.network(text)
    except ValueError:
        raise ValueError("is not a CIDR such as 10.0.0.0/8 or fd00::/64") from None
