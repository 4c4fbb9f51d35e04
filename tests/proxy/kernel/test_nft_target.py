"""The nftables Target on a real kernel: what is written is what is read, in whole transactions, and nft agrees."""

import os
import re
import socket

import msgspec
import pytest
from tests.proxy.backends.nft_plans import (
    CLUSTER,
    INTERNAL,
    NOTHING_LOCAL,
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

from narthex.linux.libnftables import NftError, run_nft
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import NamespacedName, ServicePortName
from narthex.netfilter.ast import Goto, Return, TouchedPart
from narthex.netfilter.nft.parse import parse_ruleset
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.nftables.backend import NftablesBackend
from narthex.proxy.backends.nftables.changes import NftChanges
from narthex.proxy.kernel.nftables import NftablesTarget
from narthex.proxy.plan.ir import Endpoint, Plan, PodDetector, Pool

pytestmark = pytest.mark.kernel

DUMP = NftablesTarget._dump
BACKEND = NftablesBackend()
FAMILY = IPFamily.IPV4


@pytest.fixture
def namespace():
    name = f"nxt-{os.getpid()}-nft"
    create_namespace(name)
    try:
        yield name
    finally:
        delete_namespace(name)


@pytest.fixture
def target(namespace):
    target = NftablesTarget(FAMILY, namespace)
    yield target
    target.close()


def whole():
    sticky = service(
        "sticky",
        frontend("10.96.0.9", 80, INTERNAL),
        node_port(30090, NOTHING_LOCAL),
        cluster=pool(20, 21),
        affinity=10800,
    )
    return plan(everything(), sticky, node_port_cidrs=("10.20.0.11/32", "10.21.0.0/16"))


def six():
    """An IPv6 plan."""
    web = service(
        "web",
        frontend("fd6e::1", 80, INTERNAL),
        node_port(30080, INTERNAL),
        balancer("2001:db8:1b::1", 80, INTERNAL, allow_from=("2001:db8:c::/64", "2001:db8:d::1/128")),
        cluster=Pool(endpoints=(Endpoint("fd64:0:0:1::a", 8080, True), Endpoint("::ffff:10.0.0.1", 8080))),
    )
    sticky = service(
        "sticky",
        frontend("fd6e::2", 80, INTERNAL),
        cluster=Pool(endpoints=(Endpoint("fd64:0:0:1::a", 8080), Endpoint("fd64:0:0:2::a", 8080))),
        affinity=60,
    )
    return Plan(
        family=IPFamily.IPV6,
        services={web.name: web, sticky.name: sticky},
        pods=PodDetector(cidrs=("fd64::/48",)),
        service_cidrs=("fd6e::/108",),
    )


def put(target, *plans):
    """Apply plan after plan, each rendered from the one before, and compare what is in the kernel each time."""
    have = None
    for one in plans:
        want, changes = BACKEND.advance(have, one)
        target.apply(changes)
        assert target.read() == want
        have = want
    return have


def test_an_empty_namespace_has_no_rules(target):
    assert target.read() is None
    target.clean()
    assert target.read() is None


def test_what_is_read_is_what_was_meant(target):
    put(target, whole())


def test_ipv6(namespace):
    target = NftablesTarget(IPFamily.IPV6, namespace)
    want = BACKEND.render(six())
    target.apply(BACKEND.diff(None, want))
    in_kernel = target.read()
    # An address is canonical text everywhere but in this plan, which has one that is not, on purpose.
    table = in_kernel.table()
    assert table.sets["endpoints"].elements["fd6e::1", "tcp", 80, 1] == ("::ffff:a00:1", 8080)
    assert table.chains == want.table().chains
    target.close()


def test_the_listed_text_means_the_same(target, namespace):
    want = put(target, whole())
    listed = run(["nft", "list", "ruleset"], namespace=namespace)
    assert parse_ruleset(listed).tables == (want.table(),)


@pytest.mark.parametrize("make", [whole, six], ids=["IPv4", "IPv6"])
def test_nft_reads_what_nft_lists(make, namespace):
    the_plan = make()
    target = NftablesTarget(the_plan.family, namespace)
    target.apply(BACKEND.diff(None, BACKEND.render(the_plan)))
    target.close()
    listed = run(["nft", "list", "ruleset"], namespace=namespace)
    assert "dnat" in listed
    empty = f"{namespace}-e"
    create_namespace(empty)
    try:
        run(["nft", "-c", "-f", "-"], stdin=listed, namespace=empty)
        run(["nft", "-f", "-"], stdin=listed, namespace=empty)
        assert run(["nft", "list", "ruleset"], namespace=empty) == listed
    finally:
        delete_namespace(empty)


def test_nft_reads_what_we_print(namespace):
    text = BACKEND.text(BACKEND.render(whole()))
    run(["nft", "-f", "-"], stdin=text, namespace=namespace)
    target = NftablesTarget(FAMILY, namespace)
    assert target.read() == BACKEND.render(whole())
    target.close()


def test_a_count_that_is_new_gets_its_rule_later(target):
    """nft 1.0.6 refuses such a rule as text once the map stands in the kernel."""
    web = service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(1, 2))
    more = service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(1, 2, 3))
    rules = put(target, plan(web), after(plan(web), more))
    assert {"services-of-2", "services-of-3"} <= set(rules.table().sets)
    assert len(rules.table().chains["send-c"].rules) == 2


