"""kubectl against a lab, the distribution's and the newest: what people do with Deployments and Services every day."""

import json
import re
import subprocess

import pytest
import yaml
from tests.lab.kernel.lab_cluster import CONTROL_PLANES, eventually, kubectls, running

pytestmark = pytest.mark.kernel

DEPLOYMENT = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, labels: {app: web}}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - name: server
          image: web:1
          ports: [{name: http, containerPort: 8080}]
          readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
"""
SERVICE = """\
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: http}]
"""


@pytest.fixture(scope="module", params=CONTROL_PLANES)
def cluster(request):
    with running("k", *CONTROL_PLANES[request.param]) as made:
        yield made


@pytest.fixture(params=["old", "new"])
def kubectl(request, cluster):
    """kubectl of one version, with a namespace of its own for the test."""
    program = kubectls()[request.param == "new"]
    space = f"try-{request.param}"
    cluster.kubectl("create", "namespace", space, program=program)

    def call(*words, **more):
        return cluster.kubectl("-n", space, *words, program=program, **more)

    call.program, call.space = program, space
    yield call
    cluster.kubectl("delete", "namespace", space, program=program)


def begin(kubectl):
    assert kubectl("apply", "-f", "-", stdin=f"{DEPLOYMENT}---\n{SERVICE}").splitlines() == [
        "deployment.apps/web created",
        "service/web created",
    ]
    assert "successfully rolled out" in kubectl("rollout", "status", "deployment/web", "--timeout=120s")


def test_a_day_with_kubectl(kubectl):
    begin(kubectl)

    # Applied again: nothing to do; with a change: that change.
    assert "unchanged" in kubectl("apply", "-f", "-", stdin=SERVICE)
    assert "configured" in kubectl(
        "apply", "-f", "-", stdin=SERVICE.replace("{app: web}", "{app: web}\n  sessionAffinity: ClientIP")
    )
    assert kubectl("get", "svc", "web", "-o", "jsonpath={.spec.sessionAffinity}") == "ClientIP"

    # Tables, as the server makes them.
    head, *rows = kubectl("get", "pods", "-o", "wide").splitlines()
    assert head.split()[:7] == ["NAME", "READY", "STATUS", "RESTARTS", "AGE", "IP", "NODE"]
    assert all(re.match(r"web-\w+-\w+ +1/1 +Running +0 +\S+ +10\.244\.\d+\.\d+ +node-\d ", row) for row in rows)
    assert len(rows) == 2
    assert re.search(
        r"^web +2/2 +2 +2 +\S+ +server +web:1 +app=web$", kubectl("get", "deploy", "-o", "wide"), re.MULTILINE
    )
    assert re.search(r"^web +NodePort +10\.96\.\S+ +<none> +80:\d+/TCP ", kubectl("get", "svc"), re.MULTILINE)
    assert re.search(
        r"^web-\w+ +IPv4 +8080 +10\.244\.\S+,10\.244\.\S+ ", kubectl("get", "endpointslices"), re.MULTILINE
    )
    assert "node-1" in kubectl("get", "nodes")

    # As data, by selectors.
    listed = json.loads(
        kubectl("get", "pods", "-l", "app=web", "--field-selector", "status.phase=Running", "-o", "json")
    )
    names = {item["metadata"]["name"] for item in listed["items"]}
    assert len(names) == 2
    one = yaml.safe_load(kubectl("get", "pod", min(names), "-o", "yaml"))
    assert one["status"]["phase"] == "Running"

    # In words.
    told = kubectl("describe", "service", "web")
    assert re.search(r"^Endpoints: +10\.244\.\d+\.\d+:8080", told, re.MULTILINE)
    told = kubectl("describe", "deployment", "web")
    assert "ScalingReplicaSet" in told
    assert re.search(r"2 desired \| 2 updated \| 2 total \| 2 available", told)
    told = kubectl("describe", "pod", min(names))
    assert "Started" in told
    assert re.search(r"^IP: +10\.244\.", told, re.MULTILINE)

    # Labels, annotations, and the three kinds of patches.
    kubectl("label", "deployment", "web", "team=shop")
    kubectl("annotate", "deployment", "web", "note=hello")
    kubectl("patch", "deployment", "web", "-p", '{"spec": {"minReadySeconds": 1}}')
    kubectl("patch", "deployment", "web", "--type=merge", "-p", '{"metadata": {"labels": {"team": null}}}')
    kubectl(
        "patch",
        "deployment",
        "web",
        "--type=json",
        "-p",
        '[{"op": "replace", "path": "/spec/minReadySeconds", "value": 0}]',
    )
    found = json.loads(kubectl("get", "deployment", "web", "-o", "json"))
    assert (found["metadata"]["labels"], found["metadata"]["annotations"]["note"]) == ({"app": "web"}, "hello")
    assert found["spec"].get("minReadySeconds", 0) == 0

    # What the server has to complain about, in its words.
    assert 'pods "nobody" not found' in kubectl("get", "pod", "nobody", status=1)
    wrong = SERVICE.replace("port: 80,", "port: 70000,").replace("name: web}", "name: wrong}")
    assert "spec.ports[0].port: Invalid value: 70000" in kubectl("apply", "-f", "-", stdin=wrong, status=1)
    assert "may not change once set" in kubectl(
        "patch", "svc", "web", "--type=merge", "-p", '{"spec": {"clusterIP": "10.96.77.77"}}', status=1
    )
    kubectl("delete", "service", "web")
    assert "web" not in kubectl("get", "svc")


def test_scale_watch_update_undo(kubectl, cluster):
    begin(kubectl)
    watch = subprocess.Popen(
        [kubectl.program, "-n", kubectl.space, "get", "pods", "-w", "--no-headers"],
        env=cluster.environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        first = [watch.stdout.readline() for _ in range(2)]
        assert all(" Running " in line for line in first)
        kubectl("scale", "deployment/web", "--replicas=3")
        seen = []
        while not seen or not re.search(r" 1/1 +Running ", seen[-1]):
            seen.append(watch.stdout.readline())
        assert re.search(r" 0/1 +Pending ", seen[0])
        assert seen[-1].split()[0] not in {line.split()[0] for line in first}
    finally:
        watch.kill()
        watch.wait()
        watch.stdout.close()
    kubectl("set", "image", "deployment/web", "server=web:2")
    assert "successfully rolled out" in kubectl("rollout", "status", "deployment/web", "--timeout=120s")
    assert re.findall(r"^(\d+) ", kubectl("rollout", "history", "deployment/web"), re.MULTILINE) == ["1", "2"]
    kubectl("rollout", "undo", "deployment/web")
    assert "successfully rolled out" in kubectl("rollout", "status", "deployment/web", "--timeout=120s")
    assert kubectl("get", "deployment", "web", "-o", "jsonpath={.spec.template.spec.containers[0].image}") == "web:1"


def test_logs_and_exec(kubectl):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "talker"}, "spec": {
        "terminationGracePeriodSeconds": 0, "containers": [{
            "name": "shell", "image": "/bin/sh", "args": ["-c", "echo first; echo second; exec sleep 1000"]}]}}  # fmt: skip
    kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    kubectl("wait", "--for=condition=Ready", "pod/talker", "--timeout=120s")
    eventually(lambda: kubectl("logs", "talker") == "first\nsecond\n", "both lines")
    assert kubectl("logs", "talker", "--tail=1") == "second\n"
    assert kubectl("exec", "talker", "--", "hostname") == "talker\n"
    address = kubectl("get", "pod", "talker", "-o", "jsonpath={.status.podIP}")
    assert address in kubectl("exec", "talker", "--", "ip", "-brief", "address", "show", "eth0")
    assert kubectl("exec", "-i", "talker", "--", "cat", stdin="through and back\n") == "through and back\n"
    kubectl("exec", "talker", "--", "sh", "-c", "exit 7", status=7)
    kubectl("delete", "pod", "talker")
