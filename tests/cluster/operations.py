"""Operations on a cluster under load: each is done as the how-tos say, and requests that fail meanwhile are counted."""

import json
import os
import re
import time
from collections.abc import Callable
from typing import Any

from tests.cluster import workloads
from tests.cluster.cluster import Cluster, await_true
from tests.cluster.families import in_url
from tests.cluster.installation import Installation
from tests.cluster.workloads import NAMESPACE, NODE_PORT, PODS, Totals

from narthex.lab import topology
from narthex.lab.program.state import LabError
from narthex.linux.run import StartedProgram, start_program

_SETTLE_SECONDS = 5.0
"""Load before and after each operation, which belongs to it: what it breaks may show later."""
_QUIET_SECONDS = 10.0
_KILLS = 5


class Trial:
    """Clients on all nodes and outside of the cluster, and the operations."""

    def __init__(self, cluster: Cluster, installation: Installation, rate: float, tag: str, following: str) -> None:
        self.cluster = cluster
        self.installation = installation
        self.tag, self.following = tag, following
        self._rate = rate
        self._outside: StartedProgram[bytes] | None = None
        self._gone: dict[str, Totals] = {}
        """Totals by client; the last known ones of those that have ended count on."""
        self._log = cluster.directory.logs / "outside.log"

    def start(self) -> None:
        """Start the clients and wait for their first requests."""
        services = self.cluster.get("services", "-n", NAMESPACE)["items"]
        families = self.cluster.families
        ports = [f"{in_url(node)}:{NODE_PORT}" for each in self.cluster.nodes for node in families.of(each.addresses)]
        targets = [
            f"{in_url(address)}:80"
            for each in services
            if each["metadata"]["name"] in ("cluster", "node-port")
            for address in each["spec"]["clusterIPs"]
        ]
        self.cluster.apply(workloads.clients(self.tag, self._rate, targets))
        self.cluster.kubectl("-n", NAMESPACE, "rollout", "status", "daemonset/client", "--timeout=120s")
        python = os.sys.executable  # type: ignore[attr-defined]
        with self._log.open("wb") as log:
            self._outside = start_program(
                [python, "-u", str(PODS / "client.py"), str(self._rate), *ports],
                namespace=topology.outside_namespace(self.cluster.name),
                output=log.fileno(),
            )
        await_true(lambda: self.totals().requests, "the first requests")

    def stop(self) -> None:
        """Stop the client outside; the others go with the cluster."""
        if self._outside is not None:
            self._outside.terminate()
            self._outside.wait(30)

    def totals(self) -> Totals:
        """Return what all clients have counted."""
        for pod in self.cluster.get("pods", "-n", NAMESPACE, "-l", "app=client")["items"]:
            name = pod["metadata"]["name"]
            try:
                lines = self.cluster.kubectl("logs", "-n", NAMESPACE, name, "--tail=1").strip()
            except LabError:
                continue
            if lines.startswith("{"):
                self._gone[name] = Totals.read(lines)
        written = self._log.read_text().splitlines()
        if written:
            self._gone["outside"] = Totals.read(written[-1])
        return sum(self._gone.values(), Totals())

    def run(self, name: str) -> tuple[str, dict[str, Any]]:
        """Do an operation under load. Return what failed, and figures."""
        before, begun = self.totals(), time.monotonic()
        time.sleep(_SETTLE_SECONDS)
        problem = ""
        try:
            OPERATIONS[name](self)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:2000]
        time.sleep(_SETTLE_SECONDS)
        found = self.totals() - before
        if found.failed:
            problem = "; ".join([problem, *found.errors[:8]]).removeprefix("; ") or "requests failed"
        seconds = round(time.monotonic() - begun)
        return problem, {"requests": found.requests, "failed": found.failed, "slow": found.slow, "seconds": seconds}

    def await_daemon(self) -> None:
        """Wait until all pods of the node's process are ready."""
        self.cluster.kubectl(
            "-n", "kube-system", "rollout", "status", "daemonset/narthex", "--timeout=180s", timeout=200
        )

    def node_pods(self) -> list[dict[str, Any]]:
        """Return the pods of the node's process."""
        selector = "app.kubernetes.io/name=narthex"
        return list(self.cluster.get("pods", "-n", "kube-system", "-l", selector)["items"])

    def ask_kubelets(self) -> None:
        """Let kubelets project an edited ConfigMap now instead of within a minute: by a change of the pods."""
        stamp = str(time.time())
        for pod in self.node_pods():
            self.cluster.kubectl(
                "-n", "kube-system", "annotate", "pod", pod["metadata"]["name"], "--overwrite", f"edited={stamp}"
            )


