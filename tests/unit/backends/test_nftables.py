"""The nftables backend: rules that stay, state in maps, and changes no larger than what changed."""

import re

import msgspec
import pytest

from narthex.backends import BACKENDS
from narthex.backends.nftables import NftablesBackend
from narthex.model.names import NamespacedName, ServicePortName
from narthex.model.net import IPFamily, Protocol
from narthex.netfilter import nft
from narthex.netfilter.ast import (
    Compare,
    DropPacket,
    Field,
    Goto,
    InSet,
    IsLocal,
    MarkOr,
    MarkXor,
    Return,
    Rule,
    Unknown,
)
from narthex.plan.ir import Lineage, Plan, PodDetector
from unit.backends.nft_plans import (
    CLUSTER,
    CLUSTER_MASQ,
    DROP,
    EXTERNAL_LOCAL,
    INTERNAL,
    LOCAL,
    NOTHING_LOCAL,
    REFUSED,
    REJECT,
    after,
    balancer,
    everything,
    frontend,
    node_port,
    plan,
    pool,
    port_name,
    service,
)

BACKEND = NftablesBackend()


def table(*services, **fields):
    return BACKEND.render(plan(*services, **fields)).table()


def elements(rules, name):
    return dict(rules.sets[name].elements)


def step(first, *changed, removed=()):
    """Render two plans, one from the other; the changes, checked against a comparison of all."""
    have = BACKEND.render(first)
    second = after(first, *changed, removed=removed)
    want = BACKEND.render(second, have)
    changes = BACKEND.diff(have, want)
    assert want.step is not None
    assert BACKEND.patch(have, changes) == want
    whole = BACKEND.diff(have, BACKEND.patch(have, changes))
    assert whole.deletions == changes.deletions
    assert whole.additions == changes.additions
    return changes


# ---- what is rendered ----------------------------------------------------------------------------------------------


def test_it_is_the_default():
    assert next(iter(BACKENDS)) == "nftables"


def test_a_frontend_is_one_element_and_its_endpoints_one_each():
    rules = table(service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10, 11, local=(11,))))
    assert elements(rules, "services") == {("10.96.0.1", "tcp", 80): Goto("send-c2-c2m-c2m")}
    assert elements(rules, "endpoints") == {
        ("10.96.0.1", "tcp", 80, 0): ("10.64.1.10", 8080),
        ("10.96.0.1", "tcp", 80, 1): ("10.64.1.11", 8080),
    }
    assert elements(rules, "cluster-ips") == {("10.96.0.1",): None}
    assert elements(rules, "hairpin") == {("10.64.1.11", "10.64.1.11"): None}


def test_more_services_with_as_many_endpoints_are_no_more_rules():
    one = [service("a", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(1, 2))]
    many = [service(f"s{n}", frontend(f"10.96.0.{n}", 80, INTERNAL), cluster=pool(1, 2)) for n in range(1, 50)]
    assert table(*one).chains == table(*many).chains


def test_a_node_port_has_maps_of_its_own():
    rules = table(service("web", node_port(30080, EXTERNAL_LOCAL), cluster=pool(10, 11), local=pool(11, local=(11,))))
    assert elements(rules, "nodeport-services") == {("tcp", 30080): Goto("nodeport-c2-c2m-l1")}
    assert set(elements(rules, "nodeport-endpoints")) == {("tcp", 30080, 0), ("tcp", 30080, 1)}
    assert elements(rules, "nodeport-endpoints-local") == {("tcp", 30080, 0): ("10.64.1.11", 8080)}
    assert elements(rules, "services") == {}


def test_a_pool_that_no_frontend_uses_has_no_elements():
    rules = table(service("web", node_port(30080, (LOCAL,) * 3), cluster=pool(10, 11), local=pool(10)))
    assert elements(rules, "nodeport-endpoints") == {}
    assert elements(rules, "nodeport-services") == {("tcp", 30080): Goto("nodeport-l1")}


