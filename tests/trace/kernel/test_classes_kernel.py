"""A packet of each class that rules are proved with takes the way of its class through the kernel.

A class is a set of packets. One of them is drawn, each that can be sent as likely as the others, and sent in network namespaces with the
rules loaded. The seed decides on scenarios and packets; `make fuzz` draws new ones, and more. A failure prints it: NARTHEX_SEED draws
the same again.
"""

import os
import random

import msgspec
import pytest
from tests.proxy.kernel.modes import MODES_HERE
from tests.scenario_files import SCENARIOS
from tests.trace.proof.own_rules import draw, ends_of, partitions_of

from narthex.model import Disposition, Host, IPFamily
from narthex.netfilter.sets.diagram import leaves
from narthex.netfilter.sets.space import DADDR, DPORT, HERE, LINK, PORTS, PROTOCOL, SADDR, SPORT
from narthex.netfilter.sets.values import span, values
from narthex.proxy.plan.planner import plan_once
from narthex.testing.findings import print_said
from narthex.testing.kernel import witness as kernel
from narthex.testing.scenario import ScenarioFlow
from narthex.testing.setting import families_of, home_interface, node_config, snapshot

pytestmark = pytest.mark.kernel

SEED = os.environ.get("NARTHEX_SEED", "1")
COUNT = int(os.environ.get("NARTHEX_CLASS_SCENARIOS", "2"))
UNNAMED = 0xFFFF
"""A link that no rule names."""
MOST = 24
"""Classes of one scenario, mode, and family."""
UNICAST = {
    IPFamily.IPV4: (("1.0.0.0-100.63.255.255", "100.128.0.0-126.255.255.255", "128.0.0.0-223.255.255.255"), ()),
    IPFamily.IPV6: (("2000::/3", "fd00::/8"), ("fdff:6e78::/32",)),
}
"""Networks whose addresses can be sources and destinations in the world of namespaces, and exceptions: its own addresses."""


def sendable(space, box, sources):
    """Return the part of a class that the world can send: as a box, or None if there is none."""
    inside, outside = UNICAST[space.family]
    unicast = space.networks(inside) - space.networks(outside)
    from_host = box[LINK] == HERE
    destinations = box[DADDR] & unicast
    senders = sources & (space.node if from_host else unicast - space.node)
    if not from_host:
        destinations = destinations - values(*(each for each in (senders.single,) if each is not None))
    ports = box[DPORT] & span(1, 0xFFFF)
    found = (destinations, box[PROTOCOL] & PORTS, ports, box[SPORT], box[LINK], senders)
    return found if all(found) else None


def home(scenario, plan, space, source, links):
    """Return the link to which a source is routed, so that it gets answers; 0 if the class has other links."""
    name, pods = home_interface(scenario, space.address_text(source)), plan.pods
    number = UNNAMED
    if pods.interface == name:
        number = space.link(name).first
    elif pods.interface_prefix and name.startswith(pods.interface_prefix):
        number = space.link(f"{pods.interface_prefix}*").first
    return number if number in links else 0


def link_name(packet, link):
    """Return the link of arrival of a flow; empty: that of its home."""
    return "lo" if not link else "" if link == UNNAMED else packet.iif


def flows(scenario, mode, family, rng):
    """Return a flow for each class, with all ends that its packets can have for a sender that no list has."""
    plan = plan_once(snapshot(scenario), node_config(scenario, mode), family)
    found = partitions_of(mode, plan, Host(addresses=scenario.node_ips))
    made = []
    for box, leaf in leaves(found.rules, found.space):
        for links in filter(None, (box[LINK] & HERE, box[LINK] - HERE)):
            for sources, distribution in leaf.regions:
                part = sendable(found.space, (*box[:LINK], links), sources)
                ends = frozenset(ends_of(distribution, ()))
                if part is None or any(what is Disposition.UNSUPPORTED for what, _, _ in ends):
                    continue
                point = [draw(rng, each) for each in part]
                if point[LINK]:
                    point[LINK] = home(scenario, plan, found.space, point[SADDR], links) or point[LINK]
                packet = found.space.packet(tuple(point))
                made.append(
                    ScenarioFlow(
                        label=f"{packet.source} to {packet.destination} {packet.port}/{packet.protocol.value} on {packet.iif or 'none'}",
                        source=packet.source,
                        destination=packet.destination,
                        port=packet.port,
                        protocol=packet.protocol,
                        iface=link_name(packet, point[LINK]),
                        expect=ends,
                    )
                )
    return rng.sample(made, min(MOST, len(made)))


@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.parametrize("mode", MODES_HERE)
def test_a_packet_of_each_class_takes_the_way_of_its_class(mode, number):
    rng = random.Random(f"{SEED} {mode} {number}")
    scenario = rng.choice([each for each in SCENARIOS if each.flows])
    family = rng.choice(families_of(scenario.flows))
    drawn = flows(scenario, mode, family, rng)
    assert drawn, scenario.name
    asked = msgspec.structs.replace(scenario, flows=tuple(drawn), steps=())
    wrong = [finding for finding in kernel.testify(asked, mode, asked.flows) if not finding.ok]
    assert not wrong, f"NARTHEX_SEED={SEED}: {scenario.name}\n" + "\n".join(
        f"{each.label}: expected {print_said(each.expect)}, got {print_said(each.got)}" for each in wrong
    )
