"""`narthex lb`: the dry run and the list of pools."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.testing.apiserver import FaultyApiServer
from narthex.testing.build import node, service

EXAMPLE = Path(__file__).parents[2] / "examples" / "load-balancer"
FILE = """
apiVersion: narthex/v1alpha1
kind: LoadBalancerConfiguration
pools:
- {name: seeds, addresses: [192.168.15.8/32]}
advertisements:
- {name: lan, ipAddressPools: [seeds]}
"""


def run(*arguments, code=0):
    done = CliRunner().invoke(main, ["lb", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def test_the_dry_run_says_what_would_be_written():
    told = {each["service"]: each for each in json.loads(run("controller", "--manifests", EXAMPLE, "-o", "json"))}
    assert {name: each["addresses"] for name, each in told.items()} == {
        "kube-system/traefik": ["192.168.15.1"],
        "seaweedfs/filer": ["192.168.15.8"],
        "names/dns-tcp": ["172.6.6.6"],
        "names/dns-udp": ["172.6.6.6"],
        "shop/greedy": [],
    }
    assert "names/dns-tcp has it" in told["shop/greedy"]["refusal"]
    assert told["shop/greedy"]["advice"] == "ask for another address, or free this one"
    assert told["seaweedfs/filer"]["writesStatus"] is True


def test_pools_as_data():
    told = {each["name"]: each for each in json.loads(run("pools", "--manifests", EXAMPLE, "-o", "json"))}
    assert (told["lan"]["in_use"], told["lan"]["total"], told["lan"]["advertisements"]) == (2, 5, ["on-the-lan"])
    assert told["public"]["services"] == ["names/dns-tcp", "names/dns-udp"]
    assert "the pods of node worker-a" in told["too-wide"]["refused"]


def test_a_file_stands_for_the_custom_resources(tmp_path):
    file = tmp_path / "lb.yaml"
    file.write_text(FILE)
    told = json.loads(run("pools", "--manifests", EXAMPLE, "--config", file, "-o", "json"))
    assert [(each["name"], each["advertisements"]) for each in told] == [("seeds", ["lan"])]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pools: []", "apiVersion: is required"),
        ("{", "lb.yaml:1"),
        (FILE.replace("v1alpha1", "v9"), "'narthex/v9' is not narthex/v1alpha1"),
        (FILE.replace("addresses:", "adresses:"), "'adresses' is not a known field"),
        (FILE + "- {name: lan}\n", "is there twice, first at"),
        (FILE.replace("[192.168.15.8/32]", "5"), "5 is a number, must be a list"),
    ],
)
def test_faults_of_the_file_are_named(tmp_path, text, said):
    file = tmp_path / "lb.yaml"
    file.write_text(text)
    done = CliRunner().invoke(main, ["lb", "pools", "--manifests", str(EXAMPLE), "--config", str(file)])
    assert said in done.output + done.stderr


def test_another_class():
    assert "no Service of type LoadBalancer for this controller" in run(
        "controller", "--manifests", EXAMPLE, "--lb-class", "example.com/other"
    )


def test_the_cluster_cidr_is_kept_out_of_pools():
    told = json.loads(run("pools", "--manifests", EXAMPLE, "--cluster-cidr", "172.6.0.0/16", "-o", "json"))
    assert "where pods are (--cluster-cidr)" in next(each["refused"] for each in told if each["name"] == "public")


def test_from_an_api_server():
    with FaultyApiServer() as server:
        server.put(node(), service("shop/web", "10.110.0.1", type="LoadBalancer", balancers=["192.168.15.2"]))
        meta = {"name": "lan", "namespace": "metallb-system"}
        server.put_raw("IPAddressPool", {"metadata": meta, "spec": {"addresses": ["192.168.15.0/28"]}})
        assert "lan  192.168.15.0/28: 1 of 16 in use" in run("pools", "--master", server.url)
        assert {seen.method for seen in server.requests} == {"GET"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("pools",), "no source given"),
        (("controller",), "no source of objects"),
        (("pools", "--manifests", EXAMPLE, "--master", "http://x"), "mutually exclusive"),
        (("pools", "--manifests", EXAMPLE, "--cluster-cidr", "x"), "'x' is not a CIDR"),
    ],
)
def test_usage(arguments, said):
    assert said in run(*arguments, code=2)


def test_a_file_that_is_not_there():
    assert "cannot be read" in run("pools", "--manifests", EXAMPLE, "--config", "/nowhere/lb.yaml", code=1)