def test_refused_frontends_end_the_walk_in_nat():
    """Else a node port with the same number would answer on an external IP that is the node's own address."""
    rules = table(service("web", frontend("10.96.0.1", 80, REFUSED), node_port(30080, REFUSED)))
    assert elements(rules, "services") == {("10.96.0.1", "tcp", 80): Return()}
    assert elements(rules, "nodeport-services") == {}
    assert elements(rules, "no-endpoint-services") == {("10.96.0.1", "tcp", 80): Goto("reject-chain")}
    assert elements(rules, "no-endpoint-nodeports") == {("tcp", 30080): Goto("reject-chain")}


def test_a_row_that_sends_some_and_drops_others_is_in_both():
    rules = table(service("web", balancer("203.0.113.1", 80, NOTHING_LOCAL), cluster=pool(10)))
    key = ("203.0.113.1", "tcp", 80)
    assert elements(rules, "services") == {key: Goto("send-c1-c1m-x")}
    assert elements(rules, "no-endpoint-services") == {key: Goto("refuse-a-a-d")}
    from_pod = InSet((Field.SADDR,), "pod-cidrs")
    assert rules.chains["send-c1-c1m-x"].rules == (
        Rule((from_pod, Goto("send-c1"))),
        Rule((IsLocal(Field.SADDR), Goto("send-c1m"))),
        Rule((Return(),)),
    )
    assert rules.chains["refuse-a-a-d"].rules == (
        Rule((from_pod, Return())),
        Rule((IsLocal(Field.SADDR), Return())),
        Rule((DropPacket(),)),
    )


def test_all_dropped_needs_no_chain():
    rules = table(service("web", frontend("10.96.0.1", 80, (DROP,) * 3)))
    assert elements(rules, "no-endpoint-services") == {("10.96.0.1", "tcp", 80): DropPacket()}


@pytest.mark.parametrize(
    ("row", "name", "count"),
    [
        ((CLUSTER, CLUSTER_MASQ, CLUSTER_MASQ), "send-c1-c1m-c1m", 2),
        ((CLUSTER_MASQ,) * 3, "send-c1m", 1),
        ((CLUSTER, CLUSTER_MASQ, LOCAL), "send-c1-c1m-l1", 3),
        ((CLUSTER, CLUSTER, DROP), "send-c1-c1-x", 3),
        ((CLUSTER, DROP, CLUSTER), "send-c1-x-c1", 3),
        ((REJECT, CLUSTER, CLUSTER), "send-x-c1-c1", 2),
    ],
)
def test_classes_that_fare_alike_are_not_told_apart(row, name, count):
    rules = table(service("web", frontend("10.96.0.1", 80, row), cluster=pool(1), local=pool(2)))
    assert elements(rules, "services") == {("10.96.0.1", "tcp", 80): Goto(name)}
    assert len(rules.chains[name].rules) == count


def test_without_detection_nobody_is_a_pod():
    rules = table(
        service("web", frontend("10.96.0.1", 80, EXTERNAL_LOCAL), cluster=pool(1), local=pool(2)), pods=PodDetector()
    )
    (verdict,) = elements(rules, "services").values()
    assert verdict == Goto("send-c1m-c1m-l1")
    assert rules.chains["send-c1m-c1m-l1"].rules == (
        Rule((IsLocal(Field.SADDR), Goto("send-c1m"))),
        Rule((Goto("send-l1"),)),
    )


@pytest.mark.parametrize(
    ("pods", "match"),
    [
        (PodDetector(interface="cni0"), Compare(Field.IIFNAME, ("cni0",))),
        (PodDetector(interface_prefix="veth"), Compare(Field.IIFNAME, ("veth*",))),
    ],
)
def test_pods_by_interface(pods, match):
    rules = table(service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(1)), pods=pods)
    assert rules.chains["send-c1-c1m-c1m"].rules[0] == Rule((match, Goto("send-c1")))


