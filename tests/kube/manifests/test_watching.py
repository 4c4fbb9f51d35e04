"""Changes of files are noticed while the source is followed."""

import queue
import shutil
import threading
import time
from pathlib import Path

from tests.kube.manifests.files import FIFTY, service, told

from narthex.kube import manifests
from narthex.kube.manifests import ManifestSource


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
