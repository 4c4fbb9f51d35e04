"""A lab's pods as clients of the API reach them, their images, and the pods that each node has."""

import stat

import pytest
from tests.lab.kernel.lab_cluster import eventually, running

pytestmark = pytest.mark.kernel

TOOL = """\
#!/bin/sh
echo "$0 $*, $GREETING, $(cat /srv/word), $(pwd)"
exec sleep 1000
"""
PODS = """\
apiVersion: v1
kind: Pod
metadata: {name: plain}
spec: {containers: [{name: c, image: "registry.example/tool:1.2"}], terminationGracePeriodSeconds: 0}
---
apiVersion: v1
kind: Pod
metadata: {name: asked}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 0
  containers:
  - {name: c, image: "registry.example/tool:1.2", args: [more], env: [{name: GREETING, value: bye}], workingDir: /srv}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    image = tmp_path_factory.mktemp("image")
    for name, text in (
        ("opt/tool", TOOL),
        ("srv/word", "word"),
        ("image.json", '{"Entrypoint": ["/opt/tool"], "Cmd": ["serve"], "Env": ["GREETING=hello"]}'),
    ):
        path = image / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (image / "opt/tool").chmod(0o755)
    with running("access", "--nodes", "2", "--image", f"registry.example/tool={image}") as made:
        made.image = image
        yield made


def test_an_image_is_a_directory_over_the_machine(cluster):
    cluster.kubectl("apply", "-f", "-", stdin=PODS)
    cluster.kubectl("wait", "--for=condition=Ready", "pod/plain", "pod/asked", "--timeout=60s")
    logs = {name: eventually(lambda name=name: cluster.kubectl("logs", name)) for name in ("plain", "asked")}
    assert logs == {"plain": "/opt/tool serve, hello, word, /\n", "asked": "/opt/tool more, bye, word, /srv\n"}
    # A pod in its node's network has the node's name; the container's files are its own.
    node = cluster.get("pod", "asked")["spec"]["nodeName"]
    assert cluster.kubectl("exec", "asked", "--", "hostname", program=cluster.newest) == f"{node}\n"
    cluster.kubectl("exec", "plain", "--", "sh", "-c", "echo other > /srv/word", program=cluster.newest)
    assert (cluster.image / "srv/word").read_text() == "word"
    assert stat.S_IMODE((cluster.image / "opt/tool").stat().st_mode) == 0o755


def test_nodes_have_mirror_pods_and_their_configuration(cluster):
    def pods(label):
        found = cluster.get("pods", "-n", "kube-system", "-l", f"k8s-app={label}")["items"]
        return {each["metadata"]["name"]: each for each in found}

    for label, name in (("kube-proxy", "kube-proxy"), ("kube-dns", "coredns")):
        assert {key: each["spec"]["nodeName"] for key, each in pods(label).items()} == {
            f"{name}-node-1": "node-1",
            f"{name}-node-2": "node-2",
        }
        assert all(each["status"]["containerStatuses"][0]["ready"] for each in pods(label).values())
    before = pods("kube-proxy")["kube-proxy-node-1"]["metadata"]["uid"]
    cluster.kubectl("delete", "pod", "-n", "kube-system", "kube-proxy-node-1", "--timeout=60s")
    found = eventually(lambda: pods("kube-proxy").get("kube-proxy-node-1"))
    assert found["metadata"]["uid"] != before and found["status"]["phase"] == "Running"
    texts = {name: cluster.get("cm", "-n", "kube-system", name)["data"] for name in ("kube-proxy-config", "coredns")}
    assert "mode: nftables" in texts["kube-proxy-config"]["config"] and "cluster.local" in texts["coredns"]["Corefile"]


def test_system_endpoints_and_objects_of_namespaces(cluster):
    api = cluster.get("endpoints", "kubernetes")
    assert api["metadata"]["labels"] == {"endpointslice.kubernetes.io/skip-mirror": "true"}
    assert len(cluster.get("endpointslices", "-l", "kubernetes.io/service-name=kubernetes")["items"]) == 1
    addresses = cluster.get("endpoints", "-n", "kube-system", "kube-dns")["subsets"][0]["addresses"]
    assert [each["nodeName"] for each in addresses] == ["node-1", "node-2"]
    cluster.kubectl("create", "namespace", "shop")
    eventually(lambda: "default" in cluster.kubectl("get", "sa", "-n", "shop", "-o", "name"))
    certificate = eventually(lambda: cluster.get("cm", "-n", "shop")["items"])[0]["data"]["ca.crt"]
    assert certificate.startswith("-----BEGIN CERTIFICATE-----")
