"""The overlay's devices, entries, and routes in the kernel, by rtnetlink, in the calling thread's network namespace.

Constants are those of linux/rtnetlink.h, if_link.h, and neighbour.h.
"""

from __future__ import annotations

import errno
import itertools
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from narthex.linux.netlink import DumpInterrupted, NetlinkError, payloads
from narthex.linux.netlink import attribute as attr
from narthex.linux.rtnetlink import RtNetlink
from narthex.model import IPFamily
from narthex.model.values import address_text
from narthex.overlay.changes import (
    AddDevice,
    AddDeviceAddress,
    DeleteDevice,
    ObservedDevice,
    OverlayChange,
    OverlayState,
    PutEntry,
    RemoveDeviceAddress,
    RemoveEntry,
    SetDevice,
)
from narthex.overlay.desired import (
    KernelRoute,
    OverlayFdbEntry,
    OverlayNeighbor,
    OverlayRoute,
    VxlanDevice,
    family_of_device,
)
from narthex.overlay.interfaces import NodeInterface

_NEWLINK, _DELLINK, _GETLINK = 16, 17, 18
_NEWADDR, _DELADDR, _GETADDR = 20, 21, 22
_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_NEWNEIGH, _DELNEIGH, _GETNEIGH = 28, 29, 30
_REPLACE, _EXCL, _CREATE = 0x100, 0x200, 0x400
_NESTED = 0x8000
_IFINFO, _IFA = struct.Struct("=BxHiII"), struct.Struct("=BBBBI")
_RT, _ND = struct.Struct("=BBBBBBBBI"), struct.Struct("=B3xiHBB")
_UP = 0x1
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINKINFO = 1, 3, 4, 18
_IFLA_EXT_MASK, _SKIP_STATS = 29, 1 << 3
_INFO_KIND, _INFO_DATA = 1, 2
_VXLAN_ID, _VXLAN_LINK, _VXLAN_LOCAL, _VXLAN_LEARNING = 1, 3, 4, 7
_VXLAN_PORT, _VXLAN_LOCAL6, _VXLAN_GBP = 15, 17, 23
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFA_F_NODAD = 0x02
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY = 1, 4, 5, 6
_RTNH_F_ONLINK, _RTM_F_CLONED = 4, 0x200
_TABLE_MAIN, _PROTOCOL_BOOT, _SCOPE_GLOBAL, _UNICAST = 254, 3, 0, 1
_NDA_DST, _NDA_LLADDR, _NDA_IFINDEX = 1, 2, 8
_NUD_PERMANENT, _NTF_SELF = 0x80, 0x02
_AF = {IPFamily.IPV4: socket.AF_INET, IPFamily.IPV6: socket.AF_INET6}
_BY_SIZE = {4: socket.AF_INET, 16: socket.AF_INET6}
_ATTEMPTS = 10

T = TypeVar("T")
Message = tuple[int, int, bytes]
"""Type, flags, and body."""


class ChangeRejected(OSError):
    """The kernel rejected a change; the message names it."""

    def __init__(self, change: OverlayChange, error: OSError) -> None:
        super().__init__(error.errno, f"{described(change)}: {error.strerror}")


