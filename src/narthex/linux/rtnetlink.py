"""Links, addresses, and routes by rtnetlink, for the CNI plugins: one datagram for all changes of a namespace.

Numbers are those of linux/rtnetlink.h, if_link.h, if_addr.h, and neighbour.h. A plugin has less time than the import
of a netlink library takes.
"""

from __future__ import annotations

import _socket as socket
import errno
import struct
import sys
import time

from narthex.linux.netlink import Netlink, NetlinkError, messages, payloads
from narthex.linux.netlink import attribute as attr
from narthex.model.links import (
    AddAddress,
    AddBridge,
    AddPortVlans,
    AddRoute,
    AddVeth,
    DeleteAddress,
    DeleteLink,
    DeletePortVlan,
    DeleteRoute,
    ForgetNeighbour,
    PortFlags,
    PortVlan,
    Promiscuous,
    SetDown,
    SetHardwareAddress,
    SetUp,
)
from narthex.model.values import Network, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from narthex.model.links import LinkChange

_NETLINK_ROUTE = 0
_SOL_NETLINK, _NETLINK_GET_STRICT_CHK = 270, 12
_NEWLINK, _DELLINK, _GETLINK, _SETLINK = 16, 17, 18, 19
_NEWADDR, _DELADDR, _GETADDR = 20, 21, 22
_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_DELNEIGH = 29
_REPLACE, _EXCL, _CREATE = 0x100, 0x200, 0x400
_NESTED = 0x8000
_ADD_MEMBERSHIP, _GROUP_LINK = 1, 1
_IFINFO = struct.Struct("=BxHiII")
_IFA, _RT, _ND = struct.Struct("=BBBBI"), struct.Struct("=BBBBBBBBI"), struct.Struct("=B3xiHBB")
_UP, _PROMISC = 0x1, 0x100
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 1, 3, 4, 10, 18, 28
_IFLA_LINK, _IFLA_OPERSTATE, _IFLA_AF_SPEC, _IFLA_EXT_MASK, _FILTER_SKIP_STATS = 5, 16, 26, 29, 1 << 3
_OPERATIONAL = 6
_INFO_KIND, _INFO_DATA, _INFO_SLAVE_DATA, _INFO_SLAVE_KIND = 1, 2, 5, 4
_VETH_INFO_PEER = 1
_BRPORT_STATE, _BRPORT_HAIRPIN, _BRPORT_ISOLATED = 1, 4, 33
_FORWARDING = 3
_BR_VLAN_FILTERING, _BR_VLAN_DEFAULT_PVID = 7, 39
_BRIDGE_VLAN_INFO = 2
_VLAN_NATIVE, _VLAN_RANGE_BEGIN, _VLAN_RANGE_END = 0x2 | 0x4, 0x8, 0x10
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS, _IFA_BROADCAST = 1, 2, 8, 4
_IFA_F_NODAD, _IFA_F_NOPREFIXROUTE = 0x02, 0x200
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC, _RTA_METRICS, _RTA_TABLE = 1, 4, 5, 6, 7, 8, 15
_RTAX_MTU, _RTAX_ADVMSS = 2, 8
_TABLE_MAIN, _PROTOCOL_BOOT, _UNICAST = 254, 3, 1
_SCOPE_NOWHERE, _SCOPE_LINK, _SCOPE_GLOBAL = 255, 253, 0
_NDA_DST = 1
_FAMILIES = {4: socket.AF_INET, 16: socket.AF_INET6}
_AF_BRIDGE = 7
_LOOK_AGAIN_SECONDS = 1.0
"""The kernel reports every change of a link; only a report that is lost for lack of memory is waited for this long."""


class LinkState(Value):
    """A network interface."""

    name: str
    index: int
    kind: str
    mac: bytes
    mtu: int
    up: bool
    master: int
    """Index of its bridge; 0 for none."""
    partner: int
    """Index of the other end of a veth pair, in its namespace; 0 for none."""
    forwards: bool = False
    """It is a forwarding port of a bridge. A bridge needs a moment after both ends are up."""
    operational: bool = False
    """The link carries packets. A work queue of the kernel finds that out, some time after both ends are up."""
    promiscuous: bool = False
    default_vlan: int = 0
    """For bridges: the VLAN of new ports; 0 for none."""


