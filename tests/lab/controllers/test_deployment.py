"""What a Deployment does with its ReplicaSets, in upstream's words."""

import pytest

from narthex.lab.controllers.deployment.progress import NO_DEADLINE
from narthex.lab.controllers.deployment.rolling import ReplicaSetSize, RolloutLimits, scale_proportionally

from .world import World, deployment, template


def sizes(world):
    """Replicas by revision."""
    return {
        each["metadata"]["annotations"]["deployment.kubernetes.io/revision"]: each["spec"]["replicas"]
        for each in world.list("ReplicaSet")
    }


def said(world, kind="Progressing", name="web"):
    for each in world.get("Deployment", name)["status"].get("conditions", ()):
        if each["type"] == kind:
            return each["status"], each["reason"], each["message"]
    return None


def rolled_out(replicas=3, nodes=3, **spec):
    world = World(nodes=nodes)
    world.put(deployment(replicas, **spec))
    world.converge()
    return world


def test_a_rollout_from_nothing():
    world = World()
    world.put(deployment(3))
    (only,) = world.list("ReplicaSet")
    assert only["metadata"]["name"] == f"web-{only['metadata']['labels']['pod-template-hash']}"
    assert only["spec"]["selector"]["matchLabels"]["pod-template-hash"] in only["metadata"]["name"]
    assert said(world) == ("True", "ReplicaSetUpdated", f'ReplicaSet "{only["metadata"]["name"]}" is progressing.')
    assert said(world, "Available") == (
        "False",
        "MinimumReplicasUnavailable",
        "Deployment does not have minimum availability.",
    )
    world.converge()
    status = world.get("Deployment", "web")["status"]
    counted = {name: status.get(name, 0) for name in status if name != "conditions"}
    assert counted == {
        "observedGeneration": 1,
        "replicas": 3,
        "updatedReplicas": 3,
        "readyReplicas": 3,
        "availableReplicas": 3,
    }
    assert said(world)[:2] == ("True", "NewReplicaSetAvailable")
    assert said(world)[2] == f'ReplicaSet "{only["metadata"]["name"]}" has successfully progressed.'
    assert said(world, "Available")[:2] == ("True", "MinimumReplicasAvailable")
    assert ("ScalingReplicaSet", f"Scaled up replica set {only['metadata']['name']} from 0 to 3") in world.events()


def test_a_new_template_gets_a_revision_of_its_own():
    world = rolled_out()
    world.patch("Deployment", "web", template=template({"app": "web"}, "echo:2"))
    world.converge()
    assert sizes(world) == {"1": 0, "2": 3}
    assert world.get("Deployment", "web")["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "2"
    assert {pod["spec"]["containers"][0]["image"] for pod in world.list("Pod")} == {"echo:2"}


def test_the_old_template_again_is_a_new_revision_of_the_old_replica_set():
    world = rolled_out()
    (first,) = world.list("ReplicaSet")
    for image in ("echo:2", "echo:1"):
        world.patch("Deployment", "web", template=template({"app": "web"}, image))
        world.converge()
    assert sizes(world) == {"2": 0, "3": 3}
    back = world.get("ReplicaSet", first["metadata"]["name"])
    assert back["metadata"]["annotations"]["deployment.kubernetes.io/revision-history"] == "1"


@pytest.mark.parametrize(
    ("surge", "unavailable", "old", "new"),
    [
        (1, 0, 4, 1),
        (0, 1, 3, 1),
        ("25%", "25%", 3, 2),
        ("50%", 0, 4, 2),
        (0, "10%", 3, 1),
        ("30%", "30%", 3, 3),
        ("100%", "0%", 4, 4),
        (0, "100%", 0, 4),
    ],
)
def test_how_far_a_rolling_update_goes_before_a_new_pod_is_ready(surge, unavailable, old, new):
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}
    world = rolled_out(4, strategy=rolling)
    world.patch("Deployment", "web", template=template({"app": "web"}, "echo:2"))
    assert world.refused == []
    assert sizes(world) == {"1": old, "2": new}


def test_recreate_ends_all_before_it_begins():
    world = rolled_out(3, strategy={"type": "Recreate"})
    world.patch("Deployment", "web", template=template({"app": "web"}, "echo:2"))
    assert sizes(world) == {"1": 0}
    assert len(world.list("Pod")) == 3, "they still run, for the seconds of their grace"
    world.run_pods()
    assert sizes(world) == {"1": 0, "2": 3}


def test_pods_count_as_available_after_min_ready_seconds():
    world = World()
    world.put(deployment(2, minReadySeconds=10))
    world.run_pods()
    world.wait(9)
    assert world.get("Deployment", "web")["status"].get("availableReplicas", 0) == 0
    assert world.get("Deployment", "web")["status"]["readyReplicas"] == 2
    world.wait(1)
    assert world.get("Deployment", "web")["status"]["availableReplicas"] == 2


def test_a_rollout_that_hangs_is_told_after_its_deadline():
    world = rolled_out(3, progressDeadlineSeconds=20)
    world.patch("Deployment", "web", template=template({"app": "web"}, "broken"))
    world.run_pods(ready=False)
    world.wait(15)
    assert said(world)[1] == "ReplicaSetUpdated"
    world.wait(10)
    assert said(world)[:2] == ("False", "ProgressDeadlineExceeded")
    assert said(world)[2].endswith("has timed out progressing.")
    assert world.get("Deployment", "web")["status"]["availableReplicas"] == 3
    world.patch("Deployment", "web", template=template({"app": "web"}, "echo:1"))
    world.converge()
    assert said(world)[1] == "NewReplicaSetAvailable"


