"""ReplicaSets and their pods."""

import re

import pytest

from narthex.lab.api.registry import stamp
from narthex.lab.controllers.objects import controller_of, is_terminating
from narthex.lab.controllers.replicaset import pods_to_delete

from .world import START, World, pod, replica_set


def names(world):
    return {each["metadata"]["name"] for each in world.list("Pod") if not is_terminating(each)}


def test_pods_have_the_set_s_name_and_five_safe_letters():
    world = World()
    world.put(replica_set(20))
    assert len(names(world)) == 20
    assert all(re.fullmatch(r"web-[bcdfghjklmnpqrstvwxz2456789]{5}", name) for name in names(world))
    assert {controller_of(each)["name"] for each in world.list("Pod")} == {"web"}


def test_a_name_is_not_given_again():
    world = World()
    world.put(replica_set(2))
    before = names(world)
    for name in before:
        world.delete("Pod", name, grace=0)
    assert len(names(world)) == 2
    assert not names(world) & before


def test_a_pod_that_fits_is_adopted_and_one_that_does_not_fit_any_more_let_go():
    world = World()
    world.put(pod("mine", {"app": "web"}))
    world.put(pod("other", {"app": "other"}))
    world.put(replica_set(2))
    assert len(names(world)) == 3
    assert controller_of(world.get("Pod", "mine"))["name"] == "web"
    assert controller_of(world.get("Pod", "other")) is None
    held = world.get("Pod", "mine")
    world.put({**held, "metadata": {**held["metadata"], "labels": {"app": "debug"}}})
    assert controller_of(world.get("Pod", "mine")) is None
    assert len(names(world)) == 4


def test_a_pod_that_is_over_is_replaced():
    world = World()
    world.put(replica_set(1))
    (first,) = world.list("Pod")
    world.set_ready(first, False, phase="Failed")
    assert len(names(world)) == 2
    assert world.get("ReplicaSet", "web")["status"]["replicas"] == 1


def test_the_status_counts():
    world = World()
    world.put(replica_set(3, minReadySeconds=5))
    world.run_pods()
    world.set_ready(world.list("Pod")[0], False)
    status = world.get("ReplicaSet", "web")["status"]
    assert (status["replicas"], status["readyReplicas"], status.get("availableReplicas")) == (3, 2, None)
    world.wait(5)
    status = world.get("ReplicaSet", "web")["status"]
    assert (status["availableReplicas"], status["observedGeneration"]) == (2, 1)


def test_a_set_that_cannot_make_its_pods_tries_again_later():
    world = World()
    world.forbidden = {"Pod"}
    world.put(replica_set(1))
    (problem,) = world.control.problems.values()
    assert problem.startswith("replicaset-controller could not write Pod shop/web-")
    assert problem.endswith("no more room")
    assert names(world) == set()
    world.forbidden = set()
    world.wait(60)
    assert len(names(world)) == 1
    assert world.control.problems == {}


def ranked(**given):
    """A pod for the ranking."""
    ready, phase, node = given.get("ready", True), given.get("phase", "Running"), given.get("node", "node-1")
    return {
        "metadata": {
            "name": given["name"],
            "creationTimestamp": stamp(START.replace(hour=given.get("born", 1))),
            "annotations": {"controller.kubernetes.io/pod-deletion-cost": str(given.get("cost", 0))},
        },
        "spec": {"nodeName": node} if node else {},
        "status": {
            "phase": phase,
            "containerStatuses": [{"restartCount": given.get("restarts", 0)}],
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True" if ready else "False",
                    "lastTransitionTime": stamp(START.replace(hour=given.get("since", 2))),
                }
            ],
        },
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"node": ""}, {}),
        ({"phase": "Pending"}, {"phase": "Unknown"}),
        ({"phase": "Unknown"}, {}),
        ({"ready": False}, {}),
        ({"cost": -1}, {}),
        ({}, {"cost": 10}),
        ({"since": 22}, {}),
        ({"restarts": 3}, {}),
        ({"born": 22}, {}),
        # What comes first decides.
        ({"node": "", "cost": 100}, {"cost": -100}),
        ({"ready": False, "born": 0}, {"born": 22}),
        ({"cost": -1, "restarts": 0}, {"restarts": 9}),
    ],
)
def test_who_goes_first(first, second):
    one, other = ranked(name="b", **first), ranked(name="a", **second)
    now = START.replace(hour=23)
    assert pods_to_delete([one, other], [], 1, now) == [one]
    assert pods_to_delete([other, one], [], 1, now) == [one]


def test_who_shares_a_node_with_siblings_goes_first():
    alone, one, other = (ranked(name=name, node=node) for name, node in (("a", "n1"), ("b", "n2"), ("c", "n2")))
    assert pods_to_delete([alone, one], [alone, one, other], 1, START) == [one]


def test_scaling_down_takes_the_unready_one():
    world = World(nodes=3)
    world.put(replica_set(3))
    world.run_pods()
    bad = world.list("Pod")[1]
    world.set_ready(bad, False)
    world.patch("ReplicaSet", "web", replicas=2)
    assert [is_terminating(each) for each in world.list("Pod")] == [False, True, False]
    assert ("SuccessfulDelete", f"Deleted pod: {bad['metadata']['name']}") in world.events()
