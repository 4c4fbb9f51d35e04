"""What a cluster runs while it is tried: servers, Services of every type, and clients that count what fails."""

import json
from pathlib import Path
from typing import Any

from tests.cluster.families import DUAL_STACK, EXTERNAL_IPS, POOLS, Families
from tests.cluster.installation import IMAGE

PODS = Path(__file__).parent / "pods"
NAMESPACE = "trial"
PYTHON = "/opt/narthex/bin/python3"
NODE_PORT, LOCAL_NODE_PORT = 30080, 30081
SPREADING = ("cluster", "external-name", "node-port", "local", "balanced", "external-ip")
"""Services whose connections all servers get."""


def _named(kind: str, name: str, api: str = "v1", namespace: str = NAMESPACE, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": namespace}, **fields}


def _pod(name: str, tag: str, *command: str, **fields: Any) -> dict[str, Any]:
    container = {
        "name": name,
        "image": f"{IMAGE}:{tag}",
        "imagePullPolicy": "Never",
        "command": [PYTHON, *command],
        "volumeMounts": [{"name": "pods", "mountPath": "/pods"}],
        **fields,
    }
    volumes = [{"name": "pods", "configMap": {"name": "pods"}}]
    spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 60}
    return {"metadata": {"labels": {"app": name}}, "spec": spec}


def basics(tag: str, families: Families) -> list[dict[str, Any]]:
    """Return a namespace with servers on two or three nodes, and Services of every type for them."""
    scripts = {file.name: file.read_text() for file in PODS.glob("*.py")}
    probe = {"readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 2}}
    server = _pod("web", tag, "/pods/server.py", **probe)
    policy = "PreferDualStack" if families.name == DUAL_STACK else "SingleStack"

    def service(name: str, **spec: Any) -> dict[str, Any]:
        return _named("Service", name, spec={**_ports(name), "ipFamilyPolicy": policy, **spec})

    server["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": _SELECTOR,
        }
    ]
    deployment = {
        "replicas": 4,
        "selector": _SELECTOR,
        "template": server,
        "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
    }
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        _named("ConfigMap", "pods", data=scripts),
        _named("Deployment", "web", "apps/v1", spec=deployment),
        service("cluster"),
        service("headless", clusterIP="None"),
        _named(
            "Service",
            "external-name",
            spec={"type": "ExternalName", "externalName": f"cluster.{NAMESPACE}.svc.cluster.local"},
        ),
        service("node-port", type="NodePort"),
        service("local", type="NodePort", externalTrafficPolicy="Local"),
        service("balanced", type="LoadBalancer"),
        service("affinity", sessionAffinity="ClientIP"),
        service("external-ip", externalIPs=[EXTERNAL_IPS[families.first]]),
    ]


_SELECTOR = {"matchLabels": {"app": "web"}}
_NODE_PORTS = {"node-port": NODE_PORT, "local": LOCAL_NODE_PORT}


def _ports(name: str) -> dict[str, Any]:
    web: dict[str, Any] = {"name": "http", "port": 80, "targetPort": 8080}
    if name in _NODE_PORTS:
        web["nodePort"] = _NODE_PORTS[name]
    ports = [web, {"name": "udp", "port": 81, "targetPort": 8081, "protocol": "UDP"}]
    return {"selector": _SELECTOR["matchLabels"], "ports": ports}


def pool(families: Families) -> list[dict[str, Any]]:
    """Return a pool of addresses on the nodes' link, and how it is announced."""
    api, namespace = "metallb.io/v1beta1", "metallb-system"
    return [
        _named("IPAddressPool", "link", api, namespace, spec={"addresses": list(families.of(POOLS))}),
        _named("L2Advertisement", "link", api, namespace, spec={}),
    ]


def clients(tag: str, rate: float, targets: list[str]) -> dict[str, Any]:
    """Return a client on each node that sends `rate` requests per second."""
    template = _pod("client", tag, "-u", "/pods/client.py", str(rate), *targets)
    template["spec"]["tolerations"] = [{"operator": "Exists"}]
    spec = {"selector": {"matchLabels": {"app": "client"}}, "template": template}
    return _named("DaemonSet", "client", "apps/v1", spec=spec)


class Totals:
    """What clients have counted up to now."""

    def __init__(self, requests: int = 0, failed: int = 0, slow: int = 0, errors: tuple[str, ...] = ()) -> None:
        self.requests, self.failed, self.slow, self.errors = requests, failed, slow, errors

    @classmethod
    def read(cls, line: str) -> "Totals":
        """Return the totals of a line that a client has printed."""
        found = json.loads(line)
        return cls(found.get("requests", 0), found.get("failed", 0), found.get("slow", 0), tuple(found["errors"]))

    def __add__(self, other: "Totals") -> "Totals":
        errors = (*self.errors, *other.errors)
        return Totals(self.requests + other.requests, self.failed + other.failed, self.slow + other.slow, errors)

    def __sub__(self, other: "Totals") -> "Totals":
        errors = tuple(each for each in self.errors if each not in other.errors)
        return Totals(self.requests - other.requests, self.failed - other.failed, self.slow - other.slow, errors)
