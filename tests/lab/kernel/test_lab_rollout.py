"""A Deployment is updated while clients call its Service, in each mode: no request fails. For IPVS see tests/uml/test_ipvs_proxy.py."""

import json
import os
import shutil
import sys

import pytest
from tests.lab.kernel.lab_cluster import NEWEST, eventually, running
from tests.lab.kernel.requests_on_lab import Requests, ask

pytestmark = [pytest.mark.kernel, pytest.mark.row("30.13")]

MODES = {"nftables": "nftables", "iptables": "iptables", "iptables-legacy": "iptables", "userspace": "userspace"}
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
                    # As it is called beyond /tmp, where a pod has files of its own.
                    "image": os.path.realpath(sys.executable),
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
