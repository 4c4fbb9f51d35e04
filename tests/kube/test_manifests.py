"""A directory of manifests as events, while people and programs write in it."""

import os
import queue
import shutil
import threading
import time
from pathlib import Path

import pytest

from narthex.kube import manifests
from narthex.kube.manifests import ManifestSource
from narthex.model.decode.objects import MAX_BROKEN, decode
from narthex.model.objects import NamespacedName
from narthex.model.problem import MAX_PROBLEMS
from narthex.model.store import Delete, Synced, Upsert
from narthex.runtime.logs import MAX_LOGGED, ProblemLog

EXAMPLES = Path(__file__).parents[2] / "examples"
OF_LABS = {"CronJob", "DaemonSet", "Ingress", "Job", "StatefulSet"}


def service(name: str, port: int | str = 80) -> str:
    return f"apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{ports: [{{port: {port}}}]}}\n"


def told(events) -> list[str]:
    """Events in short: `+web`, `-web`, `synced`."""
    words = {Upsert: lambda event: "+" + event.object.name, Delete: lambda event: "-" + event.key.name}
    return [words.get(type(event), lambda _: "synced")(event) for event in events]


class FakeClock:
    """A clock that advances only by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def source(tmp_path, clock):
    return ManifestSource(tmp_path, now=clock)


def settled(source, clock) -> list:
    """Scan until losses take effect; return all events."""
    events = source.scan()
    clock.now += manifests.SETTLE_SECONDS
    return events + source.scan()


def test_first_scan_ends_with_synced(source, tmp_path):
    (tmp_path / "b.yaml").write_text(service("b"))
    (tmp_path / "a.yml").write_text(service("a1") + "---\n" + service("a2"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.json").write_text('{"apiVersion":"v1","kind":"Node","metadata":{"name":"c"}}')
    events = source.scan()
    assert told(events) == ["+a1", "+a2", "+b", "+c", "synced"]
    assert events[-1] == Synced()
    assert [event.object.origin for event in events[:2]] == [f"{tmp_path}/a.yml:1", f"{tmp_path}/a.yml:6"]
    assert source.scan() == []
    assert source.problems == ()


def test_an_empty_directory_is_synced_too(source):
    assert source.scan() == [Synced()]


def test_changes_are_told_as_differences(source, tmp_path, clock):
    (tmp_path / "a.yaml").write_text(service("a") + "---\n" + service("b"))
    source.scan()
    (tmp_path / "a.yaml").write_text(service("a", 81) + "---\n" + service("c"))
    events = settled(source, clock)
    assert told(events) == ["+a", "+c", "-b"]
    assert events[2] == Delete("Service", NamespacedName("default", "b"))
    assert events[0].object.ports[0].port == 81


def test_a_deleted_file_deletes_its_objects(source, tmp_path, clock):
    (tmp_path / "a.yaml").write_text(service("a"))
    source.scan()
    (tmp_path / "a.yaml").unlink()
    assert told(settled(source, clock)) == ["-a"]


def test_moving_is_no_change(source, tmp_path):
    (tmp_path / "a.yaml").write_text(service("a"))
    source.scan()
    (tmp_path / "a.yaml").write_text("# a comment\n" + service("a"))
    assert source.scan() == []
    (tmp_path / "a.yaml").rename(tmp_path / "b.yaml")
    assert source.scan() == []


def test_the_same_size_within_a_tick_of_the_clock(source, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(service("a", 80))
    source.scan()
    before = file.stat()
    file.write_text(service("a", 81))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert told(source.scan()) == ["+a"]


def test_unchanged_files_are_not_read_again(source, tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text(service("a"))
    old = time.time() - 100
    os.utime(tmp_path / "a.yaml", (old, old))
    source.scan()
    monkeypatch.setattr(manifests, "_read", lambda path: pytest.fail(f"{path} was read"))
    assert source.scan() == []


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\x7fELF\x00\xff",
        b"apiVersion: v1\nkind: [",
        b"kind: Service",
        b"apiVersion: v1\nkind: Servce\nmetadata: {name: a}",
    ],
    ids=["empty", "binary", "half", "no-object", "typo"],
)
def test_a_file_that_breaks_keeps_its_last_good_objects(source, tmp_path, broken):
    (tmp_path / "a.yaml").write_text(service("a"))
    (tmp_path / "b.yaml").write_text(service("b"))
    source.scan()
    (tmp_path / "a.yaml").write_bytes(broken)
    (tmp_path / "b.yaml").write_text(service("b", 81))
    assert told(source.scan()) == ["+b"]
    (problem,) = source.problems
    assert problem.severity == "error"
    assert problem.origin.startswith(f"{tmp_path}/a.yaml")
    (tmp_path / "a.yaml").write_text(service("a", 82))
    assert told(source.scan()) == ["+a"]
    assert source.problems == ()


def test_an_object_that_breaks_keeps_its_last_good_state(source, tmp_path, clock):
    (tmp_path / "a.yaml").write_text(service("a") + "---\n" + service("b") + "---\n" + service("c"))
    source.scan()
    (tmp_path / "a.yaml").write_text(service("a", 70000) + "---\n" + service("b", 81))
    assert told(settled(source, clock)) == ["+b", "-c"]
    assert [problem.object for problem in source.problems] == ["Service default/a"]


def test_a_broken_file_at_the_start_spares_the_others(source, tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\x00")
    (tmp_path / "b.yaml").write_text(service("b"))
    (tmp_path / "c.yaml").write_text(service("c", 0) + "---\n" + service("d"))
    assert told(source.scan()) == ["+b", "+d", "synced"]
    assert [Path(problem.origin).name for problem in source.problems] == ["a.yaml:1", "c.yaml:4"]


def test_comments_only_delete(source, tmp_path, clock):
    (tmp_path / "a.yaml").write_text(service("a"))
    source.scan()
    (tmp_path / "a.yaml").write_text("# " + service("a").replace("\n", "\n# "))
    assert told(settled(source, clock)) == ["-a"]


@pytest.mark.parametrize("order", [("a.yaml", "b.yaml"), ("b.yaml", "a.yaml")])
def test_duplicates_are_settled_by_name_whatever_came_first(source, tmp_path, clock, order):
    ports = {"a.yaml": 80, "b.yaml": 81}
    for name in order:
        (tmp_path / name).write_text(service("web", ports[name]))
        source.scan()
    (problem,) = source.problems
    assert problem.object == "Service default/web"
    assert problem.origin == f"{tmp_path}/b.yaml:1"
    assert f"{tmp_path}/a.yaml:1 counts" in problem.message
    fresh = ManifestSource(tmp_path)
    assert fresh.scan()[0].object.ports[0].port == 80
    assert source.scan() == []
    (tmp_path / "a.yaml").unlink()
    assert settled(source, clock)[0].object.ports[0].port == 81
    assert source.problems == ()


def test_duplicates_within_a_file(source, tmp_path):
    (tmp_path / "a.yaml").write_text(service("web", 80) + "---\n" + service("web", 81) + "---\n" + service("web", 82))
    assert source.scan()[0].object.ports[0].port == 80
    assert [problem.origin for problem in source.problems] == [f"{tmp_path}/a.yaml:6", f"{tmp_path}/a.yaml:11"]


def test_one_name_in_two_namespaces_or_kinds_is_no_duplicate(source, tmp_path):
    text = service("web") + "---\n" + service("web").replace("name: web", "name: web, namespace: shop")
    (tmp_path / "a.yaml").write_text(text + "---\napiVersion: v1\nkind: Node\nmetadata: {name: web}\n")
    assert told(source.scan()) == ["+web", "+web", "+web", "synced"]
    assert source.problems == ()


def test_what_editors_leave_is_not_read(source, tmp_path):
    for name in (".a.yaml", "a.yaml~", ".a.yaml.swp", "#a.yaml#", "a.yaml.tmp", "~a.yaml", "notes.txt", "a.yaml.bak"):
        (tmp_path / name).write_text(service("hidden"))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "a.yaml").write_text(service("hidden"))
    (tmp_path / "dir.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "dangling.yaml").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert source.scan() == [Synced()]
    assert source.problems == ()


def test_a_config_map_mount(source, tmp_path):
    """Kubernetes swaps the link `..data` for a new directory in one step."""
    for number, port in (("1", 80), ("2", 81)):
        (tmp_path / f"..2026_{number}").mkdir()
        (tmp_path / f"..2026_{number}" / "web.yaml").write_text(service("web", port))
    (tmp_path / "..data").symlink_to("..2026_1")
    (tmp_path / "web.yaml").symlink_to("..data/web.yaml")
    assert told(source.scan()) == ["+web", "synced"]
    (tmp_path / "..tmp").symlink_to("..2026_2")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    assert source.scan()[0].object.ports[0].port == 81


def test_a_single_file(tmp_path):
    file = tmp_path / "manifest.txt"
    file.write_text(service("web"))
    source = ManifestSource(file)
    assert told(source.scan()) == ["+web", "synced"]


def test_a_path_that_is_not_there_is_not_synced(tmp_path):
    source = ManifestSource(tmp_path / "later")
    assert source.scan() == []
    assert "No such file or directory" in source.problems[0].message
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "a.yaml").write_text(service("a"))
    assert told(source.scan()) == ["+a", "synced"]
    assert source.problems == ()


def test_a_directory_that_vanishes_keeps_everything_until_it_is_back(tmp_path, clock):
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "a.yaml").write_text(service("a"))
    (directory / "b.yaml").write_text(service("b"))
    source = ManifestSource(directory, now=clock)
    source.scan()
    shutil.rmtree(directory)
    assert source.scan() == []
    assert "stays in force" in source.problems[0].message
    directory.mkdir()
    (directory / "a.yaml").write_text(service("a"))
    assert told(settled(source, clock)) == ["-b"]
    assert source.problems == ()


def test_a_file_that_cannot_be_read_keeps_its_objects(source, tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text(service("a"))
    source.scan()

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(manifests, "_read", refuse)
        (tmp_path / "a.yaml").write_text(service("a", 81))
        assert source.scan() == []
        assert "Permission denied" in source.problems[0].message
    assert told(source.scan()) == ["+a"]


def test_a_directory_below_that_cannot_be_read_keeps_its_objects(source, tmp_path, clock, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yaml").write_text(service("a"))
    (tmp_path / "b.yaml").write_text(service("b"))
    source.scan()
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        (tmp_path / "b.yaml").unlink()
        assert told(settled(source, clock)) == ["-b"]
        assert source.problems[0].origin == f"{tmp_path}/sub"
    assert source.scan() == []
    assert source.problems == ()


@pytest.mark.parametrize(
    "example", sorted({path.parent for path in EXAMPLES.glob("*/*.yaml")}), ids=lambda path: path.name
)
def test_the_examples_are_good(example):
    source = ManifestSource(example)
    assert any(isinstance(event, Upsert) for event in source.scan())
    # A proxy has no use for some kinds that a lab has.
    assert [each for each in source.problems if each.object.split()[0] not in OF_LABS] == []


def test_the_hello_world_example_is_the_seed():
    """A Deployment with one replica, and node port 30001 to 4000 to 8080."""
    deployment, service = [event.object for event in ManifestSource(EXAMPLES / "hello-world").scan()[:2]]
    (port,) = service.ports
    assert (deployment.replicas, deployment.template_labels) == (1, service.selector)
    assert (service.type, port.node_port, port.port, port.target_port) == ("NodePort", 30001, 4000, 8080)
    assert deployment.template.containers[0].ports[0].port == 8080


BAD = 3000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("objects.yaml", "---\n".join(service(f"s{number}", 70000) for number in range(BAD))),
        (
            "ports.yaml",
            "kind: Service\napiVersion: v1\nmetadata: {name: s}\nspec:\n  ports:\n" + "  - {port: 0}\n" * BAD,
        ),
        ("garbage.yaml", "---\n[\n" * BAD),
        ("twice.yaml", "---\n".join([service("s")] * BAD)),
        ("unknown.yaml", "---\n".join(["apiVersion: x/v1\nkind: X\nmetadata: {name: x}\n"] * BAD)),
    ],
    ids=lambda value: value.partition(".")[0] if len(value) < 20 else "",
)
def test_problems_are_limited_and_counted(source, tmp_path, caplog, name, text):
    (tmp_path / name).write_text(text)
    (tmp_path / "z.yaml").write_text(service("good"))
    assert "+good" in told(source.scan())
    assert len(source.problems) <= MAX_PROBLEMS + 1
    assert (
        "more problems are not listed" in source.problems[-1].message
        or "rest of the file" in source.problems[0].message
    )
    log = ProblemLog()
    with caplog.at_level("INFO", "narthex"):
        for _ in range(3):
            log.update(source.problems)
    assert len(caplog.records) == MAX_LOGGED + 1
    assert "more problems of objects are not logged" in caplog.text


def test_problems_of_many_files_are_limited_and_counted(source, tmp_path):
    for number in range(MAX_PROBLEMS + 7):
        (tmp_path / f"{number:05}.yaml").write_text("kind: [")
    source.scan()
    assert len(source.problems) == MAX_PROBLEMS + 1
    assert source.problems[-1].message == "7 more problems are not listed"
    assert source.problems[-1].severity == "error"


def test_a_file_of_nothing_but_errors_is_not_read_to_its_end(source, tmp_path, clock):
    """And what it held before stays in force."""
    (tmp_path / "a.yaml").write_text(service("s"))
    source.scan()
    seen = []
    counting = ManifestSource(tmp_path, lambda *one: seen.append(one) or decode(*one), clock)
    (tmp_path / "a.yaml").write_text("---\n".join(service(f"s{number}", 70000) for number in range(20 * MAX_BROKEN)))
    counting.scan()
    assert len(seen) == MAX_BROKEN + 1
    assert source.scan() == []
    clock.now += 100
    assert source.scan() == []


FIFTY = [service(f"s{number}") for number in range(50)]


def services(source, tmp_path, name: str = "all.yaml") -> Path:
    """Write fifty Services into a file, and read it."""
    file = tmp_path / name
    file.write_text("---\n".join(FIFTY))
    assert len(source.scan()) == 51
    return file


@pytest.mark.parametrize("written", [0, 1, 25, 49])
def test_a_file_that_is_written_slowly_loses_nothing(source, tmp_path, clock, written):
    """A writer that truncates the file, writes a part, and pauses, again and again."""
    file = services(source, tmp_path)
    for _ in range(3):
        file.write_text("# begun\n" + "---\n".join(FIFTY[:written]))
        assert source.scan() == []
        assert source.settling
        clock.now += manifests.SETTLE_SECONDS * 0.9
        assert source.scan() == []
        file.write_text("# begun\n" + "---\n".join(FIFTY))
        assert source.scan() == []
        assert not source.settling
        clock.now += 100
        assert source.scan() == []


def test_a_pause_counts_from_the_last_change(source, tmp_path, clock):
    file = services(source, tmp_path)
    for written in (1, 10, 20, 30):
        file.write_text("---\n".join(FIFTY[:written]))
        assert source.scan() == []
        clock.now += manifests.SETTLE_SECONDS * 0.8
    file.write_text("---\n".join(FIFTY[:40]))
    assert source.scan() == []
    clock.now += manifests.SETTLE_SECONDS * 0.8
    assert len(source.scan()) == 10, "a loss takes effect in the end, even if the file keeps changing"


def test_a_loss_takes_effect_within_ten_seconds(source, tmp_path, clock):
    file = services(source, tmp_path)
    began = clock.now
    events, number = [], 0
    while not events:
        file.write_text("---\n".join(FIFTY[:25]) + f"# {number}\n")
        events, number = source.scan(), number + 1
        clock.now += manifests.LOOK_AGAIN_SECONDS
    assert [type(event) for event in events] == [Delete] * 25
    assert clock.now - began <= 10


def test_a_pause_of_a_writer_does_not_end_with_an_earlier_loss(source, tmp_path, clock):
    """One object is deleted, and the file changes all the time; half of it is written when the deletion takes effect."""
    file = services(source, tmp_path)
    began, events = clock.now, []
    while not events:
        late = clock.now - began > manifests.LONGEST_SETTLE_SECONDS - 2 * manifests.LOOK_AGAIN_SECONDS
        file.write_text("---\n".join(FIFTY[: 25 if late else 49]) + f"# {clock.now}\n")
        events = source.scan()
        clock.now += manifests.LOOK_AGAIN_SECONDS
    assert len(events) == 1


def test_a_link_that_dangles_loses_nothing(tmp_path, clock):
    target = tmp_path / "all"
    target.write_text("---\n".join(FIFTY))
    (tmp_path / "m").mkdir()
    link = tmp_path / "m" / "web.yaml"
    link.symlink_to("../all")
    source = ManifestSource(tmp_path / "m", now=clock)
    assert len(source.scan()) == 51
    target.rename(tmp_path / "hidden")
    for _ in range(3):
        clock.now += 100
        assert source.scan() == []
        assert "No such file" in source.problems[0].message
    link.unlink()
    assert len(settled(source, clock)) == 50
    assert source.problems == ()


def test_a_stat_error_loses_nothing(source, tmp_path, clock, monkeypatch):
    services(source, tmp_path)
    stat_of = os.stat

    def refuse(path, *arguments, **options):
        if str(path).endswith("all.yaml"):
            raise OSError(5, "Input/output error", str(path))
        return stat_of(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        for _ in range(3):
            clock.now += 100
            assert source.scan() == []
        assert "Input/output error" in source.problems[0].message
    assert source.scan() == []
    assert source.problems == ()


def test_a_file_that_an_editor_replaces_loses_nothing(source, tmp_path, clock):
    """Some editors rename the old file away before they write the new one."""
    file = services(source, tmp_path)
    file.rename(tmp_path / "all.yaml~")
    assert source.scan() == []
    file.write_text("---\n".join(FIFTY))
    clock.now += manifests.SETTLE_SECONDS
    assert source.scan() == []
    file.unlink()
    source.scan()
    clock.now += manifests.SETTLE_SECONDS
    assert len(source.scan()) == 50


def test_a_lost_object_that_another_file_has_is_not_lost(source, tmp_path, clock):
    (tmp_path / "b.yaml").write_text(service("web"))
    (tmp_path / "a.yaml").write_text(service("web") + "---\n" + service("other"))
    source.scan()
    (tmp_path / "a.yaml").write_text(service("other"))
    (tmp_path / "b.yaml").write_text(service("web", 81))
    (event,) = source.scan()
    assert event.object.ports[0].port == 81
    assert source.problems == ()
    clock.now += 100
    assert source.scan() == []


class Follower:
    """Follows a source in a thread, as `narthex proxy` does, and keeps what it told."""

    def __init__(self, path: Path) -> None:
        self.source = ManifestSource(path)
        self.told: queue.Queue[tuple[list[str], float]] = queue.Queue()
        self.first = told(self.source.scan())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        time.sleep(0.3)  # Until the watch stands: before that, changes are seen at the next look only.
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self):
        for events in self.source.changes(self._stop):
            self.told.put((told(events), time.monotonic()))

    def next(self) -> list[str]:
        return self.told.get(timeout=30)[0]

    def until(self, *words: str) -> None:
        """Wait until all these were told, in any batches."""
        wanted = set(words)
        while wanted:
            wanted -= set(self.next())


def test_watching_a_directory(tmp_path):
    (tmp_path / "a.yaml").write_text(service("a"))
    with Follower(tmp_path) as follower:
        assert follower.first == ["+a", "synced"]
        (tmp_path / "b.yaml").write_text(service("b"))
        follower.until("+b")
        (tmp_path / ".b.tmp").write_text(service("b", 81))
        (tmp_path / ".b.tmp").rename(tmp_path / "b.yaml")
        follower.until("+b")
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "c.yaml").write_text(service("c"))
        follower.until("+c")
        (tmp_path / "a.yaml").write_text("kind: [")
        assert follower.next() == []
        assert follower.source.problems
        (tmp_path / "a.yaml").unlink()
        follower.until("-a")


def test_a_change_is_told_soon(tmp_path):
    """Because it is heard of, not because somebody looks from time to time."""
    with Follower(tmp_path) as follower:
        delays = []
        for port in range(80, 90):
            time.sleep(0.1)
            written = time.monotonic()
            (tmp_path / "a.yaml").write_text(service("a", port))
            delays.append(follower.told.get(timeout=30)[1] - written)
        assert sorted(delays)[5] < manifests.LOOK_AGAIN_SECONDS / 3, delays


def test_watching_survives_that_the_directory_is_replaced(tmp_path):
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "a.yaml").write_text(service("a"))
    with Follower(directory) as follower:
        shutil.rmtree(directory)
        while not any("stays in force" in problem.message for problem in follower.source.problems):
            follower.next()
        directory.mkdir()
        (directory / "a.yaml").write_text(service("a", 81))
        follower.until("+a")
        (directory / "b.yaml").write_text(service("b"))
        follower.until("+b")


def test_watching_one_file_that_editors_replace(tmp_path):
    file = tmp_path / "web.yaml"
    file.write_text(service("web"))
    with Follower(file) as follower:
        for port in (81, 82):
            (tmp_path / "other").write_text(service("web", port))
            (tmp_path / "other").rename(file)
            follower.until("+web")


def test_watching_a_path_that_comes_later(tmp_path):
    with Follower(tmp_path / "x" / "m") as follower:
        (tmp_path / "x" / "m").mkdir(parents=True)
        (tmp_path / "x" / "m" / "a.yaml").write_text(service("a"))
        follower.until("+a", "synced")


def test_watching_without_inotify(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("watchfiles.watch", refuse)
    with Follower(tmp_path) as follower:
        (tmp_path / "a.yaml").write_text(service("a"))
        follower.until("+a")


def test_a_writer_with_a_pause_and_a_real_deletion(tmp_path):
    """The same with the clock and notifications of the machine."""
    file = tmp_path / "all.yaml"
    file.write_text("---\n".join(FIFTY))
    with Follower(tmp_path) as follower:
        with file.open("w") as writer:
            writer.write("---\n".join(FIFTY[:20]) + "---\n")
            writer.flush()
            began = time.monotonic()
            time.sleep(manifests.SETTLE_SECONDS / 4)
            paused = time.monotonic() - began
            writer.write("---\n".join([*FIFTY[20:], service("last")]))
        seen = follower.next()
        if paused < manifests.SETTLE_SECONDS / 2:  # Not on a machine that stood still.
            assert seen == ["+last"]
        while "+last" not in seen:
            seen = follower.next()
        file.unlink()
        gone = follower.next()
        assert len(gone) == 51 and all(word.startswith("-") for word in gone)
