"""DaemonSets, StatefulSets, Jobs, CronJobs, and Ingresses in a lab, with kubectl."""

import json
import subprocess

import pytest
from tests.lab.kernel.lab_cluster import CONTROL_PLANES, eventually, running

from narthex.lab.server import certificate
from narthex.lab.topology import INGRESS_ADDRESSES, outside_namespace
from narthex.linux.namespaces import in_namespace

pytestmark = pytest.mark.kernel

SERVER = {"name": "server", "image": "web:1", "ports": [{"containerPort": 8080}]}
PATIENCE = "--timeout=120s"


@pytest.fixture(scope="module", params=CONTROL_PLANES)
def cluster(request):
    with running("w", *CONTROL_PLANES[request.param]) as made:
        yield made


@pytest.fixture
def kubectl(cluster):
    def call(*words, **more):
        return cluster.kubectl(*words, program=cluster.newest, **more)

    call.get, call.lab = cluster.get, cluster.name
    return call


def apply(kubectl, version, kind, name, notes=None, **spec):
    metadata = {"name": name, "annotations": notes or {}}
    made = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
    # A busy kube-apiserver has its schema late.
    kubectl("apply", "--validate=false", "-f", "-", stdin=json.dumps(made))


def selected(app):
    """A selector, and a template that it selects."""
    pod = {"terminationGracePeriodSeconds": 1, "containers": [SERVER]}
    template = {"metadata": {"labels": {"app": app}}, "spec": pod}
    return {"selector": {"matchLabels": {"app": app}}, "template": template}


def program(script, restart="Never"):
    """A template of pods that run a script."""
    mount = {"name": "data", "mountPath": "/data"}
    main = {"name": "main", "image": "sh", "command": ["sh", "-c", script], "volumeMounts": [mount]}
    volumes = [{"name": "data", "emptyDir": {}}]
    return {"spec": {"restartPolicy": restart, "containers": [main], "volumes": volumes}}


def pods(kubectl, selector):
    return {each["metadata"]["name"]: each for each in kubectl.get("pods", "-l", selector)["items"]}


def images(kubectl, selector):
    found = pods(kubectl, selector).values()
    return sorted((each["spec"]["nodeName"], each["spec"]["containers"][0]["image"]) for each in found)


def test_a_daemon_set_has_a_pod_on_each_node(kubectl):
    apply(kubectl, "apps/v1", "DaemonSet", "agent", **selected("agent"))
    assert "successfully rolled out" in kubectl("rollout", "status", "ds/agent", PATIENCE)
    assert images(kubectl, "app=agent") == [("node-1", "web:1"), ("node-2", "web:1")]
    kubectl("set", "image", "ds/agent", "server=web:2")
    kubectl("rollout", "status", "ds/agent", PATIENCE)
    kubectl("rollout", "undo", "ds/agent")
    kubectl("rollout", "status", "ds/agent", PATIENCE)
    eventually(lambda: images(kubectl, "app=agent") == [("node-1", "web:1"), ("node-2", "web:1")])
    assert kubectl("get", "ds", "agent", "--no-headers").split()[1:6] == ["2"] * 5
    kubectl("delete", "ds", "agent")
    eventually(lambda: not pods(kubectl, "app=agent"))


def test_pods_of_a_stateful_set_have_names_in_dns(kubectl):
    apply(kubectl, "v1", "Service", "db", clusterIP="None", selector={"app": "db"}, ports=[{"port": 8080}])
    apply(kubectl, "apps/v1", "StatefulSet", "db", serviceName="db", replicas=2, **selected("db"))
    kubectl("rollout", "status", "sts/db", PATIENCE)
    kubectl("scale", "sts/db", "--replicas=3")
    kubectl("rollout", "status", "sts/db", PATIENCE)
    found = pods(kubectl, "app=db")
    assert sorted(found) == ["db-0", "db-1", "db-2"]

    def answer():
        return kubectl("exec", "db-0", "--", "sh", "-c", "getent ahostsv4 db-2.db || true").split()[:1]

    eventually(lambda: answer() == [found["db-2"]["status"]["podIP"]], "db-2.db in DNS")
    assert kubectl("exec", "db-1", "--", "hostname").strip() == "db-1"
    kubectl("set", "image", "sts/db", "server=web:2")
    assert "3 new pods have been updated" in kubectl("rollout", "status", "sts/db", PATIENCE)
    assert kubectl("get", "sts", "db", "--no-headers").split()[:2] == ["db", "3/3"]


