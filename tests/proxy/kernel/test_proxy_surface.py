"""What a node proxy shows of itself, as a process in a namespace: ports, answers, numbers, Events."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.proxy.kernel.small_cluster import HERE, THERE, SmallCluster, service, slices

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import endpoint, endpoint_slice, node
from narthex.testing.build import service as service_object
from narthex.testing.load import Load, until

pytestmark = pytest.mark.kernel

SOURCE = Path(__file__).parents[3] / "src"
PATIENCE = 60.0


ENDS = endpoint_slice("shop/web", endpoint("10.64.1.5"), labels=(("kubernetes.io/service-name", "web"),))


class Running:
    """A proxy process in a namespace of its own, told by flags where its objects are."""

    def __init__(self, namespace, log):
        self.namespace = namespace
        self.log_path = log
        self.process = None

    def start(self, *flags):
        argv = [sys.executable, "-m", "narthex", "proxy", "--hostname-override", "worker-a", *flags]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        with self.log_path.open("wb") as log, in_namespace(self.namespace):
            self.process = subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        return self

    @property
    def log(self):
        return self.log_path.read_text()

    def wait(self, condition, what):
        def holds():
            assert self.process.poll() is None, f"the proxy ended:\n{self.log}"
            return condition()

        until(holds, what, PATIENCE, lambda: self.log)

    def ready(self):
        self.wait(lambda: "ready: the first sync is done" in self.log, "the first sync")
        return self

    def listening(self):
        """Addresses that this process listens on, TCP."""
        text = run(["ss", "-Htlnp"], namespace=self.namespace)
        return {line.split()[3] for line in text.splitlines() if f"pid={self.process.pid}," in line}

    def ask(self, address, port, path, method="GET"):
        """Status, headers and body."""
        with in_namespace(self.namespace):
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        with sock:
            sock.settimeout(30)
            sock.connect((address, port))
            sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        head, _, body = answer.decode().partition("\r\n\r\n")
        first, *lines = head.split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body

    def status(self, path, port=10256):
        return self.ask("127.0.0.1", port, path)[0]


@pytest.fixture
def proxy(tmp_path):
    name = f"nxsurf-{os.getpid()}"
    create_namespace(name)
    running = Running(name, tmp_path / "log")
    try:
        yield running
    finally:
        if running.process is not None and running.process.poll() is None:
            running.process.kill()
            running.process.wait()
        delete_namespace(name)


@pytest.fixture
def manifests(tmp_path):
    folder = tmp_path / "manifests"
    folder.mkdir()
    return folder


def node_file(folder, **fields):
    """This node's Node object, written in one step."""
    raw = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "worker-a", **fields.pop("metadata", {})}, **fields}
    (folder / ".node").write_text(json.dumps(raw))
    (folder / ".node").rename(folder / "node.json")


