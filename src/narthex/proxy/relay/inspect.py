"""Looking at a relay from another process, as `narthex trace --lab` does.

A relay answers at an abstract Unix socket, whose names are each network namespace's own: who looks enters the namespace
and asks. Nothing is left behind when the relay ends, however it ends.
"""

from __future__ import annotations

import socket

from immutables import Map

from narthex.linux import namespaces as netns
from narthex.model.names import NamespacedName, ServicePortName
from narthex.model.net import IPFamily, Protocol
from narthex.proxy.backends.userspace.rules import RelayListener, RelayListeners
from narthex.proxy.plan.ir import Scope
from narthex.proxy.relay.wire import ADDRESS_FAMILIES, RelayPort, RelayTable, receive, shown_at

_PATIENCE = 5.0


def shown(family: IPFamily, namespace: str | None) -> RelayListeners:
    """What the relay there serves; nothing when there is none."""
    with netns.entered(namespace):
        sock = socket.socket(socket.AF_UNIX)
    with sock:
        sock.settimeout(_PATIENCE)
        try:
            sock.connect(shown_at(ADDRESS_FAMILIES[family.value]))
            table = receive(sock, RelayTable)
        except (OSError, EOFError):
            return Map()
    return Map({one.key: one for one in map(listener_of, table.entries)})


def entry_of(listener: RelayListener) -> RelayPort:
    """As the relay is told."""
    service, port, protocol = listener.name
    return RelayPort(
        protocol=protocol.lower,
        port=listener.port,
        service=(*service, port),
        endpoints=listener.endpoints,
        affinity_seconds=listener.affinity_seconds,
        scope=listener.scope.value,
    )


def listener_of(entry: RelayPort) -> RelayListener:
    """As the rules have it."""
    namespace, name, port = entry.service
    return RelayListener(
        name=ServicePortName(NamespacedName(namespace, name), port, Protocol(entry.protocol.upper())),
        scope=Scope(entry.scope),
        port=entry.port,
        endpoints=entry.endpoints,
        affinity_seconds=entry.affinity_seconds,
    )
