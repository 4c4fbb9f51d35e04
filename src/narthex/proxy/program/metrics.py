"""The proxy's metrics under kube-proxy's names (rows of group 20).

The loop counts in plain numbers; prometheus-client is imported at the first scrape. Metrics without a meaning in the
running mode are absent rather than 0 (row 20.22).
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import narthex
from narthex.model.net import FAMILIES, IPFamily
from narthex.model.objects import EndpointSlice
from narthex.model.trigger_time import TRIGGER_TIME, trigger_time
from narthex.proxy.backends.iptables.names import OWN_TABLES
from narthex.proxy.backends.iptables.rules import XtablesChanges, XtablesRules
from narthex.proxy.kernel.dataplanes import DATAPLANES
from narthex.proxy.plan.ir import Drop, FrontendKind, Plan
from narthex.proxy.plan.stale import StaleReason
from narthex.proxy.program.sync import PHASES, FamilySync, SyncResult
from narthex.runtime.metrics import Collector

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

_SECONDS = tuple(0.001 * 2**step for step in range(15))
_WAITED = (0.25, 0.5, *map(float, range(1, 60)), *map(float, range(60, 120, 5)), *map(float, range(120, 301, 30)))
_LABEL = ["ip_family"]
_PREFIX = "kubeproxy_"
_GATES = ("AllowServiceExternalIPs",)
"""Feature gates with an effect here; all default to on."""


def indicators(alive: bool) -> bytes:
    """Return `/metrics/slis`: Kubernetes' service level indicators in the Prometheus text format."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    Gauge("kubernetes_healthcheck", "Result of a health check: 1 is good.", ["name", "type"], registry=registry).labels(
        "sync-proxy-rules", "livez"
    ).set(float(alive))
    return generate_latest(registry)


class LatencyHistogram:
    """A histogram of durations in seconds."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Return upper bounds as text with cumulative counts."""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


class _FamilyMetrics:
    """Counters of one IP family."""

    def __init__(self) -> None:
        self.duration = LatencyHistogram()
        self.full = LatencyHistogram()
        self.partial = LatencyHistogram()
        self.phases: dict[str, LatencyHistogram] = {}
        self.waited = LatencyHistogram(_WAITED)
        self.last_good: float | None = None
        self.last_queued: float | None = None
        self.failures = 0
        self.partial_failures = 0
        self.drifts = 0
        self.foreign = 0
        self.plan: Plan | None = None
        self.rules: Any = None
        self.rules_written: dict[str, int] = {}
        self.flow_searches = LatencyHistogram()
        self.flows_removed: Counter[StaleReason] = Counter()


