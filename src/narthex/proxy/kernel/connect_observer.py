"""Observes how TCP connections of a cgroup's sockets begin, for passive ejection.

The program and its ring buffer are not pinned: they end with the process, since no other process would read them. The endpoints that
are watched are pinned with the maps of socket load balancing, so that other programs see which ones are ejected.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from socket import AF_INET, AF_INET6, inet_pton
from typing import NamedTuple

from narthex.linux.bpf import BpfError, BpfLink, BpfProgram, BpfRing, can_load
from narthex.model import IPFamily
from narthex.proxy.backends.sockets.layout import WATCHED, WatchFlag
from narthex.proxy.backends.sockets.observers import RING, observation_of, observer_program
from narthex.proxy.kernel.sockets import SocketTarget
from narthex.proxy.plan.ejection import ConnectObservation, EndpointAddress

_KINDS = {IPFamily.IPV4: AF_INET, IPFamily.IPV6: AF_INET6}


class ObserverUnavailableError(RuntimeError):
    """This machine cannot observe connections; the message has the reason."""


class ConnectObservations(NamedTuple):
    """What was observed since the last reading, in the order of time."""

    seen: Sequence[tuple[IPFamily, ConnectObservation]]
    complete: bool
    """False if some observations may be missing."""


class ConnectObserver:
    """The program at the cgroup of a target, from `open` to `close`. Not thread-safe."""

    def __init__(self, target: SocketTarget) -> None:
        """Attach the program. Raises ObserverUnavailableError."""
        self._target = target
        program = observer_program(target.layouts)
        if reason := can_load(program.kind, program.attach):
            raise ObserverUnavailableError(f"the kernel does not load programs of type {reason}")
        try:
            self._ring = BpfRing(RING)
        except BpfError as error:
            raise ObserverUnavailableError(f"the kernel makes no ring buffer: {error.strerror}") from error
        try:
            self._link = self._attach(target)
        except OSError as error:
            self._ring.close()
            raise ObserverUnavailableError(f"{error.strerror or error}") from error

    def _attach(self, target: SocketTarget) -> BpfLink:
        spec = observer_program(target.layouts)
        tables = {each.name: target.table(each) for maps in target.layouts.values() for each in maps.all}
        loaded = BpfProgram.load(spec, {**tables, RING.name: self._ring.map})
        folder = os.open(target.cgroup, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return BpfLink.create(loaded, folder, spec.attach)
        finally:
            os.close(folder)
            loaded.close()

    def fileno(self) -> int:
        """Return the file that becomes readable when something is observed."""
        return self._ring.map.descriptor

    def read(self) -> ConnectObservations:
        """Return what was observed since the last call."""
        reports, complete = self._ring.read()
        return ConnectObservations([observation_of(report) for report in reports], complete)

    def watch(self, family: IPFamily, endpoint: EndpointAddress, flags: WatchFlag) -> None:
        """Have the next connection to an endpoint that is made, and failures again, be reported. Raises BpfError."""
        table = self._target.table(self._target.layouts[family].watched)
        table.update(_key(family, endpoint), WATCHED.pack(0, flags))

    def forget(self, family: IPFamily, endpoint: EndpointAddress) -> None:
        """Have nothing but failures be reported of an endpoint. Raises BpfError."""
        self._target.table(self._target.layouts[family].watched).delete(_key(family, endpoint))

    def close(self) -> None:
        """Detach the program."""
        self._link.close()
        self._ring.close()


def _key(family: IPFamily, endpoint: EndpointAddress) -> bytes:
    address, port = endpoint
    return inet_pton(_KINDS[family], address) + struct.pack(">HH", port, 0)
