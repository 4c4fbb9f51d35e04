"""Links, addresses, routes, and neighbors of a test world, made with rtnetlink in this process.

A scenario has a world with half a dozen namespaces. Starting `ip` for each would cost more than the test itself, and thirty
times as much on the second kernel of tests/uml. Numbers are those of linux/rtnetlink.h, if_link.h, and neighbour.h.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from narthex.linux.links import LinkError
from narthex.linux.namespaces import in_namespace, namespace_path
from narthex.linux.netlink import attribute
from narthex.linux.rtnetlink import RtNetlink
from narthex.model import IPFamily, family_of

_NEWLINK, _NEWADDR, _DELADDR, _NEWROUTE, _DELROUTE, _NEWNEIGH = 16, 20, 21, 24, 25, 28
_REPLACE, _EXCL, _CREATE = 0x100, 0x200, 0x400
_LINK, _ADDRESS = struct.Struct("=BxHiII"), struct.Struct("=BBBBI")
_ROUTE, _NEIGHBOUR = struct.Struct("=BBBBBBBBI"), struct.Struct("=B3xiHBB")
_UP = 1
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 1, 3, 10, 18, 28
_INFO_KIND, _INFO_DATA, _VETH_PEER, _BR_STP_STATE, _BR_MCAST_SNOOPING = 1, 2, 1, 5, 23
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS, _NODAD = 1, 2, 8, 0x02
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _ONLINK = 1, 4, 5, 4
_MAIN, _LOCAL, _BOOT, _SCOPE_LINK, _SCOPE_HOST, _UNICAST = 254, 255, 3, 253, 254, 1
_TYPE_LOCAL = 2
_NDA_DST, _NDA_LLADDR, _PERMANENT = 1, 2, 0x80
_PATIENCE = 30.0
_FAMILIES = {IPFamily.IPV4: socket.AF_INET, IPFamily.IPV6: socket.AF_INET6}

Number = Callable[[str], int]
"""The number of a link by its name, or of an open file by the name of a namespace."""


class LinkRequest(msgspec.Struct, frozen=True):
    """One request; `text` is the equivalent `ip` command."""

    text: str
    kind: int
    flags: int
    body: Callable[[Number], bytes]
    """Gives the message. What it asks the number of has been made by changes before this one."""


def bridge(name: str, mac: str = "") -> LinkRequest:
    """Return the request for a bridge that is up, without spanning tree and multicast snooping."""
    data = attribute(_BR_STP_STATE, struct.pack("=I", 0)) + attribute(_BR_MCAST_SNOOPING, b"\0")
    info = attribute(_INFO_KIND, b"bridge") + attribute(_INFO_DATA, data)
    body = _LINK.pack(0, 0, 0, _UP, _UP) + _named(name, mac) + attribute(_IFLA_LINKINFO, info)
    return LinkRequest(f"link add {name} up type bridge", _NEWLINK, _CREATE | _EXCL, lambda _: body)


def veth(name: str, master: str, peer: str, peer_mac: str, namespace: str) -> LinkRequest:
    """Return the request for a bridge port that is up, and whose peer is in another namespace."""

    def body(number: Number) -> bytes:
        """Encode the pair: the end with `name` is a port of the bridge, the other end is in the namespace."""
        other = _LINK.pack(0, 0, 0, 0, 0) + _named(peer, peer_mac)
        other += attribute(_IFLA_NET_NS_FD, struct.pack("=I", number(f"netns {namespace}")))
        info = attribute(_INFO_KIND, b"veth") + attribute(_INFO_DATA, attribute(_VETH_PEER, other))
        head = _LINK.pack(0, 0, 0, _UP, _UP) + _named(name)
        return head + attribute(_IFLA_MASTER, struct.pack("=I", number(master))) + attribute(_IFLA_LINKINFO, info)

    text = f"link add {name} up master {master} type veth peer {peer} netns {namespace}"
    return LinkRequest(text, _NEWLINK, _CREATE | _EXCL, body)


def up(name: str) -> LinkRequest:
    """Return the request that sets a link up."""
    body = _LINK.pack(0, 0, 0, _UP, _UP) + _named(name)
    return LinkRequest(f"link set {name} up", _NEWLINK, 0, lambda _: body)


def bear(address: str, device: str) -> LinkRequest:
    """Return the request that adds an address to a device.

    IPv6 addresses skip duplicate address detection, which would delay their use even when it is off.
    """
    return _address("add", _NEWADDR, _CREATE | _EXCL, address, device)


def drop(address: str, device: str) -> LinkRequest:
    """Return the request that removes an address."""
    return _address("del", _DELADDR, 0, address, device)


def neighbour(address: str, mac: str, device: str) -> LinkRequest:
    """Return the request for a permanent neighbor entry."""
    raw = _raw(address)
    attributes = attribute(_NDA_DST, raw) + attribute(_NDA_LLADDR, _mac(mac))
    family = _FAMILIES[family_of(address)]

    def body(number: Number) -> bytes:
        """Encode the permanent neighbor entry."""
        return _NEIGHBOUR.pack(family, number(device), _PERMANENT, 0, 0) + attributes

    return LinkRequest(f"neighbour replace {address} lladdr {mac} dev {device}", _NEWNEIGH, _CREATE | _REPLACE, body)


def route(network: str, device: str, via: str = "") -> LinkRequest:
    """Return the request for a route to a network ("10.0.0.0/8"), on a link or through a gateway."""
    address, _, prefix = network.partition("/")
    family = family_of(address)
    scope = 0 if via or family is IPFamily.IPV6 else _SCOPE_LINK
    head = (_FAMILIES[family], int(prefix), 0, 0, _MAIN, _BOOT, scope, _UNICAST, _ONLINK if via else 0)
    attributes = attribute(_RTA_DST, _raw(address)) if int(prefix) else b""
    attributes += attribute(_RTA_GATEWAY, _raw(via)) if via else b""

    def body(number: Number) -> bytes:
        """Encode the route with the device's index."""
        return _ROUTE.pack(*head) + attributes + attribute(_RTA_OIF, struct.pack("=I", number(device)))

    text = f"route replace {network}{f' via {via}' if via else ''} dev {device}"
    return LinkRequest(text, _NEWROUTE, _CREATE | _REPLACE, body)


