"""deploy/announcer, held against what the announcer asks for: rights, arguments, files; alone and beside the overlay."""

import shutil
from pathlib import Path

import pytest
import yaml

from narthex.cli.node import command
from narthex.kube.access import Access
from narthex.kube.resources import of_a_proxy, of_an_announcer
from narthex.lb.program.status_writes import ConditionWriter
from narthex.lb.service_status import ServiceCondition
from narthex.linux.run import run
from narthex.model.objects import NamespacedName
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import service
from narthex.testing.load import until

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(params=[("announcer",), ("overlay", "announcer")], ids="+".join)
def objects(request, tmp_path):
    folder = tmp_path / "deploy"
    shutil.copytree(DEPLOY, folder)
    plan = folder / "kustomization.yaml"
    plan.write_text(plan.read_text() + f"\ncomponents: [{', '.join(request.param)}]\n")
    return list(yaml.safe_load_all(run(["kubectl", "kustomize", str(folder)])))


def named(objects, kind, name):
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def test_the_node_gets_what_the_announcer_needs(objects):
    pod = named(objects, "DaemonSet", "narthex")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    first, *rest = container["args"]
    given = command.make_context(first, rest).params
    assert given["announcer"] is True
    assert {"NET_ADMIN", "NET_RAW"} <= set(container["securityContext"]["capabilities"]["add"])
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "announcer-key"]
    assert given["announcer_key_file"] == f"{mount['mountPath']}/key" and mount["readOnly"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "announcer-key"]
    assert volume["secret"] == {"secretName": "narthex-announcer", "defaultMode": 0o400}
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
    usual, more = (
        rights(named(objects, "ClusterRole", "narthex")),
        rights(named(objects, "ClusterRole", "narthex-announcer")),
    )
    listed = {resource.paths[0] for resource in of_an_announcer()} - {each.paths[0] for each in of_a_proxy("a")}
    asked = {(path.split("/")[2], path.rpartition("/")[2], verb) for path in listed for verb in ("list", "watch")}
    with FaultyApiServer() as server:
        server.put(service("shop/web", "10.110.0.1", type="LoadBalancer"))
        writer = ConditionWriter(Access(master=server.url), settle=0.0)
        said = ServiceCondition(type="narthex/Announced", holds=True, reason="Announces", message="")
        with writer.running():
            writer.want({NamespacedName("shop", "web"): said}, {NamespacedName("shop", "web")})
            until(lambda: writer.writes, "the write")
        for seen in server.requests:
            resource = "services/status" if seen.path.endswith("/status") else "services"
            asked.add(("", resource, seen.method.lower()))
    assert more == asked and not more & usual


def test_the_other_kustomization_names_it():
    assert "announcer" in (DEPLOY / "kustomization.yaml").read_text()
