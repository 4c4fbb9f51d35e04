"""Faults in force in a running lab: begun on request, ended by time or request, kept true by rules and queues.

What is in force is decided anew at each turn, so a pod that is gone takes its faults along.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from narthex.lab import topology
from narthex.lab.controllers.controller_manager import lab_controllers
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
from narthex.lab.program.recording import HistoryRecorder
from narthex.lab.program.state import LabError
from narthex.linux import namespaces as netns
from narthex.linux.libnftables import NftError, run_nft
from narthex.linux.run import CommandError, run
from narthex.model.names import NamespacedName

if TYPE_CHECKING:
    from narthex.lab.program.lab_process import LabProcess

Told = Callable[[InjectedFault, bool], object]
"""Is told of each fault that begins (True) or ends."""


_LOOK_SECONDS = 1.0
"""While there are faults: a pod that has gone takes its faults along."""
_ERROR_PAUSE_SECONDS = 1.0


class FaultInjector:
    """What goes wrong at present. For any thread; one runs `run`."""

    def __init__(
        self,
        places: Callable[[], Mapping[str, FaultTarget]],
        api: Callable[[bool], object],
        told: Told,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`places`: of all nodes and pods now; `api` takes the API server's listeners down (False) and up."""
        self.present: tuple[InjectedFault, ...] = ()
        self._lock = threading.RLock()
        self._news = threading.Event()
        self._places = places
        self._api = api
        self._told = told
        self._wall = wall
        self._numbers = 0
        self._api_up = True
        self._rules: dict[str, str] = {}
        """In force, by network namespace."""
        self._delays: dict[tuple[str, str], int] = {}

    def begin(self, wish: Mapping[str, Any]) -> InjectedFault:
        """A fault from now on: `kind`, `targets`, and `percent`, `milliseconds`, `seconds` where it has them. Raises LabError
        when it cannot be; then nothing has changed."""
        with self._lock:
            try:
                fault = validate_fault(self._wished(wish), self._places())
            except InvalidFault as error:
                raise LabError(str(error)) from None
            before = self.present
            self.present = (*before, fault)
            try:
                self._apply()
            except LabError:
                self.present = before
                self._apply()
                raise
            self._numbers += 1
        self._told(fault, True)
        self._news.set()
        return fault

    def end(self, number: int | None) -> tuple[InjectedFault, ...]:
        """End one fault, or all; those that ended. Raises LabError when there is none of that number."""
        with self._lock:
            ended = tuple(fault for fault in self.present if number in (None, fault.number))
            if number is not None and not ended:
                raise LabError(f"there is no fault {number}; `narthex lab fault list` shows which there are")
            self._keep(tuple(fault for fault in self.present if fault not in ended))
        return ended

    def turn(self) -> None:
        """End what is due. Raises LabError when the kernel does not let go."""
        with self._lock:
            self._keep(active_faults(self.present, self._places(), self._wall()))

    def run(self) -> None:
        """End what is due, for good."""
        while True:
            self._news.wait(self._next_look())
            self._news.clear()
            try:
                self.turn()
            except LabError as error:
                print(f"faults: {error}", file=sys.stderr, flush=True)
                time.sleep(_ERROR_PAUSE_SECONDS)

    def _next_look(self) -> float | None:
        """Seconds; None: nothing ends before something begins."""
        present = self.present
        if not present:
            return None
        end = next_end(present)
        return _LOOK_SECONDS if end is None else min(_LOOK_SECONDS, max(0.0, end - self._wall()))

    def _wished(self, wish: Mapping[str, Any]) -> InjectedFault:
        now, seconds = self._wall(), wish.get("seconds")
        return InjectedFault(
            number=self._numbers + 1,
            kind=FaultKind(wish["kind"]),
            targets=tuple(self.named(target) for target in wish.get("targets", ())),
            percent=int(wish.get("percent", 0)),
            milliseconds=int(wish.get("milliseconds", 0)),
            since=now,
            until=None if seconds is None else now + float(seconds),
        )

    def _keep(self, left: tuple[InjectedFault, ...]) -> None:
        if left == self.present:
            return
        numbers = {fault.number for fault in left}
        gone = [fault for fault in self.present if fault.number not in numbers]
        self.present = left
        self._apply()
        for fault in gone:
            self._told(fault, False)

    def named(self, target: str) -> str:
        """A pod's name alone means the one in the namespace `default`, as with kubectl, or the only one of that name. Raises
        BadFault when it could be several."""
        places = self._places()
        if target in places or "/" in target:
            return target
        found = [name for name in places if name.partition("/")[2] == target]
        if f"default/{target}" in found:
            return f"default/{target}"
        if len(found) > 1:
            raise InvalidFault(f"{target!r} could be {', '.join(sorted(found))}: name it in full")
        return found[0] if found else target

    def _apply(self) -> None:
        """Make the network as the present faults want it."""
        places = self._places()
        bridges = {place.namespace for place in places.values() if place.node}
        wanted = rules(self.present, places)
        for namespace in [each for each in self._rules if each not in wanted]:
            # A bridge's namespace is never a pod's.
            self._nft(namespace, delete_table(namespace in bridges))
            del self._rules[namespace]
        for namespace, text in wanted.items():
            if self._rules.get(namespace) != text:
                self._nft(namespace, text)
                self._rules[namespace] = text
        self._queues(delays(self.present, places))
        up = not any(fault.kind is FaultKind.API for fault in self.present)
        if up is not self._api_up:
            self._api(up)
            self._api_up = up

    def _nft(self, namespace: str, text: str) -> None:
        if not netns.exists(namespace):
            return
        try:
            run_nft(text, namespace)
        except (NftError, OSError) as error:
            raise LabError(f"the kernel does not take the rules of a fault: {error}") from error

    def _queues(self, wanted: Mapping[tuple[str, str], int]) -> None:
        for namespace, device in [each for each in self._delays if each not in wanted]:
            if netns.exists(namespace):
                self._tc(namespace, "del", device)
            del self._delays[namespace, device]
        for (namespace, device), milliseconds in wanted.items():
            if self._delays.get((namespace, device)) != milliseconds:
                self._tc(namespace, "replace", device, "netem", "delay", f"{milliseconds}ms")
                self._delays[namespace, device] = milliseconds

    def _tc(self, namespace: str, word: str, device: str, *queue: str) -> None:
        try:
            run(["tc", "qdisc", word, "dev", device, "root", *queue], namespace=namespace)
        except FileNotFoundError:
            raise LabError("the program 'tc' is missing; install the package iproute2") from None
        except CommandError as error:
            if "qdisc kind is unknown" in error.said:
                raise LabError(
                    "this kernel has no netem (module sch_netem), so it cannot delay packets; loss and partition need none"
                ) from None
            raise LabError(str(error)) from error


