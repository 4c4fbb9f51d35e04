"""The source against a server that speaks real HTTP, and breaks it."""

import gc
import random
import time

import pytest
from tests.kube.following import LIMIT, QUICK, UNPACED, Following, following

from narthex.kube.access import Access
from narthex.kube.client import Unreachable
from narthex.kube.messages import LinesReceived
from narthex.kube.resources import of_a_cluster, of_a_proxy
from narthex.kube.snapshot import read_once
from narthex.kube.source import KubeSource
from narthex.kube.watch import Watch
from narthex.lab.api.reads import ServerFeatures
from narthex.model import Upsert
from narthex.testing.apiserver import DropConnection, FaultyApiServer, Garble, Refuse, Silence
from narthex.testing.build import NODE, endpoint, endpoint_slice, node, service

SERVICES = "/api/v1/services"
BOTH = pytest.mark.parametrize("streaming", [True, False])


def slice_of(name, *ips):
    owner = (("kubernetes.io/service-name", name.partition("/")[2]),)
    return endpoint_slice(name, *(endpoint(ip) for ip in ips), labels=owner)


@pytest.fixture
def server():
    with FaultyApiServer() as server:
        server.put(node(), node("another"), service("shop/web", "10.110.0.1"), slice_of("shop/web", "10.64.1.1"))
        yield server


@BOTH
def test_lists_come_as_one_batch_and_changes_follow(server, streaming):
    with following(server.url, streaming=streaming) as it:
        it.wait(lambda: it.synced)
        shot = it.store.snapshot
        assert len(it.batches) == 1 and shot.synced
        assert it.services == ["shop/web"]
        assert [key.name for key in shot.nodes] == [NODE], "only the own Node is asked for"
        server.put(service("shop/api", "10.110.0.2"), slice_of("shop/api", "10.64.1.2"))
        it.wait(lambda: len(it.store.snapshot.slices) == 2 and len(it.services) == 2)
        server.delete(service("shop/web"))
        it.wait(lambda: it.services == ["shop/api"])
    assert it.source.problems == ()


@BOTH
def test_what_was_reported_is_not_kept_as_well(server, streaming):
    def kept():
        """Events that live on after their receiver has taken them, by the names of their objects."""
        found = gc.get_objects()
        return {each.object.name for each in found if isinstance(each, Upsert) and each.object.name.startswith("kept-")}

    server.put(*(service(f"shop/kept-{number}", f"10.110.1.{number}") for number in range(1, 100)))
    with following(server.url, streaming=streaming) as it:
        it.wait(lambda: it.synced)
        it.batches.clear()
        it.wait(lambda: len(kept()) <= 1)


@pytest.mark.row("1.3")
def test_a_label_takes_a_service_away_and_gives_it_back(server):
    with following(server.url) as it:
        it.wait(lambda: it.synced)
        foreign = (("service.kubernetes.io/service-proxy-name", ""),)
        server.put(service("shop/web", "10.110.0.1", labels=foreign))
        it.wait(lambda: it.services == [])
        server.put(service("shop/web", "10.110.0.1"))
        it.wait(lambda: it.services == ["shop/web"])


@pytest.mark.row("1.15")
@pytest.mark.parametrize("path", ["/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices", "/api/v1/nodes"])
def test_nothing_is_told_before_all_lists_are_there(server, path):
    server.faults = lambda seen: Refuse(500) if seen.path == path else None
    with following(server.url) as it:
        it.wait(lambda: any(path in str(problem) for problem in it.source.problems))
        it.wait(lambda: sum(each.synced for each in it.source.followed) == 3)
        assert not it.store.snapshot.synced
        server.faults = lambda _: None
        it.wait(lambda: it.synced)
        it.wait(lambda: it.source.problems == ())


def test_an_outage_changes_nothing_and_is_reported(server):
    with following(server.url) as it:
        it.wait(lambda: it.synced)
        before = it.store.snapshot
        server.stop()
        it.wait(lambda: len(it.source.problems) == 4)
        told = it.source.problems
        it.wait(lambda: all(sum(each.counts.failures.values()) > 10 for each in it.source.followed))
        assert it.store.snapshot is before
        assert it.source.problems == told, "the same outage is one problem for each list"
        assert all("what is known stays in force" in str(problem) for problem in told)
        server.do(
            lambda data: data.put(
                "Service", {"metadata": {"name": "new", "namespace": "shop"}, "spec": {"ports": [{"port": 80}]}}
            )
        )
        server.start()
        it.wait(lambda: it.services == ["shop/new", "shop/web"])
        it.wait(lambda: it.source.problems == ())


