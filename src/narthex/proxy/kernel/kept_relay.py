"""A relay process that is started with its first listeners, and again with the same ones when it has died."""

from __future__ import annotations

import logging

from immutables import Map

from narthex.model import NamespacedName, Protocol, ServicePortName
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.userspace.rules import ListenKey, RelayListener, RelayListeners
from narthex.proxy.plan.ir import Scope
from narthex.proxy.relay.process import RelayGoneError, RelayProcess, RelaySetup
from narthex.proxy.relay.wire import PortFailure, RelayAnswer, RelayCounts, RelayOrder, RelayPort

_LOGGER = logging.getLogger("narthex")


class KeptRelay:
    """The relay of one IP family in one network namespace. It ends with this process. Not thread-safe."""

    def __init__(self, label: str, setup: RelaySetup, namespace: str | None = None) -> None:
        """Prepare a relay; nothing is started yet. `label` names it in messages."""
        self._label = label
        self._setup = setup
        self._namespace = namespace
        self._relay: RelayProcess | None = None
        self.listeners: RelayListeners = Map()
        """What the relay serves."""
        self._lost: RelayListeners = Map()
        """The listeners of a relay that has died, until they are served again."""
        self._died = False
        """The last relay has, and there is no other yet."""
        self._short_of_files = 0
        self._reasons: set[str] = set()
        """Why the relay did not hand over connections, as far as it was logged."""

    @property
    def counts(self) -> RelayCounts:
        """Counters of the relay since it started."""
        return self._ask(RelayOrder()).counts if self.alive() else RelayCounts()

    def alive(self) -> bool:
        """Return True if a relay runs. A relay that has died serves nothing."""
        if self._relay is None:
            return False
        if self._relay.alive:
            return True
        self._gone()
        return False

    def listen(self, listeners: tuple[RelayListener, ...], mark: int = 0) -> tuple[PortFailure, ...]:
        """Open ports, and use other endpoints; return the ports that cannot be opened. Raises ApplyError.

        Listeners of a relay that has died are dropped: the caller knows what is due now.
        """
        if not listeners and self._relay is None:
            return ()
        answer = self._ask(RelayOrder(mark=mark, listen=tuple(map(entry_of, listeners))))
        failed = {(Protocol(one.protocol.upper()), one.port) for one in answer.failed}
        with self.listeners.mutate() as mutation:
            mutation.update({one.key: one for one in listeners if one.key not in failed})
            self.listeners = mutation.finish()
        self._lost = Map()
        return answer.failed

    def stop_listening(self, keys: tuple[ListenKey, ...]) -> None:
        """Close ports; those that are closed already are ignored. Raises ApplyError."""
        if not keys or self._relay is None:
            return
        self._ask(RelayOrder(close=tuple((protocol.lower, port) for protocol, port in keys)))
        with self.listeners.mutate() as mutation:
            for key in keys:
                mutation.pop(key, None)
            self.listeners = mutation.finish()

    def tend(self, mark: int = 0) -> tuple[PortFailure, ...]:
        """Start a relay that has died again with its ports; return those that cannot be opened. Raises ApplyError."""
        failed: tuple[PortFailure, ...] = ()
        if not self.alive() and self._lost:
            failed = self.listen(tuple(self._lost.values()), mark)
        if self.alive():
            counts = self.counts
            for reason in counts.kept.keys() - self._reasons:
                _LOGGER.info("the %s relay copies connections with much data itself: %s", self._label, reason)
            self._reasons |= counts.kept.keys()
            short = counts.short_of_files
            if short > self._short_of_files:
                _LOGGER.warning(
                    "the %s relay was short of open files %d times: connections wait for others to end; "
                    "raise the limit (LimitNOFILE of the unit, or ulimit -n)",
                    self._label,
                    short - self._short_of_files,
                )
            self._short_of_files = short
        return failed

    def forget(self) -> None:
        """Close all ports, end all connections, and forget all clients. Raises ApplyError."""
        if self.alive():
            self._ask(RelayOrder(forget=True))
        self.listeners = self._lost = Map()

    def close(self) -> None:
        """End the relay."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None
            self.listeners = Map()

    def _gone(self) -> None:
        """Log why the relay ended, and continue without it."""
        if self._relay is not None:
            self._relay.close()
            _LOGGER.warning(
                "the %s relay (process %d) has died: %s; the connections through it are lost",
                self._label,
                self._relay.pid,
                self._relay.end,
            )
            self._died = True
        self._relay = None
        self._lost, self.listeners = self.listeners or self._lost, Map()
        self._short_of_files = 0

    def _ask(self, order: RelayOrder) -> RelayAnswer:
        try:
            if self._relay is None:
                self._relay = RelayProcess(self._setup, self._namespace)
                if self._died:
                    _LOGGER.warning("the %s relay is started again (process %d)", self._label, self._relay.pid)
                self._died = False
            return self._relay.ask(order)
        except RelayGoneError as error:
            self._gone()
            raise ApplyError(f"the {self._label} {error}; it is started again soon") from error
        except OSError as error:
            raise ApplyError(f"the {self._label} relay could not be started: {error}") from error


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
