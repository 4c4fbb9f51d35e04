"""The userspace Target: a relay process, and iptables rules that redirect to it, for one namespace and family.

A relay shows its table on an abstract Unix socket, whose names belong to the network namespace, so that other processes
can inspect it (`shown`). Nothing remains when the relay ends, however it ends.
"""

from __future__ import annotations

import logging
import socket

from immutables import Map

from narthex.linux.iptables_variants import plain_command
from narthex.linux.module_process import receive
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import CommandError, TimeoutExpired, run
from narthex.model import IPFamily, Protocol
from narthex.proxy.backends.base import ApplyError, Target
from narthex.proxy.backends.iptables.rules import XtablesRules
from narthex.proxy.backends.userspace.names import PROBE, USERSPACE_CHAINS
from narthex.proxy.backends.userspace.rules import ListenKey, RelayListeners, UserspaceChanges, UserspaceRules
from narthex.proxy.kernel.iptables import IptablesTarget
from narthex.proxy.kernel.kept_relay import KeptRelay, listener_of
from narthex.proxy.relay.process import RelaySetup
from narthex.proxy.relay.relay import UDP_IDLE_SECONDS
from narthex.proxy.relay.wire import ADDRESS_FAMILIES, RELAY_TABLES, PortFailure, RelayCounts, shown_at

TEND_SECONDS = 2.0
"""Interval of the relay's liveness check."""

_LOGGER = logging.getLogger("narthex")


class UserspaceTarget(Target[UserspaceRules, UserspaceChanges]):
    """Starts the relay with the first rules; the relay ends with this process.

    If both rules and listeners change, ports are opened first, then rules are written, then ports are closed: rules
    never redirect to a port without a listener.
    """

    def __init__(
        self, family: IPFamily, namespace: str | None = None, *, udp_idle_seconds: float = UDP_IDLE_SECONDS
    ) -> None:
        self._family = family
        self._namespace = namespace
        self._tables = IptablesTarget(family, namespace, owner=USERSPACE_CHAINS)
        setup = RelaySetup(ADDRESS_FAMILIES[family.value], udp_idle_seconds=udp_idle_seconds)
        self._relay = KeptRelay(family.label, setup, namespace)
        self._mark = 0
        self._taken: set[ListenKey] = set()

    @property
    def counts(self) -> RelayCounts:
        """Counters of the relay since it started."""
        return self._relay.counts

    def read(self) -> UserspaceRules | None:
        """Return our rules in the kernel and the relay's table. Raises ApplyError if they cannot be read."""
        self._relay.alive()
        tables = self._tables.read()
        if tables is None and not self._relay.listeners and not self._taken:
            return None
        return UserspaceRules(
            tables=tables or XtablesRules(self._family, {}, Map()),
            listeners=self._relay.listeners,
            mark=self._mark,
            taken=frozenset(self._taken),
        )

    def look(self) -> UserspaceRules | None:
        """Return what a bystander sees: the rules, and the table of the relay that runs there."""
        tables = self._tables.read()
        listeners = shown(self._family, self._namespace)
        if tables is None and not listeners:
            return None
        return UserspaceRules(tables=tables or XtablesRules(self._family, {}, Map()), listeners=listeners)

    def apply(self, changes: UserspaceChanges) -> None:
        """Open ports, write the rules, close ports. Raises ApplyError.

        Ports of other programs are avoided from then on.
        """
        self._mark = changes.mark
        self._note(self._relay.listen(changes.listen, self._mark))
        if changes.tables:
            self._tables.apply(changes.tables)
        desired = {one.key for one in changes.listen}
        undesired = tuple(key for key in self._relay.listeners if key not in desired) if changes.replace else ()
        self._relay.stop_listening((*changes.close, *undesired))

    def tend(self) -> float:
        """Check the relay, and restart it with the same ports if it has died. Returns the seconds until the next check."""
        try:
            self._note(self._relay.tend(self._mark))
        except ApplyError as error:
            # The next sync reads back what is there, and repairs it.
            _LOGGER.warning("%s", error)
        return TEND_SECONDS

    def clean(self) -> None:
        """Remove all rules of ours, end all connections, and forget all clients."""
        self._tables.clean()
        self._relay.forget()
        self._taken.clear()

    def close(self) -> None:
        """End the relay. The rules stay and lead nowhere until the next relay starts."""
        self._relay.close()

    def _note(self, failed: tuple[PortFailure, ...]) -> None:
        """Avoid the ports of other programs. Raises ApplyError if there are any."""
        if not failed:
            return
        self._taken.update((Protocol(one.protocol.upper()), one.port) for one in failed if one.taken)
        said = ", ".join(f"{one.port}/{one.protocol}: {one.reason}" for one in failed[:3])
        raise ApplyError(
            f"the relay cannot listen on {len(failed)} ports ({said}); ports of other programs are avoided from now on"
        )


def missing_plain_tcp(family: IPFamily, namespace: str | None = None) -> str:
    """Return why rules cannot remove TCP timestamps here; empty if they can. Tries it in a chain without packets."""
    made = f"*mangle\n:{PROBE} - [0:0]\n-A {PROBE} -p tcp -j TCPOPTSTRIP --strip-options 8\nCOMMIT\n"
    removed = f"*mangle\n-F {PROBE}\n-X {PROBE}\nCOMMIT\n"
    command = [f"{plain_command(family)}-restore", "--noflush"]
    try:
        run(command, stdin=made, namespace=namespace)
        run(command, stdin=removed, namespace=namespace)
    except (CommandError, FileNotFoundError, TimeoutExpired) as error:
        return f"the iptables target TCPOPTSTRIP does not work for {family.label}: {error}"
    return ""


_PATIENCE = 5.0


def shown(family: IPFamily, namespace: str | None) -> RelayListeners:
    """Return the table of the relay that runs in a namespace; empty if there is none."""
    with in_namespace(namespace):
        sock = socket.socket(socket.AF_UNIX)
    with sock:
        sock.settimeout(_PATIENCE)
        try:
            sock.connect(shown_at(ADDRESS_FAMILIES[family.value]))
            table = receive(sock, RELAY_TABLES)
        except (OSError, EOFError):
            return Map()
    return Map({one.key: one for one in map(listener_of, table.entries)})
