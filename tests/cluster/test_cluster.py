"""What of `make cluster` can be checked without the programs: missing ones are named, and files are as their readers take them."""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from tests.cluster import files, images, workloads
from tests.cluster.families import API_ADDRESSES, DNS_ADDRESSES, INDEXES, IPV4, Families
from tests.cluster.installation import COMPONENTS, SOCKETS
from tests.cluster.operations import OPERATIONS
from tests.cluster.programs import PACKAGES, ClusterPrograms, missing
from tests.cluster.workloads import Totals

from narthex.lab import topology
from narthex.lab.cluster import ADDRESSES
from narthex.lab.program.control_plane import PROGRAMS
from narthex.lab.program.network import make_network
from narthex.lab.topology import CLUSTER_CIDRS
from narthex.linux.namespaces import delete_namespace, namespace_names
from narthex.linux.run import run
from narthex.overlay.net_conf import parse

ROOT = Path(__file__).parents[2]


def program(path):
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_each_missing_program_is_named_with_what_to_do(tmp_path):
    given = ClusterPrograms(control_plane=tmp_path / "bin", kubelet=tmp_path / "kubelet", e2e=tmp_path / "e2e.test")
    tools = tmp_path / "tools"
    lacks = missing(given, path=str(tools))
    assert set(lacks) == {*PROGRAMS, "kubelet", "e2e", *PACKAGES}
    assert lacks["etcd"] == f"put it into CONTROL_PLANE={tmp_path}/bin"
    assert lacks["kubelet"] == f"KUBELET={tmp_path}/kubelet is not a program"
    assert lacks["ctr"] == "apt-get install containerd"
    for name in PACKAGES:
        program(tools / name)
    for name in PROGRAMS:
        program(tmp_path / "bin" / name)
    program(tmp_path / "kubelet")
    assert set(missing(given, path=str(tools))) == {"e2e"}
    program(tmp_path / "e2e.test")
    assert missing(given, path=str(tools)) == {}


def test_the_command_names_them_all_and_starts_nothing(tmp_path):
    words = ["-m", "tests.cluster", "--control-plane", str(tmp_path), "--kubelet", str(tmp_path / "kubelet")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert all(f"  {name}: " in done.stderr for name in (*PROGRAMS, "kubelet"))
    assert "starts" not in done.stdout


def test_the_packages_of_the_target_are_those_that_are_named():
    text = (ROOT / "Makefile").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("CLUSTER_PACKAGES")]
    pairs = dict(word.split(":") for word in line.partition(":=")[2].split())
    assert pairs.items() <= PACKAGES.items()
    assert set(PACKAGES.values()) - set(pairs.values()) <= {"openssl", "iproute2"}
    assert "cluster" not in [word for line in text.splitlines() if line.startswith("test:") for word in line.split()]


def test_the_files_of_a_node():
    runtime = tomllib.loads(files.CONTAINERD)
    interface = runtime["plugins"]["io.containerd.grpc.v1.cri"]
    assert interface["sandbox_image"] == files.PAUSE_IMAGE
    assert (interface["cni"]["bin_dir"], interface["cni"]["conf_dir"]) == ("/opt/cni/bin", "/etc/cni/net.d")
    kubelet = json.loads(json.dumps(files.kubelet_configuration(DNS_ADDRESSES[0])))
    assert kubelet["containerRuntimeEndpoint"] == f"unix://{runtime['grpc']['address']}"
    assert kubelet["clusterDNS"] == [DNS_ADDRESSES[0]] == [ADDRESSES[0]]
    assert run(["sh", "-n", str(Path(files.__file__).with_name("node.sh"))]) == ""


