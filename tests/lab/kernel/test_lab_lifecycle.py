"""Containers of a lab from their start to their end: hooks, sidecars, probes during termination, shared processes, tokens."""

import base64
import json

import pytest
from tests.lab.api import kubectls
from tests.lab.kernel.lab_cluster import eventually, running

pytestmark = pytest.mark.kernel

PODS = """\
apiVersion: v1
kind: Pod
metadata: {name: hooks, labels: {app: hooks}}
spec:
  terminationGracePeriodSeconds: 60
  containers:
  - name: c
    image: /bin/sh
    args: ["-c", "trap 'echo term; exit 0' TERM; touch /tmp/well; while :; do sleep 0.1; done"]
    readinessProbe: {exec: {command: [cat, /tmp/well]}, periodSeconds: 1, failureThreshold: 1}
    lifecycle:
      postStart: {exec: {command: [sh, -c, "echo started > /proc/1/fd/1"]}}
      preStop: {exec: {command: [sh, -c, "echo stopping > /proc/1/fd/1; rm /tmp/well; while [ ! -e /tmp/go ]; do sleep 0.1; done"]}}
---
apiVersion: v1
kind: Pod
metadata: {name: beside}
spec:
  restartPolicy: Never
  initContainers:
  - {name: first, image: /bin/sh, args: ["-c", "echo first"]}
  - name: mesh
    image: /bin/sh
    restartPolicy: Always
    args: ["-c", "trap 'echo over; exit 0' TERM; sleep 0.3; touch /tmp/up; echo up; while :; do sleep 0.1; done"]
    startupProbe: {exec: {command: [cat, /tmp/up]}, periodSeconds: 1, failureThreshold: 60}
  - {name: last, image: /bin/sh, args: ["-c", "echo last"]}
  containers:
  - {name: c, image: /bin/sh, args: ["-c", "trap 'echo bye; exit 0' TERM; echo main; while :; do sleep 0.1; done"]}
---
apiVersion: v1
kind: Pod
metadata: {name: shared}
spec:
  shareProcessNamespace: true
  terminationGracePeriodSeconds: 0
  volumes: [{name: token, projected: {sources: [{serviceAccountToken: {path: vault, audience: vault}}]}}]
  containers:
  - {name: a, image: /bin/sleep, args: ["1001"]}
  - {name: b, image: "docker.io/library/busybox:1", args: [sleep, "1002"], volumeMounts: [{name: token, mountPath: /mine}]}
---
apiVersion: v1
kind: Pod
metadata: {name: refused}
spec:
  containers:
  - {name: c, image: echo, ports: [{containerPort: 80}], lifecycle: {postStart: {httpGet: {port: 81}}}}
"""


@pytest.fixture(scope="module")
def cluster():
    with running("lifecycle", "--nodes", "1") as made:
        made.kubectl("apply", "-f", "-", stdin=PODS)
        yield made


def lines(cluster, pod, *containers):
    """Who wrote which line, in the order of their times."""
    found = [
        (line.split(" ", 1)[0], container, line.split(" ", 1)[1])
        for container in containers
        for line in cluster.kubectl("logs", pod, "-c", container, "--timestamps").splitlines()
    ]
    return [(container, text) for _, container, text in sorted(found)]


def ready(cluster, pod):
    conditions = cluster.get("pod", pod)["status"].get("conditions") or ()
    return next((each["status"] for each in conditions if each["type"] == "Ready"), "")


def test_hooks_run_and_readiness_is_checked_until_the_end(cluster):
    cluster.kubectl("wait", "--for=condition=Ready", "pod/hooks", "--timeout=60s")
    cluster.kubectl("delete", "pod", "hooks", "--wait=false")
    eventually(lambda: ready(cluster, "hooks") == "False", "the end of readiness")
    assert lines(cluster, "hooks", "c") == [("c", "started"), ("c", "stopping")]
    log = cluster.log("hooks")
    cluster.kubectl("exec", "hooks", "--", "touch", "/tmp/go", program=cluster.newest)
    assert log() == "started\nstopping\nterm\n"
    cluster.kubectl("wait", "--for=delete", "pod/hooks", "--timeout=60s", program=cluster.newest)