def not_local(network: str) -> LinkRequest:
    """Return the request that removes a local route of `lo`."""
    address, _, prefix = network.partition("/")
    head = _ROUTE.pack(socket.AF_INET, int(prefix), 0, 0, _LOCAL, 0, _SCOPE_HOST, _TYPE_LOCAL, 0)
    attributes = attribute(_RTA_DST, _raw(address))

    def body(number: Number) -> bytes:
        """Encode the local route with the index of `lo`."""
        return head + attributes + attribute(_RTA_OIF, struct.pack("=I", number("lo")))

    return LinkRequest(f"route del local {network} dev lo", _DELROUTE, 0, body)


def wire(namespace: str, changes: Sequence[LinkRequest]) -> None:
    """Send requests to a namespace in order. Raises LinkError for the first that the kernel refuses."""
    with ExitStack() as stack:
        stack.enter_context(in_namespace(namespace))
        netlink = RtNetlink()
        stack.callback(netlink.close)
        numbers: dict[str, int] = {}
        waiting: list[tuple[LinkRequest, bytes]] = []

        def send() -> None:
            """Send the waiting requests in one batch. Raises LinkError for the first that the kernel refused."""
            answers = netlink.batch([(change.kind, change.flags, body) for change, body in waiting])
            for (change, _), error in zip(waiting, answers, strict=True):
                if error is not None:
                    raise LinkError(f"{change.text} (in namespace {namespace}): {error.strerror}")
            waiting.clear()

        def number(name: str) -> int:
            """Return the index of a link, or an open file for `netns NAME`.

            Links exist only after the waiting requests are sent.
            """
            if name not in numbers:
                word, _, other = name.partition(" ")
                if other:
                    numbers[name] = os.open(namespace_path(other), os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, numbers[name])
                else:
                    send()
                    numbers[name] = socket.if_nametoindex(word)
            return numbers[name]

        for change in changes:
            # To ask for a number may send what waits.
            waiting.append((change, change.body(number)))  # noqa: PERF401
        send()


def forwarding(namespace: str) -> None:
    """Wait until all bridge ports forward packets, shortly after both of their ends are up.

    Raises LinkError if they do not in time.
    """
    with in_namespace(namespace):
        netlink = RtNetlink()
    end = time.monotonic() + _PATIENCE
    while waiting := [link.name for link in netlink.links() if link.master and not link.forwards]:
        if time.monotonic() > end:
            raise LinkError(
                f"{', '.join(waiting)} (in namespace {namespace}): no packets pass yet after {_PATIENCE:g} s"
            )
        time.sleep(0.001)
    netlink.close()


def _address(word: str, kind: int, flags: int, address: str, device: str) -> LinkRequest:
    raw, family = _raw(address), family_of(address)
    nodad = _NODAD if family is IPFamily.IPV6 else 0
    attributes = attribute(_IFA_LOCAL, raw) + attribute(_IFA_ADDRESS, raw)
    attributes += attribute(_IFA_FLAGS, struct.pack("=I", nodad))

    def body(number: Number) -> bytes:
        """Encode the address with the device's index."""
        return _ADDRESS.pack(_FAMILIES[family], len(raw) * 8, nodad, 0, number(device)) + attributes

    return LinkRequest(f"address {word} {address}/{len(raw) * 8} dev {device}", kind, flags, body)


def _named(name: str, mac: str = "") -> bytes:
    return attribute(_IFLA_IFNAME, name.encode() + b"\0") + (attribute(_IFLA_ADDRESS, _mac(mac)) if mac else b"")


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _raw(address: str) -> bytes:
    return socket.inet_pton(_FAMILIES[family_of(address)], address)
