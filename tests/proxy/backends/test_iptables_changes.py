"""Differences, and how they are written down for iptables-restore."""

import msgspec
import pytest
from immutables import Map

from narthex.model.net import IPFamily
from narthex.model.objects import NamespacedName
from narthex.model.store import Store, Synced, Upsert
from narthex.netfilter.ast import Accept, Rule
from narthex.proxy.backends.iptables.backend import IptablesBackend
from narthex.proxy.backends.iptables.names import sep
from narthex.proxy.backends.iptables.rules import XtablesChanges, XtablesRules
from narthex.proxy.backends.iptables.script import find, needs_look, restore_blocks
from narthex.proxy.plan.ir import Endpoint, Lineage
from narthex.proxy.plan.planner import Planner
from narthex.testing.build import CONFIG, endpoint, endpoint_slice, plan, port_name, service

BACKEND = IptablesBackend()
V4 = IPFamily.IPV4


def restore_input(*changes):
    return "".join(restore_blocks(*changes))


def crowd(count=30, backends=4, odd=4):
    """Many Services; the first has another number of endpoints."""
    objects = []
    for n in range(count):
        name = f"shop/s{n:03}"
        pods = [endpoint(f"10.64.{n % 200}.{k + 1}") for k in range(odd if n == 0 else backends)]
        objects += [service(name, f"10.110.0.{n + 1}"), endpoint_slice(name, *pods)]
    return objects


def fill(objects):
    store = Store()
    for obj in objects:
        store.apply(Upsert(obj))
    store.apply(Synced())
    return store


@pytest.mark.row("21.6", "21.19")
def test_one_endpoint_more_writes_two_chains_of_one_service():
    store = fill(crowd())
    planner = Planner(CONFIG, V4)
    before = BACKEND.render(planner.plan(store.snapshot, store.take_changed()))
    store.apply(Upsert(endpoint_slice("shop/s000", *(endpoint(f"10.64.0.{k + 1}") for k in range(5)))))
    after, changes = BACKEND.advance(before, planner.plan(store.snapshot, store.take_changed()))
    assert len(changes.written["nat"]) == 2 and changes.removed == {} and not needs_look(changes)
    assert changes.rules == 1 + 5 + 2
    others = [chain for chain in before.chains["nat"] if chain not in changes.written["nat"]]
    assert all(before.chains["nat"][chain] is after.chains["nat"][chain] for chain in others)
    assert before.chains["filter"] is after.chains["filter"]
    # The short cut by descent and the long way come to the same.
    stranger = XtablesRules(before.family, before.chains, before.jumps)
    assert BACKEND.diff(stranger, after) == changes
    assert BACKEND.patch(before, changes) == after


def test_rendering_after_any_plan_equals_rendering_afresh():
    few, many = plan(*crowd(5)), plan(*crowd(9, odd=2))
    # Lineages that know nothing of each other, as after a restart.
    few, many = (msgspec.structs.replace(each, lineage=Lineage()) for each in (few, many))
    for one, other in ((few, many), (many, few)):
        assert BACKEND.advance(BACKEND.render(one), other)[0] == BACKEND.render(other)
        assert BACKEND.advance(BACKEND.render(one), one)[0] == BACKEND.render(one)


def test_a_health_check_node_port_is_written_alone_and_its_count_not_at_all():
    fields = {"type": "LoadBalancer", "external_policy_local": True}
    store = fill([service("shop/web", "10.110.0.7", health_check_node_port=32000, **fields)])
    planner = Planner(CONFIG, V4)
    rules = BACKEND.render(planner.plan(store.snapshot, store.take_changed()))

    def changes(obj):
        nonlocal rules
        store.apply(Upsert(obj))
        before, a_plan = rules, planner.plan(store.snapshot, store.take_changed())
        rules, changes = BACKEND.advance(before, a_plan)
        assert rules == BACKEND.render(a_plan)
        return changes

    moved = changes(service("shop/web", "10.110.0.7", health_check_node_port=32001, **fields))
    assert {table: set(chains) for table, chains in moved.written.items()} == {"filter": {"KUBE-NODEPORTS"}}
    held = rules.chains["filter"]["KUBE-NODEPORTS"]
    changes(endpoint_slice("shop/web", endpoint("10.64.1.5")))
    assert rules.chains["filter"]["KUBE-NODEPORTS"] is held
    gone = changes(service("shop/web", "10.110.0.7", type="LoadBalancer"))
    assert gone.written["filter"]["KUBE-NODEPORTS"] == ()


@pytest.mark.row("21.7")
def test_other_settings_render_all_again():
    one, other = (
        plan(*crowd(3)),
        plan(*crowd(3), masquerade_bit=15, localhost_node_ports=True, node_port_addresses=None),
    )
    before = BACKEND.render(one)
    after, changes = BACKEND.advance(before, other)
    assert after == BACKEND.render(other)
    assert set(changes.written["nat"]) == {"KUBE-MARK-MASQ", "KUBE-POSTROUTING", "KUBE-SERVICES"}
    assert changes.jumps is not None and changes.sysctls
    assert BACKEND.patch(before, changes) == after


def test_nothing_to_do_is_falsy_and_an_unknown_state_never():
    rules = BACKEND.render(plan())
    assert not BACKEND.diff(rules, rules)
    assert BACKEND.diff(None, rules)
    assert BACKEND.patch(rules, BACKEND.diff(None, rules)) == rules
    assert restore_input(XtablesChanges(family=V4)) == ""


