"""A lab's pods as clients of the API reach them, their images, and the pods that each node has."""

import shutil
import socket
import stat
import subprocess

import pytest
from tests.lab.api import kubectls
from tests.lab.kernel.lab_cluster import CONTROL_PLANES, eventually, running

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


ECHO = """\
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec: {containers: [{name: c, image: "registry.example/web:1", ports: [{containerPort: 8080}]}]}
"""
LIMIT = 60


@pytest.fixture(params=[kubectls.DEBIAN, kubectls.NEW])
def kubectl(request, cluster):
    """Runs kubectl of one version: the first speaks SPDY, the second WebSockets."""

    def run(*words, stdin="", status=0):
        ends = {"capture_output": True, "text": True, "timeout": LIMIT, "check": False}
        done = subprocess.run([run.program, *words], env=cluster.environment, input=stdin, **ends)
        assert done.returncode == status, f"kubectl {words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    run.program, run.pod = str(kubectls.kubectl(request.param)), f"web-{request.param.replace('.', '-')}"
    cluster.kubectl("apply", "-f", "-", stdin=ECHO % run.pod)
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{run.pod}", "--timeout=60s")
    return run


@pytest.fixture(scope="module", params=CONTROL_PLANES)
def cluster(request, tmp_path_factory):
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
    shell = f"registry.example/shell={shutil.which('sh')}"
    options = ("--nodes", "2", "--image", f"registry.example/tool={image}", "--image", shell)
    with running("access", *options, *CONTROL_PLANES[request.param]) as made:
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
    assert "node-2" in cluster.kubectl("logs", "-n", "kube-system", "coredns-node-2")
    assert len(cluster.kubectl("logs", "-n", "kube-system", "kube-proxy-node-2", "--tail=1").splitlines()) == 1
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


def test_exec_in_both_protocols(kubectl):
    script = "cat; echo err >&2; exit 3"
    assert kubectl("exec", "-i", kubectl.pod, "--", "sh", "-c", script, stdin="in\n", status=3) == "in\n"
    assert len(kubectl("exec", kubectl.pod, "--", "sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x")) == 300000


def test_attach_reaches_the_input_of_a_container(kubectl):
    name = f"{kubectl.pod}-run"
    words = (
        "run",
        "-i",
        "--rm",
        name,
        "--image=registry.example/shell",
        "--restart=Never",
        "--",
        "-c",
        "read a; echo got $a",
    )
    assert kubectl(*words, stdin="word\n").splitlines()[0] == "got word"


def test_ports_are_forwarded(kubectl, cluster):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [kubectl.program, "port-forward", kubectl.pod, f"{port}:8080", "--address=127.0.0.1"]
    with subprocess.Popen(words, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdout.readline().startswith(b"Forwarding from 127.0.0.1")
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", port), LIMIT) as client:
                    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    with client.makefile("rb") as answer:
                        assert f"{kubectl.pod} on node-" in answer.read().decode()
        finally:
            process.kill()


def test_the_proxy_subresource_reaches_pods(kubectl):
    assert kubectl("get", "--raw", f"/api/v1/namespaces/default/pods/{kubectl.pod}:8080/proxy/").startswith(kubectl.pod)


def test_the_log_files_of_a_node_come_through_its_kubelet(cluster):
    base = "/api/v1/nodes/node-1/proxy"
    assert cluster.kubectl("get", "--raw", f"{base}/healthz") == "ok"
    assert 'href="node-1.log"' in cluster.kubectl("get", "--raw", f"{base}/logs/")
    assert cluster.kubectl("get", "--raw", f"{base}/logs/node-1.log")


def test_an_ephemeral_container_starts_beside_the_others(cluster):
    cluster.kubectl("apply", "-f", "-", stdin=ECHO % "sick")
    cluster.kubectl("wait", "--for=condition=Ready", "pod/sick", "--timeout=60s")
    words = ("debug", "sick", "-c", "doctor", "--image=registry.example/shell", "--", "sh", "-c", "echo well; exit 5")
    cluster.kubectl(*words, program=cluster.newest)

    def ended():
        found = cluster.get("pod", "sick")["status"].get("ephemeralContainerStatuses") or [{}]
        return found[0].get("state", {}).get("terminated")

    assert eventually(ended)["exitCode"] == 5
    assert cluster.kubectl("logs", "sick", "-c", "doctor") == "well\n"
    assert cluster.get("pod", "sick")["status"]["phase"] == "Running"


def test_a_readiness_gate_opens_and_closes(cluster):
    gate = "example.com/open"
    cluster.kubectl(
        "apply",
        "-f",
        "-",
        stdin=(ECHO % "gated").replace("spec: {", f"spec: {{readinessGates: [{{conditionType: {gate}}}], "),
    )
    cluster.kubectl("wait", "--for=condition=ContainersReady", "pod/gated", "--timeout=60s")
    for state in ("True", "False"):
        patch = f'{{"status": {{"conditions": [{{"type": "{gate}", "status": "{state}"}}]}}}}'
        cluster.kubectl("patch", "pod", "gated", "--subresource=status", "-p", patch, program=cluster.newest)
        cluster.kubectl("wait", f"--for=condition=Ready={state}", "pod/gated", "--timeout=60s")
