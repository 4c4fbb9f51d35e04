"""Servers that lack features, and objects that cannot be used."""

import msgspec
import pytest
from tests.kube.watch.steps import LOST, cidr, failure, line, listing, page, watching

from narthex.kube.messages import DeadlineReached, ResponseOpened
from narthex.kube.resources import SERVICES, own_node
from narthex.model.decode.objects import _KINDS
from narthex.model.problem import MAX_PROBLEMS
from narthex.model.store import Upsert

# What servers lack


def test_an_older_version_of_the_api_is_asked_next():
    table = listing()
    table(failure(404))
    assert table.asked.path == "/apis/networking.k8s.io/v1beta1/servicecidrs"
    table(ResponseOpened(), page(5))
    assert table.asked.path == "/apis/networking.k8s.io/v1beta1/servicecidrs"


@pytest.mark.parametrize("code", [404, 403])
def test_what_need_not_be_there_counts_as_empty(code):
    table = listing()
    table(failure(code), *([failure(404)] if code == 404 else []))
    assert table.watch.synced and table.asked is None
    assert (table.watch.trouble is None) is (code == 404)
    table(DeadlineReached(), after=table.delay)
    assert table.asked.path == "/apis/networking.k8s.io/v1/servicecidrs"


def test_what_was_there_is_not_given_up_for_a_404():
    table = watching(5, cidr("a"))
    table(LOST)
    table(DeadlineReached(), after=1.0)
    table(failure(404), failure(404))
    assert list(table.held) == ["a"]


def test_what_must_be_there_is_waited_for():
    table = listing(resource=SERVICES)
    table(failure(404))
    assert not table.watch.synced


def test_a_server_that_cannot_select_by_cluster_ip_is_asked_without():
    table = listing(resource=SERVICES)
    table(failure(400, message="field label not supported: spec.clusterIP"))
    assert "fieldSelector" not in table.query
    table(failure(400))
    assert table.asked is None, "a second 400 is another matter"


def test_the_nodes_name_is_never_left_out():
    table = listing(resource=own_node("worker-a"))
    table(failure(400))
    table(DeadlineReached(), after=1.0)
    assert table.query["fieldSelector"] == "metadata.name=worker-a"


# Objects that cannot be used


def test_a_broken_object_is_reported_and_the_others_are_used():
    table = listing()
    table(ResponseOpened(), page(5, cidr("a"), cidr("bad", cidrs=["nonsense"]), {"metadata": "x"}, cidr("c")))
    assert list(table.held) == ["a", "c"]
    problems = table.watch.cache.problems
    assert any(each.object == "ServiceCIDR bad" and each.field == "spec.cidrs[0]" for each in problems)
    assert table.watch.cache.broken == 2


def test_an_object_that_the_decoder_breaks_on_is_reported_and_the_others_are_used(monkeypatch):
    kind = _KINDS["ServiceCIDR"]

    def make(raw, report):
        if raw.metadata.name == "cursed":
            raise ZeroDivisionError("division by zero")
        return kind.make(raw, report)

    monkeypatch.setitem(_KINDS, "ServiceCIDR", msgspec.structs.replace(kind, make=make))
    table = watching(5, cidr("a"), cidr("cursed"), cidr("c"))
    assert list(table.held) == ["a", "c"]
    (problem,) = table.watch.cache.problems
    assert problem.object == "ServiceCIDR cursed" and "ZeroDivisionError" in problem.message
    table(line("ADDED", cidr("cursed", 6)), line("ADDED", cidr("d", 7)))
    assert list(table.held) == ["a", "c", "d"]
    table(line("DELETED", cidr("cursed", 8)))
    assert table.watch.cache.problems == ()


def test_an_object_that_breaks_is_gone_until_it_is_mended():
    table = watching(5, cidr("a"))
    table(line("MODIFIED", cidr("a", 6, ["nonsense"])))
    assert list(table.held) == ["a", "-a"]
    assert len(table.watch.cache.problems) == 1
    table(line("MODIFIED", cidr("a", 7)))
    assert isinstance(table.events[-1], Upsert)
    assert table.watch.cache.problems == ()


def test_a_broken_object_that_is_deleted_is_no_problem_any_more():
    table = watching(5, cidr("bad", cidrs=["nonsense"]))
    assert table.watch.cache.problems
    table(line("DELETED", cidr("bad", 6, cidrs=["nonsense"])))
    assert table.watch.cache.problems == ()


def test_a_deleted_object_without_a_name_is_garbled():
    table = watching(5, cidr("a"))
    table(line("DELETED", {"metadata": {"resourceVersion": "6"}}))
    assert table.watch.counts.failures == {"garbled": 1}


def test_problems_of_many_objects_are_limited_and_counted():
    """Their number costs nothing when they are asked for, which happens with each change."""
    bad = [cidr(f"n{number}") | {"spec": {"cidrs": ["x"]}} for number in range(MAX_PROBLEMS + 50)]
    table = watching(41, cidr("good"), *bad)
    cache = table.watch.cache
    assert cache.broken == MAX_PROBLEMS + 50
    assert len(cache.problems) == MAX_PROBLEMS + 1
    assert cache.problems[-1].message == "50 more problems are not listed"
    bad[0]["metadata"]["resourceVersion"] = "42"
    table(line("DELETED", bad[0]), line("MODIFIED", cidr("n1", 42)))
    assert cache.broken == MAX_PROBLEMS + 48
    table(line("MODIFIED", bad[1] | {"metadata": {"name": "n1", "resourceVersion": "43"}}))
    assert cache.broken == MAX_PROBLEMS + 49