def test_turns_of_many_kinds(target):
    first = whole()
    here = service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10, 11, 12, local=(10,)))
    fewer = service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(12))
    sticky = service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(12, 13, 14), affinity=60)
    longer = service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(12, 14), affinity=90)
    plans = [first]
    for one in (here, fewer, sticky, longer, fewer):
        plans.append(after(plans[-1], one))
    plans.append(after(plans[-1], removed=(port_name("web"), port_name("sticky"))))
    put(target, *plans)


def test_settings_change_in_place(target):
    first = whole()
    other = msgspec.structs.replace(
        first,
        masquerade_mark=0x8000,
        pods=PodDetector(interface_prefix="veth"),
        service_cidrs=("10.96.0.0/16", "10.118.4.0/24"),
        node_ports=msgspec.structs.replace(first.node_ports, cidrs=None),
    )
    rules = BACKEND.render(first)
    assert not BACKEND.advance(rules, other)[1].replace
    put(target, first, other, first)


def test_a_new_process_finds_its_rules(target, namespace):
    """Behaviour row 21.16: what is right stays."""
    put(target, whole())
    again = NftablesTarget(FAMILY, namespace)
    assert not BACKEND.diff(again.read(), BACKEND.render(whole()))
    again.close()


def test_it_knows_whether_somebody_else_wrote(target, namespace):
    """After a first load, changes in one transaction and in several, and a read."""
    assert not target.unchanged()
    assert target.read() is None
    assert target.unchanged()
    first = whole()
    more = service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(1, 2, 3, 4, 5, 6, 7))
    sticky = service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(12, 13, 14), affinity=60)
    have = None
    for one in (first, after(first, more), after(first, sticky), first):
        want, changes = BACKEND.advance(have, one)
        target.apply(changes)
        have = want
        assert target.unchanged()
    run(["nft", "add", "table", "ip", "stranger"], namespace=namespace)
    assert not target.unchanged()
    assert target.read() == have
    assert target.unchanged()
    run(["nft", "delete", "chain", "ip", "narthex", "nat-output"], namespace=namespace)
    target.apply(BACKEND.advance(have, after(first, more))[1])
    assert not target.unchanged()


def test_what_somebody_broke_is_mended(target, namespace):
    want = put(target, whole())
    run(["nft", "flush", "chain", "ip", "narthex", "services"], namespace=namespace)
    run(["nft", "flush", "map", "ip", "narthex", "endpoints"], namespace=namespace)
    run(["nft", "delete", "chain", "ip", "narthex", "nat-output"], namespace=namespace)
    run(["nft", "add", "chain", "ip", "narthex", "stranger"], namespace=namespace)
    changes = BACKEND.diff(target.read(), want)
    assert not changes.replace
    target.apply(changes)
    assert target.read() == want


DAMAGES = {
    "flush chain ip narthex nat-prerouting": frozenset(),
    "flush chain ip narthex services": frozenset(),
    "add chain ip narthex foo; add rule ip narthex foo accept": frozenset(),
    "insert rule ip narthex services drop": frozenset(),
    "flush map ip narthex services": frozenset(("services",)),
    "delete element ip narthex cluster-ips { 10.96.0.9 }": frozenset(("cluster-ips",)),
    "flush chain ip narthex services; flush map ip narthex endpoints": frozenset(("endpoints",)),
}


