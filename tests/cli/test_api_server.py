"""plan, render, trace and migrate of a cluster that is looked at through its API server."""

import json

import pytest
import yaml
from click.testing import CliRunner

from narthex.cli import main
from narthex.model.objects import Container, Pod, PodSpec
from narthex.testing.apiserver import FaultyApiServer, Refuse
from narthex.testing.build import NODE, endpoint, endpoint_slice, node, service

CIDR = ["--cluster-cidr", "10.64.0.0/12"]


@pytest.fixture
def server():
    with FaultyApiServer() as server:
        owner = (("kubernetes.io/service-name", "web"),)
        server.put(
            node(),
            node("another", pod_cidrs=("10.64.2.0/24",), internal_ips=("10.20.0.12",)),
            service("shop/web", "10.110.0.1"),
            endpoint_slice("shop/web", endpoint("10.64.1.7"), labels=owner),
            Pod(
                name="client",
                namespace="shop",
                spec=PodSpec(node_name=NODE, containers=(Container(name="sh"),)),
                ips=("10.64.1.5",),
            ),
        )
        yield server


@pytest.fixture
def kubeconfig(server, tmp_path):
    path = tmp_path / "kubeconfig"
    cluster = {"name": "it", "cluster": {"server": server.url}}
    context = {"name": "here", "context": {"cluster": "it"}}
    path.write_text(yaml.safe_dump({"clusters": [cluster], "contexts": [context], "current-context": "here"}))
    return str(path)


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_a_plan(kubeconfig):
    result = run("plan", "--kubeconfig", kubeconfig, "--node", NODE, *CIDR, "-o", "json")
    assert result.exit_code == 0, result.output
    assert "10.64.1.7" in result.stdout and json.loads(result.stdout)["node"] == NODE


def test_all_nodes_are_known(server):
    result = run("plan", "--master", server.url, *CIDR)
    assert result.exit_code == 1
    assert f"which node? Choose one with --node: another, {NODE}" in result.stderr


def test_rules(server):
    result = run("render", "--master", server.url, "--node", NODE, "--mode", "iptables", *CIDR)
    assert result.exit_code == 0, result.output
    assert "10.110.0.1" in result.stdout


def test_a_trace_knows_pods_by_name(kubeconfig):
    result = run("trace", "shop/client", "shop/web", "--kubeconfig", kubeconfig, *CIDR)
    assert result.exit_code == 0, result.output
    assert "10.64.1.7" in result.stdout


def test_a_trace_does_without_pods_that_it_may_not_see(server):
    server.faults = lambda seen: Refuse(403) if seen.path == "/api/v1/pods" else None
    result = run("trace", "10.64.1.5", "shop/web", "--master", server.url, "--node", NODE, *CIDR)
    assert result.exit_code == 0, result.output
    assert "/api/v1/pods: the server does not let us see them" in result.stderr


def test_a_change_of_mode(server):
    result = run("migrate", "--from", "nftables", "--to", "nftables", "--master", server.url, *CIDR)
    assert (result.exit_code, result.stdout) == (0, "")


def test_broken_objects_are_named(server):
    server.put_raw("Service", {"metadata": {"name": "bad", "namespace": "shop"}})
    result = run("plan", "--master", server.url, "--node", NODE, *CIDR)
    assert result.exit_code == 0
    assert "Service shop/bad: spec: is required" in result.stderr


def test_nobody_answers(kubeconfig, server):
    server.stop()
    result = run("plan", "--kubeconfig", kubeconfig, "--node", NODE)
    assert result.exit_code == 1
    assert kubeconfig in result.stderr and server.url in result.stderr


def test_one_place_only(server, tmp_path):
    result = run("plan", "--master", server.url, "--manifests", str(tmp_path))
    assert result.exit_code == 2
    assert "mutually exclusive" in result.stderr


def test_some_place():
    result = run("render")
    assert result.exit_code == 2
    assert "--manifests DIR, --kubeconfig FILE or --master URL" in result.stderr
