"""The node's own addresses by rtnetlink, in the network namespace of the calling thread.

Its socket needs no privilege, unlike those of `linux/netlink.py`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from narthex.linux.netlink import NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, messages, payloads
from narthex.model import FAMILIES, IPFamily
from narthex.model.links import IPVS_LINK, NODE_LOCAL_DNS_LINK

_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFA_F_TENTATIVE = 0x40
_SCOPE_GLOBAL = 0
_AF = {socket.AF_INET: IPFamily.IPV4, socket.AF_INET6: IPFamily.IPV6}

_SERVICES = (IPVS_LINK, NODE_LOCAL_DNS_LINK)
"""Links whose addresses belong to Services."""
_ELSEWHERE = {IPFamily.IPV4: "192.88.99.1", IPFamily.IPV6: "2002:c058:6301::"}
"""The retired 6to4 relays (RFC 7526), which are on no local network. Only the route is looked up; nothing is sent."""


class OwnAddress(msgspec.Struct, frozen=True, kw_only=True):
    """One address of this node."""

    address: str
    prefix: int
    interface: int
    """Index of the interface."""
    is_global: bool
    """Not of link or host scope, and past duplicate address detection."""
    tentative: bool = False
    """Still in duplicate address detection."""

    @property
    def family(self) -> IPFamily:
        """Return the address's family."""
        return IPFamily.IPV6 if ":" in self.address else IPFamily.IPV4


def own_addresses() -> tuple[OwnAddress, ...]:
    """Return all addresses of all interfaces, including loopback, in the kernel's order. Raises OSError.

    Those of kube-ipvs0 and of node-local DNS belong to Services and are left out.
    """
    services = {number for number, name in socket.if_nameindex() if name in _SERVICES}
    return tuple(own for own in _all_addresses() if own.interface not in services)


def addresses_on(link: str) -> tuple[OwnAddress, ...]:
    """Return all addresses of one interface in the kernel's order; none if it does not exist. Raises OSError."""
    index = _index(link)
    return tuple(own for own in _all_addresses() if own.interface == index) if index else ()


def _all_addresses() -> Iterator[OwnAddress]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as sock:
        sock.bind((0, 0))
        sock.send(struct.pack("=IHHIIB3xI", 24, _RTM_GETADDR, NLM_F_DUMP | NLM_F_REQUEST, 1, 0, socket.AF_UNSPEC, 0))
        while True:
            for kind, _, _, body in messages(sock.recv(1 << 18)):
                if kind == NLMSG_DONE:
                    return
                if kind == NLMSG_ERROR:
                    raise OSError(-struct.unpack_from("=i", body)[0], "the kernel does not list its addresses")
                if kind == _RTM_NEWADDR and body[0] in _AF:
                    yield _own_address(body)


def _index(link: str) -> int:
    """Return the index of an interface; 0 if it does not exist.

    All interfaces are listed, since a request for a missing name makes the kernel load a module of that name.
    """
    return next((number for number, name in socket.if_nameindex() if name == link), 0)


def primary_address(family: IPFamily) -> str:
    """Return the address that this node uses towards the internet; empty if it has none of the family.

    That is the kernel's source address for the default route, otherwise the first global address.
    """
    held = [own.address for own in own_addresses() if own.family is family and own.is_global]
    number = socket.AF_INET if family is IPFamily.IPV4 else socket.AF_INET6
    try:
        with socket.socket(number, socket.SOCK_DGRAM) as sock:
            sock.connect((_ELSEWHERE[family], 9))
            chosen = str(sock.getsockname()[0])
    except OSError:
        chosen = ""
    return chosen if chosen in held else next(iter(held), "")


def primary_addresses() -> tuple[str, ...]:
    """Return the primary address of each family that has one, IPv4 first."""
    return tuple(address for family in FAMILIES if (address := primary_address(family)))


def global_addresses() -> tuple[str, ...]:
    """Return all addresses by which other machines may reach this one, in the kernel's order. Raises OSError."""
    return tuple(own.address for own in own_addresses() if own.is_global)


def usable_families(proc: Path = Path("/proc")) -> tuple[IPFamily, ...]:
    """Return the families that this network namespace supports (row 15.2).

    IPv6 needs `/proc/net/if_inet6` and must not be disabled.
    """
    switch = proc / "sys/net/ipv6/conf/all/disable_ipv6"
    off = not (proc / "net/if_inet6").exists() or (switch.exists() and switch.read_text().strip() == "1")
    return (IPFamily.IPV4,) if off else FAMILIES


def _own_address(body: bytes) -> OwnAddress:
    """Decode one `struct ifaddrmsg` with its attributes. IFA_LOCAL is the own address of a point-to-point link."""
    number, prefix, flags, scope, interface = struct.unpack_from("=BBBBI", body)
    values = payloads(body, 8)
    raw = values.get(_IFA_LOCAL) or values[_IFA_ADDRESS]
    return OwnAddress(
        address=socket.inet_ntop(number, raw),
        prefix=prefix,
        interface=interface,
        is_global=scope == _SCOPE_GLOBAL and not flags & _IFA_F_TENTATIVE,
        tentative=bool(flags & _IFA_F_TENTATIVE),
    )
