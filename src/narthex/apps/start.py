"""Puts a node proxy together out of its settings, and runs it until a signal ends it."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import msgspec

from narthex.apps.feed import Feed, Watched
from narthex.apps.health import Health
from narthex.apps.httpd import HttpServer
from narthex.apps.logs import LOGGER
from narthex.apps.metrics import Metrics
from narthex.apps.own_node import OwnNode
from narthex.apps.proxy import Inbox, Proxy
from narthex.apps.service_health import ServiceHealth
from narthex.apps.settings import Settings
from narthex.apps.status import BindError, Listener, StatusServer, health_routes, metrics_routes
from narthex.apps.sync import FamilySync
from narthex.backends import BACKENDS
from narthex.host.addresses import primary_addresses, usable_families
from narthex.host.clock import Clock, SystemClock
from narthex.host.nfnetlink import NfNetlink
from narthex.host.privileges import may_change_network, missing_tools
from narthex.host.targets import target_for
from narthex.model.net import IPFamily
from narthex.plan.planner import Planner


class StartError(RuntimeError):
    """The proxy cannot start here; the message says why and what to do."""


def check_machine(mode: str) -> tuple[IPFamily, ...]:
    """The families that the mode can serve here. Raises StartError when there is none, or no permission."""
    if mode not in BACKENDS:
        raise StartError(f"mode {mode} is not there yet: choose {' or '.join(BACKENDS)} with --proxy-mode or `mode`")
    if not may_change_network():
        raise StartError("programming the kernel needs root (CAP_NET_ADMIN): run it with sudo")
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
    backend = BACKENDS[settings.mode]
    syncs = [
        FamilySync(family, Planner(settings.node, family), backend, target_for(settings.mode, family), clock)
        for family in families
    ]
    # iptables-legacy does not count in nf_tables' generations, so in mode iptables they are a hint only.
    watched = settings.mode == "nftables"
    return Proxy(
        inbox,
        syncs,
        clock,
        msgspec.structs.replace(settings.periods, watched=watched),
        node_name=settings.node.node_name,
        complete=OwnNode(settings.node.node_name, primary_addresses).complete,
        generation=NfNetlink().generation,
        health=health,
        metrics=Metrics(settings.mode),
        follow=ServiceHealth(http, lambda: health.healthy).follow,
    )


def serve(settings: Settings, source: Watched) -> None:
    """Be the node proxy until SIGTERM or SIGINT. Raises StartError."""
    families = check_machine(settings.mode)
    LOGGER.info(
        "node %s, mode %s, %s", settings.node.node_name, settings.mode, " and ".join(each.label for each in families)
    )
    clock = SystemClock()
    feed = Feed(source)
    http = HttpServer()
    proxy = assemble(settings, feed, families, clock, http)
    status = StatusServer(http, list(_listeners(settings, proxy)), hard_fail=settings.bind_address_hard_fail)
    try:
        status.start()
    except BindError as error:
        raise StartError(str(error)) from error
    # The first objects are many, without cycles, and stay: looking through them for garbage takes a quarter of the time
    # of a first sync of 5,000 Services, and would stop the loop again and again later.
    gc.disable()
    with _ended_by_signal(proxy.stop), feed.running(proxy.notice):
        proxy.turn()
        gc.freeze()
        gc.enable()
        proxy.run()
    LOGGER.info("stopped; the rules stay in force")
    http.stop()


def _listeners(settings: Settings, proxy: Proxy) -> Iterator[Listener]:
    if settings.healthz:
        yield Listener("health", *settings.healthz, health_routes(proxy.health, proxy.metrics))
    if settings.metrics:
        routes = metrics_routes(proxy.metrics, settings.mode, settings.configuration)
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
