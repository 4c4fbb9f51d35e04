"""The components of deploy/ for the CNI plugins and the cluster's DNS, and what all of them have in common."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from lightkube import codecs

from narthex.cli.cni import command as cni
from narthex.cli.dns import command as dns
from narthex.cni.program.flannel import SUBNET_FILE
from narthex.cni.program.run import PLUGINS
from narthex.cni.program.runtime import read_network
from narthex.kube.resources import of_names
from narthex.lab.cluster import ADDRESSES, DNS_LABELS, DNS_SERVICE
from narthex.linux.run import run
from narthex.proxy.kernel.sockets import PINS

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPONENTS = ("overlay", "cni", "cluster-dns", "load-balancer", "announcer", "dns")
NON_ROOT = {"narthex-cluster-dns", "narthex-lb-controller"}
"""Workloads that do not need root."""


def built(folder, *components):
    shutil.copytree(DEPLOY, folder)
    plan = folder / "kustomization.yaml"
    plan.write_text(plan.read_text() + f"\ncomponents: [{', '.join(components)}]\n")
    return list(yaml.safe_load_all(run(["kubectl", "kustomize", str(folder)])))


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    return built(tmp_path_factory.mktemp("all") / "deploy", *COMPONENTS)


def named(objects, kind, name):
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pods(objects):
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in objects
        if "template" in each.get("spec", {})
    }


def test_a_deletion_takes_nobodys_pools(objects):
    assert {each["kind"] for each in objects} & {"CustomResourceDefinition", "Namespace"} == set()
    apart = list(yaml.safe_load_all(run(["kubectl", "kustomize", str(DEPLOY / "crds")])))
    assert [(each["kind"], each["metadata"]["name"]) for each in apart] == [
        ("Namespace", "metallb-system"),
        ("CustomResourceDefinition", "ipaddresspools.metallb.io"),
        ("CustomResourceDefinition", "l2advertisements.metallb.io"),
    ]


def test_every_word_is_one_of_kubernetes(objects):
    for each in objects:
        assert codecs.from_dict(each).to_dict() == each


def test_only_what_needs_root_is_root(objects):
    for name, pod in pods(objects).items():
        for each in pod["containers"]:
            context = each["securityContext"]
            assert bool(context.get("runAsNonRoot")) == (name in NON_ROOT), name
            assert context["readOnlyRootFilesystem"]
            assert "limits" not in each["resources"]
    assert set(pods(objects)) == {"narthex", "narthex-cni", *NON_ROOT}


def test_the_plugins_are_installed_where_the_runtime_looks(objects):
    pod = pods(objects)["narthex-cni"]
    (install,) = pod["initContainers"]
    group, name, *rest = install["args"]
    given = cni.commands[name].make_context(name, [each for each in rest if not each.startswith("--conf-file")]).params
    assert group == cni.name and given["self_contained"]
    assert (str(given["bin_dir"]), str(given["conf_dir"])) == ("/opt/cni/bin", "/etc/cni/net.d")
    mounts = {each["mountPath"]: each["name"] for each in install["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    # The programs name their interpreter by its path on the node.
    for path in ("/opt/cni/bin", "/etc/cni/net.d"):
        assert volumes[mounts[path]]["hostPath"]["path"] == path
    (file,) = [each.partition("=")[2] for each in rest if each.startswith("--conf-file")]
    configuration = named(objects, "ConfigMap", volumes[mounts[str(Path(file).parent)]]["configMap"]["name"])
    assert list(configuration["data"]) == [Path(file).name]


def test_the_network_of_the_plugins_is_that_of_the_overlay(objects):
    (text,) = named(objects, "ConfigMap", "narthex-cni")["data"].values()
    network = read_network(text.encode())
    assert {each["type"] for each in json.loads(text)["plugins"]} <= set(PLUGINS)
    assert network.name
    places = {each["hostPath"]["path"] for each in pods(objects)["narthex"]["volumes"] if "hostPath" in each}
    assert str(Path(SUBNET_FILE).parent) in places
    assert str(Path(SUBNET_FILE).parent) in {
        each["hostPath"]["path"] for each in pods(objects)["narthex-cni"]["volumes"] if "hostPath" in each
    }


def test_the_agent_is_where_the_plugins_look(objects):
    pod = pods(objects)["narthex-cni"]
    (agent,) = pod["containers"]
    group, name = agent["args"]
    given = cni.commands[name].make_context(name, []).params
    assert group == cni.name and pod["hostNetwork"]
    mounted = {each["mountPath"] for each in agent["volumeMounts"]}
    assert str(Path(given["socket"]).parent) in mounted
    assert str(Path(given["state_dir"]).parent) in mounted
    assert not pod["automountServiceAccountToken"]


def test_the_names_of_the_cluster_are_answered_at_the_usual_address(objects):
    service = named(objects, "Service", DNS_SERVICE.name)
    assert service["metadata"]["namespace"] == DNS_SERVICE.namespace
    assert (service["spec"]["clusterIP"], service["spec"]["selector"]) == (ADDRESSES[0], DNS_LABELS)
    deployment = named(objects, "Deployment", "narthex-cluster-dns")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert DNS_LABELS.items() <= labels.items()
    # A CoreDNS beside it has the Service's label, and its pods are not this Deployment's.
    assert not deployment["selector"]["matchLabels"].items() & DNS_LABELS.items()
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    pod = pods(objects)["narthex-cluster-dns"]
    (container,) = pod["containers"]
    ports = {(each["name"], each["containerPort"]) for each in container["ports"]}
    assert {(each["targetPort"], each["port"]) for each in service["spec"]["ports"]} <= ports
    first, *rest = container["args"]
    assert first == dns.name
    assert dns.make_context(first, [each for each in rest if not each.startswith("--conf")]).params["kubeconfig"] == ""
    # Port 53 without root and without capabilities.
    assert pod["securityContext"]["sysctls"] == [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "53"}]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (corefile,) = named(objects, "ConfigMap", "narthex-cluster-dns")["data"].values()
    assert corefile == (DEPLOY.parent / "examples" / "dns" / "Corefile").read_text()


def test_the_rights_of_the_dns_are_those_that_are_used_and_no_others(objects):
    rules = named(objects, "ClusterRole", "narthex-cluster-dns")["rules"]
    given = {(group, resource) for rule in rules for group in rule["apiGroups"] for resource in rule["resources"]}
    assert all(rule["verbs"] == ["list", "watch"] for rule in rules)
    asked = [resource.paths[0].strip("/").split("/") for resource in of_names()]
    assert given == {(path[1] if path[0] == "apis" else "", path[-1]) for path in asked}


def test_sockets_are_given_what_they_need_beside_the_other_components(tmp_path):
    pod = pods(built(tmp_path / "deploy", *COMPONENTS, "sockets"))["narthex"]
    (container,) = pod["containers"]
    # Processes of pods are seen, programs are loaded, and pins outlive the container.
    assert pod["hostPID"] and pod["hostNetwork"]
    assert {"NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"} <= set(container["securityContext"]["capabilities"]["add"])
    places = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
    mounts = {each["mountPath"]: places.get(each["name"]) for each in container["volumeMounts"]}
    assert mounts[str(PINS.parent)] == str(PINS.parent)
    (cgroup,) = [mount for mount, path in mounts.items() if path == "/sys/fs/cgroup"]
    assert f"socketLoadBalancingCgroup: {cgroup} " in (DEPLOY / "sockets" / "kustomization.yaml").read_text()
