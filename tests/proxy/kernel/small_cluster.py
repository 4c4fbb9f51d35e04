"""One node with pods, a proxy process and a client outside, in namespaces; the cluster's objects are files."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from tests.cgroup_client import in_own_cgroup

from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run
from narthex.model import IPFamily
from narthex.proxy.kernel.sockets import pinned_sockets, remove_pins
from narthex.testing.kernel.world import Layout, Site, World
from narthex.testing.load import ClientRoute, EchoEndpoints, until

SOURCE = Path(__file__).parents[3] / "src"
NODE_IPS = ("10.20.0.11", "10.20.1.11", "fd20::11")
HERE = {4: [f"10.64.1.{n}" for n in range(10, 18)], 6: [f"fd64:0:0:1::{n:x}" for n in range(10, 18)]}
"""Addresses of pods of this node."""
THERE = {4: [f"10.64.2.{n}" for n in range(10, 18)], 6: [f"fd64:0:0:2::{n:x}" for n in range(10, 18)]}
"""Addresses of pods of another node."""
POD = {4: "10.64.1.200", 6: "fd64:0:0:1::c8"}
"""A pod of this node that only calls."""
OUTSIDE = {4: "198.51.100.7", 6: "2001:db8:c::7"}
CROWD = [f"198.51.100.{number}" for number in range(100, 160)]
"""Many clients outside."""
CLUSTER_IP = {4: "10.110.0.1", 6: "fd6e::1"}
NODE_IP = {4: "10.20.0.11", 6: "fd20::11"}
CLUSTER_CIDR = "10.64.0.0/12,fd64::/48"
PORT, NODE_PORT = 8080, 30080
SOCKETS = "sockets"
BEYOND, CLIENTS, CALLERS, SERVERS = range(4)


def layout() -> Layout:
    def both(addresses: dict[int, list[str]]) -> tuple[str, ...]:
        return tuple(address for version in (4, 6) for address in addresses[version])

    sites = (
        Site(interface="eth0", addresses=both(THERE)),
        Site(interface="eth0", addresses=(*OUTSIDE.values(), *CROWD), loopback_out=True),
        Site(interface="cni0", addresses=tuple(POD.values())),
        Site(interface="cni0", addresses=both(HERE)),
    )
    homes = {address: number for number, site in enumerate(sites) for address in site.addresses}
    senders = {(address, sites[n].interface): n for n in (CLIENTS, CALLERS) for address in sites[n].addresses}
    return Layout(node_ips=NODE_IPS, interfaces=("eth0", "cni0"), sites=sites, homes=homes, senders=senders)


def service(name: str = "web", number: int = 1, node_port: int = NODE_PORT, **spec: Any) -> dict[str, Any]:
    """A dual-stack NodePort Service with one port, as a manifest."""
    ips = [f"10.110.0.{number}", f"fd6e::{number:x}"]
    port = {"name": "http", "port": 80, "targetPort": PORT, "nodePort": node_port}
    spec = {"type": "NodePort", "clusterIP": ips[0], "clusterIPs": ips, "ipFamilies": ["IPv4", "IPv6"], **spec}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"ports": [port], **spec},
    }


def slices(states: dict[str, str], name: str = "web") -> list[dict[str, Any]]:
    """The slices of a Service; `states` gives `ready`, `terminating` or `unready` by the endpoint's address."""
    conditions = {
        "ready": {"ready": True, "serving": True, "terminating": False},
        "terminating": {"ready": False, "serving": True, "terminating": True},
        "unready": {"ready": False, "serving": False, "terminating": False},
    }
    made = []
    for version in (4, 6):
        endpoints = [
            {
                "addresses": [address],
                "conditions": conditions[state],
                "nodeName": "worker-a" if address in HERE[version] else "worker-b",
            }
            for address, state in states.items()
            if (":" in address) is (version == 6)
        ]
        made.append(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": f"{name}-{version}",
                    "namespace": "shop",
                    "labels": {"kubernetes.io/service-name": name},
                },
                "addressType": f"IPv{version}",
                "ports": [{"name": "http", "port": PORT, "protocol": "TCP"}],
                "endpoints": endpoints,
            }
        )
    return made


def node_object(ips: tuple[str, ...] = NODE_IPS, **labels: str) -> dict[str, Any]:
    addresses = [{"type": "InternalIP", "address": ip} for ip in ips]
    metadata = {"name": "worker-a", "labels": labels}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": {"addresses": addresses}}


