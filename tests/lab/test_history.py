"""A history that is gone through again: the same objects at the end, decided by the controllers once more."""

import json
import random

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.controllers.world import World, deployment, service

from narthex.cli import main
from narthex.lab.controllers.service.admission import admission
from narthex.lab.faults import FaultKind, InjectedFault
from narthex.lab.history import ControllersRan, HistoryStart, InvalidHistory, ObjectChanged, read
from narthex.lab.program.recording import HistoryRecorder
from narthex.lab.replay import Replay, ReplayMismatch, objects


class Recorded(World):
    """A world whose history is written down from the begin."""

    def __init__(self, path, **more):
        self.recorder = None
        super().__init__(begin=False, **more)
        self.recorder = HistoryRecorder(path, "made-up", self.registry.store, self.now)
        self.settle()

    def settle(self):
        after = self.registry.version
        super().settle()
        if self.recorder is not None:
            self.recorder.record_controllers(self.now, after, self.now)

    def end(self):
        self.recorder.close(self.now)
        return objects(self.registry.store)


def replayed(path):
    replay = Replay(read(path.read_bytes().splitlines(keepends=True)), admission())
    while replay.step():
        pass
    return replay


@pytest.fixture
def story(tmp_path):
    """A rollout with a scale in its middle, a Service, a pod that fails and comes back, a fault."""
    world = Recorded(tmp_path / "story")
    world.put(service())
    world.put(deployment(3))
    world.converge()
    world.patch("Deployment", "web", replicas=5)
    world.put(deployment(5, image="echo:2"))
    world.run_pods()
    world.recorder.record_fault(
        InjectedFault(number=1, kind=FaultKind.LOSS, targets=("node-1",), percent=30), world.now
    )
    world.set_ready(world.list("Pod")[0], ready=False)
    world.wait(2)
    world.patch("Deployment", "web", replicas=2)
    world.recorder.record_fault_end(1, world.now)
    world.converge()
    world.delete("Pod", world.list("Pod")[0]["metadata"]["name"])
    world.converge()
    return tmp_path / "story", world.end()


def test_a_replay_ends_with_the_very_same_objects(story):
    path, at_the_end = story
    one, other = replayed(path), replayed(path)
    assert one.objects() == other.objects() == at_the_end
    assert one.decided > 20
    assert one.turns > 10
    kinds = {each["kind"] for each in at_the_end}
    assert {"Pod", "EndpointSlice", "ReplicaSet", "Service"} <= kinds
    assert sum(each["kind"] == "Pod" for each in at_the_end) == 2


def test_faults_are_there_while_they_were(story):
    path, _ = story
    replay = Replay(read(path.read_bytes().splitlines(keepends=True)), admission())
    seen = []
    while replay.step():
        seen.append([fault.text(0) for fault in replay.faults.values()])
    assert ["loss of 30 % at node-1"] in seen
    assert seen[-1] == []


@given(seed=st.integers(0, 2**32))
def test_any_history_replays(tmp_path_factory, seed):
    chance = random.Random(seed)
    path = tmp_path_factory.mktemp("history") / "any"
    world = Recorded(path)
    for _ in range(chance.randrange(3, 12)):
        name = chance.choice(["web", "shop", "cart"])
        chance.choice([
            lambda name=name: world.put(deployment(chance.randrange(4), name, image=f"echo:{chance.randrange(3)}")),
            lambda name=name: world.put(service(name, selector={"app": name})),
            world.run_pods,
            lambda: world.run_pods(ready=False),
            lambda: world.wait(chance.random() * 40),
            lambda name=name: world.get("Deployment", name) and world.delete("Deployment", name),
        ])()  # fmt: skip
    at_the_end = world.end()
    assert replayed(path).objects() == at_the_end


def test_controllers_that_decide_otherwise_are_told(story):
    path, _ = story
    lines = path.read_bytes().splitlines(keepends=True)
    entries = list(read(lines))
    decided = {
        version
        for entry in entries
        if isinstance(entry, ControllersRan)
        for version in range(entry.after + 1, entry.upto + 1)
    }
    number, pod = next((number, entry) for number, entry in enumerate(entries) if isinstance(entry, ObjectChanged)
                       and entry.kind == "Pod" and entry.change in decided and entry.object)  # fmt: skip
    other = {**pod.object, "spec": {**pod.object["spec"], "nodeName": "node-9"}}
    lines[number] = msgspec.json.encode(msgspec.structs.replace(pod, object=other)) + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(
        ReplayMismatch, match=rf'version {pod.change}: Pod .* differs at \.spec\.nodeName: "node-9" in the history'
    ):
        replayed(path)


def test_a_secret_stays_where_it_is(tmp_path):
    world = Recorded(tmp_path / "history")
    hidden = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "data": {"password": "aHVzaA=="},
              "metadata": {"name": "key", "namespace": "shop", "annotations": {"applied": "aHVzaA=="}}}  # fmt: skip
    world.registry.store.put("Secret", hidden)
    world.put(service())
    world.end()
    said = (tmp_path / "history").read_bytes()
    assert b'"Secret"' in said
    assert b"aHVzaA" not in said
    assert (tmp_path / "history").stat().st_mode & 0o077 == 0
    # The versions after it are the same all the same.
    assert replayed(tmp_path / "history").registry.version == world.registry.version


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "empty"),
        ([b'{"turn": "2026-01-01T00:00:00Z", "after": 1, "upto": 1}\n'], "line 1: a history starts with"),
        ([b"GIF89a\n"], "line 1: "),
        ([b'{"history": 2, "lab": "x", "at": "2026-01-01T00:00:00Z", "version": 1}\n'], "of version 1"),
        ([b'{"history": 1, "lab": "x", "at": "2026-01-01T00:00:00Z", "version": 1}\n', b'{"odd": 1}\n'], "line 2: not an entry"),
        ([b'{"history": 1, "lab": "x", "at": "2026-01-01T00:00:00Z", "version": 1}\n', b'{"change": 2}\n'], "line 2: "),
    ],
)  # fmt: skip
def test_what_is_no_history(lines, said):
    with pytest.raises(InvalidHistory, match=said):
        Replay(read(lines), admission()).step()


def test_a_line_that_was_cut_off_counts_as_not_written(story):
    path, _ = story
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert isinstance(next(iter(read(path.read_bytes().splitlines(keepends=True)))), HistoryStart)
    assert replayed(path).turns > 0


def test_a_file_that_is_there_is_not_written_over(story):
    path, _ = story
    with pytest.raises(FileExistsError):
        Recorded(path)


def test_the_command(story, tmp_path):
    path, at_the_end = story
    told = CliRunner().invoke(main, ["lab", "replay", str(path)])
    assert told.exit_code == 0, told.output
    assert "all identical" in told.output
    assert "2 Pod" in told.output
    told = CliRunner().invoke(main, ["lab", "replay", str(path), "-o", "json"])
    assert json.loads(told.output)["objects"] == at_the_end
    told = CliRunner().invoke(main, ["lab", "replay", str(path), "--speed", "100000"])
    assert "Deployment shop/web created" in told.output
    told = CliRunner().invoke(main, ["lab", "replay", str(tmp_path / "nothing")])
    assert (told.exit_code, "cannot be read: No such file" in told.output) == (1, True)
