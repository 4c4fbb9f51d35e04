"""Puts a node proxy together out of its settings, and runs it until a signal ends it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import msgspec

from narthex.apps.cleanup import Takeover
from narthex.apps.feed import Feed, Watched
from narthex.apps.flows import Flows
from narthex.apps.foreign import foreign_changes, tells, transactions
from narthex.apps.health import Health
from narthex.apps.httpd import HttpServer
from narthex.apps.kernel_settings import KernelSettings, kernel_settings, with_kernel
from narthex.apps.logs import LOGGER
from narthex.apps.metrics import Metrics
from narthex.apps.own_node import OwnNode
from narthex.apps.proxy import Inbox, Proxy
from narthex.apps.reload import ConfigurationFile, replace_process
from narthex.apps.service_health import ServiceHealth
from narthex.apps.settings import Settings
from narthex.apps.status import BindError, Listener, StatusServer, health_routes, metrics_routes
from narthex.apps.sync import FamilySync, Sync
from narthex.backends import BACKENDS
from narthex.backends.iptables_frame import ROUTE_LOCALNET
from narthex.host.addresses import own_addresses, primary_addresses, usable_families
from narthex.host.clock import Clock, SystemClock
from narthex.host.conntrack import Conntrack
from narthex.host.monitor import AnnouncedTarget
from narthex.host.privileges import allow_many_files, kernel_release, may_change_network, missing_tools
from narthex.host.targets import target_for
from narthex.model.net import IPFamily
from narthex.plan.kernel_settings import Setting
from narthex.plan.planner import Planner, plan_once
from narthex.state.store import Snapshot

OLDEST_KERNEL = (5, 13)
"""What nftables mode asks for (row 23.1)."""
SKIP_KERNEL_CHECK = "KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK"


class StartError(RuntimeError):
    """The proxy cannot start here; the message says why and what to do."""


def check_machine(mode: str) -> tuple[IPFamily, ...]:
    """The families that the mode can serve here. Raises StartError when there is none, or no permission."""
    if mode not in BACKENDS:
        raise StartError(f"mode {mode} is not there yet: choose {' or '.join(BACKENDS)} with --proxy-mode or `mode`")
    if not may_change_network():
        raise StartError("programming the kernel needs root (CAP_NET_ADMIN): run it with sudo")
    if mode == "nftables" and kernel_release() < OLDEST_KERNEL and not os.environ.get(SKIP_KERNEL_CHECK):
        raise StartError(
            f"nftables mode needs Linux {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer: choose --proxy-mode iptables, "
            f"or set {SKIP_KERNEL_CHECK}=1 if this kernel has what is needed"
        )
    families = []
    for family in usable_families():
        missing = missing_tools(mode, family)
        if not missing:
            families.append(family)
        elif family is IPFamily.IPV4:
            raise StartError(
                f"mode {mode} needs {' and '.join(missing)}, not found on the PATH: "
                f"install the package {'nftables' if mode == 'nftables' else 'iptables'} or choose another --proxy-mode"
            )
        else:
            LOGGER.warning("%s is not found on the PATH: %s is left alone", " and ".join(missing), family.label)
    if IPFamily.IPV6 not in usable_families():
        LOGGER.info("IPv6 is switched off here: only IPv4 is served")
    return tuple(families)


def assemble(settings: Settings, inbox: Inbox, families: tuple[IPFamily, ...], clock: Clock, http: HttpServer) -> Proxy:
    """A proxy for the network namespace of the calling thread. Nothing is started or written yet."""
    health = Health(families, settings.periods.sync, clock)
    metrics = Metrics(settings.mode)
    backend = BACKENDS[settings.mode]
    foreign, count = foreign_changes(settings.mode, families), transactions(settings.mode)
    targets = {family: AnnouncedTarget(target_for(settings.mode, family), foreign, count) for family in families}
    syncs = [FamilySync(family, Planner(settings.node, family), backend, targets[family], clock) for family in families]
    return Proxy(
        inbox,
        syncs,
        clock,
        msgspec.structs.replace(settings.periods, watched=tells(foreign)),
        node_name=settings.node.node_name,
        complete=OwnNode(settings.node.node_name, primary_addresses).complete,
        foreign=foreign,
        health=health,
        metrics=metrics,
        follow=ServiceHealth(http, lambda: health.healthy).follow,
        after_sync=_in_turn(
            Takeover(settings.mode, clock, foreign.writing).after,
            Flows(Conntrack(), _own_addresses, clock, metrics).after,
        ),
    )


def _in_turn(*actions: Callable[[Sync], object]) -> Callable[[Sync], None]:
    def all_of_them(done: Sync) -> None:
        for action in actions:
            action(done)

    return all_of_them


def _own_addresses() -> frozenset[str]:
    return frozenset(own.address for own in own_addresses())


def prepare(settings: Settings) -> None:
    """Make the kernel settings that can need more than CAP_NET_ADMIN, so that `serve` can do without (row 19.9)."""
    asked = kernel_settings(settings.conntrack)
    if plan_once(Snapshot(), settings.node, IPFamily.IPV4).node_ports.localhost:
        path, value = ROUTE_LOCALNET
        asked.append(Setting(path, int(value), "localhostNodePorts"))
    KernelSettings(asked).make(last=True)
    LOGGER.info("kernel settings are made as far as they can be")


def serve(settings: Settings, source: Watched, file: ConfigurationFile | None = None) -> None:
    """Be the node proxy until SIGTERM or SIGINT, or until edits of the configuration file ask for a new process.
    Raises StartError."""
    families = check_machine(settings.mode)
    LOGGER.info(
        "node %s, mode %s, %s", settings.node.node_name, settings.mode, " and ".join(each.label for each in families)
    )
    allow_many_files()
    asked = KernelSettings(kernel_settings(settings.conntrack))
    asked.make(last=False)
    told, settings = settings, with_kernel(settings)
    clock = SystemClock()
    feed = Feed(source)
    http = HttpServer()
    proxy = assemble(settings, feed, families, clock, http)
    shown = dict(settings.configuration)
    status = StatusServer(http, list(_listeners(settings, proxy, shown)), hard_fail=settings.bind_address_hard_fail)

    def take_over(fresh: Settings) -> None:
        node = with_kernel(fresh).node
        proxy.use(lambda family: Planner(node, family), fresh.periods)
        shown.update(fresh.configuration)

    try:
        status.start()
    except BindError as error:
        raise StartError(str(error)) from error
    # The first objects are many, without cycles, and stay: looking through them for garbage takes a quarter of the time
    # of a first sync of 5,000 Services, and would stop the loop again and again later.
    gc.disable()
    edits = file.followed(told, take_over, proxy.stop) if file else nullcontext()
    with _ended_by_signal(proxy.stop), feed.running(proxy.notice), proxy.listening(), edits:
        proxy.turn()
        gc.freeze()
        gc.enable()
        asked.make(last=True)
        proxy.run()
    if not (file and file.replace):
        LOGGER.info("stopped; the rules stay in force")
    http.stop()
    if file and file.replace:
        replace_process()


def _listeners(settings: Settings, proxy: Proxy, shown: Mapping[str, Any]) -> Iterator[Listener]:
    if settings.healthz:
        yield Listener("health", *settings.healthz, health_routes(proxy.health, proxy.metrics))
    if settings.metrics:
        routes = metrics_routes(proxy.metrics, settings.mode, shown)
        yield Listener("metrics", *settings.metrics, routes)


@contextmanager
def _ended_by_signal(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT stop the loop after the present turn; a second one is not needed and changes nothing."""

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stop()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
