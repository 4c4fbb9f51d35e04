"""What belongs to nobody any more."""

from narthex.lab.controllers.objects import is_terminating

from .world import World, deployment, service


def running():
    world = World(nodes=2)
    world.put(service())
    world.put(deployment(2))
    world.converge()
    return world


def delete(world, how):
    """kubectl delete deployment web --cascade=HOW"""
    world.registry.delete("Deployment", "shop", "web", propagation=how)
    world.settle()


def test_a_deployment_takes_everything_with_it():
    world = running()
    world.delete("Deployment", "web")
    assert world.list("ReplicaSet") == []
    assert all(is_terminating(pod) for pod in world.list("Pod")), "they have their grace"
    world.run_pods()
    assert world.list("Pod") == []


def test_a_service_takes_its_slices_and_endpoints_with_it():
    world = running()
    assert len(world.list("EndpointSlice")) == len(world.list("Endpoints")) == 1
    world.delete("Service", "web")
    assert world.list("EndpointSlice") == world.list("Endpoints") == []


def test_orphans_stay():
    world = running()
    delete(world, "Orphan")
    assert world.get("Deployment", "web") is None
    (replica_set,) = world.list("ReplicaSet")
    assert "ownerReferences" not in replica_set["metadata"]
    assert len(world.list("Pod")) == 2
    world.put(deployment(3))
    world.converge()
    assert [each["metadata"]["name"] for each in world.list("ReplicaSet")] == [replica_set["metadata"]["name"]]
    assert len(world.list("Pod")) == 3


def test_in_the_foreground_an_owner_waits_for_its_pods():
    world = running()
    delete(world, "Foreground")
    assert is_terminating(world.get("Deployment", "web"))
    assert is_terminating(world.list("ReplicaSet")[0])
    assert [is_terminating(pod) for pod in world.list("Pod")] == [True, True]
    world.run_pods()
    assert (world.list("Pod"), world.list("ReplicaSet"), world.get("Deployment", "web")) == ([], [], None)


def test_one_of_two_owners_is_enough():
    world = running()
    owners = [
        {"apiVersion": "v1", "kind": "Service", "name": "web", "uid": world.get("Service", "web")["metadata"]["uid"]},
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "no-such-uid"},
    ]
    world.put(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "kept", "namespace": "shop", "ownerReferences": owners},
        }
    )
    assert world.get("ConfigMap", "kept")["metadata"]["ownerReferences"] == owners[:1]
    world.delete("Service", "web")
    assert world.get("ConfigMap", "kept") is None