@pytest.mark.parametrize(
    ("cidrs", "rules_there", "addresses"),
    [(None, 1, set()), ((), 0, set()), (("10.20.0.11/32", "10.21.0.0/16"), 1, {("10.20.0.11",), ("10.21.0.0/16",)})],
)
def test_where_node_ports_answer(cidrs, rules_there, addresses):
    rules = table(node_port_cidrs=cidrs)
    for chain in ("services", "service-endpoints-check"):
        guarded = rules.chains[chain].rules[1:]
        assert len(guarded) == rules_there
        for rule in guarded:
            assert rule.expressions[:2] == (Compare(Field.DADDR, ("127.0.0.0/8",), True), IsLocal(Field.DADDR))
            in_set = InSet((Field.DADDR,), "nodeport-addresses")
            assert (in_set in rule.expressions) is (cidrs is not None)
    assert set(rules.sets["nodeport-addresses"].elements) == addresses


def test_source_ranges():
    allowed = ("198.51.100.0/25", "198.51.100.200/32")
    rules = table(
        service("web", balancer("203.0.113.1", 80, INTERNAL, allow_from=allowed), cluster=pool(1)),
        service("strict", node_port(30080, INTERNAL, allow_from=("198.51.100.0/24",)), cluster=pool(1)),
        service("none", balancer("203.0.113.2", 80, INTERNAL, allow_from=()), cluster=pool(1)),
    )
    assert set(elements(rules, "restricted")) == {("203.0.113.1", "tcp", 80), ("203.0.113.2", "tcp", 80)}
    assert set(elements(rules, "allowed-sources")) == {
        ("203.0.113.1", "tcp", 80, "198.51.100.0/25"),
        ("203.0.113.1", "tcp", 80, "198.51.100.200"),
    }
    assert set(elements(rules, "nodeport-restricted")) == {("tcp", 30080)}
    assert set(elements(rules, "nodeport-allowed-sources")) == {("tcp", 30080, "198.51.100.0/24")}


def test_ipv6_has_its_own_loopback():
    rules = BACKEND.render(Plan(family=IPFamily.IPV6, services={})).table()
    assert rules.family is IPFamily.IPV6
    assert rules.chains["services"].rules[1].expressions[0] == Compare(Field.DADDR, ("::1",), True)


@pytest.mark.parametrize("mark", [0x4000, 1, 0x80000000])
def test_only_the_masquerade_bit_is_ever_written(mark):
    rules = table(everything(), everything_sticky(), masquerade_mark=mark)
    written = [
        expression
        for chain in rules.chains.values()
        for rule in chain.rules
        for expression in rule.expressions
        if isinstance(expression, MarkOr | MarkXor | Unknown)
    ]
    assert {type(one) for one in written} == {MarkOr, MarkXor}
    assert {one.bits for one in written} == {mark}
    # And in the text: nothing else sets a mark, of the packet or of the connection.
    text = BACKEND.text(BACKEND.render(plan(everything(), everything_sticky(), masquerade_mark=mark)))
    assert set(re.findall(r"\w+ mark set .*?0x[0-9a-f]{8}", text)) == {
        f"meta mark set meta mark {operator} 0x{mark:08x}" for operator in "|^"
    }
    assert text.count("mark set") == len(written)


def test_text_is_what_the_parser_reads():
    rules = BACKEND.render(plan(everything(), everything_sticky()))
    assert nft.parse(BACKEND.text(rules)).tables == (rules.table(),)


def test_all_names_that_rules_use_are_there():
    rules = table(everything(), everything_sticky())
    used_chains, used_sets = set(), set()
    for chain in rules.chains.values():
        for rule in chain.rules:
            for expression in rule.expressions:
                used_chains |= {getattr(expression, "chain", None), *getattr(expression, "chains", ())}
                used_sets |= {getattr(expression, one, None) for one in ("map", "set")}
                used_sets |= {expression.name} if isinstance(expression, InSet) else set()
    for one in rules.sets.values():
        used_chains |= {getattr(data, "chain", None) for data in one.elements.values()}
    assert used_chains - {None} <= set(rules.chains)
    assert used_sets - {None} <= set(rules.sets)


# ---- affinity ------------------------------------------------------------------------------------------------------


