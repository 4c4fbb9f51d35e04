"""The metrics of all programs, as their own collectors expose them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector

from narthex.cni.program.agent import Agent
from narthex.dns.program.metrics import server_metrics
from narthex.dns.server.counters import AnswerCounts, ResolverCounts
from narthex.kube.source import SourceMetrics
from narthex.lb.program.announcer import metrics as announcer_metrics
from narthex.lb.program.controller import ControllerCounts, ControllerMetrics
from narthex.model.net import IPFamily
from narthex.node.parts import NodeSupervisor
from narthex.overlay.program.metrics import OverlayMetrics
from narthex.proxy.kernel.dataplanes import DATAPLANES
from narthex.proxy.program.connections import ConnectionCollector
from narthex.proxy.program.metrics import ProxyMetrics
from narthex.runtime.configuration.values import OwnConfiguration
from narthex.testing.fakes import FakeClock

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
"""What the exposition adds to the names of metrics, by type."""


def exposed() -> dict[str, frozenset[str]]:
    """Return the labels of each exposed name."""
    found: dict[str, frozenset[str]] = {}
    for family in _families():
        labels = {*getattr(family, "_labelnames", ())}
        for sample in family.samples:
            labels |= set(sample.labels)
        labels |= {"le"} if family.type == "histogram" else set()
        for suffix in SUFFIXES.get(family.type, ("",)):
            name = family.name + suffix
            found[name] = found.get(name, frozenset()) | frozenset(labels)
    return found


def _families() -> Iterator[Any]:
    for mode in DATAPLANES:
        metrics = ProxyMetrics(mode, verifies=True)
        metrics.queued(IPFamily.IPV4, 0.0)
        yield from metrics.collect()
    yield from SourceMetrics((), lambda: 0.0).collect()
    yield from NodeSupervisor(()).collect()
    yield from OverlayMetrics().collect()
    yield from Agent().collect()
    yield from ConnectionCollector({}, lambda: (), FakeClock(), OwnConfiguration()).collect()
    state = {"panics": 0.0, "narthex_dns_workers": 1.0, "narthex_dns_heard_age_seconds": 0.0}
    yield from server_metrics(AnswerCounts(), {".": ResolverCounts()}, {}, state)
    yield from _load_balancer()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    yield from registry.collect()


def _load_balancer() -> Iterator[Any]:
    controller: Any = SimpleNamespace(counts=ControllerCounts(), results={}, followed=())
    leader: Any = SimpleNamespace(term=1)
    yield from ControllerMetrics(controller, leader, FakeClock()).collect()
    counts = SimpleNamespace(wrong_key=0, malformed=0, replayed=0, unknown_senders=0)
    announcing: Any = SimpleNamespace(
        records={}, ownership=SimpleNamespace(held=()), failovers=0, links=(),
        membership=SimpleNamespace(peers={}, counts=counts),
    )  # fmt: skip
    yield from announcer_metrics(announcing)
