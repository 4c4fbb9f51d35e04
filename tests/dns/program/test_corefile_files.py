"""Corefiles on disk, with what they import, and whether they have changed."""

import os

import pytest

from narthex.dns.corefile.parse import CorefileError
from narthex.dns.program.configuration import CorefileSource, DnsConfigurationError, DnsFlags, read_corefile


@pytest.fixture
def place(tmp_path):
    """A directory like a mounted ConfigMap: links to files behind a link to a directory with dots."""
    data = tmp_path / "custom" / "..data"
    data.mkdir(parents=True)
    (data / "a.override").write_text("errors\n")
    (data / "x.server").write_text("x.example {\n forward . {$TO}\n}\n")
    for name in ("a.override", "x.server"):
        (tmp_path / "custom" / name).symlink_to(data / name)
    (tmp_path / "custom" / "directory.server").mkdir()
    (tmp_path / "Corefile").write_text(
        ". {\n import custom/*.override\n forward . 192.0.2.1\n}\nimport custom/*.server\nimport none*\n"
    )
    return tmp_path


@pytest.mark.parametrize("relative", [False, True])
def test_imports_are_found_beside_the_file(place, monkeypatch, relative):
    monkeypatch.chdir(place.parent)
    path = place / "Corefile"
    if relative:
        path = path.relative_to(place.parent)
    found = read_corefile(path, {"TO": "192.0.2.2"})
    root, other = found.blocks
    assert root.errors is not None and str(other.forwards[0].to[0]) == "192.0.2.2:53"
    assert other.where.file.endswith("custom/x.server") and len(found.imported) == 3


def test_what_cannot_be_read(place):
    with pytest.raises(OSError):
        read_corefile(place / "nothing", {})
    (place / "Corefile").write_text("import custom/none\n")
    with pytest.raises(CorefileError, match="No such file"):
        read_corefile(place / "Corefile", {})
    (place / "Corefile").write_text("#" * 5_000_000)
    with pytest.raises(OSError, match="no Corefile"):
        read_corefile(place / "Corefile", {})


class TestReread:
    @pytest.fixture
    def configuration(self, place, monkeypatch):
        monkeypatch.setenv("TO", "192.0.2.2")
        return CorefileSource(place / "Corefile", DnsFlags())

    def test_the_same_is_not_other(self, configuration):
        assert configuration.reread() is None

    def test_an_imported_file_counts(self, configuration, place):
        (place / "custom" / "..data" / "a.override").write_text("errors\nloop\n")
        assert configuration.reread()[0].loop
        assert configuration.reread() is None
        (place / "custom" / "new.server").write_text("new.example {\n errors\n}\n")
        assert configuration.reread()[1].zones == ("new.example.",)

    def test_a_fault_is_told_once_and_changes_nothing(self, configuration, place, caplog):
        before = configuration.blocks
        (place / "Corefile").write_text(". {\n nonsense\n}\n")
        assert configuration.reread() is None and configuration.reread() is None
        assert [record for record in caplog.messages if "unknown plugin" in record] == [caplog.messages[0]]
        assert configuration.blocks == before
        (place / "Corefile").write_text(". {\n loop\n forward . 192.0.2.9\n}\n")
        assert configuration.reread()[0].loop

    def test_files_of_tls_are_tried_before_it_is_in_force(self, configuration, place, caplog):
        (place / "Corefile").write_text(". {\n forward . tls://192.0.2.1 {\n tls /no/such/authority\n }\n}\n")
        assert configuration.reread() is None
        assert any("tls: No such file" in message for message in caplog.messages)
        with pytest.raises(DnsConfigurationError, match="No such file"):
            CorefileSource(place / "Corefile", DnsFlags())


def test_comments_alone_are_another_file_but_no_other_blocks(place, monkeypatch):
    monkeypatch.setenv("TO", "192.0.2.2")
    configuration = CorefileSource(place / "Corefile", DnsFlags())
    with (place / "Corefile").open("a") as file:
        file.write("# nothing\n")
    os.utime(place / "Corefile", ns=(1, 1))
    assert configuration.reread() is None