def test_sidecars_start_in_order_and_end_last(cluster):
    cluster.kubectl("wait", "--for=condition=Ready", "pod/beside", "--timeout=60s")
    assert "2/2" in cluster.kubectl("get", "pod", "beside", "--no-headers")
    eventually(lambda: len(lines(cluster, "beside", "first", "mesh", "last", "c")) == 4, "four lines")
    order = [("first", "first"), ("mesh", "up"), ("last", "last"), ("c", "main")]
    assert lines(cluster, "beside", "first", "mesh", "last", "c") == order
    # The end of the main container is that of the sidecar; the pod has done its work.
    cluster.kubectl("exec", "beside", "-c", "c", "--", "kill", "1", program=cluster.newest)
    eventually(lambda: ("mesh", "over") in lines(cluster, "beside", "mesh"), "the sidecar's end")
    assert lines(cluster, "beside", "mesh", "c")[-2:] == [("c", "bye"), ("mesh", "over")]
    assert eventually(lambda: cluster.get("pod", "beside")["status"]["phase"] == "Succeeded")


def test_a_failed_post_start_hook_restarts_the_container(cluster):
    def events():
        return cluster.kubectl("get", "events", "--field-selector=reason=FailedPostStartHook", "-o", "name")

    eventually(events, "the Event of the hook")
    eventually(lambda: cluster.get("pod", "refused")["status"]["containerStatuses"][0]["restartCount"], "a restart")


def test_containers_share_their_processes(cluster):
    cluster.kubectl("wait", "--for=condition=Ready", "pod/shared", "--timeout=60s")
    listed = cluster.kubectl("exec", "shared", "-c", "b", "--", "ps", program=cluster.newest)
    assert "sleep 1001" in listed and "sleep 1002" in listed
    # A program that ends is started again in the same namespace.
    cluster.kubectl("exec", "shared", "-c", "b", "--", "pkill", "-9", "-f", "^/bin/sleep", program=cluster.newest)
    eventually(lambda: cluster.get("pod", "shared")["status"]["containerStatuses"][0]["restartCount"] == 1, "a restart")
    eventually(lambda: "sleep 1001" in cluster.kubectl("exec", "shared", "-c", "b", "--", "ps", program=cluster.newest))


def test_a_pod_has_the_tokens_that_it_asks_for(cluster):
    cluster.kubectl("wait", "--for=condition=Ready", "pod/shared", "--timeout=60s")
    token = cluster.kubectl("exec", "shared", "-c", "b", "--", "cat", "/mine/vault", program=cluster.newest)
    claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    assert (claims["aud"], claims["sub"]) == (["vault"], "system:serviceaccount:default:default")
    assert claims["kubernetes.io"]["pod"]["name"] == "shared"
    issued = cluster.kubectl("create", "token", "default", program=cluster.newest).strip()
    config = cluster.kubectl("config", "view", "--raw", "-o", "json")
    server = json.loads(config)["clusters"][0]["cluster"]["server"]
    words = ("--kubeconfig=/dev/null", f"--server={server}", "--insecure-skip-tls-verify", f"--token={issued}")
    assert "shared" in cluster.kubectl(*words, "get", "pods", "-n", "default")
    cluster.kubectl(*words[:-1], f"--token={issued}x", "get", "pods", status=1)


def test_commands_run_in_the_pods_that_a_node_has(cluster):
    words = ("-n", "kube-system", "exec", "kube-proxy-node-1", "--", "sh", "-c")
    script = "hostname; nft list tables; cat /var/lib/kube-proxy-config/config"
    found = cluster.kubectl(*words, script, program=cluster.newest)
    assert found.startswith("node-1\n") and "table ip narthex\n" in found and "mode: nftables" in found


@pytest.mark.parametrize("version", [kubectls.DEBIAN, kubectls.NEW])
def test_the_output_of_a_fast_command_is_shown_once(cluster, version):
    program = str(kubectls.kubectl(version))
    for number in range(3):
        name = f"fast-{version.replace('.', '-')}-{number}"
        words = ("run", "-i", "--rm", name, "--image=busybox:1.36", "--restart=Never", "--", "echo", "quick", "words")
        assert cluster.kubectl(*words, program=program, stdin="").count("quick words\n") == 1
