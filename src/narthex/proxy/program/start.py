"""The node proxy as a program: builds it from its settings and runs it until a signal."""

from __future__ import annotations

import gc
import math
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import msgspec

from narthex.kube.events import (
    ClusterEventRecorder,
    EventCreator,
    EventWriter,
    LogOnlyRecorder,
    cannot_check,
    cannot_serve,
    ipvs_deprecated,
    starting,
)
from narthex.kube.messages import WATCH_TIMES, prepare_decoders
from narthex.kube.source import Origin
from narthex.linux.addresses import global_addresses, own_addresses, primary_addresses
from narthex.linux.clock import Clock, SystemClock
from narthex.linux.conntrack import ConntrackTable, load_module
from narthex.linux.privileges import allow_many_files, set_oom_score
from narthex.model import IPFamily, NamespacedName, Node, Snapshot
from narthex.model.kernel_setting import KernelSetting
from narthex.proxy.backends.base import Backend
from narthex.proxy.backends.iptables.frame import ROUTE_LOCALNET
from narthex.proxy.kernel.dataplanes import CounterReader
from narthex.proxy.plan.balancing import balancing_problem
from narthex.proxy.plan.ir import Deviation
from narthex.proxy.plan.planner import Planner, plan_once
from narthex.proxy.program.cleanup import LeftoverRemover
from narthex.proxy.program.connections import ConnectionCollector, DroppedPacketCollector
from narthex.proxy.program.dataplane import LocalhostCollector, RunningDataplane, check_machine, dataplane_of
from narthex.proxy.program.explain_service import ServiceExplainer
from narthex.proxy.program.flows import StaleFlowRemover
from narthex.proxy.program.health import ProxyHealth
from narthex.proxy.program.kernel_settings import KernelSettings, kernel_settings, with_kernel
from narthex.proxy.program.loop import EventInbox, Proxy
from narthex.proxy.program.metrics import ProxyMetrics
from narthex.proxy.program.reload import ConfigurationFile
from narthex.proxy.program.report import UnservedReporter
from narthex.proxy.program.service_health import ServiceHealth
from narthex.proxy.program.settings import ProxySettings, family_warnings
from narthex.proxy.program.status import StatusPorts
from narthex.proxy.program.sync import FamilySync, SyncResult
from narthex.proxy.verification import ChangeVerifier
from narthex.runtime.http import HttpResponse
from narthex.runtime.http.server import HttpServer
from narthex.runtime.logs import LOGGER, start_logging
from narthex.runtime.metrics import Collector
from narthex.runtime.process import Runnable, StartError, ended_by_signal, replace_process, without_collections
from narthex.runtime.reconciler import EventFeed
from narthex.runtime.status import BindError

SOCKETS_PATH = "/sockets"
"""Where the status ports show the state of socket load balancing, if it is configured."""


VerifierFactory = Callable[[IPFamily, Backend[Any, Any]], ChangeVerifier[Any, Any]]
"""Makes the verifier of the change sets of one IP family."""


class AssembledProxy(NamedTuple):
    """A proxy and the components whose settings may change while it runs."""

    proxy: Proxy
    explainer: ServiceExplainer
    connections: ConnectionCollector
    plane: RunningDataplane


