"""The plugin's archive unpacks and runs as Krew installs it, and the manifest has the fields that Krew requires."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from scripts.krew import NAME, NEEDED, PLATFORMS, PYTHONS, archive, archive_name, manifest, own_platform

import narthex

VERSION = ".".join(map(str, sys.version_info[:2]))
OWN = own_platform()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An archive of this Python's packages, as pip would install them."""
    folder = tmp_path_factory.mktemp("krew")
    site = folder / "site"
    shutil.copytree(Path(narthex.__file__).parent, site / "narthex", ignore=shutil.ignore_patterns("__pycache__"))
    for name in NEEDED:
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), site / file)
    path = folder / archive_name(OWN)
    archive(path, {VERSION: site})
    return path


def installed(path, folder):
    """The archive as Krew unpacks it, with the link that Krew makes."""
    with tarfile.open(path) as tar:
        tar.extractall(folder / "store", filter="data")
    (folder / "bin").mkdir()
    (folder / "bin" / "kubectl-narthex").symlink_to(folder / "store" / NAME)
    return {**os.environ, "PATH": f"{folder / 'bin'}:{Path(sys.executable).resolve().parent}:{os.environ['PATH']}"}


def test_the_plugin_runs_from_the_archive(built, tmp_path):
    environment = installed(built, tmp_path)
    environment.pop("PYTHONPATH", None)
    words = ["kubectl", "narthex", "--help"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=True)
    assert "Usage: kubectl narthex [OPTIONS] COMMAND" in done.stdout
    (tmp_path / "empty").mkdir()
    # The packages of others are enough for the whole work, too: only kubectl is missing.
    for name in ("sh", "dirname", "readlink"):
        (tmp_path / "empty" / name).symlink_to(shutil.which(name))
    (tmp_path / "empty" / "python3").symlink_to(Path(sys.executable).resolve())
    done = subprocess.run(
        [tmp_path / "bin" / "kubectl-narthex", "trace", "a", "b", "--yes"],
        env={"PATH": str(tmp_path / "empty")}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stderr == "Error: kubectl is not installed, or not on the PATH\n"


def test_without_a_fitting_python_it_says_which_one_it_needs(built, tmp_path):
    installed(built, tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("sh", "dirname", "readlink"):
        (tmp_path / "empty" / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [tmp_path / "bin" / "kubectl-narthex"],
        env={"PATH": str(tmp_path / "empty")}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.endswith(f"it needs one of: {VERSION}\n")


def test_the_manifest_has_the_fields_that_krew_requires(built):
    document = yaml.safe_load(manifest("1.2.0", "https://example.org/v1.2.0/", {OWN: built}))
    assert document["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert (document["kind"], document["metadata"]["name"]) == ("Plugin", "narthex")
    spec = document["spec"]
    assert re.fullmatch(r"v\d+\.\d+\.\d+", spec["version"])
    assert spec["homepage"].startswith("https://")
    assert len(spec["shortDescription"]) <= 50
    assert all(version in spec["caveats"] for version in PYTHONS)
    (one,) = spec["platforms"]
    assert one["selector"] == {"matchLabels": dict(zip(("os", "arch"), OWN.split("/"), strict=True))}
    assert one["uri"] == f"https://example.org/v1.2.0/{built.name}"
    assert one["sha256"] == hashlib.sha256(built.read_bytes()).hexdigest()
    with tarfile.open(built) as tar:
        assert one["bin"] in tar.getnames()
        assert "LICENSE" in tar.getnames()
        assert tar.getmember(one["bin"]).mode & 0o111


def test_equal_contents_have_equal_checksums(tmp_path):
    for version in ("3.11", "3.12"):
        for file, text in {"same/a.py": "", "own/b.so": version}.items():
            path = tmp_path / version / file
            path.parent.mkdir(parents=True)
            path.write_text(text)
    sites = {version: tmp_path / version for version in ("3.11", "3.12")}
    for name in ("one", "other"):
        archive(tmp_path / name, sites)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    with tarfile.open(tmp_path / "one") as tar:
        held = {name for name in tar.getnames() if name.startswith("lib/") and not name.endswith(".python")}
    assert held == {"lib/any/same/a.py", "lib/3.11/own/b.so", "lib/3.12/own/b.so"}


def test_all_platforms_have_an_archive_of_their_own():
    assert len({archive_name(each) for each in PLATFORMS}) == len(PLATFORMS)
