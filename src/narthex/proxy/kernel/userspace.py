"""The userspace Target: a relay process, and iptables rules that redirect to it, for one namespace and family.

A relay shows its table on an abstract Unix socket, whose names belong to the network namespace, so that other processes
can inspect it (`shown`). Nothing remains when the relay ends, however it ends.
"""

from __future__ import annotations

import logging
import socket

from immutables import Map

from narthex.linux.namespaces import in_namespace
from narthex.linux.run import ApplyError
from narthex.model import IPFamily, NamespacedName, Protocol, ServicePortName
from narthex.proxy.backends.base import Target
from narthex.proxy.backends.iptables.rules import XtablesRules
from narthex.proxy.backends.userspace.names import USERSPACE_CHAINS
from narthex.proxy.backends.userspace.rules import (
    ListenKey,
    RelayListener,
    RelayListeners,
    UserspaceChanges,
    UserspaceRules,
)
from narthex.proxy.kernel.iptables import IptablesTarget
from narthex.proxy.plan.ir import Scope
from narthex.proxy.relay.process import RelayGoneError, RelayProcess, RelaySetup
from narthex.proxy.relay.relay import UDP_IDLE_SECONDS
from narthex.proxy.relay.wire import (
    ADDRESS_FAMILIES,
    RELAY_TABLES,
    RelayAnswer,
    RelayCounts,
    RelayOrder,
    RelayPort,
    receive,
    shown_at,
)

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
        self._udp_idle_seconds = udp_idle_seconds
        self._tables = IptablesTarget(family, namespace, owner=USERSPACE_CHAINS)
        self._relay: RelayProcess | None = None
        self._listeners: RelayListeners = Map()
        """What the relay serves."""
        self._lost: RelayListeners = Map()
        """The listeners of a relay that has died, until they are served again."""
        self._died = False
        """The last relay has, and there is no other yet."""
        self._mark = 0
        self._taken: set[ListenKey] = set()
        self._short_of_files = 0

    @property
    def counts(self) -> RelayCounts:
        """Counters of the relay since it started."""
        return self._ask(RelayOrder()).counts if self._alive() else RelayCounts()

    def read(self) -> UserspaceRules | None:
        """Return our rules in the kernel and the relay's table. Raises ApplyError if they cannot be read."""
        self._alive()
        tables = self._tables.read()
        if tables is None and not self._listeners and not self._taken:
            return None
        return UserspaceRules(
            tables=tables or XtablesRules(self._family, {}, Map()),
            listeners=self._listeners,
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
        self._listen(changes.listen)
        if changes.tables:
            self._tables.apply(changes.tables)
        desired = {one.key for one in changes.listen}
        undesired = tuple(key for key in self._listeners if key not in desired) if changes.replace else ()
        self._close((*changes.close, *undesired))

    def tend(self) -> float:
        """Check the relay, and restart it with the same ports if it has died. Returns the seconds until the next check."""
        try:
            self._tend()
        except ApplyError as error:
            # The next sync reads back what is there, and repairs it.
            _LOGGER.warning("%s", error)
        return TEND_SECONDS

    def _tend(self) -> None:
        if not self._alive() and self._lost:
            self._listen(tuple(self._lost.values()))
        if self._alive():
            short = self.counts.short_of_files
            if short > self._short_of_files:
                _LOGGER.warning(
                    "the %s relay was short of open files %d times: connections wait for others to end; "
                    "raise the limit (LimitNOFILE of the unit, or ulimit -n)",
                    self._family.label,
                    short - self._short_of_files,
                )
            self._short_of_files = short

    def clean(self) -> None:
        """Remove all rules of ours, end all connections, and forget all clients."""
        self._tables.clean()
        if self._alive():
            self._ask(RelayOrder(forget=True))
        self._listeners = self._lost = Map()
        self._taken.clear()

    def close(self) -> None:
        """End the relay. The rules stay and lead nowhere until the next relay starts."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None
            self._listeners = Map()

    # ---- the relay -------------------------------------------------------------------------------------------------

    def _alive(self) -> bool:
        """Return True if a relay runs. A relay that has died serves nothing."""
        if self._relay is None:
            return False
        if self._relay.alive:
            return True
        self._gone()
        return False

    def _gone(self) -> None:
        """Log why the relay ended, and continue without it."""
        if self._relay is not None:
            self._relay.close()
            _LOGGER.warning(
                "the %s relay (process %d) has died: %s; the connections through it are lost",
                self._family.label,
                self._relay.pid,
                self._relay.end,
            )
            self._died = True
        self._relay = None
        self._lost, self._listeners = self._listeners or self._lost, Map()
        self._short_of_files = 0

    def _listen(self, listeners: tuple[RelayListener, ...]) -> None:
        if not listeners and self._relay is None:
            return
        answer = self._ask(RelayOrder(mark=self._mark, listen=tuple(map(entry_of, listeners))))
        failed = {(Protocol(one.protocol.upper()), one.port): one for one in answer.failed}
        with self._listeners.mutate() as mutation:
            mutation.update({one.key: one for one in listeners if one.key not in failed})
            self._listeners = mutation.finish()
        self._lost = Map()
        if failed:
            self._taken.update(key for key, one in failed.items() if one.taken)
            said = ", ".join(f"{one.port}/{one.protocol}: {one.reason}" for one in answer.failed[:3])
            raise ApplyError(
                f"the relay cannot listen on {len(failed)} ports ({said}); ports of other programs are avoided "
                f"from now on"
            )

    def _close(self, keys: tuple[ListenKey, ...]) -> None:
        if not keys or self._relay is None:
            return
        self._ask(RelayOrder(close=tuple((protocol.lower, port) for protocol, port in keys)))
        with self._listeners.mutate() as mutation:
            for key in keys:
                mutation.pop(key, None)
            self._listeners = mutation.finish()

    def _ask(self, order: RelayOrder) -> RelayAnswer:
        try:
            if self._relay is None:
                setup = RelaySetup(ADDRESS_FAMILIES[self._family.value], udp_idle_seconds=self._udp_idle_seconds)
                self._relay = RelayProcess(setup, self._namespace)
                if self._died:
                    _LOGGER.warning("the %s relay is started again (process %d)", self._family.label, self._relay.pid)
                self._died = False
            return self._relay.ask(order)
        except RelayGoneError as error:
            self._gone()
            raise ApplyError(f"the {self._family.label} {error}; it is started again soon") from error
        except OSError as error:
            raise ApplyError(f"the {self._family.label} relay could not be started: {error}") from error


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


def entry_of(listener: RelayListener) -> RelayPort:
    """Return a listener as the relay's protocol has it."""
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
    """Return an entry of the relay's protocol as a listener."""
    namespace, name, port = entry.service
    return RelayListener(
        name=ServicePortName(NamespacedName(namespace, name), port, Protocol(entry.protocol.upper())),
        scope=Scope(entry.scope),
        port=entry.port,
        endpoints=entry.endpoints,
        affinity_seconds=entry.affinity_seconds,
    )