def assemble(
    settings: ProxySettings,
    inbox: EventInbox,
    families: tuple[IPFamily, ...],
    clock: SystemClock,
    http: HttpServer,
    events: ClusterEventRecorder,
    origin: Origin,
    verifiers: VerifierFactory | None = None,
) -> AssembledProxy:
    """Build a proxy for the network namespace of the calling thread. Nothing is started or written.

    With `verifiers`, what these refuse is not written.
    """
    health = ProxyHealth(families, settings.periods.sync, clock, node_expected=origin.creator is not None)
    running = RunningDataplane(settings, families)
    plane, foreign = running.dataplane, running.foreign
    sockets = running.sockets
    if sockets is not None and settings.own.endpoint_ejection:
        from narthex.proxy.plan.ejection import EjectionPolicy
        from narthex.proxy.program.ejection import EjectionReporter, PassiveEjection

        reporter = EjectionReporter(events.record, lambda: proxy.snapshot)
        sockets.ejection = PassiveEjection(reporter, clock.watch_files, EjectionPolicy())
    connections = ConnectionCollector(_counter_readers(running, families), lambda: proxy.plans, clock, settings.own)
    collectors: tuple[Collector, ...] = (connections, *_packet_collectors(running, families, clock), *origin.collectors)
    collectors += (sockets,) if sockets is not None else ()
    metrics = ProxyMetrics(settings.mode, collectors, dict(settings.feature_gates), verifies=verifiers is not None)
    explainer = ServiceExplainer(settings.own.explain_service, lambda: proxy.snapshot)
    syncs = _family_syncs(settings, running, clock, verifiers, from_files=origin.access is None)
    checks = ServiceHealth(
        http, lambda: health.healthy, tell=lambda name, note: events.record(cannot_check(name, note))
    )
    by_family = {sync.family: sync for sync in syncs}
    unserved = UnservedReporter(lambda family: by_family[family].unserved)
    proxy = Proxy(
        inbox,
        syncs,
        clock,
        msgspec.structs.replace(settings.periods, watched=plane.is_watched(foreign)),
        node_name=settings.node.node_name,
        complete=NodeCompleter(
            settings.node.node_name, primary_addresses, global_addresses if plane.needs_node_addresses else tuple
        ).complete,
        foreign=foreign,
        health=health,
        metrics=metrics,
        follow=lambda plan: min(checks.follow(plan), sockets.tend(clock.now()) if sockets else math.inf),
        after_sync=_in_turn(
            LeftoverRemover(settings.mode, clock, foreign.writing).after,
            _stale_flow_remover(running, clock, metrics).after,
            explainer.after,
            unserved.after,
            running.follow,
        ),
        record=events.record,
        balancing_problem=lambda service: balancing_problem(service, plane.mode, running.unable),
    )
    return AssembledProxy(proxy, explainer, connections, running)


def _counter_readers(running: RunningDataplane, families: tuple[IPFamily, ...]) -> dict[IPFamily, CounterReader]:
    """Return the readers of the counters of rules, and of sockets if these are balanced."""
    readers = {family: reader for family in families if (reader := running.dataplane.counter_reader(family))}
    if running.sockets is None:
        return readers
    return {family: running.sockets.counting(reader) for family, reader in readers.items()}


def _stale_flow_remover(running: RunningDataplane, clock: Clock, metrics: ProxyMetrics) -> StaleFlowRemover:
    return StaleFlowRemover(
        ConntrackTable(),
        _own_addresses,
        clock,
        metrics,
        relayed=Deviation.RELAYED in running.backend.deviations,
        gentle=running.dataplane.drains_connections,
        sockets=running.sockets,
    )


def _packet_collectors(
    running: RunningDataplane, families: tuple[IPFamily, ...], clock: Clock
) -> tuple[Collector, ...]:
    """Return the collectors of what the dataplane counts apart from connections."""
    drops = {family: read for family in families if (read := running.dataplane.invalid_drop_reader(family))}
    return DroppedPacketCollector(drops, clock), LocalhostCollector(running.localhost)


def _family_syncs(
    settings: ProxySettings,
    running: RunningDataplane,
    clock: Clock,
    verifiers: VerifierFactory | None,
    *,
    from_files: bool,
) -> list[FamilySync[Any, Any]]:
    # Files are the user's own: what is not there was deleted.
    doubt = 0.0 if from_files else WATCH_TIMES.doubt
    syncs: list[FamilySync[Any, Any]] = []
    for family, target in running.targets.items():
        verifier = verifiers(family, running.backend) if verifiers is not None else None
        planner = Planner(settings.node, family)
        sync = FamilySync(family, planner, running.backend, target, clock, doubt=doubt, verifier=verifier)
        if running.sockets is not None:
            # First: it takes a fraction of the time that the rules take.
            sync.before_write = running.sockets.follow
        syncs.append(sync)
    return syncs


def _in_turn(*actions: Callable[[SyncResult], object]) -> Callable[[SyncResult], None]:
    def all_of_them(done: SyncResult) -> None:
        """Pass the result to each action in order."""
        for action in actions:
            action(done)

    return all_of_them


