"""Every scenario with socket load balancing and real sockets: rules and programs together do what the plan says."""

from contextlib import ExitStack

import pytest
from tests.cgroup_client import in_own_cgroup
from tests.socket_scenarios import MODE, plans_of, socket_flows
from tests.testing.test_socket_scenarios import CASES

from narthex.linux.bpf import mount_bpf_file_system, unmount
from narthex.linux.namespaces import in_namespace
from narthex.model import IPFamily
from narthex.proxy.backends.sockets.rows import SocketRows
from narthex.proxy.kernel.sockets import SocketTarget, remove_pins
from narthex.testing.findings import print_said
from narthex.testing.kernel.probe import PacketListeners, Tap
from narthex.testing.kernel.witness import KernelWitness, LoadedRules, listen
from narthex.testing.kernel.world import World, lay_out
from narthex.testing.setting import families_of

pytestmark = pytest.mark.kernel


def balance(stack, scenario, namespace, cgroup, pins):
    mount_bpf_file_system(pins)
    stack.callback(unmount, pins)
    with in_namespace(namespace):
        target = SocketTarget(cgroup, pins / "narthex")
        target.open()
        stack.callback(target.close)
        for family, plan in plans_of(scenario).items():
            target.apply(family, SocketRows(family).advance(plan))
        target.activate()

    def remove():
        with in_namespace(namespace):
            for family in IPFamily:
                remove_pins(family, pins / "narthex")

    stack.callback(remove)


@pytest.mark.parametrize("scenario", CASES, ids=lambda scenario: scenario.name)
def test_kernel_does_what_the_scenario_says(scenario, tmp_path):
    flows = [each.flow for each in socket_flows(scenario)]
    families = families_of(flows)
    with ExitStack() as stack:
        world = stack.enter_context(World(lay_out(scenario, tuple(flows))))
        cgroup = stack.enter_context(in_own_cgroup())
        protocols = sorted({flow.protocol for flow in flows}, key=lambda protocol: protocol.number)
        ears = stack.enter_context(PacketListeners(families, protocols))
        listen(scenario, world, ears)
        tap = stack.enter_context(Tap(world.node))
        rules = LoadedRules(scenario, MODE, families, world.node)
        stack.callback(rules.close)
        rules.load()
        balance(stack, scenario, world.node, cgroup, tmp_path / "bpf")
        witness = KernelWitness(scenario, MODE, world, ears, tap)
        forget = rules.forget if any(each.affinity_seconds is not None for each in scenario.services) else None
        found = [witness.judge_flow(flow, forget) for flow in flows]
    wrong = [each for each in found if not each.ok]
    assert not wrong, "\n".join(
        f"{each.label}: expected {print_said(each.expect)}, got {print_said(each.got)}" for each in wrong
    )