class OverlayKernel:
    """Reads and changes the kernel state through one netlink socket. Not thread-safe."""

    def __init__(self) -> None:
        self._netlink = RtNetlink()

    def close(self) -> None:
        """Close the socket."""
        self._netlink.close()

    # ---- reading ---------------------------------------------------------------------------------------------------

    def links(self) -> list[NodeInterface]:
        """Return all interfaces that are up, except loopback, with their addresses. Raises OSError."""
        found: dict[int, list[str]] = {}
        for data in self._dump(_GETADDR, _IFA.pack(0, 0, 0, 0, 0)):
            _, _, _, scope, index = _IFA.unpack_from(data)
            if scope == _SCOPE_GLOBAL:
                values = payloads(data, _IFA.size)
                found.setdefault(index, []).append(address_text(values.get(_IFA_LOCAL) or values[_IFA_ADDRESS]))
        return [
            NodeInterface(name=link.name, index=link.index, mtu=link.mtu, addresses=tuple(found.get(link.index, ())))
            for link in self._again(self._netlink.links)
            if link.up and link.name != "lo"
        ]

    def default_link(self, families: Iterable[IPFamily]) -> int:
        """Return the interface index of the default route of the first family that has one; 0 if there is none. Raises OSError."""
        for family in families:
            found = [values for _, values, head in self._routes(family) if head[1] == 0 and _RTA_OIF in values]
            if found:
                best = min(found, key=lambda values: _number(values.get(_RTA_PRIORITY, b"")))
                return _number(best[_RTA_OIF])
        return 0

    def read(self, names: Iterable[str], families: Sequence[IPFamily]) -> tuple[OverlayState, tuple[KernelRoute, ...]]:
        """Return the current state of our devices, and all routes of the main table. Raises OSError.

        Our devices are those named, and those with the name of a VXLAN device of any VNI.
        """
        linked = {link.index: link.name for link in self._again(self._netlink.links)}
        named = {*names, *(name for name in linked.values() if family_of_device(name) is not None)}
        devices = {name: held for name in sorted(named) if (held := self._device(name)) is not None}
        indexes = {held.index: held.name for held in devices.values()}
        neighbours: set[OverlayNeighbor] = set()
        forwards: set[OverlayFdbEntry] = set()
        for held in devices.values():
            if held.kind == "vxlan":
                neighbours.update(self._neighbours(held.name, held.index))
                forwards.update(self._forwards(held.name, held.index))
        routes: set[OverlayRoute] = set()
        kernel_routes = []
        for family in families:
            for destination, values, head in self._routes(family):
                index = _number(values.get(_RTA_OIF, b""))
                via = address_text(values[_RTA_GATEWAY]) if _RTA_GATEWAY in values else ""
                kernel_routes.append(KernelRoute(destination, via, index))
                if index in linked:
                    name = indexes.get(index, linked[index])
                    routes.add(OverlayRoute(destination, via, name, bool(head[8] & _RTNH_F_ONLINK)))
        have = OverlayState(
            devices=devices, neighbours=frozenset(neighbours), forwards=frozenset(forwards), routes=frozenset(routes)
        )
        return have, tuple(kernel_routes)

    def _device(self, name: str) -> ObservedDevice | None:
        body = _IFINFO.pack(0, 0, 0, 0, 0) + attr(_IFLA_IFNAME, name.encode() + b"\0")
        body += attr(_IFLA_EXT_MASK, struct.pack("=I", _SKIP_STATS))
        try:
            found = next(self._netlink.answers(self._netlink.request(_GETLINK, body)))
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise
        _, _, index, flags, _ = _IFINFO.unpack_from(found)
        values = payloads(found, _IFINFO.size)
        info = payloads(values.get(_IFLA_LINKINFO, b""), 0)
        data = payloads(info.get(_INFO_DATA, b""), 0)
        local = data.get(_VXLAN_LOCAL) or data.get(_VXLAN_LOCAL6) or b""
        addresses = self._again(lambda: self._netlink.addresses(index))
        return ObservedDevice(
            name=name,
            index=index,
            kind=info.get(_INFO_KIND, b"").rstrip(b"\0").decode("ascii", "replace"),
            up=bool(flags & _UP),
            mac=values.get(_IFLA_ADDRESS, b"").hex(":"),
            mtu=_number(values.get(_IFLA_MTU, b"")),
            vni=_number(data.get(_VXLAN_ID, b"")),
            port=int.from_bytes(data.get(_VXLAN_PORT, b""), "big"),
            local=address_text(local) if local else "",
            link=_number(data.get(_VXLAN_LINK, b"")),
            learning=data.get(_VXLAN_LEARNING, b"\0") != b"\0",
            gbp=_VXLAN_GBP in data,
            addresses=tuple(f"{address_text(one.address)}/{one.prefix}" for one in addresses),
        )

    def _neighbours(self, name: str, index: int) -> Iterator[OverlayNeighbor]:
        for family in (socket.AF_INET, socket.AF_INET6):
            for state, values in self._entries(family, index):
                if state & _NUD_PERMANENT and _NDA_DST in values and _NDA_LLADDR in values:
                    yield OverlayNeighbor(name, address_text(values[_NDA_DST]), values[_NDA_LLADDR].hex(":"))

    def _forwards(self, name: str, index: int) -> Iterator[OverlayFdbEntry]:
        for state, values in self._entries(socket.AF_BRIDGE, index):
            if state & _NUD_PERMANENT and _NDA_DST in values and _NDA_LLADDR in values:
                yield OverlayFdbEntry(name, values[_NDA_LLADDR].hex(":"), address_text(values[_NDA_DST]))

    def _entries(self, family: int, index: int) -> Iterator[tuple[int, Mapping[int, bytes]]]:
        """Yield state and attributes of a link's neighbor entries or, for AF_BRIDGE, of its FDB."""
        # The link of an FDB is selected in the header, that of neighbors by an attribute.
        bridge = family == socket.AF_BRIDGE
        body = _ND.pack(family, index if bridge else 0, 0, 0, 0)
        if not bridge:
            body += attr(_NDA_IFINDEX, struct.pack("=I", index))
        for data in self._dump(_GETNEIGH, body):
            _, where, state, _, _ = _ND.unpack_from(data)
            if where == index:
                yield state, payloads(data, _ND.size)

    def _routes(self, family: IPFamily) -> Iterator[tuple[str, Mapping[int, bytes], tuple[int, ...]]]:
        """Yield destination, attributes, and header of each unicast route of the main table."""
        body = _RT.pack(_AF[family], 0, 0, 0, _TABLE_MAIN, 0, 0, 0, 0)
        try:
            routes = self._dump(_GETROUTE, body)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            # The table does not exist before the first link of a network namespace is up.
            return
        for data in routes:
            head = _RT.unpack_from(data)
            _, prefix, _, _, table, _, _, kind, flags = head
            if table == _TABLE_MAIN and kind == _UNICAST and not flags & _RTM_F_CLONED:
                values = payloads(data, _RT.size)
                address = values.get(_RTA_DST, bytes(family.host_bits // 8))
                yield f"{address_text(address)}/{prefix}", values, (*head[:8], flags)

    def _dump(self, kind: int, body: bytes) -> list[bytes]:
        return self._again(lambda: list(self._netlink.dump(kind, body)))

    def _again(self, read: Callable[[], list[T]]) -> list[T]:
        """Return a consistent dump; dumps that are interrupted by changes are repeated."""
        for _ in range(_ATTEMPTS):
            try:
                return read()
            except DumpInterrupted:
                continue
        raise OSError(errno.EAGAIN, "the kernel state keeps changing during the dump")

    # ---- changing --------------------------------------------------------------------------------------------------

    def apply(self, changes: Iterable[OverlayChange]) -> None:
        """Apply changes in order.

        Raises ChangeRejected for the first rejected change after all changes of the same type have been tried.
        """
        indexes: dict[str, int] = {}

        def index(name: str) -> int:
            """Return an interface's index, read once for each call of `apply`.

            Raise `NetlinkError` with ENODEV if it is missing.
            """
            if name not in indexes:
                link = self._netlink.link(name)
                if link is None:
                    raise NetlinkError(errno.ENODEV, f"there is no interface {name}")
                indexes[name] = link.index
            return indexes[name]

        for _, group in itertools.groupby(changes, lambda change: (type(change), type(getattr(change, "entry", None)))):
            some = list(group)
            messages = []
            for change in some:
                try:
                    messages.append(_message(change, index))
                except OSError as error:
                    raise ChangeRejected(change, error) from error
            kind, flags, _ = messages[0]
            said = self._netlink.each(kind, [body for _, _, body in messages], flags)
            if isinstance(some[0], AddDevice | DeleteDevice):
                indexes.clear()
            for change, answer in zip(some, said, strict=True):
                if answer is not None and answer.errno not in _HARMLESS.get(type(change), ()):
                    raise ChangeRejected(change, answer)


_HARMLESS: Mapping[type, tuple[int, ...]] = {
    AddDeviceAddress: (errno.EEXIST,),
    RemoveDeviceAddress: (errno.EADDRNOTAVAIL,),
    DeleteDevice: (errno.ENODEV,),
    # ESRCH: no such route.
    RemoveEntry: (errno.ENOENT, errno.ESRCH),
}
"""Errors that mean that the change is in effect already."""


def described(change: OverlayChange) -> str:
    """Return a change in words."""
    match change:
        case DeleteDevice(name, why):
            return f"delete {name}, since {why}"
        case AddDevice(device):
            return f"add {device.name}"
        case SetDevice(device):
            return f"set {device.name} up with address {device.mac} and MTU {device.mtu}"
        case AddDeviceAddress(device=name, address=address):
            return f"add {address} to {name}"
        case RemoveDeviceAddress(device=name, address=address):
            return f"remove {address} from {name}"
        case PutEntry(entry):
            return f"put {_entry(entry)}"
        case RemoveEntry(entry):
            return f"remove {_entry(entry)}"


def _entry(entry: OverlayNeighbor | OverlayFdbEntry | OverlayRoute) -> str:
    match entry:
        case OverlayNeighbor():
            return f"neighbour {entry.address} lladdr {entry.mac} on {entry.device}"
        case OverlayFdbEntry():
            return f"FDB entry {entry.mac} to {entry.via} on {entry.device}"
        case OverlayRoute():
            return f"route {entry.destination}{f' via {entry.via}' if entry.via else ''} on {entry.device}"


def _message(change: OverlayChange, index: Callable[[str], int]) -> Message:
    match change:
        case DeleteDevice(name=name):
            return _DELLINK, 0, _IFINFO.pack(0, 0, 0, 0, 0) + attr(_IFLA_IFNAME, name.encode() + b"\0")
        case AddDevice(device=device):
            return _NEWLINK, _CREATE | _EXCL, _link(device) + _vxlan(device)
        case SetDevice(device=device):
            return _NEWLINK, 0, _link(device)
        case AddDeviceAddress(device=name, address=address):
            return _NEWADDR, _CREATE | _EXCL, _address(address, index(name))
        case RemoveDeviceAddress(device=name, address=address):
            return _DELADDR, 0, _address(address, index(name))
        case PutEntry(entry=OverlayRoute() as route):
            return _NEWROUTE, _CREATE | _REPLACE, _route(route, index(route.device))
        case RemoveEntry(entry=OverlayRoute() as route):
            return _DELROUTE, 0, _route(route, index(route.device))
        case PutEntry(entry=entry) if not isinstance(entry, OverlayRoute):
            return _NEWNEIGH, _CREATE | _REPLACE, _neighbour(entry, index(entry.device))
        case RemoveEntry(entry=entry) if not isinstance(entry, OverlayRoute):
            return _DELNEIGH, 0, _neighbour(entry, index(entry.device))
    raise TypeError(f"{change!r} is not a change")


def _link(device: VxlanDevice) -> bytes:
    head = _IFINFO.pack(0, 0, 0, _UP, _UP) + attr(_IFLA_IFNAME, device.name.encode() + b"\0")
    return head + attr(_IFLA_ADDRESS, bytes.fromhex(device.mac.replace(":", ""))) + attr(_IFLA_MTU, _word(device.mtu))


def _vxlan(device: VxlanDevice) -> bytes:
    data = attr(_VXLAN_ID, _word(device.vni)) + attr(_VXLAN_LINK, _word(device.link))
    data += attr(_VXLAN_LOCAL if device.family is IPFamily.IPV4 else _VXLAN_LOCAL6, _packed(device.local))
    data += attr(_VXLAN_PORT, struct.pack(">H", device.port)) + attr(_VXLAN_LEARNING, bytes([device.learning]))
    data += attr(_VXLAN_GBP, b"") if device.gbp else b""
    return attr(_IFLA_LINKINFO | _NESTED, attr(_INFO_KIND, b"vxlan") + attr(_INFO_DATA | _NESTED, data))


def _address(address: str, index: int) -> bytes:
    text, _, prefix = address.partition("/")
    raw = _packed(text)
    bits = int(prefix) if prefix else 8 * len(raw)
    body = _IFA.pack(_BY_SIZE[len(raw)], bits, 0, 0, index) + attr(_IFA_LOCAL, raw) + attr(_IFA_ADDRESS, raw)
    # The address is unique, so duplicate address detection is not needed.
    return body + attr(_IFA_FLAGS, _word(_IFA_F_NODAD)) if len(raw) == 16 else body


def _route(route: OverlayRoute, index: int) -> bytes:
    text, _, prefix = route.destination.partition("/")
    raw = _packed(text)
    flags = _RTNH_F_ONLINK if route.onlink else 0
    body = _RT.pack(_BY_SIZE[len(raw)], int(prefix), 0, 0, _TABLE_MAIN, _PROTOCOL_BOOT, _SCOPE_GLOBAL, _UNICAST, flags)
    body += attr(_RTA_DST, raw) + attr(_RTA_OIF, _word(index))
    return body + (attr(_RTA_GATEWAY, _packed(route.via)) if route.via else b"")


def _neighbour(entry: OverlayNeighbor | OverlayFdbEntry, index: int) -> bytes:
    mac = attr(_NDA_LLADDR, bytes.fromhex(entry.mac.replace(":", "")))
    if isinstance(entry, OverlayFdbEntry):
        head = _ND.pack(socket.AF_BRIDGE, index, _NUD_PERMANENT, _NTF_SELF, 0)
        return head + attr(_NDA_DST, _packed(entry.via)) + mac
    raw = _packed(entry.address)
    return _ND.pack(_BY_SIZE[len(raw)], index, _NUD_PERMANENT, 0, _UNICAST) + attr(_NDA_DST, raw) + mac


def _word(number: int) -> bytes:
    return struct.pack("=I", number)


def _number(data: bytes) -> int:
    return int.from_bytes(data, sys.byteorder)


def _packed(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)