def _own_addresses() -> frozenset[str]:
    return frozenset(own.address for own in own_addresses())


def prepare(settings: ProxySettings) -> None:
    """Apply the kernel settings that may need more than CAP_NET_ADMIN, so that `serve` runs without (row 19.9)."""
    dataplane_of(settings).prepare()
    # Some settings come with this module, and `serve` may find them read-only by the time that its rules have loaded it.
    # Without permission they will say so themselves.
    with suppress(OSError):
        load_module()
    asked = kernel_settings(settings)
    if plan_once(Snapshot(), settings.node, IPFamily.IPV4).node_ports.localhost:
        path, value = ROUTE_LOCALNET
        asked.append(
            KernelSetting(path, int(value), "localhostNodePorts", unasked="iptables.localhostNodePorts: false")
        )
    KernelSettings(asked).make(last=True)
    LOGGER.info("kernel settings are made as far as they can be")


class ProxyPart:
    """One run of the node proxy, as a part of a node or as the work of a process."""

    def __init__(
        self, settings: ProxySettings, origin: Origin, status: StatusPorts, verifiers: VerifierFactory
    ) -> None:
        """Prepare the run. `verifiers` are used if the settings ask for them."""
        self._settings = settings
        self._verifiers = verifiers
        self._origin = origin
        self._status = status
        self._lock = threading.Lock()
        """Held while the proxy is built or reconfigured."""
        self._parts: AssembledProxy | None = None
        self._stopping = False

    @property
    def healthy(self) -> bool:
        """Return True if the rules are up to date (rows 17.1, 17.2)."""
        parts = self._parts
        return parts is not None and parts.proxy.health.healthy

    def stop(self) -> None:
        """End `run` after the present turn. Safe in a signal handler, unlike `take_over`."""
        self._stopping = True
        parts = self._parts
        if parts is not None:
            parts.proxy.stop()

    def take_over(self, fresh: ProxySettings) -> None:
        """Apply other settings while the proxy runs (row 29.12)."""
        with self._lock:
            self._settings = fresh
            parts = self._parts
        if parts is None:
            return
        KernelSettings(kernel_settings(fresh)).make(last=True)
        node = with_kernel(fresh).node
        parts.explainer.name = fresh.own.explain_service
        parts.connections.configuration = fresh.own
        parts.proxy.use(lambda family: Planner(node, family), fresh.periods)

    def run(self) -> None:
        """Run the proxy until `stop`; the rules stay in the kernel. Raises StartError."""
        settings, node_name = self._settings, self._settings.node.node_name
        families = check_machine(settings.mode)
        dataplane_of(settings).prepare()
        LOGGER.info("node %s, mode %s, %s", node_name, settings.mode, " and ".join(each.label for each in families))
        for warning in family_warnings(settings, families):
            LOGGER.warning("%s", warning)
        asked = KernelSettings(kernel_settings(settings))
        asked.make(last=False)
        clock = SystemClock()
        feed = EventFeed(self._origin.source)
        http = HttpServer()
        writer = EventWriter(self._origin.creator, node_name, clock) if self._origin.creator else None
        events: ClusterEventRecorder = writer or LogOnlyRecorder()
        with self._lock:
            verifiers = self._verifiers if settings.own.verify_changes else None
            made = assemble(with_kernel(self._settings), feed, families, clock, http, events, self._origin, verifiers)
            self._parts = made
        proxy = made.proxy
        if self._stopping:
            proxy.stop()
        self._status.show(proxy, settings.mode)
        sockets = made.plane.sockets
        if sockets is not None:
            self._status.offer(
                SOCKETS_PATH, lambda: HttpResponse(200, msgspec.json.encode(sockets.status), "application/json")
            )
        events.record(starting(node_name))
        if dataplane_of(settings).deprecated:
            events.record(deprecated := ipvs_deprecated(node_name))
            LOGGER.warning("%s", deprecated.note)
        try:
            with (
                writer.running() if writer else nullcontext(),
                without_collections(),
                feed.running(proxy.notice),
                proxy.listening(),
            ):
                limit = clock.now() + _FIRST_SECONDS
                proxy.run(until=lambda: proxy.health.ready or clock.now() > limit)
                gc.freeze()
                gc.enable()
                asked.make(last=True)
                # What an earlier process's rules have counted is the base from which is counted here.
                threading.Thread(target=made.connections.look, name="connections", daemon=True).start()
                proxy.run()
        finally:
            made.plane.close()
            self._status.hide()
            self._status.withdraw(SOCKETS_PATH)
            http.stop()


