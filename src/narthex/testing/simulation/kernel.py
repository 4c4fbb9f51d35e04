"""A simulated kernel: the rules of one network namespace, written in transactions by the proxy and by others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any

from narthex.linux.monitor import OwnTransactions
from narthex.linux.run import ApplyError
from narthex.model.net import IPFamily
from narthex.netfilter.ast import TouchedPart
from narthex.proxy.backends.base import Backend, Target
from narthex.proxy.backends.nftables.changes import NftChanges
from narthex.proxy.plan.ir import Plan
from narthex.testing.simulation.time import VirtualLoop

_PHASES: Mapping[str, Callable[[Any], Sequence[Any]]] = {"nftables": NftChanges.phases}


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


class SimulatedKernel:
    """The rules by family. Every change of rules is reported to `observe(family, by_proxy)`."""

    def __init__(self, backend: Backend[Any, Any], loop: VirtualLoop, random: Random) -> None:
        """Create an empty kernel for the rules of one backend."""
        self.backend = backend
        self.phases: Callable[[Any], Sequence[Any]] = _PHASES.get(backend.name, lambda changes: (changes,))
        """Splits changes into transactions."""
        self.loop = loop
        self.random = random
        self.faults = KernelFaults()
        self.rules: dict[IPFamily, Any] = {}
        self.generation = 0
        self.transactions = 0
        """Transactions of the proxy."""
        self.observe: Callable[[IPFamily, bool], None] = lambda *_: None
        self.interfere: Callable[[IPFamily], None] = lambda _: None
        """Changes rules between two transactions of the proxy, when `faults.meanwhile` says so."""
        self.listeners: list[Callable[[IPFamily], None]] = []
        """Called at once, as by a thread of their own, even while the proxy is busy."""

    def commit(self, family: IPFamily, rules: Any, *, by_proxy: bool) -> None:
        """Put rules in force in one transaction."""
        self.generation += 1
        self.transactions += by_proxy
        if rules is None:
            self.rules.pop(family, None)
        else:
            self.rules[family] = rules
        self.observe(family, by_proxy)
        if not by_proxy:
            for listener in tuple(self.listeners):
                listener(family)

    def happens(self, probability: float) -> bool:
        """Draw whether a fault happens. Draws nothing when it cannot, so that runs without it stay the same."""
        return probability > 0 and self.random.random() < probability


class SimulatedTarget(Target[Any, Any]):
    """The proxy's way to the simulated kernel: one transaction for each phase of the changes."""

    def __init__(self, kernel: SimulatedKernel, family: IPFamily) -> None:
        """Write the rules of one family."""
        self._kernel = kernel
        self._family = family
        self._seen: int | None = None

    def read(self) -> Any:
        """Return the rules in the kernel. Raises ApplyError."""
        kernel = self._kernel
        kernel.loop.pass_time(kernel.faults.read_seconds)
        if kernel.happens(kernel.faults.unreadable):
            raise ApplyError("other programs keep changing the rules")
        self._seen = kernel.generation
        return kernel.rules.get(self._family)

    def unchanged(self) -> bool:
        """Return True if no rules have changed since the last read or apply."""
        return self._seen is not None and self._seen == self._kernel.generation

    def apply(self, changes: Any) -> None:
        """Make the changes, with the faults that the schedule draws. Raises ApplyError, ProcessCrash."""
        kernel, known = self._kernel, self._seen
        self._seen = None
        phases = kernel.phases(changes)
        before = kernel.generation
        for phase in phases:
            self._strike()
            kernel.loop.pass_time(kernel.faults.write_seconds)
            if kernel.happens(kernel.faults.refuse):
                raise ApplyError("the kernel refused the rules")
            kernel.commit(self._family, self._patched(phase), by_proxy=True)
            if kernel.happens(kernel.faults.meanwhile):
                kernel.interfere(self._family)
        self._strike()
        if known == before and kernel.generation == before + len(phases):
            self._seen = kernel.generation

    def clean(self) -> None:
        """Remove the rules."""
        self._kernel.commit(self._family, None, by_proxy=True)

    def _patched(self, changes: Any) -> Any:
        """Return the rules after one transaction. Raises ApplyError if others removed what the changes refer to."""
        have = self._kernel.rules.get(self._family)
        if have is None:
            if not changes.replace:
                raise ApplyError("no such table")
            have = self._kernel.backend.render(Plan(family=self._family, services={}))
        try:
            return self._kernel.backend.patch(have, changes)
        except KeyError as error:
            raise ApplyError(f"no such object: {error}") from error

    def _strike(self) -> None:
        if self._kernel.happens(self._kernel.faults.crash):
            raise ProcessCrash


class SimulatedMonitor:
    """The kernel's notifications of transactions by others, as `NftablesMonitor` reports them."""

    interval = float("inf")

    def __init__(self, kernel: SimulatedKernel) -> None:
        """Subscribe."""
        self._kernel = kernel
        self._found: dict[IPFamily, int] = {}
        self._notice: Callable[[], None] = lambda: None
        self._writing = False
        kernel.listeners.append(self._heard)

    def look(self) -> Mapping[IPFamily, int]:
        """Return the number of foreign changes since the last call, by family."""
        found, self._found = self._found, {}
        return found

    def touched(self, family: IPFamily) -> frozenset[TouchedPart] | None:
        """Return None: anything may have changed."""
        del family
        return None

    @contextmanager
    def writing(self) -> Iterator[OwnTransactions]:
        """Return a context for the proxy's own writes, after which the generation shows writes by others."""
        own, before = OwnTransactions(), self._kernel.generation
        try:
            yield own
        finally:
            if self._kernel.generation - before > own.transactions:
                for family in tuple(self._kernel.rules) or (IPFamily.IPV4,):
                    self._heard(family)

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
        self._kernel.listeners.remove(self._heard)

    def _heard(self, family: IPFamily) -> None:
        self._found[family] = self._found.get(family, 0) + 1
        self._notice()
