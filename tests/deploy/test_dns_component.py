"""deploy/dns, held against what answering on the node asks for: rights, arguments, device; alone and beside others."""

import shutil
from pathlib import Path

import pytest
import yaml
from tests.howtos import ROOT, yaml_blocks

from narthex.cli.node import command
from narthex.dns.program import node_local
from narthex.kube.resources import of_a_proxy, of_names
from narthex.linux.run import run
from narthex.runtime.configuration.file import read

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(params=[("dns",), ("overlay", "announcer", "dns")], ids="+".join)
def objects(request, tmp_path):
    folder = tmp_path / "deploy"
    shutil.copytree(DEPLOY, folder)
    plan = folder / "kustomization.yaml"
    plan.write_text(plan.read_text() + f"\ncomponents: [{', '.join(request.param)}]\n")
    return list(yaml.safe_load_all(run(["kubectl", "kustomize", str(folder)])))


def named(objects, kind, name):
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def test_the_node_gets_what_answering_needs(objects):
    pod = named(objects, "DaemonSet", "narthex")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    first, *rest = container["args"]
    assert command.make_context(first, rest).params["dns"] is True
    assert {"NET_ADMIN", "NET_BIND_SERVICE"} <= set(container["securityContext"]["capabilities"]["add"])
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "tun"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "tun"]
    assert mount["mountPath"] == volume["hostPath"]["path"] == node_local.TUN_DEVICE
    assert pod["hostNetwork"]


def rights(role):
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_rights_are_those_that_are_used_and_no_others(objects):
    usual, more = (rights(named(objects, "ClusterRole", name)) for name in ("narthex", "narthex-dns"))
    listed = {resource.paths[0] for resource in of_names()} - {each.paths[0] for each in of_a_proxy("a")}
    asked = {("", path.rpartition("/")[2], verb) for path in listed for verb in ("list", "watch")}
    assert all(path.startswith("/api/v1/") for path in listed)
    assert more == asked and not more & usual
    binding = named(objects, "ClusterRoleBinding", "narthex-dns")
    account = named(objects, "ServiceAccount", "narthex")["metadata"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert binding["roleRef"]["name"] == "narthex-dns"


def test_the_document_of_the_guide_switches_it_on_beside_the_proxy(tmp_path):
    (document,) = [
        each
        for each in yaml_blocks(ROOT / "docs" / "howto" / "answer-names-on-the-node.md")
        if each.startswith("apiVersion: narthex/")
    ]
    kube_proxys = (DEPLOY / "config.conf").read_text().partition("\n---\n")[0]
    (tmp_path / "config.conf").write_text(f"{kube_proxys}\n---\n{document}")
    given, problems = read(tmp_path / "config.conf")
    assert problems == ()
    assert (given.own.parts.proxy, given.own.parts.dns) == (True, True)
    assert given.own.dns.addresses == ("10.96.0.10",)
