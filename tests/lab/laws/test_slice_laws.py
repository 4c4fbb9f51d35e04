"""What holds of a Service's slices through any history of its pods."""

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.controllers.world import World, pod, service

from narthex.lab.controllers.endpointslice.pod_endpoints import PodEndpoints
from narthex.lab.controllers.endpointslice.reconciler import MAX_ENDPOINTS, pack_endpoints

NUMBERS = count()
PORTS = [({"name": "http", "protocol": "TCP", "port": number},) for number in (80, 81)]


def endpoint(number, ready):
    return {
        "addresses": [f"10.0.{number // 250}.{number % 250}"],
        "conditions": {"ready": ready},
        "targetRef": {"kind": "Pod", "name": f"p{number}"},
    }


STATES = st.dictionaries(st.integers(0, 420), st.tuples(st.integers(0, 1), st.booleans()), max_size=330)


def wanted(state):
    groups = {}
    for number, (port, ready) in sorted(state.items()):
        groups.setdefault(port, (PORTS[port], []))[1].append(endpoint(number, ready))
    return list(groups.values())


def written(packed, existing):
    """The slices as they are then, and which were written."""
    names = {id(each): each["name"] for each in existing}
    slices, writes = [], len(packed.empty)
    for old, ports, endpoints in packed.filled:
        new = {"name": names.get(id(old)) or f"new-{next(NUMBERS)}", "ports": list(ports), "endpoints": list(endpoints)}
        if old is None or new != old:
            writes += 1
        slices.append(new)
    return slices, writes


def held(slices):
    return sorted((str(each["ports"]), str(endpoint_)) for each in slices for endpoint_ in each["endpoints"])


@settings(max_examples=60)
@given(st.lists(STATES, min_size=1, max_size=4))
def test_slices_hold_exactly_the_endpoints_and_little_is_written(states):
    slices, before = [], {}
    for state in states:
        groups = wanted(state)
        new, writes = written(pack_endpoints(groups, slices), slices)
        assert held(new) == sorted((str(list(ports)), str(each)) for ports, some in groups for each in some)
        assert all(len(each["endpoints"]) <= MAX_ENDPOINTS for each in new)
        assert all(each["endpoints"] for each in new) or len(new) == 1
        assert len({each["name"] for each in new}) == len(new)
        changed = sum(before.get(number) != state.get(number) for number in before.keys() | state.keys())
        # Each endpoint that changes touches its slice, or one in which it finds room; the placeholder comes and goes once.
        assert writes <= 2 * changed + 1
        again, more = written(pack_endpoints(groups, new), new)
        assert (again, more) == (new, 0)
        slices, before = new, state


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 6)),
            st.tuples(st.just("ready"), st.integers(0, 6)),
            st.tuples(st.just("leave"), st.integers(0, 6)),
            st.tuples(st.just("gone"), st.integers(0, 6)),
            st.tuples(st.just("select"), st.sampled_from("ab")),
        ),
        max_size=20,
    ),
    st.sampled_from(["SingleStack", "PreferDualStack"]),
)
def test_after_any_history_the_slices_are_as_if_made_anew(steps, policy):
    world = World(nodes=2)
    world.put(service(selector={"app": "a"}, ipFamilyPolicy=policy))
    for step, value in steps:
        held_ = world.get("Pod", f"p{value}")
        if step == "put" and held_ is None:
            world.put(pod(f"p{value}", {"app": "ab"[value % 2]}))
        elif step == "select":
            world.patch("Service", "web", selector={"app": value})
        elif held_ is not None and step == "ready":
            world.set_ready(held_, held_["status"]["conditions"][-1]["status"] != "True")
        elif held_ is not None:
            world.delete("Pod", f"p{value}", grace=0 if step == "gone" else None)
        web = world.get("Service", "web")
        pods = [
            each for each in world.list("Pod") if each["metadata"]["labels"]["app"] == web["spec"]["selector"]["app"]
        ]
        for family in web["spec"]["ipFamilies"]:
            expected = [
                (list(ports), each)
                for ports, some in PodEndpoints().of(web, pods, family, world.control._state)
                for each in some
            ]
            got = [
                (each["ports"], endpoint_)
                for each in world.list("EndpointSlice")
                if each["addressType"] == family
                for endpoint_ in each["endpoints"]
            ]
            assert sorted(map(str, got)) == sorted(map(str, expected))
        assert world.control.reconcile_due(world.registry, world.now) == []
