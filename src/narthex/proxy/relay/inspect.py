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
from narthex.proxy.backends.userspace.rules import Listener, Listeners
from narthex.proxy.plan.ir import Scope
from narthex.proxy.relay.wire import ADDRESS_FAMILIES, Entry, Table, receive, shown_at

_PATIENCE = 5.0


def shown(family: IPFamily, namespace: str | None) -> Listeners:
    """What the relay there serves; nothing when there is none."""
    with netns.entered(namespace):
        sock = socket.socket(socket.AF_UNIX)
    with sock:
        sock.settimeout(_PATIENCE)
        try:
            sock.connect(shown_at(ADDRESS_FAMILIES[family.value]))
            table = receive(sock, Table)
        except (OSError, EOFError):
            return Map()
    return Map({one.key: one for one in map(listener_of, table.entries)})


def entry_of(listener: Listener) -> Entry:
    """As the relay is told."""
    service, port, protocol = listener.name
    return Entry(
        protocol=protocol.lower,
        port=listener.port,
        service=(*service, port),
        endpoints=listener.endpoints,
        affinity_seconds=listener.affinity_seconds,
        scope=listener.scope.value,
    )


def listener_of(entry: Entry) -> Listener:
    """As the rules have it."""
    namespace, name, port = entry.service
    return Listener(
        name=ServicePortName(NamespacedName(namespace, name), port, Protocol(entry.protocol.upper())),
        scope=Scope(entry.scope),
        port=entry.port,
        endpoints=entry.endpoints,
        affinity_seconds=entry.affinity_seconds,
    )
