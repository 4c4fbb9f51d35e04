"""The overlay as a part of a node.

It works in the network namespace of the thread that calls `run`. Several run on one machine, each in a namespace of its
own, when each has settings of its own: `node`, and a `subnet_file` that is not another's (beside it stands the file of own
routes). `net_conf` may be shared. In a process per namespace: `narthex overlay`, or `narthex node --overlay`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from narthex.kube.access import Access
from narthex.kube.decoders import make_known
from narthex.kube.manifests import ManifestSource
from narthex.kube.resources import NODES
from narthex.kube.source import KubeSource
from narthex.linux.clock import SystemClock
from narthex.linux.iptables_variants import default_variant
from narthex.linux.monitor import Concern, Foreign, watch_rules
from narthex.linux.privileges import may_change_network
from narthex.model.net import FAMILIES, IPFamily
from narthex.overlay.kernel.kernel import OverlayKernel
from narthex.overlay.kernel.monitor import RouteMonitor
from narthex.overlay.masquerade import FORWARD, POSTROUTING, TABLES
from narthex.overlay.program.annotate import NodeAnnotator, NodePatcher, NodeWriter
from narthex.overlay.program.loop import Overlay
from narthex.overlay.program.metrics import OverlayMetrics
from narthex.overlay.program.selftest import SelfTest
from narthex.overlay.program.settings import OverlaySettings
from narthex.runtime.feed import Feed, Watched
from narthex.runtime.http.messages import HttpResponse, SlowResponse
from narthex.runtime.logs import LOGGER
from narthex.runtime.metrics import exposition, metrics_reply
from narthex.runtime.process import StartError, run_until_signal
from narthex.runtime.reconciler import Reconciler, Throttle
from narthex.runtime.status import Listener, Routes

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_THROTTLE = Throttle(share=10.0, least=0.05, longest=0.5)
"""Other programs may change routes in bursts, for example a routing daemon."""
_LATE = 3
"""A look may be so many periods ago before the part counts as unhealthy."""
_CHAINS = frozenset((POSTROUTING, FORWARD, "POSTROUTING", "FORWARD"))
_CONCERN = Concern(
    tables=frozenset((*TABLES.values(), "nat", "filter")),
    chain=lambda table, chain: table in TABLES.values() or chain in _CHAINS,
)


class OverlayOrigin(NamedTuple):
    """Where Nodes come from, and where this one is written to."""

    source: Watched
    writes: NodePatcher | None
    """None: nobody can be told of this node. The others then take its InternalIP, and work out the hardware address of
    its vxlan device from its name."""


def directory_origin(path: str | os.PathLike[str]) -> OverlayOrigin:
    """Nodes of manifests in a directory or file, which is never written to."""
    return OverlayOrigin(ManifestSource(Path(path)), None)


def api_origin(access: Access) -> OverlayOrigin:
    """Nodes of an API server."""
    return OverlayOrigin(KubeSource(access, (NODES,)), NodeWriter(access))


class OverlayPart:
    """One run of the overlay. What it made stays when it ends: traffic goes on."""

    def __init__(self, settings: OverlaySettings, origin: OverlayOrigin) -> None:
        self._settings = settings
        self._origin = origin
        self.figures = OverlayMetrics()
        self._clock = SystemClock()
        self._loop = Reconciler(self._clock, throttle=_THROTTLE)

    @property
    def healthy(self) -> bool:
        """Whether it looks, and the machine does what it asks. While it waits for others, for a pod range say, a new
        process could do no better: that is a matter of readiness (`ready`)."""
        late = self._clock.now() - self.figures.last_look > _LATE * self._settings.resync
        return not (self.figures.broken or late)

    @property
    def ready(self) -> bool:
        """Whether all was in place at the last look."""
        return self.healthy and self.figures.ready and not self.figures.failure

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client."""
        return self.figures.collect()

    def stop(self) -> None:
        """End `run`."""
        self._loop.stop()

    def run(self) -> None:
        """Keep the overlay up until `stop`. Raises StartError."""
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
            feed = Feed(self._origin.source)
            announcer = None
            if self._origin.writes is not None:
                announcer = NodeAnnotator(self._origin.writes, self._settings.set_condition)
            overlay = Overlay(
                self._settings,
                feed.take,
                kernel,
                self._clock,
                self.figures,
                announcer.want if announcer else None,
                lambda: _changed(rules),
                lambda: feed.problems,
            )
            selftest = SelfTest(lambda: overlay.tunnels, self.figures, self._settings.repair_checksums)
            stack.enter_context(notices.listening(self._clock.wake))
            for each in rules:
                stack.enter_context(each.listening(self._clock.wake))
            if announcer is not None:
                stack.enter_context(announcer.running())
            stack.enter_context(selftest.running())
            stack.enter_context(feed.running(self._clock.wake))
            self._loop.run(lambda: min(overlay.look(), *(each.interval for each in rules)))


def _listeners() -> list[Foreign]:
    """Who tells of changed rules: nf_tables hears of its own and of iptables-nft's; iptables-legacy must be asked."""
    found = [watch_rules(_CONCERN, FAMILIES, iptables=False)]
    if default_variant(IPFamily.IPV4) == "legacy":
        found.append(watch_rules(_CONCERN, FAMILIES, iptables=True))
    return found


def _changed(rules: list[Foreign]) -> bool:
    """All are asked, so that none tells of the same change again."""
    return sum(sum(each.look().values()) for each in rules) > 0


def serve_overlay(settings: OverlaySettings, origin: OverlayOrigin, healthz: tuple[str, int] | None) -> None:
    """Keep the overlay up until SIGTERM or SIGINT. `healthz`: address and port. Raises StartError."""
    make_known()
    part = OverlayPart(settings, origin)
    run_until_signal(part, [Listener("health", *healthz, routes(part))] if healthz is not None else ())
    LOGGER.info("overlay: stopped; what is in force stays")


def routes(part: OverlayPart) -> Routes:
    """What the port answers: `/healthz` as long as the process is there, `/readyz` by the last look, `/metrics`."""

    def ready() -> HttpResponse:
        body = msgspec.json.encode(part.figures.state())
        return HttpResponse(200 if part.ready else 503, body, "application/json")

    return {
        "/healthz": lambda: HttpResponse(200, b"ok"),
        "/readyz": ready,
        "/metrics": lambda: SlowResponse(lambda: metrics_reply(exposition(part.figures))),
    }
