"""Clusters that nobody thought of, with real packets: what the plan says is what the kernel does.

Each run draws others. A failure prints the cluster and a blob with which hypothesis makes the same again.
"""

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.crowds import crowds
from tests.proxy.kernel.modes import MODES_HERE

from narthex.model.net import IPFamily
from narthex.model.objects import Node
from narthex.testing import strategies as some
from narthex.testing.build import NODE, NODE_IPS
from narthex.testing.findings import possible_ends, print_said
from narthex.testing.kernel import witness as kernel
from narthex.testing.scenario import Config, Scenario, ScenarioFlow
from narthex.testing.setting import host_of, packet_of
from narthex.testing.witnesses import plan_answer

pytestmark = pytest.mark.kernel

configs = st.builds(
    Config,
    detect_local_mode=st.sampled_from(["ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix", ""]),
    cluster_cidrs=st.sampled_from([(), ("10.64.0.0/12",), ("10.64.0.0/12", "fd64::/48")]),
    bridge_interface=st.just("cni0"),
    interface_name_prefix=st.just("veth"),
    masquerade_all=st.booleans(),
    node_port_addresses=st.sampled_from([None, ("primary",), ("10.20.1.0/24",), ("10.20.0.0/16", "fd20::/64")]),
)


def scenario(config, objects, packets, mode):
    """The drawn cluster as a scenario that expects of every packet what the plan says."""
    nodes = [obj for obj in objects if isinstance(obj, Node)]
    unjudged = Scenario(
        name="drawn",
        path="drawn",
        level="must",
        modes=(mode,),
        node_name=NODE,
        node_ips=NODE_IPS,
        pod_cidrs=("10.64.1.0/24", "fd64:0:0:1::/64"),
        labels=nodes[-1].labels if nodes else (),
        config=config,
        objects=tuple(obj for obj in objects if not isinstance(obj, Node)),
        flows=tuple(flow(packet) for packet in dict.fromkeys(packets)),
        steps=(),
    )
    answer = plan_answer(unjudged, mode)
    return msgspec.structs.replace(
        unjudged,
        flows=tuple(
            msgspec.structs.replace(
                each, expect=possible_ends(answer(packet_of(unjudged, each), host_of(unjudged, each), None, 0.0))
            )
            for each in unjudged.flows
        ),
    )


def flow(packet):
    """A pod that may be an endpoint is in one place only, so it arrives where its route leads."""
    movable = not packet.from_host and packet.source not in (*some.PODS[IPFamily.IPV4], *some.PODS[IPFamily.IPV6])
    return ScenarioFlow(
        source=packet.source,
        destination=packet.destination,
        port=packet.port,
        protocol=packet.protocol,
        iface=packet.iif if movable else "",
        label=str(packet),
        expect=frozenset(),
    )


def demand(case, mode):
    wrong = [finding for finding in kernel.testify(case, mode, case.flows) if not finding.ok]
    assert not wrong, "\n".join(
        f"{mode}: {each.label}: the plan says {print_said(each.expect)}, the kernel did {print_said(each.got)}"
        for each in wrong
    )


def last_of_each(objects):
    """What a store would hold: the last of each name."""
    return list({(type(obj).__name__, obj.key): obj for obj in objects}.values())


each_mode = pytest.mark.parametrize("mode", MODES_HERE)
# Shrinking on a kernel takes longer than a reader needs to see what is wrong.
drawn = [Phase.explicit, Phase.reuse, Phase.generate]


@each_mode
@settings(max_examples=5, phases=drawn)
@given(configs, some.families, st.lists(some.objects, min_size=3, max_size=12), st.data())
def test_small_clusters_with_anything_in_them(mode, config, family, objects, data):
    packets = data.draw(st.lists(some.packets(family), min_size=4, max_size=8))
    demand(scenario(config, last_of_each(objects), packets, mode), mode)


@each_mode
@settings(max_examples=4, phases=drawn)
@given(configs, st.data())
def test_crowds_of_services(mode, config, data):
    family = data.draw(some.families)
    crowd = data.draw(crowds(family, least=10, most=250, packets=10))
    demand(scenario(config, crowd.objects, crowd.packets, mode), mode)
