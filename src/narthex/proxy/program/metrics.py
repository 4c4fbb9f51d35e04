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
from narthex.model import FAMILIES, TRIGGER_TIME, EndpointSlice, IPFamily, trigger_time
from narthex.proxy.backends.iptables.names import OWN_TABLES
from narthex.proxy.backends.iptables.rules import XtablesChanges, XtablesRules
from narthex.proxy.kernel.dataplanes import DATAPLANES
from narthex.proxy.plan.ir import Drop, FrontendKind, Plan
from narthex.proxy.plan.stale import StaleReason
from narthex.proxy.program.sync import PHASES, VERIFY, FamilySync, SyncResult
from narthex.runtime.configuration.values import FEATURE_GATES
from narthex.runtime.metrics import Collector, counter, gauge

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

_SECONDS = tuple(0.001 * 2**step for step in range(15))
_WAITED = (0.25, 0.5, *map(float, range(1, 60)), *map(float, range(60, 120, 5)), *map(float, range(120, 301, 30)))
_FAMILY = "ip_family"
_PREFIX = "kubeproxy_"


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


_Labelled = Mapping[tuple[str, ...], float]
_Histograms = Mapping[tuple[str, ...], LatencyHistogram]
"""By the values of the labels."""


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
        self.refusals = 0
        self.refused = 0
        self.undecided = 0
        self.flow_searches = LatencyHistogram()
        self.flows_removed: Counter[StaleReason] = Counter()
        self.sockets_closed: Counter[StaleReason] | None = None
        """None: nothing closes sockets."""


