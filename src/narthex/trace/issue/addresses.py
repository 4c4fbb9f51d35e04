"""Other addresses in place of those of a text, with the same common prefixes and the same order.

Two addresses share as many leading bits as their replacements, and an address is lower than another one exactly if its replacement
is. Routes, networks, and ranges therefore contain the same addresses. A bit is replaced only where no other address of the text, and
no well-known network, needs its value: the replacement is a walk through the tree of all prefixes.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Iterator

from narthex.model import IPFamily, family_of

_KEPT = {
    # Networks to which the kernel, or a rule, gives a meaning. Private networks stay private.
    IPFamily.IPV4: (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "224.0.0.0/3"
    ),
    IPFamily.IPV6: ("::/96", "::ffff:0:0/96", "fc00::/8", "fd00::/8", "fe80::/10", "ff00::/8", "2000::/3"),
}  # fmt: skip
_WHOLE = {
    IPFamily.IPV4: ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3"),
    IPFamily.IPV6: ("::/96", "::ffff:0:0/96", "fe80::/10", "ff00::/8"),
}
"""Networks whose addresses stay as they are."""

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AddressReplacements:
    """Replaces the addresses and networks that it was given."""

    def __init__(self, texts: Iterable[str], key: bytes) -> None:
        """Take all addresses and networks of a text; `key` chooses among the possible replacements."""
        self._key = key
        self._prefixes: dict[IPFamily, set[str]] = {}
        """Of each family, all prefixes of its addresses and networks, as bits."""
        networks = [network for text in texts for network in _networks(text)]
        for family in IPFamily:
            held = {_bits(network) for network in networks if network.version == family.value}
            held |= {_bits(ipaddress.ip_network(each)) for each in _KEPT[family]}
            self._prefixes[family] = {bits[:length] for bits in held for length in range(len(bits) + 1)}

    def replaced(self, text: str) -> str:
        """Return the replacement of an address or network, in the same notation. Raises ValueError for other texts."""
        held, slash, length = text.partition("/")
        family = family_of(held)
        if any(_contains(each, held) for each in _WHOLE[family]):
            return text
        whole = f"{int(ipaddress.ip_address(held)):0{family.host_bits}b}"
        most = int(length) if slash and "1" not in whole[int(length) :] else family.host_bits
        bits = ""
        for number in range(family.host_bits):
            bits += self._bit(family, whole[:number], whole[number]) if number < most else whole[number]
        made = (ipaddress.IPv6Address if family is IPFamily.IPV6 else ipaddress.IPv4Address)(int(bits, 2))
        return f"{made}{slash}{length}"

    def _bit(self, family: IPFamily, before: str, bit: str) -> str:
        """Return the replacement of the bit behind a prefix."""
        prefixes = self._prefixes[family]
        if before in _FIXED[family] or (before + "0" in prefixes and before + "1" in prefixes):
            return bit
        if len(before) >= family.host_bits - 1:
            # The last address of a network is a broadcast address, and the first one is no host's.
            return bit
        digest = hmac.digest(self._key, f"{family.value} {before}".encode(), hashlib.sha256)
        return str(int(bit) ^ (digest[0] & 1))


def _networks(text: str) -> Iterator[_Network]:
    """Yield the network that a text names. An address with the length of its network is both."""
    network = ipaddress.ip_network(text, strict=False)
    yield network
    own = ipaddress.ip_interface(text).ip
    if own != network.network_address:
        yield ipaddress.ip_network(own)


def _bits(network: _Network) -> str:
    width = network.max_prefixlen
    return f"{int(network.network_address):0{width}b}"[: network.prefixlen]


def _contains(network: str, held: str) -> bool:
    return ipaddress.ip_address(held) in ipaddress.ip_network(network)


_FIXED = {
    family: frozenset(
        bits[:length]
        for each in _KEPT[family]
        for bits in (_bits(ipaddress.ip_network(each)),)
        for length in range(len(bits))
    )
    for family in IPFamily
}
