"""Kernel settings that the configuration asks for: `conntrack` (group 19), and what mode ipvs relies on (row 24.5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from narthex.model.kernel_setting import KernelSetting

MOST_ENTRIES = 1 << 20
"""Upper limit for the number of tracked connections that is asked for, whatever the configuration says (row 19.1)."""
ENTRIES_PER_BUCKET = 4

_CONNTRACK = "net/netfilter/nf_conntrack_"
TCP_BE_LIBERAL = _CONNTRACK + "tcp_be_liberal"


class ConntrackOptions(Protocol):
    """The section `conntrack` of the configuration; times in seconds. Zero leaves the kernel's value unchanged."""

    @property
    def max_per_core(self) -> int:
        """Tracked connections per core."""

    @property
    def min(self) -> int:
        """Minimum number of tracked connections."""

    @property
    def tcp_established_timeout(self) -> float:
        """Timeout of established TCP connections."""

    @property
    def tcp_close_wait_timeout(self) -> float:
        """Timeout of TCP connections in state CLOSE_WAIT."""

    @property
    def tcp_be_liberal(self) -> bool:
        """True: packets out of the TCP window are not invalid."""

    @property
    def udp_timeout(self) -> float:
        """Timeout of UDP flows without answer."""

    @property
    def udp_stream_timeout(self) -> float:
        """Timeout of UDP flows with answers."""


def conntrack_settings(conntrack: ConntrackOptions, cores: int) -> Iterator[KernelSetting]:
    """Yield the settings for a machine with this number of cores, in the order in which they must be made."""
    if conntrack.max_per_core:
        most = min(max(conntrack.max_per_core * cores, conntrack.min), MOST_ENTRIES)
        unasked = "conntrack.maxPerCore: 0"
        yield KernelSetting(_CONNTRACK + "max", most, "maxPerCore", unasked=unasked)
        yield KernelSetting(
            _CONNTRACK + "buckets", most // ENTRIES_PER_BUCKET, "maxPerCore", at_least=True, unasked=unasked
        )
    for seconds, name, field in (
        (conntrack.tcp_established_timeout, "tcp_timeout_established", "tcpEstablishedTimeout"),
        (conntrack.tcp_close_wait_timeout, "tcp_timeout_close_wait", "tcpCloseWaitTimeout"),
        (conntrack.udp_timeout, "udp_timeout", "udpTimeout"),
        (conntrack.udp_stream_timeout, "udp_timeout_stream", "udpStreamTimeout"),
    ):
        if seconds > 0:
            yield KernelSetting(_CONNTRACK + name, max(1, int(seconds)), field, unasked=f"conntrack.{field}: 0")
    if conntrack.tcp_be_liberal:
        yield KernelSetting(TCP_BE_LIBERAL, 1, "tcpBeLiberal")


_IPVS = "net/ipv4/vs/"
_REUSE_MATTERS = (4, 1), (5, 9)
"""From the first of these kernels until before the second, IPVS delayed a connection from a recently used port by a
second, or sent it to a real server that had left.
"""


def ipvs_settings(kernel: tuple[int, int], strict_arp: bool = False) -> Iterator[KernelSetting]:
    """Yield the settings that mode ipvs relies on, for a kernel of this version (row 24.5).

    `strict_arp`: this machine answers ARP requests for an address only on the link that has it, so that other machines
    do not send the traffic of a Service here.
    """
    # Without connection tracking nothing that IPVS has sent on is masqueraded.
    yield KernelSetting(_IPVS + "conntrack", 1, "mode ipvs")
    if _REUSE_MATTERS[0] <= kernel < _REUSE_MATTERS[1]:
        yield KernelSetting(_IPVS + "conn_reuse_mode", 0, "mode ipvs")
    # A client's connections to a real server that is gone end, and so does its persistence when it is on its way out.
    yield KernelSetting(_IPVS + "expire_nodest_conn", 1, "mode ipvs")
    yield KernelSetting(_IPVS + "expire_quiescent_template", 1, "mode ipvs")
    yield KernelSetting("net/ipv4/ip_forward", 1, "mode ipvs")
    if strict_arp:
        yield KernelSetting("net/ipv4/conf/all/arp_ignore", 1, "strictARP", unasked="ipvs.strictARP: false")
        yield KernelSetting("net/ipv4/conf/all/arp_announce", 2, "strictARP", unasked="ipvs.strictARP: false")
