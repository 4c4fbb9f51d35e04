"""Connections to servers that wait for another request, as ingress-nginx keeps them."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Collection

from narthex.lab.controllers.ingress.routing import IngressTarget
from narthex.lab.server.forward import TargetConnection

_IDLE_SECONDS = 60.0
"""Time for which a connection waits, as ingress-nginx's `upstream-keepalive-timeout`."""
_MOST = 320
"""Connections that wait at the same time, as `upstream-keepalive-connections`."""
_UNANSWERED_MS = 5000
"""Time after which a server that confirms no packet is gone: a request then goes to another one, as after a failed connect."""


class IdleConnections:
    """Idle connections by server. All methods are called in the thread of the event loop."""

    def __init__(self) -> None:
        self._held: dict[IngressTarget, deque[tuple[TargetConnection, asyncio.TimerHandle]]] = {}
        self._count = 0

    def take(self, target: IngressTarget) -> TargetConnection | None:
        """Return a connection that the server has not closed, the latest first; None without one."""
        while held := self._held.get(target):
            upstream = self._remove(target, held)
            if not upstream.reader.at_eof() and not upstream.writer.is_closing():
                return upstream
            upstream.writer.transport.abort()
        return None

    def keep(self, target: IngressTarget, upstream: TargetConnection) -> None:
        """Keep a connection, or close it if there are too many."""
        if self._count >= _MOST:
            upstream.writer.transport.abort()
            return
        upstream.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
        timer = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._expire, target, upstream)
        self._held.setdefault(target, deque()).append((upstream, timer))
        self._count += 1

    def retain(self, targets: Collection[IngressTarget]) -> None:
        """Close connections to all other servers."""
        for target in [each for each in self._held if each not in targets]:
            while held := self._held.get(target):
                upstream = self._remove(target, held)
                upstream.writer.transport.abort()

    def _remove(
        self, target: IngressTarget, held: deque[tuple[TargetConnection, asyncio.TimerHandle]]
    ) -> TargetConnection:
        upstream, timer = held.pop()
        timer.cancel()
        self._count -= 1
        if not held:
            del self._held[target]
        return upstream

    def _expire(self, target: IngressTarget, upstream: TargetConnection) -> None:
        held = self._held[target]
        index = next(number for number, (each, _) in enumerate(held) if each is upstream)
        # The one to remove is the last.
        held.rotate(len(held) - 1 - index)
        self._remove(target, held)
        upstream.writer.transport.abort()
