"""Pods of a lab as kubelets keep them: programs of the machine, probes, logs, restarts, their end."""

import json
import subprocess
from pathlib import Path

import pytest
from tests.lab.kernel.lab_cluster import CONTROL_PLANES
from tests.lab.kernel.test_lab import ENVIRONMENT, command, fresh_name, narthex, running

from narthex.lab.program import labs
from narthex.lab.program.state import StateDirectory
from narthex.testing.load import until

pytestmark = pytest.mark.kernel

PODS = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: words}
data: {greeting: hello}
---
apiVersion: v1
kind: Pod
metadata: {name: serve, labels: {app: serve}}
spec:
  terminationGracePeriodSeconds: 1
  volumes: [{name: words, configMap: {name: words}}, {name: scratch, emptyDir: {}}]
  containers:
    - name: main
      image: /bin/sh
      args:
        - -c
        - >-
          echo $(WORD) $(POD_IP) $(NODE) '$$(WORD)' $PROG_SERVICE_PORT;
          cat /tmp/words/greeting; echo; touch /tmp/scratch/well /tmp/scratch/ready;
          trap 'echo told to end' TERM; while :; do sleep 0.1; done
      volumeMounts: [{name: words, mountPath: /tmp/words}, {name: scratch, mountPath: /tmp/scratch}]
      env:
        - {name: WORD, valueFrom: {configMapKeyRef: {name: words, key: greeting}}}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
      readinessProbe: {exec: {command: [cat, /tmp/scratch/ready]}, periodSeconds: 1, failureThreshold: 1}
      livenessProbe: {exec: {command: [cat, /tmp/scratch/well]}, periodSeconds: 1, failureThreshold: 2, initialDelaySeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: prog}
spec: {selector: {app: serve}, clusterIP: 10.96.0.77, ports: [{port: 80, targetPort: 8000}]}
---
apiVersion: v1
kind: Pod
metadata: {name: job}
spec:
  restartPolicy: Never
  initContainers: [{name: first, image: /bin/sh, args: ["-c", "echo prepared"]}]
  containers: [{name: c, image: /bin/sh, args: ["-c", "echo done; exit 3"]}]
