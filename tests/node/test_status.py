"""What the status ports say of parts that run, back off, or are switched off."""

import json
import urllib.error
import urllib.request

import msgspec
import pytest

from narthex.model.net import IPFamily
from narthex.node.parts import PartReport
from narthex.proxy.program.health import ProxyHealth
from narthex.proxy.program.loop import Proxy
from narthex.proxy.program.metrics import ProxyMetrics
from narthex.proxy.program.schedule import SyncPeriods
from narthex.proxy.program.settings import settings
from narthex.proxy.program.status import ProcessHealth, StatusPorts
from narthex.runtime.configuration.values import NodeParts
from narthex.runtime.http import HttpResponse
from narthex.testing.fakes import FakeClock, FakeInbox

GOOD = PartReport(running=True, healthy=True, failures=0, error="")
STUCK = PartReport(running=True, healthy=False, failures=1, error="OSError: gone")
RESTS = PartReport(running=False, healthy=False, failures=1, error="OSError: gone")


class Judge:
    """A proxy's health."""

    def __init__(self, healthz=200, livez=200):
        self.answers = healthz, livez

    def healthz(self):
        return self.answers[0], {"nodeEligible": self.answers[0] == 200}

    def livez(self):
        return self.answers[1], {"lastUpdated": "now"}


@pytest.mark.parametrize(
    ("reports", "proxy", "healthz", "livez"),
    [
        # A proxy alone answers for itself, once it is there.
        ({}, Judge(), 200, 200),
        ({}, Judge(503, 200), 503, 200),
        ({}, Judge(503, 503), 503, 503),
        ({}, None, 503, 503),
        # Balancers go by the proxy, whatever becomes of other parts.
        ({"proxy": GOOD}, Judge(), 200, 200),
        ({"proxy": GOOD, "dns": RESTS}, Judge(), 200, 200),
        ({"proxy": GOOD, "dns": STUCK}, Judge(), 200, 503),
        ({"proxy": GOOD, "dns": GOOD}, Judge(503, 200), 503, 200),
        ({"proxy": STUCK, "dns": GOOD}, Judge(503, 503), 503, 503),
        # A proxy that waits for the API server, or whose rules others removed: a new process could do no better.
        ({"proxy": STUCK, "dns": GOOD}, Judge(503, 200), 503, 200),
        ({"proxy": STUCK, "dns": STUCK}, Judge(503, 200), 503, 503),
        # A part that backs off is started again by this process; no other one would do better.
        ({"proxy": RESTS}, None, 503, 200),
        ({"proxy": RESTS, "dns": GOOD}, None, 503, 200),
        # Without a proxy all parts count.
        ({"dns": GOOD}, None, 200, 200),
        ({"dns": RESTS}, None, 503, 200),
        ({"dns": GOOD, "overlay": STUCK}, None, 503, 503),
    ],
)
def test_who_is_healthy(reports, proxy, healthz, livez):
    health = ProcessHealth(lambda: reports, proxy)
    for (status, body), expected in ((health.healthz(), healthz), (health.livez(), livez)):
        assert status == expected
        # kube-proxy's body has no parts; a node's always has.
        assert body.get("parts", {}) == {name: msgspec.to_builtins(report) for name, report in reports.items()}


def test_a_nodes_answer_has_what_kube_proxys_has():
    body = ProcessHealth(lambda: {"proxy": GOOD}, Judge()).healthz()[1]
    assert body["nodeEligible"] is True
    assert body["parts"]["proxy"] == {"running": True, "healthy": True, "failures": 0, "error": ""}


class Answering:
    """A Status on free ports of loopback."""

    def __init__(self, *arguments):
        self.status = StatusPorts(*arguments)
        flags = {"healthzBindAddress": "127.0.0.1:1", "metricsBindAddress": "127.0.0.1:1", "mode": "iptables"}
        told = settings({**flags, "clusterCIDR": "10.64.0.0/12"}, None, "worker-a")
        self.status.serve(msgspec.structs.replace(told, healthz=("127.0.0.1", 0), metrics=("127.0.0.1", 0)))

    def get(self, purpose, path):
        address, port = self.status._server.addresses[purpose]
        try:
            with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@pytest.fixture
def answering():
    made = []

    def make(*arguments):
        made.append(Answering(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.status.stop()


class Numbers:
    def collect(self):
        from prometheus_client.core import GaugeMetricFamily

        yield GaugeMetricFamily("of_the_node", "A number.", 7)


def test_the_ports_answer_before_and_after_a_proxy_and_for_the_one_that_is_there(answering):
    port = answering(lambda: {"proxy": GOOD}, (Numbers(),))
    assert port.get("health", "/healthz")[0] == 503
    assert "of_the_node 7" in port.get("metrics", "/metrics")[1]
    assert port.get("metrics", "/proxyMode") == (200, "")
    for mode in ("iptables", "nftables"):
        health = ProxyHealth((IPFamily.IPV4,), 30.0, FakeClock())
        health.synced(IPFamily.IPV4)
        metrics = ProxyMetrics(mode)
        port.status.show(Proxy(FakeInbox(), [], FakeClock(), SyncPeriods(), health=health, metrics=metrics), mode)
        assert port.get("health", "/healthz")[0] == 200
        assert port.get("metrics", "/proxyMode") == (200, mode)
        # What the proxy counts, it counts itself; each one anew.
        assert 'kubeproxy_proxy_healthz_total{code="200"} 1.0' in port.get("metrics", "/metrics")[1]
        shown = json.loads(port.get("metrics", "/configz")[1])
        parts = msgspec.structs.asdict(NodeParts())
        assert (shown["kubeproxy.config.k8s.io"]["mode"], shown["narthex"]["parts"]) == ("iptables", parts)
    port.status.hide()
    assert port.get("health", "/healthz")[0] == 503
    assert port.get("metrics", "/healthz") == (200, "ok")


def test_a_part_answers_at_both_ports_until_it_withdraws(answering):
    port = answering()
    port.status.offer("/announcer", lambda: HttpResponse(200, b"{}"))
    assert [port.get(purpose, "/announcer") for purpose in ("health", "metrics")] == [(200, "{}")] * 2
    port.status.withdraw("/announcer")
    assert [port.get(purpose, "/announcer")[0] for purpose in ("health", "metrics")] == [404] * 2
