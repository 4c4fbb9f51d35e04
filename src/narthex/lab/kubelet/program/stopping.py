"""The end of a pod's containers: preStop hook, SIGTERM, SIGKILL; sidecars after all others, the last one first.

Follows Kubernetes 1.34: kuberuntime_container.go (killContainer), kuberuntime_termination_order.go.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from narthex.lab.kubelet.probes import hook_of
from narthex.lab.kubelet.program.containers import ContainerRun
from narthex.lab.kubelet.program.prober import ContainerProbeResult, Prober, ProbeTarget
from narthex.lab.kubelet.program.work_queue import WorkQueue
from narthex.lab.kubelet.status import ContainerFacts, PodFacts

_SHORTEST_SECONDS = 2.0
"""Least time between SIGTERM and SIGKILL after a hook or a wait (`minimumGracePeriodInSeconds`)."""


class StoppedPod(Protocol):
    """What stopping needs from a pod. All methods are called in the thread of its node."""

    facts: PodFacts
    runs: dict[str, ContainerRun]

    @property
    def specs(self) -> Mapping[str, Mapping[str, Any]]:
        """The specs of all containers, by name."""

    def probe_target(self, run: ContainerRun) -> ProbeTarget:
        """Return where a hook of a container runs."""

    def drain(self, facts: ContainerFacts) -> None:
        """Let the echo server that replaces a container serve until it is idle."""

    def kill_container(self, facts: ContainerFacts) -> None:
        """Kill a container, if it runs."""

    def record_event(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Record an Event about the pod."""


class Stopping:
    """Stops containers of one pod. All methods are called in the thread of its node."""

    def __init__(self, pod: StoppedPod, worker: WorkQueue, prober: Prober) -> None:
        self._pod = pod
        self._worker = worker
        self._prober = prober

    def stop(self, run: ContainerRun, grace: float, *, in_turn: bool = False) -> None:
        """Run a container's preStop hook, then send SIGTERM, and SIGKILL after `grace` seconds.

        With `in_turn`, a sidecar gets SIGTERM once all containers have ended that end before it.
        """
        if run.kill_at:
            return
        run.probes.end()
        run.kill_at = time.monotonic() + grace
        self._worker.after(grace, partial(self._kill_late, run))
        action = hook_of(self._pod.specs[run.facts.name], "preStop")
        in_turn = in_turn and run.facts.sidecar
        run.delayed = grace > 0 and (action is not None or in_turn)

        def prepared(result: ContainerProbeResult) -> None:
            """Continue with SIGTERM after the preStop hook, in the pod's worker."""
            self._worker.post(lambda: self._prepared(run, result, in_turn))

        if action is None or grace <= 0:
            self._prepared(run, ContainerProbeResult(True), in_turn)
        else:
            self._prober.run_hook(action, self._pod.probe_target(run), grace, prepared)

    def continue_turns(self) -> None:
        """Send SIGTERM to the sidecar whose turn it is."""
        running = [each for each in self._pod.facts.containers if each.name in self._pod.runs]
        if all(each.sidecar for each in running):
            for facts in running[-1:]:
                run = self._pod.runs[facts.name]
                if run.waits_for_turn:
                    self._tell(run)

    def shorten(self, grace: float) -> None:
        """Kill all containers after `grace` seconds, unless they are killed before."""
        for run in tuple(self._pod.runs.values()):
            run.kill_at = min(run.kill_at, time.monotonic() + grace)
            run.signaled = run.signaled or not grace
            self._worker.after(grace, partial(self._kill_late, run))

    def _prepared(self, run: ContainerRun, result: ContainerProbeResult, in_turn: bool) -> None:
        if not self._runs(run) or run.signaled:
            return
        if not result.ok:
            message = f"PreStopHook failed: {result.why}"
            self._pod.record_event("FailedPreStopHook", message, warning=True)
        if in_turn:
            run.waits_for_turn = True
            self.continue_turns()
        else:
            self._tell(run)

    def _tell(self, run: ContainerRun) -> None:
        """Let a container end: SIGTERM, and SIGKILL when its time is over."""
        run.signaled, run.waits_for_turn = True, False
        shortest = time.monotonic() + _SHORTEST_SECONDS
        if run.delayed and run.kill_at < shortest:
            run.kill_at = shortest
            self._worker.after(_SHORTEST_SECONDS, partial(self._kill_late, run))
        if run.container is None:
            self._pod.drain(run.facts)
        else:
            run.container.signal(signal.SIGTERM)

    def _kill_late(self, run: ContainerRun) -> None:
        if not self._runs(run):
            return
        if not run.signaled:
            self._tell(run)
        if run.kill_at <= time.monotonic():
            self._pod.kill_container(run.facts)

    def _runs(self, run: ContainerRun) -> bool:
        return self._pod.runs.get(run.facts.name) is run
