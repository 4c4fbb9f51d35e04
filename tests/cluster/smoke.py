"""Each type of Service once: from a pod by its name, from a node, and from outside of the cluster."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from tests.cluster import workloads
from tests.cluster.cluster import Cluster, await_true
from tests.cluster.families import EXTERNAL_IPS, in_url
from tests.cluster.workloads import LOCAL_NODE_PORT, NAMESPACE, NODE_PORT, PYTHON

from narthex.lab import topology
from narthex.lab.program.state import LabError
from narthex.linux.run import CommandError, run

_ASK = (
    "import sys,urllib.request as u;"
    "print(''.join(u.urlopen(f'http://{sys.argv[1]}/',timeout=5).read().decode() for _ in range(int(sys.argv[2]))))"
)
_ASK_UDP = (
    "import socket,sys;at=socket.getaddrinfo(sys.argv[1],81,type=2)[0];s=socket.socket(at[0],2);s.settimeout(5);"
    "s.connect(at[4]);s.send(b'x');print(s.recv(99).decode())"
)
_ROUNDS = 20
"""Requests for which each of four endpoints is met with a chance of 99%."""
_PATIENCE_SECONDS = 60.0


class Smoke:
    """The checks; each raises LabError with what was answered."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._services = {each["metadata"]["name"]: each for each in cluster.get("services", "-n", NAMESPACE)["items"]}
        pods = cluster.get("pods", "-n", NAMESPACE, "-l", "app=web")["items"]
        self._servers = {each["metadata"]["name"] for each in pods}
        self._families = cluster.families
        self._client = f"{NAMESPACE}/{sorted(self._servers)[0]}"

    def checks(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Return each check with its name."""
        for name in workloads.SPREADING:
            yield f"{name}, from a pod by its name", partial(self._by_name, name)
        for address in self._services["cluster"]["spec"]["clusterIPs"][1:]:
            yield "cluster, from a pod by its second address", partial(self._by_address, address)
        yield "headless, from a pod by its name", self._headless
        yield "cluster, from each node", self._from_nodes
        yield "cluster, UDP from a pod", self._datagram
        yield "node-port, from outside at each node", lambda: self._each_node(NODE_PORT)
        yield "local, from outside: the client's address is kept", self._kept_address
        yield "balanced, from outside: an announcer answers for the address", self._balanced
        yield "affinity: one server for a client", self._affinity
        external = in_url(EXTERNAL_IPS[self._families.first])
        yield "external-ip, from a node", lambda: self._spread(self._from_node(external))
        yield "the API server, from a pod by its name", self._api

    def _by_name(self, name: str) -> None:
        self._spread(self._from_pod(f"{name}.{NAMESPACE}"))

    def _by_address(self, address: str) -> None:
        self._spread(self._from_pod(in_url(address)))

    def _headless(self) -> None:
        namespace, _, pod = self._client.partition("/")
        code = "import socket,sys;print(*{each[4][0] for each in socket.getaddrinfo(sys.argv[1], 80, type=1)})"
        words = ("exec", "-n", namespace, pod, "--", PYTHON, "-c", code, f"headless.{NAMESPACE}.svc.cluster.local")
        found = sorted(self._cluster.kubectl(*words).split())
        pods = self._cluster.get("pods", "-n", NAMESPACE, "-l", "app=web")["items"]
        service = self._services["headless"]["spec"]
        expected = sorted(ip["ip"] for each in pods for ip in each["status"]["podIPs"][: len(service["ipFamilies"])])
        if found != expected:
            raise LabError(f"the name has the addresses {found}, and the pods {expected}")

    def _from_pod(self, where: str, count: int = _ROUNDS) -> list[str]:
        namespace, _, pod = self._client.partition("/")
        words = ("exec", "-n", namespace, pod, "--", PYTHON, "-c")
        return self._cluster.kubectl(*words, _ASK, where, str(count), timeout=120).split("\n")

    def _from_node(self, where: str, index: int = 0) -> list[str]:
        answers = [self._curl(self._cluster.nodes[index].namespace, where) for _ in range(_ROUNDS)]
        return [line for answer in answers for line in answer.split("\n")]

    def _curl(self, namespace: str, where: str) -> str:
        return run(["curl", "-sS", "-m", "5", f"http://{where}/"], namespace=namespace)

    def _spread(self, lines: list[str]) -> None:
        names = {line.split()[0] for line in lines if line.strip()}
        if not names or not names <= self._servers or len(names) < min(2, len(self._servers)):
            raise LabError(f"{sorted(names)} answered, of {sorted(self._servers)}")

    def _address(self, name: str) -> str:
        return in_url(str(self._services[name]["spec"]["clusterIP"]))

    def _from_nodes(self) -> None:
        for index in range(len(self._cluster.nodes)):
            self._spread(self._from_node(self._address("cluster"), index))

    def _datagram(self) -> None:
        namespace, _, pod = self._client.partition("/")
        words = ("exec", "-n", namespace, pod, "--", PYTHON, "-c", _ASK_UDP, f"cluster.{NAMESPACE}")
        if self._cluster.kubectl(*words).split()[0] not in self._servers:
            raise LabError("no server answered")

    def _outside(self, where: str) -> str:
        return self._curl(topology.outside_namespace(self._cluster.name), where)

    def _each_node(self, port: int) -> None:
        for node in self._cluster.nodes:
            for address in self._families.of(node.addresses):
                self._spread([self._outside(f"{in_url(address)}:{port}") for _ in range(_ROUNDS)])

    def _kept_address(self) -> None:
        for node in self._cluster.nodes:
            pods = self._cluster.get(
                "pods", "-n", NAMESPACE, "-l", "app=web", "--field-selector", f"spec.nodeName={node.name}"
            )
            if not pods["items"]:
                continue
            for family in self._families.indexes:
                name, client = self._outside(f"{in_url(node.addresses[family])}:{LOCAL_NODE_PORT}").split()
                own = topology.OUTSIDE_ADDRESSES[family]
                if client.removeprefix("::ffff:") != own or name not in self._servers:
                    raise LabError(f"{name} has seen {client} instead of {own}")

    def _balanced(self) -> None:
        def address() -> str:
            status = self._cluster.get("service", "balanced", "-n", NAMESPACE)["status"]
            return next((each["ip"] for each in status.get("loadBalancer", {}).get("ingress") or ()), "")

        given = await_true(address, "the address of the Service of type LoadBalancer", _PATIENCE_SECONDS)

        def answered() -> list[str]:
            with contextlib.suppress(CommandError):
                return [self._outside(in_url(given)) for _ in range(_ROUNDS)]
            return []

        self._spread(await_true(answered, f"an answer of {given}", _PATIENCE_SECONDS))

    def _affinity(self) -> None:
        names = {line.split()[0] for line in self._from_pod(f"affinity.{NAMESPACE}") if line.strip()}
        if len(names) != 1:
            raise LabError(f"{sorted(names)} answered one client")

    def _api(self) -> None:
        code = "import socket;socket.create_connection(('kubernetes.default',443),5).close();print('connected')"
        namespace, _, pod = self._client.partition("/")
        self._cluster.kubectl("exec", "-n", namespace, pod, "--", PYTHON, "-c", code)
