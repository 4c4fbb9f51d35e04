"""What `narthex lab` prints for people."""

import msgspec

from narthex.cli.lab import output as lab_output
from narthex.lab import topology
from narthex.lab.program.labs import LabNodeStatus, LabStatus, StartedLab
from narthex.lab.program.state import LabState, PodRecord, ServiceAddress, ServiceRecord
from narthex.linux.processes import ProcessIdentity
from narthex.model.problem import Problem


def state(name="default", **fields):
    nodes = topology.nodes(name, 2)
    values = {
        "pods": (
            PodRecord(
                namespace="shop",
                name="web-1",
                node="node-1",
                network_namespace="n",
                addresses=("10.244.1.2",),
                ready=True,
            ),
            PodRecord(namespace="shop", name="web-2", problem="no node takes it"),
        ),
        "services": (
            ServiceRecord(
                namespace="shop",
                name="web",
                type="NodePort",
                endpoints=1,
                frontends=(
                    ServiceAddress(kind="cluster IP", address="10.96.0.20", port=80, protocol="TCP"),
                    *(
                        ServiceAddress(kind="node port", address=node.addresses[0], port=30001, protocol="TCP")
                        for node in nodes
                    ),
                ),
            ),
        ),
        **fields,
    }
    return LabState(
        name=name,
        mode="nftables",
        source="/manifests",
        since="2026-01-31T12:00:00Z",
        controller=ProcessIdentity(1, 1),
        nodes=nodes,
        outside="o",
        **values,
    )


def test_up_tells_what_to_do_next():
    text = lab_output.started(StartedLab(state("mine"), 0.51, cleared=True))
    assert text.startswith("Removed the remains of lab 'mine' after a crash.\n\nLab 'mine' is up after 0.5 s: 2 nodes")
    assert "narthex lab exec --name mine outside -- curl -s http://192.168.49.11:30001/" in text
    assert "narthex lab exec --name mine shop/web-1 -- curl -s http://10.96.0.20:80/" in text
    assert "narthex lab down --name mine" in text


def test_the_default_lab_needs_no_name():
    text = lab_output.started(StartedLab(state(), 0.51, cleared=False))
    assert "--name" not in text
    assert "  narthex lab status  " in text


def test_an_empty_lab_says_where_manifests_go():
    text = lab_output.started(StartedLab(state(pods=(), services=()), 0.5, cleared=False))
    assert "There are no pods." in text
    assert "cp -r examples/hello-world/. /manifests " in text
    text = lab_output.started(
        StartedLab(msgspec.structs.replace(state(pods=(), services=()), source="/a.yaml"), 0.5, cleared=False)
    )
    assert "${EDITOR:-vi} /a.yaml   # change the manifests, applied at once" in text and "cp -r" not in text


def test_status_tells_what_does_not_work():
    nodes = (
        LabNodeStatus(node="node-1", running=True, healthy=False),
        LabNodeStatus(node="node-2", running=False, healthy=False),
    )
    problem = Problem(origin="web.yaml:7", object="Service shop/bad", field="spec.ports", message="is wrong")
    found = LabStatus(running=False, healthy=False, nodes=nodes, state=state(problems=(problem,)))
    text = lab_output.status(found)
    assert "has CRASHED" in text
    assert "running, NOT healthy" in text
    assert "NOT RUNNING" in text
    assert "web.yaml:7: error: Service shop/bad: spec.ports: is wrong" in text
    assert "Pod shop/web-2: no node takes it" in text


def test_a_node_port_is_one_line():
    nodes = tuple(LabNodeStatus(node=f"node-{number}", running=True, healthy=True) for number in (1, 2))
    text = lab_output.status(LabStatus(running=True, healthy=True, nodes=nodes, state=state()))
    assert text.count("30001") == 1
    assert "every node, port 30001/TCP (node port)" in text


def test_control_characters_cannot_forge_lines():
    hostile = PodRecord(namespace="shop", name="x\n\x1b[2J", problem="y\nz")
    text = lab_output.status(LabStatus(running=True, healthy=True, nodes=(), state=state(pods=(hostile,))))
    assert "\x1b" not in text
    assert "x\\n\\x1b[2J" in text


def test_a_balancers_address_is_the_way_in_and_why():
    frontend = ServiceAddress(kind="load balancer IP", address="fd00:15::1", port=80, protocol="TCP")
    web = ServiceRecord(namespace="shop", name="web", type="LoadBalancer", endpoints=1, frontends=(frontend,))
    text = lab_output.started(StartedLab(state(services=(web,), balancing=True), 0.5, cleared=False))
    assert "narthex lab exec outside -- curl -s http://[fd00:15::1]:80/ " in text
    assert "narthex lb why shop/web --lab default" in text
    # Where nobody answers for it, it would be no advice.
    text = lab_output.started(StartedLab(state(services=(web,)), 0.5, cleared=False))
    assert "curl" not in text and "lb why" not in text


def test_a_killed_node_is_told_from_one_that_fell():
    nodes = (
        LabNodeStatus(node="node-1", running=False, healthy=False, killed=True),
        LabNodeStatus(node="node-2", running=False, healthy=False),
    )
    text = lab_output.status(LabStatus(running=True, healthy=False, nodes=nodes, state=state(killed=("node-1",))))
    assert [text.count(word) for word in ("DEAD, killed", "NOT RUNNING")] == [1, 1]


def test_nobody_is_sent_to_the_clusters_dns():
    frontend = ServiceAddress(kind="cluster IP", address="10.96.0.10", port=53, protocol="TCP")
    dns = ServiceRecord(namespace="kube-system", name="kube-dns", type="ClusterIP", endpoints=2, frontends=(frontend,))
    text = lab_output.started(StartedLab(state(services=(dns,)), 0.5, cleared=False))
    assert "curl" not in text and "examples/hello-world/. /manifests" in text
