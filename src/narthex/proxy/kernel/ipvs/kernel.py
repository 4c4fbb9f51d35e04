"""Global state of the kernel's IPVS: availability, schedulers (row 24.1), and timeouts (row 24.7)."""

from __future__ import annotations

import errno

from narthex.linux.genetlink import Genetlink
from narthex.linux.netlink import DumpInterrupted, NetlinkError
from narthex.linux.run import ApplyError
from narthex.model.net import Protocol
from narthex.netfilter.ipvs import VirtualServer
from narthex.netfilter.netlink import ipvs as wire
from narthex.netfilter.netlink.ipvs import IpvsCommand, IpvsTimeouts

_PROBE = ("198.51.100.0", Protocol.TCP, 20000)
"""An address of TEST-NET-2 (RFC 5737), which no network uses."""


class NoIpvsError(ApplyError):
    """The kernel has no IPVS, or does not permit its use."""


def connect(namespace: str | None = None) -> Genetlink:
    """Return a socket for IPVS; the kernel loads the module if it can. Raises NoIpvsError."""
    try:
        return Genetlink(wire.FAMILY, namespace)
    except NetlinkError as error:
        raise NoIpvsError(
            "this kernel has no IP_VS (module ip_vs)"
            if error.errno == errno.ENOENT
            else f"this kernel's IP_VS cannot be used: {error.strerror}"
        ) from error


def check_scheduler(name: str, namespace: str | None = None) -> None:
    """Check that the kernel has a scheduler, and let it load the module.

    Unless a virtual server uses the scheduler already, one is created for a moment. Raises ApplyError, NoIpvsError.
    """
    link = connect(namespace)
    try:
        if name in _in_use(link):
            return
        probe = VirtualServer(address=_PROBE[0], protocol=_PROBE[1], port=_PROBE[2], scheduler=name)
        taken_away = IpvsCommand.DELETE_SERVER, wire.server_key(probe.key)
        # One that a killed proxy has left would be in the way.
        _, made, _ = link.write([taken_away, (IpvsCommand.NEW_SERVER, wire.server(probe)), taken_away])
    except OSError as error:
        raise ApplyError(f"cannot ask the kernel for the scheduler {name!r}: {error}") from error
    finally:
        link.close()
    if made is not None and made.errno == errno.ENOENT:
        raise ApplyError(f"this kernel has no IPVS scheduler {name!r} (module ip_vs_{name})")
    if made is not None:
        raise ApplyError(f"this kernel's IPVS does not take the scheduler {name!r}: {made.strerror}")


def set_timeouts(desired: IpvsTimeouts, namespace: str | None = None) -> IpvsTimeouts | None:
    """Set the timeouts that are not 0. Returns the previous ones, None if nothing changes. Raises ApplyError."""
    if not any(desired):
        return None
    link = connect(namespace)
    try:
        was = wire.read_timeouts(link.ask(IpvsCommand.GET_TIMEOUTS))
        # The kernel takes a 0 for "as it is".
        if all(new in (0, old) for new, old in zip(desired, was, strict=True)):
            return None
        (error,) = link.write([(IpvsCommand.SET_TIMEOUTS, wire.timeouts(desired))])
    except OSError as failed:
        raise ApplyError(f"cannot set the time-outs of IPVS: {failed}") from failed
    finally:
        link.close()
    if error is not None:
        raise ApplyError(f"cannot set the time-outs of IPVS: {error.strerror}")
    return was


def timeouts(namespace: str | None = None) -> IpvsTimeouts:
    """Return the timeouts in force. Raises ApplyError."""
    link = connect(namespace)
    try:
        return wire.read_timeouts(link.ask(IpvsCommand.GET_TIMEOUTS))
    except OSError as error:
        raise ApplyError(f"cannot read the time-outs of IPVS: {error}") from error
    finally:
        link.close()


def _in_use(link: Genetlink) -> set[str]:
    found = set()
    try:
        for body in link.listing(IpvsCommand.GET_SERVER):
            held = wire.read_server(body)
            if held is not None:
                found.add(held.server.scheduler)
    except DumpInterrupted:
        pass
    return found
