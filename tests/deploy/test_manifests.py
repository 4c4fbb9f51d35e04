"""What deploy/ says, held against what the program does: rights, ports, files, words of Kubernetes."""

import itertools
import re
import shlex
import shutil
import subprocess
import threading
import time
import tomllib
from pathlib import Path

import pytest
from lightkube import codecs

from narthex.cli.node import command as node_command
from narthex.cli.proxy import command as proxy_command
from narthex.kube.access import Access
from narthex.kube.events import event_object, starting
from narthex.kube.source import api_origin
from narthex.lab.api.reads import ServerFeatures
from narthex.model.documents import MalformedDocument, read_documents
from narthex.model.net import FAMILIES, split_port
from narthex.proxy.kernel.dataplanes import DATAPLANES, dataplane
from narthex.runtime.configuration.file import read
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import node
from narthex.trace.node import layout

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def values(text):
    """The documents of a text, read by our own reader, which bears no key twice."""
    found = list(read_documents(text))
    assert not [each for each in found if isinstance(each, MalformedDocument)]
    return [each.value for each in found]


def objects():
    """All objects, by kind."""
    return {
        each["kind"]: each for name in ("rbac.yaml", "daemonset.yaml") for each in values((DEPLOY / name).read_text())
    }


def pod():
    return objects()["DaemonSet"]["spec"]["template"]["spec"]


def container(name):
    return next(each for each in (*pod()["initContainers"], *pod()["containers"]) if each["name"] == name)


def test_every_word_is_one_of_kubernetes():
    """What lightkube's models do not know gets lost on the way through them."""
    for each in objects().values():
        assert codecs.from_dict(each).to_dict() == each


