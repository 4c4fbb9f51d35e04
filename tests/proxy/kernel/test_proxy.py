"""The proxy as a process, in a network namespace, from manifests on disk to rules in the kernel."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from narthex.linux.links import set_sysctls
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run

pytestmark = pytest.mark.kernel

SOURCE = Path(__file__).parents[3] / "src"
MODES = ("nftables", "iptables")
PATIENCE = 60.0

SERVICE = """\
apiVersion: v1
kind: Service
metadata: {name: NAME, namespace: shop}
spec:
  clusterIP: ADDRESS
  ports: [{name: http, port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: NAME-1, namespace: shop, labels: {kubernetes.io/service-name: NAME}}
addressType: IPv4
ports: [{name: http, port: 8080, protocol: TCP}]
endpoints: [{addresses: [ENDPOINT], conditions: {ready: true}}]
"""


def service(name, address, endpoint):
    return SERVICE.replace("NAME", name).replace("ADDRESS", address).replace("ENDPOINT", endpoint)


WEB = service("web", "10.110.0.1", "10.64.1.5")
CART = service("cart", "10.110.0.2", "10.64.1.6")


class Running:
    """A proxy process in a namespace of its own."""

    def __init__(self, namespace, manifests, log):
        self.namespace = namespace
        self.manifests = manifests
        self.log_path = log
        self.process = None

    def start(self, *flags, hostname="worker-a"):
        argv = [sys.executable, "-m", "narthex", "proxy", "--manifests", str(self.manifests)]
        argv += ["--hostname-override", hostname, "--cluster-cidr", "10.64.0.0/12", *flags]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        with self.log_path.open("wb") as log, in_namespace(self.namespace):
            self.process = subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        return self

    @property
    def log(self):
        return self.log_path.read_text()

    def get(self, port, path):
        with in_namespace(self.namespace):
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with sock:
            sock.settimeout(30)
            sock.connect(("127.0.0.1", port))
            sock.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode()

    def healthz(self):
        try:
            return self.get(10256, "/healthz")[0]
        except OSError:
            return 0

    def wait(self, condition, what):
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, f"the proxy ended:\n{self.log}"
            assert time.monotonic() < end, f"{what} did not come:\n{self.log}"
            time.sleep(0.01)

    def ready(self):
        self.wait(lambda: self.healthz() == 200, "the first sync")
        return self

    def rules(self, mode, handles=False):
        if mode == "nftables":
            return run(["nft", *(["-a"] if handles else []), "list", "ruleset"], namespace=self.namespace)
        return "".join(
            run([tool, "-t", table], namespace=self.namespace)
            for tool in ("iptables-save", "ip6tables-save")
            for table in ("nat", "filter")
        )

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


@pytest.fixture
def proxy(tmp_path):
    name = f"nxt-{os.getpid()}-proxy"
    create_namespace(name)
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "web.yaml").write_text(WEB)
    running = Running(name, manifests, tmp_path / "log")
    try:
        yield running
    finally:
        if running.process is not None and running.process.poll() is None:
            running.process.kill()
            running.process.wait()
        delete_namespace(name)


def content(text):
    """Rules without what changes by itself: counters and the times in the comments of iptables-save."""
    return [line for line in text.splitlines() if not line.startswith(("#", ":"))]


@pytest.mark.parametrize("mode", MODES)
def test_from_manifests_to_rules_and_back(proxy, mode):
    proxy.start("--proxy-mode", mode).ready()
    proxy.wait(lambda: "ready: the first sync is done (IPv4 and IPv6)" in proxy.log, "the line in the log")
    assert "10.110.0.1" in proxy.rules(mode)

    (proxy.manifests / "cart.yaml").write_text(CART)
    proxy.wait(lambda: "10.110.0.2" in proxy.rules(mode), "the new Service")
    (proxy.manifests / "cart.yaml").write_text(CART.replace("10.64.1.6", "10.64.1.7"))
    proxy.wait(lambda: "10.64.1.7" in proxy.rules(mode), "the new endpoint")
    assert "10.64.1.6" not in proxy.rules(mode)
    (proxy.manifests / "cart.yaml").unlink()
    proxy.wait(lambda: "10.110.0.2" not in proxy.rules(mode), "the end of the Service")
    assert "10.110.0.1" in proxy.rules(mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_rules_stay_when_it_stops_and_a_restart_writes_nothing(proxy, mode, number):
    proxy.start("--proxy-mode", mode).ready()
    before = proxy.rules(mode, handles=True)
    assert proxy.stop(number) == 0
    assert "stopped; the rules stay in force" in proxy.log
    assert content(proxy.rules(mode, handles=True)) == content(before)
    proxy.start("--proxy-mode", mode).ready()
    assert content(proxy.rules(mode, handles=True)) == content(before)
    # Settings such as route_localnet are no rules: they may be set again to what they are.
    assert proxy.log.count("nothing to write") + proxy.log.count("wrote settings only") == 2


@pytest.mark.parametrize("mode", MODES)
def test_what_changed_while_it_was_down_is_caught_up_with(proxy, mode):
    proxy.start("--proxy-mode", mode).ready()
    proxy.stop()
    (proxy.manifests / "cart.yaml").write_text(CART)
    (proxy.manifests / "web.yaml").unlink()
    proxy.start("--proxy-mode", mode).ready()
    rules = proxy.rules(mode)
    assert "10.110.0.2" in rules and "10.110.0.1" not in rules


@pytest.mark.parametrize("mode", MODES)
def test_rules_that_somebody_flushed_come_back(proxy, mode):
    proxy.start("--proxy-mode", mode).ready()
    if mode == "nftables":
        run(["nft", "flush", "ruleset"], namespace=proxy.namespace)
    else:
        run(["iptables", "-t", "nat", "-F"], namespace=proxy.namespace)
    # That may be mended sooner than one can look.
    proxy.wait(lambda: "another program changed our IPv4 rules" in proxy.log, "the word about it")
    proxy.wait(lambda: "10.110.0.1" in proxy.rules(mode), "the mending")


def test_foreign_rules_are_left_alone(proxy):
    run(
        ["nft", "add table ip other; add chain ip other mine; add rule ip other mine counter"],
        namespace=proxy.namespace,
    )
    proxy.start("--proxy-mode", "nftables").ready()
    (proxy.manifests / "cart.yaml").write_text(CART)
    proxy.wait(lambda: "10.110.0.2" in proxy.rules("nftables"), "the new Service")
    assert "chain mine" in proxy.rules("nftables")


def test_a_broken_file_is_reported_and_the_rest_goes_on(proxy):
    proxy.start().ready()
    (proxy.manifests / "broken.yaml").write_text("kind: Service\napiVersion: v1\nmetadata: {name: x\n")
    proxy.wait(lambda: "broken.yaml" in proxy.log, "the report")
    (proxy.manifests / "cart.yaml").write_text(CART)
    proxy.wait(lambda: "10.110.0.2" in proxy.rules("nftables"), "the new Service")
    (proxy.manifests / "broken.yaml").unlink()
    proxy.wait(lambda: "mended: " in proxy.log, "the word that it is mended")


def test_two_claims_for_one_address_are_reported(proxy):
    (proxy.manifests / "rival.yaml").write_text(service("rival", "10.110.0.1", "10.64.1.9"))
    proxy.start().ready()
    assert "Service port shop/web:http cannot have cluster IP 10.110.0.1:80/TCP: shop/rival:http has it" in proxy.log


def test_the_status_ports(proxy):
    proxy.start("--proxy-mode", "nftables").ready()
    status, body = proxy.get(10256, "/livez")
    assert (status, json.loads(body)["healthy"]) == (200, True)
    assert proxy.get(10249, "/proxyMode") == (200, "nftables")
    assert proxy.get(10249, "/healthz") == (200, "ok")
    assert "kubeproxy_sync_proxy_rules_duration_seconds_count" in proxy.get(10249, "/metrics")[1]
    configuration = json.loads(proxy.get(10249, "/configz")[1])["kubeproxy.config.k8s.io"]
    assert configuration["mode"] == "nftables"


def test_the_configuration_file(proxy, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: iptables\n"
        "hostnameOverride: somebody-else\nhealthzBindAddress: 127.0.0.1:20256\nmetricsBindAddress: 127.0.0.1:20249\n"
    )
    proxy.start("--config", str(config))
    proxy.wait(lambda: "ready: " in proxy.log, "the first sync")
    assert "node worker-a, mode iptables" in proxy.log
    assert proxy.get(20256, "/healthz")[0] == 200
    assert proxy.get(20249, "/proxyMode") == (200, "iptables")
    assert "KUBE-SERVICES" in proxy.rules("iptables")


def test_json_logs(proxy):
    proxy.start("--log-format", "json")
    proxy.wait(lambda: "ready: the first sync is done" in proxy.log, "the first sync")
    lines = [json.loads(line) for line in proxy.log.splitlines()]
    assert [line["family"] for line in lines if line.get("wrote")] == ["IPv4", "IPv6"]


def test_without_root_it_says_what_to_do(proxy):
    argv = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", sys.executable, "-m", "narthex", "proxy"]
    argv += ["--manifests", str(proxy.manifests), "--hostname-override", "worker-a"]
    with in_namespace(proxy.namespace):
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(SOURCE)}
        )
    assert done.returncode == 1
    assert "needs root (CAP_NET_ADMIN)" in done.stderr


def test_a_taken_port_ends_it_when_it_is_to_fail_hard(proxy):
    with in_namespace(proxy.namespace):
        holder = socket.create_server(("0.0.0.0", 10256))
    with holder:
        proxy.start("--bind-address-hard-fail")
        assert proxy.process.wait(PATIENCE) == 1
    assert "health server on 0.0.0.0:10256: Address already in use" in proxy.log


def test_without_ipv6_only_ipv4_is_programmed(proxy):
    set_sysctls(proxy.namespace, {"net/ipv6/conf/all/disable_ipv6": "1"})
    proxy.start().ready()
    assert "table ip narthex" in proxy.rules("nftables")
    assert "table ip6 narthex" not in proxy.rules("nftables")
