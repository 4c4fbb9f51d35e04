"""The nftables backend: rules that stay, state in maps, and changes no larger than what changed."""

import re

import msgspec
import pytest
from tests.proxy.backends.nft_plans import (
    CLUSTER,
    CLUSTER_MASQ,
    DROP,
    EXTERNAL_LOCAL,
    INTERNAL,
    LOCAL,
    NOTHING_LOCAL,
    REFUSED,
    REJECT,
    balancer,
    everything,
    frontend,
    node_port,
    plan,
    pool,
    port_name,
    service,
)

from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import NamespacedName, ServicePortName
from narthex.netfilter.ast import (
    Accept,
    Compare,
    DnatMap,
    DropPacket,
    Field,
    Goto,
    InSet,
    IsLocal,
    MarkOr,
    MarkXor,
    Return,
    Rule,
    Slot,
    Unknown,
)
from narthex.netfilter.nft.parse import parse_ruleset
from narthex.netfilter.nft.print import chain_text
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.nftables.backend import NftablesBackend
from narthex.proxy.plan.ir import Plan, PodDetector

BACKEND = NftablesBackend()


def table(*services, **fields):
    return BACKEND.render(plan(*services, **fields)).table()


def elements(rules, name):
    return dict(rules.sets[name].elements)


# ---- what is rendered ----------------------------------------------------------------------------------------------


def test_it_is_the_default():
    assert next(iter(BACKENDS)) == "nftables"


def test_a_frontend_is_one_element_and_its_endpoints_one_each():
    rules = table(service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10, 11, local=(11,))))
    assert elements(rules, "services") == {("10.96.0.1", "tcp", 80): Goto("send-c-cm-cm")}
    assert elements(rules, "services-of-2") == {("10.96.0.1", "tcp", 80): None}
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


@pytest.mark.row("3.10")
def test_each_count_is_a_rule_of_the_chain_that_draws():
    the_plan = plan(
        service("a", frontend("10.96.0.1", 80, (CLUSTER,) * 3), cluster=pool(1, 2)),
        service("b", frontend("10.96.0.2", 80, (CLUSTER_MASQ,) * 3), cluster=pool(*range(10, 20))),
    )
    rules = BACKEND.render(the_plan).table()
    assert "numgen random mod 2 map @endpoints" in BACKEND.text(BACKEND.render(the_plan))
    key = (Field.DADDR, Field.L4PROTO, Field.DPORT)
    assert rules.chains["send-c"].rules == (
        Rule((InSet(key, "services-of-2"), DnatMap((*key, Slot(2)), "endpoints"))),
        Rule((InSet(key, "services-of-10"), DnatMap((*key, Slot(10)), "endpoints"))),
    )
    assert rules.chains["send-cm"].rules == (Rule((MarkOr(0x4000), Goto("send-c"))),)


def test_a_node_port_has_maps_of_its_own():
    rules = table(service("web", node_port(30080, EXTERNAL_LOCAL), cluster=pool(10, 11), local=pool(11, local=(11,))))
    assert elements(rules, "nodeport-services") == {("tcp", 30080): Goto("nodeport-c-cm-l")}
    assert set(elements(rules, "nodeport-endpoints")) == {("tcp", 30080, 0), ("tcp", 30080, 1)}
    assert elements(rules, "nodeports-of-2") == elements(rules, "nodeports-of-1-local") == {("tcp", 30080): None}
    assert elements(rules, "nodeport-endpoints-local") == {("tcp", 30080, 0): ("10.64.1.11", 8080)}
    assert elements(rules, "services") == {}