def everything_sticky():
    web = everything(affinity=3600)
    moved = [
        msgspec.structs.replace(
            one, address=one.address and one.address.replace("10.96.0", "10.96.1"), port=one.port + 1
        )
        for one in web.frontends
    ]
    return msgspec.structs.replace(web, name=port_name("sticky"), frontends=tuple(moved))


def sets_of(rules, prefix="affinity-"):
    return {name: one for name, one in rules.sets.items() if name.startswith(prefix)}


def test_clients_are_remembered_per_endpoint_for_all_frontends():
    rules = table(everything_sticky())
    clients = sets_of(rules)
    assert len(clients) == 3
    assert {(one.timeout, one.dynamic, one.key) for one in clients.values()} == {(3600, True, (Field.SADDR,))}
    assert elements(rules, "endpoints") == {}
    local_chains = [chain for name, chain in rules.chains.items() if re.fullmatch(r"sticky-.*-[0-9a-f]{12}-l", name)]
    asked = {name for chain in local_chains for name in re.findall(r"@(\S+)", nft.chain_text(chain, rules.family))}
    # The only local endpoint needs no question: whoever comes is sent there.
    assert asked == set()


def test_pool_order_is_the_order_of_asking():
    rules = table(service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(12, 10, 11), affinity=60))
    (chain,) = [chain for name, chain in rules.chains.items() if re.fullmatch(r"sticky-.*-[0-9a-f]{12}-c", name)]
    asked = [rule.expressions[0].name for rule in chain.rules[:-1]]
    assert [name.rsplit("-", 1)[1] for name in asked] == ["10.64.1.12/8080", "10.64.1.10/8080", "10.64.1.11/8080"]


def test_an_endpoint_that_leaves_takes_its_clients_along():
    first = plan(service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10, 11), affinity=60))
    changes = step(first, service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10), affinity=60))
    (gone,) = changes.removed_sets
    assert gone.endswith("-10.64.1.11/8080")
    assert changes.element_count() == 0
    rewritten = "\n".join(nft.chain_text(chain, IPFamily.IPV4) for chain in changes.chains)
    assert gone not in rewritten
    script = changes.last_script()
    assert script.index("flush chain") < script.index("delete chain") < script.index("delete set")


def test_a_new_timeout_changes_the_sets_in_place():
    first = plan(service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10, 11), affinity=60))
    changes = step(first, service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10, 11), affinity=90))
    assert not changes.replace
    assert {one.timeout for one in changes.sets} == {90}
    assert (changes.chains, changes.removed_sets, changes.element_count()) == ((), (), 0)


def test_affinity_on_and_off():
    plain = service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10, 11))
    sticky = msgspec.structs.replace(plain, affinity_seconds=60)
    on = step(plan(plain), sticky)
    assert len(on.additions["services"]) == 1
    assert len(on.deletions["endpoints"]) == 2
    off = step(plan(sticky), plain)
    assert len(off.removed_sets) == 2
    assert len(off.additions["endpoints"]) == 2


