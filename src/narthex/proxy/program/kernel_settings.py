"""Kernel settings that the configuration asks for (group 19), made at the start. Failures are logged and never end the process (row 29.8)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import msgspec

from narthex.linux.privileges import kernel_release
from narthex.linux.sysctls import SysctlOutcome, apply_sysctls, read_sysctl
from narthex.model.kernel_setting import KernelSetting
from narthex.proxy.program.dataplane import dataplane_of
from narthex.proxy.program.settings import ProxySettings
from narthex.runtime.configuration.values import ConntrackConfiguration
from narthex.runtime.logs import LOGGER

MOST_ENTRIES = 1 << 20
"""Upper limit for the number of tracked connections that is asked for, whatever the configuration says (row 19.1)."""
ENTRIES_PER_BUCKET = 4

_CONNTRACK = "net/netfilter/nf_conntrack_"
TCP_BE_LIBERAL = _CONNTRACK + "tcp_be_liberal"

Apply = Callable[[Iterable[KernelSetting]], list[SysctlOutcome]]


class KernelSettings:
    """The kernel settings of a node proxy."""

    def __init__(self, settings: Iterable[KernelSetting], apply: Apply = apply_sysctls) -> None:
        self._waiting = list(settings)
        self._apply = apply

    def make(self, *, last: bool) -> bool:
        """Make the remaining settings. Returns True if none is left.

        A setting that the kernel does not have waits for another call, unless this is the last: the module that
        provides it is loaded with the first rules that need it.
        """
        outcomes = self._apply(self._waiting)
        self._waiting = [] if last else [each.setting for each in outcomes if each.was is None]
        for each in outcomes:
            if not each.error:
                LOGGER.info("set %s to %d (it was %d)", each.setting.path, each.setting.value, each.was)
            elif last or each.was is not None:
                LOGGER.warning("%s", _refusal(each))
        return not any(each.error for each in outcomes)


def conntrack_settings(conntrack: ConntrackConfiguration, cores: int) -> Iterator[KernelSetting]:
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


def kernel_settings(settings: ProxySettings) -> list[KernelSetting]:
    """Return the settings that the configuration and the mode need on this machine."""
    asked = conntrack_settings(settings.conntrack, os.cpu_count() or 1)
    return [*asked, *dataplane_of(settings).kernel_settings(kernel_release())]


def with_kernel(settings: ProxySettings) -> ProxySettings:
    """Return the settings, adapted to the kernel's current values (row 19.7)."""
    liberal = bool(read_sysctl(TCP_BE_LIBERAL))
    return msgspec.structs.replace(settings, node=msgspec.structs.replace(settings.node, drop_invalid=not liberal))


def _refusal(outcome: SysctlOutcome) -> str:
    setting = outcome.setting
    here = "" if outcome.was is None else f"; it stays {outcome.was}"
    ask = f", or ask for nothing ({setting.unasked})" if setting.unasked else ""
    return (
        f"{setting.path} could not be set to {setting.value}: {outcome.error}{here}; set it on the machine itself{ask}"
    )
