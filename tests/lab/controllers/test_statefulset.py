"""StatefulSets and their pods."""

import pytest

from narthex.lab.controllers.objects import is_terminating

from .world import World, stateful_set


def names(world):
    return sorted(each["metadata"]["name"] for each in world.list("Pod") if not is_terminating(each))


def images(world):
    return {
        each["metadata"]["name"]: each["spec"]["containers"][0]["image"]
        for each in world.list("Pod")
        if not is_terminating(each)
    }


def status(world):
    return world.get("StatefulSet", "db")["status"]


def test_pods_are_created_in_order_and_deleted_in_reverse():
    world = World()
    world.put(stateful_set(3))
    assert names(world) == ["db-0"]
    world.run_pods()
    assert names(world) == ["db-0", "db-1"]
    world.converge()
    assert names(world) == ["db-0", "db-1", "db-2"]
    assert (status(world)["readyReplicas"], status(world)["replicas"], status(world)["availableReplicas"]) == (3, 3, 3)
    world.patch("StatefulSet", "db", replicas=1)
    assert names(world) == ["db-0", "db-1"]
    world.run_pods()
    assert names(world) == ["db-0"]


def test_pods_know_their_names():
    world = World()
    world.put(stateful_set(1))
    (pod,) = world.list("Pod")
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("db-0", "db")
    assert pod["metadata"]["labels"]["statefulset.kubernetes.io/pod-name"] == "db-0"
    assert pod["metadata"]["labels"]["apps.kubernetes.io/pod-index"] == "0"
    assert pod["metadata"]["labels"]["controller-revision-hash"] == status(world)["updateRevision"]


def test_in_parallel_all_come_and_go_at_once():
    world = World()
    world.put(stateful_set(3, podManagementPolicy="Parallel"))
    assert names(world) == ["db-0", "db-1", "db-2"]
    world.converge()
    world.patch("StatefulSet", "db", replicas=0)
    assert names(world) == []


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        (0, ["echo:2"] * 3),
        (1, ["echo:1", "echo:2", "echo:2"]),
        (2, ["echo:1", "echo:1", "echo:2"]),
        (3, ["echo:1"] * 3),
    ],
)
def test_an_update_replaces_pods_from_the_last_to_the_partition(partition, expected):
    world = World()
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"partition": partition}}
    world.put(stateful_set(3, updateStrategy=strategy))
    world.converge()
    first = status(world)["currentRevision"]
    world.put(stateful_set(3, image="echo:2", updateStrategy=strategy))
    world.converge()
    assert [images(world)[f"db-{number}"] for number in range(3)] == expected
    assert status(world).get("updatedReplicas", 0) == expected.count("echo:2")
    assert (status(world)["currentRevision"] == first) == (partition > 0)
    # A pod below the partition comes back as it was.
    world.delete("Pod", "db-0", grace=0)
    world.converge()
    assert images(world)["db-0"] == expected[0]


def test_an_update_waits_for_each_pod():
    world = World()
    world.put(stateful_set(3))
    world.converge()
    world.put(stateful_set(3, image="echo:2"))
    assert names(world) == ["db-0", "db-1"]
    world.run_pods(ready=False)
    world.run_pods(ready=False)
    world.wait(60)
    assert images(world) == {"db-0": "echo:1", "db-1": "echo:1", "db-2": "echo:2"}


def test_on_delete_pods_change_by_hand_only():
    world = World()
    world.put(stateful_set(2, updateStrategy={"type": "OnDelete"}))
    world.converge()
    world.put(stateful_set(2, image="echo:2", updateStrategy={"type": "OnDelete"}))
    world.converge()
    assert set(images(world).values()) == {"echo:1"}
    world.delete("Pod", "db-1", grace=0)
    world.converge()
    assert images(world) == {"db-0": "echo:1", "db-1": "echo:2"}


def test_a_failed_pod_is_replaced_under_its_name():
    world = World()
    world.put(stateful_set(2))
    world.converge()
    before = world.get("Pod", "db-0")["metadata"]["uid"]
    world.set_ready(world.get("Pod", "db-0"), False, phase="Failed")
    world.converge()
    assert names(world) == ["db-0", "db-1"]
    assert world.get("Pod", "db-0")["metadata"]["uid"] != before


def test_ordinals_may_start_elsewhere():
    world = World()
    world.put(stateful_set(2, ordinals={"start": 5}))
    world.converge()
    assert names(world) == ["db-5", "db-6"]


def test_claims_are_empty_directories():
    claim = {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    made = stateful_set(1, volumeClaimTemplates=[claim])
    container = made["spec"]["template"]["spec"]["containers"][0]
    container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    world = World()
    world.put(made)
    assert world.get("Pod", "db-0")["spec"]["volumes"] == [{"name": "data", "emptyDir": {}}]


def test_min_ready_seconds_delay_the_next_pod():
    world = World()
    world.put(stateful_set(2, minReadySeconds=10))
    world.run_pods()
    world.wait(5)
    assert (names(world), status(world)["availableReplicas"]) == (["db-0"], 0)
    world.wait(6)
    assert names(world) == ["db-0", "db-1"]


def test_a_pod_of_another_name_is_not_adopted():
    world = World()
    world.put(stateful_set(1))
    pod = world.get("Pod", "db-0")
    stranger = {**pod, "metadata": {"name": "db-x", "namespace": "shop", "labels": {"app": "db"}}}
    world.registry.create("Pod", stranger)
    world.converge()
    assert not world.get("Pod", "db-x")["metadata"].get("ownerReferences")
