"""A Deployment is updated while clients call its Service, in each mode: no request fails. IPVS is shown in tests/uml."""

import itertools
import json
import os
import shutil
import socket
import sys
import threading

import pytest

from narthex.host import netns
from netns.lab_cluster import NEWEST, eventually, running

pytestmark = [pytest.mark.kernel, pytest.mark.row("30.13")]

MODES = {"nftables": "nftables", "iptables": "iptables", "iptables-legacy": "iptables", "userspace": "userspace"}
PATIENCE = 30.0
PAUSE = 0.01

WEB = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  strategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 30
      containers:
        - {name: server, image: "web:1", ports: [{name: http, containerPort: 8080}],
           readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  ipFamilyPolicy: PreferDualStack
  clusterIP: 10.96.0.80
  selector: {app: web}
  ports: [{port: 80, targetPort: http, nodePort: 30080}]
"""


class Requests:
    """Requests over HTTP, each on a connection of its own, from several places in turn; what fails is written down."""

    def __init__(self, ways):
        """`ways`: network namespace, address and port of each."""
        self._ways = itertools.cycle(ways)
        self.answered = {}
        """Who answered, and how often."""
        self.failures = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    @property
    def made(self):
        return sum(self.answered.values()) + len(self.failures)

    def _go_on(self):
        while not self._ended.wait(PAUSE):
            namespace, address, port = next(self._ways)
            try:
                pod = ask(namespace, address, port)
                self.answered[pod] = self.answered.get(pod, 0) + 1
            except OSError as error:
                self.failures.append(f"{namespace} to {address}:{port}: {error!r}")


def ask(namespace, address, port):
    """The name of the pod that answers. Raises OSError."""
    with netns.entered(namespace):
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    with sock:
        sock.settimeout(PATIENCE)
        sock.connect((address, port))
        sock.sendall(b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := sock.recv(65536):
            answer += part
    if not answer.startswith(b"HTTP/1.1 200 ") or b" on node-" not in answer:
        raise ConnectionError(f"answered {answer!r}")
    return answer.decode().splitlines()[-1].split()[0]


@pytest.fixture(params=MODES)
def cluster(request, tmp_path, monkeypatch):
    """A lab of two nodes with three pods behind a Service."""
    if request.param == "iptables-legacy":
        programs = tmp_path / "bin"
        programs.mkdir()
        for name in ("iptables", "ip6tables"):
            for suffix in ("", "-save", "-restore"):
                (programs / f"{name}{suffix}").symlink_to(shutil.which(f"{name}-legacy{suffix}"))
        monkeypatch.setitem(os.environ, "PATH", f"{programs}:{os.environ['PATH']}")
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "web.yaml").write_text(WEB)
    with running(f"r{list(MODES).index(request.param)}", "--mode", MODES[request.param], directory=tmp_path / "web",
                 path=os.environ["PATH"]) as made:  # fmt: skip
        yield made


def names(cluster):
    """Of the pods that stay, as the API has them."""
    found = cluster.get("pods", "-l", "app=web")["items"]
    return {each["metadata"]["name"] for each in found if "deletionTimestamp" not in each["metadata"]}


def test_no_request_fails(cluster):
    lab = cluster.lab
    (client,) = lab.pods[:1]
    ways = [
        (lab.outside, lab.nodes[0].addresses[0], 30080),
        (lab.outside, lab.nodes[1].addresses[1], 30080),
        (lab.nodes[0].namespace, "10.96.0.80", 80),
        (lab.nodes[1].namespace, "10.96.0.80", 80),
    ]
    assert client.ready
    before = names(cluster)
    with Requests(ways) as load:
        eventually(lambda: before <= set(load.answered), "an answer of each pod")
        cluster.kubectl("set", "image", "deployment/web", "server=web:2")
        cluster.kubectl("rollout", "status", "deployment/web", "--timeout=180s")
        after = names(cluster)
        assert len(after) == 3
        assert not before & after
        eventually(lambda: after <= set(load.answered), "an answer of each new pod")
        # The old ones end by themselves.
        eventually(lambda: not before & {pod.name for pod in cluster.lab.pods}, "the end of the old pods")
        # Back again, and fewer: what is taken away is not missed either.
        cluster.kubectl("rollout", "undo", "deployment/web")
        cluster.kubectl("rollout", "status", "deployment/web", "--timeout=180s")
        cluster.kubectl("scale", "deployment/web", "--replicas=1")
        eventually(lambda: len({pod.name for pod in cluster.lab.pods if pod.name.startswith("web-")}) == 1, "one pod")
    assert load.failures == []
    assert load.made > 50


def test_a_probe_takes_the_endpoint_out_and_back(probed):
    """A web server over a folder: the probe asks for a file of it."""
    cluster = probed
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "moody", "labels": {"app": "moody"}},
        "spec": {
            "containers": [
                {
                    "name": "server",
                    "image": sys.executable,
                    "args": ["-m", "http.server", "8080", "--directory", "/tmp"],
                    "ports": [{"name": "http", "containerPort": 8080}],
                    "readinessProbe": {
                        "httpGet": {"path": "/well", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1,
                    },
                }
            ]
        },
    }  # fmt: skip
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    cluster.kubectl("expose", "pod", "moody", "--port=80", "--target-port=http")

    def ready():
        found = cluster.get("endpointslices", "-l", "kubernetes.io/service-name=moody")["items"]
        return {endpoint["conditions"]["ready"] for each in found for endpoint in each["endpoints"] or ()}

    address = eventually(lambda: cluster.kubectl("get", "svc", "moody", "-o", "jsonpath={.spec.clusterIP}"))

    def within(*words):
        cluster.kubectl("exec", "moody", "--", *words, program=NEWEST)

    eventually(lambda: ready() == {False}, "an endpoint that is not ready yet")
    within("touch", "/tmp/well")
    eventually(lambda: ready() == {True}, "the endpoint")
    cluster.narthex("wait")
    with pytest.raises(ConnectionError, match=r"HTTP/1\.0 200"):
        ask(cluster.lab.nodes[0].namespace, address, 80)
    within("rm", "/tmp/well")
    eventually(lambda: ready() == {False}, "an endpoint that is not ready")
    cluster.narthex("wait")
    with pytest.raises(ConnectionRefusedError):
        ask(cluster.lab.nodes[0].namespace, address, 80)
    within("touch", "/tmp/well")
    eventually(lambda: ready() == {True}, "the endpoint again")
    cluster.kubectl("delete", "pod/moody", "service/moody", "--grace-period=0", "--force")


@pytest.fixture
def probed():
    with running("rp", "--nodes", "1") as made:
        yield made
