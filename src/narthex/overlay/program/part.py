"""The overlay as a part of a node, and as a process of its own.

Works in the network namespace of the thread that calls `run`. Several overlays can run on one machine, each in its own
namespace (`narthex overlay`, or `narthex node --overlay`), with a separate `node` and `subnet_file` each; the file of our
own routes is next to the latter. `net_conf` may be shared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from narthex.kube.access import Access
from narthex.kube.manifests import ManifestSource
from narthex.kube.messages import prepare_decoders
from narthex.kube.resources import NODES
from narthex.kube.source import KubeSource
from narthex.linux.clock import SystemClock
from narthex.linux.iptables_variants import default_variant
from narthex.linux.monitor import ForeignChanges, RuleScope, watch_rules
from narthex.linux.privileges import may_change_network
from narthex.model import FAMILIES, IPFamily
from narthex.overlay.kernel.kernel import OverlayKernel
from narthex.overlay.kernel.monitor import RouteMonitor
from narthex.overlay.masquerade import FORWARD, PEERS, POSTROUTING, TABLES
from narthex.overlay.program.annotate import NodeAnnotator, NodeWriter
from narthex.overlay.program.checksums import SelfTest
from narthex.overlay.program.loop import Overlay, OverlaySettings
from narthex.overlay.program.metrics import OverlayMetrics
from narthex.runtime.http import HttpResponse, SlowResponse
from narthex.runtime.logs import LOGGER
from narthex.runtime.metrics import exposition, metrics_reply
from narthex.runtime.process import StartError, run_until_signal
from narthex.runtime.reconciler import EventFeed, EventSource, Reconciler, Throttle
from narthex.runtime.status import Routes, StatusListener

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_THROTTLE = Throttle(share=10.0, least=0.05, longest=0.5)
"""Other programs may change routes in bursts, for example a routing daemon."""
_LATE = 3
"""Number of resync intervals without a reconciliation after which the part is unhealthy."""
_TABLES = frozenset((*TABLES.values(), PEERS))
_CHAINS = frozenset((POSTROUTING, FORWARD, "POSTROUTING", "FORWARD"))
_CONCERN = RuleScope(
    tables=frozenset((*_TABLES, "nat", "filter")), chain=lambda table, chain: table in _TABLES or chain in _CHAINS
)


class OverlayOrigin(msgspec.Struct, frozen=True):
    """The source of Nodes, and the writer of this node's own Node."""

    source: EventSource
    writes: NodeWriter | None
    """None: there is no API server. Peers then use the InternalIP and derive the MAC address from the node's name."""


def directory_origin(path: str | os.PathLike[str]) -> OverlayOrigin:
    """Return the origin for Nodes from manifests, which are never written."""
    return OverlayOrigin(ManifestSource(Path(path)), None)


def api_origin(access: Access) -> OverlayOrigin:
    """Return the origin for Nodes from an API server."""
    return OverlayOrigin(KubeSource(access, (NODES,)), NodeWriter(access))


class OverlayPart:
    """One run of the overlay. The kernel state stays when it ends, so that traffic continues."""

    def __init__(self, settings: OverlaySettings, origin: OverlayOrigin) -> None:
        self._settings = settings
        self._origin = origin
        self.metrics = OverlayMetrics()
        self._clock = SystemClock()
        self._loop = Reconciler(self._clock, throttle=_THROTTLE)

    @property
    def healthy(self) -> bool:
        """True if it reconciles and the kernel accepts its changes.

        Waiting for other components, such as for a Pod CIDR, is not unhealthy, since a restart would not help; see `ready`.
        """
        late = self._clock.now() - self.metrics.last_reconcile > _LATE * self._settings.resync
        return not (self.metrics.broken or late)

    @property
    def ready(self) -> bool:
        """True if the last reconciliation succeeded."""
        return self.healthy and self.metrics.ready and not self.metrics.failure

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus-client."""
        return self.metrics.collect()

    def stop(self) -> None:
        """End `run`."""
        self._loop.stop()

    def run(self) -> None:
        """Run the overlay until `stop`. Raises StartError."""
        if not may_change_network():
            raise StartError("the overlay needs root (CAP_NET_ADMIN): run it with sudo")
        with ExitStack() as stack:
            kernel = OverlayKernel()
            stack.callback(kernel.close)
            notices = RouteMonitor(lambda index: index in overlay.links)
            stack.callback(notices.close)
            rules = _listeners()
            for each in rules:
                stack.callback(each.close)
            feed = EventFeed(self._origin.source)
            announcer = None
            if self._origin.writes is not None:
                announcer = NodeAnnotator(self._origin.writes, self._settings.set_condition)
            overlay = Overlay(
                self._settings,
                feed.take,
                kernel,
                self._clock,
                self.metrics,
                announcer.set_desired if announcer else None,
                lambda: _changed(rules),
                lambda: feed.problems,
            )
            selftest = SelfTest(lambda: overlay.tunnels, self.metrics, self._settings.repair_checksums)
            stack.enter_context(notices.listening(self._clock.wake))
            for each in rules:
                stack.enter_context(each.listening(self._clock.wake))
            if announcer is not None:
                stack.enter_context(announcer.running())
            stack.enter_context(selftest.running())
            stack.enter_context(feed.running(self._clock.wake))
            self._loop.run(lambda: min(overlay.reconcile(), *(each.interval for each in rules)))


def _listeners() -> list[ForeignChanges]:
    """Return the monitors of the rules: nf_tables covers nftables and iptables-nft; iptables-legacy must be polled."""
    found = [watch_rules(_CONCERN, FAMILIES, iptables=False)]
    if default_variant(IPFamily.IPV4) == "legacy":
        found.append(watch_rules(_CONCERN, FAMILIES, iptables=True))
    return found


def _changed(rules: list[ForeignChanges]) -> bool:
    """Return True if any monitor reports a change. All are read, so that none reports the same change again."""
    return sum(sum(each.look().values()) for each in rules) > 0


def serve_overlay(settings: OverlaySettings, origin: OverlayOrigin, healthz: tuple[str, int] | None) -> None:
    """Run the overlay until SIGTERM or SIGINT. `healthz` is address and port. Raises StartError."""
    prepare_decoders()
    part = OverlayPart(settings, origin)
    run_until_signal(part, [StatusListener("health", *healthz, routes(part))] if healthz is not None else ())
    LOGGER.info("overlay: stopped; devices, routes, and rules stay in place")


def routes(part: OverlayPart) -> Routes:
    """Return the HTTP routes: `/healthz` (process is alive), `/readyz` (last reconciliation), `/metrics`."""

    def ready() -> HttpResponse:
        """Return the overlay's state, with status 503 unless the last reconciliation succeeded."""
        body = msgspec.json.encode(part.metrics.state())
        return HttpResponse(200 if part.ready else 503, body, "application/json")

    return {
        "/healthz": lambda: HttpResponse(200, b"ok"),
        "/readyz": ready,
        "/metrics": lambda: SlowResponse(lambda: metrics_reply(exposition(part.metrics))),
    }
