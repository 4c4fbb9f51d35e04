"""A pod is never where it does not fit, and never waits while it fits somewhere."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.controllers.world import World, node, pod

from narthex.lab.controllers import scheduler as fitness
from narthex.lab.controllers.objects import is_terminating

TAINTS = st.lists(
    st.fixed_dictionaries(
        {"key": st.sampled_from("xy"), "effect": st.sampled_from(["NoSchedule", "PreferNoSchedule"])}
    ),
    max_size=2,
)
NODES = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), TAINTS, st.booleans(), st.integers(0, 4)), min_size=1, max_size=5
)
PODS = st.lists(
    st.tuples(
        st.sampled_from([None, "a", "b"]), st.lists(st.sampled_from("xy"), max_size=2), st.sampled_from([0, 0, 80, 81])
    ),
    max_size=14,
)


@settings(max_examples=60)
@given(NODES, PODS)
def test_pods_are_where_they_fit_or_fit_nowhere(nodes, pods):
    world = World(nodes=0)
    for index, (disk, taints, cordoned, room) in enumerate(nodes):
        made = node(f"n{index}", taints=taints, unschedulable=cordoned)
        made["metadata"]["labels"]["disk"] = disk
        made["status"]["allocatable"] = {"pods": str(room)}
        world.registry.create("Node", made)
    for index, (disk, tolerated, port) in enumerate(pods):
        made = pod(f"p{index}", tolerations=[{"key": key, "operator": "Exists"} for key in tolerated])
        if disk:
            made["spec"]["nodeSelector"] = {"disk": disk}
        if port:
            made["spec"]["containers"][0]["ports"] = [{"containerPort": port, "hostPort": port}]
        world.registry.create("Pod", made)
    world.settle()
    assert not any(is_terminating(each) for each in world.list("Pod"))
    placed = {each["metadata"]["name"]: [] for each in world.list("Node", "")}
    for each in world.list("Pod"):
        if "nodeName" in each["spec"]:
            placed[each["spec"]["nodeName"]].append(each)
    for each in world.list("Node", ""):
        here = placed[each["metadata"]["name"]]
        for one in here:
            others = [other for other in here if other is not one]
            ports = [port for other in others for port in fitness.host_ports(other)]
            assert fitness.rejection_reason(one, each, len(others), ports) == ""
        ports = [port for other in here for port in fitness.host_ports(other)]
        for waiting in world.list("Pod"):
            if "nodeName" not in waiting["spec"]:
                assert fitness.rejection_reason(waiting, each, len(here), ports) != ""
    assert world.control.reconcile_due(world.registry, world.now) == []


@given(st.integers(1, 6), st.integers(0, 20))
def test_equal_nodes_get_equally_many(nodes, pods):
    world = World(nodes=nodes)
    for index in range(pods):
        world.registry.create("Pod", pod(f"p{index}"))
    world.settle()
    counts = Counter(each["spec"]["nodeName"] for each in world.list("Pod"))
    assert max(counts.values(), default=0) - (min(counts.values()) if len(counts) == nodes else 0) <= 1
