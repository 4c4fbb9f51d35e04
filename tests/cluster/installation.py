"""Narthex as `deploy/` installs it: the steps of the how-tos, and the places of the image and the API server."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from tests.cluster import control_groups
from tests.cluster.cluster import Cluster, await_true
from tests.cluster.families import DNS_ADDRESSES, IPV4, IPV6
from tests.cluster.images import NARTHEX

from narthex.lab.program.state import LabError

ROOT = Path(__file__).parents[2]
IMAGE = NARTHEX.rpartition(":")[0]
COMPONENTS = ("overlay", "cni", "cluster-dns", "load-balancer", "announcer", "dns")
SOCKETS = "sockets"
"""A component that is chosen by an option."""
BACKENDS = ("vxlan", "host-gw")
"""Of the overlay."""
_CGROUPS = "/host/cgroup"
"""Where the component has the node's control groups."""


class Installation:
    """A copy of `deploy/`, edited as the how-tos say, and applied."""

    def __init__(self, cluster: Cluster, components: Sequence[str]) -> None:
        self.cluster = cluster
        self.directory = cluster.disk / "deploy"
        shutil.copytree(ROOT / "deploy", self.directory)
        self._components = components
        self.edit(tag="0.1.0")
        access = self.directory / "kubeconfig.conf"
        families = cluster.families
        access.write_text(access.read_text().replace("control-plane.example:6443", families.api_server))
        if families.name != IPV4:
            path = self.directory / "overlay" / "net-conf.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **families.net_conf}))
        if families.name == IPV6:
            service = self.directory / "cluster-dns" / "service.yaml"
            service.write_text(service.read_text().replace(DNS_ADDRESSES[0], DNS_ADDRESSES[1]))

    def edit(self, *, tag: str) -> None:
        """Choose the build of the image."""
        path = ROOT / "deploy" / "kustomization.yaml"
        plan = yaml.safe_load(path.read_text())
        plan["images"] = [{"name": "narthex", "newName": IMAGE, "newTag": tag}]
        plan["components"] = list(self._components)
        (self.directory / "kustomization.yaml").write_text(yaml.safe_dump(plan))

    def configure(self, **fields: object) -> None:
        """Change fields of the KubeProxyConfiguration."""
        path = self.directory / "config.conf"
        proxy, own = yaml.safe_load_all(path.read_text())
        path.write_text(yaml.safe_dump_all([{**proxy, **fields}, own]))

    def balance_sockets(self) -> None:
        """Switch socket load balancing on, for the control group of each node. Raises LabError if that is the machine's."""
        for node in self.cluster.nodes:
            self.cluster.check_cgroup(node)
        hierarchy = control_groups.hierarchy()
        path = self.directory / "config.conf"
        proxy, own = yaml.safe_load_all(path.read_text())
        within = hierarchy.relative_to(control_groups.ROOT)
        own |= {"socketLoadBalancing": True, "socketLoadBalancingCgroup": str(Path(_CGROUPS) / within)}
        path.write_text(yaml.safe_dump_all([proxy, own]))

    def check_sockets(self) -> None:
        """Raise LabError for the first node that doesn't balance sockets."""
        for node in self.cluster.nodes:
            found = json.loads(self.cluster.inside(node, "curl", "-s", "-m", "10", "http://127.0.0.1:10256/sockets"))
            if not found["active"]:
                raise LabError(f"{node.name} does not balance sockets: {found['reason']}")

    def configure_parts(self, **parts: bool) -> None:
        """Switch parts of the node's process on and off."""
        path = self.directory / "config.conf"
        proxy, own = yaml.safe_load_all(path.read_text())
        own["parts"].update(parts)
        path.write_text(yaml.safe_dump_all([proxy, own]))

    def overlay(self, backend: str) -> None:
        """Choose how nodes reach each other's pods."""
        path = self.directory / "overlay" / "net-conf.json"
        path.write_text(path.read_text().replace('"vxlan"', f'"{backend}"').replace('"host-gw"', f'"{backend}"'))

    def apply(self) -> None:
        """Apply it all; what the announcers need comes first."""
        if "load-balancer" in self._components:
            self.cluster.kubectl("apply", "--validate=false", "-k", str(self.directory / "crds"))
        if "announcer" in self._components:
            secret = {"apiVersion": "v1", "kind": "Secret", "stringData": {"key": "a key that all nodes share\n"}}
            self.cluster.apply({**secret, "metadata": {"name": "narthex-announcer", "namespace": "kube-system"}})
        self.cluster.kubectl("apply", "--validate=false", "-k", str(self.directory))

    def delete(self) -> None:
        """Remove it; the custom resources stay."""
        self.cluster.kubectl("delete", "-k", str(self.directory))

    def await_ready(self, patience: float = 240.0) -> None:
        """Wait until the nodes and all pods of the installation are ready. Raises LabError."""
        cluster = self.cluster
        await_true(lambda: all(map(_is_ready, cluster.get("nodes")["items"])), "the nodes' readiness", patience)
        kinds = "daemonsets,deployments"
        for each in cluster.get(kinds, "-n", "kube-system")["items"]:
            name = f"{each['kind'].lower()}/{each['metadata']['name']}"
            cluster.kubectl(
                "-n", "kube-system", "rollout", "status", name, f"--timeout={patience:.0f}s", timeout=patience + 30
            )


def _is_ready(node: dict) -> bool:  # type: ignore[type-arg]
    conditions = node.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
