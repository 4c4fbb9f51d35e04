"""The life of one pod on its node: network, containers one after the other or side by side, restarts, its end.

All of it is done by its node's one thread (`Worker`); others only post to it. What becomes known goes into `facts`, and
from there into the API as the pod's status.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import time
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, Protocol

from narthex.apps.lab.echo import EchoServer
from narthex.apps.lab.image import Image, image_of
from narthex.apps.lab.ledger import Ledger
from narthex.apps.lab.network import PodNetwork
from narthex.apps.lab.pod_files import PodFiles
from narthex.apps.lab.worker import Worker
from narthex.cni.errors import CniError
from narthex.host.containers.container import Container, Containers, StartError
from narthex.host.containers.inside import find
from narthex.host.containers.program import Program
from narthex.host.links import LinkError
from narthex.lab.api.faults import ApiFault
from narthex.lab.cluster_dns import DNS_PORT
from narthex.lab.pods.environment import ConfigFault, command_line, environment, hostname
from narthex.lab.pods.status import (
    ContainerFacts,
    PodFacts,
    Running,
    Terminated,
    Waiting,
    back_off,
    status,
    wants_restart,
)
from narthex.model.names import NamespacedName

Object = dict[str, Any]

_RETRY_SECONDS = 1.0
_FORGET_SECONDS = 600.0
"""A container that has run so long may fail again as if it were the first time."""
_LOOK_SECONDS = 0.05
_DRAIN_SECONDS = 10.0
"""The echo server lets itself be kept so long at most by those who still come, after its end was wished."""
_QUIET_SECONDS = 0.25
_IDLE_SECONDS = 1.0
"""A connection to the echo server on which nothing was said for so long is over, when its pod goes."""


class Tell(Protocol):
    """Takes what is to become an Event."""

    def __call__(self, about: Mapping[str, Any], reason: str, message: str, *, warning: bool = False) -> None:
        """`about`: the pod; the rest as Events have it."""


class Released(Protocol):
    """Says whether nobody is sent to a pod any more."""

    def __call__(self, key: NamespacedName, since: float) -> bool:
        """`since`: when its end was wished, in seconds since 1970."""


class Tools(NamedTuple):
    """What pods are made with."""

    ledger: Ledger
    network: PodNetwork
    files: PodFiles
    echo: EchoServer
    containers: Containers
    tell: Tell
    released: Released


class Run:
    """One container of a pod, from start to end."""

    def __init__(self, image: Image, container: Container | None) -> None:
        self.image = image
        self.container = container
        """None: the echo server does its work."""
        self.began = time.monotonic()


class PodLife:
    """One pod. Everything is called by its node's worker."""

    def __init__(self, pod: Object, node_addresses: tuple[str, ...], worker: Worker, tools: Tools) -> None:
        self.pod = pod
        self.key = NamespacedName(pod["metadata"]["namespace"], pod["metadata"]["name"])
        self.uid: str = pod["metadata"]["uid"]
        self.problem = ""
        """Why it does not run; empty when it does."""
        self.runs: dict[str, Run] = {}
        self._worker = worker
        self._tools = tools
        self._specs = {
            each["name"]: each for each in (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"])
        }
        self.facts = PodFacts(containers=self._new_facts(), host_ips=node_addresses)
        self._policy = pod["spec"].get("restartPolicy") or "Always"
        self._ending = False
        self._asked_at = 0.0
        self._gone = False

    def _new_facts(self) -> list[ContainerFacts]:
        inits = {each["name"] for each in self.pod["spec"].get("initContainers") or ()}
        waits = "PodInitializing" if inits else "ContainerCreating"
        return [
            ContainerFacts(name=name, image=spec.get("image") or "", state=Waiting(waits), init=name in inits)
            for name, spec in self._specs.items()
        ]

    @property
    def starting(self) -> bool:
        """It has containers that are about to be started for the first time."""
        return any(isinstance(each.state, Waiting) and each.last is None for each in self.facts.main)

    # What there is to do.

    def start(self) -> None:
        """Put it on the network and start its containers; tried again until it can be had."""
        if self._ending or self._gone:
            return
        self.facts.start_time = self.facts.start_time or _stamp()
        try:
            self._tools.files.check(self.pod)
            if not self.facts.networked:
                self.facts.ips = self._tools.network.add(self.pod)
                self.facts.networked = True
            self._tools.files.write(self.pod, self.facts.ips)
        except ConfigFault as fault:
            self._cannot("FailedMount", str(fault), self.start)
        except (OSError, LinkError, CniError) as error:
            self._cannot("FailedCreatePodSandBox", f"Failed to create pod sandbox: {error}", self.start, str(error))
        else:
            self.problem = ""
            # The downward API tells the addresses.
            self.pod = {**self.pod, "status": status(self.pod, self.facts, _stamp())}
            self._go_on()
        self.write()

    def _cannot(self, reason: str, message: str, again: Any, problem: str = "") -> None:
        self.problem = problem or message
        self._tools.tell(self.pod, reason, message, warning=True)
        self._worker.after(_RETRY_SECONDS, again)

    def _go_on(self) -> None:
        """Start what is next: an init container, or all others."""
        for facts in self.facts.init:
            if isinstance(facts.state, Terminated) and facts.state.exit_code == 0:
                continue
            if facts.name not in self.runs and isinstance(facts.state, Waiting):
                self._start_container(facts)
            return
        for facts in self.facts.main:
            if facts.name not in self.runs and isinstance(facts.state, Waiting):
                self._start_container(facts)

    def _start_container(self, facts: ContainerFacts) -> None:
        spec = self._specs[facts.name]
        image = image_of(spec)
        if image.missing:
            facts.state = Waiting("ErrImagePull", image.missing)
            self._container_cannot(facts, "Failed", f'Failed to pull image "{facts.image}": {image.missing}')
            return
        try:
            run = self._run_program(spec, image) if image.program else self._run_echo(spec, image)
        except ConfigFault as fault:
            facts.state = Waiting("CreateContainerConfigError", str(fault))
            self._container_cannot(facts, "Failed", f"Error: {fault}")
        except (StartError, OSError) as error:
            self._tools.tell(self.pod, "Failed", f"Error: {error}", warning=True)
            facts.state = Waiting("RunContainerError", str(error))
            self.problem = f"container {facts.name}: {error}" if image.program else str(error)
            self._worker.after(_RETRY_SECONDS, lambda: self._again(facts))
        else:
            self.problem = ""
            self.runs[facts.name] = run
            facts.container_id = f"narthex://{_id(self.uid, facts.name, facts.restarts)}"
            facts.state = Running(_stamp())
            facts.started = facts.ready = not facts.init
            present = f'Container image "{facts.image}" already present on machine'
            self._tools.tell(self.pod, "Pulled", present)
            self._tools.tell(self.pod, "Created", f"Created container: {facts.name}")
            self._tools.tell(self.pod, "Started", f"Started container {facts.name}")

    def _container_cannot(self, facts: ContainerFacts, reason: str, message: str) -> None:
        self._cannot(reason, message, lambda: self._again(facts), f"container {facts.name}: {message}")

    def _again(self, facts: ContainerFacts) -> None:
        """Start a container that could not be started, or has waited for its turn."""
        if not self._ending and not self._gone and facts.name not in self.runs:
            self._start_container(facts)
            self.write()

    def _run_echo(self, spec: Object, image: Image) -> Run:
        ports = _ports(spec)
        if self.pod["spec"].get("hostNetwork") and any(number == DNS_PORT for _, number in ports):
            node = self.pod["spec"]["nodeName"]
            raise OSError(98, f"Address already in use: port {DNS_PORT} of {node} is the lab's DNS's")
        says = f"{self.key.name} on {self.pod['spec']['nodeName']}"
        self._tools.echo.add(self.echo_name(spec["name"]), says, self._tools.network.namespace(self.pod), ports)
        return Run(image, None)

    def echo_name(self, container: str) -> str:
        """What the echo server knows a container by."""
        return f"{self.uid}/{container}"

    def _run_program(self, spec: Object, image: Image) -> Run:
        known = self._environment(spec)
        argv = command_line(spec, image.program, known)
        directory = spec.get("workingDir") or "/"
        try:
            executable = find(argv[0], known, directory)
        except OSError as error:
            raise StartError(str(error.strerror), missing=True) from error
        security = {**(self.pod["spec"].get("securityContext") or {}), **(spec.get("securityContext") or {})}
        facts = next(each for each in self.facts.containers if each.name == spec["name"])
        program = Program(
            argv=argv,
            executable=executable,
            environment=known,
            directory=directory,
            network_namespace=self._tools.network.namespace(self.pod),
            hostname="" if self.pod["spec"].get("hostNetwork") else hostname(self.pod),
            shows=tuple(self._tools.files.shows(self.pod, spec)),
            user=security.get("runAsUser"),
            group=security.get("runAsGroup"),
            log=str(self._tools.files.log(self.pod, spec["name"], facts.restarts)),
        )
        container = self._tools.containers.run(
            program, ended=lambda ended: self._worker.post(lambda: self._ended(spec["name"], ended))
        )
        return Run(image, container)

    def _environment(self, spec: Object) -> dict[str, str]:
        with self._tools.ledger.held() as registry:
            services = [*registry.list("Service", "default"), *registry.list("Service", self.key.namespace)]
            return environment(
                self.pod, spec, services, lambda kind, name: registry.get(kind, self.key.namespace, name)
            )

    # What happens to it.

    def change(self, pod: Object) -> None:
        """The API holds another state of it."""
        self.pod = {**pod, "status": self.pod.get("status") or pod.get("status") or {}}
        if pod["metadata"].get("deletionTimestamp"):
            self.end(float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))

    def _ended(self, name: str, container: Container) -> None:
        run = self.runs.get(name)
        if run is None or run.container is not container:
            return
        facts = next(each for each in self.facts.containers if each.name == name)
        told = container.end
        self._over(facts, told.status or 0, told.signal)

    def _over(self, facts: ContainerFacts, code: int, number: int = 0) -> None:
        run = self.runs.pop(facts.name)
        began = facts.state.started if isinstance(facts.state, Running) else _stamp()
        reason = "Completed" if code == 0 else "Error"
        ended = Terminated(code, reason, began, _stamp(), number, container_id=facts.container_id)
        facts.state = ended
        facts.started = facts.ready = False
        if self._ending:
            self._finish_if_over()
            return
        if facts.init and code == 0:
            self._go_on()
        elif wants_restart("OnFailure" if facts.init and self._policy == "Always" else self._policy, [ended]):
            if time.monotonic() - run.began > _FORGET_SECONDS:
                facts.restarts = 0
            self._restart_later(facts, ended)
        self.write()

    def _restart_later(self, facts: ContainerFacts, ended: Terminated) -> None:
        delay = back_off(facts.restarts)
        facts.restarts += 1
        facts.last = ended
        if delay:
            words = f"back-off {_duration(delay)} restarting failed container={facts.name} pod={self._full_name}"
            facts.state = Waiting("CrashLoopBackOff", words)
            self._tools.tell(self.pod, "BackOff", words[0].upper() + words[1:], warning=True)
        self._worker.after(delay, lambda: self._again(facts))

    @property
    def _full_name(self) -> str:
        return f"{self.key.name}_{self.key.namespace}({self.uid})"

    # Its end.

    def end(self, grace: float) -> None:
        """Stop its containers: SIGTERM, and SIGKILL after so many seconds. A second time may only shorten that."""
        if self._gone:
            return
        self._worker.after(grace, self._kill)
        if self._ending:
            return
        self._ending = True
        self._asked_at = time.time()
        for facts in self.facts.containers:
            run = self.runs.get(facts.name)
            if run is None:
                continue
            self._tools.tell(self.pod, "Killing", f"Stopping container {facts.name}")
            if run.container is None:
                self._tools.echo.drain(self.echo_name(facts.name))
                self._worker.post(partial(self._drained, facts))
            else:
                self._worker.after(_sleeps(self._specs[facts.name], grace), partial(_terminate, run))
        self._finish_if_over()

    def _drained(self, facts: ContainerFacts) -> None:
        """End the echo server's part when nobody is sent to it any more and nobody speaks with it."""
        run = self.runs.get(facts.name)
        if run is None or run.container is not None:
            return
        now = time.time()
        sleeps = _sleeps(self._specs[facts.name], _DRAIN_SECONDS)
        patience = now - self._asked_at < sleeps + _DRAIN_SECONDS
        waits = now - self._asked_at < sleeps or not self._tools.released(self.key, self._wished_at())
        if patience and (waits or self._spoken(facts)):
            self._worker.after(_LOOK_SECONDS, lambda: self._drained(facts))
            return
        self._tools.echo.remove(self.echo_name(facts.name))
        self._over(facts, 0)

    def _wished_at(self) -> float:
        """No later than when its end was wished; the API counts whole seconds."""
        meta = self.pod["metadata"]
        if not meta.get("deletionTimestamp"):
            return self._asked_at - 1.0
        end = datetime.fromisoformat(meta["deletionTimestamp"].replace("Z", "+00:00")).timestamp()
        return end - float(meta.get("deletionGracePeriodSeconds") or 0)

    def _spoken(self, facts: ContainerFacts) -> bool:
        """Somebody has come a moment ago, or has a connection that may still be used."""
        name = self.echo_name(facts.name)
        quiet = time.monotonic() - self._tools.echo.quiet_since(name)
        return quiet < (_IDLE_SECONDS if self._tools.echo.open(name) else _QUIET_SECONDS)

    def crash(self) -> None:
        """Its containers are killed by somebody."""
        for facts in self.facts.containers:
            run = self.runs.get(facts.name)
            if run is not None and run.container is not None:
                run.container.signal(signal.SIGKILL)
            elif run is not None:
                self._tools.echo.remove(self.echo_name(facts.name))
                self._over(facts, 128 + signal.SIGKILL, signal.SIGKILL)

    def _kill(self) -> None:
        for facts in self.facts.containers:
            run = self.runs.get(facts.name)
            if run is None:
                continue
            if run.container is not None:
                run.container.signal(signal.SIGKILL)
            else:
                self._tools.echo.remove(self.echo_name(facts.name))
                self._over(facts, 0)
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        if self.runs or self._gone:
            return
        self._gone = True
        if self.facts.networked:
            try:
                self._tools.network.remove(self.pod)
            except (OSError, CniError) as error:
                # What the plugins still hold of it they take back by themselves: its namespace is gone.
                self._tools.tell(self.pod, "FailedKillPod", f"error killing pod: {error}", warning=True)
        self._tools.files.remove(self.pod)
        with contextlib.suppress(ApiFault), self._tools.ledger.held() as registry:
            held = registry.get("Pod", *self.key)
            if held is not None and held["metadata"]["uid"] == self.uid:
                registry.delete("Pod", *self.key, grace=0)

    @property
    def gone(self) -> bool:
        """Nothing of it is left."""
        return self._gone

    def write(self) -> None:
        """Tell the API how it is, if that is another way than before."""
        if self._gone:
            return
        with contextlib.suppress(ApiFault), self._tools.ledger.held() as registry:
            held = registry.get("Pod", *self.key)
            if held is None or held["metadata"]["uid"] != self.uid:
                return
            made = status(held, self.facts, _stamp())
            self.pod = {**self.pod, "status": made}
            if made != held.get("status"):
                registry.update("Pod", {**held, "status": made}, subresource="status")


def _terminate(run: Run) -> None:
    if run.container is not None:
        run.container.signal(signal.SIGTERM)


def _sleeps(spec: Mapping[str, Any], grace: float) -> float:
    """Seconds that its preStop hook sleeps."""
    hook = (spec.get("lifecycle") or {}).get("preStop") or {}
    return min(float((hook.get("sleep") or {}).get("seconds") or 0), grace)


def _ports(spec: Mapping[str, Any]) -> list[tuple[str, int]]:
    """What a container declares, each once."""
    declared = ((str(port.get("protocol") or "TCP"), int(port["containerPort"])) for port in spec.get("ports") or ())
    return list(dict.fromkeys(declared))


def _id(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def _duration(seconds: float) -> str:
    """As Go prints it."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
