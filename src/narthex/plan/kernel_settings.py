"""`conntrack` of the configuration as kernel settings (group 19)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

MOST_ENTRIES = 1 << 20
"""More than so many tracked connections are never asked for, whatever the configuration says (row 19.1)."""
ENTRIES_PER_BUCKET = 4

_CONNTRACK = "net/netfilter/nf_conntrack_"
TCP_BE_LIBERAL = _CONNTRACK + "tcp_be_liberal"


class Conntrack(Protocol):
    """The configuration's section; times in seconds. Zero leaves the kernel's value as it is."""

    @property
    def max_per_core(self) -> int: ...
    @property
    def min(self) -> int: ...
    @property
    def tcp_established_timeout(self) -> float: ...
    @property
    def tcp_close_wait_timeout(self) -> float: ...
    @property
    def tcp_be_liberal(self) -> bool: ...
    @property
    def udp_timeout(self) -> float: ...
    @property
    def udp_stream_timeout(self) -> float: ...


class Setting(NamedTuple):
    """One kernel setting that is wanted."""

    path: str
    """Below /proc/sys."""
    value: int
    field: str
    """The field of the configuration that asks for it."""
    at_least: bool = False
    """A larger value is as good."""

    def held_by(self, value: int) -> bool:
        """Whether the kernel's value needs no change (row 19.5)."""
        return value >= self.value if self.at_least else value == self.value


def wanted(conntrack: Conntrack, cores: int) -> Iterator[Setting]:
    """The settings for a machine with so many cores, in the order in which they are to be made."""
    if conntrack.max_per_core:
        most = min(max(conntrack.max_per_core * cores, conntrack.min), MOST_ENTRIES)
        yield Setting(_CONNTRACK + "max", most, "maxPerCore")
        yield Setting(_CONNTRACK + "buckets", most // ENTRIES_PER_BUCKET, "maxPerCore", at_least=True)
    for seconds, name, field in (
        (conntrack.tcp_established_timeout, "tcp_timeout_established", "tcpEstablishedTimeout"),
        (conntrack.tcp_close_wait_timeout, "tcp_timeout_close_wait", "tcpCloseWaitTimeout"),
        (conntrack.udp_timeout, "udp_timeout", "udpTimeout"),
        (conntrack.udp_stream_timeout, "udp_timeout_stream", "udpStreamTimeout"),
    ):
        if seconds > 0:
            yield Setting(_CONNTRACK + name, max(1, int(seconds)), field)
    if conntrack.tcp_be_liberal:
        yield Setting(TCP_BE_LIBERAL, 1, "tcpBeLiberal")
