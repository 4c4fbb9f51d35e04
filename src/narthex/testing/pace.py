"""Scenario steps that take hours, compressed to seconds that a kernel can be asked to wait.

For two connections of one client to one Service, it matters only whether the later one comes within the affinity timeout of the
earlier one. The timeout becomes a small number of seconds, and the steps move to the earliest times that keep all these
relations with a second to spare.
"""

from __future__ import annotations

import msgspec

from narthex.model import Service
from narthex.testing.scenario import Scenario, ScenarioStep

LONGEST = 15.0
"""Seconds that the steps of one file may take."""
_MARGIN = 1.0
_TIMEOUTS = range(2, 14)


class Paced(msgspec.Struct, frozen=True, kw_only=True):
    """Steps and the real times at which to take them, in seconds from the first."""

    scenario: Scenario
    """The same with its affinity timeouts shortened."""
    steps: tuple[ScenarioStep, ...]
    times: tuple[float, ...]
    timeout: int
    """What every affinity timeout has become; seconds."""


def pace(scenario: Scenario, steps: tuple[ScenarioStep, ...]) -> Paced:
    """Choose the times. Raises ValueError if LONGEST seconds do not suffice to keep the relations."""
    relations = _relations(scenario, steps)
    for timeout in _TIMEOUTS:
        times = _earliest(len(steps), relations, timeout)
        if times is not None:
            return Paced(scenario=_shortened(scenario, timeout), steps=steps, times=times, timeout=timeout)
    raise ValueError(f"{scenario.name}: the steps cannot be made within {LONGEST:g} s with a second to spare")


_Relation = tuple[int, int, bool]
"""Earlier step, later step, whether the later one comes within the timeout."""


def _relations(scenario: Scenario, steps: tuple[ScenarioStep, ...]) -> list[_Relation]:
    found = []
    for later, step in enumerate(steps):
        service = _service_of(scenario, step)
        if service is None or service.affinity_seconds is None:
            continue
        for earlier in range(later):
            other = steps[earlier]
            if other.source == step.source and _service_of(scenario, other) is service:
                found.append((earlier, later, step.at - other.at < service.affinity_seconds))
    return found


def _service_of(scenario: Scenario, step: ScenarioStep) -> Service | None:
    """Return the Service that a step connects to."""
    node_ports = None
    for service in scenario.services:
        addresses = {*service.cluster_ips, *service.external_ips, *(entry.ip for entry in service.ingress)}
        for port in service.ports:
            if port.protocol is not step.protocol:
                continue
            if step.destination in addresses and port.port == step.port:
                return service
            if port.node_port == step.port:
                node_ports = service
    return node_ports


def _earliest(count: int, relations: list[_Relation], timeout: int) -> tuple[float, ...] | None:
    """Return the earliest times that keep all relations, or None if they contradict each other or take too long."""
    times = [0.0] * count
    for _ in range(count * count + 1):
        before = list(times)
        for number in range(1, count):
            times[number] = max(times[number], times[number - 1])
        for earlier, later, within in relations:
            if within:
                times[earlier] = max(times[earlier], times[later] - (timeout - _MARGIN))
            else:
                times[later] = max(times[later], times[earlier] + timeout + _MARGIN)
        if times == before:
            return tuple(times)
        if times and times[-1] > LONGEST:
            return None
    return None


def _shortened(scenario: Scenario, timeout: int) -> Scenario:
    objects = tuple(
        msgspec.structs.replace(obj, affinity_seconds=timeout)
        if isinstance(obj, Service) and obj.affinity_seconds is not None
        else obj
        for obj in scenario.objects
    )
    return msgspec.structs.replace(scenario, objects=objects)
