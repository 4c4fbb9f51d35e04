"""Which node a pod gets, and what one without a node is told."""

import pytest

from narthex.lab.controllers.objects import condition
from narthex.lab.controllers.scheduler import tolerates

from .world import World, deployment, node, pod, replica_set

ZONE = "topology.kubernetes.io/zone"


def nodes_of(world):
    return sorted(each["spec"].get("nodeName", "") for each in world.list("Pod"))


def labelled(world, name, **labels):
    held = world.get("Node", name, "")
    labels = {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()}
    world.put({**held, "metadata": {**held["metadata"], "labels": {**held["metadata"]["labels"], **labels}}})


def told(world, name="web"):
    found = condition(world.get("Pod", name), "PodScheduled")
    return found["status"], found.get("reason"), found.get("message")


def affinity(*expressions):
    term = {"nodeSelectorTerms": [{"matchExpressions": list(expressions)}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}


def test_siblings_are_spread():
    world = World(nodes=4)
    world.put(replica_set(4))
    world.put(replica_set(2, "other"))
    assert nodes_of(world) == ["node-1", "node-1", "node-2", "node-2", "node-3", "node-4"]


def test_over_zones_before_nodes_are_used_twice():
    world = World(nodes=3)
    for name, zone in (("node-1", "a"), ("node-2", "a"), ("node-3", "b")):
        labelled(world, name, topology_kubernetes_io__zone=zone)
    world.put(replica_set(2))
    assert nodes_of(world) == ["node-1", "node-3"]


def test_node_2_comes_before_node_10():
    world = World(nodes=11)
    world.put(pod("a"))
    world.put(pod("b"))
    assert nodes_of(world) == ["node-1", "node-2"]


def test_a_pod_that_names_its_node_is_there():
    world = World(nodes=2)
    world.put(pod(nodeName="node-2"))
    assert told(world) == ("True", None, None)
    world.put(pod("nowhere", nodeName="node-9"))
    assert world.get("Pod", "nowhere")["spec"]["nodeName"] == "node-9"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"nodeSelector": {"disk": "ssd"}},
            "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.",
        ),
        (
            {"affinity": affinity({"key": "disk", "operator": "In", "values": ["ssd"]})},
            "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.",
        ),
    ],
)
def test_what_it_is_told(spec, message):
    world = World(nodes=3)
    world.put(pod(**spec))
    assert told(world) == ("False", "Unschedulable", message)
    assert world.events("FailedScheduling") == [("FailedScheduling", message)]
    labelled(world, "node-2", disk="ssd")
    assert nodes_of(world) == ["node-2"]
    assert told(world) == ("True", None, None)
    assert world.events("Scheduled") == [("Scheduled", "Successfully assigned shop/web to node-2")]


def test_different_reasons_are_counted():
    world = World(nodes=0)
    world.put(pod())
    assert told(world)[2] == "no nodes available to schedule pods"
    taint = {"key": "dedicated", "value": "db", "effect": "NoSchedule"}
    for name, spec in (("a", {"unschedulable": True}), ("b", {"taints": [taint]}), ("c", {"taints": [taint]})):
        world.put(node(name, **spec))
    assert told(world)[2] == (
        "0/3 nodes are available: 1 node(s) were unschedulable, 2 node(s) had untolerated taint {dedicated: db}."
    )


@pytest.mark.parametrize(
    ("toleration", "taint", "holds"),
    [
        ({"key": "a", "operator": "Exists"}, {"key": "a", "effect": "NoSchedule"}, True),
        ({"key": "a", "value": "x"}, {"key": "a", "value": "x", "effect": "NoSchedule"}, True),
        ({"key": "a", "operator": "Equal", "value": "x"}, {"key": "a", "value": "y", "effect": "NoSchedule"}, False),
        ({"key": "a", "effect": "NoExecute", "operator": "Exists"}, {"key": "a", "effect": "NoSchedule"}, False),
        ({"operator": "Exists"}, {"key": "a", "effect": "NoExecute"}, True),
        ({"key": "b", "operator": "Exists"}, {"key": "a", "effect": "NoSchedule"}, False),
    ],
)
def test_tolerations(toleration, taint, holds):
    assert tolerates(pod(tolerations=[toleration]), taint) is holds


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ({"operator": "In", "values": ["4", "8"]}, True),
        ({"operator": "NotIn", "values": ["4"]}, True),
        ({"operator": "NotIn", "values": ["8"]}, False),
        ({"operator": "Exists"}, True),
        ({"operator": "DoesNotExist"}, False),
        ({"operator": "Gt", "values": ["4"]}, True),
        ({"operator": "Lt", "values": ["8"]}, False),
        ({"operator": "Gt", "values": ["many"]}, False),
    ],
)
def test_node_affinity(expression, fits):
    world = World(nodes=1)
    labelled(world, "node-1", cores="8")
    world.put(pod(affinity=affinity({"key": "cores", **expression})))
    assert nodes_of(world) == (["node-1"] if fits else [""])


def test_host_ports_are_had_once_on_a_node():
    world = World(nodes=2)
    wanted = deployment(3)
    wanted["spec"]["template"]["spec"]["containers"][0]["ports"] = [{"containerPort": 80, "hostPort": 80}]
    world.put(wanted)
    assert nodes_of(world) == ["", "node-1", "node-2"]
    waiting = next(each["metadata"]["name"] for each in world.list("Pod") if not each["spec"].get("nodeName"))
    assert told(world, waiting)[2] == (
        "0/2 nodes are available: 2 node(s) didn't have free ports for the requested pod ports."
    )
    other = pod("udp")
    other["spec"]["containers"][0]["ports"] = [{"containerPort": 80, "hostPort": 80, "protocol": "UDP"}]
    world.put(other)
    assert world.get("Pod", "udp")["spec"]["nodeName"]


def test_a_full_node_takes_nobody_until_one_goes():
    world = World(nodes=1)
    held = world.get("Node", "node-1", "")
    world.registry.update(
        "Node", {**held, "status": {**held["status"], "allocatable": {"pods": "2"}}}, subresource="status"
    )
    world.put(replica_set(3))
    assert nodes_of(world) == ["", "node-1", "node-1"]
    waiting = next(each for each in world.list("Pod") if not each["spec"].get("nodeName"))
    assert told(world, waiting["metadata"]["name"])[2] == "0/1 nodes are available: 1 Too many pods."
    world.patch("ReplicaSet", "web", replicas=2)
    assert nodes_of(world) == ["node-1", "node-1"], "the one without a node is the first to go"


def test_a_taint_that_only_asks_is_heard_where_there_is_another_node():
    world = World(nodes=2)
    taints = [{"key": "slow", "effect": "PreferNoSchedule"}]
    world.patch("Node", "node-1", "", taints=taints)
    world.put(replica_set(2))
    assert nodes_of(world) == ["node-2", "node-2"]


def test_another_scheduler_s_pods_are_left_alone():
    world = World()
    world.put(pod(schedulerName="mine"))
    assert nodes_of(world) == [""]