class ProxyMetrics:
    """The proxy's counters, written by the loop and read by the status server's thread."""

    def __init__(
        self, mode: str = "", more: Iterable[Collector] = (), gates: Mapping[str, bool] = {}, *, verifies: bool = False
    ) -> None:
        """Create the metrics of a proxy. `more` holds collectors that run at each scrape; `verifies`: changes are verified."""
        self._mode = mode
        self._verifies = verifies
        self._dataplane = DATAPLANES.get(mode)
        self._more = tuple(more)
        self._gates = FEATURE_GATES | {name: on for name, on in gates.items() if name in FEATURE_GATES}
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

    def verified(self, done: SyncResult) -> None:
        """Note what a verifier refused and left undecided; nothing if there is none."""
        held = self._of(done.family)
        held.refusals += done.refused is not None
        held.refused = len(done.refused.services) if done.refused is not None else 0
        held.undecided = len(done.undecided)

    def waited(self, family: IPFamily, seconds: Iterable[float]) -> None:
        """Count the delays of endpoint changes that are now in the kernel."""
        for each in seconds:
            self._of(family).waited.observe(each)

    def flows(self, family: IPFamily, seconds: float, removed: Mapping[StaleReason, int]) -> None:
        """Count a search for stale connections, with its duration and what it removed."""
        held = self._of(family)
        held.flow_searches.observe(seconds)
        held.flows_removed.update(removed)

    def sockets_closed(self, family: IPFamily, closed: Mapping[StaleReason, int]) -> None:
        """Count sockets that were closed because they were connected to an endpoint that is gone."""
        held = self._of(family)
        held.sockets_closed = Counter(held.sockets_closed) + Counter(closed)

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

    def _each(self) -> list[tuple[str, _FamilyMetrics]]:
        """Return label and counters of each family, IPv4 first."""
        return [(family.label, self._families[family]) for family in FAMILIES if family in self._families]

    def _field(self, name: str) -> Mapping[str, float]:
        return {label: getattr(held, name) or 0.0 for label, held in self._each()}

    def _sync_metrics(self) -> Iterable[Metric]:
        yield self._histogram("sync_proxy_rules_duration_seconds", "Time one sync took.", "duration")
        if self._dataplane and self._dataplane.partial_syncs:
            yield self._histogram("sync_full_proxy_rules_duration_seconds", "Time a full sync took.", "full")
            yield self._histogram("sync_partial_proxy_rules_duration_seconds", "Time a partial sync took.", "partial")
        text = "Time from a change of endpoints to rules in the kernel."
        yield self._histogram("network_programming_duration_seconds", text, "waited")
        phases: _Histograms = {
            (phase, label): held.phases.get(phase) or LatencyHistogram()
            for label, held in self._each()
            for phase in (*PHASES, *((VERIFY,) if self._verifies else ()))
        }
        text = "Time of one phase of a sync."
        yield _histogram_metric("narthex_sync_phase_duration_seconds", text, phases, "phase", _FAMILY)
        for word, text in (("", "Time of the last good sync."), ("queued_", "Time a sync was last asked for.")):
            name = f"{_PREFIX}sync_proxy_rules_last_{word}timestamp_seconds"
            yield gauge(name, text, self._field("last_queued" if word else "last_good"), _FAMILY)

    def _change_metrics(self) -> Iterable[Metric]:
        for word, kind in (("endpoint", "EndpointSlice"), ("service", "Service")):
            name = f"{_PREFIX}sync_proxy_rules_{word}_changes"
            yield gauge(f"{name}_pending", f"{kind} changes not written yet.", self._pending[kind])
            yield counter(name, f"{kind} changes seen.", self._total[kind])
        for endpoint in ("healthz", "livez"):
            codes = {str(code): self._codes[endpoint, code] for code in (200, 503)}
            yield counter(f"{_PREFIX}proxy_{endpoint}", f"Answers of /{endpoint}.", codes, "code")

    def _mode_metrics(self) -> Iterable[Metric]:
        if self._dataplane and self._dataplane.failure_metric:
            name = _PREFIX + self._dataplane.failure_metric
            yield counter(name, "Syncs that failed.", self._field("failures"), _FAMILY)
        if self._dataplane and self._dataplane.rules_by_table:
            name = f"{_PREFIX}sync_proxy_rules_iptables_"
            failures = self._field("partial_failures")
            yield counter(f"{name}partial_restore_failures", "Partial syncs that failed.", failures, _FAMILY)
            yield self._by_table(f"{name}total", "Rules owned, by table.", lambda held: _rules_owned(held.rules))
            text = "Rules written by the last sync, by table."
            yield self._by_table(f"{name}last", text, lambda held: held.rules_written)
        if self._verifies:
            text = "Change sets that were refused, because the rules would not do what the objects mean."
            yield counter("narthex_refused_changes", text, self._field("refusals"), _FAMILY)
            text = "Service ports that keep earlier rules now, because their changes are refused."
            yield gauge("narthex_refused_service_ports", text, self._field("refused"), _FAMILY)
            text = "Service ports in force whose rules can't be proved."
            yield gauge("narthex_undecided_service_ports", text, self._field("undecided"), _FAMILY)
        text = "Transactions of others that may have changed our rules."
        yield counter("narthex_foreign_changes", text, self._field("foreign"), _FAMILY)
        text = "Times our rules were not as we left them, and mended."
        yield counter("narthex_drift_healed", text, self._field("drifts"), _FAMILY)

    def _flow_metrics(self) -> Iterable[Metric]:
        name, text = "conntrack_reconciler_sync_duration_seconds", "Time one search for stale connections took."
        yield self._histogram(name, text, "flow_searches")
        total = {label: held.flows_removed.total() for label, held in self._each()}
        name = f"{_PREFIX}conntrack_reconciler_deleted_entries"
        yield counter(name, "Stale connections removed.", total, _FAMILY)
        reasons: _Labelled = {
            (reason.value, label): held.flows_removed[reason] for label, held in self._each() for reason in StaleReason
        }
        text = "Stale connections removed, by reason."
        yield counter("narthex_stale_flows_removed", text, reasons, "reason", _FAMILY)
        closed: _Labelled = {
            (reason.value, label): held.sockets_closed[reason]
            for label, held in self._each()
            if held.sockets_closed is not None
            for reason in (StaleReason.ENDPOINT_GONE, StaleReason.FRONTEND_GONE)
        }
        if closed:
            text = "Connected UDP sockets closed because their endpoint is gone, by reason."
            yield counter("narthex_stale_sockets_closed", text, closed, "reason", _FAMILY)

    def _about(self) -> Iterable[Metric]:
        from prometheus_client.core import InfoMetricFamily

        build = {"version": narthex.__version__, "python_version": platform.python_version(), "mode": self._mode}
        yield InfoMetricFamily("narthex_build", "What runs here.", value=build)
        # Dashboards tell versions apart by this one.
        version = narthex.__version__.split(".")
        labels = {"git_version": f"v{narthex.__version__}", "major": version[0], "minor": version[1]}
        labels["platform"] = f"{platform.system()}/{platform.machine()}".lower()
        yield gauge("kubernetes_build_info", "What runs here.", {tuple(labels.values()): 1}, *labels)
        gates: _Labelled = {(name, ""): on for name, on in sorted(self._gates.items())}
        yield gauge("kubernetes_feature_enabled", "Feature gates: 1 is on.", gates, "name", "stage")

    def _by_table(self, name: str, text: str, count: Callable[[_FamilyMetrics], dict[str, int]]) -> Metric:
        counts = [(label, count(held)) for label, held in self._each()]
        values: _Labelled = {(table, label): held.get(table, 0) for label, held in counts for table in OWN_TABLES}
        return gauge(name, text, values, "table", _FAMILY)

    def _no_local_endpoints(self) -> Metric:
        """Count Services without local endpoints at each scrape, since it takes too long for each sync."""
        found = [(label, _without_local(held.plan)) for label, held in self._each()]
        values: _Labelled = {(policy, label): count for label, counts in found for policy, count in counts.items()}
        text = "Services with traffic policy Local and endpoints, but none on this node."
        name = f"{_PREFIX}sync_proxy_rules_no_local_endpoints_total"
        return gauge(name, text, values, "traffic_policy", _FAMILY)

    def _histogram(self, name: str, text: str, field: str) -> Metric:
        histograms: _Histograms = {(label,): getattr(held, field) for label, held in self._each()}
        return _histogram_metric(_PREFIX + name, text, histograms, _FAMILY)


def _histogram_metric(name: str, text: str, histograms: _Histograms, *labels: str) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=labels)
    for key, histogram in histograms.items():
        family.add_metric(key, histogram.buckets, histogram.sum)
    return family


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
