"""What people type: kubectl of Debian and a new one, against the API alone (no controller runs, so nothing gets ready)."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.lab.api import kubectls

from .bare_server import bare

LIMIT = 120
WEB = """\
apiVersion: v1
kind: Service
metadata: {name: web, labels: {app: web}}
spec:
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers: [{name: web, image: echo, ports: [{containerPort: 8080}], resources: {limits: {cpu: "1"}}}]
"""
CRD = """\
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: shops.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: shops, kind: Shop, shortNames: [sh]}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}, scale: {specReplicasPath: .spec.tills, statusReplicasPath: .status.tills}}
    additionalPrinterColumns: [{name: Tills, type: integer, jsonPath: .spec.tills}]
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {tills: {type: integer}}}}}}
"""
SHOP = "apiVersion: example.com/v1\nkind: Shop\nmetadata: {name: corner}\nspec: {tills: 2}\n"


class Session:
    """One kubectl, and the server that it talks to."""

    def __init__(self, version, server, home):
        try:
            self.program = kubectls.kubectl(version)
        except kubectls.KubectlUnavailable as error:
            pytest.fail(f"kubectl {version} cannot be had, so that nothing is known of it: {error}")
        self.version, self.server, self.home = version, server, home

    def start(self, words):
        """Run it."""
        settings = {**os.environ, "KUBECONFIG": str(self.server.kubeconfig), "HOME": str(self.home)}
        ends = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE, "text": True}
        return subprocess.Popen([self.program, *words.split()], env=settings, **ends)

    def __call__(self, words, stdin="", code=0):
        """What it says; `code` is how it ends."""
        process = self.start(words)
        said, complained = process.communicate(stdin, timeout=LIMIT)
        assert process.returncode == code, f"kubectl {words}: {process.returncode}\n{said}\n{complained}"
        return said if code == 0 else said + complained

    def json(self, words):
        return json.loads(self(f"{words} -o json"))


@pytest.fixture(params=[kubectls.DEBIAN, kubectls.NEW])
def kubectl(request, tmp_path):
    with bare(tmp_path) as server:
        yield Session(request.param, server, tmp_path)


def columns(text):
    return [line.split() for line in text.strip().splitlines()]


def test_apply_get_change_and_delete(kubectl):
    assert kubectl("apply -f -", WEB) == "service/web created\ndeployment.apps/web created\n"
    assert kubectl("apply -f -", WEB) == "service/web unchanged\ndeployment.apps/web unchanged\n"
    assert kubectl("diff -f -", WEB) == ""
    changed = WEB.replace("port: 80,", "port: 81,").replace("image: echo", "image: other")
    kubectl("diff -f -", changed, code=1)
    assert kubectl("apply -f -", changed) == "service/web configured\ndeployment.apps/web configured\n"
    assert kubectl.json("get svc web")["spec"]["ports"] == [{"port": 81, "protocol": "TCP", "targetPort": 8080}]
    [header, row] = columns(kubectl("get svc -o wide"))
    assert header == ["NAME", "TYPE", "CLUSTER-IP", "EXTERNAL-IP", "PORT(S)", "AGE", "SELECTOR"]
    assert row[:2] + row[3:5] == ["web", "ClusterIP", "<none>", "81/TCP"] and row[2].startswith("10.96.")
    assert "deployment.apps/web" in kubectl("get all") and "image: other" in kubectl("get deploy web -o yaml")
    assert kubectl("scale deploy web --replicas=5") == "deployment.apps/web scaled\n"
    assert columns(kubectl("get deployments"))[1][:2] == ["web", "0/5"]
    kubectl("label svc web tier=front")
    kubectl("annotate svc web note=x")
    assert kubectl("get svc -l tier=front --field-selector metadata.name=web -o name") == "service/web\n"
    assert kubectl("get svc -l tier!=front,app -o name") == ""
    for way, patch in (
        ("strategic", {"spec": {"ports": [{"port": 81, "targetPort": 1}]}}),
        ("merge", {"metadata": {"labels": {"tier": None}}}),
        ("json", [{"op": "replace", "path": "/spec/ports/0/targetPort", "value": 2}]),
    ):
        kubectl(f"patch svc web --type={way} -p {json.dumps(patch, separators=(',', ':'))}")
    service = kubectl.json("get svc web")
    assert service["spec"]["ports"][0]["targetPort"] == 2 and service["metadata"]["labels"] == {"app": "web"}
    kubectl("set image deploy/web web=third")
    kubectl("rollout restart deploy/web")
    assert "third" in kubectl("get deploy -o custom-columns=I:.spec.template.spec.containers[0].image")
    assert "Selector:" in kubectl("describe svc web") and "web" in kubectl("describe deploy web")
    kubectl("delete -f -", WEB)
    assert kubectl("get svc,deploy -o name") == ""


def test_server_side_apply_and_its_conflicts(kubectl):
    kubectl("apply --server-side -f -", WEB)
    kubectl("scale deploy web --replicas=7")
    said = kubectl("apply --server-side -f -", WEB, code=1)
    assert 'Apply failed with 1 conflict: conflict with "kubectl" with subresource "scale" using apps/v1' in said
    assert ".spec.replicas" in said
    kubectl("apply --server-side --force-conflicts -f -", WEB)
    assert kubectl.json("get deploy web")["spec"]["replicas"] == 2
    kubectl("apply --server-side -f -", WEB.replace("  replicas: 2\n", ""))
    assert kubectl.json("get deploy web")["spec"]["replicas"] == 1


def test_what_is_wrong_is_said_as_kubernetes_says_it(kubectl):
    said = kubectl("apply -f -", WEB.replace("port: 80,", "port: 70000,"), code=1)
    assert 'The Service "web" is invalid' in said or 'Service "web" is invalid' in said
    assert "spec.ports[0].port: Invalid value: 70000: must be between 1 and 65535, inclusive" in said
    said = kubectl("apply -f -", WEB.replace("image: echo", "image: echo, bogus: 1"), code=1)
    assert "unknown field" in said and "bogus" in said
    said = kubectl("create -f -", WEB.replace("{app: web}}\n    spec", "{app: other}}\n    spec"), code=1)
    assert "`selector` does not match template `labels`" in said
    assert 'namespaces "nowhere" not found' in kubectl("create configmap x -n nowhere", code=1)
    assert '(NotFound): services "nothing" not found' in kubectl("get svc nothing", code=1)
    assert 'configmaps "x" already exists' in kubectl("create configmap x") + kubectl("create configmap x", code=1)


def test_making_things_by_command(kubectl):
    kubectl("create namespace shop")
    kubectl("-n shop create configmap settings --from-literal=a=b")
    kubectl("-n shop create secret generic password --from-literal=a=b")
    kubectl("-n shop create deployment web --image=echo --replicas=3 --port=80")
    kubectl("-n shop expose deployment web --port=80")
    kubectl("-n shop run one --image=echo")
    kubectl("-n shop create service nodeport other --tcp=80:8080")
    assert kubectl.json("-n shop get deploy web")["spec"]["replicas"] == 3
    assert kubectl.json("-n shop get cm settings")["data"] == {"a": "b"}
    assert kubectl.json("-n shop get secret password")["data"] == {"a": "Yg=="}
    assert kubectl.json("-n shop get svc other")["spec"]["ports"][0]["nodePort"] >= 30000
    kubectl("delete namespace shop")
    assert kubectl("get all,cm,secret -A -o name") == ""


def test_what_there_is(kubectl):
    assert "deploy" in kubectl("api-resources") and "apps/v1" in kubectl("api-versions")
    assert "is running at" in kubectl("cluster-info")
    assert kubectl("auth can-i create pods") == "yes\n"
    assert "The list of ports that are exposed by this service." in " ".join(kubectl("explain svc.spec.ports").split())
    assert "Server Version" in kubectl("version")


def test_custom_kinds(kubectl):
    kubectl("apply -f -", CRD)
    kubectl("wait --for=condition=Established crd/shops.example.com --timeout=60s")
    assert kubectl("apply -f -", SHOP) == "shop.example.com/corner created\n"
    assert kubectl("apply -f -", SHOP.replace("tills: 2", "tills: 3")) == "shop.example.com/corner configured\n"
    assert columns(kubectl("get sh")) == [["NAME", "TILLS"], ["corner", "3"]]
    kubectl("scale shop corner --replicas=4")
    assert kubectl.json("get shops corner")["spec"] == {"tills": 4}
    kubectl("delete crd shops.example.com")
    # Some remember for a while what there was.
    said = kubectl("get sh", code=1)
    assert "the server doesn't have a resource type" in said or "could not find the requested resource" in said


def test_watches_rollouts_logs_and_programs(kubectl):
    server = kubectl.server
    kubectl("apply -f -", WEB)
    watching = kubectl.start("get deploy -w --no-headers")
    waiting = kubectl.start("rollout status deploy/web")
    assert watching.stdout.readline().split()[:3] == ["web", "0/2", "0"]
    held = server.registry.get("Deployment", "default", "web")
    condition = {"type": "Available", "status": "True"}
    counts = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2, "availableReplicas": 2, "observedGeneration": 1}
    server.update("Deployment", {**held, "status": {**counts, "conditions": [condition]}}, subresource="status")
    assert watching.stdout.readline().split()[:3] == ["web", "2/2", "2"]
    watching.kill()
    watching.communicate()
    assert "successfully rolled out" in waiting.communicate(timeout=LIMIT)[0]
    kubectl("wait deploy/web --for=condition=Available --timeout=60s")
    pod = {"name": "one", "namespace": "default"}
    server.create("Pod", {"metadata": pod, "spec": {"containers": [{"name": "c", "image": "echo"}]}})
    assert kubectl("logs one --tail=3") == "first line\nsecond line\n"
    assert server.pods.asked[-1] == ("default", "one", "c", 3, False, False, False, False)
    following = kubectl.start("logs -f one --since=1h -p")
    assert following.stdout.readline() == "first line\n"
    server.pods.more.set()
    assert following.communicate(timeout=LIMIT)[0] == "second line\n"
    assert server.pods.asked[-1] == ("default", "one", "c", None, True, True, True, False)


def test_exec(kubectl):
    pod = {"name": "one", "namespace": "default"}
    kubectl.server.create("Pod", {"metadata": pod, "spec": {"containers": [{"name": "c", "image": "echo"}]}})
    assert kubectl("exec one -- echo hello") == "hello\n"
    assert kubectl("exec -i one -- wc -c", "x" * 200_000).strip() == "200000"
    script = Path(kubectl.home) / "script"
    script.write_text("echo out; echo err >&2; exit 3")
    said = kubectl(f"exec one -- sh {script}", code=3)
    assert "out\n" in said and "err\n" in said and "command terminated with exit code 3" in said
    assert len(kubectl("exec one -- head -c 3000000 /dev/zero")) == 3_000_000
    assert "cannot be started in pod one" in kubectl("exec one -- nonesuch", code=1)


def test_ingresses(kubectl):
    backend = "backend: {service: {name: web, port: {number: 80}}}"
    rule = f"{{host: shop.example, http: {{paths: [{{path: /, pathType: Prefix, {backend}}}]}}}}"
    ingress = f"""\
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {{name: shop}}
spec: {{ingressClassName: lb, rules: [{rule}], tls: [{{hosts: [shop.example]}}]}}
---
apiVersion: networking.k8s.io/v1
kind: IngressClass
metadata: {{name: lb}}
spec: {{controller: example.com/lb, parameters: {{kind: Config, name: c}}}}
"""
    kubectl("apply -f -", ingress)
    assert columns(kubectl("get ing"))[1][:4] == ["shop", "lb", "shop.example", "80,"]
    assert columns(kubectl("get ingressclass"))[1][:3] == ["lb", "example.com/lb", "Config/c"]
    assert kubectl.json("get ingressclass lb")["spec"]["parameters"]["scope"] == "Cluster"
    wrong = ingress.replace("path: /,", "path: x,")
    assert "must be an absolute path" in kubectl("apply -f -", wrong, code=1)


def test_network_policies_have_their_defaults_and_are_checked(kubectl):
    policy = """\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: inside}
spec:
  podSelector: {matchLabels: {app: web}}
  egress: [{ports: [{port: 80, endPort: 90}], to: [{ipBlock: {cidr: 10.0.0.0/8}}]}]
"""
    kubectl("apply -f -", policy)
    assert columns(kubectl("get netpol"))[1][:2] == ["inside", "app=web"]
    spec = kubectl.json("get netpol inside")["spec"]
    assert (spec["policyTypes"], spec["egress"][0]["ports"][0]["protocol"]) == (["Ingress", "Egress"], "TCP")
    for old, new, said in (
        ("endPort: 90", "endPort: 79", "must be greater than or equal to `port`"),
        ("port: 80", "port: http", "may not be specified when `port` is non-numeric"),
        ("port: 80, ", "", "must be specified when `endPort` is specified"),
        ("10.0.0.0/8", "10.0.0.0", "must be a valid CIDR value"),
    ):
        assert said in kubectl("apply -f -", policy.replace(old, new), code=1)
