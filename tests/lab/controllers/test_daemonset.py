"""DaemonSets and their pods."""

from itertools import pairwise

import pytest

from narthex.lab.controllers.daemonset import fits
from narthex.lab.controllers.objects import is_terminating

from .world import World, daemon_set, node


def nodes(world):
    return sorted(pod["spec"]["nodeName"] for pod in world.list("Pod") if not is_terminating(pod))


def images(world):
    return {
        pod["spec"]["nodeName"]: pod["spec"]["containers"][0]["image"]
        for pod in world.list("Pod")
        if not is_terminating(pod)
    }


def status(world):
    return world.get("DaemonSet", "agent")["status"]


def test_each_node_has_one_pod_also_one_that_comes_later():
    world = World(nodes=2)
    world.put(daemon_set())
    world.converge()
    assert nodes(world) == ["node-1", "node-2"]
    world.put(node("node-3"))
    world.converge()
    assert nodes(world) == ["node-1", "node-2", "node-3"]
    numbers = ("desiredNumberScheduled", "currentNumberScheduled", "numberReady", "numberAvailable")
    assert [status(world)[name] for name in (*numbers, "updatedNumberScheduled")] == [3] * 5
    assert (status(world)["numberMisscheduled"], status(world)["observedGeneration"]) == (0, 1)


TAINT = {"key": "own", "value": "x", "effect": "NoSchedule"}
TOLERATION = [{"key": "own", "operator": "Exists"}]


@pytest.mark.parametrize(
    ("pod", "spec", "labels", "expected"),
    [
        ({}, {}, {}, (True, True)),
        ({"nodeSelector": {"disk": "ssd"}}, {}, {}, (False, False)),
        ({"nodeSelector": {"disk": "ssd"}}, {}, {"disk": "ssd"}, (True, True)),
        ({"nodeName": "another"}, {}, {}, (False, False)),
        ({}, {"taints": [TAINT]}, {}, (False, True)),
        ({"tolerations": TOLERATION}, {"taints": [TAINT]}, {}, (True, True)),
        ({}, {"taints": [{**TAINT, "effect": "NoExecute"}]}, {}, (False, False)),
        ({}, {"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}, {}, (True, True)),
        ({}, {"taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]}, {}, (True, True)),
        (
            {},
            {"taints": [{"key": "node.kubernetes.io/network-unavailable", "effect": "NoSchedule"}]},
            {},
            (False, True),
        ),
        (
            {"hostNetwork": True},
            {"taints": [{"key": "node.kubernetes.io/network-unavailable", "effect": "NoSchedule"}]},
            {},
            (True, True),
        ),
    ],
)
def test_which_nodes_fit(pod, spec, labels, expected):
    made = node("node-1", **spec)
    made["metadata"]["labels"] |= labels
    assert fits(daemon_set(pod=pod), made) == expected


def test_a_node_that_no_longer_fits_loses_its_pod():
    world = World(nodes=2)
    world.put(daemon_set(pod={"nodeSelector": {"kubernetes.io/hostname": "node-1"}}))
    world.converge()
    assert nodes(world) == ["node-1"]
    held = world.get("Node", "node-1", "")
    world.put({**held, "metadata": {**held["metadata"], "labels": {}}})
    world.converge()
    assert (nodes(world), status(world)["desiredNumberScheduled"]) == ([], 0)


def test_a_rolling_update_replaces_one_pod_at_a_time():
    world = World(nodes=3)
    world.put(daemon_set())
    world.converge()
    world.put(daemon_set(image="echo:2"))
    seen = []
    for _ in range(20):
        seen.append(sum(image == "echo:1" for image in images(world).values()))
        world.run_pods()
        world.wait(1)
    assert seen[0] == 2
    assert all(before - after in (0, 1) for before, after in pairwise(seen))
    assert set(images(world).values()) == {"echo:2"}
    assert (status(world)["updatedNumberScheduled"], status(world)["observedGeneration"]) == (3, 2)
    assert len(world.list("ControllerRevision")) == 2


def test_with_a_surge_the_old_pod_stays_until_the_new_one_is_available():
    world = World(nodes=2)
    world.put(daemon_set(updateStrategy={"rollingUpdate": {"maxSurge": "50%", "maxUnavailable": 0}}))
    world.converge()
    world.put(daemon_set(image="echo:2", updateStrategy={"rollingUpdate": {"maxSurge": "50%", "maxUnavailable": 0}}))
    assert len(nodes(world)) == 3
    available = []
    for _ in range(20):
        available.append(status(world).get("numberAvailable"))
        world.run_pods()
        world.wait(1)
    assert set(available) == {2}
    assert (nodes(world), set(images(world).values())) == (["node-1", "node-2"], {"echo:2"})


def test_on_delete_pods_change_by_hand_only():
    world = World(nodes=2)
    world.put(daemon_set(updateStrategy={"type": "OnDelete"}))
    world.converge()
    world.put(daemon_set(image="echo:2", updateStrategy={"type": "OnDelete"}))
    world.converge()
    assert set(images(world).values()) == {"echo:1"}
    first = next(pod for pod in world.list("Pod") if pod["spec"]["nodeName"] == "node-1")
    world.delete("Pod", first["metadata"]["name"])
    world.converge()
    assert images(world) == {"node-1": "echo:2", "node-2": "echo:1"}


def test_a_failed_pod_is_replaced():
    world = World(nodes=1)
    world.put(daemon_set())
    world.converge()
    world.set_ready(world.list("Pod")[0], False, phase="Failed")
    world.converge()
    assert nodes(world) == ["node-1"]
    ((_, message),) = world.events("FailedDaemonPod")
    assert message.endswith("on node node-1, will try to kill it")


def test_a_former_template_is_the_newest_revision_again():
    world = World(nodes=1)
    for image in ("echo:1", "echo:2", "echo:1"):
        world.put(daemon_set(image=image))
        world.converge()
    assert sorted(each["revision"] for each in world.list("ControllerRevision")) == [2, 3]


def test_old_revisions_are_pruned():
    world = World(nodes=1)
    for number in range(5):
        world.put(daemon_set(image=f"echo:{number}", revisionHistoryLimit=1))
        world.converge()
    assert len(world.list("ControllerRevision")) == 2


def test_orphans_are_adopted_by_a_new_set():
    world = World(nodes=2)
    world.put(daemon_set())
    world.converge()
    before = {pod["metadata"]["uid"] for pod in world.list("Pod")}
    world.registry.delete("DaemonSet", "shop", "agent", propagation="Orphan")
    world.converge()
    world.put(daemon_set())
    world.converge()
    assert {pod["metadata"]["uid"] for pod in world.list("Pod")} == before
    assert len(world.list("ControllerRevision")) == 1


def test_a_deleted_set_takes_its_pods_along():
    world = World(nodes=2)
    world.put(daemon_set())
    world.converge()
    world.delete("DaemonSet", "agent")
    world.converge()
    assert world.list("Pod") == world.list("ControllerRevision") == []