def rollout_servers(trial: Trial) -> None:
    """Replace all servers, and scale them up and down."""
    cluster = trial.cluster
    for words in (("restart", "deployment/web"), ("status", "deployment/web", "--timeout=180s")):
        cluster.kubectl("-n", NAMESPACE, "rollout", *words, timeout=200)
    for replicas in (7, 3, 4):
        cluster.kubectl("-n", NAMESPACE, "scale", "deployment/web", f"--replicas={replicas}")
        cluster.kubectl("-n", NAMESPACE, "rollout", "status", "deployment/web", "--timeout=180s", timeout=200)


def rollout_narthex(trial: Trial) -> None:
    """Replace the pods of Narthex, node by node."""
    for name in ("daemonset/narthex", "daemonset/narthex-cni", "deployment/narthex-cluster-dns"):
        trial.cluster.kubectl("-n", "kube-system", "rollout", "restart", name)
        trial.cluster.kubectl("-n", "kube-system", "rollout", "status", name, "--timeout=240s", timeout=260)


def kill(trial: Trial) -> None:
    """Kill the node's process on one node after another."""
    for number in range(_KILLS):
        node = trial.cluster.nodes[number % len(trial.cluster.nodes)]
        before = _restarts(trial, node.name)
        trial.cluster.inside(node, "sh", "-c", _KILL)
        await_true(lambda node=node, before=before: _restarts(trial, node.name) > before, f"the restart on {node.name}")  # type: ignore[misc]
        trial.await_daemon()


_KILL = (
    "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep -q 'narthex[ ]node ' && kill -9 ${p#/proc/}; done; true"
)


def _restarts(trial: Trial, node: str) -> int:
    pods = [each for each in trial.node_pods() if each["spec"].get("nodeName") == node]
    return sum(each["restartCount"] for pod in pods for each in pod.get("status", {}).get("containerStatuses", ()))


def drain(trial: Trial) -> None:
    """Drain a node, and use it again."""
    cluster, node = trial.cluster, trial.cluster.nodes[-1].name
    words = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=180s", "--force")
    cluster.kubectl("drain", node, *words, timeout=200)
    cluster.kubectl("uncordon", node)
    cluster.kubectl("-n", NAMESPACE, "rollout", "restart", "deployment/web")
    cluster.kubectl("-n", NAMESPACE, "rollout", "status", "deployment/web", "--timeout=180s", timeout=200)


def change_mode(trial: Trial) -> None:
    """Change to iptables by the ConfigMap, and back."""
    for mode, shown in (
        ("iptables", "iptables-save -t nat | grep -q KUBE-SERVICES"),
        ("nftables", "nft list table ip narthex"),
    ):
        trial.installation.configure(mode=mode)
        trial.installation.apply()
        trial.ask_kubelets()
        _on_each_node(trial, shown, f"rules of mode {mode}")
        trial.await_daemon()


def change_overlay(trial: Trial) -> None:
    """Change the overlay from VXLAN to host-gw by the ConfigMap, and back."""
    for backend, shown in (
        ("host-gw", "ip route | grep -q '^10.244.*via 192.168.49'"),
        ("vxlan", "ip route | grep -q '^10.244.*flannel.1'"),
    ):
        trial.installation.overlay(backend)
        trial.installation.apply()
        trial.ask_kubelets()
        _on_each_node(trial, shown, f"routes of {backend}")


def upgrade(trial: Trial) -> None:
    """Replace the build on all nodes by another one, and back."""
    for tag in (trial.following, trial.tag):
        trial.installation.edit(tag=tag)
        trial.installation.apply()
        trial.installation.await_ready()