class ProxyMetrics:
    """The proxy's counters, written by the loop and read by the status server's thread."""

    def __init__(self, mode: str = "", more: Iterable[Collector] = (), gates: Mapping[str, bool] = {}) -> None:
        """Create the metrics of a proxy. `more` holds collectors that run at each scrape."""
        self._mode = mode
        self._dataplane = DATAPLANES.get(mode)
        self._more = tuple(more)
        self._gates = {**dict.fromkeys(_GATES, True), **{name: on for name, on in gates.items() if name in _GATES}}
        self._families: dict[IPFamily, _FamilyMetrics] = {}
        self._pending: Counter[str] = Counter()
        self._total: Counter[str] = Counter()
        self._codes: Counter[tuple[str, int]] = Counter()
        self._registry: CollectorRegistry | None = None

    def changed(self, kind: str) -> None:
        """Count a changed object."""
        self._pending[kind] += 1
        self._total[kind] += 1

    def nothing_pending(self) -> None:
        """Reset the pending changes after all families were synced."""
        self._pending.clear()

    def queued(self, family: IPFamily, wall: float) -> None:
        """Note that a sync was requested."""
        self._of(family).last_queued = wall

    def failed(self, family: IPFamily) -> None:
        """Count a failed sync."""
        held = self._of(family)
        held.failures += 1
        held.partial_failures += held.plan is not None

    def synced(self, sync: FamilySync[Any, Any], done: SyncResult, wall: float) -> None:
        """Count a successful sync."""
        held = self._of(done.family)
        held.duration.observe(done.total)
        (held.full if done.first or "read" in done.seconds else held.partial).observe(done.total)
        for phase, seconds in done.seconds.items():
            held.phases.setdefault(phase, LatencyHistogram()).observe(seconds)
        held.last_good = wall
        held.drifts += done.drift
        held.plan, held.rules = done.plan, sync.rules
        written = done.changes.written if isinstance(done.changes, XtablesChanges) else {}
        held.rules_written = {table: sum(map(len, chains.values())) for table, chains in written.items()}

    def waited(self, family: IPFamily, seconds: Iterable[float]) -> None:
        """Count the delays of endpoint changes that are now in the kernel."""
        for each in seconds:
            self._of(family).waited.observe(each)

    def flows(self, family: IPFamily, seconds: float, removed: Mapping[StaleReason, int]) -> None:
        """Count a search for stale connections, with its duration and what it removed."""
        held = self._of(family)
        held.flow_searches.observe(seconds)
        held.flows_removed.update(removed)

    def foreign(self, family: IPFamily, count: int) -> None:
        """Count transactions of others that may have changed our rules."""
        self._of(family).foreign += count

    def answered(self, endpoint: str, status: int) -> None:
        """Count an answer of `/healthz` or `/livez`."""
        self._codes[endpoint, status] += 1

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest

        if self._registry is None:
            self._registry = CollectorRegistry(auto_describe=False)
            ProcessCollector(registry=self._registry)
            PlatformCollector(registry=self._registry)
            self._registry.register(self)
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield all own metrics, for prometheus-client."""
        yield from self._sync_metrics()
        yield from self._change_metrics()
        yield from self._mode_metrics()
        yield from self._flow_metrics()
        yield self._no_local_endpoints()
        yield from self._about()
        for collector in self._more:
            yield from collector.collect()

    def _of(self, family: IPFamily) -> _FamilyMetrics:
        return self._families.setdefault(family, _FamilyMetrics())

    def _each(self) -> list[tuple[list[str], _FamilyMetrics]]:
        """Return label values and counters, IPv4 first."""
        return [([family.label], self._families[family]) for family in FAMILIES if family in self._families]

    def _sync_metrics(self) -> Iterable[Metric]:
        yield self._histogram("sync_proxy_rules_duration_seconds", "Time one sync took.", "duration")
        if self._dataplane and self._dataplane.partial_syncs:
            yield self._histogram("sync_full_proxy_rules_duration_seconds", "Time a full sync took.", "full")
            yield self._histogram("sync_partial_proxy_rules_duration_seconds", "Time a partial sync took.", "partial")
        yield self._histogram(
            "network_programming_duration_seconds", "Time from a change of endpoints to rules in the kernel.", "waited"
        )
        yield self._by_phase()
        yield self._gauge("sync_proxy_rules_last_timestamp_seconds", "Time of the last good sync.", "last_good")
        yield self._gauge(
            "sync_proxy_rules_last_queued_timestamp_seconds", "Time a sync was last asked for.", "last_queued"
        )

    def _change_metrics(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for word, kind in (("endpoint", "EndpointSlice"), ("service", "Service")):
            name = f"{_PREFIX}sync_proxy_rules_{word}_changes"
            yield GaugeMetricFamily(f"{name}_pending", f"{kind} changes not written yet.", self._pending[kind])
            yield CounterMetricFamily(name, f"{kind} changes seen.", self._total[kind])
        for endpoint in ("healthz", "livez"):
            counter = CounterMetricFamily(f"{_PREFIX}proxy_{endpoint}", f"Answers of /{endpoint}.", labels=["code"])
            for code in (200, 503):
                counter.add_metric([str(code)], self._codes[endpoint, code])
            yield counter

    def _mode_metrics(self) -> Iterable[Metric]:
        if self._dataplane and self._dataplane.failure_metric:
            yield self._counter(self._dataplane.failure_metric, "Syncs that failed.", "failures")
        if self._dataplane and self._dataplane.rules_by_table:
            yield self._counter(
                "sync_proxy_rules_iptables_partial_restore_failures", "Partial syncs that failed.", "partial_failures"
            )
            yield self._by_table("total", "Rules owned, by table.", lambda held: _rules_owned(held.rules))
            yield self._by_table("last", "Rules written by the last sync, by table.", lambda held: held.rules_written)
        yield self._counter(
            "narthex_foreign_changes", "Transactions of others that may have changed our rules.", "foreign", prefix=""
        )
        yield self._counter(
            "narthex_drift_healed", "Times our rules were not as we left them, and mended.", "drifts", prefix=""
        )

    def _flow_metrics(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily

        name = "conntrack_reconciler_sync_duration_seconds"
        yield self._histogram(name, "Time one search for stale connections took.", "flow_searches")
        total = CounterMetricFamily(
            f"{_PREFIX}conntrack_reconciler_deleted_entries", "Stale connections removed.", labels=_LABEL
        )
        by_reason = CounterMetricFamily(
            "narthex_stale_flows_removed", "Stale connections removed, by reason.", labels=["reason", *_LABEL]
        )
        for label, held in self._each():
            total.add_metric(label, held.flows_removed.total())
            for reason in StaleReason:
                by_reason.add_metric([reason.value, *label], held.flows_removed[reason])
        yield total
        yield by_reason

    def _by_phase(self) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(
            "narthex_sync_phase_duration_seconds", "Time of one phase of a sync.", labels=["phase", *_LABEL]
        )
        for label, held in self._each():
            for phase in PHASES:
                histogram = held.phases.get(phase) or LatencyHistogram()
                family.add_metric([phase, *label], histogram.buckets, histogram.sum)
        return family

    def _about(self) -> Iterable[Metric]:
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        build = {"version": narthex.__version__, "python_version": platform.python_version(), "mode": self._mode}
        yield InfoMetricFamily("narthex_build", "What runs here.", value=build)
        # Dashboards tell versions apart by this one.
        version = narthex.__version__.split(".")
        labels = {"git_version": f"v{narthex.__version__}", "major": version[0], "minor": version[1]}
        labels["platform"] = f"{platform.system()}/{platform.machine()}".lower()
        kubernetes = GaugeMetricFamily("kubernetes_build_info", "What runs here.", labels=list(labels))
        kubernetes.add_metric(list(labels.values()), 1)
        yield kubernetes
        gates = GaugeMetricFamily("kubernetes_feature_enabled", "Feature gates: 1 is on.", labels=["name", "stage"])
        for name, on in sorted(self._gates.items()):
            gates.add_metric([name, ""], float(on))
        yield gates

    def _by_table(self, name: str, text: str, count: Callable[[_FamilyMetrics], dict[str, int]]) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        full = f"{_PREFIX}sync_proxy_rules_iptables_{name}"
        gauge = GaugeMetricFamily(full, text, labels=["table", *_LABEL])
        for label, held in self._each():
            counts = count(held)
            for table in OWN_TABLES:
                gauge.add_metric([table, *label], counts.get(table, 0))
        return gauge

    def _no_local_endpoints(self) -> Metric:
        """Count Services without local endpoints at each scrape, since it takes too long for each sync."""
        from prometheus_client.core import GaugeMetricFamily

        gauge = GaugeMetricFamily(
            f"{_PREFIX}sync_proxy_rules_no_local_endpoints_total",
            "Services with traffic policy Local and endpoints, but none on this node.",
            labels=["traffic_policy", *_LABEL],
        )
        for label, held in self._each():
            for policy, count in _without_local(held.plan).items():
                gauge.add_metric([policy, *label], count)
        return gauge

    def _histogram(self, name: str, text: str, field: str) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(_PREFIX + name, text, labels=_LABEL)
        for label, held in self._each():
            histogram: LatencyHistogram = getattr(held, field)
            family.add_metric(label, histogram.buckets, histogram.sum)
        return family

    def _gauge(self, name: str, text: str, field: str) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABEL)
        for label, held in self._each():
            gauge.add_metric(label, getattr(held, field) or 0.0)
        return gauge

    def _counter(self, name: str, text: str, field: str, prefix: str = _PREFIX) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        counter = CounterMetricFamily(prefix + name, text, labels=_LABEL)
        for label, held in self._each():
            counter.add_metric(label, getattr(held, field))
        return counter


def _rules_owned(rules: Any) -> dict[str, int]:
    """Return the number of our rules by table: those in our chains, and our jumps in built-in chains."""
    if not isinstance(rules, XtablesRules):
        return {}
    counts = {table: sum(map(len, chains.values())) for table, chains in rules.chains.items()}
    for (table, _), jumps in rules.jumps.items():
        counts[table] = counts.get(table, 0) + len(jumps)
    return counts


def _without_local(plan: Plan | None) -> dict[str, int]:
    """Return the number of Services whose Local policy leaves them without endpoints here, by policy (row 20.17)."""
    found: dict[str, set[tuple[str, str]]] = {"external": set(), "internal": set()}
    for service in plan.services.values() if plan else ():
        for front in service.frontends:
            policy = "internal" if front.kind is FrontendKind.CLUSTER_IP else "external"
            if isinstance(front.other, Drop):
                found[policy].add(service.name.service)
    return {policy: len(names) for policy, names in found.items()}


_MOST_WAITING = 10_000
"""Changes kept for one family while its syncs fail; the newest count."""


class ProgrammingLatency:
    """Delays from a change of endpoints to rules in the kernel (rows 2.13, 20.5). The loop owns it."""

    def __init__(self, start: float) -> None:
        """Ignore changes before `start`, the start of the process in seconds since the epoch."""
        self._start = start
        self._start_text = datetime.fromtimestamp(int(start), UTC).strftime("%Y-%m-%dT%H:%M:%S")
        self._waiting: dict[IPFamily, deque[float]] = {}

    def saw(self, before: EndpointSlice | None, after: EndpointSlice) -> None:
        """Note an added or changed slice. The same trigger time twice is the same change."""
        text = after.annotation(TRIGGER_TIME)
        # Nearly all slices of the first list; their times need not be worked out.
        if text is None or (text[-1:] == "Z" and text[:19] < self._start_text):
            return
        changed = trigger_time(after)
        if after.family is None or changed is None or changed <= self._start:
            return
        if before is None or before.annotation(TRIGGER_TIME) != text:
            self._waiting.setdefault(after.family, deque(maxlen=_MOST_WAITING)).append(changed)

    def written(self, family: IPFamily, now: float) -> list[float]:
        """Note that the kernel holds all changes; return the delay of each in seconds."""
        waiting = self._waiting.pop(family, ())
        return [max(0.0, now - changed) for changed in waiting]
