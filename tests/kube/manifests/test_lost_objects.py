"""Objects that vanish from a file take effect after a pause."""

import os
from pathlib import Path

import pytest
from tests.kube.manifests.files import FIFTY, service, settled

from narthex.kube import manifests
from narthex.kube.manifests import ManifestSource
from narthex.model.store import Delete


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
