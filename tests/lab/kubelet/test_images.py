"""What images stand for."""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from narthex.lab.containers.root import BindMount
from narthex.lab.kubelet.program.images import Images


def find(images, name):
    return images.find({"image": name})


def program(folder, name="tool"):
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_without_names_an_image_is_a_program_of_the_machine_or_the_echo_server(tmp_path):
    path = program(tmp_path)
    assert find(Images(), str(path)).entry_point == (str(path),)
    assert find(Images(), "sh").program.endswith("/sh") and not find(Images(), "sh").own_root
    assert [find(Images(), name).program for name in ("echo", "", "web:1", "registry.example/web", "nothing-such")] == [
        ""
    ] * 5
    assert "is not a program" in find(Images(), "/nothing/such").missing


def test_a_program_is_the_entry_point_by_its_own_name_and_the_longest_prefix_counts(tmp_path):
    tool, other = program(tmp_path), program(tmp_path, "other")
    images = Images([f"registry.example/={other}", f"registry.example/tool={tool} pause --for 'a while'"])
    found = find(images, "registry.example/tool:2.1")
    assert (found.entry_point, found.arguments) == (("/tool",), ("pause", "--for", "a while"))
    assert found.files == (BindMount(str(tool), "/tool", read_only=True),) and found.own_root
    assert find(images, "registry.example/web").entry_point == ("/other",)
    assert find(images, "web").program == ""


def test_a_directory_has_an_image_configuration(tmp_path):
    (tmp_path / "image.json").write_text(
        '{"Entrypoint": ["/bin/tool"], "Cmd": ["serve"], "Env": ["A=1=2"], "WorkingDir": "/srv", "User": "x"}'
    )
    found = find(Images([f"tool={tmp_path}"]), "tool:1")
    assert (found.entry_point, found.arguments, found.directory) == (("/bin/tool",), ("serve",), "/srv")
    assert (found.environment, found.layer) == ({"A": "1=2"}, str(tmp_path))


@pytest.mark.parametrize("text", ["tool", "tool=", "=/bin/sh", "tool=bin/sh", "tool=/nothing/such"])
def test_unusable_images_are_refused(text):
    with pytest.raises(ValueError, match=r"PREFIX=PATH|neither a directory"):
        Images([text])


def test_an_unreadable_configuration_is_refused(tmp_path):
    (tmp_path / "image.json").write_text("[]")
    with pytest.raises(ValueError, match=r"image\.json cannot be read"):
        Images([f"tool={tmp_path}"])


def test_the_nodes_look_for_busybox_at_the_same_time(tmp_path, monkeypatch):
    busybox = program(tmp_path, "busybox")
    busybox.write_text("#!/bin/sh\nseq --format applet-%g 300\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    nodes = 8
    for lab in range(5):
        images, together = Images(directory=tmp_path / str(lab)), Barrier(nodes)

        def look(_, images=images, together=together):
            together.wait(30)
            return find(images, "busybox")

        with ThreadPoolExecutor(nodes) as threads:
            assert len(set(map(id, threads.map(look, range(nodes))))) == 1
        assert len(list((tmp_path / str(lab) / "busybox").iterdir())) == 301
