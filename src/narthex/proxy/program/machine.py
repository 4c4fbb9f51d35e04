"""Checks whether a mode can run on this machine: permission, kernel, and programs."""

from __future__ import annotations

from narthex.linux.addresses import usable_families
from narthex.linux.privileges import may_change_network, missing_tools
from narthex.model.net import IPFamily
from narthex.proxy.kernel.dataplanes import DATAPLANES, dataplane
from narthex.runtime.logs import LOGGER
from narthex.runtime.process import StartError


def check_machine(mode: str) -> tuple[IPFamily, ...]:
    """Return the families that the mode can serve here. Raises StartError if there is none, or no permission."""
    if mode not in DATAPLANES:
        raise StartError(f"mode {mode} is not there yet: choose {' or '.join(DATAPLANES)} with --proxy-mode or `mode`")
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


def working_modes() -> list[str]:
    """Return the modes that can run here, the default first."""
    return [mode for mode in DATAPLANES if not refusal(mode)]


def refusal(mode: str) -> str:
    """Return why the mode cannot run here, and what to do; empty when it can."""
    return dataplane(mode).refusal()