def test_a_server_comes_back_with_older_data(server):
    backup = server.do(lambda data: data.backup())
    with following(server.url, times=QUICK) as it:
        it.wait(lambda: it.synced)
        server.put(service("shop/late", "10.110.0.9"))
        it.wait(lambda: "shop/late" in it.services)
        server.stop()
        server.go_back(backup)
        server.start()
        it.wait(lambda: it.services == ["shop/web"])


def test_a_broken_object_is_named_and_the_others_are_used(server):
    server.put_raw("Service", {"metadata": {"name": "bad", "namespace": "shop"}, "spec": "x"})
    server.put_raw("EndpointSlice", {"metadata": {"name": "worse", "namespace": "shop"}, "endpoints": []})
    with following(server.url) as it:
        it.wait(lambda: it.synced)
        assert it.services == ["shop/web"]
        assert {problem.object for problem in it.source.problems} == {"Service shop/bad", "EndpointSlice shop/worse"}
        assert [each.broken for each in it.source.followed] == [1, 1, 0, 0]
        server.put(service("shop/bad", "10.110.0.7"))
        it.wait(lambda: "shop/bad" in it.services)
        assert [problem.object for problem in it.source.problems] == ["EndpointSlice shop/worse"]


@BOTH
def test_a_connection_may_drop_at_any_byte(streaming):
    with FaultyApiServer() as server:
        server.put(node(), service("shop/web", "10.110.0.1"), slice_of("shop/web", "10.64.1.1"))
        for after in range(0, 1000, 37):
            struck = []

            def once(seen, after=after, struck=struck):
                key = seen.path, "watch" in seen.query and "sendInitialEvents" not in seen.query
                if key in struck:
                    return None
                struck.append(key)
                return DropConnection(after)

            server.faults = once
            with following(server.url, streaming=streaming, gather=0.0) as it:
                it.wait(lambda: it.synced)
                name = f"shop/after-{after}"
                server.put(service(name, "10.110.1.1"))
                it.wait(lambda name=name: name in it.services, name)
                server.delete(service(name))
                it.wait(lambda: it.services == ["shop/web"])


def test_retry_after_is_kept_to(server):
    times = []

    def busy(seen):
        if seen.path != SERVICES:
            return None
        times.append(time.monotonic())
        return Refuse(429, 1) if len(times) == 1 else None

    server.faults = busy
    with following(server.url, streaming=False) as it:
        it.wait(lambda: it.synced)
    assert times[1] - times[0] >= 1.0


def test_a_half_closed_stream_is_noticed(server):
    with following(server.url, times=QUICK) as it:
        it.wait(lambda: it.synced)
        server.freeze()
        server.put(service("shop/unheard", "10.110.0.8"))
        it.wait(lambda: "shop/unheard" in it.services)
        assert any("silent" in each.counts.failures for each in it.source.followed)


def test_a_list_that_never_comes_is_given_up(server):
    silent = [Silence(40)] * 8
    server.faults = lambda _: silent.pop() if silent else None
    with following(server.url, times=QUICK) as it:
        it.wait(lambda: it.synced)


def test_old_servers_are_understood():
    old = ServerFeatures(streaming=False, service_cidrs=(), service_fields=False, bookmarks=False)
    with FaultyApiServer(old) as server:
        server.put(node(), service("shop/web", "10.110.0.1"), service("shop/headless", "None"))
        with following(server.url) as it:
            it.wait(lambda: it.synced)
            assert it.services == ["shop/headless", "shop/web"]
            assert it.source.problems == ()
            server.put(service("shop/api", "10.110.0.2"))
            it.wait(lambda: "shop/api" in it.services)


def test_long_lists_come_in_pages():
    with FaultyApiServer(ServerFeatures(cached_lists=False)) as server:
        for number in range(1203):
            server.put(service(f"shop/s{number}", f"10.110.{number >> 8}.{number & 255}"))
        with following(server.url, streaming=False) as it:
            it.wait(lambda: it.synced)
            assert len(it.services) == 1203
        assert sum(seen.path == SERVICES and "limit" in seen.query for seen in server.requests) == 3


def test_a_burst_is_few_batches(server):
    with following(server.url) as it:
        it.wait(lambda: it.synced)
        start, before = time.monotonic(), len(it.batches)
        for turn in range(1000):
            server.put(slice_of("shop/web", f"10.64.{turn >> 8}.{turn & 255 or 1}"))
        last = "10.64.3.231"
        it.wait(
            lambda: any(
                last == end.address
                for each in it.store.snapshot.slices.values()
                for one in each.values()
                for end in one.endpoints
            )
        )
        seconds = time.monotonic() - start
        assert len(it.batches) - before <= 2 + seconds / 0.1