def test_jobs_complete_restart_and_fail(kubectl):
    apply(kubectl, "batch/v1", "Job", "work", completions=2, template=program("echo from $HOSTNAME"))
    # The container fails once, then succeeds in the same pod.
    script = "test -e /data/x || { touch /data/x; exit 1; }"
    apply(kubectl, "batch/v1", "Job", "again", template=program(script, "OnFailure"))
    apply(kubectl, "batch/v1", "Job", "fails", backoffLimit=0, template=program("exit 3"))
    kubectl("wait", "--for=condition=complete", "job/work", "job/again", PATIENCE)
    kubectl("wait", "--for=condition=failed", "job/fails", PATIENCE)
    names = pods(kubectl, "job-name=work")
    assert {each["status"]["phase"] for each in names.values()} == {"Succeeded"}
    assert {kubectl("logs", name).strip() for name in names} == {f"from {name}" for name in names}
    (pod,) = pods(kubectl, "job-name=again").values()
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 1
    status = kubectl.get("job", "fails")["status"]
    assert (status["failed"], status["conditions"][-1]["reason"]) == (1, "BackoffLimitExceeded")
    kubectl("delete", "job", "work", "again", "fails")
    eventually(lambda: not pods(kubectl, "job-name in (work,again,fails)"))


def test_a_cron_job_starts_jobs(kubectl):
    template = {"spec": {"template": program("true")}}
    apply(kubectl, "batch/v1", "CronJob", "tick", schedule="0 0 1 1 *", jobTemplate=template)
    kubectl("create", "job", "by-hand", "--from=cronjob/tick")
    kubectl("wait", "--for=condition=complete", "job/by-hand", PATIENCE)
    kubectl("patch", "cj", "tick", "--type=merge", "-p", '{"spec": {"schedule": "@every 1s"}}')
    eventually(lambda: kubectl.get("cj", "tick")["status"].get("lastSuccessfulTime"))
    kubectl("delete", "cj", "tick")
    eventually(lambda: not kubectl.get("jobs")["items"])


def test_an_ingress_leads_to_pods_and_node_ports(kubectl, tmp_path):
    for name, type in (("web", "NodePort"), ("api", "ClusterIP")):
        apply(kubectl, "apps/v1", "Deployment", name, replicas=2, **selected(name))
        apply(
            kubectl, "v1", "Service", name, type=type, selector={"app": name}, ports=[{"port": 80, "targetPort": 8080}]
        )
    made = certificate.make(["shop.example"])
    (tmp_path / "tls.crt").write_text(made.certificate)
    (tmp_path / "tls.key").write_text(made.key)
    for name, path, sort in (("web", "/", "instance"), ("api", "/api", "ip")):
        backend = {"service": {"name": name, "port": {"number": 80}}}
        paths = [{"path": path, "pathType": "Prefix", "backend": backend}]
        tls = [{"hosts": ["shop.example"], "secretName": "shop-tls"}]
        rules = [{"host": "shop.example", "http": {"paths": paths}}]
        notes = {"alb.ingress.kubernetes.io/target-type": sort}
        apply(kubectl, "networking.k8s.io/v1", "Ingress", name, notes, rules=rules, tls=tls)
    assert "there is no Secret default/shop-tls" in eventually(lambda: kubectl("events", "--for", "ingress/web"))
    files = (f"--cert={tmp_path / 'tls.crt'}", f"--key={tmp_path / 'tls.key'}")
    kubectl("create", "secret", "tls", "shop-tls", *files)
    for name in ("web", "api"):
        kubectl("rollout", "status", f"deployment/{name}", PATIENCE)
    ports = eventually(lambda: kubectl("get", "ing", "web", "--no-headers").split()[3].split(","))
    assert ports == list(INGRESS_ADDRESSES)

    def answer(url, *more):
        words = ["curl", "-sS", "-m", "20", "--cacert", str(tmp_path / "tls.crt"), *more, url]
        words += [word for port in (80, 443) for word in ("--resolve", f"shop.example:{port}:{INGRESS_ADDRESSES[0]}")]
        with in_namespace(outside_namespace(kubectl.lab)):
            return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout

    eventually(lambda: "web-" in answer("http://shop.example/"), "the node port")
    eventually(lambda: "api-" in answer("http://shop.example/api/x"), "the pods")
    assert "web-" in answer("https://shop.example/apix"), "TLS with the Secret's certificate"
    # Pods see their own node.
    assert "asked by 10.244." in answer("http://shop.example/api")
    assert " 404 " in answer(f"http://{INGRESS_ADDRESSES[0]}/", "-i")
    kubectl("scale", "deployment/api", "--replicas=0")
    eventually(lambda: " 503 " in answer("http://shop.example/api", "-i"), "a backend without pods")
