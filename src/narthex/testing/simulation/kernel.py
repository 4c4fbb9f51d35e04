"""A simulated kernel: the rules of one network namespace, written in transactions by the proxy and by others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any, NamedTuple

from narthex.linux.monitor import OwnTransactions
from narthex.model import IPFamily
from narthex.netfilter.ast import TouchedPart
from narthex.proxy.backends.base import ApplyError, Backend, Target
from narthex.testing.simulation.time import VirtualLoop
from narthex.testing.simulation.writes import (
    KernelWrite,
    empty_rules,
    kernel_writes,
    lacking_parts,
    parts_again,
    touched_parts,
)

_PARTS_CHECK_SHARE = 0.05
"""Duration of a check of touched chains only, as a share of that of a read-back."""


class ProcessCrash(BaseException):
    """The simulated process ends here, as by SIGKILL."""


class KernelFaults:
    """What may go wrong in the kernel. The schedule changes these numbers while the simulation runs."""

    def __init__(self) -> None:
        self.crash = 0.0
        """Probability that the process is killed before or after a transaction."""
        self.refuse = 0.0
        """Probability that a write fails."""
        self.unreadable = 0.0
        """Probability that a read fails."""
        self.read_seconds = 0.0
        """Duration of a read-back."""
        self.write_seconds = 0.0
        """Duration of a transaction."""
        self.meanwhile = 0.0
        """Probability that another program changes our rules between two of our transactions."""
        self.notify_seconds = 0.0
        """Time from the moment when a transaction is counted and in force to its notification."""


class Notification(NamedTuple):
    """A notification that the kernel has not sent yet."""

    family: IPFamily
    due: float
    """When it is sent."""
    listeners: set[SimulatedMonitor]
    touched: frozenset[TouchedPart] | None
    """What the transaction changed; None: anything."""


class SimulatedKernel:
    """The rules by family. Every change of rules is reported to `observe(family, writer)`.

    A writer is any object that stands for a process; None stands for other programs.
    """

    def __init__(self, backend: Backend[Any, Any], loop: VirtualLoop, random: Random) -> None:
        """Create an empty kernel for the rules of one backend."""
        self.backend = backend
        self.loop = loop
        self.random = random
        self.faults = KernelFaults()
        self.rules: dict[IPFamily, Any] = {}
        self.generation = 0
        """Transactions of nf_tables, of everybody."""
        self.transactions = 0
        """Writes of proxies."""
        self.observe: Callable[[IPFamily, object], None] = lambda *_: None
        self.interfere: Callable[[IPFamily], None] = lambda _: None
        """Changes rules between two writes of a proxy, when `faults.meanwhile` says so."""
        self.listeners: list[SimulatedMonitor] = []
        """Notified of writes of others, as by a thread of their own, even while the proxy is busy."""
        self.notifications: deque[Notification] = deque()
        """Those under way, first ones first."""

    def commit(self, family: IPFamily, rules: Any, *, writer: object = None, is_notified: bool = True) -> None:
        """Put rules in force in one write."""
        self.generation += is_notified
        self.transactions += writer is not None
        touched = touched_parts(self.rules.get(family), rules)
        if rules is None:
            self.rules.pop(family, None)
        else:
            self.rules[family] = rules
        self.observe(family, writer)
        if not is_notified:
            return
        due = self.loop.time() + self.faults.notify_seconds
        self.notifications.append(
            Notification(family, due, {each for each in self.listeners if each.writer is not writer}, touched)
        )
        if self.faults.notify_seconds:
            self.loop.call_at(due, self._notify, due)
        self._notify(self.loop.time())

    def wait_for_transactions(self) -> None:
        """Notify of all transactions that are counted, as the kernel has done when it answers an empty transaction."""
        self._notify(math.inf)

    def _notify(self, until: float) -> None:
        while self.notifications and self.notifications[0].due <= until:
            notification = self.notifications.popleft()
            for listener in self.listeners:
                if listener in notification.listeners:
                    listener.hear(notification.family, notification.touched)

    def happens(self, probability: float) -> bool:
        """Draw whether a fault happens. Draws nothing when it cannot, so that runs without it stay the same."""
        return probability > 0 and self.random.random() < probability


class SimulatedTarget(Target[Any, Any]):
    """The way of one process to the simulated kernel: one write after the other."""

    def __init__(self, kernel: SimulatedKernel, family: IPFamily, writer: object, faults: KernelFaults) -> None:
        """Write the rules of one family for a process."""
        self._kernel = kernel
        self._family = family
        self._writer = writer
        self._faults = faults
        self._seen: int | None = None
        self._knows_unchanged = kernel.backend.name == "nftables"
        """The real Target knows when nothing has changed."""

    def read(self) -> Any:
        """Return the rules in the kernel. Raises ApplyError."""
        kernel = self._kernel
        kernel.loop.pass_time(self._faults.read_seconds)
        if kernel.happens(self._faults.unreadable):
            raise ApplyError("other programs keep changing the rules")
        self._seen = kernel.generation
        return kernel.rules.get(self._family)

    def unchanged(self) -> bool:
        """Return True if no rules have changed since the last read or apply."""
        return self._knows_unchanged and self._seen is not None and self._seen == self._kernel.generation

    def lacking(self, rules: Any, touched: Set[TouchedPart]) -> Set[TouchedPart]:
        """Return the touched chains that have too few rules."""
        self._kernel.loop.pass_time(_PARTS_CHECK_SHARE * self._faults.read_seconds)
        return lacking_parts(self._kernel.rules.get(self._family), rules, touched)

    def damage(self, rules: Any, touched: Set[TouchedPart] | None) -> Any:
        """Return changes that write the touched chains again, in mode iptables."""
        return parts_again(rules, touched)

    def apply(self, changes: Any) -> None:
        """Make the changes, with the faults that the schedule draws. Raises ApplyError, ProcessCrash."""
        kernel, known = self._kernel, self._seen
        self._seen = None
        before = kernel.generation
        writes = kernel_writes(kernel.backend, changes, self._present())
        for write in writes:
            self._strike()
            kernel.loop.pass_time(self._faults.write_seconds)
            if kernel.happens(self._faults.refuse):
                raise ApplyError("the kernel refused the rules")
            kernel.commit(self._family, self._made(write), writer=self._writer, is_notified=write.is_notified)
            if kernel.happens(self._faults.meanwhile):
                kernel.interfere(self._family)
        self._strike()
        if known == before and kernel.generation == before + len(writes):
            self._seen = kernel.generation

    def clean(self) -> None:
        """Remove the rules."""
        self._kernel.commit(self._family, None, writer=self._writer)

    def _present(self) -> Any:
        have = self._kernel.rules.get(self._family)
        return empty_rules(self._kernel.backend, self._family) if have is None else have

    def _made(self, write: KernelWrite) -> Any:
        """Return the rules after one write. Raises ApplyError if others removed what it refers to."""
        try:
            return write.made(self._present())
        except KeyError as error:
            raise ApplyError(f"no such object: {error}") from error

    def _strike(self) -> None:
        if self._kernel.happens(self._faults.crash):
            raise ProcessCrash


class SimulatedMonitor:
    """The kernel's notifications to one process about transactions by others, as `NftablesMonitor` reports them."""

    interval = float("inf")

    def __init__(self, kernel: SimulatedKernel, writer: object) -> None:
        """Subscribe for a process."""
        self._kernel = kernel
        self.writer = writer
        """The process."""
        self._found: dict[IPFamily, int] = {}
        self._touched: dict[IPFamily, frozenset[TouchedPart] | None] = {}
        self._looked_at = self._touched
        self._notice: Callable[[], None] = lambda: None
        kernel.listeners.append(self)

    def look(self) -> Mapping[IPFamily, int]:
        """Return the number of foreign changes since the last call, by family."""
        found, self._found = self._found, {}
        self._looked_at, self._touched = self._touched, {}
        return found

    def touched(self, family: IPFamily) -> frozenset[TouchedPart] | None:
        """Return what others touched in the changes of the last `look`; None: they may have changed anything."""
        return self._looked_at.get(family, frozenset())

    @contextmanager
    def writing(self) -> Iterator[OwnTransactions]:
        """Return a context for the proxy's own writes, after which the generation shows writes by others."""
        # What others change at this moment is counted, and they are notified of it once the proxy has begun to write.
        for family in tuple(self._kernel.rules):
            if self._kernel.happens(self._kernel.faults.meanwhile):
                self._kernel.interfere(family)
        own, before = OwnTransactions(), self._kernel.generation
        self._kernel.wait_for_transactions()
        try:
            yield own
        finally:
            # Meanwhile there was no subscription.
            for notification in self._kernel.notifications:
                if notification.due <= self._kernel.loop.time():
                    notification.listeners.discard(self)
            if self._kernel.generation - before > own.transactions:
                for family in tuple(self._kernel.rules) or (IPFamily.IPV4,):
                    self.hear(family, None)

    def listening(self, notice: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which `notice` is called after changes by others."""
        return self._listening(notice)

    @contextmanager
    def _listening(self, notice: Callable[[], None]) -> Iterator[None]:
        self._notice = notice
        try:
            yield
        finally:
            self._notice = lambda: None

    def close(self) -> None:
        """End the subscription."""
        self._kernel.listeners.remove(self)

    def hear(self, family: IPFamily, touched: frozenset[TouchedPart] | None) -> None:
        """Receive a notification."""
        self._found[family] = self._found.get(family, 0) + 1
        known = self._touched.get(family, frozenset())
        self._touched[family] = None if touched is None or known is None else known | touched
        self._notice()
