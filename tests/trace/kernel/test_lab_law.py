"""Traces in a lab with faults: the fault is the first cause, and a probe and the sender see what the trace says.

NARTHEX_LAB_CASES is the number of random cases for each mode and overlay. Without it, the tests with a lab for each of them
do not exist, and few cases are tried in the one lab of the others.
"""

import json
import os
import random
import signal
import time
from typing import Any

import pytest
from tests.lab.kernel.lab_cluster import eventually, narthex, running
from tests.trace.kernel import lab_law

from narthex.cli.lab.output import status
from narthex.lab.program import labs
from narthex.lab.program.trace import trace_lab
from narthex.lab.program.ui import board_of, faults
from narthex.lab.ui.path import path
from narthex.linux.libnftables import run_nft
from narthex.linux.run import run
from narthex.trace.program.travel import TraceRequest

pytestmark = pytest.mark.kernel

CASES = int(os.environ.get("NARTHEX_LAB_CASES", "0"))
SEED = int(os.environ.get("NARTHEX_SEED", "20260801"))
FEW, MANY = 3, 3
"""Cases in the suite; nodes of the labs for more cases."""
POOL = ("--pool", "192.168.15.0/28")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = lab_law.manifests(tmp_path_factory.mktemp("lab-law"), 2)
    with running("law", "--nodes", "2", *POOL, directory=directory) as made:
        yield made


@pytest.fixture
def mended(cluster):
    """A lab of which nothing is broken, before and after."""
    yield cluster
    cluster.narthex("fault", "end")
    lab_law.settle(cluster.name)


def web_on(cluster, node: str) -> str:
    return next(pod.addresses[0] for pod in cluster.lab.pods if pod.name.startswith("web-") and pod.node == node)


def expect(cluster, source: str, destination: str, *, cause: str) -> Any:
    """The first finding is of this cause, and a packet that is sent agrees with the trace."""
    traced = trace_lab(cluster.name, TraceRequest(source=source, destination=destination))
    assert traced.findings
    assert (traced.findings[0].cause.id, traced.findings[0].explains) == (cause, True)
    tried = lab_law.probe_once(cluster.name, traced)
    assert lab_law.judge(traced, tried, lab_law.Fault(cause, (cause,)), well=True) == ""
    return traced


def test_outside_has_no_route_to_a_cluster_ip_and_is_told_of_others(cluster):
    first = expect(cluster, "outside", "balanced", cause="sender-no-route").findings[0]
    balancer = lab_law.address_of(random.Random(0), cluster.lab, "@balanced:80")
    assert first.advice == (
        f"From outside, ask {balancer} (load balancer address) or 192.168.49.11:30003 (node port of node-1)."
    )
    for way in (balancer, "192.168.49.11:30003"):
        assert lab_law.is_well(cluster.name, "outside", way)
    said = narthex("trace", "outside", "web:80", "--lab", cluster.name)
    assert "delivered" not in said
    assert "\nWhy not: outside has no route to " in f"\n{said}"


@pytest.mark.parametrize("percent", [100, 30])
def test_loss(mended, percent):
    mended.narthex("fault", "loss", "node-2", "--percent", str(percent))
    there = web_on(mended, "node-2")
    found = expect(mended, "client-1", f"{there}:8080", cause="fault-loss")
    lost = sum(end.probability for end in found.path.weighted_ends() if end.fate in lab_law.BAD)
    assert lost * 100 == percent
    data = json.loads(narthex("trace", "client-1", f"{there}:8080", "--lab", mended.name, "-o", "json"))
    assert data["findings"][0]["cause"] == "fault-loss"
    # Pods of the node reach one another all the same.
    assert lab_law.is_well(mended.name, "client-2", f"{there}:8080")


def test_an_isolated_pod_also_in_the_browser(mended):
    mended.narthex("fault", "partition", "client-1")
    expect(mended, "client-1", "web:80", cause="fault-partition")
    board, trace = board_of(mended.name)
    assert [each.partition(" (fault")[0] for each in faults(mended.name)] == ["partition at default/client-1"]
    shown = path(trace, board.snapshot, "client-1", "web:80")
    assert shown["findings"][0]["cause"] == "fault-partition"
    assert shown["findings"][0]["sentence"].startswith("partition at default/client-1 (fault")
    assert shown["verdict"]["style"] == "bad"


def test_a_partition_of_nodes_and_what_the_status_says(mended):
    mended.narthex("fault", "partition", "node-2")
    expect(mended, "client-1", "192.168.49.12:30001", cause="fault-partition")
    eventually(lambda: labs.read(mended.name).not_ready == ("node-2",), "a node that is not ready")
    found = labs.inspect_lab(mended.name)
    assert [node.ready for node in found.nodes] == [True, False]
    assert not found.healthy
    said = status(found)
    assert "partition at node-2" in said
    assert "running, NOT READY" in said
    # The only endpoint of this Service is on that node.
    eventually(lambda: refused(mended, "once:80"), "rules without the endpoint")
    expect(mended, "client-1", "once:80", cause="fault-partition")


def refused(cluster, destination: str) -> bool:
    found = trace_lab(cluster.name, TraceRequest(source="client-1", destination=destination))
    return [end.fate.value for end in found.path.weighted_ends()] == ["rejected"]


def test_the_api_server_is_down(mended):
    mended.narthex("fault", "api", "down")
    expect(mended, "client-1", "kubernetes", cause="fault-api")
    other = trace_lab(mended.name, TraceRequest(source="client-1", destination="web:80"))
    assert [(found.cause.id, found.explains) for found in other.findings] == [("fault-api", False)]


