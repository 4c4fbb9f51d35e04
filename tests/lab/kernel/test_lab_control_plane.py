"""`lab up --control-plane` with stand-ins for the programs: what the lab does around them.

Other tests of this folder run against the official programs as well, see `lab_cluster.CONTROL_PLANES`.
"""

import contextlib
import http.client
import os
import ssl
import sys
from pathlib import Path

import pytest
from tests.lab.kernel.lab_cluster import SOURCE, eventually, left_of, narthex, running

from narthex.lab import topology
from narthex.lab.program import labs
from narthex.lab.program.control_plane import PROGRAMS
from narthex.lab.program.options import LabOptions
from narthex.lab.program.state import LabError, StateDirectory
from narthex.linux.namespaces import in_namespace
from narthex.linux.processes import ProcessIdentity, kill_processes, processes_inside

pytestmark = pytest.mark.kernel

STAND_IN = Path(__file__).with_name("control_plane_stand_in.py")
WEB = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: c, image: web, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 80, targetPort: 8080, nodePort: 30080}]}
"""


def programs(folder, **scripts):
    """A directory with the four programs; some of them are other scripts."""
    folder.mkdir()
    for name in PROGRAMS:
        start = f'PYTHONPATH={SOURCE} exec {sys.executable} {STAND_IN} {name} "$@"'
        (folder / name).write_text(f"#!/bin/sh\n{scripts.get(name.replace('-', '_'), start)}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("control-plane")
    manifests = folder / "manifests"
    manifests.mkdir()
    (manifests / "web.yaml").write_text(WEB)
    with running("cp", "--control-plane", str(programs(folder / "bin")), directory=manifests) as made:
        made.programs = folder / "bin"
        yield made


def process_of(lab, program) -> ProcessIdentity:
    found = None
    for each in processes_inside([topology.fabric_namespace(lab.name)]):
        with contextlib.suppress(FileNotFoundError):
            words = Path(f"/proc/{each.pid}/cmdline").read_bytes().decode().split("\0")
            found = each if program in words else found
    return found


def test_the_programs_have_the_objects_and_the_lab_has_the_rest(lab):
    state = lab.lab
    assert (len(state.pods), len([pod for pod in state.pods if pod.ready])) == (2, 2)
    words = ("lab", "exec", "--name", lab.name, "outside", "--", "curl", "-sS", "-m", "20")
    assert narthex(*words, f"http://{state.nodes[0].addresses[0]}:30080/").startswith("web-")
    said = lab.narthex("status")
    assert f"control plane: {lab.programs}, instead of the lab's own" in said
    logs = StateDirectory(lab.name).logs
    for name in PROGRAMS:
        assert (logs / f"{name}.log").read_text().startswith(f"{name} starts with")
        assert process_of(lab, name)
    assert lab.get("pods")["items"][0]["status"]["phase"] == "Running"
    assert lab.get("leases", "-n", "kube-node-lease")["items"][0]["spec"]["leaseDurationSeconds"] == 10


def test_scale_and_removal_reach_the_nodes(lab):
    lab.narthex("scale", "deployment/web", "3")
    assert len([pod for pod in lab.lab.pods if pod.ready]) == 3
    lab.kubectl("delete", "deployment", "web", "--wait=false")
    eventually(lambda: not lab.get("pods")["items"], "the end of the pods")
    eventually(lambda: not lab.lab.pods, "the end of the pods")


def test_kubelets_answer_the_api_server_alone(lab):
    directory = StateDirectory(lab.name)
    lab.kubectl("run", "one", "--image=web", "--port=8080")
    lab.kubectl("wait", "--for=condition=Ready", "pod/one", "--timeout=60s")
    node = next(each for each in lab.lab.nodes if each.name == lab.get("pod", "one")["spec"]["nodeName"])

    def get(path, *, known):
        context = ssl.create_default_context(cafile=str(directory.certificate))
        if known:
            files = directory.control_plane
            context.load_cert_chain(files.kubelet_client, files.kubelet_client_key)
        connection = http.client.HTTPSConnection(node.addresses[0], 10250, timeout=30, context=context)
        with in_namespace(topology.fabric_namespace(lab.name)), contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    assert get("/containerLogs/default/one/one", known=True) == (200, b"")
    assert get("/containerLogs/default/nobody/one", known=True)[0] == 404
    with pytest.raises((ssl.SSLError, OSError)):
        get("/containerLogs/default/one/one", known=False)


def test_a_program_that_ends_is_started_again(lab):
    before = process_of(lab, "kube-scheduler")
    kill_processes([before])
    eventually(lambda: process_of(lab, "kube-scheduler") not in (None, before), "the next kube-scheduler")
    eventually(lambda: labs.inspect_lab(lab.name).healthy, "a healthy lab")
    assert "cannot record" in lab.narthex("record", "history.jsonl", status=1)


def test_what_cannot_start_is_reported_and_leaves_nothing(tmp_path):
    name = f"nxt-{os.getpid()}-cpbad"
    folder = programs(tmp_path / "bin", kube_apiserver="echo unknown flag; exit 2")
    said = narthex("lab", "up", "--name", name, "--nodes", "1", "--control-plane", str(folder), status=1)
    assert "kube-apiserver ended with status 2:\nunknown flag" in said
    assert left_of(name) == []


def test_what_a_lab_cannot_use_is_refused_before_anything_starts(tmp_path):
    folder = programs(tmp_path / "bin")
    with pytest.raises(LabError, match="the objects of an external control plane are not kept"):
        labs.up("nxt-never", LabOptions(nodes=1, mode="nftables", control_plane=folder), keep=True)
    (folder / "etcd").unlink()
    (folder / "kube-scheduler").unlink()
    with pytest.raises(
        LabError, match="no executable etcd, kube-scheduler: put the programs of an official release there"
    ):
        labs.up("nxt-never", LabOptions(nodes=1, mode="nftables", control_plane=folder))
    with pytest.raises(LabError, match="is not a program"):
        labs.up("nxt-never", LabOptions(nodes=1, mode="nftables", kube_proxy=folder))
    assert left_of("nxt-never") == []