def _on_each_node(trial: Trial, command: str, what: str) -> None:
    for node in trial.cluster.nodes:

        def shown(node: Any = node) -> bool:
            output = trial.cluster.inside(node, "sh", "-c", f"{command} && echo found || echo absent")
            return output.endswith("found\n")

        await_true(shown, f"{what} on {node.name}")


def switch_proxy(trial: Trial) -> None:
    """Give each node to kube-proxy, with the other parts of Narthex going on, and take it back."""
    trial.installation.configure_parts(proxy=False)
    trial.installation.apply()
    trial.ask_kubelets()
    await_true(lambda: not _proxies(trial), "the end of our proxies")
    running = [_start_kube_proxy(trial, node) for node in trial.cluster.nodes]
    try:
        _on_each_node(trial, "nft list table ip kube-proxy >/dev/null 2>&1", "rules of kube-proxy")
        time.sleep(_SETTLE_SECONDS)
        for node in trial.cluster.nodes:
            trial.cluster.inside(node, "sh", "-c", "nft 'delete table ip narthex; delete table ip6 narthex'")
        time.sleep(_SETTLE_SECONDS)
    finally:
        for process in running:
            process.terminate()
            process.wait(30)
    trial.installation.configure_parts(proxy=True)
    trial.installation.apply()
    trial.ask_kubelets()
    _on_each_node(trial, "nft list table ip narthex >/dev/null 2>&1", "our rules")
    trial.await_daemon()
    _on_each_node(trial, "! nft list table ip kube-proxy >/dev/null 2>&1", "the end of kube-proxy's rules")


def _proxies(trial: Trial) -> list[str]:
    """Return the nodes whose process has a proxy, or does not answer: it replaces itself after a change of its parts."""
    found = []
    for node in trial.cluster.nodes:
        ask = "curl -s -m 5 http://127.0.0.1:10256/healthz || true"
        parts = re.search(r'"parts":\s*{(.*)}', trial.cluster.inside(node, "sh", "-c", ask), re.DOTALL)
        found += [node.name] if parts is None or '"proxy"' in parts[1] else []
    return found


def _start_kube_proxy(trial: Trial, node: topology.LabNode) -> StartedProgram[bytes]:
    place = trial.cluster.disk / node.name / "root" / "etc" / "node"
    configuration = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(trial.cluster.directory.node_kubeconfig)},
        "clusterCIDR": ",".join(trial.cluster.families.of(topology.CLUSTER_CIDRS)),
        "conntrack": {"maxPerCore": 0},
        # Narthex's own are taken by its other parts.
        "healthzBindAddress": "127.0.0.1:10266",
        "metricsBindAddress": "127.0.0.1:10259",
    }
    file = place / "kube-proxy.json"
    file.write_text(json.dumps(configuration))
    with (place / "kube-proxy.log").open("wb") as log:
        words = [str(trial.cluster.programs.kube_proxy), f"--config={file}", f"--hostname-override={node.name}"]
        return start_program(words, namespace=node.namespace, output=log.fileno())


def kill_node(trial: Trial) -> None:
    """Kill a node with all its pods, let its pods be replaced, and start it again.

    Requests to a dead node's pods fail until the node is not ready: the count starts then.
    """
    node = trial.cluster.nodes[-1]
    trial.cluster.kill_node(node)
    await_true(lambda: _condition(trial, node.name) != "True", f"the end of {node.name}")
    trial.cluster.start_node(node)
    await_true(lambda: _condition(trial, node.name) == "True", f"the return of {node.name}")
    trial.installation.await_ready()


def _condition(trial: Trial, node: str) -> str:
    found = trial.cluster.get("node", node)["status"]["conditions"]
    return str(next(each["status"] for each in found if each["type"] == "Ready"))


def wait(trial: Trial) -> None:
    """Change nothing: what fails now fails since the machine is too busy for the load."""
    del trial
    time.sleep(_QUIET_SECONDS)


OPERATIONS: dict[str, Callable[[Trial], None]] = {
    "load alone": wait,
    "rollout of the servers": rollout_servers,
    "rollout of Narthex": rollout_narthex,
    "kill -9": kill,
    "drain": drain,
    "mode": change_mode,
    "overlay": change_overlay,
    "kube-proxy": switch_proxy,
    "upgrade and downgrade": upgrade,
}
"""In which no request may fail."""