class RouteState(Value):
    """A route of the main table."""

    destination: Network
    gateway: bytes
    link: int
    """Index of the interface."""


class RtNetlink(Netlink):
    """A socket in the calling thread's network namespace. Not thread-safe."""

    def __init__(self) -> None:
        super().__init__(_NETLINK_ROUTE)
        # The kernel narrows dumps to the link asked for: a node with many pods has thousands of addresses.
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)

    def link(self, name: str) -> LinkState | None:
        """Return an interface by name; None if it does not exist. Raises NetlinkError."""
        body = _IFINFO.pack(0, 0, 0, 0, 0) + attr(_IFLA_IFNAME, _text(name))
        body += attr(_IFLA_EXT_MASK, struct.pack("=I", _FILTER_SKIP_STATS))
        try:
            for data in self.answers(self.request(_GETLINK, body)):
                return _link(data)
        except NetlinkError as error:
            if error.errno != errno.ENODEV:
                raise
        return None

    def links(self, master: int = 0) -> list[LinkState]:
        """Return all interfaces, or the ports of a bridge. Raises NetlinkError."""
        body = _IFINFO.pack(0, 0, 0, 0, 0)
        if master:
            body += attr(_IFLA_MASTER, struct.pack("=I", master))
        return [_link(data) for data in self.dump(_GETLINK, body)]

    def await_operational(self, name: str, seconds: float) -> LinkState | None:
        """Wait until a link carries packets; return it as it is then or after so many seconds, None if there is none.

        Waits for the kernel's reports in the calling thread's network namespace. Raises NetlinkError, OSError.
        """
        found = self.link(name)
        if found is None or found.operational:
            return found
        events = LinkEvents()
        try:
            end = time.monotonic() + seconds
            while (found := self.link(name)) is not None and not found.operational:
                left = end - time.monotonic()
                if left <= 0:
                    break
                events.await_change(found.index, min(left, _LOOK_AGAIN_SECONDS))
        finally:
            events.close()
        return found

    def addresses(self, index: int) -> list[Network]:
        """Return the addresses of an interface, without link-local IPv6 ones. Raises NetlinkError."""
        found = []
        for data in self.dump(_GETADDR, _IFA.pack(0, 0, 0, 0, index)):
            family, prefix, _, scope, where = _IFA.unpack_from(data)
            if where == index and (scope == _SCOPE_GLOBAL or family == socket.AF_INET):
                values = payloads(data, _IFA.size)
                found.append(Network(values.get(_IFA_LOCAL) or values[_IFA_ADDRESS], prefix))
        return found

    def routes(self, family: int) -> list[RouteState]:
        """Return the routes of the main table to networks, of one family (4 or 6). Raises NetlinkError."""
        number, bits = (socket.AF_INET, 32) if family == 4 else (socket.AF_INET6, 128)
        found = []
        for data in self.dump(_GETROUTE, _RT.pack(number, 0, 0, 0, 0, 0, 0, 0, 0)):
            _, prefix, _, _, table, _, _, kind, _ = _RT.unpack_from(data)
            if table == _TABLE_MAIN and kind == _UNICAST:
                values = payloads(data, _RT.size)
                network = Network(values.get(_RTA_DST, bytes(bits // 8)), prefix)
                link = int.from_bytes(values.get(_RTA_OIF, b""), sys.byteorder)
                found.append(RouteState(network, values.get(_RTA_GATEWAY, b""), link))
        return found

    def fulfil(self, desired: Sequence[LinkChange], peers_namespace: int = -1) -> None:
        """Apply changes in one datagram.

        `peers_namespace` is the open file of the namespace for the other ends of veth pairs.

        Later changes are tried even if an earlier one fails. Raises LinkChangeRefused with the first refused one.
        """
        numbers: dict[str, int] = {}
        requests: list[tuple[LinkChange, int, int, bytes]] = []
        for change in desired:
            link = (
                change.bridge if isinstance(change, AddVeth) else change.link if isinstance(change, _ON_A_LINK) else ""
            )
            if link and link not in numbers:
                found = self.link(link)
                if found is None:
                    # What goes before makes the link whose number is needed now.
                    self._transact(requests)
                    requests = []
                    found = self.link(link)
                if found is None:
                    raise LinkChangeRefused(change, NetlinkError(errno.ENODEV, f"there is no interface {link}"))
                numbers[link] = found.index
            requests.append((change, *_message(change, numbers, peers_namespace)))
        self._transact(requests)

    def _transact(self, requests: Sequence[tuple[LinkChange, int, int, bytes]]) -> None:
        answers = self.batch([(kind, flags, body) for _, kind, flags, body in requests])
        for (change, *_), error in zip(requests, answers, strict=True):
            if error is not None and not _is_harmless(change, error):
                raise LinkChangeRefused(change, error)


class LinkEvents(Netlink):
    """The kernel's reports of changed links in the calling thread's network namespace. Not thread-safe."""

    def __init__(self) -> None:
        super().__init__(_NETLINK_ROUTE)
        self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _GROUP_LINK)

    def await_change(self, index: int, seconds: float) -> None:
        """Wait for the next report of a link, at most so many seconds; also return if reports were lost. Raises OSError."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(_MOST_REPORT)
            except TimeoutError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                return
            if any(_IFINFO.unpack_from(body)[2] == index for *_, body in messages(data) if len(body) >= _IFINFO.size):
                return


_MOST_REPORT = 1 << 16
_ON_A_LINK = (AddAddress, DeleteAddress, AddRoute, DeleteRoute, ForgetNeighbour, AddPortVlans, DeletePortVlan)
_HARMLESS: dict[type, tuple[int, ...]] = {
    AddBridge: (errno.EEXIST,),
    AddAddress: (errno.EEXIST,),
    AddRoute: (errno.EEXIST,),
    DeleteAddress: (errno.EADDRNOTAVAIL,),
    DeleteLink: (errno.ENODEV,),
    DeletePortVlan: (errno.ENOENT,),
    DeleteRoute: (errno.ESRCH,),
    ForgetNeighbour: (errno.ENOENT,),
}
"""Errors that only say that the state exists already."""


def _is_harmless(change: LinkChange, error: NetlinkError) -> bool:
    if isinstance(change, AddVeth) and change.shared and error.errno == errno.EEXIST:
        return True
    return error.errno in _HARMLESS.get(type(change), ())


class LinkChangeRefused(OSError):
    """The kernel refused a change."""

    def __init__(self, change: LinkChange, error: NetlinkError) -> None:
        super().__init__(error.errno, f"{described(change)}: {error.strerror}")


def described(change: LinkChange) -> str:
    """Return a short description of a change, for a message."""
    kind = type(change).__name__
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind).strip()
    on = getattr(change, "link", "") or getattr(change, "name", "")
    what = getattr(change, "network", None) or getattr(change, "destination", None) or ""
    return " ".join(filter(None, (words, str(what), "on" if what else "", on)))


def _message(change: LinkChange, numbers: Mapping[str, int], namespace: int) -> tuple[int, int, bytes]:
    """Return type, flags, and body of the message for a change."""
    match change:
        case AddBridge():
            filtering = attr(_INFO_DATA | _NESTED, attr(_BR_VLAN_FILTERING, b"\1")) if change.filtering else b""
            info = attr(_IFLA_LINKINFO, attr(_INFO_KIND, b"bridge") + filtering)
            head = _IFINFO.pack(0, 0, 0, _UP, _UP) + _named(change.name, change.mac, change.mtu)
            return _NEWLINK, _CREATE | _EXCL, head + info
        case AddVeth():
            return _NEWLINK, _CREATE | _EXCL, _veth(change, numbers, namespace)
        case PortFlags():
            port = attr(_BRPORT_HAIRPIN, bytes([change.hairpin])) + attr(_BRPORT_ISOLATED, bytes([change.isolated]))
            info = attr(_INFO_SLAVE_KIND, b"bridge") + attr(_INFO_SLAVE_DATA | _NESTED, port)
            return _NEWLINK, 0, _IFINFO.pack(0, 0, 0, 0, 0) + _named(change.link) + attr(_IFLA_LINKINFO | _NESTED, info)
        case AddPortVlans():
            return _SETLINK, 0, _port_vlans(numbers[change.link], change.vlans)
        case DeletePortVlan():
            return _DELLINK, 0, _port_vlans(numbers[change.link], (PortVlan(change.number),))
        case Promiscuous():
            return _NEWLINK, 0, _IFINFO.pack(0, 0, 0, _PROMISC, _PROMISC) + _named(change.link)
        case SetUp():
            return _NEWLINK, 0, _IFINFO.pack(0, 0, 0, _UP, _UP) + _named(change.link)
        case SetDown():
            return _NEWLINK, 0, _IFINFO.pack(0, 0, 0, 0, _UP) + _named(change.link)
        case SetHardwareAddress():
            return _NEWLINK, 0, _IFINFO.pack(0, 0, 0, 0, 0) + _named(change.link, change.mac)
        case DeleteLink():
            return _DELLINK, 0, _IFINFO.pack(0, 0, 0, 0, 0) + _named(change.link)
        case AddAddress():
            return _NEWADDR, _CREATE | _EXCL, _address(change, numbers[change.link])
        case DeleteAddress():
            network = change.network
            head = _IFA.pack(_FAMILIES[len(network.address)], network.prefix, 0, 0, numbers[change.link])
            return _DELADDR, 0, head + attr(_IFA_LOCAL, network.address)
        case AddRoute():
            return _NEWROUTE, _CREATE | (_REPLACE if change.replace else _EXCL), _route(change, numbers[change.link])
        case DeleteRoute():
            network = change.destination
            head = _RT.pack(_FAMILIES[len(network.address)], network.prefix, 0, 0, _TABLE_MAIN, 0, _SCOPE_NOWHERE, 0, 0)
            oif = attr(_RTA_OIF, struct.pack("=I", numbers[change.link]))
            return _DELROUTE, 0, head + attr(_RTA_DST, network.first) + oif
        case ForgetNeighbour():
            head = _ND.pack(_FAMILIES[len(change.address)], numbers[change.link], 0, 0, 0)
            return _DELNEIGH, 0, head + attr(_NDA_DST, change.address)


def _veth(change: AddVeth, numbers: Mapping[str, int], namespace: int) -> bytes:
    peer = _IFINFO.pack(0, 0, 0, 0, 0) + _named(change.peer, change.peer_mac, change.mtu)
    if not change.shared:
        peer += attr(_IFLA_NET_NS_FD, struct.pack("=I", namespace))
    info = attr(_INFO_KIND, b"veth") + attr(_INFO_DATA | _NESTED, attr(_VETH_INFO_PEER | _NESTED, peer))
    body = _IFINFO.pack(0, 0, 0, _UP, _UP) + _named(change.name, change.mac, change.mtu)
    if change.bridge:
        body += attr(_IFLA_MASTER, struct.pack("=I", numbers[change.bridge]))
    return body + attr(_IFLA_LINKINFO | _NESTED, info)


def _port_vlans(index: int, vlans: tuple[PortVlan, ...]) -> bytes:
    """Return the body of a change of a port's VLANs; tagged ones with consecutive numbers are one range."""
    entries: list[tuple[int, int]] = []
    for at, one in enumerate(vlans):
        before, after = vlans[at - 1] if at else None, vlans[at + 1] if at + 1 < len(vlans) else None
        begins, ends = not _follows(before, one), not _follows(one, after)
        if begins or ends:
            flags = 0 if begins and ends else _VLAN_RANGE_BEGIN if begins else _VLAN_RANGE_END
            entries.append((flags | (_VLAN_NATIVE if one.native else 0), one.number))
    info = b"".join(attr(_BRIDGE_VLAN_INFO, struct.pack("=HH", *entry)) for entry in entries)
    return _IFINFO.pack(_AF_BRIDGE, 0, index, 0, 0) + attr(_IFLA_AF_SPEC | _NESTED, info)


def _follows(one: PortVlan | None, other: PortVlan | None) -> bool:
    return bool(one and other and other.number == one.number + 1 and not one.native and not other.native)


def _named(name: str, mac: bytes = b"", mtu: int | None = None) -> bytes:
    parts = attr(_IFLA_IFNAME, _text(name))
    if mac:
        parts += attr(_IFLA_ADDRESS, mac)
    return parts + (attr(_IFLA_MTU, struct.pack("=I", mtu)) if mtu else b"")


def _address(change: AddAddress, index: int) -> bytes:
    network = change.network
    flags = (0 if change.detect else _IFA_F_NODAD) | (0 if change.connected else _IFA_F_NOPREFIXROUTE)
    body = _IFA.pack(_FAMILIES[len(network.address)], network.prefix, 0, 0, index)
    body += attr(_IFA_LOCAL, network.address) + attr(_IFA_ADDRESS, network.address)
    if len(network.address) == 4:
        if network.prefix < 31:
            body += attr(_IFA_BROADCAST, network.last)
        flags &= ~_IFA_F_NODAD
    return body + attr(_IFA_FLAGS, struct.pack("=I", flags))


def _route(change: AddRoute, index: int) -> bytes:
    network, numbers = change.destination, dict(change.numbers)
    size = len(network.address)
    scope = numbers.get("scope", _SCOPE_GLOBAL if change.gateway or size == 16 else _SCOPE_LINK)
    body = _RT.pack(_FAMILIES[size], network.prefix, 0, 0, _TABLE_MAIN, _PROTOCOL_BOOT, scope & 0xFF, _UNICAST, 0)
    body += attr(_RTA_DST, network.first) if network.prefix else b""
    body += attr(_RTA_OIF, struct.pack("=I", index))
    body += attr(_RTA_GATEWAY, change.gateway) if change.gateway else b""
    body += attr(_RTA_PREFSRC, change.source) if change.source else b""
    for name, kind in (("priority", _RTA_PRIORITY), ("table", _RTA_TABLE)):
        if name in numbers:
            body += attr(kind, struct.pack("=I", numbers[name]))
    metrics = b"".join(
        attr(kind, struct.pack("=I", numbers[name]))
        for name, kind in (("mtu", _RTAX_MTU), ("advmss", _RTAX_ADVMSS))
        if numbers.get(name)
    )
    return body + (attr(_RTA_METRICS | _NESTED, metrics) if metrics else b"")


def _text(name: str) -> bytes:
    return name.encode() + b"\0"


def _link(data: bytes) -> LinkState:
    _, _, index, flags, _ = _IFINFO.unpack_from(data)
    values = payloads(data, _IFINFO.size)
    info = payloads(values.get(_IFLA_LINKINFO, b""))
    port = payloads(info.get(_INFO_SLAVE_DATA, b""))
    kind = info.get(_INFO_KIND, b"").rstrip(b"\0").decode("ascii", "replace")
    bridge = payloads(info.get(_INFO_DATA, b"")) if kind == "bridge" else {}
    return LinkState(
        values[_IFLA_IFNAME].rstrip(b"\0").decode("utf-8", "surrogateescape"),
        index,
        kind,
        values.get(_IFLA_ADDRESS, b""),
        int.from_bytes(values.get(_IFLA_MTU, b""), sys.byteorder),
        bool(flags & _UP),
        int.from_bytes(values.get(_IFLA_MASTER, b""), sys.byteorder),
        int.from_bytes(values.get(_IFLA_LINK, b""), sys.byteorder),
        port.get(_BRPORT_STATE) == bytes([_FORWARDING]),
        values.get(_IFLA_OPERSTATE) == bytes([_OPERATIONAL]),
        bool(flags & _PROMISC),
        int.from_bytes(bridge.get(_BR_VLAN_DEFAULT_PVID, b""), sys.byteorder),
    )
