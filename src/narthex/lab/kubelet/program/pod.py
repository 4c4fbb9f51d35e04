"""The lifecycle of one pod on its node: network, containers, probes, restarts, termination.

Everything runs in the thread of the pod's node (`WorkQueue`); other threads only post to it. The observed state is in `facts`
and is written to the API as the pod's status.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

from narthex.cni.errors import CniError
from narthex.lab.api.errors import StatusError
from narthex.lab.api.registry import stamp
from narthex.lab.containers.container import ContainerStartError, RunningContainer
from narthex.lab.controllers.objects import Object, key_of, uid_of
from narthex.lab.kubelet.environment import ContainerConfigError
from narthex.lab.kubelet.eviction import REASON as EVICTED
from narthex.lab.kubelet.probes import ContainerProbe, hook_of
from narthex.lab.kubelet.program.containers import ContainerRun, PodDependencies, echo_name, start_echo, start_program
from narthex.lab.kubelet.program.eviction import StorageCheck
from narthex.lab.kubelet.program.images import ContainerImage
from narthex.lab.kubelet.program.prober import ContainerProbeResult, ProbeTarget
from narthex.lab.kubelet.program.stopping import Stopping
from narthex.lab.kubelet.program.work_queue import WorkQueue
from narthex.lab.kubelet.restarts import back_off, is_restarted, restarts_counted
from narthex.lab.kubelet.status import ContainerFacts, PodFacts, Running, Terminated, Waiting, status
from narthex.lab.topology import LabNode
from narthex.linux.links import LinkError

_RETRY_SECONDS = 1.0
_SERVER_ERRORS = 500
"""From this status on, the API server may answer otherwise later."""
_REFRESH_SECONDS = 5.0
"""Interval at which volumes follow their ConfigMaps and Secrets. A kubelet takes up to a minute or two."""
_DRAIN_POLL_SECONDS = 0.05
_GRACE_SECONDS = 30
_POST_START_SECONDS = 600.0
"""Longest time of a postStart hook. A kubelet waits forever."""
_DRAIN_SECONDS = 10.0
"""Maximum time that the echo server keeps serving a terminating pod."""
_QUIET_SECONDS = 0.25
_IDLE_SECONDS = 1.0
"""Idle time after which a connection to the echo server of a terminating pod is closed."""


_NEW = (Waiting("PodInitializing"), Waiting("ContainerCreating"))
"""States of containers whose start was not tried yet."""


class PodLifecycle:
    """One pod. All methods are called in the thread of its node."""

    def __init__(self, pod: Object, node: LabNode, worker: WorkQueue, deps: PodDependencies) -> None:
        self.pod = pod
        self.key = key_of(pod)
        self.uid = uid_of(pod)
        self.problem = ""
        """Reason why it does not run; empty if it does."""
        self.runs: dict[str, ContainerRun] = {}
        self.ended: dict[str, ContainerRun] = {}
        """The last runs of containers with a console: a client may attach after their end."""
        self._node = node
        self._worker = worker
        self._deps = deps
        inits = {each["name"]: each for each in pod["spec"].get("initContainers") or ()}
        self.specs = inits | {each["name"]: each for each in pod["spec"]["containers"]}
        waiting = _NEW[0 if inits else 1]
        facts = [
            ContainerFacts(
                name=name,
                image=spec.get("image") or "",
                state=waiting,
                init=name in inits,
                sidecar=name in inits and spec.get("restartPolicy") == "Always",
            )
            for name, spec in self.specs.items()
        ]
        self.facts = PodFacts(containers=facts, host_ips=node.addresses)
        self._policy = pod["spec"].get("restartPolicy") or "Always"
        self._pause: RunningContainer | None = None
        self._stopping = Stopping(self, worker, deps.prober)
        self._storage = StorageCheck(self, pod, worker)
        self._ending = False
        self._ending_since = 0.0
        self.finished: bool = False
        """Nothing of the pod is left on the node."""

    @property
    def namespace(self) -> str:
        """Name of the pod's network namespace."""
        return self._deps.network.namespace(self.pod)

    @property
    def starting(self) -> bool:
        """True if containers are about to start for the first time."""
        return self.facts.initialized and any(
            isinstance(each.state, Waiting) and each.last is None for each in self.facts.main
        )

    def start(self) -> None:
        """Create the pod's network and start its containers; retry until it succeeds."""
        if self._ending or self.finished:
            return
        self.facts.start_time = self.facts.start_time or _timestamp()
        try:
            self._deps.files.check(self.pod)
            if not self.facts.networked:
                self.facts.ips = self._deps.network.add(self.pod)
                self.facts.networked = True
            self._deps.files.write(self.pod, self.facts.ips)
        except ContainerConfigError as fault:
            self._retry_after_failure("FailedMount", str(fault), self.start)
        except (OSError, LinkError, CniError) as error:
            message = f"Failed to create pod sandbox: {error}"
            self._retry_after_failure("FailedCreatePodSandBox", message, self.start, str(error))
        else:
            self.problem = ""
            # The downward API exposes the addresses.
            self.pod = {**self.pod, "status": status(self.pod, self.facts, _timestamp())}
            self._start_next()
            self._storage.start()
            self._worker.after(_REFRESH_SECONDS, self._refresh_volumes)
        self.write_status()

    def _refresh_volumes(self) -> None:
        if self._ending or self.finished:
            return
        # A file that cannot be written now is written the next time.
        followed = True
        with contextlib.suppress(OSError):
            followed = self._deps.files.refresh(self.pod)
        if followed:
            self._worker.after(_REFRESH_SECONDS, self._refresh_volumes)

    def record_event(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Record an Event about the pod."""
        self._deps.record_event(self.pod, reason, message, warning=warning)

    def _retry_after_failure(self, reason: str, message: str, retry: Any, problem: str = "") -> None:
        self.problem = problem or message
        self.record_event(reason, message, warning=True)
        self._worker.after(_RETRY_SECONDS, retry)

    def _start_next(self) -> None:
        """Start what is due for the first time: each init container after those before it, then the main containers in order."""
        for facts in (*self.facts.init, *self.facts.main):
            if facts.init and self.facts.initialized:
                continue
            if facts.state in _NEW:
                self._start_container(facts)
            if facts.init and not facts.initialized:
                return
            if (run := self.runs.get(facts.name)) is not None and run.starting:
                return

    def _start_container(self, facts: ContainerFacts) -> None:
        spec = self.specs[facts.name]
        image = ContainerImage()
        try:
            image = self._deps.images.find(spec)
            if image.missing:
                facts.state = Waiting("ErrImagePull", image.missing)
                self._retry_container_later(facts, f'Failed to pull image "{facts.image}": {image.missing}')
                return
            run = self._run(spec, image, facts)
        except ContainerConfigError as fault:
            facts.state = Waiting("CreateContainerConfigError", str(fault))
            self._retry_container_later(facts, f"Error: {fault}")
        except (ContainerStartError, OSError) as error:
            facts.state = Waiting("RunContainerError", str(error))
            problem = f"container {facts.name}: {error}" if image.program else str(error)
            self._retry_after_failure("Failed", f"Error: {error}", lambda: self._retry_container(facts), problem)
        else:
            self.problem = ""
            self.runs[facts.name] = run
            identity = hashlib.sha256(f"{self.uid} {facts.name} {facts.restarts}".encode()).hexdigest()
            facts.container_id = f"narthex://{identity}"
            facts.state = Running(_timestamp())
            self.record_event("Pulled", f'Container image "{facts.image}" already present on machine')
            self.record_event("Created", f"Created container: {facts.name}")
            self.record_event("Started", f"Started container {facts.name}")
            action = hook_of(spec, "postStart")
            if action is not None:
                run.starting = True
                result = partial(self._on_post_start, run)
                self._deps.prober.run_hook(action, self.probe_target(run), _POST_START_SECONDS, result)
            self._evaluate_probes(run)

    def _on_post_start(self, run: ContainerRun, result: ContainerProbeResult) -> None:
        """Post the end of a hook to the node's thread. Called in another thread."""
        self._worker.post(lambda: self._handle_post_start(run, result))

    def _handle_post_start(self, run: ContainerRun, result: ContainerProbeResult) -> None:
        if self.runs.get(run.facts.name) is not run or self._ending:
            return
        run.starting = False
        if result.ok:
            self._evaluate_probes(run)
            self._start_next()
        else:
            self.record_event("FailedPostStartHook", f"PostStartHook failed: {result.why}", warning=True)
            self._restart(run, f"Container {run.facts.name} failed its postStart hook")
        self.write_status()

    def _run(self, spec: Object, image: ContainerImage, facts: ContainerFacts) -> ContainerRun:
        if not image.program:
            return start_echo(self.pod, spec, facts, self._deps)

        def ended(container: RunningContainer) -> None:
            """Handle the end of a program in the pod's worker."""
            self._worker.post(lambda: self._program_ended(facts, container))

        return start_program(self.pod, spec, facts, image, self._deps, ended, self._shared_processes())

    def _shared_processes(self) -> int:
        """Return the process that holds the PID namespace of all containers, 0 if each has its own. Raises ContainerStartError."""
        if not self.pod["spec"].get("shareProcessNamespace"):
            return 0
        if self._pause is None or self._pause.wait(0) is not None:
            self._pause = self._deps.containers.pause()
        return self._pause.pid

    def _evaluate_probes(self, run: ContainerRun) -> None:
        """Apply the results of a container's probes, and run those that are due."""
        facts, probes, now = run.facts, run.probes, datetime.now(UTC)
        facts.started = probes.started and not run.starting
        facts.ready = probes.ready and (facts.sidecar or not facts.init)
        if probes.to_restart is not None:
            self._restart(run, f"Container {facts.name} failed {probes.to_restart.purpose} probe, will be restarted")
            return
        for probe in probes.due(now):
            probes.mark_started(probe, now)
            self._deps.prober.run(probe, self.probe_target(run), partial(self._on_probe_result, run, probe))
        due = probes.next_due()
        # A result may have made a probe due earlier than the check that is scheduled.
        if due is not None and (run.next_check is None or due < run.next_check):
            run.next_check = due
            self._worker.after((due - now).total_seconds(), partial(self._evaluate_later, run, due))
        if facts.sidecar and facts.started and not self._ending:
            self._start_next()

    def probe_target(self, run: ContainerRun) -> ProbeTarget:
        """Return where probes and hooks of a container run."""
        process = run.container.pid if run.container is not None else 0
        return ProbeTarget(self._node.namespace, next(iter(self.facts.ips), ""), process, run.environment)

    def _evaluate_later(self, run: ContainerRun, due: datetime) -> None:
        if run.next_check == due:
            run.next_check = None
        if self.runs.get(run.facts.name) is run:
            self._evaluate_probes(run)

    def _on_probe_result(self, run: ContainerRun, probe: ContainerProbe, result: ContainerProbeResult) -> None:
        """Post a result to the node's thread. Called in another thread."""
        self._worker.post(lambda: self._handle_probe_result(run, probe, result))

    def _handle_probe_result(self, run: ContainerRun, probe: ContainerProbe, result: ContainerProbeResult) -> None:
        if self.runs.get(run.facts.name) is not run or run.failed:
            return
        run.probes.record_result(probe, result.ok, datetime.now(UTC))
        if not result.ok:
            self.record_event("Unhealthy", probe.failure_message(result.why), warning=True)
        self._evaluate_probes(run)
        self.write_status()

    def _restart(self, run: ContainerRun, why: str) -> None:
        """Terminate a container whose probe or hook failed; it restarts as after any other end."""
        run.failed = True
        self.record_event("Killing", why)
        if run.container is None:
            self.kill_container(run.facts, 128 + signal.SIGKILL)
        else:
            self._stopping.stop(run, float(self.pod["spec"].get("terminationGracePeriodSeconds") or _GRACE_SECONDS))

    def _retry_container_later(self, facts: ContainerFacts, message: str) -> None:
        problem = f"container {facts.name}: {message}"
        self._retry_after_failure("Failed", message, lambda: self._retry_container(facts), problem)

    def _retry_container(self, facts: ContainerFacts) -> None:
        """Start a container again after a failure or backoff."""
        if not self._ending and not self.finished and facts.name not in self.runs:
            self._start_container(facts)
            self.write_status()

    def update(self, pod: Object) -> None:
        """Handle a changed pod object."""
        self.pod = {**pod, "status": self.pod.get("status") or pod.get("status") or {}}
        if pod["metadata"].get("deletionTimestamp"):
            self.terminate(float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))
        elif self.facts.networked:
            self._add_ephemeral()
            if pod["spec"].get("readinessGates"):
                # Another component may have changed the condition of a gate.
                self.write_status()

    def _add_ephemeral(self) -> None:
        """Start ephemeral containers that were added."""
        added = [each for each in self.pod["spec"].get("ephemeralContainers") or () if each["name"] not in self.specs]
        for spec in added:
            self.specs[spec["name"]] = spec
            self._deps.files.log(self.pod, spec["name"], 0).parent.mkdir(parents=True, exist_ok=True)
            facts = ContainerFacts(name=spec["name"], image=spec.get("image") or "", ephemeral=True)
            self.facts.containers.append(facts)
            self._start_container(facts)
        if added:
            self.write_status()

    def _program_ended(self, facts: ContainerFacts, container: RunningContainer) -> None:
        run = self.runs.get(facts.name)
        if run is not None and run.container is container:
            self._container_ended(facts, container.end.status or 0, container.end.signal)

    def _container_ended(self, facts: ContainerFacts, code: int, signal_number: int = 0) -> None:
        run = self.runs.pop(facts.name)
        if run.console is not None:
            self.ended[facts.name] = run
        began = facts.state.started if isinstance(facts.state, Running) else _timestamp()
        reason = "Completed" if code == 0 else "Error"
        ended = Terminated(code, reason, began, _timestamp(), signal_number, container_id=facts.container_id)
        facts.state = ended
        facts.started = facts.ready = False
        if self._ending:
            self._stopping.continue_turns()
            self._finish_if_stopped()
            # The pod may end long after this container.
            self.write_status()
            return
        if facts.ephemeral:
            # It is not started again.
            self.write_status()
            return
        if facts.init and not facts.sidecar and code == 0:
            self._start_next()
        elif is_restarted("Always" if facts.sidecar else self._policy, code) and not (facts.sidecar and self._is_over):
            facts.restarts = restarts_counted(facts.restarts, time.monotonic() - run.began)
            self._restart_later(facts, ended)
        if self._is_over:
            self._stop_all(float(self.pod["spec"].get("terminationGracePeriodSeconds") or _GRACE_SECONDS))
        self.write_status()

    @property
    def _is_over(self) -> bool:
        """True if only sidecars are left to run."""
        states = [each.state for each in self.facts.main]
        failed = [each.state for each in self.facts.init if not each.sidecar and not each.succeeded]
        return any(map(self._is_last, failed)) or all(map(self._is_last, states))

    def _is_last(self, state: object) -> bool:
        return isinstance(state, Terminated) and not is_restarted(self._policy, state.exit_code)

    def _stop_all(self, grace: float) -> None:
        for run in tuple(self.runs.values()):
            self._stopping.stop(run, grace, in_turn=True)

    def _restart_later(self, facts: ContainerFacts, ended: Terminated) -> None:
        delay = back_off(facts.restarts)
        facts.restarts += 1
        facts.last = ended
        if delay:
            pod = f"{self.key.name}_{self.key.namespace}({self.uid})"
            message = f"back-off {_duration(delay)} restarting failed container={facts.name} pod={pod}"
            facts.state = Waiting("CrashLoopBackOff", message)
            self.record_event("BackOff", message[0].upper() + message[1:], warning=True)
        self._worker.after(delay, lambda: self._retry_container(facts))

    def terminate(self, grace: float) -> None:
        """Stop all containers within about `grace` seconds. A second call can only shorten the time."""
        if self.finished:
            return
        if self._ending:
            self._stopping.shorten(grace)
            return
        self._ending = True
        self._ending_since = time.time()
        for name in tuple(self.runs):
            self.record_event("Killing", f"Stopping container {name}")
        self._stop_all(grace)
        self._finish_if_stopped()

    def drain(self, facts: ContainerFacts) -> None:
        """Remove an echo container once no proxy routes traffic to it and its connections are idle."""
        self._deps.echo.drain(echo_name(self.pod, facts.name))
        self._worker.post(partial(self._drain_until, facts, time.monotonic() + _DRAIN_SECONDS))

    def _drain_until(self, facts: ContainerFacts, end: float) -> None:
        run = self.runs.get(facts.name)
        if run is None or run.container is not None:
            return
        still_routed = not self._deps.is_released(self.key, self._deletion_requested_at())
        if time.monotonic() < end and self._ending and (still_routed or self._in_use(facts)):
            self._worker.after(_DRAIN_POLL_SECONDS, lambda: self._drain_until(facts, end))
            return
        self.kill_container(facts)

    def _deletion_requested_at(self) -> float:
        """Return a lower bound of the time of the deletion request, since the API counts whole seconds."""
        meta = self.pod["metadata"]
        if not meta.get("deletionTimestamp"):
            return self._ending_since - 1.0
        end = datetime.fromisoformat(meta["deletionTimestamp"]).timestamp()
        return end - float(meta.get("deletionGracePeriodSeconds") or 0)

    def _in_use(self, facts: ContainerFacts) -> bool:
        """Return True if a client connected just now or has a connection that is not idle."""
        name = echo_name(self.pod, facts.name)
        quiet = time.monotonic() - self._deps.echo.last_used(name)
        return quiet < (_IDLE_SECONDS if self._deps.echo.has_connections(name) else _QUIET_SECONDS)

    def evict(self, message: str) -> None:
        """Kill all containers for good. The pod has failed, and stays in the API."""
        self.facts.evicted = message
        self._policy = "Never"
        self.record_event(EVICTED, message, warning=True)
        self.crash()
        self.write_status()

    def crash(self) -> None:
        """Kill all containers."""
        for facts in self.facts.containers:
            self.kill_container(facts, 128 + signal.SIGKILL)

    def kill_container(self, facts: ContainerFacts, echo_status: int = 0) -> None:
        """Kill a container, if it runs. `echo_status` is the exit status of one that the echo server replaces."""
        run = self.runs.get(facts.name)
        if run is not None and run.container is not None:
            run.container.signal(signal.SIGKILL)
        elif run is not None:
            self._deps.echo.remove(echo_name(self.pod, facts.name))
            self._container_ended(facts, echo_status, signal.SIGKILL if echo_status else 0)

    def _finish_if_stopped(self) -> None:
        if self.runs or self.finished:
            return
        self.finished = True
        if self._pause is not None:
            self._pause.signal(signal.SIGKILL)
        if self.facts.networked:
            try:
                self._deps.network.remove(self.pod)
            except (OSError, CniError) as error:
                # The plugins release leftovers later: the namespace is gone.
                self.record_event("FailedKillPod", f"error killing pod: {error}", warning=True)
        self._deps.files.remove(self.pod)
        self._confirm_deletion()

    def _confirm_deletion(self) -> None:
        """Delete the pod object, which its node no longer needs; try again while the API server fails."""
        try:
            with self._deps.registry.held() as registry:
                held = registry.get("Pod", *self.key)
                if held is not None and uid_of(held) == self.uid:
                    registry.delete("Pod", *self.key, grace=0, preconditions={"uid": self.uid})
        except StatusError as error:
            if error.code >= _SERVER_ERRORS:
                self._worker.after(_RETRY_SECONDS, self._confirm_deletion)

    def write_status(self) -> None:
        """Write the status to the API if it has changed."""
        if self.finished:
            return
        try:
            with self._deps.registry.held() as registry:
                held = registry.get("Pod", *self.key)
                if held is None or uid_of(held) != self.uid:
                    return
                made = status(held, self.facts, _timestamp())
                self.pod = {**self.pod, "status": made}
                if made != held.get("status"):
                    registry.update("Pod", {**held, "status": made}, subresource="status")
        except StatusError as error:
            if error.code >= _SERVER_ERRORS:
                self._worker.after(_RETRY_SECONDS, self.write_status)


def _duration(seconds: float) -> str:
    """Format a duration as Go does."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _timestamp() -> str:
    return stamp(datetime.now(UTC))