def test_without_a_deadline_there_is_no_condition():
    world = rolled_out(1, progressDeadlineSeconds=NO_DEADLINE)
    assert said(world) is None


def test_history_is_kept_as_long_as_wanted():
    world = rolled_out(1, revisionHistoryLimit=2)
    for number in range(2, 7):
        world.patch("Deployment", "web", template=template({"app": "web"}, f"echo:{number}"))
        world.converge()
    assert sizes(world) == {"4": 0, "5": 0, "6": 1}


def test_a_template_that_says_the_same_otherwise_is_no_new_one():
    """kubectl's rollback writes what Go makes of a template."""
    world = rolled_out(1)
    made = template({"app": "web"})
    made["metadata"]["creationTimestamp"] = None
    made["spec"]["containers"][0]["resources"] = {}
    world.patch("Deployment", "web", template=made)
    world.converge()
    assert sizes(world) == {"1": 1}


def test_paused_it_scales_and_rolls_nothing_out():
    world = rolled_out(3)
    world.patch("Deployment", "web", paused=True)
    assert said(world) == ("Unknown", "DeploymentPaused", "Deployment is paused")
    world.patch("Deployment", "web", template=template({"app": "web"}, "echo:2"), replicas=5)
    world.converge()
    assert sizes(world) == {"1": 5}
    world.patch("Deployment", "web", paused=False)
    world.converge()
    assert sizes(world) == {"1": 0, "2": 5}


def test_scaling_within_a_rollout_is_in_proportion():
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 3, "maxUnavailable": 2}}
    world = rolled_out(10, strategy=rolling)
    world.patch("Deployment", "web", template=template({"app": "web"}, "broken"))
    world.run_pods(ready=False)
    assert sizes(world) == {"1": 8, "2": 5}
    world.patch("Deployment", "web", replicas=20)
    assert sizes(world) == {"1": 14, "2": 9}


@pytest.mark.parametrize(
    ("replicas", "surge", "sizes_before", "expected"),
    [
        (20, 3, [(8, 13), (5, 13)], [14, 9]),
        (5, 3, [(8, 13), (5, 13)], [5, 3]),
        (0, 0, [(8, 13), (5, 13)], [0, 0]),
        (10, 3, [(8, 13), (5, 13)], [8, 5]),
        (15, 3, [(5, 13), (3, 13), (5, 13)], [7, 4, 7]),
        # What rounding leaves goes to the newest of the largest when there are to be more, to the oldest when fewer.
        (5, 0, [(2, 4), (2, 4)], [2, 3]),
        (3, 0, [(2, 4), (2, 4)], [1, 2]),
    ],
)
def test_shares(replicas, surge, sizes_before, expected):
    sets = [ReplicaSetSize(str(index), size, 0, max_pods) for index, (size, max_pods) in enumerate(sizes_before)]
    got = scale_proportionally(sets, RolloutLimits(replicas, surge, 0), 13)
    assert [got[each.name] for each in sets] == expected


def test_scaling_up_and_down():
    world = rolled_out(3)
    world.patch("Deployment", "web", replicas=5)
    world.converge()
    assert sizes(world) == {"1": 5}
    assert world.get("Deployment", "web")["status"]["availableReplicas"] == 5
    world.patch("Deployment", "web", replicas=0)
    world.converge()
    assert (sizes(world), world.list("Pod")) == ({"1": 0}, [])


def test_a_selector_that_demands_nothing_takes_nothing():
    world = World()
    world.checks = False
    world.put(deployment(2, selector={}))
    assert world.list("ReplicaSet") == []


def test_a_replica_set_of_its_labels_is_adopted_and_one_that_lost_them_let_go():
    world = rolled_out(2)
    (only,) = world.list("ReplicaSet")
    name = only["metadata"]["name"]
    world.registry.update("ReplicaSet", {**only, "metadata": {**only["metadata"], "ownerReferences": []}})
    world.settle()
    assert world.get("ReplicaSet", name)["metadata"]["ownerReferences"][0]["name"] == "web"
    held = world.get("ReplicaSet", name)
    world.registry.update("ReplicaSet", {**held, "metadata": {**held["metadata"], "labels": {"app": "other"}}})
    world.settle()
    assert "ownerReferences" not in world.get("ReplicaSet", name)["metadata"]


def test_a_name_that_is_anothers_gets_another_hash():
    world = rolled_out(1)
    (only,) = world.list("ReplicaSet")
    taken = {
        **only,
        "metadata": {"name": only["metadata"]["name"], "namespace": "other", "labels": {"app": "other"}},
        "spec": {**only["spec"], "selector": {"matchLabels": {"app": "other"}}, "replicas": 0},
    }
    world.checks = False
    world.registry.create("ReplicaSet", taken)
    world.checks = True
    world.put({**deployment(1), "metadata": {"name": "web", "namespace": "other"}})
    names = {each["metadata"]["name"] for each in world.list("ReplicaSet", "other")}
    assert len(names) == 2
    assert world.get("Deployment", "web", "other")["status"]["collisionCount"] == 1