_FIRST_SECONDS = 60.0
"""Longest delay of work that waits for the first sync, since an API server may be down for hours."""


class ReconfigurableWork(Runnable, Protocol):
    """The work of a process whose settings may change."""

    def take_over(self, fresh: ProxySettings) -> None:
        """Apply other settings while the work runs."""
        ...


def serve(
    settings: ProxySettings, origin: Origin, verifiers: VerifierFactory, file: ConfigurationFile | None = None
) -> None:
    """Run the node proxy until SIGTERM, SIGINT, or a configuration change that needs a new process. Raises StartError."""
    status = StatusPorts()
    run_process(ProxyPart(settings, origin, status, verifiers), settings, status, origin.creator, file)


def run_process(
    work: ReconfigurableWork,
    settings: ProxySettings,
    status: StatusPorts,
    creator: EventCreator | None,
    file: ConfigurationFile | None = None,
) -> None:
    """Run `work` with the status ports, signal handlers, and configuration file of its process. Raises StartError."""
    prepare_decoders()
    allow_many_files()
    _protect(settings.oom_score_adj)
    try:
        status.serve(settings)
    except BindError as error:
        if creator is not None:
            writer = EventWriter(creator, settings.node.node_name, SystemClock())
            writer.record(cannot_serve(settings.node.node_name, error.purpose, str(error)))
            with writer.running():
                pass
        raise StartError(str(error)) from error

    def take_over(fresh: ProxySettings) -> bool:
        """Apply settings; return False if a required port is taken.

        A new process then fails as at any start.
        """
        start_logging(sys.stderr, fresh.logging)
        _protect(fresh.oom_score_adj)
        work.take_over(fresh)
        try:
            status.serve(fresh)
        except BindError as error:
            LOGGER.error("%s", error)
            return False
        return True

    edits = file.followed(settings, take_over, work.stop) if file else nullcontext()
    try:
        with ended_by_signal(work.stop), edits:
            work.run()
    finally:
        status.stop()
    if not (file and file.replace):
        relayed = Deviation.RELAYED in dataplane_of(settings).backend.deviations
        LOGGER.info("stopped; the rules stay%s", ", and lead nowhere without the relay" if relayed else " in force")
    if file and file.replace:
        replace_process()


def _protect(score: int) -> None:
    """Set the OOM score (row 27.18); without permission, log that and continue."""
    try:
        set_oom_score(score)
    except OSError as error:
        LOGGER.info("oomScoreAdj %d could not be set: %s; it stays as it is", score, error.strerror)


Addresses = Callable[[], tuple[str, ...]]


class NodeCompleter:
    """Completes snapshots. The same snapshot and the same addresses give the identical result."""

    def __init__(self, node_name: str, primary: Addresses, machine: Addresses = tuple) -> None:
        """Create the completer.

        Args:
            node_name: Name of the Node object.
            primary: Returns one address of each family, for a Node object without addresses.
            machine: Returns all addresses, for a dataplane whose plan must list them; none for others, so that their
                plans do not change.
        """
        self._key = NamespacedName("", node_name)
        self._primary = primary
        self._machine = machine
        self._last: tuple[Snapshot, Node, Snapshot] | None = None

    def complete(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with this node in it, and addresses in the node."""
        known = snapshot.nodes.get(self._key)
        node = known or Node(name=self._key.name)
        if not (node.internal_ips or node.external_ips):
            node = msgspec.structs.replace(node, internal_ips=self._primary())
        machine = self._machine()
        if machine != node.machine_ips:
            node = msgspec.structs.replace(node, machine_ips=machine)
        if node is known:
            return snapshot
        if self._last is not None and self._last[0] is snapshot and self._last[1] == node:
            return self._last[2]
        completed = msgspec.structs.replace(snapshot, nodes=snapshot.nodes.set(self._key, node))
        self._last = snapshot, node, completed
        return completed