def test_a_pool_that_no_frontend_uses_has_no_elements():
    rules = table(service("web", node_port(30080, (LOCAL,) * 3), cluster=pool(10, 11), local=pool(10)))
    assert elements(rules, "nodeport-endpoints") == {}
    assert elements(rules, "nodeport-services") == {("tcp", 30080): Goto("nodeport-l")}


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
    assert elements(rules, "services") == {key: Goto("send-c-cm-x")}
    assert elements(rules, "no-endpoint-services") == {key: Goto("refuse-a-a-d")}
    from_pod = InSet((Field.SADDR,), "pod-cidrs")
    assert rules.chains["send-c-cm-x"].rules == (
        Rule((from_pod, Goto("send-c"))),
        Rule((IsLocal(Field.SADDR), Goto("send-cm"))),
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
        ((CLUSTER, CLUSTER_MASQ, CLUSTER_MASQ), "send-c-cm-cm", 2),
        ((CLUSTER_MASQ,) * 3, "send-cm", 1),
        ((CLUSTER, CLUSTER_MASQ, LOCAL), "send-c-cm-l", 3),
        ((CLUSTER, CLUSTER, DROP), "send-c-c-x", 3),
        ((CLUSTER, DROP, CLUSTER), "send-c-x-c", 3),
        ((REJECT, CLUSTER, CLUSTER), "send-x-c-c", 2),
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
    assert verdict == Goto("send-cm-cm-l")
    assert rules.chains["send-cm-cm-l"].rules == (
        Rule((IsLocal(Field.SADDR), Goto("send-cm"))),
        Rule((Goto("send-l"),)),
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
    assert rules.chains["send-c-cm-cm"].rules[0] == Rule((match, Goto("send-c")))


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


@pytest.mark.row("10.14")
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
@pytest.mark.row("5.6")
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


@pytest.mark.row("23.3")
def test_hooks_and_priorities_are_kube_proxys():
    """The names of the chains are our own; where they stand between other software's is not."""
    assert {
        (chain.hook.type, chain.hook.hook, chain.hook.priority) for chain in table().chains.values() if chain.hook
    } == {
        ("filter", "prerouting", -110),
        ("filter", "output", -110),
        ("nat", "prerouting", -100),
        ("nat", "output", -100),
        ("nat", "postrouting", 100),
        ("filter", "input", 0),
        ("filter", "forward", 0),
        ("filter", "output", 0),
    }


@pytest.mark.row("23.7")
def test_nothing_is_accepted_over_the_heads_of_other_tables():
    rules = BACKEND.render(plan(everything(affinity=60), everything_sticky())).table()
    assert not [rule for chain in rules.chains.values() for rule in chain.rules if Accept() in rule.expressions]
    assert {chain.hook.policy for chain in rules.chains.values() if chain.hook} == {"accept"}


def test_text_is_what_the_parser_reads():
    rules = BACKEND.render(plan(everything(), everything_sticky()))
    assert parse_ruleset(BACKEND.text(rules)).tables == (rules.table(),)


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


@pytest.mark.row("14.6")
def test_clients_are_remembered_per_endpoint_for_all_frontends():
    rules = table(everything_sticky())
    clients = sets_of(rules)
    assert len(clients) == 3
    assert {(one.timeout, one.dynamic, one.key) for one in clients.values()} == {(3600, True, (Field.SADDR,))}
    assert elements(rules, "endpoints") == {}
    local_chains = [chain for name, chain in rules.chains.items() if re.fullmatch(r"sticky-.*-[0-9a-f]{12}-l", name)]
    asked = {name for chain in local_chains for name in re.findall(r"@(\S+)", chain_text(chain, rules.family))}
    # The only local endpoint needs no question: whoever comes is sent there.
    assert asked == set()


def test_pool_order_is_the_order_of_asking():
    rules = table(service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(12, 10, 11), affinity=60))
    (chain,) = [chain for name, chain in rules.chains.items() if re.fullmatch(r"sticky-.*-[0-9a-f]{12}-c", name)]
    asked = [rule.expressions[0].name for rule in chain.rules[:-1]]
    assert [name.rsplit("-", 1)[1] for name in asked] == ["10.64.1.12/8080", "10.64.1.10/8080", "10.64.1.11/8080"]


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
    assert parse_ruleset(BACKEND.text(rules)).tables == (rules.table(),)
    sticky = [name for name in (*rules.table().chains, *rules.table().sets) if "stick" in name or "affinity" in name]
    assert all(re.fullmatch(r"[a-z0-9./-]{1,127}", name) for name in sticky)
    assert len(sets_of(rules.table())) == 6