def test_the_names_that_refer_to_each_other():
    found, plan = objects(), values((DEPLOY / "kustomization.yaml").read_text())[0]
    labels = found["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert found["DaemonSet"]["spec"]["selector"]["matchLabels"] == labels
    assert pod()["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    (subject,) = found["ClusterRoleBinding"]["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", pod()["serviceAccountName"])
    assert found["ClusterRoleBinding"]["roleRef"]["name"] == found["ClusterRole"]["metadata"]["name"]
    assert pod()["volumes"] == [{"name": "config", "configMap": {"name": plan["configMapGenerator"][0]["name"]}}]


def test_the_configuration_is_taken_without_a_word_and_fits_the_pod():
    told, problems = read(DEPLOY / "config.conf")
    assert problems == ()
    (mount,) = container("narthex")["volumeMounts"]
    kubeconfig = Path(told.client_connection.kubeconfig)
    assert str(kubeconfig.parent) == mount["mountPath"]
    assert (DEPLOY / kubeconfig.name).exists()
    (port,) = container("narthex")["ports"]
    assert split_port(told.healthz_bind_address) == ("0.0.0.0", port["containerPort"])
    for probe in ("readinessProbe", "livenessProbe"):
        assert container("narthex")[probe]["httpGet"]["port"] == port["name"]
    assert told.own.parts.proxy


@pytest.mark.parametrize(("name", "command"), [("kernel-settings", proxy_command), ("narthex", node_command)])
def test_the_arguments_are_options(name, command):
    first, *rest = container(name)["args"]
    assert first == command.name
    given = command.make_context(first, rest).params
    assert given["config"] == Path(container(name)["volumeMounts"][0]["mountPath"]) / "config.conf"
    assert given["hostname_override"] == "$(NODE_NAME)"


def test_the_pod_can_be_on_every_node_and_stays_there():
    assert pod()["hostNetwork"] is True
    assert pod()["tolerations"] == [{"operator": "Exists"}]
    assert pod()["priorityClassName"] == "system-node-critical"
    for each in (*pod()["initContainers"], *pod()["containers"]):
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert "limits" not in each["resources"] and each["resources"]["requests"]
    assert "privileged" not in container("narthex")["securityContext"]


def test_the_node_selector_of_the_guide(tmp_path):
    """The edit that keeps the pods to labelled nodes, as docs/howto has it, and the one that ends this."""
    page = (ROOT / "docs" / "howto" / "install-on-a-cluster.md").read_text()
    some, all_nodes = [line for line in page.splitlines() if line.startswith("sed ")]
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    subprocess.run(shlex.split(some), cwd=tmp_path, check=True)
    (edited,) = values((tmp_path / "deploy" / "daemonset.yaml").read_text())
    expected = objects()["DaemonSet"]
    expected["spec"]["template"]["spec"]["nodeSelector"]["narthex"] = "yes"
    assert edited == expected
    subprocess.run(shlex.split(all_nodes), cwd=tmp_path, check=True)
    assert (tmp_path / "deploy" / "daemonset.yaml").read_text() == (DEPLOY / "daemonset.yaml").read_text()


class _Asked:
    """What a proxy asks an API server for in its life, as rights: (API group, resource, verb)."""

    def __init__(self, abilities):
        self.rights = set()
        with FaultyApiServer(abilities) as server:
            server.put(node())
            origin = api_origin(Access(master=server.url), "worker-a", 900.0, time.time)
            stop = threading.Event()
            changes = origin.source.changes(stop)
            next(changes)
            stop.set()
            changes.close()
            event = event_object(starting("worker-a"), 1.0, "worker-a")
            origin.creator.create_event(event["metadata"]["namespace"], event)
            for seen in server.requests:
                self.rights.add(_right(seen))


def _right(seen):
    match = re.fullmatch(
        r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)/(?:namespaces/[^/]+/)?(?P<resource>[^/]+)(?P<name>/[^/]+)?", seen.path
    )
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    if seen.method == "GET":
        verb = "get" if match["name"] else "watch" if seen.query.get("watch") == "true" else "list"
    else:
        verb = verbs[seen.method]
    return match["group"] or "", match["resource"], verb


OLD = ServerFeatures(streaming=False, service_cidrs=(), service_fields=False)


@pytest.mark.row("26.7")
def test_the_rights_are_those_that_are_used_and_no_others():
    given = {
        (group, resource, verb)
        for rule in objects()["ClusterRole"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    # Newer servers are asked to begin a watch with the list, others for the list and then for a watch.
    with_list = ServerFeatures(streaming=False)
    assert set().union(*(_Asked(abilities).rights for abilities in (ServerFeatures(), with_list, OLD))) == given


def instructions():
    """Instruction and its text, lines that go on joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def test_the_image_names_no_place_but_what_is_given():
    bases = [text.split()[0] for word, text in instructions() if word == "FROM"]
    assert set(bases) == {"${BASE}"}
    (base,) = [text for word, text in instructions() if word == "ARG"]
    # No host, no digest.
    assert re.fullmatch(r"BASE=[a-z]+:[a-z-]+", base)
    assert "://" not in (DEPLOY / "Containerfile").read_text()


def test_the_image_has_what_the_program_starts():
    *_, installed = [text for word, text in instructions() if word == "RUN" and "apt-get install" in text]
    packages = set(re.search(r"--no-install-recommends ([a-z0-9 ]+)", installed)[1].split())
    assert {"nftables", "iptables", "ipset", "conntrack", "python3"} <= packages
    # What a bundle is made of.
    tools = {"ip": "iproute2", "bridge": "iproute2", "ss": "iproute2", "sysctl": "procps", "ipvsadm": "ipvsadm"}
    started = {part.command[0] for part in layout.PARTS}
    assert set(tools) <= started and {*tools.values()} <= packages
    makers = {"nft": "nftables", "iptables-save": "iptables", "ip6tables-save": "iptables"}
    makers |= {"iptables-restore": "iptables", "ip6tables-restore": "iptables", "ipset": "ipset"}
    for mode, family in itertools.product(DATAPLANES, FAMILIES):
        assert {makers[tool] for tool in dataplane(mode).tools(family)} <= packages
    copied = [text.split()[:-1] for word, text in instructions() if word == "COPY" and not text.startswith("--from")]
    assert copied == [["pyproject.toml", "README.md"], ["src"]]
    assert all((ROOT / name).exists() for names in copied for name in names)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert ("ENTRYPOINT", '["narthex"]') in instructions() and "narthex" in scripts
