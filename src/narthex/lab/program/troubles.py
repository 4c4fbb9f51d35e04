"""What a running lab does when it is asked for faults and for a record of its history."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from narthex.lab import topology
from narthex.lab.controllers.cluster import all_controllers
from narthex.lab.faults import BadFault, Fault, Kind, Place
from narthex.lab.program.faults import Faults
from narthex.lab.program.recorder import Recorder
from narthex.lab.program.state import LabError
from narthex.model.names import NamespacedName

if TYPE_CHECKING:
    from narthex.lab.program.process import LabProcess

Object = dict[str, Any]
_PROCESS = "process/"


class Troubles:
    """Faults and the record of one lab."""

    def __init__(self, lab: LabProcess) -> None:
        self._lab = lab
        self.faults = Faults(self._places, self._api, self._told)
        self.recorder: Recorder | None = None
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
            self.recorder = Recorder(path, self._lab.state.name, store, now)
        except FileExistsError:
            raise LabError(f"{path} is there already; choose another name") from None
        except OSError as error:
            raise LabError(f"{path} cannot be written: {error.strerror}") from None
        for fault in self.faults.present:
            self.recorder.broke(fault, now)
        # What the controllers know from before would be missing in a replay.
        self._lab.controlling.begin_anew(all_controllers(), self.recorder)
        return path

    def _told(self, fault: Fault, begins: bool) -> None:
        with self._lab.ledger.held():
            if self.recorder is not None:
                now = datetime.now(UTC)
                if begins:
                    self.recorder.broke(fault, now)
                else:
                    self.recorder.mended(fault.number, now)
        apart = (each for each in self.faults.present if each.kind is Kind.PARTITION)
        nodes = {node.name for node in self._lab.nodes}
        self._lab.hearts.cut(frozenset(target for each in apart for target in each.targets if target in nodes))
        self._lab.publish()

    def _places(self) -> dict[str, Place]:
        """Where packets of nodes that live pass, and of pods that have a network of their own."""
        fabric = topology.fabric_namespace(self._lab.state.name)
        places = {
            node.name: Place(namespace=fabric, device=node.name, node=True)
            for node in self._lab.nodes
            if node.name not in self._lab.state.killed
        }
        for life in self._lab.kubelet.lives():
            if not life.pod["spec"].get("hostNetwork") and life.facts.networked:
                namespace = topology.pod_namespace(self._lab.state.name, life.key)
                places[str(life.key)] = Place(namespace=namespace, device="eth0", node=False)
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
        except BadFault as error:
            raise LabError(str(error)) from None
        namespace, _, pod = name.rpartition("/")
        if not self._lab.kubelet.crash(NamespacedName(namespace, pod)):
            nodes = ", ".join(node.name for node in self._lab.nodes)
            raise LabError(f"there is no {target!r} that runs: name a pod, process/NODE, or a node ({nodes})")