def test_what_is_known_of_the_lists(server):
    with following(server.url) as it:
        it.wait(lambda: it.synced)
        services = it.source.followed[0]
        assert (services.kind, services.objects, services.counts.lists) == ("Service", 1, 1)
        assert services.last_event is None and abs(services.last_list - time.time()) < 60
        server.put(service("shop/api", "10.110.0.2"))
        it.wait(lambda: services.last_event is not None)
        assert services.counts.events == 1 and services.objects == 2
        assert services.last_heard >= services.last_event


def test_the_token_is_asked_for():
    with FaultyApiServer(token="secret") as server, following(server.url) as it:
        it.wait(lambda: any("401" in str(problem) for problem in it.source.problems))
        assert not it.synced


def test_one_look(server):
    server.put_raw("Service", {"metadata": {"name": "bad", "namespace": "shop"}})
    events, problems = read_once(Access(master=server.url, connection=UNPACED), of_a_cluster(pods=True))
    assert len(events) == 4
    assert {problem.object for problem in problems} == {"Service shop/bad"}


def test_one_look_at_nobody():
    with FaultyApiServer() as server:
        url = server.url
    with pytest.raises(Unreachable, match=url):
        read_once(Access(master=url, connection=UNPACED), of_a_proxy(NODE))


def trouble(dice):
    """A fault of an answer, or none."""
    what = dice.random()
    if what < 0.65:
        return None
    if what < 0.8:
        return DropConnection(int(dice.expovariate(1 / 400)))
    if what < 0.9:
        return Refuse(dice.choice((410, 429, 500, 503, 504)))
    return Garble(int(dice.expovariate(1 / 300))) if what < 0.96 else Silence(int(dice.expovariate(1 / 400)))


@pytest.mark.parametrize("seed", range(24))
def test_random_sequences_end_as_a_fresh_list(seed):
    dice = random.Random(seed)
    abilities = ServerFeatures(streaming=dice.random() < 0.5, cached_lists=dice.random() < 0.5)
    with FaultyApiServer(abilities, bookmark_seconds=0.1) as server:
        server.faults = lambda _: trouble(dice)
        backups = [server.do(lambda data: data.backup())]
        with following(server.url, times=QUICK, gather=0.005, streaming=dice.random() < 0.6) as it:
            for _ in range(25):
                what, name = dice.random(), f"shop/s{dice.randrange(5)}"
                if what < 0.35:
                    server.put(service(name, f"10.110.0.{dice.randrange(1, 9)}"))
                elif what < 0.65:
                    server.put(slice_of(name, *(f"10.64.1.{dice.randrange(1, 99)}" for _ in range(dice.randrange(4)))))
                elif what < 0.75:
                    server.delete(service(name))
                elif what < 0.8:
                    server.put(node(zone=dice.choice("ab")))
                elif what < 0.85:
                    server.do(lambda data: data.compact())
                elif what < 0.9:
                    server.drop()
                elif what < 0.93:
                    server.freeze()
                elif what < 0.96:
                    backups.append(server.do(lambda data: data.backup()))
                else:
                    server.stop()
                    server.go_back(dice.choice(backups).backup())
                    server.start()
                time.sleep(dice.random() * 0.02)
            server.faults = lambda _: None
            fresh = read_once(Access(master=server.url, connection=UNPACED), of_a_proxy(NODE))[0]
            want = sorted(repr(event.object) for event in fresh)

            def same():
                shot = it.store.snapshot
                held = [*shot.services.values(), *shot.nodes.values(), *shot.service_cidrs.values()]
                held += [one for each in shot.slices.values() for one in each.values()]
                return shot.synced and sorted(map(repr, held)) == want

            it.wait(same)
            it.wait(lambda: it.source.problems == ())


def test_it_can_be_followed_again_after_a_fault_of_ours(server, monkeypatch):
    source = KubeSource(Access(master=server.url, connection=UNPACED), of_a_proxy(NODE), gather=0.0)
    first = Following(source).start()
    first.wait(lambda: first.synced)
    take = Watch.take

    def broken(watch, input, now):
        if isinstance(input, LinesReceived) and b"cursed" in input.data:
            raise ZeroDivisionError
        return take(watch, input, now)

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "take", broken)
        server.put(service("shop/api", "10.110.0.2"), service("shop/cursed", "10.110.0.3"))
        end = time.monotonic() + LIMIT
        while first.error is None:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert isinstance(first.error, ZeroDivisionError)
    again = Following(source)
    again.store = first.store
    again.start()
    again.wait(lambda: again.services == ["shop/api", "shop/cursed", "shop/web"])
    again.stop()