def test_the_process_of_a_node_was_killed(mended):
    process = next(each.process for each in labs.read(mended.name).processes if each.node == "node-1")
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not labs.inspect_lab(mended.name).nodes[0].running, "the end of the process")
    try:
        expect(mended, "client-1", "kube-system/kube-dns:53/udp", cause="node-process-down")
        assert "NOT RUNNING" in status(labs.inspect_lab(mended.name))
    finally:
        mended.narthex("fault", "kill", "process/node-1")


def test_a_sender_on_a_live_node_and_its_own_rules(mended):
    node = f"nx-{mended.name}-node-1"
    there = f"{web_on(mended, 'node-2')}:8080"
    client = next(pod for pod in mended.lab.pods if pod.name == "client-1")
    words = ("trace", client.addresses[0], there, "--live", "--netns", node)
    said = narthex(*words)
    assert f"\n  {client.network_namespace}" in said and "\n  routing  " in said
    run_nft(
        "table inet own { chain c { type filter hook output priority 0; policy drop; }; }", client.network_namespace
    )
    try:
        data = json.loads(narthex(*words, "-o", "json"))
        assert [(end["fate"], end["reason"]) for end in data["ends"]] == [("dropped", "a rule drops it silently")]
        expect(mended, "client-1", there, cause="foreign-table")
    finally:
        run_nft("delete table inet own", client.network_namespace)
    unseen = narthex("trace", "10.244.1.250", there, "--live", "--netns", node)
    reason = "unknown: the pod's own routes and rules: no network namespace that is linked with this node has"
    assert reason in " ".join(unseen.split())


POD_FAULTS = {
    "input": ("foreign-table", "nft add table inet own", "nft add chain inet own c {{ type filter hook input priority 0; }}",
              "nft add rule inet own c tcp dport 8080 drop"),
    "output": ("foreign-table", "nft add table inet own",
               "nft add chain inet own c {{ type filter hook output priority 0; policy drop; }}"),
    "no way back": ("route-missing", "ip route del default", "ip route del 10.244.0.0/16", "ip route del {net}"),
    "straight back": ("br-netfilter-off", "ip route replace {net} dev eth0"),
}  # fmt: skip


@pytest.mark.parametrize("name", POD_FAULTS)
def test_the_rules_and_routes_of_the_destination_pod(cluster, name):
    """Of what is in the pod's own namespace; the pod is the only endpoint of `near` on its node."""
    cause, *commands = POD_FAULTS[name]
    webs = [each for each in cluster.lab.pods if each.name.startswith("web-")]
    pod = next(each for each in webs if sum(other.node == each.node for other in webs) == 1)
    space, gateway = pod.network_namespace, pod.addresses[0].rpartition(".")[0] + ".1"
    net, client = gateway.removesuffix("1") + "0/24", f"client-{pod.node.removeprefix('node-')}"
    destination = "near:80" if name == "straight back" else f"{pod.addresses[0]}:8080"
    try:
        for command in commands:
            run(command.format(net=net).split(), namespace=space)
        traced = expect(cluster, client, destination, cause=cause)
        assert any(
            word in traced.findings[0].sentence for word in (f"pod default/{pod.name}", "straight over the bridge")
        )
    finally:
        run_nft("table inet own {}\ndelete table inet own", space)
        for route in (
            f"{net} via {gateway} dev eth0",
            f"10.244.0.0/16 via {gateway} dev eth0",
            f"default via {gateway}",
        ):
            run(["ip", "route", "replace", *route.split()], namespace=space)
    assert lab_law.is_well(cluster.name, client, destination)


def test_a_random_sample_of_faults_and_packets(cluster):
    tally = lab_law.run(cluster.name, random.Random(SEED), FEW, packets=2)
    assert tally.wrong == []


def test_what_does_not_come_back(cluster):
    """The last one with this lab: a killed pod that nobody starts again, and a dead node."""
    cluster.narthex("fault", "kill", "once")
    eventually(lambda: refused(cluster, "once:80"), "rules without the endpoint")
    expect(cluster, "client-1", "once:80", cause="pod-not-running")
    there = web_on(cluster, "node-2")
    cluster.narthex("kill", "node-2")
    expect(cluster, "client-1", f"{there}:8080", cause="node-dead")
    expect(cluster, "client-2", "192.168.49.11:30001", cause="node-dead")


if CASES:

    @pytest.mark.parametrize("overlay", lab_law.OVERLAYS)
    @pytest.mark.parametrize("mode", lab_law.MODES)
    def test_random_faults_and_packets(mode, overlay, tmp_path):
        rng = random.Random(f"{SEED} {mode} {overlay}")
        directory = lab_law.manifests(tmp_path, MANY)
        options = ("--nodes", str(MANY), "--mode", mode, "--overlay", overlay, *POOL)
        began = time.monotonic()
        with running("drawn", *options, directory=directory) as made:
            tally = lab_law.run(made.name, rng, CASES)
            dead = lab_law.run(made.name, rng, 4, deadly=True)
        kinds, seconds = tally.kinds + dead.kinds, time.monotonic() - began
        print(f"{mode}, {overlay}: {kinds.total()} cases in {seconds:.0f} s, {tally.moved} moved: {json.dumps(kinds)}")
        assert tally.wrong + dead.wrong == []
