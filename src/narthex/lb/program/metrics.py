"""What a controller counts, for a scrape: MetalLB's names where it has them (row M9), and our own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from narthex.kube.leader_election import Leader
from narthex.lb.program.controller import Controller
from narthex.linux.clock import Clock
from narthex.proxy.program.api_server import Lists

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class ControllerMetrics:
    """A collector for prometheus-client."""

    def __init__(self, controller: Controller, leader: Leader, clock: Clock) -> None:
        self._controller = controller
        self._leader = leader
        self._clock = clock

    def exposition(self) -> bytes:
        """The text of a scrape."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts, leads = self._controller.counts, self._leader.term > 0
        yield GaugeMetricFamily(
            "narthex_lb_leader", "1: this controller leads and gives addresses.", value=float(leads)
        )
        # Who does not lead does not look, so it has nothing to say.
        uses = counts.uses if leads else ()
        usable = [use for use in uses if not use.refused]
        for name, text, numbers in (
            ("total", "Addresses that the pool can give.", [use.total for use in usable]),
            ("in_use_total", "Addresses that a Service has.", [use.in_use for use in usable]),
        ):
            gauge = GaugeMetricFamily(f"metallb_allocator_addresses_{name}", text, labels=["pool"])
            for use, number in zip(usable, numbers, strict=True):
                gauge.add_metric([use.name], float(number))
            yield gauge
        refused = GaugeMetricFamily("narthex_lb_pool_refused", "1: the pool cannot be used.", labels=["pool"])
        for use in uses:
            refused.add_metric([use.name], float(bool(use.refused)))
        yield refused
        services = GaugeMetricFamily(
            "narthex_lb_services", "Services of type LoadBalancer, by state.", labels=["state"]
        )
        for state, number in (("given", counts.given), ("waiting", counts.waiting), ("foreign", counts.foreign)):
            services.add_metric([state], float(number if leads else 0))
        yield services
        yield CounterMetricFamily(
            "narthex_lb_allocations", "Times that a Service was given addresses.", value=counts.allocations
        )
        yield CounterMetricFamily("narthex_lb_cleared", "Times that addresses were taken away.", value=counts.cleared)
        writes = CounterMetricFamily("narthex_lb_writes", "Writes of a Service, by result.", labels=["result"])
        for result, number in sorted(dict(self._controller.results).items()):
            writes.add_metric([result], number)
        yield writes
        yield from Lists(self._controller.followed, self._clock.wall).collect()
