"""The dataplane of the configured mode, with a Target for each IP family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from narthex.linux.addresses import usable_families
from narthex.linux.monitor import ForeignChanges
from narthex.linux.privileges import may_change_network, missing_tools
from narthex.model import IPFamily
from narthex.netfilter.ast import TouchedPart
from narthex.proxy.backends.base import Target
from narthex.proxy.backends.sockets import PIN_DIRECTORY
from narthex.proxy.kernel.dataplanes import DATAPLANES, Dataplane, DataplaneOptions, dataplane
from narthex.proxy.kernel.localhost import LocalhostRelay
from narthex.proxy.plan.ir import Deviation
from narthex.proxy.program.settings import ProxySettings
from narthex.proxy.program.sync import SyncResult
from narthex.runtime.logs import LOGGER
from narthex.runtime.metrics import counter, gauge
from narthex.runtime.process import StartError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from narthex.proxy.program.sockets import SocketAccelerator

R = TypeVar("R")
C = TypeVar("C")


def dataplane_of(settings: ProxySettings) -> Dataplane:
    """Return the dataplane of the configured mode."""
    options = DataplaneOptions(
        ipvs=settings.ipvs,
        relay_ports=settings.relay_ports,
        udp_idle_seconds=settings.own.udp_idle_timeout,
        sockets=settings.own.socket_load_balancing,
        socket_cgroup=settings.own.socket_load_balancing_cgroup,
        ejection=settings.own.endpoint_ejection,
    )
    return dataplane(settings.mode, options)


class RunningDataplane:
    """A dataplane at work in the network namespace of the calling thread. Nothing is started or written at first."""

    def __init__(self, settings: ProxySettings, families: tuple[IPFamily, ...]) -> None:
        self.dataplane = plane = dataplane_of(settings)
        self.backend = plane.backend_here(families)
        self.foreign: ForeignChanges = plane.foreign_changes(families)
        self.localhost = {
            family: LocalhostRelay(family, udp_idle_seconds=settings.own.udp_idle_timeout)
            for family in families
            if plane.relays_localhost
        }
        self.sockets = _accelerator(plane.options)
        self.targets: dict[IPFamily, Target[Any, Any]] = {
            family: AnnouncedTarget(plane.target(family), self.foreign, plane.transactions, self.localhost.get(family))
            for family in families
        }

    @property
    def unable(self) -> frozenset[Deviation]:
        """The deviations of the rules, without those that sockets do not have."""
        deviations = frozenset(self.backend.deviations)
        return deviations - {Deviation.NO_LEAST_CONNECTIONS} if self.sockets and self.sockets.possible else deviations

    def follow(self, done: SyncResult) -> None:
        """Serve node ports on loopback after a sync, and bring sockets to the plan."""
        if done.plan.family in self.localhost:
            self.localhost[done.plan.family].follow(done.plan)
        if self.sockets is not None:
            self.sockets.follow(done.plan)
        elif done.first:
            _remove_socket_programs(done.plan.family)

    def close(self) -> None:
        """End relays and stop watching for changes by other programs. The rules stay."""
        for target in self.targets.values():
            target.close()
        self.foreign.close()
        if self.sockets is not None:
            self.sockets.close()


def _accelerator(options: DataplaneOptions) -> SocketAccelerator | None:
    if not options.sockets:
        return None
    # Most nodes do without it, and it takes 3 MB of memory.
    from narthex.proxy.program.sockets import SocketAccelerator

    return SocketAccelerator(options.socket_cgroup)


def _remove_socket_programs(family: IPFamily) -> None:
    """Remove what an earlier process with socket load balancing has left: no process would update its maps."""
    try:
        if not Path(PIN_DIRECTORY).exists():
            return
        from narthex.proxy.kernel.sockets import remove_pins

        removed = remove_pins(family)
    except OSError as error:
        LOGGER.error("the programs of socket load balancing could not be removed: %s", error)
    else:
        if removed:
            LOGGER.info("socket load balancing is off now: its programs are removed (%s)", family.label)


class LocalhostCollector:
    """Collects kube-proxy's metrics of node ports on loopback. There are none unless the plan asks for such node ports."""

    def __init__(self, relays: Mapping[IPFamily, LocalhostRelay]) -> None:
        self._relays = relays

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus-client."""
        asked = {family.label: relay for family, relay in self._relays.items() if relay.asked}
        if not asked:
            return
        prefix = "kubeproxy_nftables_localhost_nodeport_listener"
        text = "Listeners of the relay for node ports on loopback."
        yield gauge(f"{prefix}s", text, {label: relay.listening for label, relay in asked.items()}, "ip_family")
        text = "Listeners for node ports on loopback that could not be opened."
        failures = {label: relay.failures for label, relay in asked.items()}
        yield counter(f"{prefix}_creation_failures", text, failures, "ip_family")


class AnnouncedTarget(Target[R, C], Generic[R, C]):
    """A Target that announces its writes to the monitor, so that they do not count as changes by other programs.

    Changes without transactions need no announcement: they are small and go through sockets that the monitor knows.
    """

    def __init__(
        self,
        target: Target[R, C],
        foreign: ForeignChanges,
        transactions: Callable[[C], int],
        localhost: LocalhostRelay | None = None,
    ) -> None:
        """Wrap a Target. `localhost` is the relay that is tended and ends with it."""
        self._target = target
        self._localhost = localhost
        self._foreign = foreign
        self._transactions = transactions

    def read(self) -> R | None:
        """Return the rules in the kernel."""
        return self._target.read()

    def unchanged(self) -> bool:
        """Return True if nothing has changed since the last read or apply."""
        return self._target.unchanged()

    def lacking(self, rules: R, touched: Set[TouchedPart]) -> Set[TouchedPart]:
        """Return the touched parts that lack rules, as far as that is found quickly."""
        return self._target.lacking(rules, touched)

    def damage(self, rules: R, touched: Set[TouchedPart] | None) -> C | None:
        """Return the changes that restore the rules, if these can be found quickly."""
        return self._target.damage(rules, touched)

    def apply(self, changes: C) -> None:
        """Announce and make the changes."""
        count = self._transactions(changes)
        if not count:
            self._target.apply(changes)
            return
        with self._foreign.writing() as own:
            self._target.apply(changes)
            own.transactions += count

    def clean(self) -> None:
        """Remove everything that is ours."""
        self._target.clean()

    def tend(self) -> float | None:
        """Do the work that is due between syncs."""
        delays = self._target.tend(), self._localhost.tend() if self._localhost is not None else None
        return min((delay for delay in delays if delay is not None), default=None)

    def close(self) -> None:
        """Release what the Target holds; the rules stay."""
        if self._localhost is not None:
            self._localhost.close()
        self._target.close()


def check_machine(mode: str) -> tuple[IPFamily, ...]:
    """Return the families that the mode can serve here. Raises StartError if there is none, or no permission."""
    if mode not in DATAPLANES:
        raise StartError(f"mode {mode} does not exist: choose {' or '.join(DATAPLANES)} with --proxy-mode or `mode`")
    if not may_change_network():
        raise StartError("programming the kernel needs root (CAP_NET_ADMIN): run it with sudo")
    why_not = refusal(mode)
    if why_not:
        raise StartError(why_not)
    families = []
    for family in usable_families():
        missing = missing_tools(dataplane(mode).tools(family))
        if missing:
            LOGGER.warning("%s is not found on the PATH: %s is left alone", " and ".join(missing), family.label)
        else:
            families.append(family)
    if IPFamily.IPV6 not in usable_families():
        LOGGER.info("IPv6 is switched off here: only IPv4 is served")
    return tuple(families)


def refusal(mode: str) -> str:
    """Return why the mode cannot run here, and what to do; empty when it can."""
    return dataplane(mode).refusal()