---
apiVersion: v1
kind: Pod
metadata: {name: crash}
spec: {containers: [{name: c, image: /bin/sh, args: ["-c", "echo bye $$$$; exit 4"]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: nothing}
spec: {containers: [{name: c, image: /no/such/program}]}
---
apiVersion: v1
kind: Pod
metadata: {name: answers}
spec:
  containers:
    - name: c
      image: shop/answers:1.0
      ports: [{name: http, containerPort: 8080}]
      readinessProbe: {httpGet: {port: http}, periodSeconds: 1}
---
apiVersion: v1
kind: Pod
metadata: {name: deaf}
spec:
  containers:
    - {name: c, image: shop/deaf:1.0, ports: [{containerPort: 8080}], readinessProbe: {tcpSocket: {port: 8081}, periodSeconds: 1}}
---
apiVersion: v1
kind: Pod
metadata: {name: late}
spec:
  containers:
    - name: c
      image: /bin/sh
      resources: {limits: {ephemeral-storage: 1Gi}}
      args: ["-c", "sleep 1; touch /tmp/ready; exec sleep 1000"]
      readinessProbe: {exec: {command: [cat, /tmp/ready]}, periodSeconds: 3600}
---
apiVersion: v1
kind: Pod
metadata: {name: writes}
spec:
  containers:
    - name: c
      image: /bin/sh
      resources: {limits: {ephemeral-storage: 2Mi}}
      args: ["-c", "head -c 4194304 /dev/zero > /file; exec sleep 1000"]
"""


@pytest.fixture(scope="module", params=CONTROL_PLANES)
def lab(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pods")
    (directory / "pods.yaml").write_text(PODS)
    with running(fresh_name("pods"), directory, "--nodes", "1", *CONTROL_PLANES[request.param]) as found:
        yield found.name


def kubectl(lab, *words, status=0):
    argv = command("kubectl", "--name", lab, *words)
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def pod(lab, name):
    return json.loads(kubectl(lab, "get", "pod", name, "-o", "json"))


def state(lab, name, which="state"):
    (container,) = pod(lab, name)["status"]["containerStatuses"]
    return container[which]


def ready(lab, name):
    conditions = pod(lab, name)["status"]["conditions"]
    return next(each["status"] for each in conditions if each["type"] == "Ready") == "True"


def inside(lab, *argv):
    return narthex("exec", "--name", lab, "serve", "--", *argv)


def endpoints(lab):
    slices = json.loads(kubectl(lab, "get", "endpointslices", "-l", "kubernetes.io/service-name=prog", "-o", "json"))
    return [endpoint["conditions"]["ready"] for each in slices["items"] for endpoint in each["endpoints"]]


def test_a_program_has_its_environment_its_volumes_and_a_log(lab):
    until(lambda: ready(lab, "serve"), "a ready pod")
    address = pod(lab, "serve")["status"]["podIP"]
    assert kubectl(lab, "logs", "serve").splitlines() == [f"hello {address} node-1 $(WORD) 80", "hello"]
    assert kubectl(lab, "logs", "serve", "--tail=1").strip() == "hello"
    assert kubectl(lab, "logs", "serve", "--timestamps", "--tail=1").split()[0].endswith("Z")


def test_a_volume_follows_its_config_map(lab):
    until(lambda: ready(lab, "serve"), "a ready pod")
    kubectl(lab, "patch", "configmap", "words", "-p", '{"data":{"greeting":"hi","farewell":"bye"}}')
    until(lambda: inside(lab, "sh", "-c", "cat /tmp/words/*") == "byehi", "the new words")
    kubectl(lab, "patch", "configmap", "words", "-p", '{"data":{"greeting":"hello","farewell":null}}')
    until(lambda: inside(lab, "sh", "-c", "cat /tmp/words/*") == "hello", "the old words")
    assert inside(lab, "ls", "-A", "/tmp/words").split() == ["greeting"]


def test_exec_is_beside_the_program(lab):
    assert inside(lab, "hostname").strip() == "serve"
    assert inside(lab, "ls", "/tmp").split() == ["scratch", "words"]
    assert inside(lab, "sh", "-c", "tr '\\0' ' ' < /proc/1/cmdline").startswith("/bin/sh -c echo")
    assert "serve" in inside(lab, "cat", "/etc/hosts")
    mine = inside(lab, "cat", "/run/secrets/kubernetes.io/serviceaccount/token")
    # The lab's own API server has one token, the official one a token for each pod.
    official = bool(labs.read(lab).control_plane)
    assert mine.count(".") == 2 if official else mine == StateDirectory(lab).token.read_text()
    narthex("exec", "--name", lab, "serve", "--", "sh", "-c", "exit 9", status=9)
    assert "no such program" in narthex("exec", "--name", lab, "serve", "--", "no-such-program", status=1)


def test_kubectl_exec_runs_beside_a_program_and_where_none_is(lab):
    assert kubectl(lab, "exec", "serve", "--", "hostname") == "serve\n"
    until(lambda: ready(lab, "answers"), "a ready pod")
    assert "answers" in kubectl(lab, "exec", "answers", "--", "sh", "-c", "hostname; cat /etc/hosts; exit 7", status=7)


def test_a_pod_calls_the_api(lab):
    if labs.read(lab).control_plane:
        kubectl(lab, "create", "rolebinding", "readers", "--clusterrole=view", "--serviceaccount=default:default")
    place = "/run/secrets/kubernetes.io/serviceaccount"
    script = (
        f'curl -s --cacert {place}/ca.crt -H "Authorization: Bearer $(cat {place}/token)" '
        "https://10.96.0.1/api/v1/namespaces/default/pods/serve"
    )
    told = json.loads(inside(lab, "sh", "-c", script))
    assert told["metadata"]["name"] == "serve"
    refused = json.loads(inside(lab, "curl", "-s", "--cacert", f"{place}/ca.crt", "https://10.96.0.1/api/v1/pods"))
    assert refused["code"] == 401


def test_readiness_takes_the_endpoint_out_and_back_in(lab):
    until(lambda: endpoints(lab) == [True], "an endpoint")
    inside(lab, "rm", "/tmp/scratch/ready")
    until(lambda: endpoints(lab) == [False], "an endpoint that is not ready")
    assert not ready(lab, "serve")
    inside(lab, "touch", "/tmp/scratch/ready")
    until(lambda: endpoints(lab) == [True], "the endpoint again")


def test_a_readiness_probe_that_came_too_early_is_repeated_long_before_its_period_ends(lab):
    until(lambda: ready(lab, "late"), "a ready pod")


def test_liveness_restarts(lab):
    before = state(lab, "serve", "restartCount")
    inside(lab, "rm", "/tmp/scratch/well")
    until(lambda: state(lab, "serve", "restartCount") > before, "a restart")
    until(lambda: ready(lab, "serve"), "a ready pod")
    assert "told to end" in kubectl(lab, "logs", "serve", "--previous")
    assert "failed liveness probe, will be restarted" in kubectl(lab, "describe", "pod", "serve")


def test_a_pod_that_has_done_its_work(lab):
    until(lambda: pod(lab, "job")["status"]["phase"] == "Failed", "the end")
    assert state(lab, "job")["terminated"]["exitCode"] == 3
    assert kubectl(lab, "logs", "job", "-c", "first") == "prepared\n"
    assert kubectl(lab, "logs", "job", "-c", "c") == "done\n"


def test_a_container_that_crashes_is_started_again_with_pauses(lab):
    until(lambda: "CrashLoopBackOff" in kubectl(lab, "get", "pod", "crash"), "a pause")
    assert state(lab, "crash", "lastState")["terminated"]["exitCode"] == 4
    assert "Back-off 10s restarting failed container=c" in kubectl(lab, "describe", "pod", "crash")
    assert kubectl(lab, "logs", "crash", "--previous") == "bye 1\n"


def test_a_program_that_is_not_there_is_said(lab):
    until(lambda: "ErrImagePull" in kubectl(lab, "get", "pod", "nothing"), "the reason")
    assert "/no/such/program is not a program on this machine" in narthex("status", "--name", lab)


def test_probes_are_really_run_against_the_echo_server(lab):
    until(lambda: ready(lab, "answers"), "a ready pod")
    until(lambda: "Unhealthy" in kubectl(lab, "describe", "pod", "deaf"), "a failed probe")
    said = kubectl(lab, "describe", "pod", "deaf")
    assert "Readiness probe failed: dial tcp" in said and "connect: connection refused" in said
    assert not ready(lab, "deaf")
    assert "TCP request from" in kubectl(lab, "logs", "answers")


def test_its_end_is_a_signal_and_nothing_is_left(lab):
    uid = pod(lab, "serve")["metadata"]["uid"]
    place = StateDirectory(lab).pods / uid
    assert place.is_dir()
    following = subprocess.Popen(
        command("kubectl", "--name", lab, "logs", "-f", "serve"), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    kubectl(lab, "delete", "pod", "serve", "--timeout=50s")
    assert "told to end" in following.communicate(timeout=60)[0]
    until(lambda: not place.exists(), "the end of its files")
    assert not any(each.name == "serve" for each in labs.settle(lab).pods)
    assert not [line for line in Path("/proc/self/mounts").read_text().splitlines() if uid in line]


def test_a_pod_that_writes_more_than_its_limit_is_evicted(lab):
    def found():
        return pod(lab, "writes")["status"]

    until(lambda: found()["phase"] == "Failed" and state(lab, "writes").get("terminated"), "the eviction")
    assert found()["reason"] == "Evicted" and "2Mi" in found()["message"]
    assert found()["containerStatuses"][0]["restartCount"] == 0
    assert pod(lab, "late")["status"]["phase"] == "Running"
