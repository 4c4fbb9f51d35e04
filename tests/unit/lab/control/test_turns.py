"""All controllers together: from what a user writes to what a proxy reads."""

from .world import World, deployment, service


def test_a_deployment_and_a_service_become_endpoints():
    world = World(nodes=3)
    world.put(service())
    world.put(deployment(3))
    world.converge()
    assert world.refused == []
    assert sorted(pod["spec"]["nodeName"] for pod in world.list("Pod")) == ["node-1", "node-2", "node-3"]
    (slice_,) = world.list("EndpointSlice")
    assert len(slice_["endpoints"]) == 3
    assert all(
        each["conditions"] == {"ready": True, "serving": True, "terminating": False} for each in slice_["endpoints"]
    )


def test_a_cluster_at_rest_stays_at_rest():
    world = World()
    world.put(service())
    world.put(deployment(5))
    world.converge()
    assert world.control.turn(world.registry, world.now) == []
    assert world.control.next_due(world.registry, world.now) is None


def test_the_same_history_gives_the_same_names():
    def names():
        world = World()
        world.put(service())
        world.put(deployment(5))
        world.converge()
        return [
            each["metadata"]["name"] for kind in ("Pod", "ReplicaSet", "EndpointSlice") for each in world.list(kind)
        ]

    assert names() == names()