Object = dict[str, Any]
_PROCESS = "process/"


class FaultRequests:
    """Faults and the record of one lab."""

    def __init__(self, lab: LabProcess) -> None:
        self._lab = lab
        self.faults = FaultInjector(self._places, self._api, self._told)
        self.recorder: HistoryRecorder | None = None
        """Belongs to whoever holds the objects' lock."""

    def answer_fault(self, content: Mapping[str, Any]) -> Object:
        """`{"begin": {…}}`, `{"end": NUMBER or null}` or `{"kill": TARGET}`. Raises LabError."""
        if "begin" in content:
            return {"fault": msgspec.to_builtins(self.faults.begin(content["begin"]))}
        if "kill" in content:
            self._kill(content["kill"])
            return {}
        return {"ended": msgspec.to_builtins(self.faults.end(content["end"]))}

    def answer_record(self, content: Mapping[str, Any]) -> Object:
        """`{"begin": PATH}` or `{"end": true}`: the path of the file. Raises LabError."""
        with self._lab.ledger.held() as registry:
            if "begin" in content:
                return {"path": str(self._begin_record(Path(content["begin"]), registry.store))}
            recorder, self.recorder = self.recorder, None
            if recorder is None:
                raise LabError("nothing is recorded; `narthex lab record FILE` begins")
            self._lab.controlling.recorder = None
            recorder.close(datetime.now(UTC))
        return {"path": str(recorder.path)}

    def _begin_record(self, path: Path, store: Any) -> Path:
        if self.recorder is not None:
            raise LabError(f"{self.recorder.path} is being recorded already; `narthex lab record --end` ends that")
        now = datetime.now(UTC)
        try:
            self.recorder = HistoryRecorder(path, self._lab.state.name, store, now)
        except FileExistsError:
            raise LabError(f"{path} is there already; choose another name") from None
        except OSError as error:
            raise LabError(f"{path} cannot be written: {error.strerror}") from None
        for fault in self.faults.present:
            self.recorder.broke(fault, now)
        # What the controllers know from before would be missing in a replay.
        self._lab.controlling.begin_anew(lab_controllers(), self.recorder)
        return path

    def _told(self, fault: InjectedFault, begins: bool) -> None:
        with self._lab.ledger.held():
            if self.recorder is not None:
                now = datetime.now(UTC)
                if begins:
                    self.recorder.broke(fault, now)
                else:
                    self.recorder.mended(fault.number, now)
        apart = (each for each in self.faults.present if each.kind is FaultKind.PARTITION)
        nodes = {node.name for node in self._lab.nodes}
        self._lab.hearts.cut(frozenset(target for each in apart for target in each.targets if target in nodes))
        self._lab.publish()

    def _places(self) -> dict[str, FaultTarget]:
        """Where packets of nodes that live pass, and of pods that have a network of their own."""
        fabric = topology.fabric_namespace(self._lab.state.name)
        places = {
            node.name: FaultTarget(namespace=fabric, device=node.name, node=True)
            for node in self._lab.nodes
            if node.name not in self._lab.state.killed
        }
        for life in self._lab.kubelet.lives():
            if not life.pod["spec"].get("hostNetwork") and life.facts.networked:
                namespace = topology.pod_namespace(self._lab.state.name, life.key)
                places[str(life.key)] = FaultTarget(namespace=namespace, device="eth0", node=False)
        return places

    def _api(self, up: bool) -> None:
        if up:
            self._lab.serving.resume()
        else:
            self._lab.serving.pause()

    def _kill(self, target: str) -> None:
        if target.startswith(_PROCESS):
            self._lab.restart(target.removeprefix(_PROCESS))
            return
        if target in {node.name for node in self._lab.nodes}:
            self._lab.kill(target)
            return
        try:
            name = self.faults.named(target)
        except InvalidFault as error:
            raise LabError(str(error)) from None
        namespace, _, pod = name.rpartition("/")
        if not self._lab.kubelet.crash(NamespacedName(namespace, pod)):
            nodes = ", ".join(node.name for node in self._lab.nodes)
            raise LabError(f"there is no {target!r} that runs: name a pod, process/NODE, or a node ({nodes})")
