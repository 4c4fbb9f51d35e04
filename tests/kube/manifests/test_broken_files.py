"""Files that break keep their last good objects; problems are limited and counted."""

import os
from pathlib import Path

import pytest
from tests.kube.manifests.files import service, settled, told

from narthex.kube import manifests
from narthex.kube.manifests import ManifestSource
from narthex.model.decode.objects import MAX_BROKEN, decode
from narthex.model.problem import MAX_PROBLEMS
from narthex.runtime.logs import MAX_LOGGED, ProblemLog


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
