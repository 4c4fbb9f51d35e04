"""What holds of all controllers together, whatever people and nodes do."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.controllers.world import World, deployment, service, template

from narthex.lab.api.errors import StatusError
from narthex.lab.controllers.controller_manager import lab_controllers
from narthex.lab.controllers.objects import controller_of, is_terminating

NAMES = st.sampled_from(["a", "b"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("deploy"), NAMES, st.integers(0, 4)),
        st.tuples(st.just("image"), NAMES, st.integers(1, 3)),
        st.tuples(st.just("serve"), NAMES, st.sampled_from(["ClusterIP", "NodePort", "ExternalName"])),
        st.tuples(st.just("run"), NAMES, st.booleans()),
        st.tuples(st.just("flip"), NAMES, st.integers(0, 9)),
        st.tuples(st.just("beat"), NAMES, st.integers(1, 3)),
        st.tuples(st.just("wait"), NAMES, st.integers(1, 400)),
        st.tuples(
            st.just("delete"),
            st.sampled_from(["Deployment", "ReplicaSet", "Pod", "Service", "EndpointSlice", "Endpoints", "Node"]),
            st.integers(0, 9),
        ),
        st.tuples(st.just("cascade"), st.sampled_from(["Background", "Foreground", "Orphan"]), st.integers(0, 3)),
    ),
    max_size=16,
)


def go(world, step, what, value):
    """One thing that somebody does."""
    objects = world.registry.list(what) if step == "delete" else world.registry.list("Pod")
    chosen = objects[value % len(objects)] if objects and isinstance(value, int) else None
    if step == "deploy":
        world.put(deployment(value, what))
    elif step == "image" and world.get("Deployment", what) is not None:
        world.patch("Deployment", what, template=template({"app": what}, f"echo:{value}"))
    elif step == "serve":
        world.put(service(what, selector={"app": what}, type=value))
    elif step == "run":
        world.run_pods(ready=value)
    elif step == "flip" and chosen is not None and (chosen.get("status") or {}).get("podIP"):
        world.set_ready(chosen, chosen["status"]["conditions"][-1]["status"] != "True")
    elif step == "beat":
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": f"node-{value}", "namespace": "kube-node-lease"},
            "spec": {"renewTime": world.now.isoformat()},
        }
        world.put(lease)
    elif step == "wait":
        world.wait(value)
    elif step == "delete" and chosen is not None:
        world.delete(what, chosen["metadata"]["name"], chosen["metadata"].get("namespace", ""))
    elif step == "cascade":
        found = [*world.registry.list("Deployment"), *world.registry.list("ReplicaSet")]
        if found:
            one = found[value % len(found)]
            world.registry.delete(one["kind"], "shop", one["metadata"]["name"], propagation=what)
            world.settle()


def all_of(world):
    return [obj for kind in world.registry.kinds for obj in world.registry.list(kind)]


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_the_same_history_ends_the_same_at_rest_and_without_orphans(steps):
    worlds = [World(nodes=3), World(nodes=3)]
    for step in steps:
        for world in worlds:
            try:
                go(world, *step)
            except StatusError as fault:
                assert fault.code == 422
        assert worlds[0].registry.version == worlds[1].registry.version
    assert all_of(worlds[0]) == all_of(worlds[1])
    world = worlds[0]
    assert world.control.problems == {}
    uids = {obj["metadata"]["uid"] for obj in all_of(world)}
    for obj in all_of(world):
        owner = controller_of(obj)
        assert owner is None or owner["uid"] in uids or is_terminating(obj), "what belongs to nobody is on its way out"
    # Controllers that begin anew find nothing that those before would not have done at this moment.
    world.control = lab_controllers()
    before = world.registry.version
    world.settle()
    assert world.registry.version == before
