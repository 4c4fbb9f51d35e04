"""Bundles: what is written is read, and what a stranger made harms nobody."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from narthex.model.net import IPFamily
from narthex.trace.node.layout import ABSENT, TAKEN, BundleManifest, PartStatus, read_table, table_text
from narthex.trace.node.view import view_of_bundle
from narthex.trace.program.bundle import BundleError, read_bundle, write_file

TABLE = BundleManifest(node="node-1", writer="test", parts=(PartStatus(path="net/routes-4.json", status=TAKEN),))


def bundle(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        head = tarfile.TarInfo("narthex-bundle/manifest.tsv")
        data = table_text(TABLE).encode()
        head.size = len(data)
        tar.addfile(head, io.BytesIO(data))
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return path


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_what_is_written_is_read(tmp_path: Path) -> None:
    table = BundleManifest(
        node="node-1",
        writer="test",
        parts=(PartStatus(path="net/fdb.json", status=ABSENT, remark="bridge is not\tinstalled"),),
    )
    write_file(
        tmp_path / "b.tgz", table, {"net/routes-4.json": '[{"dst":"default","dev":"eth0"}]', "rules/nft.txt": ""}
    )
    assert (tmp_path / "b.tgz").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "b.tgz", table, {})
    read = read_bundle(tmp_path / "b.tgz")
    view = view_of_bundle(read.parts, read.table, read.origin)
    assert view.name == "node-1"
    assert view.routes is not None
    assert view.routes[0].destination == "0.0.0.0/0"
    assert view.fdb is None
    assert view.absent["fdb"] == "bridge is not installed"
    assert view.absent["links"] == "not in the bundle"
    assert view.rules is not None
    assert view.rules[IPFamily.IPV4].ruleset.tables == ()


@pytest.mark.parametrize(
    ("member", "told"),
    [
        (("../evil", b""), "no path in a bundle"),
        (("/etc/passwd", b""), "no path in a bundle"),
        (("narthex-bundle/../../evil", b""), "no path in a bundle"),
        (("elsewhere/file", b""), "outside of"),
        (("narthex-bundle/a\nb", b""), "no path in a bundle"),
        (("narthex-bundle/" + "x" * 300, b""), "no path in a bundle"),
        (("narthex-bundle/manifest.tsv", b"format\t1"), "twice"),
        (special("narthex-bundle/link", tarfile.SYMTYPE, "/etc/shadow"), "a link or a device"),
        (special("narthex-bundle/hard", tarfile.LNKTYPE, "narthex-bundle/manifest.tsv"), "a link or a device"),
        (special("narthex-bundle/dev", tarfile.CHRTYPE), "a link or a device"),
        (special("narthex-bundle/fifo", tarfile.FIFOTYPE), "a link or a device"),
    ],
)
def test_members_that_no_bundle_has_are_refused(tmp_path: Path, member, told: str) -> None:
    with pytest.raises(BundleError, match=told):
        read_bundle(bundle(tmp_path / "evil.tgz", member))


def test_what_grows_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = bundle(tmp_path / "large.tgz", ("narthex-bundle/net/zeros", bytes(5 << 20)))
    assert path.stat().st_size < 100_000
    with pytest.raises(BundleError, match="holds more than"):
        read_bundle(path, max_bytes=1 << 20)
    header = special("narthex-bundle/x", tarfile.REGTYPE)
    header.size = 1 << 60
    (tmp_path / "lies.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(BundleError, match="holds more than"):
        read_bundle(tmp_path / "lies.tar")


def test_a_header_of_a_hundred_megabytes_is_no_name(tmp_path: Path) -> None:
    long = special("././@LongLink", tarfile.GNUTYPE_LONGNAME)
    long.size = 100 << 20
    (tmp_path / "name.tgz").write_bytes(gzip.compress(long.tobuf(tarfile.GNU_FORMAT) + bytes(long.size)))
    with pytest.raises(BundleError):
        read_bundle(tmp_path / "name.tgz", max_bytes=1 << 20)


@pytest.mark.parametrize("data", [b"", b"hello", b"\x1f\x8b", b"\x1f\x8bgarbage and more", gzip.compress(b"no tar")])
def test_what_is_no_bundle_is_said(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.tgz").write_bytes(data)
    with pytest.raises(BundleError, match=r"x\.tgz"):
        read_bundle(tmp_path / "x.tgz")


def test_a_directory_is_read_like_its_tar_and_no_link_is_followed(tmp_path: Path) -> None:
    root = tmp_path / "narthex-bundle"
    (root / "net").mkdir(parents=True)
    (root / "manifest.tsv").write_text(table_text(TABLE))
    (root / "net" / "routes-4.json").write_text("[]")
    assert read_bundle(tmp_path).parts["net/routes-4.json"] == "[]"
    (root / "net" / "secret").symlink_to("/etc/hostname")
    with pytest.raises(BundleError, match="a link or a device"):
        read_bundle(tmp_path)


def test_a_later_format_is_said() -> None:
    with pytest.raises(ValueError, match="format"):
        read_table("format\t99\tnode\tx\n")
    assert read_table(table_text(TABLE)).parts[0].path == "net/routes-4.json"


@pytest.mark.parametrize("text", ["{", '{"a": 1}', '[{"dst": 5}]', "[" * 100_000, '[{"dst":"nonsense","dev":"eth0"}]'])
def test_a_part_that_cannot_be_read_is_unknown_and_harms_no_other(text: str) -> None:
    view = view_of_bundle({"net/routes-4.json": text, "net/sysctls.txt": "net.ipv4.ip_forward = 1\n"}, TABLE, "x")
    assert view.routes is None
    assert "cannot be read" in view.absent["routes"]
    assert view.sysctl("net.ipv4.ip_forward") == "1"