@pytest.mark.row("21.11")
def test_the_order_within_a_table():
    pods = [endpoint("10.64.0.1"), endpoint("10.64.0.2")]
    objects = service("shop/web", "10.110.0.7"), endpoint_slice("shop/web", *pods)
    before = BACKEND.render(plan(*objects))
    after = BACKEND.render(plan(service("shop/web", "10.110.0.8"), endpoint_slice("shop/web", pods[0])))
    script = restore_input(BACKEND.diff(before, after)).splitlines()
    gone = sep(port_name("shop/web:http"), Endpoint("10.64.0.2", 80))
    assert script[0] == "*nat" and script[-1] == "COMMIT"
    assert f":{gone} - [0:0]" in script, "emptied first"
    assert script[-2] == f"-X {gone}", "removed last"
    kinds = [line[:2] for line in script[1:-1]]
    assert kinds == sorted(kinds, key=[":K", "-A", "-X"].index)
    assert not any("PREROUTING" in line or line.startswith(":P") for line in script), "built-in chains are left alone"


DUMP = """*nat
:PREROUTING ACCEPT [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SEP-BBBBBBBBBBBBBBBB - [0:0]
:KUBE-SEP-CCCCCCCCCCCCCCCC - [0:0]
:MINE - [0:0]
[5:6] -A PREROUTING -m comment   --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -s 10.9.9.9/32 -j KUBE-SERVICES
-A PREROUTING -j MINE
-A KUBE-SVC-AAAAAAAAAAAAAAAA -j KUBE-SEP-BBBBBBBBBBBBBBBB
-A MINE -j KUBE-SVC-AAAAAAAAAAAAAAAA
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:KUBE-ROUTER-FORWARD - [0:0]
-A INPUT -j KUBE-FIREWALL
COMMIT
"""


def test_what_is_ours_in_a_dump():
    found = find(DUMP, V4)
    assert set(found.own["nat"]) == {
        "KUBE-MARK-MASQ",
        "KUBE-SERVICES",
        "KUBE-SVC-AAAAAAAAAAAAAAAA",
        "KUBE-SEP-BBBBBBBBBBBBBBBB",
        "KUBE-SEP-CCCCCCCCCCCCCCCC",
    }
    assert set(found.own["filter"]) == {"KUBE-FIREWALL"}
    # A jump with a source of its own is somebody's own idea.
    assert found.lines["nat", "PREROUTING"] == ('-m comment   --comment "kubernetes service portals" -j KUBE-SERVICES',)
    assert found.kept == {
        ("nat", "KUBE-SERVICES"),
        ("nat", "KUBE-SVC-AAAAAAAAAAAAAAAA"),
        ("nat", "KUBE-SEP-BBBBBBBBBBBBBBBB"),
    }
    assert not found.shared_firewall
    assert find("", V4).rules(guarded=True) is None


def test_cleaning_names_only_what_is_ours_and_free():
    script = restore_input(XtablesChanges(family=V4, replace=True, jumps={}), find(DUMP, V4))
    assert (
        script
        == """*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-SEP-CCCCCCCCCCCCCCCC - [0:0]
-D PREROUTING -m comment   --comment "kubernetes service portals" -j KUBE-SERVICES
-X KUBE-MARK-MASQ
-X KUBE-SEP-CCCCCCCCCCCCCCCC
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
-D INPUT -j KUBE-FIREWALL
-X KUBE-FIREWALL
COMMIT
"""
    )


@pytest.mark.parametrize(
    ("mangle", "rule", "shared"),
    [
        ("", "", False),
        (":KUBE-IPTABLES-HINT - [0:0]\n", "", True),
        (":KUBE-KUBELET-CANARY - [0:0]\n", "", True),
        ("", "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP\n", True),
    ],
)
def test_a_kubelets_firewall_chain_is_known(mangle, rule, shared):
    text = (
        DUMP.replace("-A INPUT -j KUBE-FIREWALL\n", rule + "-A INPUT -j KUBE-FIREWALL\n") + f"*mangle\n{mangle}COMMIT\n"
    )
    found = find(text, V4)
    assert found.shared_firewall is shared
    script = restore_input(XtablesChanges(family=V4, replace=True, jumps={}), found)
    assert ("KUBE-FIREWALL" in script) is not shared


def test_rules_compare_by_content():
    chains = {"nat": Map({"KUBE-SERVICES": (Rule((Accept(),)),)})}
    one, other = XtablesRules(V4, chains, Map()), XtablesRules(V4, dict(chains), Map(), (("a", "b"),))
    assert one == other and one is not other
    assert one != XtablesRules(IPFamily.IPV6, chains, Map())
    assert one != XtablesRules(V4, {}, Map())
    assert one != "rules"
    assert "1 chains in nat" in repr(one)


def test_services_stand_in_the_order_of_their_names():
    objects = crowd(4)
    rules = BACKEND.render(plan(*reversed(objects)))
    comments = [rule.comment for rule in rules.chains["nat"]["KUBE-SERVICES"]]
    assert comments[:-1] == [f"{NamespacedName('shop', f's{n:03}')}:http cluster IP" for n in range(4)]
