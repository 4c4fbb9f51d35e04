"""Objects of a directory or file: events, duplicates, and files that are left out."""

import os
import shutil
import time
from pathlib import Path

import pytest
from tests.kube.manifests.files import service, settled, told

from narthex.kube import manifests
from narthex.kube.manifests import ManifestSource
from narthex.model.objects import NamespacedName
from narthex.model.store import Delete, Synced, Upsert

EXAMPLES = Path(__file__).parents[3] / "examples"
OF_LABS = {"CronJob", "DaemonSet", "Ingress", "Job", "StatefulSet"}


def test_first_scan_ends_with_synced(source, tmp_path):
    (tmp_path / "b.yaml").write_text(service("b"))
    (tmp_path / "a.yml").write_text(service("a1") + "---\n" + service("a2"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.json").write_text('{"apiVersion":"v1","kind":"Node","metadata":{"name":"c"}}')
    events = source.scan()
    assert told(events) == ["+a1", "+a2", "+b", "+c", "synced"]
    assert events[-1] == Synced()
    assert [event.object.origin for event in events[:2]] == [f"{tmp_path}/a.yml:1", f"{tmp_path}/a.yml:6"]
    assert source.scan() == []
    assert source.problems == ()


def test_an_empty_directory_is_synced_too(source):
    assert source.scan() == [Synced()]


def test_changes_are_told_as_differences(source, tmp_path, clock):
    (tmp_path / "a.yaml").write_text(service("a") + "---\n" + service("b"))
    source.scan()
    (tmp_path / "a.yaml").write_text(service("a", 81) + "---\n" + service("c"))
    events = settled(source, clock)
    assert told(events) == ["+a", "+c", "-b"]
    assert events[2] == Delete("Service", NamespacedName("default", "b"))
    assert events[0].object.ports[0].port == 81


def test_a_deleted_file_deletes_its_objects(source, tmp_path, clock):
    (tmp_path / "a.yaml").write_text(service("a"))
    source.scan()
    (tmp_path / "a.yaml").unlink()
    assert told(settled(source, clock)) == ["-a"]


def test_moving_is_no_change(source, tmp_path):
    (tmp_path / "a.yaml").write_text(service("a"))
    source.scan()
    (tmp_path / "a.yaml").write_text("# a comment\n" + service("a"))
    assert source.scan() == []
    (tmp_path / "a.yaml").rename(tmp_path / "b.yaml")
    assert source.scan() == []


def test_the_same_size_within_a_tick_of_the_clock(source, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(service("a", 80))
    source.scan()
    before = file.stat()
    file.write_text(service("a", 81))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert told(source.scan()) == ["+a"]


def test_unchanged_files_are_not_read_again(source, tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text(service("a"))
    old = time.time() - 100
    os.utime(tmp_path / "a.yaml", (old, old))
    source.scan()
    monkeypatch.setattr(manifests, "_read", lambda path: pytest.fail(f"{path} was read"))
    assert source.scan() == []


def test_comments_only_delete(source, tmp_path, clock):
    (tmp_path / "a.yaml").write_text(service("a"))
    source.scan()
    (tmp_path / "a.yaml").write_text("# " + service("a").replace("\n", "\n# "))
    assert told(settled(source, clock)) == ["-a"]


@pytest.mark.parametrize("order", [("a.yaml", "b.yaml"), ("b.yaml", "a.yaml")])
def test_duplicates_are_settled_by_name_whatever_came_first(source, tmp_path, clock, order):
    ports = {"a.yaml": 80, "b.yaml": 81}
    for name in order:
        (tmp_path / name).write_text(service("web", ports[name]))
        source.scan()
    (problem,) = source.problems
    assert problem.object == "Service default/web"
    assert problem.origin == f"{tmp_path}/b.yaml:1"
    assert f"{tmp_path}/a.yaml:1 counts" in problem.message
    fresh = ManifestSource(tmp_path)
    assert fresh.scan()[0].object.ports[0].port == 80
    assert source.scan() == []
    (tmp_path / "a.yaml").unlink()
    assert settled(source, clock)[0].object.ports[0].port == 81
    assert source.problems == ()


def test_duplicates_within_a_file(source, tmp_path):
    (tmp_path / "a.yaml").write_text(service("web", 80) + "---\n" + service("web", 81) + "---\n" + service("web", 82))
    assert source.scan()[0].object.ports[0].port == 80
    assert [problem.origin for problem in source.problems] == [f"{tmp_path}/a.yaml:6", f"{tmp_path}/a.yaml:11"]


def test_one_name_in_two_namespaces_or_kinds_is_no_duplicate(source, tmp_path):
    text = service("web") + "---\n" + service("web").replace("name: web", "name: web, namespace: shop")
    (tmp_path / "a.yaml").write_text(text + "---\napiVersion: v1\nkind: Node\nmetadata: {name: web}\n")
    assert told(source.scan()) == ["+web", "+web", "+web", "synced"]
    assert source.problems == ()


def test_what_editors_leave_is_not_read(source, tmp_path):
    for name in (".a.yaml", "a.yaml~", ".a.yaml.swp", "#a.yaml#", "a.yaml.tmp", "~a.yaml", "notes.txt", "a.yaml.bak"):
        (tmp_path / name).write_text(service("hidden"))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "a.yaml").write_text(service("hidden"))
    (tmp_path / "dir.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "dangling.yaml").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert source.scan() == [Synced()]
    assert source.problems == ()


def test_a_config_map_mount(source, tmp_path):
    """Kubernetes swaps the link `..data` for a new directory in one step."""
    for number, port in (("1", 80), ("2", 81)):
        (tmp_path / f"..2026_{number}").mkdir()
        (tmp_path / f"..2026_{number}" / "web.yaml").write_text(service("web", port))
    (tmp_path / "..data").symlink_to("..2026_1")
    (tmp_path / "web.yaml").symlink_to("..data/web.yaml")
    assert told(source.scan()) == ["+web", "synced"]
    (tmp_path / "..tmp").symlink_to("..2026_2")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    assert source.scan()[0].object.ports[0].port == 81


def test_a_single_file(tmp_path):
    file = tmp_path / "manifest.txt"
    file.write_text(service("web"))
    source = ManifestSource(file)
    assert told(source.scan()) == ["+web", "synced"]


def test_a_path_that_is_not_there_is_not_synced(tmp_path):
    source = ManifestSource(tmp_path / "later")
    assert source.scan() == []
    assert "No such file or directory" in source.problems[0].message
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "a.yaml").write_text(service("a"))
    assert told(source.scan()) == ["+a", "synced"]
    assert source.problems == ()


def test_a_directory_that_vanishes_keeps_everything_until_it_is_back(tmp_path, clock):
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "a.yaml").write_text(service("a"))
    (directory / "b.yaml").write_text(service("b"))
    source = ManifestSource(directory, now=clock)
    source.scan()
    shutil.rmtree(directory)
    assert source.scan() == []
    assert "stays in force" in source.problems[0].message
    directory.mkdir()
    (directory / "a.yaml").write_text(service("a"))
    assert told(settled(source, clock)) == ["-b"]
    assert source.problems == ()


@pytest.mark.parametrize(
    "example", sorted({path.parent for path in EXAMPLES.glob("*/*.yaml")}), ids=lambda path: path.name
)
def test_the_examples_are_good(example):
    source = ManifestSource(example)
    assert any(isinstance(event, Upsert) for event in source.scan())
    # A proxy has no use for some kinds that a lab has.
    assert [each for each in source.problems if each.object.split()[0] not in OF_LABS] == []


def test_the_hello_world_example_is_the_seed():
    """A Deployment with one replica, and node port 30001 to 4000 to 8080."""
    deployment, service = [event.object for event in ManifestSource(EXAMPLES / "hello-world").scan()[:2]]
    (port,) = service.ports
    assert (deployment.replicas, deployment.template_labels) == (1, service.selector)
    assert (service.type, port.node_port, port.port, port.target_port) == ("NodePort", 30001, 4000, 8080)
    assert deployment.template.containers[0].ports[0].port == 8080
