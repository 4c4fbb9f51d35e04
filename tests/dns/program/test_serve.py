"""The server's own process: who takes events in, what becomes of faults there, and how long changes took."""

import threading
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from narthex.dns.program.serve import DnsServer, DnsSettings
from narthex.model.objects import TRIGGER_TIME
from narthex.model.store import Synced, Upsert
from narthex.runtime.metrics import exposition
from narthex.testing.build import endpoint, endpoint_slice, service
from narthex.testing.load import until

PATIENCE = 30.0


class Source:
    """Gives what it is told to, one list after the other, when the test says so."""

    problems = ()

    def __init__(self, *lists):
        self.lists = lists
        self.go_on = threading.Semaphore(0)
        self.thread = None

    def scan(self):
        return []

    def changes(self, stop):
        self.thread = threading.current_thread()
        for events in self.lists:
            while not self.go_on.acquire(timeout=0.05):
                if stop.is_set():
                    return
            yield events
        stop.wait()


def started(part):
    """A thread that runs the part, and where it puts what the run raised."""
    raised = []

    def run():
        try:
            part.run()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_the_thread_that_watches_takes_events_in(monkeypatch):
    source = Source(
        [Upsert(object=service("shop/web", "10.110.0.1")), Synced()], [Upsert(object=service("shop/b", "10.110.0.2"))]
    )
    part = DnsServer(DnsSettings(blocks=(), workers=1), source)
    by = []
    apply = part._store.apply
    monkeypatch.setattr(part._store, "apply", lambda event: (by.append(threading.current_thread()), apply(event))[1])
    thread, raised = started(part)
    try:
        source.go_on.release()
        until(lambda: part.healthy, "the first answers", PATIENCE)
        source.go_on.release()
        until(lambda: len(part._store.snapshot.services) == 2, "the change", PATIENCE)
    finally:
        part.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive() and not raised
    # The first events may have been there before anybody was told of them.
    assert len(by) == 3 and by[2] is source.thread


@pytest.mark.parametrize("before", [[], [[Synced()]]], ids=["at first", "while it answers"])
def test_a_fault_there_ends_the_run(before):
    source = Source(*before, ["no event"])
    part = DnsServer(DnsSettings(blocks=(), workers=1), source)
    thread, raised = started(part)
    try:
        for _ in before:
            source.go_on.release()
            until(lambda: part.healthy, "the first answers", PATIENCE)
        source.go_on.release()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    finally:
        part.stop()
        thread.join(PATIENCE)
    assert [type(error) for error in raised] == [AttributeError]


def changed(text, address, seconds):
    """A slice whose change happened so many seconds from now."""
    when = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
    one = endpoint_slice(text, endpoint(address))
    return msgspec.structs.replace(one, annotations=((TRIGGER_TIME, when),))


@pytest.mark.row("S16")
def test_how_long_each_kind_of_service_waited():
    """Not only headless Services with a selector count. What changed before the start is nobody's delay here, and neither is a
    change that has been counted."""
    kinds = {
        "a": ("cluster_ip", service("shop/a", "10.110.0.1")),
        "b": ("headless_with_selector", service("shop/b", "None", selector=(("app", "b"),))),
        "c": ("headless_without_selector", service("shop/c", "None")),
    }
    known = [Upsert(object=one) for _, one in kinds.values()]
    old = [Upsert(object=changed(f"shop/{name}", "10.64.0.1", -3600)) for name in kinds]
    source = Source([*known, *old, Synced()], news := [], again := [])
    part = DnsServer(DnsSettings(blocks=(), workers=1), source)
    thread, raised = started(part)

    def counted():
        text = exposition(part).decode()
        return {
            kind: f'coredns_kubernetes_dns_programming_duration_seconds_count{{service_kind="{kind}"}} 1.0' in text
            for kind, _ in kinds.values()
        }

    try:
        source.go_on.release()
        until(lambda: part.healthy, "the first answers", PATIENCE)
        assert not any(counted().values())
        news.extend(Upsert(object=changed(f"shop/{name}", "10.64.0.2", 0)) for name in kinds)
        source.go_on.release()
        until(lambda: all(counted().values()), "the times", PATIENCE)
        again.extend(
            Upsert(object=msgspec.structs.replace(event.object, endpoints=(endpoint("10.64.0.3"),))) for event in news
        )
        again.append(Upsert(object=service("shop/last", "10.110.0.9")))
        source.go_on.release()
        until(lambda: len(part._store.snapshot.services) == 4, "what comes behind", PATIENCE)
    finally:
        part.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive() and not raised
    assert all(counted().values())
