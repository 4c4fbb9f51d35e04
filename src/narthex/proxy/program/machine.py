"""Whether a mode can run on this machine: permission, kernel, programs. What cannot says what can."""

from __future__ import annotations

import math
import os

from narthex.linux.addresses import usable_families
from narthex.linux.errors import ApplyError
from narthex.linux.privileges import kernel_release, may_change_network, missing_tools, nft_release
from narthex.model.net import IPFamily
from narthex.netfilter.netlink.ipvs import IpvsTimeouts
from narthex.proxy.backends import BACKENDS
from narthex.proxy.kernel.ipvs.kernel import NoIpvsError, check_scheduler, connect, set_timeouts
from narthex.proxy.program.settings import Settings
from narthex.runtime.logs import LOGGER
from narthex.runtime.process import StartError

OLDEST_KERNEL = (5, 13)
OLDEST_NFT = (1, 0, 1)
"""What nftables mode asks for (row 23.1)."""
SKIP_KERNEL_CHECK = "KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK"
_PACKAGES = {"nft": "nftables", "ipset": "ipset"}
"""That bring a program; all others are of iptables."""


def check_machine(mode: str) -> tuple[IPFamily, ...]:
    """The families that the mode can serve here. Raises StartError when there is none, or no permission."""
    if mode not in BACKENDS:
        raise StartError(f"mode {mode} is not there yet: choose {' or '.join(BACKENDS)} with --proxy-mode or `mode`")
    if not may_change_network():
        raise StartError("programming the kernel needs root (CAP_NET_ADMIN): run it with sudo")
    why_not = refusal(mode)
    if why_not:
        raise StartError(why_not)
    families = []
    for family in usable_families():
        missing = missing_tools(mode, family)
        if missing:
            LOGGER.warning("%s is not found on the PATH: %s is left alone", " and ".join(missing), family.label)
        else:
            families.append(family)
    if IPFamily.IPV6 not in usable_families():
        LOGGER.info("IPv6 is switched off here: only IPv4 is served")
    return tuple(families)


def make_ready(settings: Settings) -> None:
    """What a mode wants of the kernel once, before its rules: in mode ipvs a scheduler, and time-outs if they are given
    (rows 24.1, 24.7). Raises StartError."""
    if settings.mode != "ipvs":
        return
    ipvs = settings.ipvs
    seconds = (ipvs.tcp_timeout, ipvs.tcp_fin_timeout, ipvs.udp_timeout)
    wanted = IpvsTimeouts(*(math.ceil(each) for each in seconds))
    try:
        check_scheduler(ipvs.scheduler or "rr")
        was = set_timeouts(wanted)
    except ApplyError as error:
        raise StartError(f"mode ipvs cannot run: {error}") from error
    if was is not None:
        names = zip(("tcp", "tcpFin", "udp"), wanted, was, strict=True)
        changed = ", ".join(f"{name} to {new} s (it was {old} s)" for name, new, old in names if new not in (0, old))
        LOGGER.info("set the time-outs of IPVS: %s", changed)


def working_modes() -> list[str]:
    """The modes that can run here, the default first."""
    return [mode for mode in BACKENDS if not refusal(mode)]


def refusal(mode: str) -> str:
    """Why the mode cannot run here, and what to do; empty when it can."""
    if mode == "nftables" and kernel_release() < OLDEST_KERNEL and not os.environ.get(SKIP_KERNEL_CHECK):
        return (
            f"nftables mode needs Linux {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer: choose --proxy-mode iptables, "
            f"or set {SKIP_KERNEL_CHECK}=1 if this kernel has what is needed"
        )
    missing = missing_tools(mode, IPFamily.IPV4)
    if missing:
        packages = " and ".join(dict.fromkeys(_PACKAGES.get(tool, "iptables") for tool in missing))
        return (
            f"mode {mode} needs {' and '.join(missing)}, not found on the PATH: "
            f"install the package {packages} or choose another --proxy-mode"
        )
    if mode == "nftables" and () < nft_release() < OLDEST_NFT:
        return f"nftables mode needs nft {'.'.join(map(str, OLDEST_NFT))} or newer: install it, or choose --proxy-mode iptables"
    return _ipvs_refusal() if mode == "ipvs" else ""


def _ipvs_refusal() -> str:
    try:
        connect().close()
    except NoIpvsError as error:
        others = [mode for mode in BACKENDS if mode != "ipvs" and not refusal(mode)]
        what_works = f"{' and '.join(others)} would work here" if others else "no other mode works here either"
        return f"mode ipvs cannot run, since {error}: {what_works}"
    return ""
