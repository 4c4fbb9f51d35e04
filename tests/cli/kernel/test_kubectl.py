"""`kubectl narthex` in a lab: it names the cause, in little more time than the kubectl calls that it makes, and leaves nothing."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.lab.kernel.lab_cluster import eventually, narthex, running

from narthex.linux.namespaces import namespace_names
from narthex.linux.processes import processes_inside

pytestmark = pytest.mark.kernel

PROGRAM = [sys.executable, "-c", "from narthex.cli.kubectl import main; main()"]


@pytest.fixture(scope="module")
def cluster():
    with running("kctl", "--nodes", "2") as made:
        made.kubectl("create", "deployment", "web", "--image=web:1", "--port=8080", "--replicas=2")
        made.kubectl("expose", "deployment", "web", "--port=80", "--target-port=8080")
        made.kubectl("create", "service", "clusterip", "broken", "--tcp=80:8080")
        made.kubectl("run", "client", "--image=client", "--restart=Never")
        made.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=60s")
        made.kubectl("rollout", "status", "deployment/web", "--timeout=60s")
        yield made


def left(cluster):
    """What a command could leave: pods, namespaces of the cluster and of the network, processes, and files."""
    pods = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in cluster.get("pods", "-A")["items"]}
    spaces = namespace_names()
    mine = [each for each in spaces if cluster.name in each]
    files = {each.name for each in Path(tempfile.gettempdir()).glob("kubectl-narthex-*")}
    return (
        pods,
        set(cluster.kubectl("get", "namespaces", "-o", "name").split()),
        set(mine),
        files,
        len(processes_inside(mine)),
    )


@pytest.fixture
def unchanged(cluster):
    """Everything is as before, at the end of a test."""
    before = left(cluster)
    yield
    eventually(lambda: left(cluster) == before, "the state before the command")


def ask(cluster, *words, status=0, **more):
    done = subprocess.run(
        [*PROGRAM, *words], env=cluster.environment, capture_output=True, text=True, timeout=200, check=False, **more
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("how", [[], ["--new-pod"]], ids=["in the proxy's pod", "in a pod for a moment"])
@pytest.mark.usefixtures("unchanged")
def test_a_broken_service_has_its_cause(cluster, how):
    done = ask(cluster, "trace", "client", "broken", "--yes", *how)
    assert "Service default/broken has no endpoints: no pod in namespace default has" in " ".join(done.stdout.split())
    assert "Permissions: create pods/exec in namespace kube-system" in done.stderr
    assert ("kubectl create -f -" in done.stderr) is bool(how)


@pytest.mark.usefixtures("unchanged")
def test_it_takes_little_more_than_the_calls_of_kubectl(cluster):
    def seconds(*words):
        """The least time of three runs."""
        times = []
        for _ in range(3):
            start = time.monotonic()
            subprocess.run(words, env=cluster.environment, capture_output=True, timeout=200, check=True)
            times.append(time.monotonic() - start)
        return min(times)

    one_call = seconds("kubectl", "get", "pods", "-A", "-o", "json")
    assert seconds(*PROGRAM, "trace", "client", "broken", "--yes") < 40 * one_call


@pytest.mark.usefixtures("unchanged")
def test_a_dry_run_runs_nothing_on_nodes(cluster, tmp_path):
    logged = tmp_path / "calls"
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\necho "$*" >> {logged}\nexec {shutil.which("kubectl")} "$@"\n')
    (tmp_path / "kubectl").chmod(0o755)
    cluster_environment = {**cluster.environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*PROGRAM, "trace", "client", "web", "--dry-run", "--new-pod"],
        env=cluster_environment, capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("This only reads. It runs:\n  on node node-1:\n")
    assert {line.split()[0] for line in logged.read_text().splitlines()} == {"get", "config"}


@pytest.mark.usefixtures("unchanged")
def test_without_a_terminal_it_does_not_ask(cluster):
    done = ask(cluster, "trace", "client", "web", status=2, stdin=subprocess.DEVNULL)
    assert "add --yes, or --dry-run" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("unchanged")
def test_pods_for_a_moment_are_deleted_after_signals(cluster, number):
    process = subprocess.Popen(
        [*PROGRAM, "trace", "client", "web", "--yes", "--new-pod"],
        env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
    )  # fmt: skip
    with process:
        eventually(lambda: "narthex-collector" in cluster.kubectl("get", "pods", "-A", "-o", "name"), "a pod")
        os.killpg(process.pid, number)
        process.communicate(timeout=120)
    assert process.returncode != 0


@pytest.mark.usefixtures("unchanged")
def test_a_pod_that_cannot_start_is_deleted(cluster):
    image = ["--image", "/no/such/program"]
    done = subprocess.run(
        [*PROGRAM, "trace", "client", "web", "--yes", "--new-pod", *image, "--pod-namespace", "no-such-namespace"],
        env=cluster.environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert 'namespaces "no-such-namespace" not found' in done.stderr


@pytest.mark.usefixtures("unchanged")
def test_check_top_and_why(cluster):
    said = ask(cluster, "check", "--yes").stdout
    assert {line.split(",")[0] for line in said.splitlines()} == {"node node-1", "node node-2"}
    said = ask(cluster, "top", "--node", "node-2", "--yes").stdout
    assert said.startswith("from counters of nftables elements")
    assert "it is of type ClusterIP" in ask(cluster, "why", "web").stdout


def test_names_are_those_of_the_namespace_that_kubectl_uses(cluster):
    cluster.kubectl("create", "namespace", "shop")
    try:
        cluster.kubectl("-n", "shop", "create", "service", "clusterip", "broken", "--tcp=80:8080")
        said = ask(cluster, "trace", "default/client", "broken", "-n", "shop", "--yes").stdout
        assert "Service shop/broken has no endpoints" in " ".join(said.split())
        done = ask(cluster, "trace", "default/client", "absent", "-n", "shop", "--yes", status=1)
        assert "there is no 'shop/absent'" in done.stderr
    finally:
        cluster.kubectl("delete", "namespace", "shop", "--wait=true")


@pytest.mark.parametrize("options", [[], ["--anonymize"]], ids=["as it is", "anonymized"])
def test_a_text_for_an_issue_of_both_nodes_names_the_same_cause(cluster, options, tmp_path):
    text = narthex("bundle", "--for-issue", "client", "broken", "--lab", cluster.name, *options)
    assert ("broken" in text) is not bool(options)
    (tmp_path / "issue.md").write_text(text)
    said = " ".join(narthex("trace", "--bundle", str(tmp_path / "issue.md")).split())
    assert "has no endpoints: no pod in namespace default has the labels" in said
