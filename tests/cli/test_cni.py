"""`narthex cni`: what it writes, and what it says."""

import json
import stat

import pytest
from click.testing import CliRunner

from narthex.cli import main

PLUGINS = ["bridge", "flannel", "host-local", "loopback", "portmap", "ptp"]


def ran(*arguments):
    return CliRunner().invoke(main, ["cni", *map(str, arguments)])


def test_install_writes_programs_and_a_configuration(tmp_path):
    done = ran(
        "install",
        "--bin-dir",
        tmp_path / "bin",
        "--conf-dir",
        tmp_path / "conf",
        "--subnet",
        "10.1.0.0/16",
        "-o",
        "json",
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["programs"] == [str(tmp_path / "bin" / name) for name in PLUGINS]
    # What the programs load lies beside them, under names that are no plugins'.
    assert sorted(path.name for path in (tmp_path / "bin").iterdir() if path.name[0] != ".") == PLUGINS
    for name in PLUGINS:
        assert stat.S_IMODE((tmp_path / "bin" / name).stat().st_mode) == 0o755
    config = json.loads((tmp_path / "conf" / "10-narthex.conflist").read_text())
    assert [plugin["type"] for plugin in config["plugins"]] == ["bridge", "portmap"]
    assert config["plugins"][0]["ipam"]["ranges"] == [[{"subnet": "10.1.0.0/16"}]]
    assert config["plugins"][0]["ipMasq"] is False


def test_install_for_a_machine_alone_in_two_families(tmp_path):
    subnets = ("--subnet", "10.1.0.0/16", "--subnet", "fd10:1::/64")
    done = ran("install", "--bin-dir", tmp_path / "bin", "--conf-dir", tmp_path, *subnets, "--masquerade")
    assert done.exit_code == 0, done.output
    bridge = json.loads((tmp_path / "10-narthex.conflist").read_text())["plugins"][0]
    assert bridge["ipMasq"] is True
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.1.0.0/16"}], [{"subnet": "fd10:1::/64"}]]
    assert bridge["ipam"]["routes"] == [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]


def test_two_subnets_of_one_family(tmp_path):
    done = ran("install", "--bin-dir", tmp_path / "bin", "--subnet", "10.1.0.0/16", "--subnet", "10.2.0.0/16")
    assert done.exit_code == 1 and "10.1.0.0/16 and 10.2.0.0/16 are of one IP family" in done.output
    assert not (tmp_path / "bin").exists()


def test_a_configuration_that_is_there_is_left_alone(tmp_path):
    conflist = tmp_path / "10-narthex.conflist"
    conflist.write_text("mine")
    done = ran("install", "--bin-dir", tmp_path / "bin", "--conf-dir", tmp_path)
    assert done.exit_code == 0 and conflist.read_text() == "mine"
    assert "conflist" not in done.output


@pytest.mark.parametrize(
    "subnet, words", [("10.1.0.0", "prefix length"), ("10.1.0.1/16", "host bits set"), ("x", "IP address")]
)
def test_a_subnet_that_is_none(tmp_path, subnet, words):
    done = ran("install", "--bin-dir", tmp_path / "bin", "--subnet", subnet)
    assert done.exit_code == 1 and words in done.output
    assert not (tmp_path / "bin").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    done = ran("install", "--bin-dir", tmp_path / "file" / "bin")
    assert done.exit_code == 1 and "cannot install" in done.output
