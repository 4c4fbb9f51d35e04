"""What sockets leave to the rules because of how a Service port selects endpoints."""

import msgspec
import pytest

from narthex.proxy.plan.ir import Balancing, Scope, Sender
from narthex.proxy.plan.sockets import LeftToRules, SocketForward, socket_decision
from narthex.testing.build import endpoint, endpoint_slice, plan, service


@pytest.mark.parametrize(
    "balancing, expected",
    [
        (Balancing.RANDOM, SocketForward(Scope.CLUSTER)),
        (Balancing.LEAST_CONNECTIONS, SocketForward(Scope.CLUSTER)),
        (Balancing.MAGLEV, LeftToRules.HASHING),
    ],
)
def test_consistent_hashing_is_left_to_the_rules(balancing, expected):
    made = plan(service("shop/web", "10.110.0.5"), endpoint_slice("shop/web", endpoint("10.64.1.10")))
    (held,) = made.services.values()
    held = msgspec.structs.replace(held, balancing=balancing)
    assert socket_decision(made, held, held.frontends[0], Sender.POD) == expected
