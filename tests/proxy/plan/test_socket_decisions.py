"""What sockets leave to the rules because of how a Service port selects endpoints."""

import msgspec
import pytest

from narthex.model import IPFamily
from narthex.proxy.backends.sockets.rows import SocketRows
from narthex.proxy.backends.sockets.walk import SimulatedSocket, SimulatedSockets, SocketAnswer
from narthex.proxy.plan.balancing import LOAD_BALANCING
from narthex.proxy.plan.ir import Balancing, Scope, Sender
from narthex.proxy.plan.sockets import LeftToRules, SocketForward, socket_decision
from narthex.testing.build import endpoint, endpoint_slice, plan, service


@pytest.mark.parametrize(
    "balancing, expected",
    [
        (Balancing.RANDOM, SocketForward(Scope.CLUSTER)),
        (Balancing.LEAST_CONNECTIONS, SocketForward(Scope.CLUSTER, least_connections=True)),
        (Balancing.MAGLEV, LeftToRules.HASHING),
    ],
)
def test_consistent_hashing_is_left_to_the_rules(balancing, expected):
    made = plan(service("shop/web", "10.110.0.5"), endpoint_slice("shop/web", endpoint("10.64.1.10")))
    (held,) = made.services.values()
    held = msgspec.structs.replace(held, balancing=balancing)
    assert socket_decision(made, held, held.frontends[0], Sender.POD) == expected


def test_ports_that_share_decisions_may_select_endpoints_in_different_ways():
    """The planner gives both Services the same objects as decisions."""
    hashing = ((LOAD_BALANCING, "maglev"),)
    made = plan(
        service("shop/any", "10.110.0.5"),
        endpoint_slice("shop/any", endpoint("10.64.1.10")),
        service("shop/hashed", "10.110.0.6", annotations=hashing),
        endpoint_slice("shop/hashed", endpoint("10.64.1.10")),
    )
    sockets = SimulatedSockets()
    sockets.apply(IPFamily.IPV4, SocketRows(IPFamily.IPV4).advance(made))

    assert sockets.connect(SimulatedSocket(), "10.110.0.5", 80) == SocketAnswer("10.64.1.10", 80)
    assert sockets.connect(SimulatedSocket(), "10.110.0.6", 80) == SocketAnswer("10.110.0.6", 80)
