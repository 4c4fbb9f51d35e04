"""What deploy/load-balancer/ says, held against what the controller does and reads."""

import json
import re
import threading
import time
from pathlib import Path

import msgspec
import pytest
from lightkube import codecs

from narthex.cli.lb import command
from narthex.kube.access import Access
from narthex.kube.events import EventPoster, EventWriter
from narthex.kube.leader_election import Leader
from narthex.lab.api.reads import ServerFeatures
from narthex.lb.program.controller import CONTROLLER, LoadBalancerController, LoadBalancerSettings
from narthex.linux.clock import SystemClock
from narthex.model.decode.objects import decode
from narthex.model.documents import MalformedDocument, read_documents
from narthex.model.objects import Object
from narthex.model.wire import WireIPAddressPoolSpec, WireL2AdvertisementSpec, WireServiceAllocation
from narthex.runtime.configuration.values import ClientConnection
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import node, service

DEPLOY = Path(__file__).parents[2] / "deploy" / "load-balancer"
LIMIT = 40.0


def values(name):
    found = list(read_documents((DEPLOY / name).read_text()))
    assert not [each for each in found if isinstance(each, MalformedDocument)]
    return [each.value for each in found]


def objects():
    return {each["kind"]: each for name in ("rbac.yaml", "deployment.yaml") for each in values(name)}


def crds():
    return {each["spec"]["names"]["kind"]: each for each in values("../crds/crds.yaml")}


def container():
    (found,) = objects()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def test_every_word_is_one_of_kubernetes():
    for each in (*objects().values(), *crds().values()):
        assert codecs.from_dict(each).to_dict() == each


def test_the_component_names_all_files():
    (plan,) = values("kustomization.yaml")
    assert plan["kind"] == "Component"
    assert sorted([*plan["resources"], "kustomization.yaml"]) == sorted(file.name for file in DEPLOY.iterdir())


def test_the_names_that_refer_to_each_other():
    found = objects()
    template = found["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert template["spec"]["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"] == CONTROLLER
    for binding, role in (("ClusterRoleBinding", "ClusterRole"), ("RoleBinding", "Role")):
        assert found[binding]["roleRef"]["name"] == found[role]["metadata"]["name"]
        assert [each["name"] for each in found[binding]["subjects"]] == [CONTROLLER]
    assert [rule.get("resourceNames") for rule in found["Role"]["rules"]] == [None, [CONTROLLER]]


def test_the_arguments_and_ports_are_those_of_the_command():
    group, name = container()["args"]
    assert group == command.name
    given = command.commands[name].make_context(name, []).params
    assert {port["name"]: port["containerPort"] for port in container()["ports"]} == {
        "healthz": given["healthz_port"],
        "metrics": given["metrics_port"],
    }
    assert container()["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container()["securityContext"]["runAsNonRoot"] is True


# The custom resources.

SPECS = {"IPAddressPool": WireIPAddressPoolSpec, "L2Advertisement": WireL2AdvertisementSpec}


@pytest.mark.parametrize("kind", SPECS)
def test_the_schemas_have_the_fields_that_are_read(kind):
    found = crds()[kind]
    assert found["metadata"]["name"] == f"{found['spec']['names']['plural']}.{found['spec']['group']}"
    (version,) = found["spec"]["versions"]
    assert (found["spec"]["group"], version["name"]) == ("metallb.io", "v1beta1")
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert set(schema) == {field.name for field in msgspec.structs.fields(SPECS[kind])}
    if kind == "IPAddressPool":
        inner = {field.name for field in msgspec.structs.fields(WireServiceAllocation)}
        assert set(schema["serviceAllocation"]["properties"]) == inner


def test_the_schemas_are_structural():
    """Each node has a type, as the API server demands."""

    def check(schema):
        assert schema["type"] in ("object", "array", "string", "boolean", "integer")
        for inner in (schema.get("properties") or {}).values():
            check(inner)
        if schema["type"] == "array":
            check(schema["items"])
        if isinstance(schema.get("additionalProperties"), dict):
            check(schema["additionalProperties"])

    for each in crds().values():
        check(each["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def _sample(schema):
    """A value with every field of a schema."""
    match schema["type"]:
        case "object" if "properties" in schema:
            return {name: _sample(inner) for name, inner in schema["properties"].items()}
        case "object":
            return {"team": "a"}
        case "array":
            return [_sample(schema["items"])]
        case "string":
            return schema.get("enum", ["web"])[0]
        case "integer":
            return 1
    return True


@pytest.mark.parametrize("kind", SPECS)
def test_what_the_schema_allows_is_read(kind):
    schema = crds()[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    raw = {"apiVersion": "metallb.io/v1beta1", "kind": kind, "metadata": {"name": "x"}, "spec": _sample(schema)}
    read = decode(raw)
    assert read.problems == ()
    empty = type(read.object)(name="x", namespace="default")
    own = {field.name for field in msgspec.structs.fields(type(read.object))}
    own -= {field.name for field in msgspec.structs.fields(Object)} | {"auto_assign"}
    assert [name for name in own if getattr(read.object, name) == getattr(empty, name)] == []


# Rights.


def _right(seen):
    match = re.fullmatch(
        r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)/(?:namespaces/[^/]+/)?(?P<resource>[a-z]+)(?P<name>/[^/]+)?(?P<sub>/.+)?",
        seen.path,
    )
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    verb = verbs.get(seen.method)
    if verb is None:
        verb = "get" if match["name"] else "watch" if seen.query.get("watch") == "true" else "list"
    return match["group"] or "", match["resource"] + (match["sub"] or ""), verb


def _asked(abilities):
    """The rights that a controller uses in its life, from first election to release."""
    with FaultyApiServer(abilities) as server:
        server.put(node(), service("shop/web", "10.110.0.1", type="LoadBalancer"))
        meta = {"name": "lan", "namespace": "metallb-system"}
        server.put_raw("IPAddressPool", {"metadata": meta, "spec": {"addresses": ["192.168.15.0/28"]}})
        access = Access(connection=ClientConnection(qps=-1.0), master=server.url)
        clock = SystemClock()
        events = EventWriter(EventPoster(access), "here", clock, CONTROLLER)
        leader = Leader(access, "kube-system", CONTROLLER, "here_1")
        controller = LoadBalancerController(access, LoadBalancerSettings(), leader, events, clock)
        thread = threading.Thread(target=controller.run)
        with events.running(10.0):
            thread.start()
            end = time.monotonic() + LIMIT
            while not (controller.counts.given and any(seen.path.endswith("/events") for seen in server.requests)):
                assert time.monotonic() < end
                time.sleep(0.02)
            controller.stop()
            thread.join()
        told = [json.loads(seen.body) for seen in server.requests if seen.path.endswith("/events")]
        assert {each["reportingController"] for each in told} == {CONTROLLER}
        return {_right(seen) for seen in server.requests}


def test_the_rights_are_those_that_are_used_and_no_others():
    given = {
        (group, resource, verb)
        for kind in ("ClusterRole", "Role")
        for rule in objects()[kind]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert (
        set().union(*(_asked(abilities) for abilities in (ServerFeatures(), ServerFeatures(streaming=False)))) == given
    )
