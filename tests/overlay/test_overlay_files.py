"""Files that are whole or not there."""

import pytest

from narthex.overlay.desired import OverlayRoute
from narthex.overlay.kernel import files


def test_a_file_is_replaced_and_nothing_else_left(tmp_path):
    path = tmp_path / "run" / "flannel" / "subnet.env"
    assert files.read(str(path)) is None
    assert files.write(str(path), "A=1\n")
    inode = path.stat().st_ino
    assert not files.write(str(path), "A=1\n")
    assert path.stat().st_ino == inode
    assert files.write(str(path), "A=2\n")
    assert path.read_text() == "A=2\n"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_replaced_leaves_nothing(tmp_path):
    (tmp_path / "subnet.env").mkdir()
    with pytest.raises(OSError, match="directory"):
        files.write(str(tmp_path / "subnet.env"), "A=1\n")
    (tmp_path / "subnet.env").rmdir()
    assert list(tmp_path.iterdir()) == []


def test_routes_are_kept(tmp_path):
    path = str(tmp_path / "routes")
    assert files.read_routes(path) == frozenset()
    assert not files.write_routes(path, frozenset())
    assert not (tmp_path / "routes").exists()
    routes = frozenset(
        {OverlayRoute("10.244.2.0/24", "192.0.2.2", "eth0"), OverlayRoute("fd44:2::/64", "fd02::2", "eth0")}
    )
    assert files.write_routes(path, routes)
    assert files.read_routes(path) == routes
    assert files.write_routes(path, frozenset())
    assert files.read_routes(path) == frozenset()
    for garbage in ("", "{}", '[{"destination": 1}]'):
        (tmp_path / "routes").write_text(garbage)
        assert files.read_routes(path) == frozenset()