@pytest.mark.parametrize("text", DAMAGES)
def test_damage_is_mended_without_reading_the_other_sets(target, namespace, text, monkeypatch):
    want, read = put(target, whole()), []
    monkeypatch.setattr(target, "read", lambda: read.append("everything"))
    monkeypatch.setattr(target, "_dump", lambda one: (read.append(one.name), DUMP(target, one))[1])
    for turn in (1, 2):
        run(["nft", text], namespace=namespace)
        changes = target.damage(want, {TouchedPart("narthex", set=name) for name in DAMAGES[text]})
        assert changes
        target.apply(changes)
        assert read == sorted(DAMAGES[text]) * turn
        assert target.unchanged()
        assert target.damage(want, frozenset()) == NftChanges(family=IPFamily.IPV4, table="narthex")
        assert NftablesTarget(IPFamily.IPV4, namespace).read() == want


@pytest.mark.parametrize("text", ["flush ruleset", "add table ip narthex { flags dormant; }"])
def test_other_damage_needs_a_complete_read(target, namespace, text):
    want = put(target, whole())
    run(["nft", text], namespace=namespace)
    assert target.damage(want, frozenset()) is None


def test_harmless_changes_next_to_our_table_are_no_damage(target, namespace):
    want = put(target, whole())
    run(["nft", "add table ip other; add chain ip other c"], namespace=namespace)
    assert not target.unchanged()
    changes = target.damage(want, frozenset())
    assert changes is not None and not changes
    assert target.unchanged()


def test_thousands_of_elements_are_one_batch(target):
    """An attribute holds 64 KiB, so the batch has many messages."""
    ends = tuple(Endpoint(f"10.64.{number >> 8}.{number & 255}", 8080, number % 2 == 0) for number in range(4000))
    rules = put(target, plan(service("web", frontend("10.96.0.1", 80, INTERNAL), cluster=Pool(endpoints=ends))))
    assert len(rules.table().sets["endpoints"].elements) == 4000


def by_hand(rules, **elements):
    declarations = {name: msgspec.structs.replace(rules.table().sets[name], elements={}) for name in ("services",)}
    return NftChanges(family=FAMILY, table="narthex", declarations=declarations, **elements)


@pytest.mark.row("21.14")
def test_a_refused_element_is_named_and_nothing_is_done(target):
    rules = put(target, whole())
    good, bad = ("10.96.7.1", "tcp", 80), ("10.96.7.2", "tcp", 80)
    changes = by_hand(
        rules, additions={"services": {good: Return(), bad: Goto("nowhere"), ("10.96.7.3", "tcp", 80): Return()}}
    )
    with pytest.raises(ApplyError, match=r"add the element 10\.96\.7\.2 \. tcp \. 80 : goto nowhere .* set services"):
        target.apply(changes)
    assert target.read() == rules
    changes = by_hand(rules, additions={"services": {good: Return()}}, deletions={"services": {bad: Return()}})
    with pytest.raises(ApplyError, match=r"delete the element 10\.96\.7\.2 .* No such file"):
        target.apply(changes)
    assert target.read() == rules


def test_an_element_that_does_not_fit_is_refused_before_anything_is_sent(target):
    rules = put(target, whole())
    with pytest.raises(ApplyError, match="does not fit"):
        target.apply(by_hand(rules, additions={"services": {("fd00::1", "tcp", 80): Return()}}))
    assert target.read() == rules


def test_changes_for_a_table_that_is_gone_fail(target, namespace):
    have = put(target, whole())
    want, changes = BACKEND.advance(
        have, after(whole(), service("new", frontend("10.96.0.7", 80, INTERNAL), cluster=pool(1, 2, 3)))
    )
    run(["nft", "flush", "ruleset"], namespace=namespace)
    with pytest.raises(ApplyError):
        target.apply(changes)
    assert target.read() is None
    target.apply(BACKEND.diff(None, want))
    assert target.read() == want


def test_a_table_of_the_same_name_that_is_not_ours_is_replaced(target, namespace):
    run(
        ["nft", "-f", "-"],
        stdin="table ip narthex { set services { type ipv4_addr; elements = { 1.2.3.4 }; }; chain x { drop; }; }\n",
        namespace=namespace,
    )
    want = BACKEND.render(whole())
    target.apply(BACKEND.diff(target.read(), want))
    assert target.read() == want


