"""A lab that is kept goes on with what it held; others leave nothing."""

import json
from pathlib import Path

import pytest
from tests.lab.kernel.test_lab import DEPLOYMENT, SERVICE, ask, fresh_name, left_of, manifest, narthex
from tests.lab.kernel.test_lab_pods import kubectl

from narthex.lab.program import labs
from narthex.lab.program.state import StateDirectory

pytestmark = pytest.mark.kernel

OTHER = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: late}
data: {a: b}
"""


def test_what_was_held_is_there_again_and_files_count_as_before(tmp_path):
    name = fresh_name("keep")
    (tmp_path / "web.yaml").write_text(manifest(DEPLOYMENT, replicas=1) + "---\n" + manifest(SERVICE))
    (tmp_path / "late.yaml").write_text(OTHER)
    up = ("up", str(tmp_path), "--name", name, "--nodes", "2", "--keep")
    try:
        narthex(*up)
        narthex("scale", "deployment/web", "2", "--name", name)
        kubectl(name, "create", "configmap", "mine", "--from-literal=a=b")
        before = json.loads(kubectl(name, "get", "service", "web", "-o", "json"))
        assert "kept for the next lab of this name" in narthex("down", "--name", name)
        assert [Path(each).name for each in left_of(name)] == [name]
        assert name not in labs.all_names()

        (tmp_path / "late.yaml").unlink()
        narthex("up", str(tmp_path), "--name", name, "--nodes", "1")
        after = json.loads(kubectl(name, "get", "service", "web", "-o", "json"))
        assert (after["metadata"]["uid"], after["spec"]) == (before["metadata"]["uid"], before["spec"])
        assert kubectl(name, "get", "configmap", "mine", "-o", "jsonpath={.data.a}") == "b"
        # What only the files had is gone with them, and what they say of replicas is no news.
        kubectl(name, "get", "configmap", "late", status=1)
        assert [
            node["metadata"]["name"] for node in json.loads(kubectl(name, "get", "nodes", "-o", "json"))["items"]
        ] == ["node-1"]
        assert sorted(pod.ready for pod in labs.settle(name).pods) == [True, True]
        assert ask(f"nx-{name}-outside", "192.168.49.11", 30001)[0].startswith("web-")
    finally:
        narthex("down", "--forget", "--name", name)
    assert left_of(name) == []
    assert "There is no lab" in narthex("down", "--forget", "--name", name)


def test_a_file_that_is_none_of_ours_is_said(tmp_path):
    name = fresh_name("bad")
    directory = StateDirectory(name)
    directory.kept.mkdir(parents=True)
    directory.objects.write_text("this is no database, whatever its name says" * 100)
    try:
        said = narthex("up", str(tmp_path), "--name", name, "--nodes", "1", status=1)
        assert "the kept objects of this lab are unusable" in said and f"down --forget --name {name}" in said
    finally:
        narthex("down", "--forget", "--name", name)
    assert left_of(name) == []
