"""What holds of a Deployment through any history of templates, sizes and pods' readiness."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.controllers.world import World, deployment, template

from narthex.lab.controllers.deployment.rolling import rollout_limits
from narthex.lab.controllers.objects import is_pod_active, is_pod_ready, is_terminating

PARTS = st.one_of(st.integers(0, 4), st.sampled_from(["0%", "10%", "25%", "34%", "50%", "100%"]))
STEPS = st.one_of(
    st.tuples(st.just("image"), st.integers(1, 3)),
    st.tuples(st.just("scale"), st.integers(0, 9)),
    st.tuples(st.just("run"), st.booleans()),
    st.tuples(st.just("flip"), st.integers(0, 30)),
    st.tuples(st.just("kill"), st.integers(0, 30)),
    st.tuples(st.just("pause"), st.booleans()),
    st.tuples(st.just("wait"), st.integers(1, 20)),
)


def some(parts):
    """The API refuses two that are nothing."""
    return not all(part in (0, "0%") for part in parts)


def active(world):
    return [pod for pod in world.list("Pod") if is_pod_active(pod)]


def available(world):
    return {pod["metadata"]["name"] for pod in active(world) if is_pod_ready(pod)}


class Watched:
    """A world in which every turn is looked at."""

    def __init__(self, world):
        self.world = world
        self.may_shrink = False
        turn, self.had = world.control.reconcile_due, set()

        def watched(view, now):
            self.check()
            return turn(view, now)

        world.control.reconcile_due = watched

    def check(self):
        """Between two turns: how many there are, and that none was taken that was needed."""
        held = self.world.get("Deployment", "web")
        if held is None:
            return
        limits = rollout_limits(held)
        have = available(self.world)
        living = {pod["metadata"]["name"]: pod for pod in self.world.list("Pod")}
        taken = {name for name in self.had - have if name in living and is_terminating(living[name])}
        if taken and not self.may_shrink:
            assert len(have) >= limits.min_available, (
                f"{taken} went, {len(have)} are left of at least {limits.min_available}"
            )
        self.had = have


@settings(max_examples=40, deadline=None)
@given(replicas=st.integers(0, 9), parts=st.tuples(PARTS, PARTS).filter(some), steps=st.lists(STEPS, max_size=14))
def test_a_rolling_update_stays_between_its_fences_and_ends(replicas, parts, steps):
    surge, unavailable = parts
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}
    world = World(nodes=2)
    world.put(deployment(replicas, strategy=rolling))
    world.converge()
    watched = Watched(world)
    for step, value in steps:
        watched.may_shrink = step in ("scale", "kill")
        if step == "image":
            world.patch("Deployment", "web", template=template({"app": "web"}, f"echo:{value}"))
        elif step == "scale":
            world.patch("Deployment", "web", replicas=value)
        elif step == "pause":
            world.patch("Deployment", "web", paused=value)
        elif step == "run":
            world.run_pods(ready=value)
        elif step == "wait":
            world.wait(value)
        elif pods := [pod for pod in active(world) if (pod.get("status") or {}).get("podIP")]:
            pod = pods[value % len(pods)]
            if step == "flip":
                world.set_ready(pod, not is_pod_ready(pod))
            else:
                world.delete("Pod", pod["metadata"]["name"])
        limits = rollout_limits(world.get("Deployment", "web"))
        assert len(active(world)) <= limits.max_pods
        assert world.control.reconcile_due(world.registry, world.now) == []
    watched.may_shrink = True
    world.patch("Deployment", "web", paused=False)
    for pod in active(world):
        world.set_ready(pod)
    world.converge()
    final = world.get("Deployment", "web")
    image = final["spec"]["template"]["spec"]["containers"][0]["image"]
    assert [pod["spec"]["containers"][0]["image"] for pod in world.list("Pod")] == [image] * final["spec"]["replicas"]
    assert final["status"].get("availableReplicas", 0) == final["spec"]["replicas"]
    assert final["status"].get("updatedReplicas", 0) == final["spec"]["replicas"]
    assert world.refused == []


@settings(max_examples=30, deadline=None)
@given(replicas=st.integers(0, 5), images=st.lists(st.integers(1, 3), max_size=6), runs=st.booleans())
def test_recreate_never_runs_two_templates_at_once(replicas, images, runs):
    world = World(nodes=2)
    world.put(deployment(replicas, strategy={"type": "Recreate"}))
    for image in images:
        world.patch("Deployment", "web", template=template({"app": "web"}, f"echo:{image}"))
        for _ in range(2 if runs else 1):
            assert len({pod["spec"]["containers"][0]["image"] for pod in world.list("Pod")}) <= 1
            world.run_pods()
    world.converge()
    assert len(active(world)) == replicas
