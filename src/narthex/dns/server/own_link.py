"""The node's own addresses for DNS: a link and tables that exist exactly as long as the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Collection, Sequence

from narthex.dns.node_local import tables
from narthex.linux.libnftables import NftError, NftMissingError, OwnedTables
from narthex.linux.netlink import NetlinkError
from narthex.linux.rtnetlink import RtNetlink
from narthex.model.links import NODE_LOCAL_DNS_LINK, AddAddress, SetUp
from narthex.model.packed_addresses import Network, packed

_TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI, _IFF_TUN_EXCL = 0x0001, 0x1000, 0x8000
_REQUEST = struct.Struct("16sH22x")


class OwnLinkError(RuntimeError):
    """The addresses cannot be had; the message says what to do."""


class OwnLink:
    """Addresses in the network namespace of the calling thread.

    A tun link that is not persistent goes with the file behind it, and a table of an owner with its socket, so nothing
    is left to answer nobody when the process is killed.
    """

    def __init__(self, addresses: Sequence[str], ports: Collection[int] = (53,)) -> None:
        """Make all of it. Raises OwnLinkError, and then nothing is left."""
        self._tables: OwnedTables | None = None
        self._file = _link()
        try:
            self._tables = OwnedTables(tables(addresses, ports))
            _address(addresses)
        except (NftError, NftMissingError) as error:
            self.close()
            raise OwnLinkError(f"rules that keep DNS from being tracked could not be loaded: {error}") from error
        except (NetlinkError, OSError) as error:
            self.close()
            raise OwnLinkError(f"link {NODE_LOCAL_DNS_LINK}: {error}") from error

    def close(self) -> None:
        """Take everything away. May be called again."""
        if self._tables is not None:
            self._tables.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _link() -> int:
    try:
        file = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OwnLinkError(
            f"{_TUN}: {error.strerror}; load module tun, and let the container have the device"
        ) from error
    try:
        fcntl.ioctl(
            file, _TUNSETIFF, _REQUEST.pack(NODE_LOCAL_DNS_LINK.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_TUN_EXCL)
        )
    except OSError as error:
        os.close(file)
        hint = f"another process answers on this node: end it, or take the link {NODE_LOCAL_DNS_LINK} away"
        raise OwnLinkError(
            f"link {NODE_LOCAL_DNS_LINK}: {error.strerror}; {hint if error.errno == errno.EBUSY else _TUN}"
        ) from error
    return file


def _address(addresses: Sequence[str]) -> None:
    networks = [Network(data, 8 * len(data)) for data in map(packed, addresses)]
    netlink = RtNetlink()
    try:
        netlink.fulfil(
            [
                SetUp(NODE_LOCAL_DNS_LINK),
                *(AddAddress(NODE_LOCAL_DNS_LINK, network, connected=False) for network in networks),
            ]
        )
    finally:
        netlink.close()
