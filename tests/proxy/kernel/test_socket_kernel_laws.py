"""Laws of socket load balancing with a real kernel: random clusters and changes, real maps, programs, and sockets."""

import errno
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cgroup_client import cgroup_client
from tests.proxy.kernel.test_sockets import serve_places, socket_world
from tests.proxy.laws.test_socket_laws import meant, planned

from narthex.linux.namespaces import in_namespace
from narthex.model import IPFamily, Protocol
from narthex.proxy.backends.sockets.rows import SocketRows
from narthex.proxy.backends.sockets.walk import SimulatedSockets
from narthex.proxy.plan.ir import Sender
from narthex.testing import strategies as some

pytestmark = pytest.mark.kernel

KINDS = {Protocol.TCP: ("tcp",), Protocol.UDP: ("udp", "sendto")}
TURNS = st.lists(some.changes, min_size=1, max_size=3)


def expected(plan, service, front, sender):
    """Return the answers that a client may get: endpoints, or one error."""
    answers = meant(plan, service, front, sender, bound=False)
    if any(answer.refused for answer in answers):
        return {errno.ECONNREFUSED}
    if {(answer.address, answer.port) for answer in answers} == {(front.address, front.port)}:
        return {errno.ENETUNREACH}
    return {answer.address for answer in answers}


def asked(client, kind, front, **more):
    said = client.ask(kind, front.address, front.port, **more)
    data = said.get("data", said.get("errno"))
    return data[0] if isinstance(data, list) else data


@pytest.mark.parametrize("sender", [Sender.POD, Sender.NODE], ids=["pod", "node"])
@pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)
def test_sockets_do_what_the_plan_says(family, sender, tmp_path):
    with ExitStack() as stack:
        world = stack.enter_context(socket_world(tmp_path))
        stack.enter_context(serve_places(world.pod, some.PODS[family], (8080, 9090)))
        client = stack.enter_context(cgroup_client(world.cgroup, world.pod))
        # The namespace of the client is the node's, or another one.
        home = world.pod if sender is Sender.NODE else world.node
        accelerator = world.accelerator(home)

        @settings(max_examples=8, suppress_health_check=list(HealthCheck))
        @given(some.configs, TURNS)
        def law(config, turns):
            simulated, rows = SimulatedSockets(), SocketRows(family)
            for plan in planned(config, family, turns):
                with in_namespace(home):
                    accelerator.follow(plan)
                assert accelerator.reason == ""
                simulated.apply(family, rows.advance(plan))
                assert_same_maps(accelerator, simulated, family)
                for service in plan.services.values():
                    for front in service.frontends:
                        # Without rules, an address of the namespace itself answers for what is left to them.
                        if front.address is None or front.address in some.PODS[family]:
                            continue
                        answers = expected(plan, service, front, sender)
                        for kind in KINDS.get(front.protocol, ()):
                            assert asked(client, kind, front) in answers, (front, kind)
                            if family is IPFamily.IPV4 and answers != {errno.ENETUNREACH}:
                                assert asked(client, kind, front, mapped=True) in answers, (front, kind)

        law()


def assert_same_maps(accelerator, simulated, family):
    """The kernel has the frontends of a plan that is written from nothing; numbers of Service ports may differ."""
    held, fresh = accelerator._target.read(family), simulated.rows(family)
    assert {key: value[:4] for key, value in held.frontends.items()} == {
        key: value[:4] for key, value in fresh.frontends.items()
    }
    assert sorted(held.counts.values()) == sorted(fresh.counts.values())
