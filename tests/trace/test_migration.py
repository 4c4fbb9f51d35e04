"""Many changes, said once."""

import msgspec
import pytest

from narthex.model.net import IPFamily
from narthex.model.packet import Packet
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.base import Trait
from narthex.proxy.plan.ir import Sender
from narthex.testing.build import endpoint, endpoint_slice, plan, service
from narthex.trace.reports.migration.changes import PathChange
from narthex.trace.reports.migration.report import (
    MigrationReport,
    NodeChange,
    TraitDifference,
    differences,
    grouped,
    migration_document,
    text,
)

PACKET = Packet(source="198.51.100.7", destination="10.110.0.5", port=80)


def found(name="shop/a:http", sender=Sender.POD, node="worker-a", family=IPFamily.IPV4, **fields):
    fields = {"arrival": "cluster IP", "before": "refused", "after": "left alone", "reasons": ("since",)} | fields
    return NodeChange(
        node=node, family=family, change=PathChange(service=name, sender=sender, example=PACKET, **fields)
    )


def report(groups=(), differences=(), services=("shop/a:http", "shop/b:http")):
    return MigrationReport(
        before="one", after="other", nodes=("worker-a",), services=services, groups=groups, differences=differences
    )


def test_services_with_the_same_change_are_one_group():
    (group,) = grouped([found("shop/b:http"), found("shop/a:http")])
    assert group.services == ("shop/a:http", "shop/b:http")


def test_senders_families_ways_in_and_nodes_are_put_together():
    groups = grouped(
        found(sender=sender, node=node, family=family, arrival=arrival)
        for node in ("worker-a", "worker-b")
        for family in IPFamily
        for arrival in ("cluster IP", "external IP")
        for sender in (Sender.OTHER, Sender.POD)
    )
    (group,) = groups
    assert group.senders == ("pods", "others")
    assert group.families == ("IPv4", "IPv6")
    assert group.arrivals == ("cluster IP", "external IP")
    assert group.nodes == ("worker-a", "worker-b")


def test_what_holds_for_any_source_is_not_told_of_special_ones():
    (group,) = grouped([found(source="itself an endpoint, on this node"), found()])
    assert group.sources == ("",)


def test_the_order_in_which_changes_are_found_does_not_matter():
    changes = [
        found(source=source, node=node)
        for node, sources in (("worker-a", ("this", "that")), ("worker-b", ("that", "this")))
        for source in sources
    ]
    (group,) = grouped(changes)
    assert (group.sources, group.nodes) == (("that", "this"), ("worker-a", "worker-b"))
    assert grouped(changes[::-1]) == (group,)


@pytest.mark.parametrize("differ", [{"after": "dropped silently"}, {"reasons": ("because",)}])
def test_what_differs_stays_apart(differ):
    assert len(grouped([found(), found("shop/b:http", **differ)])) == 2


def test_changes_of_many_services_come_first():
    groups = grouped([found("shop/z:http", before="dropped silently"), found("shop/a:http"), found("shop/b:http")])
    assert [len(group.services) for group in groups] == [2, 1]


def test_nothing_is_printed_when_nothing_changes():
    assert not report()
    assert text(report()) == ""


def test_text():
    assert text(report(grouped([found()]))).splitlines() == [
        "from one to other, on worker-a: 2 Service ports",
        "",
        "Packets:",
        "",
        "  cluster IP; from pods",
        "    before: refused",
        "    after:  left alone",
        "    why:    since",
        "    for:    shop/a:http",
        "    as in:  TCP 198.51.100.7 -> 10.110.0.5:80, IPv4",
    ]


def test_long_lists_are_cut_and_can_be_had_whole():
    names = tuple(f"shop/s{number}:http" for number in range(6))
    changes = report(grouped(map(found, names[:5])), services=names)
    assert "    for:    shop/s0:http, shop/s1:http, shop/s2:http, shop/s3:http and 1 more\n" in text(changes)
    assert "    for:    shop/s0:http, shop/s1:http, shop/s2:http, shop/s3:http, shop/s4:http\n" in text(changes, True)
    everything = report(grouped(map(found, names)), services=names)
    assert "    for:    all 6 Service ports\n" in text(everything)


def test_strange_names_cannot_move_the_terminals_cursor():
    said = text(report(grouped([found("shop/\x1b[2Jevil\u202e:http")])))
    assert "\x1b" not in said
    assert "\u202e" not in said


def test_only_services_that_a_trait_concerns_are_named():
    the_plan = plan(
        service("shop/sticky", "10.110.0.5", affinity_seconds=60),
        endpoint_slice("shop/sticky", endpoint("10.64.1.10"), endpoint("10.64.1.11")),
        service("shop/single", "10.110.0.6"),
        endpoint_slice("shop/single", endpoint("10.64.1.10")),
        service("shop/empty", "10.110.0.7"),
    )
    before = dict.fromkeys(Trait, "so")
    after = before | dict.fromkeys((Trait.AFFINITY, Trait.CHOICE, Trait.RESTART, Trait.NEEDS), "otherwise")
    assert {each.what: each.services for each in differences(before, after, [the_plan])} == {
        Trait.CHOICE.words: ("shop/sticky:http",),
        Trait.AFFINITY.words: ("shop/sticky:http",),
        Trait.RESTART.words: ("shop/single:http", "shop/sticky:http"),
        Trait.NEEDS.words: ("shop/empty:http", "shop/single:http", "shop/sticky:http"),
    }
    assert differences(before, before, [the_plan]) == ()


@pytest.mark.parametrize("mode", BACKENDS)
def test_every_backend_answers_every_question(mode):
    traits = BACKENDS[mode].traits
    assert set(traits) == set(Trait)
    assert all(traits.values())


def test_data_holds_everything():
    names = tuple(f"shop/s{number}:http" for number in range(9))
    difference = TraitDifference(what="it", before="so", after="otherwise", services=names)
    data = msgspec.json.decode(
        msgspec.json.encode(migration_document(report(grouped(map(found, names)), (difference,), names)))
    )
    assert data["servicePorts"] == 9
    (change,) = data["changes"]
    assert change["services"] == list(names)
    assert (change["sources"], change["senders"], change["reasons"]) == ([], ["pods"], ["since"])
    assert change["example"] == {
        "from": "198.51.100.7",
        "to": "10.110.0.5",
        "port": 80,
        "protocol": "TCP",
        "interface": "",
    }
    assert data["differences"][0]["services"] == list(names)
