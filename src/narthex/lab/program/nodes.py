"""The node processes of a lab: `narthex node` on each node, with a configuration of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from narthex.lab import cluster, topology
from narthex.lab.program import node_cgroups
from narthex.lab.program.node_client import (
    BESIDE_HEALTH_PORT,
    BESIDE_METRICS_PORT,
    HEALTH_PORT,
    METRICS_PORT,
    announcer_status,
    healthy,
    synced_since,
)
from narthex.lab.program.node_process import PROGRAM, NodeProcess, NodeStartRequest
from narthex.lab.program.options import LabOptions
from narthex.lab.program.state import LabError, NodeRecord, StateDirectory, write_secret
from narthex.lab.topology import LabNode
from narthex.linux.forks import ForkServer
from narthex.model.backoff import Backoff
from narthex.proxy.kernel.dataplanes import DATAPLANES

KUBE_PROXY = "kube-proxy"
_WATCH_SECONDS = 0.5
_PROXY_BACKOFF = Backoff(0.5, 30.0)
"""Between the end of a kube-proxy and its next start."""
_FIRST_SECONDS = 60.0
_ANSWER_SECONDS = 25.0
_POLL_SECONDS = 0.01
_SYNC_PERIOD = "100ms"


class NodeProcesses:
    """Starts the node processes and waits for them. Used by one thread."""

    def __init__(
        self, directory: StateDirectory, nodes: tuple[LabNode, ...], options: LabOptions, forks: ForkServer
    ) -> None:
        self._directory = directory
        self._nodes = nodes
        self._mode = options.mode
        self._overlay = options.overlay
        self._sockets = options.socket_load_balancing
        self._kube_proxy = options.kube_proxy
        self._forks = forks
        self._announce = False
        self._start_requests: dict[str, NodeStartRequest] = {}
        self._processes: dict[str, NodeProcess] = {}
        self._crashed: set[str] = set()
        """Names of nodes that have crashed once during the start."""
        self._proxies: dict[str, NodeProcess] = {}
        """The kube-proxies that run in addition to `narthex node`, by node."""
        self._proxy_lock = threading.Lock()

    def start(self, *, announce: bool) -> tuple[NodeRecord, ...]:
        """Start all nodes. With `announce` they answer for load balancer addresses. Raises OSError."""
        if announce:
            write_secret(self._directory.announcer_key, f"{os.urandom(32).hex()}\n")
        self._announce = announce
        self._directory.write_corefile(cluster.corefile())
        if self._overlay != topology.NONE:
            conf = topology.net_conf(self._overlay, topology.CLUSTER_CIDRS)
            self._directory.net_conf.write_bytes(msgspec.json.format(msgspec.json.encode(conf)))
        for node in self._nodes:
            paths = self._directory.node(node.name)
            paths.path.mkdir(mode=0o700)
            paths.network.parent.mkdir(mode=0o700)
            paths.network.write_bytes(msgspec.json.format(msgspec.json.encode(self._network(node))))
            self._write_configuration(node)
            arguments = ("--hostname-override", node.name, "--config", str(paths.configuration))
            log = self._directory.logs / f"{node.name}.log"
            log.touch(mode=0o600)
            cgroup = str(node_cgroups.create(self._directory.name, node.name)) if self._sockets else ""
            self._start_requests[node.name] = NodeStartRequest(node.namespace, str(log), arguments, cgroup)
            self._start(node.name)
            if self._kube_proxy is not None:
                paths.kube_proxy.write_bytes(_documents([self.proxy_configuration(announce=announce)]))
                self._start_proxy(node.name)
        return self.records

    def _write_configuration(self, node: LabNode) -> None:
        self._directory.node(node.name).write_configuration(_documents(self._configuration(node, self._announce)))

    def serve_corefile(self, text: str) -> None:
        """Let the nodes serve DNS by another Corefile. They follow their configuration, so their DNS alone starts anew."""
        self._directory.write_corefile(text)
        for node in self._nodes:
            self._write_configuration(node)

    @property
    def records(self) -> tuple[NodeRecord, ...]:
        """Records of the current processes."""
        started = ((name, process.identity) for name, process in self._processes.items())
        return tuple(NodeRecord(node=name, process=identity) for name, identity in started if identity is not None)

    def _start(self, name: str) -> None:
        self._processes[name] = NodeProcess(self._forks, self._start_requests[name])

    def _start_proxy(self, name: str) -> None:
        node = self._start_requests[name]
        configuration = self._directory.node(name).kube_proxy
        argv = (str(self._kube_proxy), f"--config={configuration}", f"--hostname-override={name}")
        log = self._directory.logs / f"{name}-{KUBE_PROXY}.log"
        self._proxies[name] = NodeProcess(self._forks, NodeStartRequest(node.namespace, str(log), argv), PROGRAM)

    def restart(self, name: str) -> None:
        """Kill a node's process and start a new one. Raises OSError."""
        self._processes[name].kill()
        self._start(name)

    def kill(self, name: str) -> None:
        """Kill a node's process and its kube-proxy."""
        self._processes[name].kill()
        with self._proxy_lock:
            if proxy := self._proxies.pop(name, None):
                proxy.kill()

    def restart_proxy(self, name: str) -> None:
        """Kill a node's proxy, which is then started again. Raises OSError."""
        with self._proxy_lock:
            proxy = self._proxies.get(name)
            if proxy is not None:
                proxy.kill()
                return
        self.restart(name)

    def supervise(self) -> None:
        """Start kube-proxies again that have ended, until the process ends."""
        failures, again = Counter[str](), dict[str, float]()
        while self._kube_proxy is not None:
            time.sleep(_WATCH_SECONDS)
            with self._proxy_lock:
                for name, proxy in self._proxies.items():
                    if proxy.poll() is None:
                        continue
                    if name not in again:
                        failures[name] += 1
                        again[name] = time.monotonic() + _PROXY_BACKOFF.delay(failures[name])
                    if time.monotonic() >= again[name]:
                        del again[name]
                        self._start_proxy(name)

    @property
    def proxy_problems(self) -> tuple[str, ...]:
        """Kube-proxies that do not run, as sentences."""
        ended = ((name, proxy.poll()) for name, proxy in tuple(self._proxies.items()))
        return tuple(
            f"the {KUBE_PROXY} of {name} ended ({_describe_exit(status)}) and starts again: "
            f"see {self._directory.logs / f'{name}-{KUBE_PROXY}.log'}"
            for name, status in ended
            if status is not None
        )

    def await_agents(self) -> None:
        """Wait for the CNI agents of all nodes. Raises LabError.

        Plugins work without agents, but use more CPU: a tenth for 12 pods on 3 nodes, a sixth for 100 pods on 10 nodes.
        """
        self._await(lambda node: self._directory.node(node.name).socket.exists(), _FIRST_SECONDS, "has no CNI agent")

    def await_overlay(self) -> None:
        """Wait until the overlay has written the subnet file of each node. Raises LabError."""
        self._await(lambda node: self._directory.node(node.name).subnet_file.exists(), _FIRST_SECONDS, "has no overlay")

    def await_first_sync(self) -> None:
        """Wait until all nodes are healthy. Raises LabError."""
        kube_proxy = self._kube_proxy is not None
        self._await(lambda node: healthy(node.namespace, kube_proxy=kube_proxy), _FIRST_SECONDS, "is not ready")

    def synced(self, moment: float) -> bool:
        """Return True if all running proxies have written the changes up to `moment` (seconds since 1970)."""
        return all(synced_since(node.namespace, moment) for node in self._running)

    def await_answers(self, addresses: frozenset[str]) -> None:
        """Wait until all running announcers know the addresses, and a node answers for each that has an elected node. Raises LabError."""

        def settled(_: LabNode) -> bool:
            """Return True if all announcers know all addresses, and a node answers for each address with an elected node."""
            states = [announcer_status(node.namespace) for node in self._running]
            entries = [each.by_address for each in states if each is not None and not each.listening]
            if len(entries) < len(states) or any(not addresses <= entry.keys() for entry in entries):
                return False
            turns = {ip for entry in entries for ip, each in entry.items() if each.turn and ip in addresses}
            return all(any(entry[ip].answers for entry in entries) for ip in turns)

        self._await(settled, _ANSWER_SECONDS, "sees no node answer for a load balancer address", self._running[:1])

    @property
    def _running(self) -> list[LabNode]:
        return [node for node in self._nodes if self._processes[node.name].poll() is None]

    def _await(
        self, done: Callable[[LabNode], bool], timeout: float, failure: str, nodes: list[LabNode] | None = None
    ) -> None:
        deadline = time.monotonic() + timeout
        waiting = list(self._nodes) if nodes is None else nodes
        while waiting := [node for node in waiting if not done(node)]:
            for node in waiting:
                status = self._processes[node.name].poll()
                if status is not None and not self._restart_crashed(node.name, status):
                    raise LabError(
                        f"the process of {node.name} ended ({_describe_exit(status)}):\n{self._log_tail(node.name)}"
                    )
                proxy = self._proxies.get(node.name)
                if proxy is not None and (status := proxy.poll()) is not None:
                    tail = self._log_tail(f"{node.name}-{KUBE_PROXY}")
                    raise LabError(f"the {KUBE_PROXY} of {node.name} ended ({_describe_exit(status)}):\n{tail}")
            if time.monotonic() > deadline:
                name = waiting[0].name
                raise LabError(f"{name} {failure} after {timeout:.0f} s:\n{self._log_tail(name)}")
            # Polling costs CPU time, which the starting nodes need.
            time.sleep(_POLL_SECONDS * (1 + len(waiting)))

    def _restart_crashed(self, name: str, status: int) -> bool:
        """Restart a crashed process once, as a DaemonSet would; False if it did not crash or crashed before."""
        if status >= 0 or name in self._crashed:
            return False
        self._crashed.add(name)
        with (self._directory.logs / f"{name}.log").open("a") as log:
            log.write(f"the process ended ({_describe_exit(status)}); the lab starts another one\n")
        self._start(name)
        return True

    def _log_tail(self, node: str) -> str:
        log = (self._directory.logs / f"{node}.log").read_text(errors="replace")
        return "\n".join(log.splitlines()[-10:]) or "(its log is empty)"

    def _network(self, node: LabNode) -> dict[str, Any]:
        paths = self._directory.node(node.name)
        if self._overlay == topology.NONE:
            return topology.bridge_network(node.pod_cidrs, str(paths.reservations))
        return topology.overlay_network(str(paths.subnet_file), str(paths.delegated), str(paths.reservations))

    def proxy_configuration(self, *, announce: bool) -> dict[str, Any]:
        """Return the KubeProxyConfiguration, which all nodes share."""
        proxy: dict[str, Any] = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": self._mode,
            "clusterCIDR": ",".join(topology.CLUSTER_CIDRS),
            "detectLocalMode": "ClusterCIDR",
            # Batch syncs when many pods start together.
            **{section: {"minSyncPeriod": _SYNC_PERIOD} for section in ("iptables", "ipvs", "nftables")},
            "clientConnection": {"kubeconfig": str(self._directory.node_kubeconfig)},
            # The size of the conntrack table cannot be set in a namespace.
            "conntrack": {"maxPerCore": 0},
            "healthzBindAddress": f"127.0.0.1:{HEALTH_PORT}",
            "metricsBindAddress": f"127.0.0.1:{METRICS_PORT}",
        }
        if announce:
            # In mode ipvs all nodes have the addresses, but only the announcer may answer ARP.
            proxy["ipvs"] = {"minSyncPeriod": _SYNC_PERIOD, "strictARP": True}
        return proxy

    def _configuration(self, node: LabNode, announce: bool) -> list[dict[str, Any]]:
        paths = self._directory.node(node.name)
        own: dict[str, Any] = {
            "apiVersion": "narthex/v1alpha1",
            "kind": "NarthexConfiguration",
            "parts": {
                "proxy": self._kube_proxy is None,
                "cni": True,
                "overlay": self._overlay != topology.NONE,
                "dns": True,
                "announcer": announce,
            },
            "cni": {"socket": str(paths.socket), "stateDirectory": str(paths.records)},
            "dns": {
                "addresses": cluster.own_addresses(DATAPLANES[self._mode].binds_addresses),
                "listen": node.addresses,
                "corefile": str(self._directory.corefile),
            },
            "overlay": {"netConf": str(self._directory.net_conf), "subnetFile": str(paths.subnet_file)},
        }
        if self._sockets:
            own["socketLoadBalancing"] = True
            own["socketLoadBalancingCgroup"] = str(node_cgroups.node_cgroup(self._directory.name, node.name))
        if announce:
            own["announcer"] = {"keyFile": str(self._directory.announcer_key)}
        proxy = self.proxy_configuration(announce=announce)
        if self._kube_proxy is not None:
            proxy["healthzBindAddress"] = f"127.0.0.1:{BESIDE_HEALTH_PORT}"
            proxy["metricsBindAddress"] = f"127.0.0.1:{BESIDE_METRICS_PORT}"
        return [proxy, own]


def _describe_exit(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def _documents(documents: list[dict[str, Any]]) -> bytes:
    return b"\n---\n".join(msgspec.json.format(msgspec.json.encode(each)) for each in documents) + b"\n"
