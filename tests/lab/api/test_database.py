"""What the lab's file keeps: all of it after an end, a whole moment after a crash, and versions that go on."""

import random
import shutil
import threading

import pytest

from narthex.lab.api.registry import Registry
from narthex.lab.api.store import ObjectStore
from narthex.lab.server import database
from narthex.lab.server.database import ObjectDatabase, UnreadableDatabase
from narthex.testing.load import until

from .registries import World, thing


def world(store=None):
    clock = World()
    return Registry(clock.now, clock.entropy, store=store or ObjectStore())


def contents(registry):
    return {kind: registry.list(kind) for kind in registry.kinds if registry.list(kind)}


def reloaded(path):
    store = ObjectStore()
    keeper = ObjectDatabase(path)
    keeper.load(store)
    keeper.close()
    return world(store)


def test_all_is_there_again_and_versions_go_on(tmp_path):
    path = tmp_path / "lab.sqlite"
    first, lock = world(), threading.RLock()
    first.create("ConfigMap", thing("before"))
    keeper = ObjectDatabase(path)
    assert keeper.load(ObjectStore()) == 0
    keeper.follow(first, lock)
    dice = random.Random(1)
    for number in range(200):
        with lock:
            name = f"x{dice.randrange(20)}"
            if first.get("ConfigMap", "shop", name) is None:
                first.create("ConfigMap", thing(name, data={"n": str(number)}))
            elif dice.random() < 0.5:
                first.update("ConfigMap", thing(name, data={"n": str(number), "é": "\u2028"}))
            else:
                first.delete("ConfigMap", "shop", name)
        keeper.wake()
    keeper.close()
    again = reloaded(path)
    assert contents(again) == contents(first)
    assert again.version > first.version
    made = again.create("ConfigMap", thing("later"))
    assert int(made["metadata"]["resourceVersion"]) == again.version


def test_kinds_that_were_defined_are_known_again(tmp_path):
    registry = world()
    names = {"plural": "shops", "kind": "Shop"}
    versions = [{"name": "v1", "served": True, "storage": True}]
    spec = {"group": "example.com", "scope": "Namespaced", "names": names, "versions": versions}
    registry.create("CustomResourceDefinition", thing("shops.example.com", "", spec=spec))
    registry.create("Shop.example.com", thing("a"))
    keeper = ObjectDatabase(tmp_path / "lab.sqlite")
    keeper.follow(registry, threading.RLock())
    keeper.close()
    again = reloaded(tmp_path / "lab.sqlite")
    assert "Shop.example.com" in again.kinds
    assert contents(again) == contents(registry)


def test_what_was_compacted_meanwhile_is_written_whole(tmp_path):
    registry, lock = world(), threading.RLock()
    registry.create("ConfigMap", thing("a"))
    keeper = ObjectDatabase(tmp_path / "lab.sqlite")
    keeper.follow(registry, lock)
    with lock:
        registry.delete("ConfigMap", "shop", "a")
        registry.create("ConfigMap", thing("b"))
        registry.store.compact()
    keeper.wake()
    keeper.close()
    assert contents(reloaded(tmp_path / "lab.sqlite")) == contents(registry)


def test_a_crash_leaves_a_moment_that_was(tmp_path):
    """The file as another process finds it when this one is killed between two transactions."""
    registry, lock = world(), threading.RLock()
    keeper = ObjectDatabase(tmp_path / "lab.sqlite")
    keeper.follow(registry, lock)
    with lock:
        for name in ("a", "b"):
            registry.create("ConfigMap", thing(name))
    keeper.wake()
    copies = tmp_path / "copies"
    copies.mkdir()
    for path in tmp_path.glob("lab.sqlite*"):
        shutil.copy(path, copies)
    found = contents(reloaded(copies / "lab.sqlite"))
    assert found in ({}, contents(registry))
    keeper.close()


def test_a_full_disk_loses_nothing_once_there_is_room(tmp_path, caplog, monkeypatch):
    """A limit of pages stands for the disk. Changes that could not be written are tried again without another one."""
    monkeypatch.setattr(database, "_RETRY", 0.05)
    registry, lock = world(), threading.RLock()
    keeper = ObjectDatabase(tmp_path / "lab.sqlite")
    keeper._file.execute("PRAGMA max_page_count = 20")
    keeper.follow(registry, lock)
    with lock:
        registry.create("ConfigMap", thing("large", data={"text": "x" * 200_000}))
    keeper.wake()
    until(lambda: keeper.trouble, "the report of the full disk")
    assert "database or disk is full" in caplog.text
    keeper._file.execute("PRAGMA max_page_count = 100000")
    until(lambda: not keeper.trouble, "the end of the trouble")
    assert "objects are saved again" in caplog.text
    keeper.close()
    assert contents(reloaded(tmp_path / "lab.sqlite")) == contents(registry)


def test_a_file_that_is_something_else_is_refused(tmp_path):
    path = tmp_path / "lab.sqlite"
    path.write_text("This is a letter, and no database at all. " * 100)
    with pytest.raises(
        UnreadableDatabase, match=r"lab\.sqlite cannot be read .* Remove it to start with an empty cluster"
    ):
        ObjectDatabase(path)


def test_the_file_is_its_owners_alone(tmp_path):
    keeper = ObjectDatabase(tmp_path / "lab.sqlite")
    keeper.close()
    assert (tmp_path / "lab.sqlite").stat().st_mode & 0o777 == 0o600