@pytest.mark.row("17.8", "20.24", "27.5", "27.6", "27.7", "30.1")
@pytest.mark.parametrize(
    ("flags", "places"),
    [
        ([], {"*:10256", "127.0.0.1:10249"}),
        (["--bind-address=fd20::11"], {"*:10256", "[::1]:10249"}),
        (["--bind-address=10.20.0.11"], {"*:10256", "127.0.0.1:10249"}),
        (["--healthz-bind-address=127.0.0.2", "--metrics-bind-address=[::1]:77"], {"127.0.0.2:10256", "[::1]:77"}),
        (["--healthz-bind-address=::1", "--metrics-bind-address=0.0.0.0:77"], {"[::1]:10256", "*:77"}),
        (["--healthz-bind-address=", "--metrics-bind-address="], set()),
        (["--healthz-port=0"], {"127.0.0.1:10249"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_port_is_where_kube_proxys_is(proxy, manifests, flags, places):
    """`*` is the unspecified IPv6 address that takes IPv4, too: what Go listens at for 0.0.0.0 as well."""
    proxy.start(f"--manifests={manifests}", *flags).ready()
    assert proxy.listening() == places
    if "*:10256" in places:
        assert proxy.ask("127.0.0.1", 10256, "/livez")[0] == proxy.ask("::1", 10256, "/livez")[0] == 200


@pytest.mark.row("17.3", "17.4", "17.5", "17.6")
def test_health_says_what_kube_proxys_says(proxy, manifests):
    node_file(manifests)
    proxy.start(f"--manifests={manifests}").ready()
    code, headers, body = proxy.ask("127.0.0.1", 10256, "/healthz")
    told = json.loads(body)
    assert code == 200
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert told.keys() == {"lastUpdated", "currentTime", "nodeEligible", "healthy", "status"}
    assert told["nodeEligible"] is told["healthy"] is True
    assert told["lastUpdated"] == told["currentTime"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", told["lastUpdated"])
    assert told["status"].keys() == {"IPv4", "IPv6"}
    assert all(each.keys() == {"lastUpdated", "healthy"} for each in told["status"].values())
    code, _, body = proxy.ask("127.0.0.1", 10256, "/livez")
    assert code == 200
    assert json.loads(body).keys() == told.keys() - {"nodeEligible"}

    node_file(manifests, spec={"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]})
    proxy.wait(lambda: proxy.status("/healthz") == 503, "a node that is to be deleted")
    assert json.loads(proxy.ask("127.0.0.1", 10256, "/healthz")[2])["nodeEligible"] is False
    assert proxy.status("/livez") == 200
    node_file(manifests)
    proxy.wait(lambda: proxy.status("/healthz") == 200, "the taint's end")
    node_file(manifests, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    proxy.wait(lambda: proxy.status("/healthz") == 503, "a node that is being deleted")
    assert proxy.status("/livez") == 200


@pytest.mark.row("20.25", "17.9", "30.1")
def test_the_paths_of_the_metrics_port(proxy, manifests):
    proxy.start(f"--manifests={manifests}", "--proxy-mode=iptables", "--explain-service=shop/web").ready()
    proxy.status("/healthz")

    def get(path):
        code, headers, body = proxy.ask("127.0.0.1", 10249, path)
        assert code == 200, path
        return headers["Content-Type"], body

    assert get("/proxyMode") == ("text/plain; charset=utf-8", "iptables")
    assert get("/healthz")[1] == "ok"
    kind, body = get("/configz")
    assert kind == "application/json"
    shown = json.loads(body)
    assert shown["kubeproxy.config.k8s.io"]["kind"] == "KubeProxyConfiguration"
    assert shown["kubeproxy.config.k8s.io"]["mode"] == "iptables"
    assert shown["narthex"]["explainService"] == "shop/web"
    kind, body = get("/metrics")
    assert kind.startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(body)}
    assert {"kubeproxy_sync_proxy_rules_iptables_total", "process_resident_memory_bytes"} <= names
    assert 'kubeproxy_proxy_healthz_total{code="200"} 1.0' in body
    assert "kubernetes_healthcheck" in get("/metrics/slis")[1]


def number(body, name, **labels):
    """The sum of all samples with this name and these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_new_connections_are_counted_exactly(tmp_path, mode):
    """By every way in, to endpoints here and elsewhere, also across a restart and a change of endpoints."""
    ends = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]
    with SmallCluster(tmp_path, mode) as cluster:
        cluster.serve(*ends)
        cluster.put("web", service(), *slices(dict.fromkeys(ends, "ready")))
        cluster.start().ready()

        def counted(name, **labels):
            return number(cluster.get(10249, "/metrics")[1], f"narthex_{name}_new_connections_total", **labels)

        def call(count):
            load = Load([cluster.from_pod(4), cluster.from_outside(4), cluster.from_pod(6), cluster.from_outside(6)])
            load.hold(count)
            load.exchange()
            assert load.failures == []
            load.close()

        def shows(name, expected, **labels):
            until(
                lambda: counted(name, **labels) == expected,
                f"{name}: {expected}",
                PATIENCE,
                lambda: f"{counted(name, **labels)}",
            )

        labels = {"namespace": "shop", "service": "web", "port": "http", "protocol": "TCP"}
        shows("service", 0, **labels)
        call(40)
        shows("service", 40, **labels)
        shows("service", 20, **labels, ip_family="IPv6")
        shows("endpoint", 40, **labels)
        shows("endpoint", 20, **labels, ip_family="IPv4")
        assert counted("endpoint", endpoint=f"{ends[0]}:8080") + counted("endpoint", endpoint=f"{ends[1]}:8080") == 20

        cluster.kill()
        cluster.start().ready()
        shows("service", 0, **labels)
        call(8)
        shows("service", 8, **labels)

        del ends[1]
        cluster.put("web", service(), *slices(dict.fromkeys(ends, "ready")))
        cluster.wait(lambda: cluster.log.count("1 Service port changed") >= 1, "the change")
        call(12)
        until(
            lambda: counted("endpoint", endpoint=f"{ends[0]}:8080") >= 6, "the connections after the change", PATIENCE
        )


@pytest.mark.row("26.4", "17.3")
def test_with_an_api_server_it_tells_events_and_needs_its_node(proxy):
    with in_namespace(proxy.namespace):
        server = FaultyApiServer()
        server.start()
    try:
        server.put(service_object("shop/web", "10.110.0.1"), ENDS)
        proxy.start(f"--master={server.url}", "--cluster-cidr=10.64.0.0/12").ready()
        assert proxy.status("/healthz") == 503, "the node was never seen"
        assert proxy.status("/livez") == 200
        server.put(node())
        proxy.wait(lambda: proxy.status("/healthz") == 200, "the node")
        proxy.wait(lambda: events(server), "the event")
        (event,) = events(server)
        assert (event["reason"], event["regarding"]["name"]) == ("Starting", "worker-a")
        body = proxy.ask("127.0.0.1", 10249, "/metrics")[2]
        assert number(body, "narthex_source_objects", kind="EndpointSlice") == 1
        assert 0 <= number(body, "narthex_source_last_list_age_seconds", kind="Service") < PATIENCE
        elements = run(["nft", "list", "map", "ip", "narthex", "endpoints"], namespace=proxy.namespace)
        assert "10.110.0.1 . tcp . 80" in elements and "10.64.1.5 . 80" in elements
    finally:
        server.__exit__(None, None, None)


@pytest.mark.row("17.8", "26.4", "27.8")
@pytest.mark.parametrize(
    ("address", "reason"),
    [(("0.0.0.0", 10256), "FailedToStartProxierHealthcheck"), (("127.0.0.1", 10249), "FailedToStartMetricServer")],
)
def test_a_taken_port_that_must_be_had_is_told_before_the_end(proxy, address, reason):
    with in_namespace(proxy.namespace):
        server = FaultyApiServer()
        server.start()
        holder = socket.create_server(address)
    with holder:
        try:
            proxy.start(f"--master={server.url}", "--bind-address-hard-fail")
            assert proxy.process.wait(PATIENCE) == 1
        finally:
            server.__exit__(None, None, None)
    (event,) = events(server)
    assert (event["reason"], event["type"]) == (reason, "Warning")
    assert f"{address[0]}:{address[1]}: Address already in use" in event["note"]


@pytest.mark.row("26.4", "16.7")
def test_a_health_check_port_that_cannot_be_had_is_told_of_the_service(proxy):
    with in_namespace(proxy.namespace):
        server = FaultyApiServer()
        server.start()
        holder = socket.create_server(("0.0.0.0", 31000))
    balanced = msgspec.structs.replace(
        service_object("shop/web", "10.110.0.1", type="LoadBalancer", external_policy_local=True),
        health_check_node_port=31000,
    )
    with holder:
        try:
            server.put(balanced, node())
            proxy.start(f"--master={server.url}", "--nodeport-addresses=0.0.0.0/0,::/0").ready()
            proxy.wait(lambda: len(events(server)) == 2, "the event")
        finally:
            server.__exit__(None, None, None)
    told = events(server)[1]
    assert told["reason"] == "FailedToStartServiceHealthcheck"
    assert told["regarding"] == {
        "kind": "Service",
        "namespace": "shop",
        "name": "web",
        "uid": "shop/web",
        "apiVersion": "v1",
    }
    assert told["metadata"]["namespace"] == "shop"


KUBEADM = """\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: KUBECONFIG
  qps: 0
clusterCIDR: 10.64.0.0/12
configSyncPeriod: 0s
conntrack: {maxPerCore: null, min: null, tcpCloseWaitTimeout: null, tcpEstablishedTimeout: null}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
kind: KubeProxyConfiguration
metricsBindAddress: ""
mode: iptables
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
"""


@pytest.mark.row("27.2", "27.24", "30.1")
def test_in_the_place_of_a_kube_proxy_of_kubeadm(proxy, tmp_path):
    """Its configuration file, its kubeconfig, its flags; its port that another holds for a while."""
    with in_namespace(proxy.namespace):
        server = FaultyApiServer(token="secret")
        server.start()
        holder = socket.create_server(("0.0.0.0", 10256))
    kubeconfig, config = tmp_path / "kubeconfig.conf", tmp_path / "config.conf"
    cluster = {"name": "default", "cluster": {"server": server.url}}
    user = {"name": "default", "user": {"token": "secret"}}
    context = {"name": "default", "context": {"cluster": "default", "user": "default", "namespace": "default"}}
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [cluster],
                "users": [user],
                "contexts": [context],
                "current-context": "default",
            }
        )
    )
    config.write_text(KUBEADM.replace("KUBECONFIG", str(kubeconfig)))
    try:
        with holder:
            server.put(node(), service_object("shop/web", "10.110.0.1"), ENDS)
            proxy.start(f"--config={config}", "--v=2").ready()
            assert "health server on 0.0.0.0:10256: Address already in use; it is tried again every 5 s" in proxy.log
            assert proxy.ask("127.0.0.1", 10249, "/proxyMode")[2] == "iptables"
        proxy.wait(lambda: "health server on 0.0.0.0:10256: listening now" in proxy.log, "the port")
        assert proxy.status("/healthz") == 200
        rules = run(["iptables-save", "-t", "nat"], namespace=proxy.namespace)
        assert re.search(r"-d 10\.110\.0\.1/32 .* -j KUBE-SVC-", rules)

        # What the file says now cannot be had, and must be: a new process ends for it.
        with in_namespace(proxy.namespace):
            holder = socket.create_server(("127.0.0.1", 777))
        with holder:
            edited = config.read_text().replace('metricsBindAddress: ""', "metricsBindAddress: 127.0.0.1:777")
            fresh = tmp_path / "fresh"
            fresh.write_text(edited.replace("bindAddressHardFail: false", "bindAddressHardFail: true"))
            fresh.rename(config)
            assert proxy.process.wait(PATIENCE) == 1
        assert "metrics server on 127.0.0.1:777: Address already in use; bindAddressHardFail is set" in proxy.log
        assert {event["reason"] for event in events(server)} == {"Starting", "FailedToStartMetricServer"}
    finally:
        server.__exit__(None, None, None)


def events(server):
    return [json.loads(seen.body) for seen in server.requests if seen.method == "POST"]


@pytest.mark.row("26.3")
def test_cleanup_by_kube_proxys_flag(proxy, manifests):
    proxy.start(f"--manifests={manifests}").ready()
    proxy.process.send_signal(signal.SIGTERM)
    assert proxy.process.wait(PATIENCE) == 0
    assert "table ip narthex" in run(["nft", "list", "ruleset"], namespace=proxy.namespace)
    proxy.start("--cleanup")
    assert proxy.process.wait(PATIENCE) == 0
    assert run(["nft", "list", "ruleset"], namespace=proxy.namespace) == ""


@pytest.mark.row("29.1", "17.1", "17.2")
def test_healthy_only_while_the_rules_are_in_the_kernel(proxy, manifests):
    """Another program takes the table and does not let go: a table with an owner cannot be written by others."""
    proxy.start(f"--manifests={manifests}", "--sync-period=500ms").ready()
    assert proxy.status("/healthz") == 200
    with in_namespace(proxy.namespace):
        owner = subprocess.Popen(["nft", "-i"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        # One transaction: the proxy is not quicker.
        owner.stdin.write("delete table ip narthex; add table ip narthex { flags owner; }\n")
        owner.stdin.flush()
        proxy.wait(lambda: proxy.status("/healthz") == 503, "the end of health")
        told = json.loads(proxy.ask("127.0.0.1", 10256, "/healthz")[2])
        assert told["status"]["IPv4"]["healthy"] is False
        assert told["status"]["IPv6"]["healthy"] is True
        assert told["lastUpdated"] == told["status"]["IPv4"]["lastUpdated"] < told["currentTime"]
        body = proxy.ask("127.0.0.1", 10249, "/metrics")[2]
        assert number(body, "kubeproxy_sync_proxy_rules_nftables_sync_failures_total", ip_family="IPv4") >= 1
    finally:
        owner.stdin.close()
        owner.wait(PATIENCE)
    proxy.wait(lambda: proxy.status("/healthz") == 200, "health after the rules are back")
    assert "chain nat-prerouting" in run(["nft", "list", "table", "ip", "narthex"], namespace=proxy.namespace)
