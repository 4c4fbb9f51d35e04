"""A lab whose nodes run a kube-proxy: Narthex's proxy behind kube-proxy's command line, and an official one if it is named."""

import contextlib
import os
import sys
from pathlib import Path

import msgspec
import pytest
from tests.lab.kernel.lab_cluster import SOURCE, eventually, left_of, narthex, running

from narthex.lab.program import labs
from narthex.lab.program.node_client import BESIDE_HEALTH_PORT, METRICS_PORT, get
from narthex.lab.program.state import StateDirectory
from narthex.linux.processes import processes_inside

pytestmark = pytest.mark.kernel

PROXIES = ["stand-in", *(["official"] if os.environ.get("NARTHEX_KUBE_PROXY") else [])]
WEB = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: c, image: web, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, clusterIP: 10.96.7.7, selector: {app: web}, ports: [{port: 80, targetPort: 8080, nodePort: 30080}]}
"""


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module", params=PROXIES)
def lab(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kube-proxy")
    stand_in = f'#!/bin/sh\nPYTHONPATH={SOURCE} exec {sys.executable} -m narthex proxy "$@"\n'
    path = program(folder / "kube-proxy", stand_in)
    manifests = folder / "manifests"
    manifests.mkdir()
    (manifests / "web.yaml").write_text(WEB)
    if request.param == "official":
        path = os.environ["NARTHEX_KUBE_PROXY"]
    with running("kp", "--kube-proxy", path, directory=manifests) as made:
        made.proxy = path
        yield made


def proxy_of(cluster, node):
    """PIDs of what runs with the configuration of the kube-proxy of a node."""
    words = f"--config=/run/narthex/lab/{cluster.name}/{node}/kube-proxy.json".encode()
    inside = processes_inside([each.namespace for each in cluster.lab.nodes if each.name == node])
    found = []
    for each in inside:
        with contextlib.suppress(FileNotFoundError):
            found += [each.pid] if words in Path(f"/proc/{each.pid}/cmdline").read_bytes().split(b"\0") else []
    return found


def fetch(cluster, client, url):
    return narthex("lab", "exec", "--name", cluster.name, client, "--", "curl", "-sS", "-m", "20", url)


def test_services_work_and_narthex_has_no_proxy_there(lab):
    for node in lab.lab.nodes:
        assert fetch(lab, "outside", f"http://{node.addresses[0]}:30080/").startswith("web-")
        status, body = get(node.namespace, BESIDE_HEALTH_PORT, "/healthz")
        assert status == 200
        assert set(msgspec.json.decode(body)["parts"]) == {"cni", "dns"}
        # kube-proxy's ports are those of the program.
        assert get(node.namespace, METRICS_PORT, "/proxyMode") == (200, b"nftables")
        assert len(proxy_of(lab, node.name)) == 1
    assert fetch(lab, "node-1", "http://10.96.7.7/").startswith("web-")
    logs = StateDirectory(lab.name).logs
    said = lab.kubectl("logs", "-n", "kube-system", "kube-proxy-node-1", "--tail=3").splitlines()
    assert said
    assert set(said) <= set((logs / "node-1-kube-proxy.log").read_text().splitlines())
    assert f"proxy: {lab.proxy}, instead of the lab's own" in lab.narthex("status")


def test_it_is_started_again(lab):
    before = {node: proxy_of(lab, node) for node in ("node-1", "node-2")}
    node = next(each for each in labs.read(lab.name).processes if each.node == "node-1")
    lab.narthex("fault", "kill", "proxy/node-1")
    eventually(lambda: proxy_of(lab, "node-1") not in ([], before["node-1"]), "the next kube-proxy")
    eventually(lambda: labs.inspect_lab(lab.name).healthy, "a healthy lab")
    assert proxy_of(lab, "node-2") == before["node-2"]
    assert node in labs.read(lab.name).processes
    eventually(lambda: "kube-proxy of node-1" not in lab.narthex("status"), "no problem any more")


def test_a_dead_node_has_no_proxy(lab):
    lab.narthex("kill", "node-2")
    eventually(lambda: not proxy_of(lab, "node-2"), "its end")


def test_a_program_that_ends_is_reported_and_nothing_is_left(tmp_path):
    name = f"nxt-{os.getpid()}-kpbad"
    broken = program(tmp_path / "kube-proxy", "#!/bin/sh\necho 'unknown mode: none'\nexit 3\n")
    said = narthex("lab", "up", "--name", name, "--nodes", "1", "--kube-proxy", broken, status=1)
    assert "the kube-proxy of node-1 ended (status 3):\nunknown mode: none" in said
    assert left_of(name) == []
