"""Laws on a real kernel: what is read back after an apply is what was meant, and foreign things stay."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.proxy.kernel.modes import MODES_HERE

from narthex.linux.namespaces import create_namespace, delete_namespace
from narthex.linux.run import run
from narthex.model.net import IPFamily
from narthex.model.store import Store
from narthex.proxy.backends import BACKENDS
from narthex.proxy.kernel.dataplanes import dataplane
from narthex.proxy.plan.planner import NodeConfig, Planner
from narthex.testing import strategies as some
from narthex.testing.build import CONFIG

pytestmark = pytest.mark.kernel

TURNS = st.lists(st.lists(some.events(), max_size=6), min_size=1, max_size=4)


@pytest.fixture
def namespace(request):
    name = f"nxl-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}"
    create_namespace(name)
    try:
        yield name
    finally:
        delete_namespace(name)


def plans(config: NodeConfig, family: IPFamily, turns):
    store, planner = Store(), Planner(config, family)
    for turn in turns:
        for event in turn:
            store.apply(event)
        yield planner.plan(store.snapshot, store.take_changed())


@pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)
@pytest.mark.parametrize("mode", MODES_HERE)
def test_read_after_apply_is_what_was_meant(mode, family, namespace):
    backend, target = BACKENDS[mode], dataplane(mode).target(family, namespace)

    @settings(max_examples=20)
    @given(some.configs, TURNS)
    def law(config, turns):
        target.clean()
        assert target.read() is None
        have = None
        for plan in plans(config, family, turns):
            want, changes = backend.advance(have, plan)
            target.apply(changes)
            in_kernel = target.read()
            assert in_kernel is not None
            assert not backend.diff(in_kernel, want)
            have = want

    law()


@pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)
@pytest.mark.parametrize("mode", MODES_HERE)
def test_from_any_state_to_any_other_by_what_is_read(mode, family, namespace):
    """A new process knows nothing of the old one's plan: it reads the kernel and writes the difference."""
    backend, target = BACKENDS[mode], dataplane(mode).target(family, namespace)

    @settings(max_examples=15)
    @given(TURNS, TURNS)
    def law(before, after):
        target.clean()
        for turns in (before, after):
            *_, plan = plans(CONFIG, family, turns)
            want = backend.render(plan)
            target.apply(backend.diff(target.read(), want))
            assert not backend.diff(target.read(), want)

    law()


@pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)
def test_nft_lists_what_nft_can_read(family, namespace):
    """`nft list ruleset` of our tables parses back in an empty namespace, whatever the cluster looks like."""
    backend, target = BACKENDS["nftables"], dataplane("nftables").target(family, namespace)
    empty = f"{namespace}-e"
    create_namespace(empty)

    @settings(max_examples=25)
    @given(some.configs, TURNS)
    def law(config, turns):
        *_, plan = plans(config, family, turns)
        target.clean()
        target.apply(backend.diff(None, backend.render(plan)))
        listed = run(["nft", "list", "ruleset"], namespace=namespace)
        assert f"table {family.nft} narthex" in listed
        run(["nft", "-c", "-f", "-"], stdin=listed, namespace=empty)

    try:
        law()
    finally:
        delete_namespace(empty)


@pytest.mark.parametrize("mode", MODES_HERE)
def test_foreign_rules_stay_to_the_byte(mode, namespace):
    run(
        ["nft", "-f", "-"],
        stdin="table ip other { chain c { type filter hook input priority 5; ip saddr 1.2.3.4 drop; }; }\n",
        namespace=namespace,
    )
    run(["iptables", "-t", "nat", "-A", "POSTROUTING", "-s", "192.0.2.0/24", "-j", "MASQUERADE"], namespace=namespace)
    run(["iptables", "-A", "FORWARD", "-d", "192.0.2.0/24", "-j", "DROP"], namespace=namespace)

    def foreign():
        rules = run(["iptables-save"], namespace=namespace)
        kept = [line for line in rules.splitlines() if "192.0.2" in line]
        return kept, run(["nft", "list", "table", "ip", "other"], namespace=namespace)

    before = foreign()
    assert len(before[0]) == 2
    backend, target = BACKENDS[mode], dataplane(mode).target(IPFamily.IPV4, namespace)
    from narthex.testing.build import endpoint, endpoint_slice, plan, service

    the_plan = plan(
        service("shop/web", "10.110.0.5", node_port=30080), endpoint_slice("shop/web", endpoint("10.64.1.1"))
    )
    target.apply(backend.diff(None, backend.render(the_plan)))
    assert foreign() == before
    target.clean()
    assert foreign() == before
    everything = run(["iptables-save"], namespace=namespace) + run(["nft", "list", "ruleset"], namespace=namespace)
    assert "KUBE-" not in everything
    assert "narthex" not in everything
