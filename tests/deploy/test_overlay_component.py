"""deploy/overlay, held against what the overlay does: rights, files, arguments."""

from pathlib import Path

from lightkube import codecs

from narthex.cli.node import command
from narthex.kube.access import Access
from narthex.model.documents import MalformedDocument, read_documents
from narthex.overlay.net_conf import parse
from narthex.overlay.program.annotate import NodeWriter
from narthex.runtime.configuration.values import OverlayConfiguration
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import node

DEPLOY = Path(__file__).parents[2] / "deploy"
USUAL = OverlayConfiguration()


def values(name):
    found = list(read_documents((DEPLOY / "overlay" / name).read_text()))
    assert not [each for each in found if isinstance(each, MalformedDocument)]
    return [each.value for each in found]


def container():
    (patch,) = values("daemonset.yaml")
    (found,) = patch["spec"]["template"]["spec"]["containers"]
    return patch, found


def test_the_component_names_its_files():
    (component,) = values("kustomization.yaml")
    assert component["kind"] == "Component"
    files = [*component["resources"], *(patch["path"] for patch in component["patches"])]
    files += component["configMapGenerator"][0]["files"]
    assert sorted([*files, "kustomization.yaml"]) == sorted(path.name for path in (DEPLOY / "overlay").iterdir())
    assert "overlay" in (DEPLOY / "kustomization.yaml").read_text()


def test_rights_are_those_that_are_used_and_no_others():
    role, binding = values("rbac.yaml")
    for each in (role, binding):
        assert codecs.from_dict(each).to_dict() == each
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]}]
    with FaultyApiServer() as server:
        server.put(node("worker-a"))
        NodeWriter(Access(master=server.url)).patch("worker-a", {"metadata": {"annotations": {"a/b": "c"}}})
        assert [(seen.method, seen.path) for seen in server.requests] == [("PATCH", "/api/v1/nodes/worker-a/status")]


def test_files_are_where_the_overlay_looks():
    patch, found = container()
    mounts = {mount["name"]: mount["mountPath"] for mount in found["volumeMounts"]}
    assert mounts["net-conf"] == str(Path(USUAL.net_conf).parent)
    assert mounts["run-flannel"] == str(Path(USUAL.subnet_file).parent)
    volumes = {volume["name"]: volume for volume in patch["spec"]["template"]["spec"]["volumes"]}
    assert volumes["run-flannel"]["hostPath"]["path"] == mounts["run-flannel"]
    (component,) = values("kustomization.yaml")
    assert volumes["net-conf"]["configMap"]["name"] == component["configMapGenerator"][0]["name"]
    conf = parse((DEPLOY / "overlay" / "net-conf.json").read_bytes(), "net-conf.json")
    assert (conf.networks, conf.backend.type) == (("10.244.0.0/16",), "vxlan")


def test_the_arguments_are_those_of_the_other_manifest_and_the_switch():
    _, found = container()
    first, *rest = found["args"]
    given = command.make_context(first, rest).params
    assert given["overlay"] is True
    (base,) = [each.value for each in read_documents((DEPLOY / "daemonset.yaml").read_text())]
    (usual,) = base["spec"]["template"]["spec"]["containers"]
    assert [word for word in found["args"] if word != "--overlay"] == usual["args"]
    assert (found["name"], set(usual["securityContext"]["capabilities"]["add"])) == (usual["name"], {"NET_ADMIN"})
