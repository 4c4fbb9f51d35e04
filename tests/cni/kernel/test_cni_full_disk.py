"""A node whose disk is full: ADD fails and says why, everything else goes on, and DEL removes everything."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.cni.kernel.cni_place import Place

from narthex.linux.run import run

ROOT = Path(__file__).parents[3]
DISK_BYTES = 256 * 1024


def full(path):
    """Fill the file system of a path."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError as error:
            assert error.strerror == "No space left on device"


@pytest.fixture
def place(tmp_path):
    """A place whose plugins keep their files on small disks."""
    with Place(tmp_path) as made, ExitStack() as stack:
        for path in (made.state, made.networks):
            path.mkdir(parents=True, exist_ok=True)
            run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "small", str(path)])
            stack.callback(run, ["umount", str(path)])
        yield made


@pytest.mark.kernel
def test_a_full_disk_fails_new_pods_and_no_others(place):
    result = place.add("a", (8080, 80, "tcp"))
    for path in (place.state, place.networks):
        full(path / "fill")
    before = place.links(), place.records(), place.reserved(), place.owners()
    place.pod("b")
    assert "No space left on device" in place.bad("ADD", place.bridge(), "b")["msg"]
    place.good("DEL", place.bridge(), "b")
    assert (place.links(), place.records(), place.reserved(), place.owners()) == before
    place.good("CHECK", place.bridge(prevResult=result), "a")
    place.good("DEL", place.portmap(result, (8080, 80, "tcp")), "a")
    place.good("DEL", place.bridge(), "a")
    place.nothing_left()
    for path in (place.state, place.networks):
        (path / "fill").unlink()
    assert place.good("ADD", place.bridge(), "b")["ips"]


@pytest.mark.parametrize("size", [0, 5])
def test_a_file_that_does_not_fit_leaves_the_old_one(tmp_path, size):
    """The kernel writes what fits first. A limit on the size of files stands for the end of the disk."""
    (tmp_path / "record").write_text("before")
    text = (
        "import resource, sys; from narthex.cni.kernel import files\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        "try:\n    files.write(sys.argv[1], 'record', b'0123456789')\n"
        "except OSError as error:\n    print(error.strerror)"
    )
    argv = [sys.executable, "-B", "-c", text, str(tmp_path)]
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True)
    assert done.stdout == "File too large\n", done.stderr
    assert (tmp_path / "record").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["record"]