@pytest.mark.parametrize("name", INDEXES)
def test_the_families_of_a_cluster(name):
    families = Families(name)
    given = json.loads((ROOT / "deploy" / "overlay" / "net-conf.json").read_text())
    found = parse(json.dumps({**given, **families.net_conf}).encode(), "net-conf.json")
    assert found.networks == families.of(CLUSTER_CIDRS)
    spec = [each["spec"] for each in workloads.basics("1", families) if each["metadata"]["name"] == "cluster"]
    assert [each["ipFamilyPolicy"] == "PreferDualStack" for each in spec] == [len(families.indexes) == 2]
    (pool, _) = workloads.pool(families)
    assert len(pool["spec"]["addresses"]) == len(families.indexes)


@pytest.mark.kernel
@pytest.mark.parametrize("name", INDEXES)
def test_the_api_server_reaches_pods_in_the_first_family(name):
    lab = f"nxf{os.getpid()}"
    families, nodes = Families(name), topology.nodes(lab, 2)
    try:
        make_network(lab, nodes, topology.VXLAN)
        fabric = topology.fabric_namespace(lab)
        for command in families.access(nodes):
            run(["ip", *command.split()], namespace=fabric)
        for node in nodes:
            pod = node.gateways[families.first]
            (way, *_) = json.loads(run(["ip", "-j", "route", "get", pod], namespace=fabric))
            assert way["gateway"] == node.addresses[families.first]
            assert way["prefsrc"] == API_ADDRESSES[families.first]
    finally:
        for namespace in namespace_names():
            if topology.owns(lab, namespace):
                delete_namespace(namespace)


def test_an_image_is_what_its_index_says(tmp_path):
    layer = images.layer({"bin/true": b"program"})
    images.write_image(
        tmp_path / "image.tar", ["a.example/one:1", "a.example/two:1"], [layer], "amd64", Cmd=["/bin/true"]
    )
    with tarfile.open(tmp_path / "image.tar") as archive:
        blobs = {entry.name: archive.extractfile(entry).read() for entry in archive}
    for name, data in blobs.items():
        assert not name.startswith("blobs/") or name == f"blobs/sha256/{hashlib.sha256(data).hexdigest()}"
    index = json.loads(blobs["index.json"])["manifests"]
    assert [each["annotations"]["io.containerd.image.name"] for each in index] == ["a.example/one:1", "a.example/two:1"]
    manifest = json.loads(blobs[index[0]["digest"].replace("sha256:", "blobs/sha256/")])
    config = json.loads(blobs[manifest["config"]["digest"].replace("sha256:", "blobs/sha256/")])
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    assert config["config"] == {"Cmd": ["/bin/true"]}


@pytest.mark.parametrize("architecture", images.ARCHITECTURES.values())
def test_the_program_of_pods_waits_until_it_is_killed(tmp_path, architecture):
    path = tmp_path / "pause"
    path.write_bytes(images.pause_program(architecture))
    path.chmod(0o755)
    assert len(path.read_bytes()) < 200
    if images.ARCHITECTURES.get(platform.machine()) != architecture:
        return
    process = subprocess.Popen([path])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
    finally:
        process.kill()
    assert process.wait(30) == -9


def test_what_the_cluster_runs_are_objects_with_all_components():
    listed = {each.name for each in (ROOT / "deploy").iterdir() if (each / "kustomization.yaml").exists()}
    assert listed == {*COMPONENTS, SOCKETS, "crds"}
    names = [each["metadata"]["name"] for each in workloads.basics("1", Families(IPV4)) if each["kind"] == "Service"]
    assert set(workloads.SPREADING) < set(names)
    assert "load alone" in OPERATIONS


def test_totals_are_sums_of_what_clients_print():
    first = Totals.read('{"requests": 5, "failed": 1, "errors": ["a"]}')
    both = first + Totals.read('{"requests": 7, "slow": 2, "errors": ["b"]}')
    assert (both.requests, both.failed, both.slow, both.errors) == (12, 1, 2, ("a", "b"))
    after = both - first
    assert (after.requests, after.failed, after.errors) == (7, 0, ("b",))
