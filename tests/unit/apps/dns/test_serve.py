"""The server's own process: who takes events in, and what becomes of faults there."""

import threading

import pytest

from narthex.apps.dns.serve import DnsPart, DnsSettings
from narthex.model.events import Synced, Upsert
from narthex.testing.build import service
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
    part = DnsPart(DnsSettings(blocks=(), workers=1), source)
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
    part = DnsPart(DnsSettings(blocks=(), workers=1), source)
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
