"""One good object of each kind, as plain values, and a way to spoil them."""

import copy
from typing import Any

SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web", "namespace": "shop"},
    "spec": {"clusterIP": "10.110.0.1", "ports": [{"name": "http", "port": 80}]},
}
SLICE = {
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
    "addressType": "IPv4",
    "ports": [{"name": "http", "port": 8080}],
    "endpoints": [{"addresses": ["10.64.1.5"]}],
}
NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "worker-a"},
    "spec": {"podCIDR": "10.64.1.0/24"},
    "status": {"addresses": [{"type": "InternalIP", "address": "10.20.0.11"}]},
}
CIDR = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "ServiceCIDR",
    "metadata": {"name": "kubernetes"},
    "spec": {"cidrs": ["10.110.0.0/16"]},
}
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "web-0", "namespace": "shop"},
    "spec": {"containers": [{"name": "web", "image": "web", "ports": [{"containerPort": 80}]}]},
}
DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web", "namespace": "shop"},
    "spec": {
        "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "web"}]}},
    },
}
GONE = object()


def changed(base: Any, path: str, value: object) -> Any:
    """A copy of the object with one field set, or taken out; `~1` stands for a slash in a key."""
    made = copy.deepcopy(base)
    *parents, last = [int(step) if step.isdigit() else step.replace("~1", "/") for step in path.split("/")]
    inside = made
    for step in parents:
        inside = inside.setdefault(step, {}) if isinstance(inside, dict) else inside[step]
    if value is GONE:
        del inside[last]
    else:
        inside[last] = value
    return made
