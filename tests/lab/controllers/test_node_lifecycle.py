"""Nodes that fall silent, and what becomes of their pods."""

from datetime import timedelta

import pytest

from narthex.lab.controllers.objects import condition, is_pod_ready, is_terminating, labels_of

from .world import World, deployment, node, pod, service


def beat(world, *names):
    """A heartbeat of each node, with a time of the node's own."""
    for name in names:
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": name, "renewTime": world.now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")},
        }
        world.put(lease)


def live(world, seconds, *names):
    """Time passes, and these nodes are heard of."""
    for _ in range(int(seconds * 2)):
        world.wait(0.5)
        beat(world, *names)


def ready_of(world, name):
    return condition(world.get("Node", name, ""), "Ready")["status"]


def taints(world, name):
    return [(taint["key"], taint["effect"]) for taint in world.get("Node", name, "")["spec"].get("taints", ())]


def running(nodes=2):
    world = World(nodes=nodes)
    beat(world, *(f"node-{index + 1}" for index in range(nodes)))
    world.put(service())
    world.put(deployment(2))
    world.run_pods()
    return world


def test_a_silent_node_is_unknown_and_tainted_and_its_pods_serve_nobody():
    world = running()
    live(world, 4, "node-1")
    assert (ready_of(world, "node-1"), ready_of(world, "node-2")) == ("True", "Unknown")
    assert taints(world, "node-1") == []
    assert taints(world, "node-2") == [
        ("node.kubernetes.io/unreachable", "NoSchedule"),
        ("node.kubernetes.io/unreachable", "NoExecute"),
    ]
    by_node = {each["spec"]["nodeName"]: is_pod_ready(each) for each in world.list("Pod")}
    assert by_node == {"node-1": True, "node-2": False}
    (slice_,) = world.list("EndpointSlice")
    assert {each["nodeName"]: each["conditions"]["ready"] for each in slice_["endpoints"]} == by_node
    assert ("NodeNotReady", "Node node-2 status is now: NodeNotReady") in world.events(namespace="default")


def test_who_looks_late_does_not_take_his_own_sleep_for_the_nodes():
    world = running()
    world.now += timedelta(seconds=100)
    world.settle()
    assert ready_of(world, "node-2") == "True"
    live(world, 4, "node-1", "node-2")
    assert ready_of(world, "node-2") == "True"


def test_it_comes_back():
    world = running()
    live(world, 4, "node-1")
    live(world, 1, "node-1", "node-2")
    assert ready_of(world, "node-2") == "True"
    assert taints(world, "node-2") == []
    assert all(is_pod_ready(each) for each in world.list("Pod"))


@pytest.mark.parametrize(("seconds", "gone"), [(290, False), (310, True)])
def test_pods_leave_after_five_minutes_and_others_come(seconds, gone):
    world = running()
    live(world, 3, "node-1")
    lost = next(each for each in world.list("Pod") if each["spec"]["nodeName"] == "node-2")
    live(world, seconds, "node-1")
    assert is_terminating(world.get("Pod", lost["metadata"]["name"])) is gone
    assert len(world.list("Pod")) == (3 if gone else 2)
    if gone:
        assert [each["spec"]["nodeName"] for each in world.list("Pod") if not is_terminating(each)] == [
            "node-1",
            "node-1",
        ]


def test_a_toleration_says_how_long_a_pod_stays():
    world = World(nodes=1)
    beat(world, "node-1")
    unreachable = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    world.put(pod("short", tolerations=[{**unreachable, "tolerationSeconds": 5}]))
    world.put(pod("ever", tolerations=[unreachable]))
    world.run_pods()
    world.wait(4)
    assert [is_terminating(world.get("Pod", name)) for name in ("short", "ever")] == [False, False]
    world.wait(1000)
    assert [is_terminating(world.get("Pod", name)) for name in ("short", "ever")] == [True, False]


def test_a_taint_by_hand_drives_out_who_does_not_tolerate_it():
    world = running()
    held = world.get("Node", "node-2", "")
    taint = {"key": "dedicated", "value": "x", "effect": "NoExecute"}
    world.put({**held, "spec": {**held["spec"], "taints": [taint]}})
    assert {each["spec"]["nodeName"] for each in world.list("Pod") if not is_terminating(each)} == {"node-1"}


def test_cordon_and_uncordon():
    world = running()
    world.patch("Node", "node-2", "", unschedulable=True)
    assert taints(world, "node-2") == [("node.kubernetes.io/unschedulable", "NoSchedule")]
    world.patch("Deployment", "web", replicas=4)
    assert sorted(each["spec"]["nodeName"] for each in world.list("Pod")) == ["node-1", "node-1", "node-1", "node-2"]
    world.patch("Node", "node-2", "", unschedulable=False)
    assert taints(world, "node-2") == []


def test_a_node_that_nobody_ever_heard_of_is_left_as_it_is():
    world = World(nodes=0)
    world.put(node("paper"))
    world.wait(1000)
    assert ready_of(world, "paper") == "True"


def test_pods_of_a_node_that_is_deleted_are_gone_at_once():
    world = running()
    world.delete("Node", "node-2", "")
    assert [each["spec"]["nodeName"] for each in world.list("Pod")] == ["node-1", "node-1"]
    assert labels_of(world.list("Pod")[0])["app"] == "web"
