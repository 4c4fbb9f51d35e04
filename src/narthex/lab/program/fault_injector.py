"""Injection of faults into a running lab: nft rules, netem queues, the API server, and killed processes.

Active faults are evaluated again at each check, so a fault ends with its last target.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from narthex.lab import topology
from narthex.lab.faults import (
    FaultKind,
    FaultTarget,
    InjectedFault,
    InvalidFault,
    active_faults,
    delays,
    delete_table,
    next_end,
    rules,
    validate_fault,
)
from narthex.lab.program.components import LabComponents
from narthex.lab.program.state import LabError, LabState
from narthex.linux.libnftables import NftError, run_nft
from narthex.linux.namespaces import namespace_exists
from narthex.linux.run import CommandError, run
from narthex.model import NamespacedName

_CHECK_SECONDS = 1.0
"""Interval at which the targets of active faults are checked."""
_ERROR_PAUSE_SECONDS = 1.0
_PROCESS, _PROXY = "process/", "proxy/"


class FaultInjector:
    """The active faults. Safe from any thread; one thread runs `run`."""

    def __init__(
        self,
        targets: Callable[[], Mapping[str, FaultTarget]],
        set_api_up: Callable[[bool], object],
        on_change: Callable[[InjectedFault, bool], object],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Create an injector without faults.

        Args:
            targets: Returns all present nodes and pods.
            set_api_up: Stops (False) or starts the API server's listeners.
            on_change: Called when a fault starts (True) or ends.
            wall: Returns the time in seconds since 1970.
        """
        self.active: tuple[InjectedFault, ...] = ()
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._targets = targets
        self._set_api_up = set_api_up
        self._on_change = on_change
        self._wall = wall
        self._last_number = 0
        self._api_up = True
        self._applied = True
        """False if the last change was refused; it is tried again at the next check."""
        self._rules: dict[str, str] = {}
        """Installed rules, by network namespace."""
        self._delays: dict[tuple[str, str], int] = {}

    def start(self, request: Mapping[str, Any]) -> InjectedFault:
        """Start a fault: `kind`, `targets`, and, depending on the kind, `percent`, `milliseconds`, `seconds`.

        Raises LabError if the fault is impossible; then nothing has changed.
        """
        with self._lock:
            try:
                fault = validate_fault(self._requested(request), self._targets())
            except InvalidFault as error:
                raise LabError(str(error)) from None
            before = self.active
            self.active = (*before, fault)
            try:
                self._apply()
            except LabError:
                self.active = before
                self._apply()
                raise
            self._last_number += 1
        self._on_change(fault, True)
        self._wake.set()
        return fault

    def end(self, number: int | None) -> tuple[InjectedFault, ...]:
        """End one fault, or all; return those that ended. Raises LabError if no fault has this number."""
        with self._lock:
            ended = tuple(fault for fault in self.active if number in (None, fault.number))
            if number is not None and not ended:
                raise LabError(f"there is no fault {number}; `narthex lab fault list` shows the active faults")
            self._set_active(tuple(fault for fault in self.active if fault not in ended))
        return ended

    def end_expired(self) -> None:
        """End faults whose time or targets are gone. Raises LabError or OSError if the kernel or the API server refuses."""
        with self._lock:
            self._set_active(active_faults(self.active, self._targets(), self._wall()))

    def run(self) -> None:
        """End faults in time until the process ends."""
        while True:
            self._wake.wait(self._next_check())
            self._wake.clear()
            try:
                self.end_expired()
            except (LabError, OSError) as error:
                print(f"faults: {error}", file=sys.stderr, flush=True)
                time.sleep(_ERROR_PAUSE_SECONDS)

    def _next_check(self) -> float | None:
        """Return the seconds until the next check, None without active faults."""
        active = self.active
        if not active:
            return None if self._applied else _CHECK_SECONDS
        end = next_end(active)
        return _CHECK_SECONDS if end is None else min(_CHECK_SECONDS, max(0.0, end - self._wall()))

    def _requested(self, request: Mapping[str, Any]) -> InjectedFault:
        now, seconds = self._wall(), request.get("seconds")
        return InjectedFault(
            number=self._last_number + 1,
            kind=FaultKind(request["kind"]),
            targets=tuple(self.full_name(target) for target in request.get("targets", ())),
            percent=int(request.get("percent", 0)),
            milliseconds=int(request.get("milliseconds", 0)),
            since=now,
            until=None if seconds is None else now + float(seconds),
        )

    def _set_active(self, active: tuple[InjectedFault, ...]) -> None:
        if active == self.active and self._applied:
            return
        numbers = {fault.number for fault in active}
        ended = [fault for fault in self.active if fault.number not in numbers]
        self.active = active
        self._apply()
        for fault in ended:
            self._on_change(fault, False)

    def full_name(self, target: str) -> str:
        """Return the namespace and name of a pod given by name alone: in `default`, or the only one of that name.

        Raises InvalidFault if several pods match.
        """
        targets = self._targets()
        if target in targets or "/" in target:
            return target
        found = [name for name in targets if name.partition("/")[2] == target]
        if f"default/{target}" in found:
            return f"default/{target}"
        if len(found) > 1:
            raise InvalidFault(f"{target!r} is ambiguous: use one of {', '.join(sorted(found))}")
        return found[0] if found else target

    def _apply(self) -> None:
        """Install rules and queues for the active faults."""
        self._applied = False
        targets = self._targets()
        bridges = {target.namespace for target in targets.values() if target.node}
        desired = rules(self.active, targets)
        for namespace in [each for each in self._rules if each not in desired]:
            # A bridge's namespace is never a pod's.
            self._nft(namespace, delete_table(namespace in bridges))
            del self._rules[namespace]
        for namespace, text in desired.items():
            if self._rules.get(namespace) != text:
                self._nft(namespace, text)
                self._rules[namespace] = text
        self._set_delays(delays(self.active, targets))
        up = not any(fault.kind is FaultKind.API for fault in self.active)
        if up is not self._api_up:
            self._set_api_up(up)
            self._api_up = up
        self._applied = True

    def _nft(self, namespace: str, text: str) -> None:
        if not namespace_exists(namespace):
            return
        try:
            run_nft(text, namespace)
        except (NftError, OSError) as error:
            raise LabError(f"the kernel rejects the rules of a fault: {error}") from error

    def _set_delays(self, desired: Mapping[tuple[str, str], int]) -> None:
        for namespace, device in [each for each in self._delays if each not in desired]:
            if namespace_exists(namespace):
                self._tc(namespace, "del", device)
            del self._delays[namespace, device]
        for (namespace, device), milliseconds in desired.items():
            if self._delays.get((namespace, device)) != milliseconds:
                self._tc(namespace, "replace", device, "netem", "delay", f"{milliseconds}ms")
                self._delays[namespace, device] = milliseconds

    def _tc(self, namespace: str, command: str, device: str, *queue: str) -> None:
        try:
            run(["tc", "qdisc", command, "dev", device, "root", *queue], namespace=namespace)
        except FileNotFoundError:
            raise LabError("the program 'tc' is missing; install the package iproute2") from None
        except CommandError as error:
            if "qdisc kind is unknown" in error.said:
                raise LabError(
                    "this kernel has no netem (module sch_netem), so it cannot delay packets; use loss or partition"
                ) from None
            raise LabError(str(error)) from error