class SmallCluster:
    """A world, manifests in a directory, a proxy in the node's namespace. Use it in a `with` block."""

    def __init__(self, directory: Path, mode: str) -> None:
        """`mode` is a proxy mode, or `sockets`: nftables with socket load balancing for sockets of this process."""
        self.mode = "nftables" if mode == SOCKETS else mode
        self.sockets = mode == SOCKETS
        self._stack = ExitStack()
        self._configuration = directory / "config.yaml"
        self.world = World(layout())
        self.answers = EchoEndpoints()
        self.manifests = directory / "manifests"
        self.manifests.mkdir()
        self.log_path = directory / "log"
        self.process: Any = None
        self.put("node", node_object())

    def __enter__(self) -> "SmallCluster":
        self.world.__enter__()
        self.answers.__enter__()
        if self.sockets:
            self._enter_cgroup()
        return self

    def _enter_cgroup(self) -> None:
        """Move this process into a cgroup of its own, whose sockets the proxy balances."""
        cgroup = self._stack.enter_context(in_own_cgroup())
        own = {"apiVersion": "narthex/v1alpha1", "kind": "NarthexConfiguration", "socketLoadBalancing": True}
        proxy = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
        documents = [
            {**proxy, "mode": self.mode, "clusterCIDR": CLUSTER_CIDR},
            {**own, "socketLoadBalancingCgroup": str(cgroup)},
        ]
        self._configuration.write_text(yaml.safe_dump_all(documents))
        self._stack.callback(self._remove_pins)

    def _remove_pins(self) -> None:
        with in_namespace(self.world.node):
            for family in IPFamily:
                remove_pins(family)

    @property
    def sent_to_endpoints(self) -> int:
        """How many connections programs have sent to an endpoint."""
        with in_namespace(self.world.node):
            return sum(sum(each.values()) for each in pinned_sockets().connections.values())

    def __exit__(self, *error: Any) -> None:
        self.kill()
        self._stack.close()
        self.answers.__exit__(*error)
        self.world.__exit__(*error)

    # ---- objects and endpoints -------------------------------------------------------------------------------------

    def put(self, name: str, *objects: Any) -> None:
        """Write a file of the cluster, in one step as editors and controllers do."""
        fresh = self.manifests / f".{name}"
        fresh.write_text(yaml.safe_dump_all(objects))
        fresh.rename(self.manifests / f"{name}.yaml")

    def remove(self, name: str) -> None:
        (self.manifests / f"{name}.yaml").unlink()

    def serve(self, *addresses: str, port: int = PORT) -> None:
        """Start endpoints."""
        for address in addresses:
            site = NODE_IPS if address in NODE_IPS else None
            where = self.world.node if site else self.world.namespace(self.world.layout.homes[address])
            self.answers.open(where, address, port)

    # ---- ways to the Service ---------------------------------------------------------------------------------------

    def from_pod(self, version: int = 4, address: str | None = None, port: int = 80) -> ClientRoute:
        return self.way("pod to ClusterIP", CALLERS, POD[version], address or CLUSTER_IP[version], port)

    def from_outside(
        self, version: int = 4, address: str | None = None, port: int = NODE_PORT, source: str | None = None
    ) -> ClientRoute:
        where = address or NODE_IP[version]
        return self.way("outside to node port", CLIENTS, source or OUTSIDE[version], where, port)

    def from_node(
        self, version: int = 4, address: str | None = None, port: int = NODE_PORT, source: str | None = None
    ) -> ClientRoute:
        where = address or NODE_IP[version]
        return self.way("node to node port", None, source or NODE_IP[version], where, port)

    def way(self, label: str, site: Any, source: str, destination: str, port: int) -> ClientRoute:
        where = self.world.node if site is None else self.world.namespace(site)
        version = 6 if ":" in source else 4
        return ClientRoute(
            label=f"{label} (IPv{version})", namespace=where, source=source, destination=destination, port=port
        )

    # ---- the proxy -------------------------------------------------------------------------------------------------

    def start(
        self, *flags: str, program: tuple[str, ...] = (), module: tuple[str, ...] = ("-m", "narthex")
    ) -> "SmallCluster":
        """Start the proxy with a log of its own.

        `program` is one that starts it, such as `setpriv` with options; `module` what the interpreter runs.
        """
        argv = [sys.executable, *module, "proxy", "--manifests", str(self.manifests), "-v4"]
        argv += ["--hostname-override", "worker-a"]
        if self.sockets:
            argv += ["--config", str(self._configuration)]
        else:
            argv += ["--proxy-mode", self.mode, "--cluster-cidr", CLUSTER_CIDR]
        argv = [*program, *argv, *flags]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "CONFIG": str(self._configuration)}
        with self.log_path.open("wb") as log, in_namespace(self.world.node):
            self.process = subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        return self

    def ready(self) -> "SmallCluster":
        self.wait(lambda: "ready: the first sync is done" in self.log, "the first sync")
        return self

    def kill(self) -> None:
        """kill -9, as the machine does when memory runs out."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until something is so; the log is told when it does not come."""

        def holds() -> Any:
            assert self.process is None or self.process.poll() is None, f"the proxy ended:\n{self.log}"
            return condition()

        until(holds, what, also=lambda: self.log)

    def synced(self, text: str) -> None:
        """Wait until the rules name a text."""
        self.wait(lambda: text in self.rules(), f"{text} among the rules")

    def wrote(self) -> list[str]:
        """What the syncs of the present process wrote, by its log."""
        lines = [line for line in self.log.splitlines() if ": synced " in line or " synced " in line]
        return [line.rpartition("; ")[2] for line in lines]

    def get(self, port: int, path: str) -> tuple[int, str]:
        """GET of a status port; status and body."""
        with in_namespace(self.world.node):
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with sock:
            sock.settimeout(30)
            sock.connect(("127.0.0.1", port))
            sock.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode()

    def rules(self, handles: bool = False) -> str:
        """All rules of the node, without what changes by itself."""
        if self.mode == "nftables":
            return run(["nft", *(["-a"] if handles else []), "-s", "list", "ruleset"], namespace=self.world.node)
        text = "".join(
            run([f"{tool}-save", "-t", table], namespace=self.world.node)
            for tool in ("iptables", "ip6tables")
            for table in ("nat", "filter", "mangle")
        )
        return "\n".join(line.partition(" [")[0] for line in text.splitlines() if not line.startswith("#"))
