"""The node of a soak: a small cluster with Services that change, and the load on one of them."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.proxy.kernel.rollout import Deployment
from tests.proxy.kernel.small_cluster import CLUSTER_CIDR, HERE, NODE_IP, SOURCE, THERE, SmallCluster, service, slices

from narthex.linux.links import set_sysctls
from narthex.testing.load import Load, until

PATIENCE = 120.0
"""Seconds for a change to arrive. It is far beyond what a busy machine needs."""
HELD = 40
CHURNED, FIRST_CHURNED = 60, 10
"""Services that come, change, and go, and the first one's number."""
CHURN_SECONDS = 0.5
ROLLOUT_SECONDS = 1.0
STREAM_SECONDS, SIDE_STREAM_SECONDS = 0.04, 0.1
UDP_PORT, VOID_PORT, LOCAL_PORT, CHECK_PORT = 30081, 30082, 30083, 32000
VOID = {"10.64.2.99": "ready", "fd64:0:0:2::99": "ready"}
"""Endpoints that never answer."""
_TIMEOUTS = ("udp_timeout", "udp_timeout_stream", "tcp_timeout_syn_sent", "tcp_timeout_time_wait", "tcp_timeout_close")
"""Of conntrack. They are short, so that entries of one flood are gone before the next one."""
TIMEOUT_SECONDS = 5


class SoakEnded(Exception):
    """The soak is to end now."""


class SoakCluster(SmallCluster):
    """A small cluster whose proxy may be killed while somebody waits for something."""

    def __init__(self, directory: Path, mode: str, ended: threading.Event) -> None:
        super().__init__(directory, mode)
        self.ended = ended
        self.halted = threading.Event()
        """Set while what goes on beside is to break off."""

    def __enter__(self) -> SoakCluster:
        super().__enter__()
        try:
            timeouts = {f"net/netfilter/nf_conntrack_{name}": str(TIMEOUT_SECONDS) for name in _TIMEOUTS}
            set_sysctls(self.world.node, timeouts)
            self.put(
                "udp", *_udp(service("udp", 2, UDP_PORT), *slices({HERE[4][6]: "ready", HERE[6][6]: "ready"}, "udp"))
            )
            self.put("void", service("void", 3, VOID_PORT), *slices(VOID, "void"))
            local = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": CHECK_PORT}
            self.serve(HERE[4][7])
            self.put("local", service("local", 4, LOCAL_PORT, **local), *slices({HERE[4][7]: "ready"}, "local"))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until something is so, or the soak ends."""

        def holds() -> Any:
            if self.ended.is_set() or self.halted.is_set():
                raise SoakEnded
            return condition()

        until(holds, f"{self.mode}: {what}", PATIENCE, also=lambda: self.log[-4000:])

    def run_proxy(self) -> None:
        """Start the proxy and wait for its first sync."""
        self.start("-v2").ready()

    def differences(self) -> list[str]:
        """What `narthex check` finds between the objects and the rules."""
        argv = [sys.executable, "-m", "narthex", "check", "--manifests", str(self.manifests), "--live"]
        argv += ["--netns", self.world.node, "--node", "worker-a", "--mode", self.mode, "--cluster-cidr", CLUSTER_CIDR]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
        return (done.stdout + done.stderr).splitlines() if done.returncode else []


def _udp(*objects: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    for each in objects:
        for port in each["spec"]["ports"] if "spec" in each else each["ports"]:
            port["protocol"] = "UDP"
    return objects


class SoakLoad:
    """Connections to the Service that is rolled out: one stream that the rollouts watch, and one for each route."""

    def __init__(self, cluster: SmallCluster) -> None:
        routes = [cluster.from_pod(4), cluster.from_outside(4), cluster.from_pod(6), cluster.from_outside(6)]
        self.routes = routes
        self.main = Load(routes)
        self.sides = [Load([route]) for route in routes]

    @property
    def all(self) -> list[Load]:
        return [self.main, *self.sides]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Open connections, and go on with new ones until the block ends."""
        with ExitStack() as stack:
            stack.callback(self.main.close)
            self.main.hold(HELD)
            stack.enter_context(self.main.streaming(STREAM_SECONDS))
            for side in self.sides:
                stack.enter_context(side.streaming(SIDE_STREAM_SECONDS))
            yield


class SoakRollouts(Deployment):
    """Rollouts without end: the oldest pair of endpoints is replaced by a free one."""

    def __init__(self, cluster: SoakCluster, load: SoakLoad) -> None:
        super().__init__(cluster, load.main)
        self._sides = load.sides
        pairs = [(where[4][number], where[6][number]) for number in range(6) for where in (HERE, THERE)]
        self._serving, self._free = pairs[:3], pairs[3:]
        for pair in self._serving:
            self.begin(*pair)

    def replace(self) -> None:
        """Replace one pair. Open connections that a flush ended are opened again."""
        self.load.hold(HELD - len(self.load.held))
        fresh, old = self._free.pop(0), self._serving.pop(0)
        self.add(*fresh)
        self._serving.append(fresh)
        self.terminate(*old)
        self.load.exchange()
        self.remove(*old)
        self._free.append(old)

    def terminate(self, *addresses: str) -> None:
        """Terminate endpoints. What the other streams began before that has ended, too."""
        super().terminate(*addresses)
        for side in self._sides:
            tried = side.tried
            self.cluster.wait(lambda: side.tried > tried + 1, "another connection")  # noqa: B023


class Churn:
    """Services that have nothing to do with the load come, change, and go."""

    def __init__(self, cluster: SoakCluster, seed: int) -> None:
        self._cluster, self._random = cluster, random.Random(seed)
        self._there: set[int] = set()
        for number in range(CHURNED):
            self._put(number)

    def change(self) -> None:
        """Change one Service, and the endpoints of the UDP Service now and then."""
        number = self._random.randrange(CHURNED)
        if number in self._there and self._random.random() < 0.25:
            self._cluster.remove(f"churn-{number}")
            self._there.discard(number)
        else:
            self._put(number)
        if number % 8 == 0:
            chosen = {self._random.choice(HERE[version]): "ready" for version in (4, 6)}
            self._cluster.put("udp", *_udp(service("udp", 2, UDP_PORT), *slices(chosen, "udp")))

    def settled(self) -> bool:
        """Whether the rules have no Service that is gone."""
        there = set(re.findall(r"[0-9]+(?:\.[0-9]+){3}", self._cluster.rules()))
        return not any(_cluster_ip(number) in there for number in range(CHURNED) if number not in self._there)

    def _put(self, number: int) -> None:
        name, pool = f"churn-{number}", [*HERE[4], *THERE[4], *HERE[6], *THERE[6]]
        chosen = self._random.sample(pool, self._random.randrange(1, 8))
        more = {"sessionAffinity": "ClientIP"} if self._random.random() < 0.2 else {}
        made = service(name, FIRST_CHURNED + number, 30200 + number, **more)
        self._cluster.put(name, made, *slices(dict.fromkeys(chosen, "ready"), name))
        self._there.add(number)


def _cluster_ip(number: int) -> str:
    return f"10.110.0.{FIRST_CHURNED + number}"


def node_address(version: int = 4) -> str:
    """Where clients outside reach the node's ports."""
    return NODE_IP[version]
