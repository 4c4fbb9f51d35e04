"""Containers of a lab from their start to their end: hooks, sidecars, probes during termination, shared processes, tokens."""

import pytest
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
