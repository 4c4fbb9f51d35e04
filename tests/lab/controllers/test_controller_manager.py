"""All controllers together: from what a user writes to what a proxy reads."""

from narthex.lab.controllers.controller_manager import lab_controllers

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
    assert world.control.reconcile_due(world.registry, world.now) == []
    assert world.control.next_due(world.registry, world.now) > 3000, "until the Events are too old"


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


def test_events_are_forgotten_after_an_hour():
    world = World()
    world.put(deployment(1))
    world.converge()
    world.wait(1800)
    world.patch("Deployment", "web", replicas=2)
    assert len(world.events("SuccessfulCreate")) == 2
    world.wait(1805)
    assert len(world.events("SuccessfulCreate")) == 1
    world.wait(3600)
    assert world.events() == []


def test_an_object_that_nobody_understands_stops_nobody_else():
    world = World()
    broken = deployment(2, "broken")
    broken["spec"]["template"] = "not a template"
    world.checks = False
    world.put(broken)
    world.put(deployment(2))
    world.converge()
    assert world.get("Deployment", "web")["status"]["availableReplicas"] == 2
    (problem,) = world.control.problems.values()
    assert problem.startswith("deployment-controller cannot read shop/broken: ")
    world.patch("Deployment", "broken", template=deployment(2, "broken")["spec"]["template"])
    world.converge()
    assert world.get("Deployment", "broken")["status"]["availableReplicas"] == 2
    assert world.control.problems == {}


def test_a_new_control_takes_a_running_cluster_as_it_is():
    world = World()
    world.put(service())
    world.put(deployment(3))
    world.converge()
    before = world.registry.version
    world.control = lab_controllers()
    world.converge()
    assert world.registry.version == before


def test_the_past_may_be_forgotten():
    world = World()
    world.put(deployment(3))
    world.registry.delete("Deployment", "shop", "web")
    world.registry.store.compact()
    world.converge()
    assert world.list("ReplicaSet") == world.list("Pod") == []


def test_a_hundred_pods_need_few_turns():
    world = World(nodes=10)
    turns = []
    turn = world.control.reconcile_due
    world.control.reconcile_due = lambda view, now: turns.append(len(writes := turn(view, now))) or writes
    world.put(service())
    world.put(deployment(100))
    world.converge()
    assert len(world.list("Pod")) == 100
    # Pods, their Events, their nodes, being told of these: no write is done twice.
    assert sum(turns) < 100 * 7
    assert len(turns) < 40


def test_a_namespace_ends_with_all_that_is_in_it():
    world = World()
    world.put(service())
    world.put(deployment(300))
    world.converge()
    assert len(world.list("Event")) > 600
    world.registry.delete("Namespace", "", "shop")
    world.settle()
    assert world.get("Namespace", "shop", "")["status"]["phase"] == "Terminating", "its pods have their grace"
    world.run_pods()
    assert world.get("Namespace", "shop", "") is None
    assert not [each for kind in world.registry.kinds for each in world.list(kind)]
    assert world.refused == []