def test_counters_count_new_connections(target, namespace):
    web = service(
        "web", frontend("127.0.0.9", 80, (CLUSTER,) * 3), cluster=Pool(endpoints=(Endpoint("127.0.0.1", 7, False),))
    )
    rules = put(target, plan(web))
    key = ("127.0.0.9", "tcp", 80)
    assert counts(target, rules)["services"] == {key: 0}
    for _ in range(3):
        knock(namespace, "127.0.0.9", 80)
    counted = counts(target, rules)
    assert counted["services"] == {key: 3}
    assert counted["endpoints"] == {(*key, 0): 3}
    assert "cluster-ips" not in counted


def counts(target, rules):
    found = {}
    for name, key, _, connections in target.read_counters(rules.table().sets):
        found.setdefault(name, {})[key] = connections
    return found


def knock(namespace, address, port):
    """One attempt to connect; nobody answers."""
    with in_namespace(namespace), socket.socket() as sock:
        sock.settimeout(2)
        sock.connect_ex((address, port))


def test_clients_of_an_endpoint_that_left_are_forgotten(target, namespace):
    def sticky(*addresses):
        ends = tuple(Endpoint(address, 7) for address in addresses)
        return service("web", frontend("127.0.0.9", 80, (CLUSTER,) * 3), cluster=Pool(endpoints=ends), affinity=3600)

    first = plan(sticky("127.0.0.1", "127.0.0.2"))
    have = put(target, first)
    knock(namespace, "127.0.0.9", 80)
    listed = run(["nft", "list", "ruleset"], namespace=namespace)
    assert listed.count("expires") == 1
    for kept in ("127.0.0.1", "127.0.0.2"):
        want, _ = BACKEND.advance(have, after(first, sticky(kept)))
        target.apply(BACKEND.diff(target.read(), want))
        assert target.read() == want
        have = want
    assert "expires" not in run(["nft", "list", "ruleset"], namespace=namespace)


def test_nft_errors_are_told_in_its_own_words(namespace):
    with pytest.raises(NftError, match="syntax error"):
        run_nft("table table table", namespace)
    with pytest.raises(ValueError, match="NUL"):
        run_nft("list\0ruleset", namespace)
    with pytest.raises(FileNotFoundError):
        run_nft("list ruleset", f"{namespace}-missing")


@pytest.mark.row("23.2")
def test_other_tables_stay_as_they_are(target, namespace):
    """Also one of kube-proxy's name, and our name in another family: those are not this Target's."""
    run(
        ["nft", "-f", "-"],
        stdin="table ip kube-proxy { chain services { }; }\ntable inet narthex { chain services { counter; }; }\n"
        "table ip other { set s { type ipv4_addr; elements = { 1.2.3.4 }; }; "
        "chain c { type filter hook forward priority 0; ip daddr @s drop; }; }\n",
        namespace=namespace,
    )
    before = run(["nft", "list", "ruleset"], namespace=namespace)
    put(target, whole(), plan())
    assert len(run(["nft", "list", "tables"], namespace=namespace).splitlines()) == 4
    target.clean()
    assert run(["nft", "list", "ruleset"], namespace=namespace) == before


@pytest.mark.row("23.10")
def test_only_our_own_table_is_asked_of_nft(target, monkeypatch):
    """What others have written, perhaps with a newer nft, cannot keep us from reading ours."""
    put(target, whole())
    asked = []

    def note(text, *more, **others):
        asked.append(text)
        return run_nft(text, *more, **others)

    monkeypatch.setattr("narthex.proxy.kernel.nftables.run_nft", note)
    assert target.read() is not None
    assert asked
    for text in asked:
        assert re.fullmatch(r"list (table|set) ip narthex( [a-z0-9-]+)?", text)


@pytest.mark.row("23.9")
def test_the_longest_names_load(target):
    """63 letters each are what Kubernetes allows a namespace and a Service, 15 a port's name."""
    name = ServicePortName(NamespacedName("n" * 63, "s" * 63), "p" * 15, Protocol.TCP)
    named = [
        msgspec.structs.replace(each, name=name)
        for each in whole().services.values()
        if each.affinity_seconds is not None
    ]
    put(target, plan(*named))
