"""The life of one pod on its node: network, containers one after the other or side by side, restarts, its end.

All of it is done by its node's one thread (`WorkQueue`); others only post to it. What becomes known goes into `facts`, and
from there into the API as the pod's status.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from narthex.cni.errors import CniError
from narthex.lab.api.errors import ApiFault
from narthex.lab.containers.container import Container, StartError
from narthex.lab.kubelet.environment import ContainerConfigError
from narthex.lab.kubelet.probes import ContainerProbe
from narthex.lab.kubelet.program.containers import (
    ContainerRun,
    PodDependencies,
    echo_name,
    image_of,
    start_echo,
    start_program,
)
from narthex.lab.kubelet.program.prober import ProbeResult, ProbeTarget
from narthex.lab.kubelet.program.work_queue import WorkQueue
from narthex.lab.kubelet.status import (
    ContainerFacts,
    PodFacts,
    Running,
    Terminated,
    Waiting,
    back_off,
    status,
    wants_restart,
)
from narthex.lab.topology import LabNode
from narthex.linux.links import LinkError
from narthex.model.names import NamespacedName

Object = dict[str, Any]

_RETRY_SECONDS = 1.0
_FORGET_SECONDS = 600.0
"""A container that has run so long may fail again as if it were the first time."""
_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 30
_DRAIN_SECONDS = 10.0
"""The echo server lets itself be kept so long at most by those who still come, after its end was wished."""
_QUIET_SECONDS = 0.25
_IDLE_SECONDS = 1.0
"""A connection to the echo server on which nothing was said for so long is over, when its pod goes."""


class PodLifecycle:
    """One pod. Everything is called by its node's worker."""

    def __init__(self, pod: Object, node: LabNode, worker: WorkQueue, tools: PodDependencies) -> None:
        self.pod = pod
        self.key = NamespacedName(pod["metadata"]["namespace"], pod["metadata"]["name"])
        self.uid: str = pod["metadata"]["uid"]
        self.problem = ""
        """Why it does not run; empty when it does."""
        self.runs: dict[str, ContainerRun] = {}
        self._node = node
        self._worker = worker
        self._tools = tools
        self.specs = {
            each["name"]: each for each in (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"])
        }
        self.facts = PodFacts(containers=self._new_facts(), host_ips=node.addresses)
        self._policy = pod["spec"].get("restartPolicy") or "Always"
        self._ending = False
        self._asked_at = 0.0
        self._gone = False

    def _new_facts(self) -> list[ContainerFacts]:
        inits = {each["name"] for each in self.pod["spec"].get("initContainers") or ()}
        waits = "PodInitializing" if inits else "ContainerCreating"
        return [
            ContainerFacts(name=name, image=spec.get("image") or "", state=Waiting(waits), init=name in inits)
            for name, spec in self.specs.items()
        ]

    @property
    def namespace(self) -> str:
        """The network namespace of its processes, by name."""
        return self._tools.network.namespace(self.pod)

    @property
    def starting(self) -> bool:
        """It has containers that are about to be started for the first time, and need not wait for others."""
        return self.facts.initialized and any(
            isinstance(each.state, Waiting) and each.last is None for each in self.facts.main
        )

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
        except ContainerConfigError as fault:
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
        spec = self.specs[facts.name]
        image = image_of(spec)
        if image.missing:
            facts.state = Waiting("ErrImagePull", image.missing)
            self._container_cannot(facts, "Failed", f'Failed to pull image "{facts.image}": {image.missing}')
            return
        try:
            run = self._run(spec, image.program, facts)
        except ContainerConfigError as fault:
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
            self._judge(facts, run)
            present = f'Container image "{facts.image}" already present on machine'
            self._tools.tell(self.pod, "Pulled", present)
            self._tools.tell(self.pod, "Created", f"Created container: {facts.name}")
            self._tools.tell(self.pod, "Started", f"Started container {facts.name}")

    def _run(self, spec: Object, program: str, facts: ContainerFacts) -> ContainerRun:
        if not program:
            return start_echo(self.pod, spec, self._tools)

        def ended(container: Container) -> None:
            self._worker.post(lambda: self._ended(facts.name, container))

        return start_program(self.pod, spec, program, facts.restarts, self._tools, ended)

    # Probes.

    def _judge(self, facts: ContainerFacts, run: ContainerRun) -> None:
        """Take over what its probes have come to, and run those that are due."""
        judgement, now = run.judgement, datetime.now(UTC)
        facts.started, facts.ready = judgement.started, judgement.ready and not facts.init
        if judgement.to_restart is not None:
            self._fail(facts, run, judgement.to_restart)
            return
        for probe in judgement.due(now):
            judgement.begin(probe, now)
            process = run.container.pid if run.container is not None else 0
            place = ProbeTarget(self._node.namespace, next(iter(self.facts.ips), ""), process, run.environment)
            self._tools.prober.run(probe, place, partial(self._told, facts, run, probe))
        due = judgement.next_due()
        if due is not None and not run.asked:
            run.asked = True
            self._worker.after((due - now).total_seconds(), partial(self._ask, facts, run))

    def _ask(self, facts: ContainerFacts, run: ContainerRun) -> None:
        run.asked = False
        if self.runs.get(facts.name) is run and not self._ending:
            self._judge(facts, run)

    def _told(self, facts: ContainerFacts, run: ContainerRun, probe: ContainerProbe, result: ProbeResult) -> None:
        """By another thread."""
        self._worker.post(lambda: self._heed(facts, run, probe, result))

    def _heed(self, facts: ContainerFacts, run: ContainerRun, probe: ContainerProbe, result: ProbeResult) -> None:
        if self.runs.get(facts.name) is not run or self._ending or run.failed:
            return
        run.judgement.tell(probe, result.ok, datetime.now(UTC))
        if not result.ok:
            self._tools.tell(self.pod, "Unhealthy", probe.complaint(result.why), warning=True)
        self._judge(facts, run)
        self.write()

    def _fail(self, facts: ContainerFacts, run: ContainerRun, probe: ContainerProbe) -> None:
        """End a container for its probe; it is started again as after any other end."""
        run.failed = True
        words = f"Container {facts.name} failed {probe.purpose} probe, will be restarted"
        self._tools.tell(self.pod, "Killing", words)
        if run.container is None:
            self._tools.echo.remove(echo_name(self.pod, facts.name))
            self._over(facts, 137, signal.SIGKILL)
            return
        run.container.signal(signal.SIGTERM)
        grace = float(self.pod["spec"].get("terminationGracePeriodSeconds") or _GRACE_SECONDS)
        self._worker.after(grace, partial(run.container.signal, signal.SIGKILL))

    def _container_cannot(self, facts: ContainerFacts, reason: str, message: str) -> None:
        self._cannot(reason, message, lambda: self._again(facts), f"container {facts.name}: {message}")

    def _again(self, facts: ContainerFacts) -> None:
        """Start a container that could not be started, or has waited for its turn."""
        if not self._ending and not self._gone and facts.name not in self.runs:
            self._start_container(facts)
            self.write()

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
                self._tools.echo.drain(echo_name(self.pod, facts.name))
                self._worker.post(partial(self._drained, facts))
            else:
                self._worker.after(_sleeps(self.specs[facts.name], grace), partial(_terminate, run))
        self._finish_if_over()

    def _drained(self, facts: ContainerFacts) -> None:
        """End the echo server's part when nobody is sent to it any more and nobody speaks with it."""
        run = self.runs.get(facts.name)
        if run is None or run.container is not None:
            return
        now = time.time()
        sleeps = _sleeps(self.specs[facts.name], _DRAIN_SECONDS)
        patience = now - self._asked_at < sleeps + _DRAIN_SECONDS
        waits = now - self._asked_at < sleeps or not self._tools.released(self.key, self._wished_at())
        if patience and (waits or self._spoken(facts)):
            self._worker.after(_LOOK_SECONDS, lambda: self._drained(facts))
            return
        self._tools.echo.remove(echo_name(self.pod, facts.name))
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
        name = echo_name(self.pod, facts.name)
        quiet = time.monotonic() - self._tools.echo.quiet_since(name)
        return quiet < (_IDLE_SECONDS if self._tools.echo.open(name) else _QUIET_SECONDS)

    def crash(self) -> None:
        """Its containers are killed by somebody."""
        for facts in self.facts.containers:
            run = self.runs.get(facts.name)
            if run is not None and run.container is not None:
                run.container.signal(signal.SIGKILL)
            elif run is not None:
                self._tools.echo.remove(echo_name(self.pod, facts.name))
                self._over(facts, 128 + signal.SIGKILL, signal.SIGKILL)

    def _kill(self) -> None:
        for facts in self.facts.containers:
            run = self.runs.get(facts.name)
            if run is None:
                continue
            if run.container is not None:
                run.container.signal(signal.SIGKILL)
            else:
                self._tools.echo.remove(echo_name(self.pod, facts.name))
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


def _terminate(run: ContainerRun) -> None:
    if run.container is not None:
        run.container.signal(signal.SIGTERM)


def _sleeps(spec: Mapping[str, Any], grace: float) -> float:
    """Seconds that its preStop hook sleeps."""
    hook = (spec.get("lifecycle") or {}).get("preStop") or {}
    return min(float((hook.get("sleep") or {}).get("seconds") or 0), grace)


def _id(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def _duration(seconds: float) -> str:
    """As Go prints it."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
