"""Closes UDP sockets that were connected to an endpoint in the place of a Service address, once the endpoint is gone.

Their packets would be lost, since no rule rewrites them any more: the address of the endpoint is in the socket
itself. Their programs get ECONNABORTED and connect again. TCP is left alone: its connections end by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from narthex.linux.processes import network_namespaces, processes_in_cgroup
from narthex.linux.socket_diag import ConnectedSocket, UdpSockets, missing_destroy
from narthex.model import ConntrackFlow, IPFamily, Protocol
from narthex.proxy.plan.stale import StaleReason
from narthex.runtime.logs import LOGGER

Place = tuple[str, int]
"""Address and port."""
Destinations = Callable[[IPFamily, Sequence[ConnectedSocket]], Iterable[Place | None]]
"""Returns the destinations that the programs of these sockets asked for; None: not redirected. Raises OSError."""


class ConnectedSockets:
    """The connected UDP sockets of all processes in a cgroup, which is where connections are redirected."""

    def __init__(self, cgroup: Path, destinations: Destinations) -> None:
        self._cgroup = cgroup
        self._destinations = destinations
        self._hidden = False
        self._unable: str | None = None
        """Why the kernel cannot close sockets; None: not asked yet."""

    def close_stale(
        self,
        family: IPFamily,
        endpoints: Collection[Place] | None,
        reason: Callable[[ConntrackFlow], StaleReason | None],
    ) -> Counter[StaleReason]:
        """Close the redirected sockets for which `reason` returns one; return how many, by reason.

        `endpoints` limits the search to sockets connected to these; None: to any. Raises OSError if the kernel refuses;
        a network namespace that ends meanwhile is no error.
        """
        if self._unable is None:
            self._unable = missing_destroy()
            if self._unable:
                LOGGER.warning("UDP sockets stay connected to endpoints that are gone: %s", self._unable)
        if self._unable:
            return Counter()
        processes = processes_in_cgroup(self._cgroup)
        if 0 in processes and not self._hidden:
            self._hidden = True
            LOGGER.warning(
                "UDP sockets of pods stay connected to endpoints that are gone, because this PID namespace hides the"
                " pods' processes: set hostPID: true in the proxy's pod"
            )
        closed: Counter[StaleReason] = Counter()
        for namespace in network_namespaces(processes):
            sockets = UdpSockets(namespace)
            try:
                closed += self._close_in(sockets, family, endpoints, reason)
            finally:
                sockets.close()
        return closed

    def _close_in(
        self,
        sockets: UdpSockets,
        family: IPFamily,
        endpoints: Collection[Place] | None,
        reason: Callable[[ConntrackFlow], StaleReason | None],
    ) -> Counter[StaleReason]:
        found = sockets.connected(family, endpoints)
        asked = self._destinations(family, found) if found else ()
        stale: list[ConnectedSocket] = []
        reasons: list[StaleReason] = []
        for sock, destination in zip(found, asked, strict=True):
            if destination is None:
                continue
            why = reason(ConntrackFlow(Protocol.UDP, *sock.local, *destination, *sock.peer))
            if why is not None:
                stale.append(sock)
                reasons.append(why)
        there = sockets.destroy(stale)
        return Counter(why for why, was_there in zip(reasons, there, strict=True) if was_there)
