"""Probes and lifecycle hooks of containers (kubernetes `pkg/kubelet/prober`, `pkg/kubelet/lifecycle`): specs, schedule, results.

The kubelet runs the probes and keeps a `ProbeState` for each run of a container:

    state = ProbeState(probes_of(container), started=now)
    for probe in state.due(now):
        state.record_result(probe, ok, now)       # after the probe has run
    state.ready, state.started, state.to_restart
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

import msgspec

from narthex.lab.controllers.objects import decimal, integer_or

ProbePurpose = Literal["startup", "liveness", "readiness"]
_PURPOSES: tuple[ProbePurpose, ...] = ("startup", "liveness", "readiness")


class HttpGetAction(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP GET request; a status from 200 to 399 is a success."""

    host: str
    """Empty: the pod's address."""
    port: int
    path: str
    scheme: str
    """http or https; certificates are not verified."""
    headers: tuple[tuple[str, str], ...] = ()


class TcpSocketAction(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP connection; an established connection is a success."""

    host: str
    """Empty: the pod's address."""
    port: int


class ExecAction(msgspec.Struct, frozen=True, kw_only=True):
    """A command in the container; exit status 0 is a success."""

    command: tuple[str, ...]


class SleepAction(msgspec.Struct, frozen=True, kw_only=True):
    """A pause; only of hooks."""

    seconds: int


class UnsupportedAction(msgspec.Struct, frozen=True, kw_only=True):
    """An action that cannot run and always fails."""

    why: str


ProbeAction: TypeAlias = HttpGetAction | TcpSocketAction | ExecAction | SleepAction | UnsupportedAction


class ContainerProbe(msgspec.Struct, frozen=True, kw_only=True):
    """A probe of a container. Times in seconds."""

    purpose: ProbePurpose
    action: ProbeAction
    initial_delay: int = 0
    period: int = 10
    timeout: int = 1
    successes: int = 1
    """Consecutive successes that turn failure into success."""
    failures: int = 3
    """Consecutive failures that turn success into failure."""

    def failure_message(self, why: str) -> str:
        """Return upstream's message for the Event Unhealthy."""
        return f"{self.purpose.capitalize()} probe failed: {why}"


def probes_of(container: Mapping[str, Any]) -> tuple[ContainerProbe, ...]:
    """Return the probes in a container's spec."""
    given = ((purpose, container.get(f"{purpose}Probe")) for purpose in _PURPOSES)
    return tuple(_probe(purpose, spec, container) for purpose, spec in given if spec)


def hook_of(container: Mapping[str, Any], name: Literal["postStart", "preStop"]) -> ProbeAction | None:
    """Return what a lifecycle hook of a container does, None without one."""
    hook = (container.get("lifecycle") or {}).get(name)
    if not hook:
        return None
    if hook.get("sleep") is not None:
        return SleepAction(seconds=max(0, integer_or(hook["sleep"].get("seconds"))))
    return _parse_action(hook, container)


def _probe(purpose: ProbePurpose, spec: Mapping[str, Any], container: Mapping[str, Any]) -> ContainerProbe:
    def positive(field: str, default: int) -> int:
        """Return the field's number, the default if it is absent or 0, and at least 1."""
        return max(1, integer_or(spec.get(field)) or default)

    return ContainerProbe(
        purpose=purpose,
        action=_parse_action(spec, container),
        initial_delay=max(0, integer_or(spec.get("initialDelaySeconds"))),
        period=positive("periodSeconds", 10),
        timeout=positive("timeoutSeconds", 1),
        successes=positive("successThreshold", 1) if purpose == "readiness" else 1,
        failures=positive("failureThreshold", 3),
    )


def _parse_action(spec: Mapping[str, Any], container: Mapping[str, Any]) -> ProbeAction:
    if "grpc" in spec:
        return UnsupportedAction(why="the lab does not run gRPC probes; use httpGet, tcpSocket or exec")
    if command := (spec.get("exec") or {}).get("command"):
        return ExecAction(command=tuple(command))
    for name in ("httpGet", "tcpSocket"):
        target = spec.get(name)
        if target is None:
            continue
        port = _port(target.get("port"), container)
        if port is None:
            return UnsupportedAction(why=f"the container has no port {target.get('port')!r}")
        if name == "tcpSocket":
            return TcpSocketAction(host=target.get("host") or "", port=port)
        path = target.get("path") or "/"
        return HttpGetAction(
            host=target.get("host") or "",
            port=port,
            path=path if path.startswith("/") else f"/{path}",
            scheme=str(target.get("scheme") or "HTTP").lower(),
            headers=tuple((each["name"], each.get("value") or "") for each in target.get("httpHeaders") or ()),
        )
    return UnsupportedAction(why="it has no exec, httpGet or tcpSocket")


def _port(port: object, container: Mapping[str, Any]) -> int | None:
    number = decimal(port, 5) if isinstance(port, str) else port
    if isinstance(number, int):
        return number if 0 < number < 65536 else None
    for each in container.get("ports") or ():
        if each.get("name") == port:
            return integer_or(each.get("containerPort")) or None
    return None


def is_http_success(status: int) -> bool:
    """Return True if an HTTP status is a success."""
    return 200 <= status < 400


_EARLY_SECONDS = 1
"""Time between readiness probes that fail within the first period. A kubelet waits for a whole period, which is 10 s by default."""


class _ProbeTally:
    def __init__(self, probe: ContainerProbe, started: datetime) -> None:
        self.due = started + timedelta(seconds=probe.initial_delay)
        self._first_period_ends = self.due + timedelta(seconds=probe.period)
        # Until the first result a container counts as alive, but not as ready.
        self.passed = probe.purpose == "liveness"
        self.last: bool | None = None
        self.count = 0

    def record_result(self, probe: ContainerProbe, ok: bool, now: datetime) -> None:
        """Count a result, change the state at the probe's threshold, and schedule the next run."""
        self.count = self.count + 1 if self.last is ok else 1
        self.last = ok
        if self.count >= (probe.successes if ok else probe.failures):
            self.passed = ok
        # A program that is not listening yet is soon.
        early = probe.purpose == "readiness" and not self.passed and now < self._first_period_ends
        self.due = now + timedelta(seconds=min(probe.period, _EARLY_SECONDS) if early else probe.period)


class ProbeState:
    """Results and schedule of the probes of one run of a container."""

    def __init__(self, probes: tuple[ContainerProbe, ...], started: datetime) -> None:
        """Start the schedule; `started` is the start time of the container."""
        self._tallies = {probe: _ProbeTally(probe, started) for probe in probes}
        self.started = not any(probe.purpose == "startup" for probe in probes)
        """No startup probe is pending (`status.containerStatuses[].started`)."""
        self.to_restart: ContainerProbe | None = None
        """The failed probe that requires a restart."""
        self._ending = False

    @property
    def ready(self) -> bool:
        """True if the container has started and its readiness probe, if any, passes."""
        return self.started and all(
            tally.passed for probe, tally in self._tallies.items() if probe.purpose == "readiness"
        )

    def end(self) -> None:
        """Run only readiness probes from now on: the container is being terminated."""
        self._ending = True

    def due(self, now: datetime) -> tuple[ContainerProbe, ...]:
        """Return the probes to run now."""
        return tuple(probe for probe in self._enabled_probes() if self._tallies[probe].due <= now)

    def next_due(self) -> datetime | None:
        """Return the time at which the next probe is due, None without probes."""
        return min((self._tallies[probe].due for probe in self._enabled_probes()), default=None)

    def mark_started(self, probe: ContainerProbe, now: datetime) -> None:
        """Record the start of a probe, which is due again after its period or timeout."""
        self._tallies[probe].due = now + timedelta(seconds=max(probe.period, probe.timeout))

    def record_result(self, probe: ContainerProbe, ok: bool, now: datetime) -> None:
        """Record the result of a probe; one that is not run any more is ignored."""
        if probe not in self._enabled_probes():
            return
        tally = self._tallies[probe]
        tally.record_result(probe, ok, now)
        if probe.purpose == "startup" and tally.passed:
            self.started = True
        elif probe.purpose != "readiness" and not tally.passed and not ok and tally.count >= probe.failures:
            self.to_restart = probe

    def _enabled_probes(self) -> list[ContainerProbe]:
        """Return the startup probe until it passes, then the others."""
        if self.to_restart is not None:
            return []
        if self._ending:
            return [probe for probe in self._tallies if probe.purpose == "readiness" and self.started]
        return [probe for probe in self._tallies if (probe.purpose == "startup") != self.started]
