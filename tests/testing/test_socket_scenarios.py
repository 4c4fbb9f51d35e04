"""Every scenario with socket load balancing: what the plan says, what files demand, and what the programs do."""

from collections import Counter

import pytest
from tests.scenario_files import SCENARIOS
from tests.socket_scenarios import plans_of, socket_flows, stranger_on_the_node

from narthex.model import Disposition, IPFamily, Protocol, family_of
from narthex.proxy.backends.sockets.rows import SocketRows
from narthex.proxy.backends.sockets.walk import SimulatedSocket, SimulatedSockets, SocketAnswer
from narthex.proxy.plan.ir import Reject, Sender
from narthex.proxy.plan.sockets import LeftToRules, SocketDeviation, SocketForward

STRANGER = stranger_on_the_node(next(each for each in SCENARIOS if each.name == "backends-that-are-no-pods"))
CASES = [each for each in (*SCENARIOS, STRANGER) if each.level == "must" and socket_flows(each)]


@pytest.mark.parametrize("scenario", CASES, ids=lambda scenario: scenario.name)
def test_programs_do_what_the_scenario_says(scenario):
    sockets = SimulatedSockets()
    for family, plan in plans_of(scenario).items():
        sockets.apply(family, SocketRows(family).advance(plan))
    for each in socket_flows(scenario):
        flow = each.flow
        sock = SimulatedSocket(protocol=flow.protocol, in_node=each.sender is Sender.NODE, source=flow.source)
        answers = {sockets.connect(sock, flow.destination, flow.port, draw) for draw in range(64)}
        if isinstance(each.decision, Reject):
            assert answers == {SocketAnswer(flow.destination, flow.port, refused=True)}
        elif isinstance(each.decision, SocketForward) and not each.decision.unbound_only:
            assert {(Disposition.DELIVERED, (a.address, a.port), False) for a in answers} == flow.expect
        else:
            assert answers == {SocketAnswer(flow.destination, flow.port)}


def test_the_differences_from_scenarios_are_exactly_the_declared_ones():
    found = [deviation for scenario in CASES for each in socket_flows(scenario) for deviation in each.deviations]

    assert set(found) == set(SocketDeviation)


def test_scenarios_meet_every_decision_and_every_reason():
    met = Counter()
    for scenario in CASES:
        for each in socket_flows(scenario):
            met[each.decision if isinstance(each.decision, LeftToRules) else type(each.decision)] += 1
            met[each.flow.protocol, family_of(each.flow.destination)] += 1

    assert {*LeftToRules, SocketForward, Reject} <= met.keys()
    assert all(met[protocol, family] for protocol in (Protocol.TCP, Protocol.UDP) for family in IPFamily)