class RestartNode(Protocol):
    """Kills a node's process, or its proxy, and starts a new one. Raises LabError."""

    def __call__(self, node: str, *, proxy: bool) -> object:
        """Restart one."""


class FaultRequests:
    """Handles `narthex lab fault` in the lab's process, and lets other components react to faults."""

    def __init__(
        self,
        parts: LabComponents,
        state: Callable[[], LabState],
        *,
        publish: Callable[[], object],
        kill_node: Callable[[str], object],
        restart_node: RestartNode,
    ) -> None:
        self._parts = parts
        self._state = state
        self._publish = publish
        self._kill_node = kill_node
        self._restart_node = restart_node
        self.injector = FaultInjector(self._targets, self._set_api_up, self._on_change)

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Handle `{"begin": {...}}`, `{"end": NUMBER or null}`, or `{"kill": TARGET}`. Raises LabError."""
        if "begin" in request:
            return {"fault": msgspec.to_builtins(self.injector.start(request["begin"]))}
        if "kill" in request:
            self._kill(request["kill"])
            return {}
        return {"ended": msgspec.to_builtins(self.injector.end(request["end"]))}

    def _on_change(self, fault: InjectedFault, started: bool) -> None:
        self._parts.controllers.record_fault(fault, started)
        partitions = (each for each in self.injector.active if each.kind is FaultKind.PARTITION)
        nodes = {node.name for node in self._parts.nodes}
        self._parts.heartbeats.cut_off(
            frozenset(target for each in partitions for target in each.targets if target in nodes)
        )
        self._publish()

    def _targets(self) -> dict[str, FaultTarget]:
        """Return the running nodes, and the pods with a network namespace of their own."""
        state = self._state()
        fabric = topology.fabric_namespace(state.name)
        targets = {
            node.name: FaultTarget(namespace=fabric, device=node.name, node=True)
            for node in self._parts.nodes
            if node.name not in state.killed
        }
        for pod in self._parts.kubelet.pods():
            if not pod.pod["spec"].get("hostNetwork") and pod.facts.networked:
                namespace = topology.pod_namespace(state.name, pod.key)
                targets[str(pod.key)] = FaultTarget(namespace=namespace, device="eth0", node=False)
        return targets

    def _set_api_up(self, up: bool) -> None:
        if up:
            self._parts.api_server.resume()
        else:
            self._parts.api_server.pause()

    def _kill(self, target: str) -> None:
        if target.startswith(_PROCESS):
            self._restart_node(target.removeprefix(_PROCESS), proxy=False)
            return
        if target.startswith(_PROXY):
            self._restart_node(target.removeprefix(_PROXY), proxy=True)
            return
        if target in {node.name for node in self._parts.nodes}:
            self._kill_node(target)
            return
        try:
            name = self.injector.full_name(target)
        except InvalidFault as error:
            raise LabError(str(error)) from None
        namespace, _, pod = name.rpartition("/")
        if not self._parts.kubelet.crash(NamespacedName(namespace, pod)):
            nodes = ", ".join(node.name for node in self._parts.nodes)
            raise LabError(f"no running {target!r}: name a pod, process/NODE, proxy/NODE, or a node ({nodes})")