HOSTILE = [
    'a"; flush ruleset; "',
    "a\nflush ruleset",
    "$(reboot)",
    "a } table ip x {",
    "é\x00\x1b[31m",
    "x" * 300,
    "",
    "../..",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_never_become_syntax(text):
    name = ServicePortName(NamespacedName(text, text), text, Protocol.TCP)
    other = ServicePortName(NamespacedName(text, text), text + "x", Protocol.TCP)
    hostile = msgspec.structs.replace(everything(affinity=60), name=name)
    twin = msgspec.structs.replace(everything_sticky(), name=other)
    rules = BACKEND.render(plan(hostile, twin))
    assert nft.parse(BACKEND.text(rules)).tables == (rules.table(),)
    sticky = [name for name in (*rules.table().chains, *rules.table().sets) if "stick" in name or "affinity" in name]
    assert all(re.fullmatch(r"[a-z0-9./-]{1,127}", name) for name in sticky)
    assert len(sets_of(rules.table())) == 6


# ---- changes -------------------------------------------------------------------------------------------------------


def web(*numbers, local=(), count_of_frontends=1):
    frontends = [frontend(f"10.96.0.{n + 1}", 80, INTERNAL) for n in range(count_of_frontends)]
    return service("web", *frontends, cluster=pool(*numbers, local=local))


def sizes(changes):
    return (
        {name: len(pairs) for name, pairs in changes.deletions.items()},
        {name: len(pairs) for name, pairs in changes.additions.items()},
    )


def test_one_more_endpoint_is_one_element_and_another_count():
    changes = step(plan(web(10, 11, 12), *others()), web(10, 11, 12, 13))
    assert sizes(changes) == ({"services": 1}, {"services": 1, "endpoints": 1})


def test_the_last_endpoint_less_is_one_element_and_another_count():
    changes = step(plan(web(10, 11, 12), *others()), web(10, 11))
    assert sizes(changes) == ({"services": 1, "endpoints": 1}, {"services": 1})


def test_an_endpoint_less_moves_the_last_into_its_place():
    changes = step(plan(web(10, 11, 12), *others()), web(11, 12))
    assert sizes(changes) == ({"services": 1, "endpoints": 2}, {"services": 1, "endpoints": 1})


def test_an_endpoint_for_another_is_one_place():
    changes = step(plan(web(10, 11, 12), *others()), web(10, 12, 13))
    assert sizes(changes) == ({"endpoints": 1}, {"endpoints": 1})


def test_a_local_endpoint_more_is_a_hairpin_too():
    changes = step(plan(web(10), *others()), web(10, 11, local=(11,)))
    assert sizes(changes) == ({"services": 1}, {"services": 1, "endpoints": 1, "hairpin": 1})


def test_every_frontend_has_its_elements():
    changes = step(plan(web(10, 11, count_of_frontends=3)), web(10, 11, 12, count_of_frontends=3))
    assert sizes(changes) == ({"services": 3}, {"services": 3, "endpoints": 3})


def test_nothing_changed_is_nothing_to_do():
    first = plan(everything(), *others())
    rules = BACKEND.render(first)
    again = BACKEND.render(after(first), rules)
    assert not BACKEND.diff(rules, again)
    assert not BACKEND.diff(rules, BACKEND.render(first))
    assert again == rules


def others():
    """Services beside the one that changes, with rows for all counts that the tests need."""
    return [
        service(f"o{n}", frontend(f"10.96.9.{n}", 80, INTERNAL), cluster=pool(*range(100, 100 + n)))
        for n in range(1, 6)
    ]


def test_elements_that_several_need_stay_until_the_last_goes():
    address = "10.96.0.1"
    http = service("web", frontend(address, 80, INTERNAL), cluster=pool(10, local=(10,)))
    https = service("web", frontend(address, 443, INTERNAL), cluster=pool(10, local=(10,)), port="https")
    both = plan(http, https, *others())
    first = step(both, removed=(https.name,))
    assert "cluster-ips" not in first.deletions
    assert "hairpin" not in first.deletions
    second = step(plan(http, *others()), removed=(http.name,))
    assert set(second.deletions["cluster-ips"]) == {(address,)}
    assert set(second.deletions["hairpin"]) == {("10.64.1.10", "10.64.1.10")}


def test_a_match_can_go_from_one_service_to_another_at_once():
    one, other = web(10), service("other", cluster=pool(11))
    first = plan(one, other)
    changes = step(
        first,
        service("web", cluster=pool(10)),
        service("other", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(11)),
    )
    assert sizes(changes) == ({"endpoints": 1}, {"endpoints": 1})


def test_a_change_does_not_look_at_other_services():
    class Unwalkable:
        """Services that may be looked up, but not gone through."""

        def __init__(self, held):
            self.held = held
            self.asked = []

        def get(self, name, default=None):
            self.asked.append(name)
            return self.held.get(name, default)

        def __getattr__(self, name):
            raise AssertionError(f"all Services were gone through ({name})")

        def __iter__(self):
            raise AssertionError("all Services were gone through")

        __len__ = __contains__ = keys = values = items = __iter__

    first = plan(web(10), *others())
    have = BACKEND.render(first)
    second = after(first, web(10, 11))
    watched = Unwalkable(second.services)
    changes = BACKEND.diff(have, BACKEND.render(msgspec.structs.replace(second, services=watched), have))
    assert watched.asked == [port_name("web")]
    assert changes.element_count() == 3


def test_without_lineage_only_what_differs_is_written():
    kept = others()
    have = BACKEND.render(plan(web(10, 11, 12), everything(), *kept))
    changed = plan(web(10, 11, 12, 13), *kept)
    assert changed.lineage.parent == 0
    want = BACKEND.render(changed, have)
    changes = BACKEND.diff(have, want)
    assert BACKEND.patch(have, changes) == want
    assert len(changes.additions["endpoints"]) == 1


def test_slots_stay_when_a_setting_changes():
    first = plan(web(10, 11, 12))
    have = BACKEND.render(first)
    moved = BACKEND.render(after(first, web(11, 12)), have)
    other = msgspec.structs.replace(after(first, web(11, 12)), service_cidrs=("10.97.0.0/16",))
    changes = BACKEND.diff(moved, BACKEND.render(other, moved))
    assert changes.element_count() == 0
    assert [one.name for one in changes.sets] == ["service-cidrs"]
    assert "flush set ip narthex service-cidrs\nadd element ip narthex service-cidrs { 10.97.0.0/16 }" in (
        changes.first_script()
    )


def test_a_step_counts_only_from_its_own_origin():
    first = plan(web(10), *others())
    one = BACKEND.render(first)
    two = BACKEND.render(after(first, web(10, 11)), one)
    stranger = BACKEND.render(plan(web(10, 11), *others()))
    assert not BACKEND.diff(stranger, two)
    assert BACKEND.patch(stranger, BACKEND.diff(stranger, one)) == one


def test_lineage_of_another_plan_is_no_short_cut():
    have = BACKEND.render(plan(web(10)))
    foreign = Lineage(Lineage(), frozenset())
    want = BACKEND.render(msgspec.structs.replace(plan(web(10, 11)), lineage=foreign), have)
    assert len(want.table().sets["endpoints"].elements) == 2
    assert BACKEND.patch(have, BACKEND.diff(have, want)) == want


def test_replacement_hooks_in_last():
    changes = BACKEND.diff(None, BACKEND.render(plan(everything())))
    assert changes.replace
    assert changes.first_script().startswith("table ip narthex\ndelete table ip narthex\ntable ip narthex")
    assert "hook" not in changes.first_script()
    assert changes.last_script().count(" hook ") == 8


def test_a_hook_that_moved_replaces_all():
    want = BACKEND.render(plan(everything()))
    chains = dict(want.table().chains)
    base = chains["filter-input"]
    chains["filter-input"] = msgspec.structs.replace(base, hook=msgspec.structs.replace(base.hook, priority=7))
    from narthex.backends.nftables_rules import from_table

    have = from_table(msgspec.structs.replace(want.table(), chains=chains))
    changes = BACKEND.diff(have, want)
    assert changes.replace
    assert BACKEND.patch(have, changes) == want


def test_what_somebody_broke_is_mended():
    from narthex.backends.nftables_rules import from_table

    want = BACKEND.render(plan(everything()))
    whole = want.table()
    chains = {name: chain for name, chain in whole.chains.items() if name not in ("nat-output", "send-c3")}
    chains["stranger"] = msgspec.structs.replace(whole.chains["reject-chain"], name="stranger")
    services = msgspec.structs.replace(whole.sets["services"], elements={("1.2.3.4", "tcp", 1): DropPacket()})
    have = from_table(msgspec.structs.replace(whole, chains=chains, sets={**whole.sets, "services": services}))
    changes = BACKEND.diff(have, want)
    assert {chain.name for chain in changes.chains} == {"send-c3"}
    assert {chain.name for chain in changes.late_chains} == {"nat-output"}
    assert changes.removed_chains == ("stranger",)
    assert set(changes.deletions) == {"services"}
    assert BACKEND.patch(have, changes) == want
